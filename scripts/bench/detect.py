"""How fast a bad engine is out, as distributions over real processes.

`python -m scripts.bench.detect [--rounds N] [--proxies N]`; about five minutes with the defaults. Instants are those of
the logs of control and proxies, of users and of the simulated engines: all on one machine, so on one clock.

| what | from | to | aim |
|---|---|---|---|
| refused connections | the third failure | the last proxy has applied the placement without the engine | 50 ms |
| headers and no token | the third first-token deadline | the verification hold | one monitor interval |
| streams that stall | the third has been silent for `recovery.stall_s` | the verification hold | one monitor interval |
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from scripts.bench.scene import Layout, Scene, scene
from scripts.bench.users import MODEL
from scripts.bench.watching import Watch, watching
from tests.process.harness import Program, until

VICTIM = "d1"
STREAMS = 16
TOKENS = 40
DEADLINE_S = 1.0
STALL_S = 3.0
INTERVAL_S = 1.0
AIMS = {"refused": 0.050, "no token": INTERVAL_S, "stall": INTERVAL_S}
# What brings the engine back soon, and forgets the round before; none of it has a part in the detection.
SECTIONS = {
    "recovery": {"readmit_every": 1, "relapse_window_s": 0, "ramp_s": 0, "stall_s": STALL_S},
    "engine": {"first_token_timeout_s": DEADLINE_S, "kv_first_pull_timeout_s": DEADLINE_S},
}


@dataclass(kw_only=True)
class Streams:
    """Streams that are asked for again and again. Instants are wall-clock seconds."""

    served: int = 0
    open: dict[int, float] = field(default_factory=dict)  # number of the stream → its last bytes, once it has any


@contextlib.asynccontextmanager
async def streaming(addresses: list[str]) -> AsyncIterator[Streams]:
    """`STREAMS` of them, until the block ends."""
    seen, stop, numbers = Streams(), asyncio.Event(), itertools.count()

    async def one(session: aiohttp.ClientSession, address: str) -> None:
        while not stop.is_set():
            number = next(numbers)
            body = {"model": MODEL, "prompt": f"stream {number}", "max_tokens": TOKENS, "stream": True}
            ended = b""
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"http://{address}/v1/completions", json=body) as answer:
                    async for chunk in answer.content.iter_any():
                        ended = chunk
                        seen.open[number] = time.time()
            seen.open.pop(number, None)
            if ended.endswith(b"[DONE]\n\n"):
                seen.served += 1
            else:
                await asyncio.sleep(0.01)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(one(session, addresses[n % len(addresses)])) for n in range(STREAMS)]
        try:
            yield seen
        finally:
            stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# --- instants ---------------------------------------------------------------------------------------------------------


def _at(entry: dict[str, Any]) -> float:
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


def logged(programs: list[Program], event: str, *, since: float, **fields: Any) -> list[list[float]]:
    """For each program, when it logged such an event."""
    return [
        [
            at
            for entry in program.events()
            if (entry["event"] == event or entry.get("kind") == event)
            and all(entry.get(key) == value for key, value in fields.items())
            and (at := _at(entry)) >= since
        ]
        for program in programs
    ]


def third(instants: list[list[float]]) -> float:
    """The third of all."""
    return sorted(itertools.chain.from_iterable(instants))[2]


def applied_without(proxy: Program, control: Program, *, since: float) -> float:
    """When the proxy applied the first placement that followed the ejection."""
    ejected = logged([control], "engine_ejected", since=since, engine=VICTIM)[0][0]
    return next(at for at in logged([proxy], "placement", since=since)[0] if at >= ejected - 0.001)


# --- rounds -----------------------------------------------------------------------------------------------------------


async def refused(made: Scene, seen: Streams, began: float) -> float:
    """From the third refused connection to the last proxy's placement without the engine."""
    await made.misbehave(VICTIM, "refuse")
    await _logged(made, "engine_ejected", began)
    await asyncio.sleep(0.5)  # the logs of proxies are in
    failures = logged(made.proxies, "leg_failed", since=began, engine=VICTIM)
    return max(applied_without(p, made.control, since=began) for p in made.proxies) - third(failures)


