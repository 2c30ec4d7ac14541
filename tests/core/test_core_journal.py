"""What the journal holds can be read back: every kind of input is made of what the codec knows."""

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from narwhal.control.core.codec import encode
from narwhal.control.core.events import EjectCommand, Input, Woke
from narwhal.control.core.journal import Head, JournalError, Step, head_line, read_head, read_step, step_line
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.settings import CoreSettings
from narwhal.vocabulary import Stage
from tests.core.rig import Rig, decode, prefill

PLAIN = (bool, int, float, str)


def unreadable(kind: Any, path: str) -> list[str]:
    """Where below `kind` something is that the codec does not know."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return [found for name, hint in hints.items() for found in unreadable(hint, f"{path}.{name}")]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return [] if len(inner) == 2 and inner[1] is Ellipsis and not unreadable(inner[0], path) else [path]
    if origin in (frozenset, Mapping, dict):
        key, *rest = inner
        named = (
            key is str
            or (key is int and origin is not frozenset)
            or (isinstance(key, type) and issubclass(key, StrEnum))
        )
        return [found for each in rest for found in unreadable(each, path)] if named else [path]
    if inner and type(None) in inner:
        (only,) = (each for each in inner if each is not type(None))
        return unreadable(only, path)
    known = isinstance(kind, type) and (kind in PLAIN or issubclass(kind, StrEnum))
    return [] if known else [path]


@pytest.mark.parametrize("kind", [*get_args(Input), Head], ids=lambda kind: str(kind.__name__))
def test_every_input_is_made_of_what_can_be_read_back(kind: type) -> None:
    assert unreadable(kind, kind.__name__) == []


START = Head(
    kind="start",
    release="1.2.3",
    fleet="fleet",
    holder="control-a",
    epoch=7,
    step=0,
    wall=1_700_000_000.5,
    now=1000.25,
    settings=CoreSettings(name="fleet", model="tiny", engines=(prefill("p"), decode("d"))),
    saved=Rig(prefill("p"), decode("d")).saved(),
    core="",
)


@pytest.mark.parametrize(
    "head", [START, replace(START, saved=None), replace(START, kind="snapshot", step=12, saved=None, core="cGFja2Vk")]
)
def test_a_first_line_is_read_back_as_it_was_written(head: Head) -> None:
    line = head_line(head)
    assert (line["schema"], line["schema_version"]) == ("narwhal.journal", 1)
    assert read_head(line) == head


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "is not an event journal: its first line does not say so"),
        ({}, "is not an event journal: its first line does not say so"),
        (head_line(START) | {"schema": "narwhal.handoff"}, "is not an event journal: its first line does not say so"),
        (head_line(START) | {"schema_version": 2}, "unknown schema_version 2, this release reads 1"),
        (head_line(START) | {"schema_version": True}, "unknown schema_version True, this release reads 1"),
        (head_line(START) | {"epoch": "7"}, "epoch: must be an integer, got str"),
        (head_line(START) | {"color": "red"}, "unknown field color"),
        (head_line(START) | {"kind": "end"}, "unknown kind of first line 'end'"),
        # A start has no core yet, and a snapshot is nothing without it.
        (head_line(START) | {"core": "cGFja2Vk"}, "unknown kind of first line 'start'"),
        (head_line(START) | {"kind": "snapshot"}, "unknown kind of first line 'snapshot'"),
    ],
)
def test_another_first_line_is_refused_with_the_reason(line: object, words: str) -> None:
    with pytest.raises(JournalError) as refused:
        read_head(line)
    assert str(refused.value) == words


EJECT = EjectCommand(engine="d", reason="smokes")
TOLD = Record(kind=EventKind.READY, message="ready")


def written(what: Input | Stage, raised: str = "") -> dict[str, Any]:
    """The line of a step as it comes back from JSON."""
    line = step_line(3, what, (TOLD,), raised, now=1000.5)
    (name, value), out = line["in"], line["out"]
    return line | {"in": [name, encode(value)], "out": [[kind, encode(effect)] for kind, effect in out]}


@pytest.mark.parametrize(
    ("what", "name", "raised"),
    [(EJECT, "EjectCommand", ""), (Woke(), "Woke", "ValueError: no"), (Stage.LIVENESS, "Tick", "")],
)
def test_a_step_is_read_back_as_it_was_written(what: Input | Stage, name: str, raised: str) -> None:
    line = step_line(3, what, (TOLD,), raised, now=1000.5)
    assert line == {"n": 3, "now": 1000.5, "in": [name, what], "out": [["Record", TOLD]]} | (
        {"raised": raised} if raised else {}
    )
    step = read_step(written(what, raised))
    assert step == Step(number=3, now=1000.5, what=what, out=(["Record", encode(TOLD)],), raised=raised)


STEP = written(EJECT)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "unknown step: CodecError: must be an object"),
        (STEP | {"in": ["Explode", {}]}, "unknown step: KeyError: 'Explode'"),
        (STEP | {"in": 5}, "unknown step: TypeError: "),
        (STEP | {"in": ["EjectCommand"]}, "unknown step: ValueError: "),
        (STEP | {"in": ["EjectCommand", {}]}, "unknown step: CodecError: missing field in.engine"),
        (STEP | {"in": ["Tick", "lunch"]}, "unknown step: CodecError: in: unknown Stage 'lunch'"),
        (STEP | {"n": "3"}, "unknown step: CodecError: n: must be an integer, got str"),
        (STEP | {"now": None}, "unknown step: CodecError: now: must be a number, got NoneType"),
        (STEP | {"raised": 1}, "unknown step: CodecError: raised: must be a string, got int"),
        (STEP | {"out": 1}, "unknown step: TypeError: "),
        ({k: v for k, v in STEP.items() if k != "n"}, "unknown step: KeyError: 'n'"),
    ],
)
def test_another_step_is_refused_with_the_reason(line: object, words: str) -> None:
    with pytest.raises(JournalError) as refused:
        read_step(line)
    assert str(refused.value).startswith(words)
