"""The real programs as real processes: started on free ports, watched through their logs, always cleaned up.

Nothing here waits for a time to pass: everything waits for an outcome, within a bound that is far above what it needs.
Processes are ended by their ids only; each program gets a session of its own, so that whatever it started is found too.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from narwhal._pb import fleet_pb2, fleet_pb2_grpc
from tests.ports import free_ports
from tests.signals import send

WAIT_S = 90.0  # shared machines stop a process for tens of seconds now and then
MODEL = "sim-model"
BIN = Path(sys.executable).parent


async def until(condition: Callable[[], Any], what: str | Callable[[], str], within_s: float = WAIT_S) -> Any:
    """The first true value of `condition`; fails, with `what`, when there is none in time."""
    last: Any = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                last = condition()
                if isinstance(last, Awaitable):
                    last = await last
                if last:
                    return last
                await asyncio.sleep(0.05)
    except TimeoutError:
        words = what if isinstance(what, str) else what()
        raise AssertionError(f"not within {within_s:g} s: {words} (last: {last!r})") from None


@dataclass
class Program:
    """One started program."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    at: dict[str, str] = field(default_factory=dict)  # the addresses it said it listens on

    @property
    def pid(self) -> int:
        return self.process.pid

    def events(self, words: str = "") -> list[dict[str, Any]]:
        """What it logged so far; only events of these words, when given."""
        found = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and (not words or entry.get("event") == words):
                    found.append(entry)
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal. After SIGSTOP it has stopped."""
        send(self.pid, number)

    async def ended(self, within_s: float = WAIT_S) -> int:
        """Its exit status."""
        await until(lambda: self.process.poll() is not None, lambda: f"{self.name} ends\n{self.tail()}", within_s)
        return self.process.returncode

    def must_live(self) -> None:
        """Fail when it has ended."""
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}\n{self.tail()}"

    def tail(self) -> str:
        """The end of its log, for a failure's text."""
        return "\n".join(self.log.read_text().splitlines()[-25:])

    def session(self) -> list[int]:
        """Ids of every process it started, and theirs, that still lives; its own too."""
        return [pid for pid, session in _sessions() if session == self.pid]

    def kill_all(self) -> None:
        """End whatever is left of it."""
        for pid in self.session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


