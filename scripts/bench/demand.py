"""What role control is worth: goodput (requests within both targets) under demand that shifts, and under demand that
does not, in accelerated time through the real core.

    python -m scripts.bench.demand --out results.json && python -m scripts.bench.demand_picture results.json demand.png

The shifting workload has long prompts with short answers, then the reverse, twice. It is served by every fixed split
of the fleet, by `auto` from an even split, and, in hindsight, by the best split of each stretch from a fresh start.
Exits 1 when `auto` does not keep what is promised of it: see `promises`.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from narwhal.control.core.settings import RoleMode, RoleSettings
from scripts.bench.demand_fleet import Demand, Result, World

ENGINES = 6
SPLITS = range(1, ENGINES)  # prefill engines
START = ENGINES // 2  # of `auto`
TTFT_S, TPOT_S = 2.0, 0.06
STRETCH_S = 600.0
REVERSAL_S = 60.0

LONG_PROMPTS = Demand(seconds=STRETCH_S, rate=7.5, prompt=4000, answer=40)
LONG_ANSWERS = Demand(seconds=STRETCH_S, rate=4.6, prompt=400, answer=400)
BETWEEN = Demand(seconds=2 * STRETCH_S, rate=7.2, prompt=2500, answer=200)
WORKLOADS = {
    "shifting": [LONG_PROMPTS, LONG_ANSWERS, LONG_PROMPTS, LONG_ANSWERS],
    "steady": [BETWEEN],
    "long prompts": [LONG_PROMPTS],
    "long answers": [LONG_ANSWERS],
}
Run = tuple[str, int, int, str]  # workload, seed, prefill engines, mode


def run(what: Run) -> tuple[Run, Result]:
    """One run."""
    workload, seed, prefills, mode = what
    roles = RoleSettings(mode=RoleMode(mode), ttft_s=TTFT_S, tpot_s=TPOT_S)
    world = World(seed=seed, prefills=prefills, engines=ENGINES, demands=WORKLOADS[workload], roles=roles)
    return what, world.run()


def runs(seeds: range) -> Iterator[Run]:
    """Every run that the tables need."""
    for seed in seeds:
        for workload in WORKLOADS:
            for split in SPLITS:
                yield workload, seed, split, "off"
        yield "shifting", seed, START, "auto"
        yield "steady", seed, START, "auto"


def share(result: Result) -> float:
    """Of the requests, how many were within both targets."""
    return sum(result.good) / sum(result.requests)


def hindsight(results: dict[Run, Result], seed: int) -> float:
    """The share with the best split of each stretch, known beforehand, each from a fresh start."""

    def best(workload: str) -> float:
        return max(share(results[workload, seed, split, "off"]) for split in SPLITS)

    requests = results["shifting", seed, START, "auto"].requests
    shares = [best("long prompts"), best("long answers")] * 2
    return sum(n * s for n, s in zip(requests, shares, strict=True)) / sum(requests)


def reversals(result: Result) -> int:
    """Moves that were undone, by whomever, within the time in which none may be."""
    return sum(
        after[2] != before[2] and after[0] - before[0] < REVERSAL_S
        for before, after in zip(result.moves, result.moves[1:], strict=False)
    )


def promises(results: dict[Run, Result], seeds: range) -> Iterator[tuple[bool, str]]:
    """What is promised of `auto`, for every seed, and whether it was kept."""
    for seed in seeds:
        auto, ideal = results["shifting", seed, START, "auto"], hindsight(results, seed)
        best = max(share(results["shifting", seed, split, "off"]) for split in SPLITS)
        yield share(auto) >= 0.9 * ideal, f"seed {seed}: {share(auto) / ideal:.1%} of hindsight on shifting demand"
        yield share(auto) > best, f"seed {seed}: {share(auto):.1%} on shifting demand, the best fixed split {best:.1%}"
        steady = results["steady", seed, START, "auto"]
        best = max(share(results["steady", seed, split, "off"]) for split in SPLITS)
        yield len(steady.moves) <= 1, f"seed {seed}: {len(steady.moves)} moves on steady demand"
        yield share(steady) >= best - 0.005, f"seed {seed}: {share(steady):.2%} on steady demand, the best {best:.2%}"
        for result in (auto, steady):
            yield not reversals(result), f"seed {seed}: {reversals(result)} moves undone within {REVERSAL_S:g} s"


def table(results: dict[Run, Result], seeds: range) -> Iterator[str]:
    """The shares, over all seeds, as Markdown."""

    def row(name: str, shifting: Callable[[int], float], steady: Callable[[int], float], moves: str) -> str:
        cells = []
        for of in (shifting, steady):
            shares = [of(seed) for seed in seeds]
            cells.append(f"{mean(shares):.1%} | {min(shares):.1%} – {max(shares):.1%}")
        return f"| {name} | {' | '.join(cells)} | {moves} |"

    def fixed(workload: str, split: int) -> Callable[[int], float]:
        return lambda seed: share(results[workload, seed, split, "off"])

    def auto(workload: str) -> Callable[[int], float]:
        return lambda seed: share(results[workload, seed, START, "auto"])

    def best(seed: int) -> float:
        return max(share(results["steady", seed, split, "off"]) for split in SPLITS)

    def moved(workload: str) -> str:
        return f"{mean(len(results[workload, seed, START, 'auto'].moves) for seed in seeds):.1f}"

    yield "| prefill + decode | shifting: mean | least – most | steady: mean | least – most | moves |"
    yield "|---|---|---|---|---|---|"
    for split in SPLITS:
        yield row(f"{split} + {ENGINES - split}", fixed("shifting", split), fixed("steady", split), "–")
    yield row("best in hindsight", lambda seed: hindsight(results, seed), best, "–")
    yield row(f"`auto` from {START} + {ENGINES - START}", auto("shifting"), auto("steady"),
              f"{moved('shifting')} / {moved('steady')}")  # fmt: skip


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="how many (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--out", type=Path, help="where the runs go as JSON, for the picture")
    args = parser.parse_args()
    seeds = range(1, args.seeds + 1)
    with ProcessPoolExecutor(args.jobs) as pool:
        results = dict(pool.map(run, runs(seeds)))
    if args.out is not None:
        args.out.write_text(json.dumps(_document(results, seeds)))
    print("\n".join(table(results, seeds)))
    kept = list(promises(results, seeds))
    for good, words in kept:
        print(f"{'ok ' if good else 'NOT KEPT'} {words}")
    return 0 if all(good for good, _ in kept) else 1


def _document(results: dict[Run, Result], seeds: range) -> dict[str, Any]:
    return {
        "engines": ENGINES,
        "stretch_s": STRETCH_S,
        "shares": {
            "fixed": [[share(results["shifting", s, n, "off"]) for s in seeds] for n in SPLITS],
            "hindsight": [hindsight(results, s) for s in seeds],
            "auto": [share(results["shifting", s, START, "auto"]) for s in seeds],
        },
        "run": asdict(results["shifting", seeds[0], START, "auto"]),
    }


if __name__ == "__main__":
    raise SystemExit(main())
