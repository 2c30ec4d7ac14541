"""Which engine serves which phase: the one function behind /ready, placement, metrics and narwhalctl (spec H2, H3, P4).

Decides: the phases of every engine, from roles, pins and holds. It cannot see: why an engine is held, or since when
beyond the order in which engines came to be held. Pure.

| the phase has | it is served by |
|---|---|
| free engines of its role | all of them |
| none, but free engines of the other role that are not pinned | all of those (fallback) |
| none, but engines that only soft holds keep out | the one held last, then lowest id (last-engine protection) |
| nothing of these | nobody |
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from narwhal.vocabulary import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What coverage needs to know of one engine."""

    id: str
    role: Phase
    pinned: bool = False
    hard: bool = False  # carries a hard hold
    soft_since: float | None = None  # start of the oldest soft hold that it carries, None without one

    @property
    def free(self) -> bool:
        """Carries no hold at all."""
        return not self.hard and self.soft_since is None

    def able(self, phase: Phase) -> bool:
        """Whether its role and pin let it serve `phase`, holds aside."""
        return self.role is phase or not self.pinned


def servers(candidates: Iterable[Candidate], phase: Phase) -> tuple[str, ...]:
    """The ids of the engines that serve `phase`, by the table above."""
    able = [c for c in candidates if not c.hard and c.able(phase)]
    free = [c for c in able if c.free]
    chosen = [c for c in free if c.role is phase] or free
    if chosen:
        return tuple(c.id for c in chosen)
    # Held last, then lowest id: the phase was last served by that engine, so keeping it changes least.
    held = sorted((-(c.soft_since or 0.0), c.id) for c in able)
    return (held[0][1],) if held else ()


def cover(candidates: Iterable[Candidate]) -> Mapping[str, frozenset[Phase]]:
    """The phases that each engine serves now; every candidate has an entry."""
    known = tuple(candidates)
    serving = {phase: frozenset(servers(known, phase)) for phase in Phase}
    return {c.id: frozenset(p for p in Phase if c.id in serving[p]) for c in known}


def uncovered(candidates: Iterable[Candidate]) -> tuple[Phase, ...]:
    """The phases that nobody serves (spec M9, H3)."""
    known = tuple(candidates)
    return tuple(phase for phase in Phase if not servers(known, phase))
