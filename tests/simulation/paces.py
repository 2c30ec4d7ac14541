"""What legs take in this world, as its proxies measure it and its probes see it: for every request the same, times what
slows the engine, times what is asked of the fleet just now.

What a request draws for itself cancels out: so few requests would else say nothing about an engine.
"""

from typing import TYPE_CHECKING

from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.placement import EngineEntry
from narwhal.vocabulary import Phase

if TYPE_CHECKING:
    from tests.simulation.plan import Plan

USUAL_S = 0.1
SHORTEST_S = 0.15  # of what a request asks for: delays on the way drown what is shorter
# What is asked of the phases while the mix of requests is one thing, and while it is the other.
DEMAND = {Phase.PREFILL: (3.0, 0.4), Phase.DECODE: (0.4, 1.6)}


def demand(plan: "Plan", phase: Phase, now: float) -> float:
    """How much longer legs of a phase take at this instant of the world for what is asked of the fleet."""
    return DEMAND[phase][int(now // plan.turn_s) % 2] if plan.turn_s else 1.0


def pace_s(took_s: float, asked_s: float) -> float | None:
    """What the usual request would have taken where one that asks for `asked_s` took `took_s`; None: not to be said."""
    return USUAL_S * took_s / asked_s if asked_s >= SHORTEST_S else None


class Paces:
    """What one proxy has measured since it last told."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._taken: dict[tuple[str, Phase, int], dict[Measure, Sketch]] = {}

    def add(self, entry: EngineEntry, phase: Phase, measure: Measure, value: float | None) -> None:
        """One leg took so long."""
        if value is not None:
            sketches = self._taken.setdefault((entry.id, phase, entry.incarnation), {})
            sketches.setdefault(measure, Sketch()).add(value)

    def take(self, now: float) -> tuple[tuple[LegMeasures, ...], float]:
        """For the next report."""
        span_s, self._since = now - self._since, now
        taken, self._taken = self._taken, {}
        measures = tuple(
            LegMeasures(engine=engine, phase=phase, incarnation=incarnation, sketches=sketches)
            for (engine, phase, incarnation), sketches in taken.items()
        )
        return measures, span_s
