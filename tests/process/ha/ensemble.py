"""Two control processes on a real etcd, three proxies, six engines and the official client: who leads, and what is seen
of it from outside.

A control process tells what it does with the machine's boot time, which is one clock for all of them; a proxy's lines
bear the wall time.
"""

import asyncio
import contextlib
import json
import math
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from openai import AsyncOpenAI, OpenAIError

from narwhal._pb import fleet_pb2, fleet_pb2_grpc
from narwhal.sim.text import expected_text
from tests.etcd import Etcd
from tests.ports import free_ports
from tests.process.ha.door import Door
from tests.process.ha.reigns import Journal, Proof, proof, written
from tests.process.harness import MODEL, WAIT_S, Program, Stage, ctl, until

ENGINES = ("p1", "p2", "p3", "d1", "d2", "d3")
NAMES = ("a", "b")
PROXIES = 3
TTL_S = 3
REPORTS_S = 1.0  # proxies report at least so often
INTERVAL_S = 0.3
BLOCK_S = 2.0 * TTL_S
TROUBLED = ("env", f"BLOCK_S={BLOCK_S}", sys.executable, Path(__file__).with_name("troubled_control.py"))
SECTIONS: dict[str, Any] = {
    "controller": {"monitor_interval_s": INTERVAL_S},
    # Nothing but the tests themselves changes what is known of an engine; one that is ejected comes back soon.
    "recovery": {"liveness_every": 0, "readmit_every": 2, "relapse_window_s": 0, "ramp_s": 0},
    "lease": {"ttl_s": TTL_S},
}


