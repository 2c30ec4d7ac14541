"""The event journal: every input of the core with its instant, and what the core made of it (JSON lines, version 1).

Decides: what a line means. It cannot see: files, nor when they are rotated. Pure.

| first line of a file | holds |
|---|---|
| `start` | what the core of a term of leadership started from: settings and resumed state |
| `snapshot` | the whole core after so many steps of the term: the file replays alone |

Each further line is a step: `n` its number in the term, `now` the core's instant, `in` the input, `out` the effects,
and `raised` when the input was refused, or could not be handled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from narwhal.control.core.codec import CodecError, decode, encode
from narwhal.control.core.effects import Effect
from narwhal.control.core.events import Input
from narwhal.control.core.handoff import SavedFleet
from narwhal.control.core.settings import CoreSettings
from narwhal.vocabulary import Stage

SCHEMA = "narwhal.journal"
SCHEMA_VERSION = 1
TICK = "Tick"  # the name of an input that is a stage of a monitor pass

_INPUTS: Mapping[str, type] = {kind.__name__: kind for kind in get_args(Input)}


class JournalError(ValueError):
    """The line is none that this release can replay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What the first line of a file says."""

    kind: str  # start or snapshot
    release: str  # of the program that wrote it
    fleet: str
    holder: str
    epoch: int  # of the term's first lease
    step: int  # steps of the term before this line
    wall: float  # seconds since the Unix epoch, at `now`
    now: float
    settings: CoreSettings
    saved: SavedFleet | None  # a start: what was resumed, aged to `now`; None: nothing was
    core: str  # a snapshot: the core, as `narwhal.control.snapshot` packs it; empty in a start


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One call of the core."""

    number: int  # in the term, from 1
    now: float
    what: Input | Stage  # an event, or a stage of a monitor pass
    out: tuple[Any, ...]  # its effects, as JSON values
    raised: str  # class and message; empty when it was handled


def head_line(head: Head) -> dict[str, Any]:
    """The JSON object of a first line."""
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **encode(head)}


def step_line(
    number: int, what: Input | Stage, effects: tuple[Effect, ...], raised: str, *, now: float
) -> dict[str, Any]:
    """The object of a step. Its leaves may be dataclasses, enumerations and sets: the writer encodes them."""
    name = TICK if isinstance(what, Stage) else type(what).__name__
    line: dict[str, Any] = {"n": number, "now": now, "in": [name, what], "out": effect_values(effects)}
    return {**line, "raised": raised} if raised else line


def effect_values(effects: tuple[Effect, ...]) -> list[list[Any]]:
    """Effects by their names, as in a step."""
    return [[type(effect).__name__, effect] for effect in effects]


def read_head(line: object) -> Head:
    """The first line of a file. Raises `JournalError` with the reason when this release does not know it."""
    if not isinstance(line, dict) or line.get("schema") != SCHEMA:
        raise JournalError("is not an event journal: its first line does not say so")
    version = line.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise JournalError(f"unknown schema_version {version!r}, this release reads {SCHEMA_VERSION}")
    try:
        head: Head = decode(Head, {k: v for k, v in line.items() if k not in ("schema", "schema_version")})
    except CodecError as error:
        raise JournalError(str(error)) from None
    if head.kind not in ("start", "snapshot") or (head.kind == "snapshot") != bool(head.core):
        raise JournalError(f"unknown kind of first line {head.kind!r}")
    return head


def read_step(line: object) -> Step:
    """A further line. Raises `JournalError`."""
    try:
        if not isinstance(line, dict):
            raise CodecError("must be an object")
        name, value = line["in"]
        kind = Stage if name == TICK else _INPUTS[name]
        return Step(
            number=decode(int, line["n"], "n"),
            now=decode(float, line["now"], "now"),
            what=decode(kind, value, "in"),
            out=tuple(line["out"]),
            raised=decode(str, line.get("raised", ""), "raised"),
        )
    except (CodecError, KeyError, TypeError, ValueError) as error:
        raise JournalError(f"unknown step: {type(error).__name__}: {error}") from None
