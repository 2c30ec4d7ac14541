"""The fault matrix: every fault on a prefill and on a decode engine, at the defaults and with bounded serving.

`python -m scripts.bench.matrix [--json FILE] [--picture FILE.png] [--only NAME] [--settings defaults|bounded]` starts,
for each cell, a fleet of its own: three prefill and three decode engines (one process each), `narwhal-control` and two
proxies, under an open load of 50 streaming requests a second that tries nothing twice. About 25 minutes. Bounded
serving is `serving.max_attempts: 3`; everything else is as in a minimal fleet file. A picture needs matplotlib.

| column | what |
|---|---|
| failed | requests: before the first byte / mid-stream / looked whole but were not / hung |
| contained | from the fault to the placement without the engine, seconds |
| back | from the fault's end to the placement with it, seconds |
| pulls | KV handoffs that were pulled twice / too late, by the ledgers of the engines that live |
| held | healthy engines that were held or ejected, and for how long |

Exit status 1 when a cell is not as it must be: with bounded serving nothing fails but streams that had begun on the
faulty engine, at the defaults at most `AT_MOST` requests; nothing looks whole that was not, hangs, or is pulled twice
or late; no healthy engine is held; the engine is out in time (`WITHIN_S`) and back.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp

from scripts.bench.arrivals import Arrivals
from scripts.bench.faults import Fault, killed, restarted, shows, stopped
from scripts.bench.scene import Layout, Scene, scene
from scripts.bench.tour import table
from scripts.bench.users import End
from scripts.bench.watching import Watch, watching
from tests.process.harness import until

ENGINES = ("p1", "p2", "p3", "d1", "d2", "d3")
VICTIMS = {"prefill": "p1", "decode": "d1"}
SETTINGS: dict[str, dict[str, Any]] = {"defaults": {}, "bounded": {"serving": {"max_attempts": 3}}}
AT_MOST = 8  # failed requests a fault at the defaults
WARM_UP = 150  # requests that must have been served before the fault
AFTER_S = 3.0  # watched on after the engine is out, and after it is back
RETURN_S = 60.0
OUT_S = 90.0  # given up
CELL_S = 400.0
HOLDS = ("verification", "quarantine", "relapse")
# The silence that a hang shows by: of a stream before its first token, of one after it, of a prefill.
INTERVALS_S = 2.0
FIRST_TOKEN_S, STALL_S, SILENT_LEG_S = 5.0, 3.0, 30.0


class Shows(StrEnum):
    """By what a fault is found."""

    AT_ONCE = "at once"  # refused connections, cut streams, error answers
    FIRST_TOKEN = "no first token"
    STALL = "silence after tokens"
    SILENT_LEG = "a silent leg"


WITHIN_S = {
    Shows.AT_ONCE: 1.0,
    Shows.FIRST_TOKEN: FIRST_TOKEN_S + INTERVALS_S,
    Shows.STALL: STALL_S + INTERVALS_S,
    Shows.SILENT_LEG: SILENT_LEG_S + INTERVALS_S,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault of one phase's engine."""

    phase: str
    by: Shows
    make: Callable[[str], Fault]  # on this engine


def _row(phase: str, by: Shows, make: Callable[..., Fault], name: str, *more: Any, **params: Any) -> Row:
    return Row(phase=phase, by=by, make=lambda victim: make(name, victim, *more, **params))


_P, _D = "prefill", "decode"
ROWS: tuple[Row, ...] = (
    _row(_P, Shows.AT_ONCE, killed, "SIGKILL"),
    _row(_D, Shows.AT_ONCE, killed, "SIGKILL"),
    _row(_P, Shows.AT_ONCE, restarted, "SIGKILL, restart in place"),
    _row(_D, Shows.AT_ONCE, restarted, "SIGKILL, restart in place"),
    _row(_P, Shows.SILENT_LEG, stopped, "SIGSTOP"),
    _row(_D, Shows.FIRST_TOKEN, stopped, "SIGSTOP"),
    _row(_P, Shows.SILENT_LEG, shows, "health green, generation dead", "core-stopped"),
    _row(_D, Shows.FIRST_TOKEN, shows, "health green, generation dead", "core-stopped"),
    _row(_P, Shows.AT_ONCE, shows, "HTTP 500", "status", status=500),
    _row(_D, Shows.AT_ONCE, shows, "HTTP 500", "status", status=500),
    _row(_P, Shows.AT_ONCE, shows, "answer cut", "close-before-answer"),
    _row(_D, Shows.AT_ONCE, shows, "stream cut", "cut", after=3),
    _row(_P, Shows.AT_ONCE, shows, "unusable handoff", "bad-handoff", variant="no-engine-id"),
    _row(_D, Shows.AT_ONCE, shows, "error event, then the marker", "error-event", after=3),
    _row(_P, Shows.AT_ONCE, shows, "its KV unreadable", "serve-fails"),
    _row(_D, Shows.AT_ONCE, shows, "cannot read KV", "transfer-fails"),
    _row(_D, Shows.AT_ONCE, shows, "marker without tokens", "done-without-tokens"),
    _row(_D, Shows.STALL, shows, "stall mid-stream", "stall", after=3),
    _row(_D, Shows.FIRST_TOKEN, shows, "slow first token", "slow-first-token", seconds=30.0),
)


