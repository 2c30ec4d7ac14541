"""Draws the fault matrix: `python -m scripts.bench.matrix_picture FILE.png < matrix.json` (what `matrix --json` wrote).

Left, for each fault on each kind of engine, the requests that failed; right, how long until the engine was out and,
after the fault had ended, until it was back. Above at the defaults, below with bounded serving. Needs matplotlib.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ENDS = (
    ("before", "before the first byte", "#f2a93b"),
    ("midway", "mid-stream", "#5b8fd6"),
    ("untrue", "looked whole but were not", "#c0392b"),
    ("hung", "hung", "#5e3370"),
)
SETTINGS = {"defaults": "defaults", "bounded": "bounded serving (max_attempts: 3)"}
LEAST_S = 0.05  # at the left edge of the times

Cell = dict[str, Any]


def failures(axes: Axes, cells: list[Cell]) -> None:
    """Stacked bars, the number beside them."""
    left = [0.0] * len(cells)
    for key, words, colour in ENDS:
        widths = [float(cell[key]) for cell in cells]
        axes.barh(range(len(cells)), widths, left=left, color=colour, label=words, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (total, cell) in enumerate(zip(left, cells, strict=True)):
        axes.text(total + 0.1, place, f"{total:g}" + ("  !" if cell["wrong"] else ""), va="center", fontsize=7)
    axes.set_xlim(0, max(10.0, *left) * 1.15)
    axes.set_xlabel("failed requests, of 50 a second")


def times(axes: Axes, cells: list[Cell]) -> None:
    """Dots on a logarithmic axis, and the bound on the first of them."""
    for place, cell in enumerate(cells):
        axes.plot([LEAST_S, cell["within_s"]], [place, place], color="#dddddd", linewidth=6, zorder=1)
        if cell["contained_s"] is not None:
            axes.plot(max(LEAST_S, cell["contained_s"]), place, "o", color="#1e8449", markersize=5, zorder=3)
        if cell["back_s"] is not None:
            axes.plot(max(LEAST_S, cell["back_s"]), place, "D", color="#777777", markersize=4, zorder=2)
    axes.plot([], [], "o", color="#1e8449", label="out after the fault")
    axes.plot([], [], "D", color="#777777", label="back after its end")
    axes.plot([], [], color="#dddddd", linewidth=6, label="must be out within")
    axes.set_xscale("log")
    axes.set_xlim(LEAST_S, 100)
    axes.set_xlabel("seconds")


def draw(cells: list[Cell]) -> Figure:
    """The whole picture."""
    figure = Figure(figsize=(12, 1.5 + 0.24 * len(cells)), layout="constrained")
    known = [settings for settings in SETTINGS if any(cell["settings"] == settings for cell in cells)]
    grid = figure.subplots(len(known), 2, squeeze=False)
    for (bars, dots), settings in zip(grid, known, strict=True):
        chosen = [cell for cell in cells if cell["settings"] == settings]
        failures(bars, chosen)
        times(dots, chosen)
        bars.set_yticks(range(len(chosen)), [f"{cell['fault']}, {cell['phase']}" for cell in chosen], fontsize=8)
        dots.set_yticks([])
        for axes in (bars, dots):
            axes.set_ylim(len(chosen) - 0.5, -0.5)
            axes.grid(axis="x", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        bars.set_title(SETTINGS[settings], loc="left", fontsize=10)
    for axes in grid[0]:
        axes.legend(fontsize=7, loc="upper right")
    return figure


def main() -> None:
    """Reads, draws, writes."""
    mpl.use("Agg")
    draw(json.load(sys.stdin)).savefig(Path(sys.argv[1]), dpi=140)


if __name__ == "__main__":
    main()
