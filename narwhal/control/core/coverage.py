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


# What an engine can serve, one value for each.
_PHASES = {
    (prefill, decode): frozenset(p for p, on in ((Phase.PREFILL, prefill), (Phase.DECODE, decode)) if on)
    for prefill in (False, True)
    for decode in (False, True)
}


def servers(candidates: Iterable[Candidate], phase: Phase) -> tuple[str, ...]:
    """The ids of the engines that serve `phase`, by the table above."""
    own: list[str] = []
    lent: list[str] = []
    held: list[tuple[float, str]] = []
    for c in candidates:
        if c.hard or not (c.role is phase or not c.pinned):
            continue
        if c.soft_since is not None:
            # Held last, then lowest id: the phase was last served by that engine, so keeping it changes least.
            held.append((-c.soft_since, c.id))
        else:
            (own if c.role is phase else lent).append(c.id)
    return tuple(own or lent or [c for _, c in sorted(held)[:1]])


def cover(candidates: Iterable[Candidate]) -> Mapping[str, frozenset[Phase]]:
    """The phases that each engine serves now; every candidate has an entry."""
    known = tuple(candidates)
    prefill, decode = (frozenset(servers(known, phase)) for phase in (Phase.PREFILL, Phase.DECODE))
    return {c.id: _PHASES[c.id in prefill, c.id in decode] for c in known}


def uncovered(candidates: Iterable[Candidate]) -> tuple[Phase, ...]:
    """The phases that nobody serves (spec M9, H3)."""
    known = tuple(candidates)
    return tuple(phase for phase in Phase if not servers(known, phase))


def after(candidates: Iterable[Candidate], changed: Iterable[Candidate]) -> Mapping[str, frozenset[Phase]]:
    """For each of `changed`: the phases that it would serve if it, and it alone, were as it is there."""
    known = tuple(candidates)
    few = {phase: _few(known, phase) for phase in Phase}
    return {
        one.id: frozenset(p for p in Phase if one.id in servers([*(c for c in few[p] if c.id != one.id), one], p))
        for one in changed
    }


def _few(candidates: tuple[Candidate, ...], phase: Phase) -> list[Candidate]:
    """Candidates that leave to any other of them what all together leave to it: two of each kind that the table tells
    apart, in its order, since the one that is looked at may be one of them."""
    able = [c for c in candidates if not c.hard and c.able(phase)]
    own = [c for c in able if c.free and c.role is phase]
    lent = [c for c in able if c.free and c.role is not phase]
    held = sorted((c for c in able if not c.free), key=lambda c: (-(c.soft_since or 0.0), c.id))
    return [*own[:2], *lent[:2], *held[:2]]
