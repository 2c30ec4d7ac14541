"""The supervisor and its workers: what becomes of a worker that dies, hangs or crashes at once, and of its counts."""

import asyncio
import errno
import os
import random
import signal
import socket
from collections.abc import Iterator, Mapping

import pytest
import structlog

from narwhal.clock import Clock, RealClock
from narwhal.proxy import accepting, supervisor
from narwhal.proxy.accepting import Acceptor
from narwhal.proxy.line import Start
from narwhal.proxy.metrics import Metrics
from narwhal.proxy.supervisor import Supervisor
from tests.process.harness import Program, Stage, load, until

TEMPLATE = Start(
    id="edge", slot=0, boot=0, controls=["127.0.0.1:1"], fleet="", settings="", address="", log_format="text", tls=[]
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        yield listener


def supervise(listener: socket.socket, clock: Clock | None = None) -> Supervisor:
    return Supervisor(template=TEMPLATE, workers=1, listener=listener, clock=clock or RealClock(), rng=random.Random(1))


def pids(program: Program) -> list[int]:
    return [e["pid"] for e in program.events("worker started")]


@pytest.mark.rule("P6")
async def test_a_worker_that_is_killed_while_it_drains_gets_its_goodbye_from_the_supervisor(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines(tpot_ms=100)
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"])
    await stage.ready(proxy.at["admin"])
    async with load(proxy.at["http"], clients=1, max_tokens=3000) as seen:
        await until(lambda: pids(proxy), "a worker")

        async def busy() -> bool:
            return any(p.resident for p in await stage.proxies(control.at["grpc"]))

        await until(busy, "a leg runs")
        proxy.signal(signal.SIGTERM)

        async def draining() -> bool:
            return "draining" in (await stage.get(proxy.at["http"], "/ready"))[1]

        await until(draining, "it drains")
        os.kill(pids(proxy)[-1], signal.SIGKILL)
        assert await proxy.ended() == 0
        assert pids(proxy) == pids(proxy)[:1]  # nobody takes its place

        async def gone() -> bool:
            return not await stage.proxies(control.at["grpc"])

        await until(gone, "control has heard the goodbye")
        await until(lambda: seen.broken, "the client has seen its connection break")


async def test_the_counts_of_a_worker_that_died_stay(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"])
    await stage.ready(proxy.at["admin"])
    async with load(proxy.at["http"], clients=2) as seen:
        await until(lambda: seen.served >= 20, "load")

    async def requests() -> float:
        _, text = await stage.get(proxy.at["admin"], "/metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("narwhal_requests_t"))

    async def counted(number: int) -> bool:
        """A client may have its answer a moment before the worker has counted it."""
        found = await requests()
        assert found <= number
        return found == number

    await until(lambda: counted(len(seen.statuses)), "every request is counted")
    os.kill(pids(proxy)[0], signal.SIGKILL)
    await until(lambda: len(pids(proxy)) == 2, "another worker")
    await stage.ready(proxy.at["admin"])
    async with load(proxy.at["http"], clients=2) as more:
        await until(lambda: more.served >= 5, "load")
    await until(lambda: counted(len(seen.statuses) + len(more.statuses)), "every request is counted")


@pytest.mark.case("B4")
async def test_the_counts_of_a_dead_worker_do_not_keep_an_engine_alive(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised = supervise(listener)
    past, present = Metrics(), Metrics()
    for engine in ("gone", "stays"):
        past.leg(engine, "decode", "stream_complete")
    present.leg("stays", "decode", "stream_complete")
    living = {"metrics": present.snapshot(), "engines": ["stays"], "fleet": "f", "not_ready": ""}
    monkeypatch.setattr(supervised, "_gone", past.snapshot() | {"gauges": {}})
    monkeypatch.setattr(supervised, "_slots", {0: Answering(living)})
    fleet, merged = await supervised.metrics()
    assert fleet == "f"
    assert merged["counters"]["legs"] == {"stays\tdecode\tstream_complete": 2}


async def test_a_stopped_worker_is_asked_once_and_the_others_answer_for_the_proxy(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_S", 0.02)
    supervised = supervise(listener)
    state = {"metrics": Metrics().snapshot(), "engines": [], "fleet": "f", "not_ready": ""}
    stopped, living = Answering(state | {"not_ready": "old news"}, stopped=True), Answering(state)
    monkeypatch.setattr(supervised, "_slots", {0: stopped, 1: living})
    assert [await supervised.not_ready() for _ in range(5)] == [""] * 5
    assert (stopped.questions, living.questions) == (1, 5)
    monkeypatch.setattr(supervised, "_slots", {0: stopped})
    assert await supervised.not_ready() == "no worker answers"


class Answering:
    """A worker that answers at once."""

    def __init__(self, state: Mapping[str, object], *, stopped: bool = False) -> None:
        self.stopped = stopped
        self.questions = 0
        self.state = state
        self.asked = False
        self.answered = asyncio.Event()
        self.line = self

    def send(self, kind: str) -> None:
        assert kind == "ask"
        self.questions += 1
        if not self.stopped:
            self.asked = False
            self.answered.set()


async def test_a_worker_that_does_not_end_is_killed(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MODULE", ("-c", "import time; time.sleep(900)"))
    monkeypatch.setattr(supervisor, "ENDING_S", 0.2)
    supervised = supervise(listener)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is ignored stays so in what is started
    try:
        running = asyncio.create_task(supervised.run())
        await until(lambda: supervised.pids, "a worker")
    finally:
        signal.signal(signal.SIGTERM, before)
    pid = supervised.pids[0]
    with structlog.testing.capture_logs() as logs:
        supervised.stop()
        async with asyncio.timeout(60):
            await running
    assert [e["event"] for e in logs] == ["worker does not end and is killed", "worker ended"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class StillClock(RealClock):
    """No time passes."""

    def monotonic(self) -> float:
        return 0.0


async def test_a_worker_that_dies_at_once_is_not_started_in_a_hot_loop(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def waits(failures: int, _rng: random.Random) -> float:
        asked.append(failures)
        return 0.0

    monkeypatch.setattr(supervisor, "_MODULE", ("-c", "raise SystemExit(3)"))
    monkeypatch.setattr(supervisor, "backoff_s", waits)
    supervised = supervise(listener, StillClock())
    running = asyncio.create_task(supervised.run())
    await until(lambda: len(asked) >= 4, "four starts")
    supervised.stop()
    async with asyncio.timeout(60):
        await running
    assert asked[:4] == [1, 2, 3, 4]  # the pace of `backoff_s`


async def test_without_free_descriptors_accepting_pauses_and_goes_on(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exhausted:
        """The listening socket of a process that has no descriptor left, twice."""

        def __init__(self) -> None:
            self.refusals = 0

        def fileno(self) -> int:
            return listener.fileno()

        def accept(self) -> tuple[socket.socket, object]:
            if self.refusals < 2:
                self.refusals += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

    monkeypatch.setattr(accepting, "EXHAUSTED_PAUSE_S", 0.01)
    made: list[asyncio.Protocol] = []

    def factory() -> asyncio.Protocol:
        made.append(asyncio.Protocol())
        return made[-1]

    exhausted = Exhausted()
    acceptor = Acceptor(exhausted, factory)  # type: ignore[arg-type]
    acceptor.start()
    try:
        with socket.create_connection(listener.getsockname()):
            await until(lambda: made, "the connection is taken")
        assert exhausted.refusals == 2
    finally:
        acceptor.stop()


async def test_a_stopped_acceptor_takes_nothing(listener: socket.socket) -> None:
    taken: list[str] = []

    def factory(name: str) -> asyncio.Protocol:
        taken.append(name)
        return asyncio.Protocol()

    first = Acceptor(listener, lambda: factory("first"))
    second = Acceptor(listener, lambda: factory("second"))
    first.start()
    first.stop()
    with socket.create_connection(listener.getsockname()):
        second.start()
        try:
            await until(lambda: taken, "the other one takes it")
        finally:
            second.stop()
    assert taken == ["second"]