def boottime() -> float:
    """The clock that control processes stamp their records with."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Seen:
    """What clients of the official package saw."""

    served: int = 0
    errors: list[str] = field(default_factory=list)

    async def more(self, count: int) -> None:
        """Wait until so many more requests have been served."""
        target = self.served + count
        await until(lambda: self.served >= target, lambda: f"requests go on ({self.errors[-3:]})")


class Ensemble:
    """The processes, and what tests want to know of them. `start` once, `close` at the end of the stage."""

    def __init__(self, stage: Stage, etcd: Etcd) -> None:
        self.stage = stage
        self.etcd = etcd
        self.at = dict(zip(NAMES, (f"127.0.0.1:{port}" for port in free_ports(len(NAMES))), strict=True))
        self.doors = {name: [Door(member.port) for member in etcd.members] for name in NAMES}
        self.control: dict[str, Program] = {}  # the newest process of each name
        self.past: dict[str, list[Program]] = {name: [] for name in NAMES}  # every one, oldest first
        self.dead_at: dict[int, float] = {}  # boot time at which a process of this id was known to be dead
        self.proxies: list[Program] = []
        self.served = 0  # requests that clients were answered, ever
        self._doubtful = False  # a request failed: whether control counts it as served is not known
        self._broken: set[int] = set()  # ids of processes whose stage `liveness` raises

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Everything runs, and a standby follows."""
        await self.stage.engines(*ENGINES)
        controls = ",".join(self.at.values())
        proxies = [self.stage.proxy("--control", controls, "--id", f"x{number}") for number in range(PROXIES)]
        _, _, *self.proxies = await asyncio.gather(*map(self.begin, NAMES), *proxies)
        for proxy in self.proxies:
            await self.stage.ready(proxy.at["http"])
        await self.settled()

    def close(self) -> None:
        """Ends what is not the stage's to end."""
        for doors in self.doors.values():
            for door in doors:
                door.close()

    async def begin(self, name: str) -> Program:
        """A control process of this name, with --resume."""
        store = {"kind": "etcd", "endpoints": [f"http://127.0.0.1:{door.port}" for door in self.doors[name]]}
        file = self.stage.write_fleet(*ENGINES, store=store, **SECTIONS)
        own = file.rename(file.with_name(f"fleet-{name}.json"))
        program = await self.stage.start(
            "narwhal-control", "--fleet", str(own), "--id", name, "--resume",
            "--grpc", self.at[name], "--http", "127.0.0.1:0", command=TROUBLED,
        )  # fmt: skip
        self.control[name] = program
        self.past[name].append(program)
        return program

    async def end(self, name: str, number: signal.Signals) -> int:
        """A process gets this signal and is waited for. Its exit status."""
        program = self.control[name]
        program.signal(number)
        at = boottime()  # after SIGKILL it does nothing any more, however late its end is noticed
        code = await program.ended()
        self.dead_at[program.pid] = at if number is signal.SIGKILL else boottime()
        return code

    def turn(self, name: str) -> None:
        """The stage `liveness` of a process raises from now on, or does so no more."""
        program = self.control[name]
        self._broken ^= {program.pid}
        program.signal(signal.SIGUSR2)

    async def restore(self) -> None:
        """Everybody runs and can be reached, and every engine serves, whatever a test that failed has left behind."""
        for member in self.etcd.members:
            if member.process is not None:
                member.signal(signal.SIGCONT)
        await asyncio.to_thread(self.etcd.start)
        for name in NAMES:
            self.open(name)
            program = self.control[name]
            if program.process.poll() is None:
                program.signal(signal.SIGCONT)
                if program.pid in self._broken:
                    self.turn(name)
            else:
                self.dead_at.setdefault(program.pid, boottime())
                await self.begin(name)
        for proxy in self.proxies:
            proxy.must_live()
        if self._doubtful:
            await self.settled()
            await passed(3 * REPORTS_S)
            self.served = (await self.stage.status(self.at[await self.active()])).totals.served
            self._doubtful = False

    async def healed(self) -> None:
        """Every engine is sound and serves, whatever was done to it."""
        for port in self.stage.ports.values():
            await self.stage.delete(f"http://127.0.0.1:{port}/sim/fault")

        async def serve() -> bool:
            control = self.at[await self.active()]
            engines = (await self.stage.status(control)).engines
            for engine in engines:
                if any(hold.kind == "drain" for hold in engine.holds):
                    await ctl(control, "undrain", engine.id)
            return all(engine.phases for engine in engines)

        await until(serve, lambda: f"every engine serves\n{self.tails()}")

    def shut(self, name: str) -> None:
        """Etcd answers this process nothing any more."""
        for door in self.doors[name]:
            door.shut()

    def open(self, name: str) -> None:
        """It does again."""
        for door in self.doors[name]:
            door.open()

    # --- who leads --------------------------------------------------------------------------------------------------

    async def readiness(self, name: str) -> dict[str, Any]:
        """What /ready of a process says; nothing when it does not answer."""
        answer: dict[str, Any] = {}
        timeout = aiohttp.ClientTimeout(total=2.0)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"http://{self.control[name].at['http']}/ready") as response,
            ):
                answer = await response.json()
        return answer

    async def active(self) -> str:
        """Who is control-ready, once somebody is."""

        async def look() -> str | None:
            for name in NAMES:
                if self.control[name].process.poll() is None and (await self.readiness(name)).get("control_ready"):
                    return name
            return None

        name: str = await until(look, lambda: f"somebody leads\n{self.tails()}")
        return name

    def other(self, name: str) -> str:
        """The one that is not of this name."""
        return next(each for each in NAMES if each != name)

    async def settled(self, above: int = 0) -> tuple[str, int]:
        """Who leads, and the epoch: once a standby is fit to follow, every proxy works by that epoch and is connected
        to the standby too. `above`: a term of this epoch has ended, and whoever leads may not have noticed yet."""

        async def look() -> tuple[str, int] | None:
            for name in NAMES:
                if not (await self.readiness(name)).get("control_ready"):
                    continue
                status = await self.stage.status(self.at[name])
                fit = [s for s in status.standbys if s.copy_epoch == status.epoch and not s.problem]
                listed: list[fleet_pb2.ProxyStatus] = []
                with contextlib.suppress(grpc.aio.AioRpcError):  # it leads no more
                    listed = await self.stage.proxies(self.at[name])
                current = [p for p in listed if p.connected and p.acked_epoch == status.epoch and not p.lag]
                warm = await self.subscribers(self.other(name))
                if status.control_ready and status.epoch > above and fit and len(current) == warm == PROXIES:
                    return name, status.epoch
            return None

        found: tuple[str, int] = await until(look, lambda: f"everybody is in place\n{self.tails()}")
        return found

    async def subscribers(self, name: str) -> int:
        """How many streams of proxies a process has."""
        with contextlib.suppress(aiohttp.ClientError):
            _, page = await self.stage.get(self.control[name].at["http"], "/metrics")
            lines = [line for line in page.splitlines() if line.startswith("narwhal_placement_subscribers{")]
            return int(float(lines[0].rpartition(" ")[2])) if lines else 0
        return 0

    async def followed(self, epoch: int, since: float = 0.0) -> list[float]:
        """When each proxy took the first placement of this epoch or a later one, in wall time, once all have."""

        def look() -> list[float]:
            found = []
            for proxy in self.proxies:
                entries = [e for e in proxy.events("following control") if e["epoch"] >= epoch]
                found += [min(stamp(e) for e in entries)] if entries else []
            return found if len(found) == PROXIES else []

        times: list[float] = await until(look, lambda: f"every proxy follows epoch {epoch}\n{self.tails()}")
        return [max(at, since) for at in times]

    def tails(self) -> str:
        """The ends of all logs, for a failure's text."""
        return "\n".join(f"--- {p.name} {p.pid}\n{p.tail()}" for p in [*self.control.values(), *self.proxies])

    # --- who acted --------------------------------------------------------------------------------------------------

    def journals(self) -> list[Journal]:
        """What every control process told so far."""
        return [
            Journal(
                name=name,
                pid=program.pid,
                entries=[e for e in program.events() if "boottime" in e],
                dead_at=self.dead_at.get(program.pid, math.inf),
            )
            for name in NAMES
            for program in self.past[name]
        ]

    def one_ruler(self) -> Proof:
        """Fails when at any instant two processes acted, or a proxy went back to a lower epoch."""
        found = proof(self.journals())
        assert not found.faults, "\n".join(found.faults)
        assert found.decisions
        writes = written(self.etcd)
        assert writes
        assert [w for w in writes if w[1] != w[2]] == [], "(revision, epoch of the document, epoch of the lease)"
        for proxy in self.proxies:
            epochs = [e["epoch"] for e in proxy.events("following control")]
            assert epochs == sorted(epochs), f"{proxy.name} followed epochs {epochs}"
        return found

    # --- what is stored and counted ---------------------------------------------------------------------------------

    async def document(self, name: str) -> dict[str, Any]:
        """The state handoff that a process knows to be stored."""
        status, body = await self.stage.get(self.control[name].at["http"], "/handoff")
        assert status == 200, body
        document: dict[str, Any] = json.loads(body)
        return document

    async def history(self, name: str) -> list[fleet_pb2.EpochEntry]:
        """The epochs, as an active tells them."""
        async with grpc.aio.insecure_channel(self.at[name], options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            return list((await stub.GetHistory(fleet_pb2.GetHistoryRequest(), timeout=30)).epochs)

    async def stored(self, name: str, after: float) -> None:
        """Wait until this process has stored a state handoff that was written after this instant of wall time."""

        async def look() -> bool:
            status, body = await self.stage.get(self.control[name].at["http"], "/handoff")
            return status == 200 and bool(json.loads(body)["written_at"] > after)

        await until(look, lambda: f"{name} stores its handoff\n{self.tails()}")

    async def copied(self, name: str, after: float) -> None:
        """Wait until a standby has a copy of what this active wrote after this instant of wall time."""

        async def look() -> bool:
            asked = time.time()
            status = await self.stage.status(self.at[name])
            return any(asked - standby.copy_age_s > after for standby in status.standbys)

        await until(look, lambda: f"a standby follows\n{self.tails()}")

    async def counted(self) -> None:
        """Wait until control counts as served what clients were ever served; fails when it counts more."""

        async def look() -> bool:
            served = (await self.stage.status(self.at[await self.active()])).totals.served
            assert served <= self.served, "something is counted twice"
            return served == self.served

        await until(look, lambda: f"{self.served} requests are counted\n{self.tails()}")

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[Seen]:
        """The official client on every proxy, streamed and not, without retries of its own, until the block ends."""
        seen, stop = Seen(), asyncio.Event()
        self._doubtful = True

        async def ask(proxy: Program, stream: bool) -> None:
            base = f"http://{proxy.at['http']}/v1"
            async with AsyncOpenAI(base_url=base, api_key="any", max_retries=0, timeout=WAIT_S) as client:
                count = 0
                while not stop.is_set():
                    count += 1
                    prompt = f"request {count} of {proxy.pid} {stream}"
                    try:
                        if stream:
                            events = await client.completions.create(
                                model=MODEL, prompt=prompt, max_tokens=16, stream=True
                            )
                            text = "".join([event.choices[0].text async for event in events])
                        else:
                            whole = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=16)
                            text = whole.choices[0].text
                    except OpenAIError as error:
                        seen.errors.append(repr(error))
                    else:
                        assert text == expected_text(prompt, 16)
                        seen.served += 1
                        self.served += 1
                    await asyncio.sleep(0.1)  # a user's pause: the machine has other work, too

        tasks = [asyncio.create_task(ask(proxy, stream)) for proxy in self.proxies for stream in (False, True)]
        try:
            await seen.more(len(tasks))
            yield seen
        finally:
            stop.set()
            await asyncio.gather(*tasks)
            self._doubtful = bool(seen.errors)


