"""What cores were given in simulated worlds, given to them again: the same effects, from a start or from a snapshot."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from narwhal.control.core.journal import Head
from narwhal.control.replay import AsItWas, Reading, lines_of
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
