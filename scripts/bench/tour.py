"""Every fault on real processes: what users saw, how long it took, and who was blamed.

`python -m scripts.bench.tour` starts, for each fault, a fleet of its own: engines (one process each), `narwhal-control`
and two proxies with the product's default settings, under load from the official client, which tries nothing twice.
About 12 minutes; `--only` chooses faults by a part of their names, `--json` keeps everything that was seen. Exit
status 1 when any fault was judged wrongly.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.bench.faults import FAULTS, Fault
from scripts.bench.scene import Scene, scene
from scripts.bench.users import End, Users
from scripts.bench.watching import Watch, watching
from tests.process.harness import until

WARM_UP = 24  # requests that must have been served before the fault
AFTER_OUT_S = 3.0  # watched on after the victim is out
AFTER_BACK_S = 3.0  # and after it is back
RETURN_S = 60.0  # in which it must be back after the fault has ended
SOFT = ("verification", "quarantine", "relapse")
GIVEN_UP_S = 300.0


@dataclass(kw_only=True)
class Seen:
    """What came of one fault. Spans in seconds."""

    fault: str
    victim: str
    before: int = 0
    midway: int = 0
    untrue: int = 0
    hung: int = 0
    late: int = 0  # of these, requests that began after the victim was out and before the fault ended
    served: int = 0
    double_pulls: int = 0  # of one KV handoff, as engines that still live tell
    late_pulls: int = 0  # after its lease
    statuses: dict[int, int] = field(default_factory=dict)
    last_placed_s: float | None = None  # from the first bad outcome to the last request placed on the victim
    out_s: float | None = None  # from the first bad outcome to the placement without the victim
    back_s: float | None = None  # from the fault's end to the placement with it
    blamed: list[str] = field(default_factory=list)  # ejected engines, suspect proxies
    causes: list[str] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)  # other engines → seconds on a soft hold
    explained: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # what must not be


async def visit(fault: Fault, directory: Path, *, rate: float = 0.0) -> Seen:
    """One fault, from a healthy fleet to a healthy fleet. `rate`: requests a second, at fixed instants."""
    seen = Seen(fault=fault.name, victim=fault.victim)
    async with scene(fault.layout, directory) as made, watching(made.control.at["grpc"]) as watch:
        users = Users(addresses=made.addresses, count=fault.users, rate=rate)
        async with users.asking():
            await until(lambda: users.ends(since=0)[End.WHOLE] >= WARM_UP, "users are served", 30)
            began = time.monotonic()
            await fault.begin(made)
            await _take_out(fault, made, watch, seen, began)
            ended = time.monotonic()
            await fault.end(made)
            came = time.monotonic()
            await _bring_back(fault, watch, seen, came)
            await asyncio.sleep(AFTER_BACK_S)
        _account(fault, users, watch, seen, began=began, ended=ended)
        totals = await made.ledger()
        seen.double_pulls, seen.late_pulls = totals["double_pulls"], totals["late_pulls"]
        await _times(fault, made, users, watch, seen, began=began, ended=ended)
    _judge(fault, watch, seen, began)
    return seen


async def _take_out(fault: Fault, made: Scene, watch: Watch, seen: Seen, began: float) -> None:
    """Wait until the victim is out, or for as long as nobody must be."""
    if not fault.out:
        await asyncio.sleep(fault.within_s)
    else:
        try:
            await until(lambda: _ejected(watch, began) & {fault.victim}, f"{fault.victim} is ejected", fault.within_s)
            if fault.killed or watch.serves(fault.victim) is False:
                seen.explained = (await made.ctl("explain", fault.victim)).splitlines()
            await asyncio.sleep(AFTER_OUT_S)
        except AssertionError as late:
            seen.wrong.append(str(late))
    if not seen.explained:
        subject = fault.victim or fault.layout.engines[0]
        seen.explained = (await made.ctl("explain", subject)).splitlines()


async def _bring_back(fault: Fault, watch: Watch, seen: Seen, came: float) -> None:
    """Wait until every engine serves."""
    try:
        await until(lambda: all(map(watch.serves, fault.layout.engines)), "every engine serves again", RETURN_S)
    except AssertionError as late:
        seen.wrong.append(str(late))
    if fault.victim:
        back = watch.back_at(fault.victim, since=came)
        seen.back_s = None if back is None or back == came else back - came


def _ejected(watch: Watch, began: float) -> set[str]:
    return {t.engine for t in watch.events(since=began) if t.kind == "engine_ejected"}


def _account(fault: Fault, users: Users, watch: Watch, seen: Seen, *, began: float, ended: float) -> None:
    """What users saw from the fault on, and who was blamed for it."""
    ends = users.ends(since=began)
    seen.before, seen.midway = ends[End.BEFORE], ends[End.MIDWAY]
    seen.untrue, seen.hung, seen.served = ends[End.UNTRUE], ends[End.HUNG], ends[End.WHOLE]
    failed = users.failed(since=began)
    for asked in failed:
        seen.statuses[asked.status] = seen.statuses.get(asked.status, 0) + 1
    out = watch.out_at(fault.victim, since=began) if fault.victim else None
    if out is not None:
        seen.late = sum(out + 0.1 < asked.began_at < ended for asked in failed)
    seen.blamed = sorted(_ejected(watch, began) | watch.suspect_proxies)
    seen.causes = sorted({t.fields["cause"] for t in watch.events(since=began) if t.kind == "engine_ejected"})
    for name in fault.layout.engines:
        span = sum(watch.held(name, hold, since=began) for hold in SOFT)
        if name != fault.victim and span:
            seen.held[name] = round(span, 3)
    seen.events = [f"{t.at - began:8.3f} {t.kind}: {t.message}" for t in watch.events(since=began)]


async def _times(
    fault: Fault, made: Scene, users: Users, watch: Watch, seen: Seen, *, began: float, ended: float
) -> None:
    """From the first bad outcome to the last request placed on the victim, and to the placement without it."""
    failed = users.failed(since=began)
    bad = [at for at in (min((a.ended_at for a in failed), default=None), watch.first_counted(since=began)) if at]
    if not fault.victim or not bad:
        return
    first = min(bad)
    out = watch.out_at(fault.victim, since=began)
    seen.out_s = None if out is None else out - first
    if out is None:
        return
    # Of an engine whose process was stopped or died, what failed at the proxies says when it last got work.
    until_at = watch.back_at(fault.victim, since=out) or ended
    placed = [a.began_at for a in failed if a.began_at <= out + 0.1]
    if not fault.killed:
        placed += [at for at in await made.placed_at(fault.victim) if began <= at < min(until_at, ended)]
    seen.last_placed_s = max(placed, default=first) - first


def _judge(fault: Fault, watch: Watch, seen: Seen, began: float) -> None:
    right = {fault.victim} if fault.out else set()
    if fault.proxy:
        right.add(fault.proxy)
    if set(seen.blamed) != right:
        seen.wrong.append(f"blamed {seen.blamed}, not {sorted(right)}")
    if fault.event and fault.event not in {t.kind for t in watch.events(since=began)}:
        seen.wrong.append(f"no event {fault.event}")
    if seen.hung:
        seen.wrong.append(f"{seen.hung} requests hung")
    if seen.untrue:
        seen.wrong.append(f"{seen.untrue} answers looked whole and were not")


# --- telling -------------------------------------------------------------------------------------------------------


def _span(span_s: float | None) -> str:
    return "-" if span_s is None else f"{span_s:.2f}"


def row(seen: Seen) -> list[str]:
    """One line of the table."""
    held = ", ".join(f"{name} {span_s:.2f}" for name, span_s in seen.held.items())
    failures = f"{seen.before}/{seen.midway}/{seen.untrue}/{seen.hung}"
    return [
        seen.fault,
        seen.victim or "-",
        failures,
        str(seen.late),
        str(seen.served),
        _span(seen.last_placed_s),
        _span(seen.out_s),
        _span(seen.back_s),
        ", ".join(seen.blamed) or "nobody",
        held or "-",
        "WRONG" if seen.wrong else "right",
    ]


HEAD = ["fault", "engine", "failures", "late", "served", "last", "out", "back", "blamed", "others held", "verdict"]
LEGEND = """\
failures: before the first byte / mid-stream / looked whole but was not / hung; late: of these, begun while the engine
was out; last: from the first bad outcome to the last request placed there, s; out: to the placement without it, s;
back: from the fault's end to the placement with it, s; others held: healthy engines on a soft hold, s"""


