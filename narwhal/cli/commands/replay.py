"""`narwhalctl replay`: what an event journal holds, decided again, or what other settings would have made of it."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import click

from narwhal.cli.options import AnswerIsNo, Settings, UsageProblem, pass_settings
from narwhal.cli.plain import plain, utc
from narwhal.cli.render import Block, Cell, Line, Printer, Say, Table, Tone, age, notice, some
from narwhal.config import FleetFileError, load_fleet
from narwhal.control.core.events import Answer, Reloaded, Reported
from narwhal.control.core.journal import Head, Step
from narwhal.control.core.records import Record
from narwhal.control.core.settings import CoreSettings
from narwhal.control.plan import core_settings
from narwhal.control.replay import AsItWas, Course, Difference, Engine, Reading, ReplayError, files_of, lines_of
from narwhal.control.what_if import Answers, WhatIf, side_by_side

_ANSWERS = get_args(Answer)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event. With other settings `was` and `other` are its words on each side, empty where it did not happen."""

    time: str
    at: float  # seconds since the Unix epoch
    kind: str
    engine: str
    proxy: str
    same: bool
    was: str
    other: str


@dataclass(frozen=True, kw_only=True)
class EngineCourse:
    """What became of one engine."""

    id: str
    phases: tuple[str, ...]  # that it served at the end
    holds: tuple[str, ...]  # that it carried at the end
    incarnation: int
    ejections: int
    out_s: float  # time in which it served no phase


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """All of it."""

    files: tuple[str, ...]
    fleet: str
    holder: str
    epoch: int
    release: str
    begin: str  # the first line's instant
    seconds: float  # from there to the last step
    steps: int
    differing: int  # steps that were decided otherwise than then; 0: the same decisions came out
    first_difference: Difference | None
    missing: int  # steps that no file has
    cut: int  # files whose last line was cut off
    with_settings: str  # the other fleet file; empty without
    changed: dict[str, tuple[str, str]]  # settings that differ: then, at the first line, and in the other file
    reloads: int  # of the fleet file, that the journal has; with other settings they are left out there
    assumed: int  # questions that were answered by what the engine said at another time
    unanswered: int
    events: tuple[Event, ...]
    engines: tuple[EngineCourse, ...]
    other_engines: tuple[EngineCourse, ...] = field(default=())


@click.command()
@click.argument("journal", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--fleet",
    "other",
    metavar="OTHER.yaml",
    help="Show beside it what the settings of this file would have made of the same.",
)
@click.option("--all", "everything", is_flag=True, help="With --fleet: events that are the same on both sides too.")
@pass_settings
def replay(settings: Settings, journal: tuple[Path, ...], other: str | None, everything: bool) -> None:
    """Show what an event journal holds, or what would have been.

    JOURNAL is one or more files of one term of leadership, or the directory, of which the newest term is taken.

    Everything that the control process was told is given to the decision core again. Exits 1 when that decides anything
    else than the control process did. With --fleet the settings of another fleet file decide about the same.
    """
    try:
        replayed = _replayed(sorted(file for each in journal for file in files_of(each)), other)
    except ReplayError as error:
        raise UsageProblem(str(error)) from None
    if replayed.cut:
        notice(f"{some(replayed.cut, 'file')} end in the middle of a line; what came after it was not written")
    if replayed.missing:
        notice(f"{some(replayed.missing, 'step')} were not written; the replay goes on from the state after them")
    Printer(settings).show(replayed, lambda wide: _layout(replayed, everything or wide))
    if replayed.first_difference is not None:
        difference = replayed.first_difference
        raise AnswerIsNo(
            f"{some(replayed.differing, 'step')} decided otherwise than then, the first is step {difference.step}:\n"
            f"then: {difference.recorded}\nnow: {difference.made}"
        )


# --- replaying --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Pass:
    """The journal's own core, from the first line to the last."""

    head: Head
    was: AsItWas
    end: float
    reloads: int = 0
    reading: Reading
    answers: Answers