async def ctl(control: str, *words: str) -> tuple[int, str, str]:
    """narwhalctl, as a process: (exit status, stdout, stderr)."""
    process = await asyncio.create_subprocess_exec(
        BIN / "narwhalctl", *words, "--control", control,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(WAIT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise AssertionError(f"narwhalctl {' '.join(words)} hangs") from None
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def _sessions() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                if words[0] != "Z":
                    yield int(entry.name), int(words[3])


class Stage:
    """A directory, a fleet file and the programs of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.programs: list[Program] = []
        names = ("p1", "p2", "p3", "d1", "d2", "d3")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.fleet_file = directory / "fleet.json"

    def write_fleet(self, *engines: str, **sections: Any) -> Path:
        """The fleet file: these engines (p… prefill, d… decode; four unless told otherwise)."""
        document = {
            "name": "test",
            "model": MODEL,
            "store": {"path": str(self.directory / "run")},
            "engines": [
                {
                    "id": name,
                    "url": f"http://127.0.0.1:{self.ports[name]}",
                    "role": "prefill" if name.startswith("p") else "decode",
                }
                for name in engines or ("p1", "p2", "d1", "d2")
            ],
            **sections,
        }
        replacement = self.fleet_file.with_suffix(".new")
        replacement.write_text(json.dumps(document, indent=1))
        replacement.replace(self.fleet_file)
        return self.fleet_file

    def run(self, name: str, *arguments: str, command: Sequence[str | Path] = ()) -> Program:
        """Start a program; `command` where it is not the one of its name."""
        log = self.directory / f"{len(self.programs)}-{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*(command or [BIN / name]), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        program = Program(name, process, log)
        self.programs.append(program)
        return program

    async def start(self, name: str, *arguments: str, command: Sequence[str | Path] = ()) -> Program:
        """Start a daemon and wait until it listens."""
        program = self.run(name, *arguments, "--log-format", "json", command=command)

        def listens() -> dict[str, Any] | None:
            program.must_live()
            said = [e for e in program.events("listening") if name != "narwhal-serve" or "control_http" in e]
            return said[0] if said else None

        said = await until(listens, lambda: f"{name} listens\n{program.tail()}")
        assert said is not None
        program.at = {key: said[key] for key in ("http", "admin", "grpc", "control_http") if key in said}
        return program

    async def engines(self, *names: str, tpot_ms: float = 2.0, arguments: tuple[str, ...] = ()) -> Program:
        """Simulated engines of these names in one process."""
        chosen = names or ("p1", "p2", "d1", "d2")
        pairs = [argument for name in chosen for argument in ("--engine", f"{name}={self.ports[name]}")]
        program = self.run("narwhal-sim", *pairs, "--tpot-ms", str(tpot_ms), *arguments)

        def are_ready() -> bool:
            program.must_live()
            return any("ready" in e for e in program.events())

        await until(are_ready, lambda: f"engines are ready\n{program.tail()}")
        return program

    async def control(self, *arguments: str) -> Program:
        """A control process on free ports."""
        return await self.start(
            "narwhal-control", "--fleet", str(self.fleet_file),
            *_unless(arguments, "--grpc"), *_unless(arguments, "--http"), *arguments,
        )  # fmt: skip

    async def proxy(self, *arguments: str) -> Program:
        """A proxy on free ports."""
        return await self.start(
            "narwhal-proxy", *_unless(arguments, "--http"), *_unless(arguments, "--admin"), *arguments
        )

    async def serve(self, *arguments: str) -> Program:
        """narwhal-serve, ready, on ports of this run's own: its programs end, and come back there."""
        names = [name for name in ("--http", "--admin", "--grpc", "--control-http") if name not in arguments]
        flags = [word for name in names for word in (name, self.address())]
        program = await self.start("narwhal-serve", "--fleet", str(self.fleet_file), *flags, *arguments)
        await self.ready(program.at["admin"])
        return program

    def address(self) -> str:
        """One that nobody else takes, for a server that is away for a while and comes back there."""
        return f"127.0.0.1:{free_ports(1)[0]}"

    async def get(self, address: str, path: str) -> tuple[int, str]:
        """(status, body) of a GET on a connection of its own."""
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as answer:
            return answer.status, await answer.text()

    async def post(self, url: str, body: dict[str, Any]) -> None:
        """POST JSON; it must be answered 200."""
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def delete(self, url: str) -> None:
        """DELETE; it must be answered 200."""
        async with aiohttp.ClientSession() as session, session.delete(url) as answer:
            assert answer.status == 200, await answer.text()

    async def ready(self, address: str) -> None:
        """Wait until /ready there is 200."""

        async def look() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                return (await self.get(address, "/ready"))[0] == 200
            return False

        await until(look, lambda: f"{address} is ready\n" + "\n".join(p.tail() for p in self.programs))

    async def status(self, control: str) -> fleet_pb2.FleetStatus:
        """The fleet's status, of the control process at this gRPC address. Tries again while it is away."""

        async def ask() -> fleet_pb2.FleetStatus | None:
            async with grpc.aio.insecure_channel(control, options=[("grpc.enable_http_proxy", 0)]) as channel:
                try:
                    return await fleet_pb2_grpc.FleetServiceStub(channel).GetStatus(
                        fleet_pb2.GetStatusRequest(), timeout=5
                    )
                except grpc.aio.AioRpcError:
                    return None

        status: fleet_pb2.FleetStatus = await until(ask, "control answers")
        return status

    async def proxies(self, control: str) -> list[fleet_pb2.ProxyStatus]:
        """The proxy workers that control knows."""
        async with grpc.aio.insecure_channel(control, options=[("grpc.enable_http_proxy", 0)]) as channel:
            answer = await fleet_pb2_grpc.FleetServiceStub(channel).ListProxies(
                fleet_pb2.ListProxiesRequest(), timeout=30
            )
        return list(answer.proxies)

    async def caught_up(self, control: str) -> None:
        """Wait until every proxy works by all that control has decided so far: it tells of it before proxies know."""

        async def look() -> bool:
            return all(proxy.connected and proxy.lag == 0 for proxy in await self.proxies(control))

        await until(look, "proxies have caught up")

    async def ledger(self, *names: str) -> dict[str, int]:
        """The KV ledgers' totals of these engines together."""
        totals: dict[str, int] = {}
        for name in names or ("p1", "p2", "d1", "d2"):
            _, body = await self.get(f"127.0.0.1:{self.ports[name]}", "/sim/ledger")
            for key, count in json.loads(body)["totals"].items():
                totals[key] = totals.get(key, 0) + count
        return totals

    def close(self) -> None:
        """End everything that was started."""
        for program in self.programs:
            program.kill_all()


def _unless(arguments: tuple[str, ...], flag: str) -> list[str]:
    return [] if flag in arguments else [flag, "127.0.0.1:0"]


@dataclass
class Load:
    """What clients saw."""

    statuses: list[int] = field(default_factory=list)  # 0: the connection broke
    texts: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def served(self) -> int:
        return self.statuses.count(200)


@contextlib.asynccontextmanager
async def load(address: str, *, clients: int = 6, max_tokens: int = 12) -> AsyncIterator[Load]:
    """Clients that ask one after the other until the block ends; each then finishes its last request."""
    seen, stop = Load(), asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=WAIT_S)  # a request that hangs fails the test
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def client(number: int) -> None:
            count = 0
            while not stop.is_set():
                count += 1
                body = {"model": MODEL, "prompt": f"client {number} request {count}", "max_tokens": max_tokens}
                try:
                    async with session.post(f"http://{address}/v1/completions", json=body) as answer:
                        await answer.read()
                        seen.statuses.append(answer.status)
                except TimeoutError:
                    raise AssertionError("a request hangs") from None
                except aiohttp.ClientError as error:
                    seen.statuses.append(0)
                    seen.broken.append(repr(error))
                    await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        try:
            yield seen
        finally:
            stop.set()
            await asyncio.gather(*tasks)
