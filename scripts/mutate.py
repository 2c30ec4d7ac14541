"""Mutation testing, sampled: changes the code of the decisions in one place at a time, and sees whether a test fails.

    python scripts/mutate.py --sample 300 --seed 1 [--only 'narwhal.control.core.drain*']

Needs mutmut (`pip install mutmut`), which is no dependency of the project. What is changed, and by which tests it must
be found, stands in pyproject.toml. Prints the survivors as diffs and the score: the share of the sample that was found.
"""

import argparse
import fnmatch
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTMUT = str(Path(sys.executable).with_name("mutmut"))
MUTANTS = ROOT / "mutants"
SURVIVED = {0, 33}  # the tests passed; 33: no test goes there
UNCHECKED = {None, 2}


def results() -> dict[str, int | None]:
    """Every mutant with mutmut's exit code of its tests; None: not yet run."""
    found: dict[str, int | None] = {}
    for meta in sorted(MUTANTS.glob("narwhal/**/*.meta")):
        found |= json.loads(meta.read_text())["exit_code_by_key"]
    return found


def chosen(pattern: str, size: int, seed: int) -> list[str]:
    """The sample: the same for the same code and seed."""
    known = sorted(name for name in results() if fnmatch.fnmatch(name, pattern))
    return random.Random(seed).sample(known, min(size, len(known)))


def mutmut(*arguments: str) -> str:
    """What it printed."""
    run = subprocess.run([MUTMUT, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
    return run.stdout


def main() -> int:
    """Exits 1 when less than `--least` of the sample was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--least", type=float, default=0.9)
    options = parser.parse_args()
    # Which tests reach which code is counted anew: they may have changed since.
    (MUTANTS / "mutmut-stats.json").unlink(missing_ok=True)
    if not results():
        mutmut("run", "no.such.mutant")  # makes them all
    sample = chosen(options.only, options.sample, options.seed)
    mutmut("run", *sample, "--max-children", str(options.jobs))
    codes = {name: code for name, code in results().items() if name in set(sample)}
    survivors = sorted(name for name, code in codes.items() if code in SURVIVED)
    for name in survivors:
        print(mutmut("show", name))
    counted = [name for name, code in codes.items() if code not in UNCHECKED]
    by_module = Counter(name.rpartition(".")[0] for name in survivors)
    for module, count in by_module.most_common():
        print(f"{count:4} survived in {module}")
    score = 1 - len(survivors) / len(counted) if counted else 0.0
    print(f"{len(counted)} of {len(results())} mutants tried, {len(survivors)} survived: score {score:.3f}")
    untried = len(sample) - len(counted)
    if untried:
        print(f"{untried} of the sample were not tried: `mutmut run` says why")
    return int(score < options.least or untried > 0)


if __name__ == "__main__":
    sys.exit(main())
