"""Simulated engines for tests.

On the running loop (`sim_engine`, `sim_engines`), or as a process of their own (`sim_process`).
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from narwhal.clock import RealClock
from narwhal.sim.admin import state
from narwhal.sim.engine import Engine
from narwhal.sim.faults import Fault
from narwhal.sim.host import Host
from narwhal.sim.options import EngineOptions

_POLL_S = 0.005
_READY_S = 60.0


class SimEngine:
    """A handle on an engine that runs on this loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def id(self) -> str:
        """The engine's name."""
        return self.engine.id

    @property
    def url(self) -> str:
        """Its base address."""
        return self.engine.url

    @property
    def port(self) -> int:
        """Its HTTP port."""
        return self.engine.port

    def ledger(self) -> dict[str, Any]:
        """What `GET /sim/ledger` answers: `totals` and `handoffs`."""
        return self.engine.ledger.view(self.engine.now())

    def totals(self) -> dict[str, int]:
        """The ledger's totals."""
        return self.engine.ledger.totals(self.engine.now())

    def requests(self, *, phase: str | None = None, after: int = 0) -> list[dict[str, Any]]:
        """What `GET /sim/requests` answers."""
        return self.engine.requests.view(phase=phase, after=after)

    def state(self) -> dict[str, Any]:
        """What `GET /sim/state` answers."""
        return state(self.engine)

    async def set_fault(self, mode: str, **params: Any) -> Fault:
        """Make a fault active (`count`, `phase`, `for_s` beside its own parameters). Raises ValueError."""
        return await self.engine.set_fault(mode, **params)

    async def clear_faults(self, mode: str | None = None) -> int:
        """End the faults of that name, or all."""
        return await self.engine.clear_faults(mode)

    async def kill(self) -> None:
        """End as by SIGKILL."""
        await self.engine.kill()

    async def terminate(self) -> None:
        """End as by SIGTERM; returns when it is gone."""
        await self.engine.terminate()

    async def restart(self, down_s: float = 0.0) -> None:
        """Kill it if it runs, and start it as a new process at the same address."""
        await self.engine.restart(down_s)

    async def wait_for(self, true: Callable[["SimEngine"], Any], *, timeout_s: float = 60.0) -> Any:
        """The first true value of `true(engine)`. Raises TimeoutError when there is none in time."""
        async with asyncio.timeout(timeout_s):
            while not (value := true(self)):  # noqa: ASYNC110  any fact may be asked for
                await asyncio.sleep(_POLL_S)
        return value


@asynccontextmanager
async def sim_engines(*options: EngineOptions) -> AsyncIterator[list[SimEngine]]:
    """Engines that share this loop, in the order of their options."""
    host = Host(options, clock=RealClock(), log=lambda engine, what: None)
    await host.start()
    try:
        yield [SimEngine(engine) for engine in host.engines.values()]
    finally:
        await host.stop()


@asynccontextmanager
async def sim_engine(id: str = "engine-0", **options: Any) -> AsyncIterator[SimEngine]:
    """One engine on this loop; the options are those of `EngineOptions`."""
    async with sim_engines(EngineOptions(id=id, **options)) as (engine,):
        yield engine


@dataclass(frozen=True)
class SimProcess:
    """A running `narwhal-sim`."""

    process: asyncio.subprocess.Process
    urls: Mapping[str, str]
    """Base addresses by engine id."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def url(self) -> str:
        """The first engine's base address."""
        return next(iter(self.urls.values()))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        if self.process.returncode is None:
            os.kill(self.process.pid, number)

    async def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


@asynccontextmanager
async def sim_process(*arguments: str, env: Mapping[str, str] | None = None) -> AsyncIterator[SimProcess]:
    """A `narwhal-sim` with these arguments, ready; it is killed in the end.

    Raises RuntimeError if it ends instead of being ready.
    """
    command: Sequence[str] = (sys.executable, "-m", "narwhal.sim.app", *arguments)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=None if env is None else dict(env),
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_READY_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"narwhal-sim {' '.join(arguments)} ended with {await process.wait()}")
        ready = orjson.loads(line)
        yield SimProcess(process, {engine["id"]: engine["url"] for engine in ready["engines"]})
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()
