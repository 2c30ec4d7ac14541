"""How `narwhalctl` prints: one set of facts, as a table, a wide table, JSON or YAML.

A command hands over its facts (a value of `narwhal.cli.model` or its neighbours) and a function that lays them out for
people; JSON and YAML come from the facts alone. On a terminal tables are ruled and coloured. In a pipe they are plain
columns: nothing is drawn, folded or cut, every empty cell is `-`, and columns are two or more spaces apart.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

import yaml
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from narwhal.cli.options import Output, Settings
from narwhal.cli.plain import plain

GAP = 2  # columns between columns
NARROWEST = 24  # columns in which words can still be read
READER_GONE = 141  # what a shell shows for a program that SIGPIPE ended


class Tone(StrEnum):
    """What a piece of text means to whom reads it; its value is the style on a terminal with colour."""

    NONE = ""
    GOOD = "green"
    WARN = "yellow"
    BAD = "bold red"
    DIM = "dim"
    HEAD = "bold"


@dataclass(frozen=True)
class Say:
    """Text with a tone."""

    text: str
    tone: Tone = Tone.NONE


Cell = str | Say


@dataclass(frozen=True)
class Line:
    """Text on a line of its own, the parts one after the other."""

    parts: tuple[Cell, ...]

    def __init__(self, *parts: Cell) -> None:
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of equal length; without `columns` it has no header."""

    rows: Sequence[Sequence[Cell]]
    columns: Sequence[str] = ()


Block = Line | Table
Layout = Callable[[bool], Iterable[Block]]  # whether it is wide → what is printed


class Printer:
    """Prints to stdout as the settings say, and flushes: what a program at the other end waits for is there at once."""

    def __init__(self, settings: Settings) -> None:
        self._output = settings.output or Output.TABLE
        self._out = sys.stdout
        self._console: Console | None = None
        if sys.stdout.isatty():
            # color_system=None also leaves out bold and dim: NO_COLOR then means no escape sequence at all.
            self._console = Console(
                file=self._out,
                color_system="auto" if settings.colour else None,
                highlight=False,
                markup=False,
                emoji=False,
            )

    def show(self, facts: Any, layout: Layout) -> None:
        """One answer."""
        if self._output is Output.JSON:
            self._write(json.dumps(plain(facts), indent=2, ensure_ascii=False) + "\n")
        elif self._output is Output.YAML:
            self._write(yaml.safe_dump(plain(facts), sort_keys=False, allow_unicode=True))
        else:
            self._blocks(layout(self._output is Output.WIDE))

    def item(self, facts: Any, layout: Layout) -> None:
        """One of many answers: a line of JSON, a YAML document, or the lines of the layout."""
        if self._output is Output.JSON:
            self._write(json.dumps(plain(facts), ensure_ascii=False, separators=(",", ":")) + "\n")
        elif self._output is Output.YAML:
            self._write("---\n" + yaml.safe_dump(plain(facts), sort_keys=False, allow_unicode=True))
        else:
            self._blocks(layout(self._output is Output.WIDE))

    def _blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if self._console is None:
                self._write(_plain_line(block) if isinstance(block, Line) else _plain_table(block))
                continue
            with self._console.capture() as captured:
                if isinstance(block, Line):
                    self._console.print(*(_rich(part) for part in block.parts), sep="", soft_wrap=True)
                else:
                    self._table(self._console, block)
            self._write(captured.get())

    @staticmethod
    def _table(console: Console, table: Table) -> None:
        """The last column, which holds the words, folds where the others leave it room. A table that is wider than the
        terminal all the same goes out as it is, and the terminal wraps its lines."""
        widths = _widths(table)
        if sum(widths[:-1]) + GAP * (len(widths) - 1) + min(widths[-1], NARROWEST) <= console.width:
            console.print(_rich_table(table))
            return
        for row in _rows(table):
            cells = [_rich(cell) for cell in row]
            for cell, width in zip(cells[:-1], widths[:-1], strict=True):
                cell.pad_right(width + GAP - cell.cell_len)
            console.print(RichText.assemble(*cells), soft_wrap=True)

    def _write(self, text: str) -> None:
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        try:
            self._out.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._out.flush()
        except BrokenPipeError:
            _reader_gone()


