"""How fast a bad engine is out, as distributions over real processes.

`python -m scripts.bench.detect [--rounds N] [--proxies N]`; about five minutes with the defaults. Instants are those of
the logs of control and proxies, of users and of the simulated engines: all on one machine, so on one clock.

| what | from | to | aim |
|---|---|---|---|
| killed, connections refused | the third failure in a row | the last proxy's acknowledgement that it is out | 50 ms |
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
import grpc

from narwhal._pb import fleet_pb2, fleet_pb2_grpc
from scripts.bench.scene import Layout, Scene, scene
from scripts.bench.users import MODEL
from scripts.bench.watching import Watch, watching
from tests.process.harness import Program, until

VICTIM = "d1"
PER_S = 40
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


# What would find the same fault by another way is off.
ALONE: dict[str, dict[str, dict[str, float]]] = {
    "refused": {},
    "no token": {"recovery": {"stall_s": 0}},
    "stall": {"engine": {"first_token_timeout_s": 20, "kv_first_pull_timeout_s": 20}},
}


@dataclass(kw_only=True)
class Streams:
    """Requests that come one after the other. Instants are wall-clock seconds."""

    served: int = 0
    open: dict[int, float] = field(default_factory=dict)  # number of the stream → its last bytes, once it has any


@contextlib.asynccontextmanager
async def asking(addresses: list[str], *, streamed: bool) -> AsyncIterator[Streams]:
    """`PER_S` requests a second until the block ends, whatever becomes of those before; streams, or short answers in
    one piece."""
    seen = Streams()

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        body = {"model": MODEL, "prompt": f"number {number}", "max_tokens": TOKENS if streamed else 2}
        body["stream"] = streamed
        url = f"http://{addresses[number % len(addresses)]}/v1/completions"
        ended, status = b"", 0
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(url, json=body) as answer:
                status = answer.status
                async for chunk in answer.content.iter_any():
                    ended = chunk
                    seen.open[number] = time.time()
        seen.open.pop(number, None)
        seen.served += status == 200 and (not streamed or ended.endswith(b"[DONE]\n\n"))

    async def all_of_them(session: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                group.create_task(one(session, number))
                await asyncio.sleep(1 / PER_S)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        task = asyncio.create_task(all_of_them(session))
        try:
            yield seen
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


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


def decisive(made: Scene, *, since: float) -> float:
    """When a proxy saw the failure that the victim was ejected for, the third in a row as control counts: a proxy tells
    its successes with its next failure, so what others have failed before may not count any more."""
    (ejected, *_) = [e for e in made.control.events() if e.get("kind") == "engine_ejected" and _at(e) >= since]
    request = str(ejected["event"]).rpartition(", request ")[2].rsplit("-", 2)[0]
    failures = logged(made.proxies, "leg_failed", since=since, engine=VICTIM, request_id=request)
    return next(itertools.chain.from_iterable(failures))


async def acknowledged(made: Scene, watch: Watch) -> float:
    """When control has the acknowledgement of the last proxy for the first placement without the engine."""
    known = len(watch.placed)
    async with grpc.aio.insecure_channel(made.control.at["grpc"], options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        async with asyncio.timeout(30):
            while True:
                answer = await stub.ListProxies(fleet_pb2.ListProxiesRequest(), timeout=10)
                now = time.time()
                without = [p.version for p in watch.placed[known:] if p.engine == VICTIM and not p.serves]
                if without and all(p.acked_version >= without[0] for p in answer.proxies):
                    return now
                await asyncio.sleep(0.002)


# --- rounds -----------------------------------------------------------------------------------------------------------


async def refused(made: Scene, watch: Watch, seen: Streams, began: float) -> float:
    """From the third refused connection to the last proxy's acknowledgement."""
    acks = asyncio.create_task(acknowledged(made, watch))
    await made.kill(VICTIM)
    last = await acks
    return last - decisive(made, since=began)


async def no_token(made: Scene, watch: Watch, seen: Streams, began: float) -> float:
    """From the third deadline to the hold."""
    await made.misbehave(VICTIM, "core-stopped")
    held = await _logged(made, "hold_placed", began, hold="verification")
    wall = time.time() - time.monotonic()
    address = f"127.0.0.1:{made.stage.ports[VICTIM]}"
    _, body = await made.stage.get(address, "/sim/requests?phase=decode")
    silent = [
        r["started_at"] + wall + DEADLINE_S
        for r in json.loads(body)
        if r["tokens"] == 0
        and r["started_at"] + wall > began - DEADLINE_S
        and not (r["request_id"] or "").startswith("probe-")
    ]
    third_at: float = sorted(silent)[2]
    return held - third_at


async def stalled(made: Scene, watch: Watch, seen: Streams, began: float) -> float:
    """From the third stream that was silent for long enough to the hold."""
    await made.misbehave(VICTIM, "core-stopped")
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


Round = Callable[[Scene, Watch, Streams, float], Awaitable[float]]
ROUNDS: dict[str, Round] = {"refused": refused, "no token": no_token, "stall": stalled}


async def measure(what: str, *, rounds: int, proxies: int) -> list[float]:
    """The same fault again and again; the engine is back before each."""
    sections = {name: {**section, **ALONE[what].get(name, {})} for name, section in SECTIONS.items()}
    # Where streams must be under way on the victim, there is no other engine for them.
    layout = Layout(
        proxies=proxies, sections=sections, engines=("p1", "p2", "d1", *(() if what == "stall" else ("d2",)))
    )
    spans: list[float] = []
    with tempfile.TemporaryDirectory(prefix="narwhal-detect-") as directory:
        async with (
            scene(layout, Path(directory)) as made,
            watching(made.control.at["grpc"]) as watch,
            asking(made.addresses, streamed=what != "refused") as seen,
        ):
            for _ in range(rounds):
                await _healthy(made, watch, seen)
                began = time.time()
                spans.append(await ROUNDS[what](made, watch, seen, began))
                await _logged(made, "engine_ejected", began)
                await until(lambda: not watch.serves(VICTIM), f"{VICTIM} is out", 30)
                await _behave(made)
    return spans


async def _behave(made: Scene) -> None:
    """The engine is well again; one that was killed is started anew."""
    if made.engines[VICTIM].process.poll() is None:
        await made.behave(VICTIM)
    else:
        await made.start_engine(VICTIM)


async def _healthy(made: Scene, watch: Watch, seen: Streams) -> None:
    await until(lambda: watch.serves(VICTIM), f"{VICTIM} serves", 60)
    served = seen.served
    await until(lambda: seen.served >= served + PER_S, "requests are served", 60)


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
