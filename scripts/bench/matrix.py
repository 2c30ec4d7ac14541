"""The fault matrix: every fault on a prefill and on a decode engine, under an open load of 50 streams a second.

`python -m scripts.bench.matrix` starts, for each fault and each of two settings (defaults; bounded serving with
`max_attempts: 3`), a fleet of its own: three prefill and three decode engines (one process each), `narwhal-control` and
two proxies. Requests come at fixed instants from the official client, which tries nothing twice, whatever became of
those before. Prints a table, and with `--picture FILE.png` draws it (needs matplotlib). About 45 minutes; `--only`
chooses faults by a part of their names. Exit status 1 when something happened that must never happen.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.bench.faults import Fault, core_killed, killed, restarted, shows, stopped
from scripts.bench.scene import Layout
from scripts.bench.tour import GIVEN_UP_S, Seen, table, visit

RATE = 50.0  # streamed requests a second
ENGINES = ("p1", "p2", "p3", "d1", "d2", "d3")
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bounded": {"max_attempts": 3, "queue_capacity": 256, "queue_timeout_s": 30},
}
INTERVAL_S = 1.0
AT_ONCE_S = 1.0  # refused connections, cut streams, error answers
DEFAULT_FAILURES = 8  # about; with the settings of the product
NEVER_S = 0.0  # the engine is not to be taken out


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault on one engine; how soon the engine must be out, from the first bad outcome to the placement without
    it."""

    fault: Fault
    contained_s: float


def rows() -> list[Row]:
    """The matrix. Silence is known after its limit, which the first bad outcome has seen already: two intervals."""
    silence_s = 2 * INTERVAL_S
    both: list[Row] = []
    for engine, phase in (("d1", "decode"), ("p1", "prefill")):
        both += [
            Row(fault=killed(f"SIGKILL, {phase}", engine), contained_s=AT_ONCE_S),
            Row(fault=restarted(f"SIGKILL and restart, {phase}", engine), contained_s=AT_ONCE_S),
            Row(fault=stopped(f"SIGSTOP, SIGCONT, {phase}", engine), contained_s=silence_s),
            Row(fault=shows(f"generation dead, {phase}", engine, "core-stopped"), contained_s=silence_s),
            Row(fault=core_killed(f"core killed, {phase}", engine), contained_s=AT_ONCE_S),
            Row(fault=shows(f"500s, {phase}", engine, "status", status=500), contained_s=AT_ONCE_S),
            Row(fault=shows(f"404s, {phase}", engine, "status", status=404), contained_s=AT_ONCE_S),
            Row(
                fault=shows(f"429s, {phase}", engine, "status", status=429, out=False, within_s=10.0),
                contained_s=NEVER_S,
            ),
            Row(fault=shows(f"closes unanswered, {phase}", engine, "close-before-answer"), contained_s=AT_ONCE_S),
        ]
    decode = [
        Row(fault=shows("stall mid-stream, decode", "d1", "stall", after=3), contained_s=silence_s),
        Row(fault=shows("cut mid-stream, decode", "d1", "cut", after=3), contained_s=AT_ONCE_S),
        Row(fault=shows("cut before the first token, decode", "d1", "cut", after=0), contained_s=AT_ONCE_S),
        Row(fault=shows("error event, decode", "d1", "error-event", after=0), contained_s=AT_ONCE_S),
        Row(fault=shows("marker without tokens, decode", "d1", "done-without-tokens"), contained_s=AT_ONCE_S),
        Row(fault=shows("slow first token, decode", "d1", "slow-first-token", seconds=30.0), contained_s=silence_s),
    ]
    prefill = [
        Row(fault=shows("answer cut, prefill", "p1", "cut-answer"), contained_s=AT_ONCE_S),
        Row(
            fault=shows("unusable handoff, prefill", "p1", "bad-handoff", variant="no-engine-id"),
            contained_s=AT_ONCE_S,
        ),
        Row(fault=shows("KV unreadable, prefill", "p1", "serve-fails"), contained_s=AT_ONCE_S),
    ]
    return [*both, *decode, *prefill]


BEGUN = ("SIG", "core killed", "generation dead", "stall", "cut mid", "closes")  # streams may have begun there