def table(rows: list[list[str]]) -> str:
    """Rows in columns."""
    widths = [max(len(line[n]) for line in rows) for n in range(len(rows[0]))]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in rows)


def report(tour: list[Seen]) -> None:
    """Everything, for people."""
    print(table([HEAD, *map(row, tour)]))
    print(f"\n{LEGEND}\n")
    for seen in tour:
        print(f"{seen.fault}: {seen.explained[0] if seen.explained else ''}")
        for line in seen.explained[1:3]:
            print(f"    {line}")
        for wrong in seen.wrong:
            print(f"    WRONG: {wrong}")


async def main() -> int:
    """The tour."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="a part of a fault's name")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was seen there")
    chosen = parser.parse_args()
    faults = [f for f in FAULTS if not chosen.only or any(part in f.name for part in chosen.only)]
    if not faults:
        parser.error(f"no fault is named so; there are: {'; '.join(f.name for f in FAULTS)}")
    tour: list[Seen] = []
    for fault in faults:
        with tempfile.TemporaryDirectory(prefix="narwhal-tour-") as directory:
            try:
                async with asyncio.timeout(GIVEN_UP_S):
                    seen = await visit(fault, Path(directory))
            except (AssertionError, TimeoutError) as error:
                seen = Seen(fault=fault.name, victim=fault.victim, wrong=[f"given up: {error}"])
        tour.append(seen)
        print(f"{'WRONG' if seen.wrong else 'right'}: {seen.fault}", file=sys.stderr, flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps([asdict(each) for each in tour], indent=1))
    report(tour)
    return 1 if any(seen.wrong for seen in tour) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