def stamp(entry: dict[str, Any]) -> float:
    """When a line was logged, seconds of wall time."""
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


def state(document: dict[str, Any]) -> dict[str, Any]:
    """What of a state handoff must be the same after a takeover, engine by engine: no ages, no counts of requests."""
    kept = ("url", "role", "incarnation", "streaks", "misses", "stalls", "producers", "identity")
    found: dict[str, Any] = {}
    for name, engine in document["engines"].items():
        drain = engine["drain"]
        found[name] = {
            **{key: engine[key] for key in kept},
            "holds": [(hold["kind"], hold["reason"]) for hold in engine["holds"]],
            "drain": drain and {key: drain[key] for key in ("reason", "wall", "restart", "identity", "settled")},
        }
    return found


async def passed(seconds: float) -> None:
    """Wait until so much time has passed: the length of a fault, not a guess at how long something takes."""
    due = boottime() + seconds
    await until(lambda: boottime() >= due, "time passes", within_s=seconds + WAIT_S)


@contextlib.contextmanager
def ensemble(directory: Path) -> Iterator[Ensemble]:
    """One that runs. From outside any event loop, so that several tests may share it."""
    with Etcd(directory / "etcd", members=3) as etcd:
        stage = Stage(directory)
        made = Ensemble(stage, etcd)
        try:
            asyncio.run(made.start())
            yield made
        finally:
            made.close()
            stage.close()
