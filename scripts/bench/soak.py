"""Random faults for as long as you like: memory and open files stay flat, totals exact, everybody serves at the end.

`python -m scripts.bench.soak --minutes 5` starts three prefill and three decode engines (one process each),
`narwhal-control`, two proxies, and users with the official client. Faults come one after the other, drawn by `--seed`:
those of the simulator in any engine, SIGKILL and SIGSTOP of engines, and SIGKILL of control, which starts again with
`--resume`. Exit status 1 when something grew, a total is wrong, an answer looked whole and was not, a request hung, or
an engine is not back.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.faults import killed, shows, stopped
from scripts.bench.scene import Layout, Scene, scene
from scripts.bench.users import End, Users
from tests.process.harness import Program, until

ENGINES = ("p1", "p2", "p3", "d1", "d2", "d3")
SERVING = {"max_attempts": 3, "queue_capacity": 256, "queue_timeout_s": 30}
EVERY_S = 2.0  # between two looks at the processes
FAULT_S = (3.0, 12.0)  # how long a fault lasts
PAUSE_S = (2.0, 8.0)  # between two of them
# Streams that a fault has stopped stay so when it is over before their engine was found out: then they end with
# `engine.decode_read_timeout_s` (60), and nothing is hung before that.
PATIENCE_S = 75.0
BACK_S = 90.0  # in which everybody must serve after the last fault
PAGE = os.sysconf("SC_PAGE_SIZE")
GROWTH = 1.10  # of the last third's median over the second's: allocators settle, leaks do not
SLACK_MIB, SLACK_FILES = 6.0, 12.0

# Faults of the simulator: by phase, mode and parameters.
SHOWN: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("pd", "core-stopped", {}),
    ("pd", "status", {"status": 500}),
    ("pd", "status", {"status": 429}),
    ("pd", "close-before-answer", {}),
    # An engine that refuses cannot be told to stop it: it does by itself, before the fault is over.
    ("pd", "refuse", {"for_s": FAULT_S[0] - 0.5}),
    ("d", "stall", {"after": 3}),
    ("d", "cut", {"after": 3}),
    ("d", "error-event", {"after": 2}),
    ("d", "done-without-tokens", {}),
    ("d", "slow-first-token", {"seconds": 8.0}),
    ("p", "bad-handoff", {"variant": "no-engine-id"}),
    ("p", "serve-fails", {}),
    ("pd", "health-hang", {}),
)


@dataclass
class Process:
    """What was seen of one process."""

    name: str
    mib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def look(self, pid: int) -> None:
        """Resident memory and open files now; nothing when it is gone."""
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{pid}/fd"))
            self.mib.append(pages * PAGE / 2**20)
            self.files.append(files)

    def grown(self) -> list[str]:
        """What grew from the second third to the last."""
        found = []
        for what, seen, slack in (("MiB", self.mib, SLACK_MIB), ("open files", self.files, SLACK_FILES)):
            third = len(seen) // 3
            if third < 5:
                continue
            before, after = statistics.median(seen[third : 2 * third]), statistics.median(seen[-third:])
            if after > before * GROWTH + slack:
                found.append(f"{self.name}: {before:.1f} → {after:.1f} {what}")
        return found

    def line(self) -> str:
        """For people."""
        third = max(1, len(self.mib) // 3)
        first, last = statistics.median(self.mib[:third]), statistics.median(self.mib[-third:])
        return f"{self.name:10} {first:6.1f} → {last:6.1f} MiB, {self.files[0]:3} → {self.files[-1]:3} open files"


Act = Callable[[], Awaitable[None]]


class Soak:
    """One run."""

    def __init__(self, made: Scene, users: Users, draw: random.Random) -> None:
        self.made = made
        self.users = users
        self.draw = draw
        self.faults: dict[str, int] = {}
        self.processes: dict[str, Process] = {}

    async def run(self, seconds: float) -> list[str]:
        """Faults for so long, and what is wrong after them."""
        over = time.monotonic() + seconds
        looking = asyncio.create_task(self._look())
        try:
            while time.monotonic() < over:
                await self._one_fault()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        return await self._settled()

    async def _one_fault(self) -> None:
        name, begin, end = self._drawn()
        self.faults[name] = self.faults.get(name, 0) + 1
        await begin()
        await asyncio.sleep(self.draw.uniform(*FAULT_S))
        await end()
        await asyncio.sleep(self.draw.uniform(*PAUSE_S))

    def _drawn(self) -> tuple[str, Act, Act]:
        kind = self.draw.random()
        engine = self.draw.choice(ENGINES)
        if kind < 0.08:
            return "control killed", self._kill_control, self._start_control
        if kind < 0.2:
            fault = killed("an engine killed", engine)
        elif kind < 0.3:
            fault = stopped("an engine stopped", engine)
        else:
            phases, mode, parameters = self.draw.choice(SHOWN)
            engine = self.draw.choice([e for e in ENGINES if e[0] in phases])
            fault = shows(mode, engine, mode, **parameters)
        return fault.name, lambda: fault.begin(self.made), lambda: fault.end(self.made)

    async def _kill_control(self) -> None:
        self.made.control.signal(signal.SIGKILL)
        await self.made.control.ended()

    async def _start_control(self) -> None:
        at = self.made.control.at
        self.made.control = await self.made.stage.control("--resume", "--grpc", at["grpc"], "--http", at["http"])
        self.processes.pop("control", None)  # another process: what the last one had says nothing about it

    async def _look(self) -> None:
        while True:
            programs: dict[str, Program] = {"control": self.made.control}
            programs |= {f"proxy-{n + 1}": proxy for n, proxy in enumerate(self.made.proxies)}
            for name, program in programs.items():
                for number, pid in enumerate(sorted(program.session())):
                    known = f"{name}.{number}" if name != "control" else name
                    self.processes.setdefault(known, Process(known)).look(pid)
            await asyncio.sleep(EVERY_S)

    async def _settled(self) -> list[str]:
        wrong = [grown for process in self.processes.values() for grown in process.grown()]
        control = self.made.control.at["grpc"]

        async def all_serve() -> bool:
            status = await self.made.stage.status(control)
            return status.ready and all(engine.phases for engine in status.engines)

        try:
            await until(all_serve, "every engine serves", BACK_S)
        except AssertionError as late:
            wrong.append(str(late))
        return wrong


async def totals(made: Scene, users: Users) -> list[str]:
    """Whether control counted exactly what users saw, once everything is reported."""
    ends = users.ends(since=0)
    seen = (ends[End.WHOLE], ends[End.BEFORE] + ends[End.MIDWAY], ends[End.HUNG])
    counted = (-1, -1, -1)

    async def equal() -> bool:
        nonlocal counted
        told = (await made.stage.status(made.control.at["grpc"])).totals
        counted = (told.served, told.failed + told.rejected, told.cancelled)
        return counted == seen

    try:
        await until(equal, "totals are exact", 15)
    except AssertionError:
        return [f"served, failed or refused, left: users saw {seen}, control counted {counted}"]
    return []


async def main() -> int:
    """The soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--users", type=int, default=8)
    chosen = parser.parse_args()
    layout = Layout(engines=ENGINES, sections={"serving": SERVING})
    with tempfile.TemporaryDirectory(prefix="narwhal-soak-") as directory:
        async with scene(layout, Path(directory)) as made:
            users = Users(addresses=made.addresses, count=chosen.users, patience_s=PATIENCE_S)
            soak = Soak(made, users, random.Random(chosen.seed))
            async with users.asking():
                wrong = await soak.run(chosen.minutes * 60)
            wrong += await totals(made, users)
            pulls = await made.ledger()
    ends = users.ends(since=0)
    wrong += [f"{ends[end]} requests: {end}" for end in (End.UNTRUE, End.HUNG) if ends[end]]
    wrong += [f"{pulls[name]} {name}" for name in ("double_pulls", "late_pulls") if pulls[name]]
    print("faults:", ", ".join(f"{count} × {name}" for name, count in sorted(soak.faults.items())))
    print("requests:", ", ".join(f"{count} {end}" for end, count in ends.items()))
    for process in soak.processes.values():
        print(process.line())
    for each in wrong:
        print(f"WRONG: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