def _as_it_was(files: list[Path]) -> _Pass:
    reading, answers = Reading(), Answers()
    lines = lines_of(files, reading)
    head = next(lines)
    assert isinstance(head, Head)
    done = _Pass(head=head, was=AsItWas(head), end=head.now, reading=reading, answers=answers)
    for line in lines:
        done.end = line.now
        if isinstance(line, Head):
            done.was.begin_anew(line)
            continue
        done.reloads += isinstance(line.what, Reloaded)
        if isinstance(line.what, _ANSWERS):
            answers.answered(line.what, now=line.now)
        answers.asked(done.was.take(line), now=line.now)
    done.was.course.end(done.was.core, now=done.end)
    return done


def _with_others(files: list[Path], first: _Pass, settings: CoreSettings) -> WhatIf:
    lines = lines_of(files, Reading())
    next(lines)
    was, other = AsItWas(first.head), WhatIf(first.head, settings, first.answers)
    for line in lines:
        if isinstance(line, Step):
            before = was.core.incarnations() if isinstance(line.what, Reported) else {}
            other.take(line.what, now=line.now, was=before)
            was.take(line)
        else:
            was.begin_anew(line)
            other.begin_anew(line)
    other.course.end(other.core, now=first.end)
    return other


def _other_settings(file: str, head: Head) -> CoreSettings:
    try:
        settings = core_settings(load_fleet(file, os.environ))
    except FleetFileError as error:
        raise UsageProblem(str(error)) from None
    if settings.name != head.fleet:
        raise UsageProblem(f"{file} is of fleet {settings.name}, the journal of {head.fleet}")
    ours, theirs = ({e.id for e in s.engines} for s in (settings, head.settings))
    if ours != theirs:
        raise UsageProblem(f"{file} has other engines than the journal: {', '.join(sorted(ours ^ theirs))}")
    return settings


def _replayed(files: list[Path], other: str | None) -> Replayed:
    first = _as_it_was(files)
    head, course = first.head, first.was.course
    beside: WhatIf | None = None
    changed: dict[str, tuple[str, str]] = {}
    if other is not None:
        settings = _other_settings(other, head)
        changed = _changed(head.settings, settings)
        beside = _with_others(files, first, settings)
    return Replayed(
        files=tuple(map(str, files)),
        fleet=head.fleet,
        holder=head.holder,
        epoch=head.epoch,
        release=head.release,
        begin=utc(head.wall),
        seconds=first.end - head.now,
        steps=first.was.steps,
        differing=first.was.differing,
        first_difference=first.was.first,
        missing=first.reading.missing,
        cut=first.reading.cut,
        with_settings=other or "",
        changed=changed,
        reloads=first.reloads,
        assumed=beside.assumed if beside is not None else 0,
        unanswered=beside.unanswered if beside is not None else 0,
        events=tuple(_events(head, course, beside.course if beside is not None else course)),
        engines=_courses(course.engines),
        other_engines=_courses(beside.course.engines) if beside is not None else (),
    )


def _changed(was: CoreSettings, other: CoreSettings) -> dict[str, tuple[str, str]]:
    before, after = _flat(was), _flat(other)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def _flat(settings: CoreSettings) -> dict[str, str]:
    """Every setting by its own name, as a person writes it; those of an engine below its id."""
    flat: dict[str, str] = {}
    for name, value in plain(settings).items():
        if name == "engines":
            for engine in value:
                flat |= {f"{engine['id']}.{key}": _written(each) for key, each in engine.items() if key != "id"}
        elif isinstance(value, dict):
            flat |= {key: _written(each) for key, each in value.items()}
        else:
            flat[name] = _written(value)
    return flat


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "nothing"


def _events(head: Head, was: Course, other: Course) -> Iterator[Event]:
    for pair in side_by_side(was, other):
        record = pair.was or pair.other
        assert record is not None
        at = head.wall + pair.at - head.now
        yield Event(
            time=utc(at),
            at=at,
            kind=record.kind.value,
            engine=record.engine,
            proxy=record.proxy,
            same=pair.same,
            was=_words(pair.was),
            other=_words(pair.other),
        )


