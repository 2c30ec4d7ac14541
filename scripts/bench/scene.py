"""A fleet of real processes on this machine: each engine its own, control, proxies; what can be done to them."""

import asyncio
import contextlib
import json
import os
import resource
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from scripts.bench.gate import Gate
from scripts.bench.users import MODEL
from tests.process.harness import Program, Stage, ctl, until


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which engines there are: `p…` prefill, `d…` decode; other settings of the fleet file."""

    engines: tuple[str, ...] = ("p1", "p2", "d1", "d2")
    pinned: bool = False
    proxies: int = 2
    gated: bool = False  # engines stand behind doors that can be shut for some processes
    sections: dict[str, Any] = field(default_factory=dict)
    engine_flags: tuple[str, ...] = ("--tpot-ms", "5")


class Scene:
    """The programs of one layout."""

    def __init__(self, layout: Layout, directory: Path) -> None:
        self.layout = layout
        self.stage = Stage(directory)
        self.engines: dict[str, Program] = {}
        self.gates: dict[str, Gate] = {}
        self.control: Program
        self.proxies: list[Program] = []

    async def start(self) -> None:
        """Everything, until every proxy is ready."""
        if self.layout.gated:
            for name in self.layout.engines:
                self.gates[name] = Gate(target=self.stage.ports[name])
                await self.gates[name].start()
        self.stage.fleet_file.write_text(json.dumps(self._fleet(), indent=1))
        await asyncio.gather(*(self.start_engine(name) for name in self.layout.engines))
        self.control = await self.stage.control()
        flags = ("--control", self.control.at["grpc"])
        self.proxies = [await self.stage.proxy(*flags, "--id", f"proxy-{n + 1}") for n in range(self.layout.proxies)]
        for proxy in self.proxies:
            await self.stage.ready(proxy.at["admin"])

    def _fleet(self) -> dict[str, Any]:
        ports = {name: self.gates[name].port if self.gates else self.stage.ports[name] for name in self.layout.engines}
        engines = [
            {
                "id": name,
                "url": f"http://127.0.0.1:{port}",
                "role": "prefill" if name.startswith("p") else "decode",
                "pinned": self.layout.pinned,
            }
            for name, port in ports.items()
        ]
        store = {"path": str(self.stage.directory / "run")}
        return {"name": "bench", "model": MODEL, "store": store, "engines": engines, **self.layout.sections}

    async def close(self) -> None:
        """End everything that was started."""
        self.stage.close()
        for gate in self.gates.values():
            await gate.close()

    @property
    def addresses(self) -> list[str]:
        """Where users ask."""
        return [proxy.at["http"] for proxy in self.proxies]

    # --- what can be done to engines ----------------------------------------------------------------------------------

    async def start_engine(self, name: str) -> None:
        """Start it, at the address that it has in the fleet file."""
        port = str(self.stage.ports[name])
        program = self.stage.run("narwhal-sim", "--id", name, "--port", port, *self.layout.engine_flags)
        self.engines[name] = program

        def is_ready() -> bool:
            program.must_live()
            return bool(program.events())

        await until(is_ready, lambda: f"{name} starts\n{program.tail()}")

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        self.engines[name].signal(signal.SIGKILL)
        await self.engines[name].ended()

    async def misbehave(self, name: str, mode: str, **parameters: Any) -> None:
        """A fault of the simulator, until `behave`."""
        await self.stage.post(f"http://127.0.0.1:{self.stage.ports[name]}/sim/fault", {"mode": mode, **parameters})

    async def behave(self, name: str) -> None:
        """No faults."""
        await self.stage.delete(f"http://127.0.0.1:{self.stage.ports[name]}/sim/fault")

    async def placed_at(self, name: str) -> list[float]:
        """When clients' legs came to the engine, of those that it can tell of: not those of a process that died."""
        try:
            _, body = await self.stage.get(f"127.0.0.1:{self.stage.ports[name]}", "/sim/requests")
        except (aiohttp.ClientError, OSError):
            return []
        return [
            r["started_at"]
            for r in json.loads(body)
            if r["phase"] in ("prefill", "decode", "local") and not (r["request_id"] or "").startswith("probe-")
        ]

    async def ledger(self) -> Counter[str]:
        """The KV ledgers' totals of all engines that answer."""
        totals: Counter[str] = Counter()
        for name in self.layout.engines:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                _, body = await self.stage.get(f"127.0.0.1:{self.stage.ports[name]}", "/sim/ledger")
                totals.update(json.loads(body)["totals"])
        return totals

    # --- what can be done to the rest ---------------------------------------------------------------------------------

    async def worker(self, proxy: int) -> int:
        """Process id of a proxy's one worker."""
        known = {p.proxy.id: p.pid for p in await self.stage.proxies(self.control.at["grpc"])}
        return known[f"proxy-{proxy + 1}"]

    async def starve(self, proxy: int) -> tuple[int, tuple[int, int]]:
        """Let a proxy's worker have no descriptor more than it has; returns what `feed` takes."""
        pid = await self.worker(proxy)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = {int(entry) for entry in os.listdir(f"/proc/{pid}/fd")}
        free = next(number for number in range(len(used) + 1) if number not in used)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))
        return pid, before

    def feed(self, pid: int, limits: tuple[int, int]) -> None:
        """As before `starve`."""
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    async def ctl(self, *words: str) -> str:
        """What narwhalctl says."""
        _, out, err = await ctl(self.control.at["grpc"], *words)
        return out + err


@contextlib.asynccontextmanager
async def scene(layout: Layout, directory: Path) -> AsyncIterator[Scene]:
    """A scene that runs, and has ended after the block."""
    made = Scene(layout, directory)
    try:
        await made.start()
        yield made
    finally:
        await made.close()
