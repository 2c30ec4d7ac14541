"""Run the simulation by hand: one seed with its trace, or many at once."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from multiprocessing import get_context

from tests.simulation.bugs import BUGS, planted
from tests.simulation.run import Result, run_seed
from tests.simulation.stories import STORIES

AT_A_TIME = 10  # seeds that one process takes


def replay(seed: int, bug: str) -> str:
    """How to see this run again."""
    return f"scripts/simulate --seed {seed} --trace" + (f" --bug {bug}" if bug else "")


def failure(result: Result, bug: str = "") -> str:
    """One line: what broke, and how to see it."""
    first = result.violation.splitlines()[0]
    return f"seed {result.seed}: {first} [{replay(result.seed, bug)}]"


def run_one(seed: int, *, bug: str = "", trace: bool = False) -> Result:
    """One seed, with a planted bug or without."""

    def tell(at: float, who: str, what: str) -> None:
        print(f"{at:10.3f}  {who:<10} {what}")

    with planted(bug):
        return run_seed(seed, tell=tell if trace else None)


def _run_some(seeds: Sequence[int], bug: str) -> list[Result]:
    return [run_one(seed, bug=bug) for seed in seeds]


def sweep(seeds: range, *, jobs: int = 1, bug: str = "") -> Iterator[Result]:
    """The seeds' results, in their order."""
    if jobs <= 1:
        yield from (run_one(seed, bug=bug) for seed in seeds)
        return
    rest = iter(seeds)
    parts = list(iter(lambda: tuple(islice(rest, AT_A_TIME)), ()))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for results in pool.map(partial(_run_some, bug=bug), parts):
            yield from results


def seeds_of(text: str) -> range:
    """`A..B`, both included."""
    first, dots, last = text.partition("..")
    try:
        found = range(int(first), int(last if dots else first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be A..B, got {text!r}") from None
    if not found:
        raise argparse.ArgumentTypeError(f"there is no seed in {text}")
    return found


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="run this seed")
    what.add_argument("--seeds", type=seeds_of, default=range(1, 201), metavar="A..B", help="run these (1..200)")
    what.add_argument("--list", action="store_true", help="show the planted bugs and the stories")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell everything that happens")
    parser.add_argument("--jobs", type=int, default=1, help="with --seeds: processes")
    parser.add_argument("--bug", default="", choices=["", *BUGS], metavar="NAME", help="plant this bug")
    return parser.parse_args(argv)


def _list() -> int:
    for name, bug in BUGS.items():
        print(f"bug    {name:<26} breaks: {bug.rule} (seed {bug.seed})")
    for name, story in STORIES.items():
        print(f"story  {name}, seed {story.seed}: {story.told}")
    return 0


def _one(options: argparse.Namespace) -> int:
    result = run_one(options.seed, bug=options.bug, trace=options.trace)
    if result.violation:
        print(failure(result, options.bug))
        return 1
    print(f"seed {result.seed}: clean, {result.virtual_s:.0f} s and {result.events} events; {_faults(result)}")
    return 0


def _faults(result: Result) -> str:
    return "; ".join(result.faults) or "nothing went wrong"


def _many(options: argparse.Namespace, spent: Callable[[], float]) -> int:
    began, broken, events, slowest = spent(), 0, 0, 0.0
    for result in sweep(options.seeds, jobs=options.jobs, bug=options.bug):
        events += result.events
        slowest = max(slowest, result.recovered_s)
        if result.violation:
            broken += 1
            print(failure(result, options.bug), flush=True)
    count, took_s = len(options.seeds), spent() - began
    print(
        f"{count} seeds, {broken} with a violation, {events} events, {took_s:.0f} s ({took_s / count:.3f} s a seed), "
        f"longest recovery {slowest:.0f} s"
    )
    return 1 if broken else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 clean, 1 a violation, 2 usage."""
    options = _arguments(sys.argv[1:] if argv is None else argv)
    if options.list:
        return _list()
    return _one(options) if options.seed is not None else _many(options, time.perf_counter)


if __name__ == "__main__":
    sys.exit(main())
