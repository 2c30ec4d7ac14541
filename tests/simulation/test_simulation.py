"""The sweep that CI runs, and the proof that its net has no holes."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from tests.simulation.bugs import BUGS, planted
from tests.simulation.cli import failure, main, run_one, sweep
from tests.simulation.run import run_seed
from tests.simulation.stories import STORIES
from tests.simulation.world import Invariant

SEEDS = range(1, 201)
HERE = Path(__file__).resolve().parents[2]


@pytest.mark.rule("F7", "F9", "H2", "L4", "P2", "P5", "R4", "S5", "S6", "V5")
@pytest.mark.case("A1", "C4", "C11", "C13", "C14", "D10", "H1", "I2")
@pytest.mark.parametrize("part", range(8))
def test_two_hundred_seeds_run_clean(part: int) -> None:
    broken = [failure(result) for result in sweep(SEEDS[part::8]) if result.violation]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """By the seed that is recorded, or, where something else has come to draw from it, by another of the sweep."""
    bug = BUGS[name]
    for seed in (bug.seed, *SEEDS):
        with planted(name):
            found = run_seed(seed)
        if found.rule == bug.rule and bug.says in found.violation:
            clean = run_seed(seed)
            assert not clean.violation, failure(clean)
            return
    pytest.fail(f"no seed of {SEEDS.start}..{SEEDS.stop - 1} finds {name}")


def test_every_invariant_has_a_planted_bug() -> None:
    assert {bug.rule for bug in BUGS.values()} == set(Invariant)


def looks() -> Iterator[tuple[str, str]]:
    """Every place that finds an invariant broken: which, and its words without those that it fills in."""
    for file in sorted(HERE.glob("tests/simulation/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Violation":
                rule, words = node.args
                parts = words.values if isinstance(words, ast.JoinedStr) else [words]
                said = (part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
                yield rule.attr if isinstance(rule, ast.Attribute) else "", "".join(map(str, said))


def test_every_place_that_looks_at_an_invariant_has_a_planted_bug_that_it_finds() -> None:
    planted_ = {(bug.rule.name, bug.says) for bug in BUGS.values()}
    found = list(looks())
    assert len(found) > 30
    unproven = [look for look in found if not any(look[0] == rule and says in look[1] for rule, says in planted_)]
    assert not unproven


@pytest.mark.parametrize("name", STORIES)
def test_a_seed_with_a_story_runs_clean(name: str) -> None:
    result = run_seed(STORIES[name].seed)
    assert not result.violation, f"{failure(result)}: {STORIES[name].told}"


def test_a_seed_is_a_run_whatever_the_order_of_hashes() -> None:
    code = (
        "import hashlib; from tests.simulation.run import run_seed; h = hashlib.sha256();"
        "[run_seed(s, tell=lambda *line: h.update(repr(line).encode())) for s in range(1, 9)]; print(h.hexdigest())"
    )
    seen = set()
    for number in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": str(HERE)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=HERE,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        seen.add(done.stdout)
    assert len(seen) == 1


def test_a_trace_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent, told = run_one(3), run_one(3, trace=True)
    assert silent == told
    assert "leads under epoch" in capsys.readouterr().out


def test_a_violation_is_one_line_that_says_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    seed = BUGS["published-before-stored"].seed
    assert main(["--seeds", f"{seed}..{seed}", "--bug", "published-before-stored"]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith(f"seed {seed}: stored before placement: ")
    assert line.endswith(f"[scripts/simulate --seed {seed} --trace --bug published-before-stored]")
    assert summary.startswith("1 seeds, 1 with a violation")
    assert main(["--seed", str(seed), "--trace", "--bug", "published-before-stored"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert main(["--seed", str(seed)]) == 0


def test_several_processes_find_what_one_does() -> None:
    assert list(sweep(range(1, 21), jobs=2)) == list(sweep(range(1, 21)))


def test_different_seeds_are_different_runs() -> None:
    assert len({sha256(repr(run_seed(seed)).encode()).digest() for seed in range(1, 9)}) == 8
