"""Reads an event journal and gives the core again what it was given: the same decisions come out.

Decides nothing: the core does. A last line that was cut off, as `kill -9` or a full disk leave it, ends its file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from narwhal.control.core.effects import Effect
from narwhal.control.core.events import Input
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.journal import Head, JournalError, Step, effect_values, read_head, read_step
from narwhal.control.core.records import Record
from narwhal.control.journal import encoded, journal_files
from narwhal.control.snapshot import SnapshotError, unpack
from narwhal.vocabulary import Stage


class ReplayError(Exception):
    """The journal cannot be replayed. The message says why, for an operator."""


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Reading:
    """What was found beside the lines."""

    cut: int = 0  # files whose last line was cut off
    missing: int = 0  # steps that no file has


def files_of(journal: Path) -> list[Path]:
    """The file itself; of a directory the files of its newest term, oldest first. Raises ReplayError."""
    if not journal.is_dir():
        if not journal.is_file():
            raise ReplayError(f"{journal}: no such file or directory")
        return [journal]
    terms = [list(files) for _, files in groupby(journal_files(journal), key=lambda f: f.stem.rpartition("-")[0])]
    if not terms:
        raise ReplayError(f"{journal}: holds no event journal")
    return terms[-1]


def lines_of(files: Iterable[Path], reading: Reading) -> Iterator[Head | Step]:
    """The lines of one term. The first is a head; further heads stand where a core has to be begun anew, since steps
    before them are missing. Raises ReplayError."""
    at: int | None = None  # steps of the term so far
    epoch: int | None = None
    for file in files:
        for number, value in _values(file, reading):
            try:
                if number > 1:
                    step = read_step(value)
                    at = step.number
                    yield step
                    continue
                head = read_head(value)
            except JournalError as error:
                raise ReplayError(f"{file}, line {number}: {error}") from None
            if epoch not in (None, head.epoch):
                raise ReplayError(f"{file}: is of epoch {head.epoch}, the file before it of {epoch}")
            epoch = head.epoch
            if head.kind == "snapshot" and head.step == at:
                continue
            reading.missing += head.step - at if at is not None and head.kind == "snapshot" else 0
            at = head.step
            yield head
    if at is None:
        raise ReplayError(f"{', '.join(map(str, files))}: holds no whole line")


def _values(file: Path, reading: Reading) -> Iterator[tuple[int, Any]]:
    """The numbered lines of a file as JSON values."""
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                try:
                    value = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    if line.endswith(b"\n"):
                        raise ReplayError(f"{file}, line {number}: not JSON: {error}") from None
                    reading.cut += 1
                    return
                yield number, value
    except OSError as error:
        raise ReplayError(str(error)) from None


# --- the core again ---------------------------------------------------------------------------------------------------


def core_of(head: Head) -> Fleet:
    """The core that the steps after `head` were given to. Raises ReplayError."""
    if head.kind == "start":
        return Fleet(head.settings, now=head.now, epoch=head.epoch, saved=head.saved)
    try:
        core = unpack(head.core)
    except SnapshotError as error:
        raise ReplayError(
            f"the snapshot after step {head.step} of release {head.release} cannot be taken up: {error}"
        ) from None
    if not isinstance(core, Fleet):
        raise ReplayError(f"the snapshot after step {head.step} holds a {type(core).__name__}")
    return core


def give(core: Fleet, what: Input | Stage, *, now: float) -> tuple[tuple[Effect, ...], str]:
    """What the core makes of it; and the exception in words, where it raises one."""
    try:
        return (core.tick(what, now=now) if isinstance(what, Stage) else core.handle(what, now=now)), ""
    except Exception as error:
        return (), f"{type(error).__name__}: {error}"


@dataclass(frozen=True, kw_only=True)
class Told:
    """One event, as an operator reads it."""

    at: float  # the core's instant
    record: Record


@dataclass(kw_only=True)
class Engine:
    """What became of one engine."""

    phases: tuple[str, ...] = ()  # that it serves at the end
    holds: tuple[str, ...] = ()  # that it carries at the end
    incarnation: int = 0
    ejections: int = 0
    out_s: float = 0.0  # time in which it served no phase


@dataclass(kw_only=True)
class Course:
    """How things went for one core."""

    told: list[Told] = field(default_factory=list)
    engines: dict[str, Engine] = field(default_factory=dict)
    _content: object = None
    _since: float | None = None

    def add(self, effects: Iterable[Effect], *, now: float) -> None:
        """Effects of a step."""
        for effect in effects:
            if isinstance(effect, Record):
                self.told.append(Told(at=now, record=effect))
                if effect.kind == "engine_ejected":
                    self.engines.setdefault(effect.engine, Engine()).ejections += 1

    def look(self, core: Fleet, *, now: float) -> None:
        """Who serves, after a step."""
        content = core.placement(now=now)
        passed = 0.0 if self._since is None else max(0.0, now - self._since)
        self._since = now
        for engine in self.engines.values():
            engine.out_s += 0.0 if engine.phases else passed
        if content is not self._content:
            self._content = content
            for name in self.engines.keys() - content.engines.keys():
                del self.engines[name]
            for name, entry in content.engines.items():
                self.engines.setdefault(name, Engine()).phases = tuple(sorted(phase.value for phase in entry.phases))

    def end(self, core: Fleet, *, now: float) -> None:
        """What the fleet looks like after the last step."""
        for view in core.view(now=now).engines:
            engine = self.engines.setdefault(view.id, Engine())
            engine.holds = tuple(str(hold.kind) for hold in view.holds)
            engine.incarnation = view.incarnation


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A step of which the core made something else than it had."""

    step: int
    now: float
    recorded: tuple[Any, ...]
    made: tuple[Any, ...]


class AsItWas:
    """The journal's own core, and whether it decides as it did."""

    def __init__(self, head: Head) -> None:
        self.core = core_of(head)
        self.course = Course()
        self.course.look(self.core, now=head.now)
        self.steps = 0
        self.first: Difference | None = None  # step that differed
        self.differing = 0

    def begin_anew(self, head: Head) -> None:
        """Steps are missing before this one."""
        self.core = core_of(head)
        self.course.look(self.core, now=head.now)

    def take(self, step: Step) -> tuple[Effect, ...]:
        """Gives the core the step; returns its effects."""
        effects, raised = give(self.core, step.what, now=step.now)
        made: tuple[Any, ...] = tuple(orjson.loads(encoded(effect_values(effects))))
        self.steps += 1
        if (made, raised) != (step.out, step.raised):
            self.differing += 1
            if self.first is None:
                recorded = (*step.out, step.raised) if step.raised else step.out
                self.first = Difference(
                    step=step.number, now=step.now, recorded=recorded, made=(*made, raised) if raised else made
                )
        self.course.add(effects, now=step.now)
        self.course.look(self.core, now=step.now)
        return effects