def judged(row: Row, seen: Seen, settings: str) -> list[str]:
    """What must never happen, and did."""
    wrong = list(seen.wrong)
    # None: nothing bad came of it before the engine was out; that it was, the tour has seen to.
    if row.contained_s and seen.out_s is not None and seen.out_s > row.contained_s:
        wrong.append(f"contained in {seen.out_s:.2f} s, not in {row.contained_s:g}")
    if seen.held:
        wrong.append(f"healthy engines held: {seen.held}")
    if seen.double_pulls or seen.late_pulls:
        wrong.append(f"{seen.double_pulls} double and {seen.late_pulls} late KV pulls")
    if settings == "bounded":
        if seen.before:
            wrong.append(f"{seen.before} requests failed before their first byte")
        if seen.midway and not row.fault.name.startswith(BEGUN):
            wrong.append(f"{seen.midway} requests failed that had not begun there")
    return wrong


async def visited(row: Row, settings: str, rate: float) -> Seen:
    """One cell of the matrix."""
    layout = Layout(engines=ENGINES, sections={"serving": SETTINGS[settings]})
    fault = replace(row.fault, layout=layout)
    with tempfile.TemporaryDirectory(prefix="narwhal-matrix-") as directory:
        try:
            async with asyncio.timeout(GIVEN_UP_S):
                seen = await visit(fault, Path(directory), rate=rate)
        except (AssertionError, OSError) as error:
            seen = Seen(fault=fault.name, victim=fault.victim, wrong=[f"given up: {error}"])
    seen.wrong = judged(row, seen, settings)
    return seen


HEAD = ["fault", "settings", "before", "mid", "untrue", "hung", "served", "contained", "back", "double", "late", "held"]


def line(seen: Seen, settings: str) -> list[str]:
    """One line of the table."""
    spans = ["-" if span_s is None else f"{span_s:.2f}" for span_s in (seen.out_s, seen.back_s)]
    counts = [str(n) for n in (seen.before, seen.midway, seen.untrue, seen.hung, seen.served)]
    pulls = [str(seen.double_pulls), str(seen.late_pulls)]
    return [seen.fault, settings, *counts, *spans, *pulls, ", ".join(seen.held) or "-"]


LEGEND = """\
before, mid: failed requests, before the first byte and mid-stream; untrue: looked whole but were not; contained: from
the first bad outcome to the placement without the engine, s; back: from the fault's end to the placement with it, s;
double, late: KV pulls; held: healthy engines on a soft hold"""


def draw(cells: dict[tuple[str, str], Seen], file: Path) -> None:
    """Failed requests and containment, fault by fault."""
    import matplotlib as mpl  # noqa: PLC0415 - needed for the picture only

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    names = list(dict.fromkeys(name for name, _ in cells))
    height = 0.36 * len(names) + 1.5
    figure, (failures, times) = plt.subplots(1, 2, figsize=(14, height), sharey=True, layout="constrained")
    for shift, settings in enumerate(SETTINGS):
        at = [n + 0.38 * shift for n in range(len(names))]
        seen = [cells.get((name, settings)) for name in names]
        before = [s.before if s else 0 for s in seen]
        midway = [s.midway if s else 0 for s in seen]
        failures.barh(at, before, 0.36, label=f"{settings}: before the first byte")
        failures.barh(at, midway, 0.36, left=before, label=f"{settings}: mid-stream", alpha=0.6)
        times.barh(at, [(s.out_s or 0.0) if s else 0.0 for s in seen], 0.36, label=settings)
    failures.set_yticks(range(len(names)), names)
    failures.invert_yaxis()
    failures.set_xlabel(f"failed requests, of {RATE:g} a second")
    times.set_xlabel("from the first bad outcome to the placement without the engine, s")
    for axes in (failures, times):
        axes.legend(fontsize="small")
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=110)


async def main() -> int:
    """The whole matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="a part of a fault's name")
    parser.add_argument("--settings", choices=SETTINGS, action="append", help="both unless given")
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was seen there")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw it there (PNG)")
    chosen = parser.parse_args()
    cells: dict[tuple[str, str], Seen] = {}
    for row in rows():
        if chosen.only and not any(part in row.fault.name for part in chosen.only):
            continue
        for settings in chosen.settings or SETTINGS:
            seen = cells[row.fault.name, settings] = await visited(row, settings, chosen.rate)
            print("  ".join(line(seen, settings)), *seen.wrong, sep="\n    ", file=sys.stderr, flush=True)
            if chosen.json:
                kept = [{"settings": s, **asdict(each)} for (_, s), each in cells.items()]
                chosen.json.write_text(json.dumps(kept, indent=1))
    print(table([HEAD, *(line(seen, settings) for (_, settings), seen in cells.items())]))
    print(f"\n{LEGEND}\n")
    for (name, settings), seen in cells.items():
        for wrong in seen.wrong:
            print(f"WRONG: {name}, {settings}: {wrong}")
    if chosen.picture:
        draw(cells, chosen.picture)
    return 1 if any(seen.wrong for seen in cells.values()) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
