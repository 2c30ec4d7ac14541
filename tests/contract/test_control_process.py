"""`narwhal-control` as a process: signals, exit statuses, takeover after a kill, reloads."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from narwhal._pb import placement_pb2, placement_pb2_grpc
from narwhal.sim.testing import SimEngine, sim_engine
from tests.contract.control_kit import identity
from tests.metronome import Metronome

BOUND_S = 60.0  # a start under load takes seconds; nothing here needs more


@dataclass
class Process:
    """A running control process and what it has logged."""

    process: asyncio.subprocess.Process
    lines: list[dict[str, Any]] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self) -> None:
        """Takes its log, to the end."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.noise.append(line.decode().rstrip())
            self.news.set()
        self.news.set()

    async def told(self, what: str) -> dict[str, Any]:
        """The first log line whose event or kind starts so."""
        async with asyncio.timeout(BOUND_S):
            while True:
                self.news.clear()
                for line in self.lines:
                    if str(line.get("event", "")).startswith(what) or line.get("kind") == what:
                        return line
                assert self.process.returncode is None, f"ended without {what}: {self.noise}"
                await self.news.wait()

    async def times(self, kind: str, count: int) -> list[dict[str, Any]]:
        """The log lines of a kind, once there are so many."""
        async with asyncio.timeout(BOUND_S):
            while True:
                self.news.clear()
                if len(found := self.seen(kind)) >= count:
                    return found
                assert self.process.returncode is None, f"ended without {kind}: {self.noise}"
                await self.news.wait()

    def seen(self, kind: str) -> list[dict[str, Any]]:
        """The log lines of a kind, so far."""
        return [line for line in self.lines if line.get("kind") == kind]

    async def ended(self) -> int:
        """Its exit status."""
        return await asyncio.wait_for(self.process.wait(), BOUND_S)

    async def shows(self, path: str, text: bytes) -> bytes:
        """What a page of its HTTP side says, once `text` is a part of it."""
        async with asyncio.timeout(BOUND_S):
            while text not in (page := (await self.get(path))[1]):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)
        return page

    async def get(self, path: str) -> tuple[int, bytes]:
        """A GET of its HTTP side."""
        address = (await self.told("listening"))["http"]
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as response:
            return response.status, await response.read()


