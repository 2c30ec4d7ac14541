"""The picture of `scripts.bench.demand`: what each split serves within the targets, and how `auto` follows the demand.

    python -m scripts.bench.demand_picture results.json demand.png

Needs matplotlib: `pip install narwhal[bench]`.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

AUTO, OTHER, IDEAL = "#1b6ca8", "#b8c4ce", "#5c9e6b"


def draw(document: dict[str, Any], path: Path) -> None:
    """Writes the picture."""
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    shares, splits, loads = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1.1, 1.3, 1.3)})
    _shares(shares, document)
    _splits(splits, document)
    _loads(loads, document)
    figure.savefig(path, dpi=110)


def _shares(axes: Any, document: dict[str, Any]) -> None:
    shares, engines = document["shares"], document["engines"]
    names = [f"{n} + {engines - n}" for n in range(1, engines)] + ["auto", "hindsight"]
    found = [*shares["fixed"], shares["auto"], shares["hindsight"]]
    colours = [OTHER] * (engines - 1) + [AUTO, IDEAL]
    means = [100 * mean(each) for each in found]
    spread = [
        [m - 100 * min(each) for m, each in zip(means, found, strict=True)],
        [100 * max(each) - m for m, each in zip(means, found, strict=True)],
    ]
    axes.bar(names, means, color=colours, yerr=spread, capsize=3)
    axes.set_title(f"Requests within both targets ({len(shares['auto'])} seeds)")
    axes.set_xlabel("engines for prefill + decode")
    axes.set_ylabel("%")
    axes.set_ylim(0, 105)
    axes.tick_params(axis="x", rotation=45)


def _stretches(axes: Any, document: dict[str, Any]) -> None:
    """The demand behind the curves: long prompts are shaded."""
    stretch_s = document["stretch_s"]
    for n in range(len(document["run"]["good"])):
        if n % 2 == 0:
            axes.axvspan(n * stretch_s, (n + 1) * stretch_s, color="#f2e9d8", zorder=0)
    axes.set_xlim(0, stretch_s * len(document["run"]["good"]))
    axes.set_xlabel("seconds (shaded: long prompts, short answers)")


def _splits(axes: Any, document: dict[str, Any]) -> None:
    engines, end = document["engines"], document["stretch_s"] * len(document["run"]["good"])
    splits = [*document["run"]["splits"], (end, document["run"]["splits"][-1][1])]
    _stretches(axes, document)
    axes.step([at for at, _ in splits], [n for _, n in splits], where="post", color=AUTO)
    axes.set_title("Prefill engines under auto (seed 1)")
    axes.set_ylim(0, engines)


def _loads(axes: Any, document: dict[str, Any]) -> None:
    loads = document["run"]["loads"]
    _stretches(axes, document)
    for column, name, colour in ((1, "prefill", "#c06014"), (2, "decode", AUTO)):
        axes.plot([row[0] for row in loads], [row[column] for row in loads], label=name, color=colour, linewidth=1)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_title("Load of the roles under auto (seed 1)")
    axes.set_ylim(0, 4)
    axes.legend()


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
