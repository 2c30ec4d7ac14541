"""What goes out as placement, and what must wait until it is stored (spec P1, P2). Pure.

Taking an engine out is published at once. Putting one in always comes with a new incarnation, so content may show an
engine as serving only when a stored state handoff has that incarnation. Until then coverage is computed as if the
engine were out, so that the engines that stood in for it go on doing so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from narwhal.control.core.coverage import Candidate, cover
from narwhal.placement import EngineEntry
from narwhal.vocabulary import Phase


@dataclass(frozen=True, kw_only=True)
class PlacementContent:
    """Placement without its epoch and version; engines in the fleet file's order."""

    closed: str  # why admission is closed; empty when it is open
    engines: Mapping[str, EngineEntry]
    # What the phases were computed from; no part of what is published, so not compared.
    candidates: tuple[Candidate, ...] = field(default=(), compare=False, repr=False)


def unstored(incarnations: Mapping[str, int], stored: Mapping[str, int]) -> frozenset[str]:
    """Engines whose incarnation no stored handoff has yet. One that was never admitted has nothing to store."""
    if incarnations == stored:
        return frozenset()
    return frozenset(e for e, incarnation in incarnations.items() if incarnation and stored.get(e) != incarnation)


def outside(candidates: tuple[Candidate, ...], waiting: frozenset[str]) -> tuple[Candidate, ...]:
    """The candidates with those that wait for storing held out."""
    if not waiting:
        return candidates
    return tuple(replace(c, hard=True) if c.id in waiting else c for c in candidates)


def publishable(content: PlacementContent, stored: Mapping[str, int]) -> PlacementContent:
    """`content` as it may be published when the newest stored handoff has the incarnations `stored`.

    Returns `content` itself when nothing has to wait.
    """
    waiting = unstored({e.id: e.incarnation for e in content.engines.values()}, stored)
    if not waiting:
        return content
    candidates = outside(content.candidates, waiting)
    phases = cover(candidates)
    nothing: frozenset[Phase] = frozenset()
    engines = dict(content.engines)
    for name, entry in content.engines.items():
        may = phases[name]
        after = nothing if name in waiting else entry.phases_after_quarantine
        if (may, after) != (entry.phases, entry.phases_after_quarantine):
            engines[name] = replace(entry, phases=may, phases_after_quarantine=after)
    return PlacementContent(closed=content.closed, engines=engines, candidates=candidates)
