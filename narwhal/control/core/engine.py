"""One engine's record: role, incarnation, holds, evidence; and whether it may serve (spec H, R8, R10).

Decides: which transitions are legal and what each leaves behind. It cannot see: other engines (coverage does), nor why
a transition is made. A transition that is not in the table raises and changes nothing. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from narwhal.control.core.changes import Changes
from narwhal.control.core.coverage import Candidate
from narwhal.control.core.events import CheckResult, ProcessIdentity
from narwhal.control.core.evidence import Evidence
from narwhal.control.core.relapse import Relapses
from narwhal.control.core.settings import EngineSpec
from narwhal.vocabulary import HARD_HOLDS, SOFT_HOLDS, Check, Hold, Outcome, Phase, Verdict


class Standing(StrEnum):
    """Where an engine is in its life."""

    JOINING = "joining"  # never admitted, or not since its address changed
    IN_SERVICE = "in service"  # admitted; other holds may keep it from serving
    EJECTED = "ejected"


class Move(StrEnum):
    """What changes the standing."""

    ADMIT = "admit"
    EJECT = "eject"
    REJOIN = "rejoin"


LEGAL = {
    (Standing.JOINING, Move.ADMIT): Standing.IN_SERVICE,
    (Standing.EJECTED, Move.ADMIT): Standing.IN_SERVICE,
    (Standing.IN_SERVICE, Move.EJECT): Standing.EJECTED,
    (Standing.IN_SERVICE, Move.REJOIN): Standing.JOINING,
    (Standing.EJECTED, Move.REJOIN): Standing.JOINING,
}
# The holds that are a standing; every other hold is placed and lifted by itself.
STANDING_HOLDS = frozenset({Hold.JOINING, Hold.EJECTED})
# Only a gate that an operator had tried ends these; an engine that carries one may be admitted whatever its standing.
SHUT = frozenset({Hold.DRAIN, Hold.MAINTENANCE})
# A confirmed failure is more than a suspicion, so ejection ends these; so does readmission. Time ends the others.
ENDED_BY_MOVE = frozenset({Hold.VERIFICATION})

RAMP_START = 0.1
RAMP_STEPS = 9  # from a tenth to one (spec R10), in tenths
# Each step is a placement version, and goes to every proxy: engines that came back one after the other rise together.
RAMP_GRID_S = 0.5


class IllegalTransitionError(Exception):
    """The transition is not legal here; nothing was changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One hold."""

    kind: Hold
    reason: str
    since: float
    due: float | None = None  # when it ends by itself

    def active(self, now: float) -> bool:
        """Whether it still holds at `now`: a deadline ends it by itself, whoever looks (spec H4)."""
        return self.due is None or now < self.due


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The newest result of a check."""

    result: CheckResult
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthSeen:
    """One answer to a health probe."""

    outcome: Outcome | None  # None: 200
    detail: str
    latency_s: float
    at: float


@dataclass(kw_only=True, slots=True)
class Drain:
    """What an operator asked for (spec R4), and how far it has come. Mutable; changed by `drain.Drains` only."""

    reason: str
    url: str  # where the process is that is drained, also when the engine has another address by now
    since: float
    due: float  # then it is overdue, unless it has settled
    wall: float  # of the command, seconds since the Unix epoch
    restart: bool = True  # planned maintenance: a newer process is asked for on the way back
    whole: bool = False  # of the whole fleet (spec R6)
    captured: bool = False  # whether its process identity has been read, or has turned out not to be had
    identity: ProcessIdentity | None = None  # as captured; None: unknown
    settled: bool = False  # ready to stop
    overdue: bool = False
    # What follows is of this process alone; a takeover finds it out anew.
    out: tuple[int, int] | None = None  # the first placement published without the engine
    number: int = 0  # of the open question for the identity
    answer_due: float | None = None  # of that question
    capture_due: float | None = None  # when to ask it


def joining(spec: EngineSpec, reason: str = "never admitted", *, now: float) -> "Engine":
    """An engine that was never admitted, or not as what it is now (spec R8)."""
    held = Held(kind=Hold.JOINING, reason=reason, since=now)
    return Engine(spec=spec, role=spec.role, holds={Hold.JOINING: held})


