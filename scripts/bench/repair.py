"""How long after an engine has been put right a client's request runs on it again, as a distribution.

    .venv/bin/python -m scripts.bench.repair [ROUNDS]

Real processes, default settings of recovery, load all the time. For each kind of trouble: `kill` (SIGKILL, and a new
process), `stop` (SIGSTOP and SIGCONT of the process), `500s` (every answer 500, and then no more). Prints seconds:
smallest, median, 90th percentile, largest.
"""

import argparse
import asyncio
import json
import signal
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from narwhal._pb import fleet_pb2
from tests.process.harness import Load, Program, Stage, load, until

VICTIM = "d1"
OWN = ("gate-", "probe-")  # how control's own requests are named


class Trial:
    """One fleet under load, and its engines by name."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.running: dict[str, Program] = {}
        self.control = ""

    @property
    def victim(self) -> str:
        """Base address of the engine that gets into trouble."""
        return f"http://127.0.0.1:{self.stage.ports[VICTIM]}"

    async def begin(self) -> str:
        """Starts everything; returns where clients ask."""
        self.stage.write_fleet("p1", "d1", "d2")
        for name in ("p1", "d1", "d2"):
            self.running[name] = await self.stage.engines(name)
        serve = await self.stage.serve()
        self.control = serve.at["grpc"]
        return serve.at["http"]

    async def serves(self) -> bool:
        """Whether work may be placed on the victim."""
        engines: list[fleet_pb2.EngineStatus] = list((await self.stage.status(self.control)).engines)
        return any(e.id == VICTIM and e.phases for e in engines)

    async def out(self) -> bool:
        """Whether the victim has been taken out."""
        return not await self.serves()

    async def work(self) -> int:
        """Requests of clients that the victim has answered, of those that it remembers."""
        try:
            _, body = await self.stage.get(self.victim.removeprefix("http://"), "/sim/requests?phase=decode")
        except (aiohttp.ClientError, TimeoutError):
            return 0
        requests = json.loads(body)
        return sum(r["status"] == 200 and not (r["request_id"] or "").startswith(OWN) for r in requests)


async def kill(trial: Trial) -> None:
    """SIGKILL, and a new process at the same address."""
    program = trial.running[VICTIM]
    program.signal(signal.SIGKILL)
    await program.ended()
    await until(trial.out, "it is out")
    trial.running[VICTIM] = await trial.stage.engines(VICTIM)


async def stop(trial: Trial) -> None:
    """SIGSTOP, until it is out, and SIGCONT."""
    trial.running[VICTIM].signal(signal.SIGSTOP)
    await until(trial.out, "it is out")
    trial.running[VICTIM].signal(signal.SIGCONT)


async def errors(trial: Trial) -> None:
    """Every answer is a 500, until it is out."""
    await trial.stage.post(f"{trial.victim}/sim/fault", {"mode": "status", "status": 500})
    await until(trial.out, "it is out")
    await trial.stage.delete(f"{trial.victim}/sim/fault")


KINDS: dict[str, Callable[[Trial], Awaitable[None]]] = {"kill": kill, "stop": stop, "500s": errors}


async def _flows(seen: Load) -> None:
    await until(lambda: seen.served >= 20, "load runs")


async def measure(kind: str, rounds: int) -> list[float]:
    """Seconds from the end of the trouble until the first request of a client has been answered by the engine."""
    taken = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(Stage(Path(folder)))
            try:
                async with load(await trial.begin()) as seen:
                    await _flows(seen)
                    await KINDS[kind](trial)
                    right_at, before = asyncio.get_running_loop().time(), await trial.work()

                    async def again(trial: Trial = trial, before: int = before) -> bool:
                        return await trial.serves() and await trial.work() > before

                    await until(again, "a request runs there again")
                    taken.append(asyncio.get_running_loop().time() - right_at)
            finally:
                trial.stage.close()
    return taken


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=10, help="trials of each kind of trouble")
    rounds: int = parser.parse_args().rounds
    print(f"{'trouble':8} {'rounds':>6} {'min':>6} {'median':>6} {'p90':>6} {'max':>6}")
    for kind in KINDS:
        taken = sorted(asyncio.run(measure(kind, rounds)))
        p90 = taken[min(len(taken) - 1, int(0.9 * len(taken)))]
        row = (taken[0], statistics.median(taken), p90, taken[-1])
        print(f"{kind:8} {len(taken):6} " + " ".join(f"{seconds:6.2f}" for seconds in row), flush=True)


if __name__ == "__main__":
    main()