@asynccontextmanager
async def started(fleet: Path, *flags: str) -> AsyncIterator[Process]:
    """`narwhal-control` on free ports."""
    program = Path(sys.executable).parent / "narwhal-control"
    command = [str(program), "--fleet", str(fleet), "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *command, "--log-format", "json", *flags, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    made = Process(process)
    following = asyncio.create_task(made.follow())
    try:
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await following


def fleet_text(tmp_path: Path, engines: list[SimEngine], *, name: str = "fleet", extra: str = "") -> str:
    roles = {"p": "prefill", "d": "decode"}
    listed = "".join(f'  - {{id: {e.id}, url: "{e.url}", role: {roles[e.id[0]]}}}\n' for e in engines)
    return f"name: {name}\nmodel: sim-model\nengines:\n{listed}store: {{path: {tmp_path / 'run'}}}\n{extra}"


@pytest_asyncio.fixture
async def sims() -> AsyncIterator[list[SimEngine]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(sim_engine(name)) for name in ("p0", "d0", "d1")]


@pytest.fixture
def fleet(tmp_path: Path, sims: list[SimEngine]) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(fleet_text(tmp_path, sims[:2]))
    return path


@asynccontextmanager
async def proxy_stream(address: str) -> AsyncIterator[Any]:
    """A proxy's stream that has said hello."""
    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        call = placement_pb2_grpc.PlacementServiceStub(channel).StreamPlacement()
        hello = placement_pb2.Hello(proxy=identity())
        await call.write(placement_pb2.ProxyMessage(hello=hello))
        try:
            yield call
        finally:
            call.cancel()


async def snapshot_of(call: Any, epoch: int) -> placement_pb2.Snapshot:
    """The first snapshot of an epoch."""
    async with asyncio.timeout(BOUND_S):
        while True:
            message = await call.read()
            assert isinstance(message, placement_pb2.PlacementMessage)
            if message.WhichOneof("message") == "snapshot" and message.snapshot.epoch >= epoch:
                return message.snapshot


@pytest.mark.case("I16")
@pytest.mark.rule("S7", "M9")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_a_standby_takes_over_when_the_active_is_killed_or_ended(end: signal.Signals, fleet: Path) -> None:
    async with started(fleet, "--id", "first") as active:
        await active.told("ready")
        async with started(fleet, "--id", "second") as standby:
            words = (await standby.told("control_standby"))["event"]
            assert words.startswith("standby: first at 127.0.0.1:")
            assert json.loads((await standby.get("/ready"))[1])["reason"] == "standby"
            async with proxy_stream((await standby.told("listening"))["grpc"]) as call:
                with Metronome() as metronome:
                    active.process.send_signal(end)
                    snapshot = await snapshot_of(call, 2)
                assert metronome.ran_s < 4.0, "the time to live and a second"
                assert {e.id for e in snapshot.engines if e.phases} == {"p0", "d0"}
            assert await active.ended() == (0 if end is signal.SIGTERM else -signal.SIGKILL)
            assert (await standby.told("handoff_resumed"))["event"].startswith("resumed the handoff of first, epoch 1")
            standby.process.terminate()
            assert await standby.ended() == 0


async def test_sigterm_ends_streams_with_a_farewell_and_the_process_within_a_second(fleet: Path) -> None:
    async with started(fleet) as control:
        await control.told("ready")
        async with proxy_stream((await control.told("listening"))["grpc"]) as call:
            await snapshot_of(call, 1)
            with Metronome() as metronome:
                control.process.terminate()
                message = await asyncio.wait_for(call.read(), BOUND_S)
                while message.WhichOneof("message") != "farewell":
                    message = await asyncio.wait_for(call.read(), BOUND_S)
                assert message.farewell.reason == "shutting down"
                assert await control.ended() == 0
        assert metronome.ran_s < 3.0, "a second, on a machine with nothing else to do"
        assert control.noise == []
    document = json.loads((fleet.parent / "run" / "handoff.json").read_bytes())
    assert document["engines"]["p0"]["incarnation"] == 1


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
async def test_a_refused_resume_is_one_line_and_status_2_and_the_file_stays(fleet: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    document = tmp_path / "run" / "handoff.json"
    for text, words in (
        ('{"schema": "narwhal.handoff", "schema_version": 2}', "unknown schema_version 2, this release reads 1"),
        ('{"schema": "narwhal.ha', "the saved handoff is not JSON"),
    ):
        document.write_text(text)
        async with started(fleet, "--resume") as control:
            assert await control.ended() == 2
        assert len(control.noise) == 1
        assert control.noise[0].startswith("narwhal-control: ")
        assert words in control.noise[0]
        assert document.read_text() == text


TOKENS = "auth.tokens_file: this release does not check tokens; leave it out"


def reload(control: Process, fleet: Path, text: str) -> None:
    """Another fleet file, and the signal to read it."""
    fleet.write_text(text)
    control.process.send_signal(signal.SIGHUP)


@pytest.mark.rule("S2")
@pytest.mark.case("K2", "B4")
async def test_a_reload_applies_what_is_valid_and_says_what_is_not(
    fleet: Path, tmp_path: Path, sims: list[SimEngine]
) -> None:
    async with started(fleet) as control:
        await control.shows("/ready", b'"status":"ready"')
        whole = fleet_text(tmp_path, sims[:2])
        reload(control, fleet, whole[: len(whole) // 2])
        await control.told("reload_refused")
        assert (await control.get("/ready"))[0] == 200
        reload(control, fleet, fleet_text(tmp_path, sims, extra="lease: {ttl_s: 7}\n"))
        words = (await control.told("reloaded"))["event"]
        assert words == "the fleet file was read again; what differs in lease from the start needs a restart"
        await control.told("engine d1 joined")
        reload(control, fleet, fleet_text(tmp_path, [sims[0], sims[2]]))
        assert (await control.told("engine_removed"))["engine"] == "d0"
        # Published and shown once it is stored.
        metrics = await control.shows("/metrics", b'engine_eligible{engine="d1",fleet="fleet",phase="decode"} 1.0')
        assert b'engine="d0"' not in metrics
        await control.shows("/handoff", b'"engine_set":["p0","d1"]')
        control.process.terminate()
        assert await control.ended() == 0


@pytest.mark.rule("S2")
@pytest.mark.case("K2")
async def test_what_a_reload_cannot_change_is_said_every_time_it_differs_from_what_runs(
    fleet: Path, tmp_path: Path, sims: list[SimEngine]
) -> None:
    fixed = "; what differs in lease from the start needs a restart"
    async with started(fleet) as control:
        await control.shows("/ready", b'"status":"ready"')
        for count, (extra, says) in enumerate(
            [("lease: {ttl_s: 7}\n", fixed), ("lease: {ttl_s: 7}\n", fixed), ("", "")], start=1
        ):
            reload(control, fleet, fleet_text(tmp_path, sims[:2], extra=extra))
            told = await control.times("reloaded", count)
            assert told[-1]["event"] == f"the fleet file was read again{says}"
        control.process.terminate()
        assert await control.ended() == 0


@pytest.mark.rule("S2", "R9")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("model: sim-model", "model: other"),
            'model: cannot change from "sim-model" to "other" while the process runs',
        ),
        (("name: fleet", "name: other"), 'name: cannot change from "fleet" to "other" while the process runs'),
        (("name: fleet", "name: fleet\nauth: {tokens_file: t}"), TOKENS),
    ],
)
async def test_a_reload_that_cannot_be_is_refused_whole_and_the_fleet_serves_on(
    fleet: Path, tmp_path: Path, sims: list[SimEngine], change: tuple[str, str], words: str
) -> None:
    async with started(fleet) as control:
        await control.shows("/ready", b'"status":"ready"')
        text = fleet_text(tmp_path, sims, extra="lease: {ttl_s: 7}\n")
        reload(control, fleet, text.replace(*change))
        refused = (await control.told("reload_refused"))["event"]
        assert refused.startswith(f"the fleet file is not applied: {words}")
        assert (await control.get("/ready"))[0] == 200
        reload(control, fleet, text)
        await control.told("engine d1 joined")
        control.process.terminate()
        assert await control.ended() == 0
        assert not control.seen("engine_ejected")


async def test_what_this_release_cannot_do_is_refused_at_the_start(tmp_path: Path, sims: list[SimEngine]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(fleet_text(tmp_path, sims[:2], extra="auth: {tokens_file: tokens.yaml}\n"))
    async with started(path) as control:
        assert await control.ended() == 2
        assert control.noise == [f"{path}: {TOKENS}"]