def _reader_gone() -> NoReturn:
    # What is still buffered would fail again when the interpreter closes stdout.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(READER_GONE)


def clean(text: str) -> str:
    """One line without control characters: details come from engines, and a terminal would obey them."""
    return "".join(c if c.isprintable() else " " if c.isspace() else f"\\x{ord(c):02x}" for c in text)


def _text(cell: Cell) -> str:
    return clean(cell.text if isinstance(cell, Say) else cell)


def _rich(cell: Cell) -> RichText:
    return RichText(_text(cell), style=cell.tone.value if isinstance(cell, Say) else "")


def _plain_line(line: Line) -> str:
    return "".join(_text(part) for part in line.parts) + "\n"


def _rows(table: Table) -> list[list[Cell]]:
    """Header and rows, without an empty cell."""
    rows = [[cell if _text(cell) else Say("-", Tone.DIM) for cell in row] for row in table.rows]
    return [[Say(column, Tone.HEAD) for column in table.columns], *rows] if table.columns else rows


def _widths(table: Table) -> list[int]:
    return [max(cell_len(_text(cell)) for cell in column) for column in zip(*_rows(table), strict=True)]


def _plain_table(table: Table) -> str:
    widths = _widths(table)
    lines = ([(_text(cell), width) for cell, width in zip(row, widths, strict=True)] for row in _rows(table))
    return "".join((" " * GAP).join(c + " " * (w - cell_len(c)) for c, w in line).rstrip() + "\n" for line in lines)


def _rich_table(table: Table) -> RichTable:
    ruled = bool(table.columns)
    made = RichTable(
        box=box.SIMPLE_HEAD if ruled else None,
        show_header=ruled,
        show_edge=False,
        pad_edge=False,
        padding=(0, GAP - ruled, 0, 0),  # the rule's own divider takes one
        header_style="bold",
    )
    widths = _widths(table)
    for at, column in enumerate(table.columns or [""] * len(widths)):
        made.add_column(column, overflow="fold", no_wrap=at < len(widths) - 1)
    for row in _rows(table)[ruled:]:
        made.add_row(*map(_rich, row))
    return made


def done(told: Iterable[str], *, dry_run: bool) -> Iterator[Block]:
    """What a command brought about, one line each; of a dry run what it would have."""
    if dry_run:
        yield Line(Say("nothing was changed; without --dry-run:", Tone.WARN))
    yield from map(Line, told)


def age(seconds: float) -> str:
    """A duration as people say it, two units at most: `4s`, `2m10s`, `3h05m`, `2d4h`."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 60:
        return f"{whole}s"
    if minutes < 60:
        return f"{minutes}m{whole % 60:02d}s"
    if hours < 24:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{days}d{hours % 24}h"


def latency(seconds: float) -> str:
    """How long something took: `0.4ms`, `12ms`, `1.2s`."""
    if seconds < 0.01:
        return f"{seconds * 1000:.1f}ms"
    return f"{seconds * 1000:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"


def counts(values: Iterable[tuple[str, int]]) -> str:
    """`name count` pairs, separated by commas."""
    return ", ".join(f"{name} {count}" for name, count in values)


def some(count: int, thing: str) -> str:
    """`1 proxy`, `2 proxies`."""
    plural = thing[:-1] + "ies" if thing.endswith("y") else thing + ("es" if thing.endswith("s") else "s")
    return f"{count} {thing if count == 1 else plural}"


def notice(text: str) -> None:
    """A line for people about how things go, on stderr: never part of the data."""
    print(f"narwhalctl: {clean(text)}", file=sys.stderr, flush=True)
