"""What cores were given in simulated worlds, given to them again: the same effects, from a start or from a snapshot."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from narwhal.control.core.events import Answer, Reported
from narwhal.control.core.journal import Head
from narwhal.control.core.records import EventKind
from narwhal.control.replay import AsItWas, Course, Reading, lines_of
from narwhal.control.what_if import Answers, WhatIf
from tests.simulation.journals import STEPS, journals_of

SEEDS = range(1, 17)


def replayed(files: Sequence[Path]) -> AsItWas:
    """These files again. Fails where a step was decided otherwise."""
    lines = lines_of(files, Reading())
    head = next(lines)
    assert isinstance(head, Head)
    was = AsItWas(head)
    for line in lines:
        assert not isinstance(line, Head), "nothing is missing"
        was.take(line)
        assert was.first is None
    return was


@pytest.mark.parametrize("seed", SEEDS)
def test_the_journals_of_a_run_replay_to_identical_effects(seed: int, tmp_path: Path) -> None:
    terms = journals_of(seed, tmp_path)
    assert terms
    steps = 0
    for files in terms.values():
        steps += (whole := replayed(files)).steps
        assert sum(replayed([file]).steps for file in files) == whole.steps, "each file replays alone"
    assert steps > STEPS, "and some of them begin with a snapshot"


def ejections(course: Course) -> list[str]:
    return [told.record.engine for told in course.told if told.record.kind is EventKind.ENGINE_EJECTED]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_if_nothing_had_been_otherwise_takes_the_same_engines_out(seed: int, tmp_path: Path) -> None:
    for files in journals_of(seed, tmp_path).values():
        head, *steps = lines_of(files, Reading())
        assert isinstance(head, Head)
        was, answers = AsItWas(head), Answers()
        for step in steps:
            assert not isinstance(step, Head)
            if isinstance(step.what, get_args(Answer)):
                answers.answered(step.what, now=step.now)
            answers.asked(was.take(step), now=step.now)
        own, other = AsItWas(head), WhatIf(head, head.settings, answers)
        for step in steps:
            assert not isinstance(step, Head)
            other.take(step.what, now=step.now, was=own.core.incarnations() if isinstance(step.what, Reported) else {})
            own.take(step)
        assert ejections(other.course) == ejections(was.course)
