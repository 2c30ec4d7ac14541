"""The placement value: which engines may take which legs, and the choice of one of them. Pure.

Decides: whether one placement supersedes another, and which engine a leg goes to. It cannot see: connections, clocks,
random numbers (draws are arguments) or why an engine is held.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from narwhal.vocabulary import Hold, Phase

HIGHEST_EPOCH = 2**62  # beyond it nothing could ever lead above


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEntry:
    """One engine as placement shows it (spec P1)."""

    id: str
    url: str
    role: Phase
    phases: frozenset[Phase]  # what it may serve now, eligibility, fallback and last-engine protection applied
    incarnation: int
    weight: float = 1.0  # share of work relative to its peers, above 0 up to 1 (spec R10)
    pinned: bool = False
    holds: tuple[Hold, ...] = ()
    quarantine_due: float | None = None  # local monotonic instant at which the quarantine ends by itself (spec H4)
    phases_after_quarantine: frozenset[Phase] = frozenset()  # what it may serve from that instant on
    max_inflight: int = 0  # soft cap on legs, 0 = no limit (spec P9)
    max_inflight_tokens: int = 0  # soft cap on prompt tokens in flight, 0 = no limit

    def __post_init__(self) -> None:
        if not self.id or not self.url:
            raise ValueError("an engine needs an id and a url")
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight of {self.id} must be above 0 and at most 1, got {self.weight}")

    def serves(self, phase: Phase, now: float) -> bool:
        """Whether a leg of `phase` may start here at `now` (monotonic seconds of this process)."""
        if phase in self.phases:
            return True
        return self.quarantine_due is not None and now >= self.quarantine_due and phase in self.phases_after_quarantine


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One published placement. Order is (epoch, version), nothing else."""

    epoch: int
    version: int
    closed: str = ""  # why admission is closed; empty when it is open
    engines: Mapping[str, EngineEntry] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        """What placements are compared by."""
        return (self.epoch, self.version)

    def supersedes(self, other: "Placement | None") -> bool:
        """Whether a holder of `other` should apply this one."""
        return other is None or self.order > other.order

    def same_content(self, other: "Placement") -> bool:
        """Whether both say the same about engines and admission, whatever their versions."""
        return self.closed == other.closed and dict(self.engines) == dict(other.engines)

    @cached_property
    def _in_quarantine(self) -> tuple[EngineEntry, ...]:
        return tuple(e for e in self.engines.values() if e.quarantine_due is not None)

    @cached_property
    def _now(self) -> dict[Phase, tuple[EngineEntry, ...]]:
        return {phase: tuple(e for e in self.engines.values() if phase in e.phases) for phase in Phase}

    @cached_property
    def _spots(self) -> dict[Phase, dict[str, int]]:
        return {phase: {e.id: spot for spot, e in enumerate(ready)} for phase, ready in self._now.items()}

    @cached_property
    def capped_by_tokens(self) -> bool:
        """Whether some engine's cap counts prompt tokens (spec P9)."""
        return any(e.max_inflight_tokens for e in self.engines.values())

    def candidates(self, phase: Phase, *, now: float) -> tuple[EngineEntry, ...]:
        """Engines that may take a leg of `phase` at `now`, in placement order."""
        ready = self._now[phase]
        if not self._in_quarantine:
            return ready
        released = tuple(e for e in self._in_quarantine if phase not in e.phases and e.serves(phase, now))
        return ready + released

    def choose(
        self,
        phase: Phase,
        *,
        now: float,
        load: Mapping[str, float],
        draws: tuple[float, float],
        avoid: Collection[str] = (),
        full: Callable[[EngineEntry], bool] | None = None,
    ) -> "EngineEntry | None":
        """The engine for one leg: least work in flight for its weight, of two drawn at random (spec P3).

        `load`: legs in flight per engine id. `draws`: two numbers in [0, 1), which also settle how far the leg at hand
        counts: an idle engine of little weight (spec R10) is so chosen now and then, not never. `avoid`: ids passed
        over while another engine can serve (spec V4, V5, V12). `full`: whether an engine is at its caps (spec P9); by
        `load` unless given. None when no engine may serve the phase or each is at its cap; tell the two apart with
        `candidates`.
        """
        if full is None:
            full = partial(_full, load=load)
        able = self.candidates(phase, now=now)
        skip: Sequence[int] = ()
        if avoid:
            spots = self._spots[phase] if not self._in_quarantine else {e.id: spot for spot, e in enumerate(able)}
            skip = sorted({spots[e] for e in avoid if e in spots})
            if len(skip) == len(able):
                skip = ()
        a, b, share_a, share_b = _two(able, skip, draws)
        if a is None or b is None:
            return a if a is None or not full(a) else None
        if full(a) or full(b):
            # Two that are free, by draws as good as the first: what of a draw did not say which engine.
            free = tuple(e for spot, e in enumerate(able) if spot not in skip and not full(e))
            a, b, share_a, share_b = _two(free, (), (share_a, share_b))
            if a is None or b is None:
                return a
        # Of two equal weights the one with fewer legs wins whatever the draws, since a share is below one leg.
        work_a, work_b = load.get(a.id, 0) + share_a, load.get(b.id, 0) + share_b
        return a if work_a * b.weight <= work_b * a.weight else b


def _full(engine: EngineEntry, *, load: Mapping[str, float]) -> bool:
    return engine.max_inflight > 0 and load.get(engine.id, 0) >= engine.max_inflight


def _two(
    able: Sequence[EngineEntry], skip: Sequence[int], draws: tuple[float, float]
) -> tuple[EngineEntry | None, EngineEntry | None, float, float]:
    """Two of `able` at random but for the spots in `skip` (rising), None for those that there are not; and what is left
    of the draws, two numbers in [0, 1) again. A fleet of a thousand is not gone through for every leg."""
    count = len(able) - len(skip)
    if count < 2:
        return (able[_spot(0, skip)] if count else None), None, 0.0, 0.0
    spot, rest = draws[0] * count, draws[1] * (count - 1)
    first, second = int(spot), int(rest)
    share_a, share_b = spot - first, rest - second
    if second >= first:
        second += 1
    if skip:
        first, second = _spot(first, skip), _spot(second, skip)
    return able[first], able[second], share_a, share_b


def _spot(number: int, skip: Sequence[int]) -> int:
    """The spot of the engine of this number when those in `skip` are not counted."""
    for skipped in skip:
        number += skipped <= number
    return number