@dataclass(kw_only=True)
class Cell:
    """What came of one fault on one engine with one kind of settings. Spans in seconds."""

    fault: str
    phase: str
    settings: str
    within_s: float
    before: int = 0
    midway: int = 0
    untrue: int = 0
    hung: int = 0
    served: int = 0
    contained_s: float | None = None
    back_s: float | None = None
    double_pulls: int = 0
    late_pulls: int = 0
    held: dict[str, float] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)  # of some that failed
    wrong: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Requests."""
        return self.before + self.midway + self.untrue + self.hung


async def visit(row: Row, settings: str, directory: Path) -> Cell:
    """One cell, from a healthy fleet to a healthy fleet."""
    victim = VICTIMS[row.phase]
    fault = row.make(victim)
    cell = Cell(fault=fault.name, phase=row.phase, settings=settings, within_s=WITHIN_S[row.by])
    layout = Layout(engines=ENGINES, sections=SETTINGS[settings])
    async with scene(layout, directory) as made, watching(made.control.at["grpc"]) as watch:
        await until(lambda: all(map(watch.serves, ENGINES)), "every engine serves", RETURN_S)
        arrivals = Arrivals(addresses=made.addresses)
        async with arrivals.coming():
            await until(lambda: arrivals.ends(since=0)[End.WHOLE] >= WARM_UP, "requests are served", 30)
            began = time.monotonic()
            await fault.begin(made)
            with _noted(cell):
                await until(lambda: watch.out_at(victim, since=began), f"{victim} is out", OUT_S)
            await asyncio.sleep(AFTER_S)
            ended = time.monotonic()
            await fault.end(made)
            came = time.monotonic()
            with _noted(cell):
                await until(lambda: all(map(watch.serves, ENGINES)), "every engine serves again", RETURN_S)
            await asyncio.sleep(AFTER_S)
        await _account(cell, made, watch, arrivals, victim, began=began, ended=ended, came=came)
    _judge(cell)
    return cell


@contextlib.contextmanager
def _noted(cell: Cell) -> Iterator[None]:
    try:
        yield
    except AssertionError as late:
        cell.wrong.append(str(late).partition("\n")[0])


async def _account(
    cell: Cell,
    made: Scene,
    watch: Watch,
    arrivals: Arrivals,
    victim: str,
    *,
    began: float,
    ended: float,
    came: float,
) -> None:
    """What users saw of the fault, and what control did."""
    failed = [a for a in arrivals.asked if a.end is not End.WHOLE and a.ended_at >= began]
    cell.before, cell.midway, cell.untrue, cell.hung = (
        sum(a.end is end for a in failed) for end in (End.BEFORE, End.MIDWAY, End.UNTRUE, End.HUNG)
    )
    cell.served = arrivals.ends(since=began)[End.WHOLE]
    cell.words = [f"{a.began_at - began:.2f}-{a.ended_at - began:.2f} {a.end} {a.status} {a.words}" for a in failed][
        :20
    ]
    out = watch.out_at(victim, since=began)
    cell.contained_s = None if out is None else out - began
    # Of a process that was replaced at once the fault's end is the new one's start.
    back = None if out is None else watch.back_at(victim, since=max(out, came))
    cell.back_s = None if back is None else back - came
    for name in ENGINES:
        if name != victim:
            span = sum(watch.held(name, hold, since=began) for hold in HOLDS)
            ejected = any(t.kind == "engine_ejected" for t in watch.events(since=began, engine=name))
            if span or ejected:
                cell.held[name] = round(span, 2)
    for name in ENGINES:
        with contextlib.suppress(aiohttp.ClientError):
            totals = await made.stage.ledger(name)
            cell.double_pulls += totals["double_pulls"]
            cell.late_pulls += totals["late_pulls"]


def _judge(cell: Cell) -> None:
    if cell.settings == "bounded" and cell.before:
        cell.wrong.append(f"{cell.before} failed before the first byte")
    if cell.settings == "defaults" and cell.failed > AT_MOST:
        cell.wrong.append(f"{cell.failed} failed")
    if cell.untrue:
        cell.wrong.append(f"{cell.untrue} looked whole and were not")
    if cell.hung:
        cell.wrong.append(f"{cell.hung} hung")
    if cell.double_pulls or cell.late_pulls:
        cell.wrong.append(f"{cell.double_pulls} double, {cell.late_pulls} late pulls")
    if cell.held:
        cell.wrong.append(f"held: {', '.join(cell.held)}")
    if cell.contained_s is not None and cell.contained_s > cell.within_s:
        cell.wrong.append(f"out after {cell.contained_s:.2f} s, not within {cell.within_s:g}")


# --- telling ----------------------------------------------------------------------------------------------------------

HEAD = ["fault", "engine", "settings", "failed", "served", "contained", "within", "back", "pulls", "held", "verdict"]
LEGEND = """\
failed: before the first byte / mid-stream / looked whole but were not / hung; contained: from the fault to the
placement without the engine, s; back: from the fault's end to the placement with it, s; pulls: double / late; held:
healthy engines, s"""


def _span(span_s: float | None) -> str:
    return "-" if span_s is None else f"{span_s:.2f}"


def line(cell: Cell) -> list[str]:
    """One line of the table."""
    return [
        cell.fault,
        cell.phase,
        cell.settings,
        f"{cell.before}/{cell.midway}/{cell.untrue}/{cell.hung}",
        str(cell.served),
        _span(cell.contained_s),
        f"{cell.within_s:g}",
        _span(cell.back_s),
        f"{cell.double_pulls}/{cell.late_pulls}",
        ", ".join(f"{name} {span_s:.2f}" for name, span_s in cell.held.items()) or "-",
        "; ".join(cell.wrong) or "right",
    ]


def _picture(cells: list[Cell], file: Path) -> None:
    drawn = subprocess.run(
        [sys.executable, "-m", "scripts.bench.matrix_picture", str(file)],
        input=json.dumps([asdict(cell) for cell in cells]),
        text=True,
        check=False,
    )
    if drawn.returncode:
        print("no picture was drawn", file=sys.stderr)


def main() -> int:
    """The matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="a part of a fault's name")
    parser.add_argument("--phase", choices=list(VICTIMS), help="on such an engine only")
    parser.add_argument("--settings", choices=list(SETTINGS), help="with these only")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was seen there")
    parser.add_argument("--picture", metavar="FILE.png", type=Path, help="draw it there")
    chosen = parser.parse_args()
    rows = [
        row
        for row in ROWS
        if chosen.phase in (None, row.phase)
        and (not chosen.only or any(part in row.make("").name for part in chosen.only))
    ]
    cells: list[Cell] = []
    for row in rows:
        for settings in [chosen.settings] if chosen.settings else SETTINGS:
            cell = asyncio.run(_bounded(row, settings))
            cells.append(cell)
            print("  ".join(line(cell)), file=sys.stderr, flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps([asdict(each) for each in cells], indent=1))
    print(table([HEAD, *map(line, cells)]), f"\n\n{LEGEND}")
    if chosen.picture:
        _picture(cells, chosen.picture)
    return 1 if any(cell.wrong for cell in cells) else 0


async def _bounded(row: Row, settings: str) -> Cell:
    with tempfile.TemporaryDirectory(prefix="narwhal-matrix-") as directory:
        try:
            async with asyncio.timeout(CELL_S):
                return await visit(row, settings, Path(directory))
        except (AssertionError, TimeoutError) as error:
            wrong = [f"given up: {str(error).partition(chr(10))[0]}"]
            name = row.make("").name
            return Cell(fault=name, phase=row.phase, settings=settings, within_s=WITHIN_S[row.by], wrong=wrong)


if __name__ == "__main__":
    sys.exit(main())