async def no_token(made: Scene, seen: Streams, began: float) -> float:
    """From the third deadline to the hold."""
    _, body = await made.stage.get(f"127.0.0.1:{made.stage.ports[VICTIM]}", "/sim/requests")
    before = json.loads(body)[-1]["number"]
    await made.misbehave(VICTIM, "core-stopped")
    held = await _logged(made, "hold_placed", began, hold="verification")
    wall = time.time() - time.monotonic()
    _, body = await made.stage.get(
        f"127.0.0.1:{made.stage.ports[VICTIM]}", f"/sim/requests?phase=decode&after={before}"
    )
    silent = [
        r["started_at"] + wall + DEADLINE_S
        for r in json.loads(body)
        if r["tokens"] == 0 and not (r["request_id"] or "").startswith("probe-")
    ]
    third_at: float = sorted(silent)[2]
    return held - third_at


async def stalled(made: Scene, seen: Streams, began: float) -> float:
    """From the third stream that was silent for long enough to the hold."""
    await made.misbehave(VICTIM, "stall", after=3)
    held = await _logged(made, "hold_placed", began, hold="verification")
    return held - (sorted(seen.open.values())[2] + STALL_S)


async def _logged(made: Scene, event: str, began: float, **fields: Any) -> float:
    return float(
        await until(
            lambda: (logged([made.control], event, since=began, engine=VICTIM, **fields)[0] or [0.0])[0],
            f"{event} of {VICTIM}",
            30,
        )
    )


Round = Callable[[Scene, Streams, float], Awaitable[float]]
ROUNDS: dict[str, Round] = {"refused": refused, "no token": no_token, "stall": stalled}


async def measure(what: str, *, rounds: int, proxies: int) -> list[float]:
    """The same fault again and again; the engine is back before each."""
    layout = Layout(proxies=proxies, sections=SECTIONS)
    spans: list[float] = []
    with tempfile.TemporaryDirectory(prefix="narwhal-detect-") as directory:
        async with (
            scene(layout, Path(directory)) as made,
            watching(made.control.at["grpc"]) as watch,
            streaming(made.addresses) as seen,
        ):
            for _ in range(rounds):
                await _healthy(made, watch, seen)
                began = time.time()
                spans.append(await ROUNDS[what](made, seen, began))
                await _logged(made, "engine_ejected", began)
                await until(lambda: not watch.serves(VICTIM), f"{VICTIM} is out", 30)
                await _behave(made)
    return spans


async def _behave(made: Scene) -> None:
    """The engine is well again; one that refuses connections cannot be told to be, and is started anew."""
    try:
        await made.behave(VICTIM)
    except (aiohttp.ClientError, OSError):
        await made.kill(VICTIM)
        await made.start_engine(VICTIM)


async def _healthy(made: Scene, watch: Watch, seen: Streams) -> None:
    await until(lambda: watch.serves(VICTIM), f"{VICTIM} serves", 60)
    served = seen.served
    await until(lambda: seen.served >= served + 2 * STREAMS, "streams are served", 60)


def told(what: str, spans: list[float]) -> str:
    """A line of the result, in milliseconds."""
    ordered = sorted(spans)
    p90 = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
    numbers = (statistics.median(ordered), p90, ordered[-1], AIMS[what])
    return f"{what:10}" + "".join(f"{1000 * number:10.1f}" for number in numbers)


async def main() -> int:
    """Measures and prints; exit status 1 when a median misses its aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--proxies", type=int, default=2)
    parser.add_argument("--only", choices=list(ROUNDS))
    chosen = parser.parse_args()
    missed = False
    print(f"{chosen.rounds} rounds, {chosen.proxies} proxies; milliseconds")
    print(f"{'':10}{'p50':>10}{'p90':>10}{'max':>10}{'aim':>10}")
    for what in [chosen.only] if chosen.only else ROUNDS:
        spans = await measure(what, rounds=chosen.rounds, proxies=chosen.proxies)
        print(told(what, spans), flush=True)
        missed |= statistics.median(spans) > AIMS[what]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