@dataclass(kw_only=True, slots=True)
class Engine:
    """Mutable; changed by its methods only."""

    spec: EngineSpec
    role: Phase
    incarnation: int = 0
    holds: dict[Hold, Held] = field(default_factory=dict)
    identity: ProcessIdentity | None = None  # of the process that was accepted
    admitted_at: float | None = None
    role_since: float | None = None  # when it changed its role last, None: never
    settled_weight: float = 1.0  # until the next step of the ramp
    drain: Drain | None = None
    ramp: tuple[tuple[float, float], ...] = ()  # steps to come: (instant, weight from then on), soonest first
    evidence: Evidence = field(default_factory=Evidence)
    relapses: Relapses = field(default_factory=Relapses)
    backoff_s: float = 0.0  # between tries of the gate after the newest ejection, 0: never ejected (spec R3)
    misses: int = 0  # silent liveness sweeps in a row
    outcomes: dict[Outcome, int] = field(default_factory=dict)
    checks: dict[Check, Checked] = field(default_factory=dict)
    health: tuple[HealthSeen, ...] = ()  # the newest answers to health probes, oldest first
    gates: dict[tuple[Verdict, str], int] = field(default_factory=dict)  # tries of the gate → how many, see view
    numbers: int = 0  # last number given to a check or a probe
    changes: Changes = field(default_factory=Changes, repr=False)  # of the fleet that the record is of

    @property
    def id(self) -> str:
        """Its id in the fleet file."""
        return self.spec.id

    @property
    def standing(self) -> Standing:
        """Where it is in its life."""
        if Hold.JOINING in self.holds:
            return Standing.JOINING
        return Standing.EJECTED if Hold.EJECTED in self.holds else Standing.IN_SERVICE

    def able(self, phase: Phase) -> bool:
        """Whether role and pin let it serve `phase`, holds aside."""
        return self.role is phase or not self.spec.pinned

    def may(self, move: Move) -> bool:
        """Whether the move is legal now."""
        return (self.standing, move) in LEGAL or (move is Move.ADMIT and self.shut)

    @property
    def shut(self) -> bool:
        """Whether a drain keeps it out: no gate is tried by itself."""
        return bool(SHUT & self.holds.keys())

    @property
    def ready_to_stop(self) -> bool:
        """Whether a drain of it has settled."""
        return self.drain is not None and self.drain.settled

    @property
    def answerable(self) -> bool:
        """Whether failures speak against it and are looked into: one that may be stopped is not asked anything more."""
        return self.standing is Standing.IN_SERVICE and not self.ready_to_stop

    def gate_ended(self, verdict: Verdict, check: str) -> None:
        """A try of its gate is over, by the check that decided; empty when all passed."""
        self.gates[verdict, check] = self.gates.get((verdict, check), 0) + 1

    def decide(self) -> None:
        """Something about it has changed that must be stored at once."""
        self.changes.decide(self.spec.id)

    def count(self) -> None:
        """Something about it has changed that the next pass may store."""
        self.changes.counted += 1

    def next_number(self) -> int:
        """A number for the next check or probe; an answer with another is not believed."""
        self.numbers += 1
        return self.numbers

    # --- transitions --------------------------------------------------------------------------------------------------

    def admit(self, *, identity: ProcessIdentity | None, ramp_s: float, now: float) -> None:
        """Into placement, as a new incarnation with nothing against it (spec F1, R8, R10)."""
        self._require(Move.ADMIT)
        for kind in STANDING_HOLDS | ENDED_BY_MOVE | SHUT:
            self.holds.pop(kind, None)
        self.drain = None
        self.incarnation += 1
        self.identity = identity
        self.admitted_at = now
        self.ramp = ramp_from(now, ramp_s)
        self.settled_weight = RAMP_START if self.ramp else 1.0
        self._forget()
        self.decide()

    def eject(self, reason: str, *, now: float) -> None:
        """Out of placement (spec F3, L2, R8, R9). An engine that was never admitted cannot be ejected."""
        self._require(Move.EJECT)
        for kind in ENDED_BY_MOVE:
            self.holds.pop(kind, None)
        self.holds[Hold.EJECTED] = Held(kind=Hold.EJECTED, reason=reason, since=now)
        self.ramp, self.settled_weight = (), 1.0
        self.decide()

    def rejoin(self, spec: EngineSpec, reason: str, *, now: float) -> None:
        """It is another engine under an old id: its address changed (spec R8). It answers for nothing that the one
        before it did; incarnations go on rising, and so do totals."""
        self._require(Move.REJOIN)
        held = Held(kind=Hold.JOINING, reason=reason, since=now)
        self.holds = {k: h for k, h in self.holds.items() if k in HARD_HOLDS - STANDING_HOLDS}
        self.holds[Hold.JOINING] = held
        self.spec, self.role, self.identity = spec, spec.role, None
        self.admitted_at = self.role_since = None
        self.ramp, self.settled_weight = (), 1.0
        self.relapses, self.backoff_s = Relapses(), 0.0
        self.checks.clear()
        self.evidence.last.clear()
        self.health = ()
        self._forget()
        self.decide()

    def assume(self, role: Phase, *, now: float) -> None:
        """Another role, for new placements (spec C1). A pinned engine has none but its own."""
        if self.spec.pinned or role is self.role:
            raise IllegalTransitionError(f"{self.id} is {'pinned to' if self.spec.pinned else 'already'} {self.role}")
        self.role, self.role_since = role, now
        self.decide()

    def place(self, kind: Hold, reason: str, *, now: float, due: float | None = None) -> None:
        """Put a hold on; one that it carries already keeps its start and takes the new reason and deadline."""
        if kind in STANDING_HOLDS:
            raise IllegalTransitionError(f"{self.id}: {kind} is a standing, not a hold to place")
        if due is not None and due <= now:
            raise IllegalTransitionError(f"{self.id}: {kind} would end before it began")
        before = self.holds.get(kind)
        since = before.since if before is not None and before.active(now) else now
        self.holds[kind] = Held(kind=kind, reason=reason, since=since, due=due)
        self.decide()

    def lift(self, kind: Hold) -> None:
        """Take a hold off."""
        if kind in STANDING_HOLDS:
            raise IllegalTransitionError(f"{self.id}: {kind} is a standing, not a hold to lift")
        if kind not in self.holds:
            raise IllegalTransitionError(f"{self.id} carries no {kind} hold")
        del self.holds[kind]
        self.decide()

    def expire(self, *, now: float) -> list[Held]:
        """Drop the holds and ramp steps whose time has come; returns the holds."""
        over = [h for h in self.holds.values() if not h.active(now)]
        for held in over:
            del self.holds[held.kind]
        if over:
            self.decide()
        self.settled_weight = self.weight(now=now)
        self.ramp = tuple(step for step in self.ramp if now < step[0])
        self.changes.look(self.spec.id)
        return over

    def _require(self, move: Move) -> None:
        if not self.may(move):
            raise IllegalTransitionError(f"{self.id} is {self.standing}: cannot {move}")

    def _forget(self) -> None:
        self.evidence.streaks.clear()
        self.evidence.forget_producers()
        self.evidence.stalls = 0
        self.evidence.timeout_is_stream = False
        self.misses = 0
        self.count()

    # --- what it amounts to -------------------------------------------------------------------------------------------

    def carried(self, *, now: float) -> tuple[Held, ...]:
        """The holds in force, in the order of the vocabulary."""
        return tuple(self.holds[kind] for kind in Hold if kind in self.holds and self.holds[kind].active(now))

    def free(self, *, now: float) -> bool:
        """Whether it carries no hold, as `Candidate.free`."""
        return not any(h.active(now) for h in self.holds.values())

    def candidate(self, *, now: float, without: Iterable[Hold] = ()) -> Candidate:
        """What coverage needs to know; `without` the named holds."""
        kinds = {h.kind: h for h in self.carried(now=now) if h.kind not in without}
        soft = [h.since for kind, h in kinds.items() if kind in SOFT_HOLDS]
        return Candidate(
            id=self.id,
            role=self.role,
            pinned=self.spec.pinned,
            hard=bool(HARD_HOLDS & kinds.keys()),
            soft_since=min(soft) if soft else None,
        )

    def weight(self, *, now: float) -> float:
        """Its share of work relative to its peers (spec R10)."""
        return max((weight for at, weight in self.ramp if now >= at), default=self.settled_weight)

    def due(self) -> Iterable[float]:
        """The instants at which it changes by itself."""
        yield from (h.due for h in self.holds.values() if h.due is not None)
        yield from (at for at, _ in self.ramp)


def ramp_from(start: float, ramp_s: float) -> tuple[tuple[float, float], ...]:
    """The instants at which the weight of an engine admitted at `start` rises, and to what."""
    if ramp_s <= 0:
        return ()
    steps = range(1, RAMP_STEPS + 1)
    instants = (ceil((start + ramp_s * step / RAMP_STEPS) / RAMP_GRID_S) * RAMP_GRID_S for step in steps)
    return tuple((at, (step + 1) / 10) for at, step in zip(instants, steps, strict=True))