def _words(record: Record | None) -> str:
    return "" if record is None else record.message


def _courses(engines: dict[str, Engine]) -> tuple[EngineCourse, ...]:
    return tuple(
        EngineCourse(
            id=name,
            phases=engine.phases,
            holds=engine.holds,
            incarnation=engine.incarnation,
            ejections=engine.ejections,
            out_s=engine.out_s,
        )
        for name, engine in engines.items()
    )


# --- showing ----------------------------------------------------------------------------------------------------------


def _layout(replayed: Replayed, everything: bool) -> Iterator[Block]:
    yield Line(
        f"fleet {replayed.fleet}, control {replayed.holder}, epoch {replayed.epoch}: "
        f"{age(replayed.seconds)} from {replayed.begin}, {some(replayed.steps, 'step')}, ",
        Say("some decided otherwise than then", Tone.BAD)
        if replayed.differing
        else Say("all decided again as they were", Tone.GOOD),
    )
    if not replayed.with_settings:
        yield Table(rows=[(Say(e.time, Tone.DIM), e.kind, e.was) for e in replayed.events])
        yield from _engines(replayed)
        return
    changes = ", ".join(f"{name} {new} instead of {old}" for name, (old, new) in replayed.changed.items())
    yield Line(f"with {replayed.with_settings}: {changes or 'the same settings'}")
    if replayed.reloads:
        are = f"{some(replayed.reloads, 'reload')} of the fleet file {'is' if replayed.reloads == 1 else 'are'}"
        yield Line(Say(f"{are} left out beside it: its settings hold from beginning to end", Tone.WARN))
    if replayed.assumed or replayed.unanswered:
        yield Line(
            Say(
                f"{some(replayed.assumed, 'question')} to engines answered by what they said at another time, "
                f"{replayed.unanswered} by nobody",
                Tone.WARN,
            )
        )
    counts = Counter(event.same for event in replayed.events)
    yield Line(f"{some(counts[True], 'event')} the same, {counts[False]} not")
    shown = [event for event in replayed.events if everything or not event.same]
    if shown:
        yield Table(columns=("TIME", "SETTINGS", "KIND", "WORDS"), rows=[row for e in shown for row in _rows(e)])
    yield from _engines(replayed)


def _rows(event: Event) -> Iterator[tuple[Cell, ...]]:
    time, kind = Say(event.time, Tone.DIM), event.kind
    if event.same:
        yield (time, *(Say(text, Tone.DIM) for text in ("both", kind, event.was)))
        return
    if event.was:
        yield time, Say("then", Tone.WARN), kind, event.was
    if event.other:
        yield time, Say("other", Tone.GOOD), kind, event.other


def _engines(replayed: Replayed) -> Iterator[Block]:
    others = {engine.id: engine for engine in replayed.other_engines}
    columns = ["ENGINE", "EJECTED", "OUT", "AT THE END"]
    if others:
        columns = [columns[0], *(name for each in columns[1:] for name in (each, f"{each}, OTHER"))]
    rows = []
    for engine in replayed.engines:
        cells: list[Cell] = [engine.id]
        beside = others.get(engine.id) if others else None
        for one in (_ended, _out, _state):
            cells.append(one(engine))
            if others:
                cells.append(one(beside) if beside is not None else "")
        rows.append(cells)
    yield Table(columns=columns, rows=rows)


def _ended(engine: EngineCourse) -> Cell:
    return str(engine.ejections)


def _out(engine: EngineCourse) -> Cell:
    return f"{engine.out_s:.1f}s"


def _state(engine: EngineCourse) -> Cell:
    held = f" ({', '.join(engine.holds)})" if engine.holds else ""
    if engine.phases:
        return Say(f"serves {', '.join(engine.phases)}{held}", Tone.GOOD)
    return Say(f"serves nothing{held}", Tone.BAD)
