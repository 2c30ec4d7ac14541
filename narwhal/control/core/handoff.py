"""The state handoff: the durable document of the control plane, version 1 (spec S1, S2).

Decides: what a saved document means, and whether it may be applied. It cannot see: where documents are kept, or who
may write them. Instants do not outlive a process, so the document holds ages and remaining times beside the wall time
of writing; reading it later lets that time pass. Pure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from narwhal.control.core.codec import CodecError, decode, encode
from narwhal.control.core.events import ProcessIdentity
from narwhal.reports import RequestCounts
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase, RiskKind

SCHEMA = "narwhal.handoff"
SCHEMA_VERSION = 1
TIMED = frozenset({Hold.QUARANTINE, Hold.RELAPSE})  # holds that end by themselves, and no others do (spec H4, F11)


class HandoffError(ValueError):
    """The document is not one that this release can apply whole; nothing of it is applied."""


def _not_negative(value: Any, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if number is not None and number < 0:
            raise ValueError(f"{name} must not be negative, got {number}")


def _counts(**named: Mapping[Any, float]) -> None:
    for name, counts in named.items():
        if any(count < 0 for count in counts.values()):
            raise ValueError(f"{name} must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedHold:
    """One hold. `remaining_s` is None when it does not end by itself."""

    kind: Hold
    reason: str
    age_s: float
    remaining_s: float | None

    def __post_init__(self) -> None:
        _not_negative(self, "age_s", "remaining_s")
        if (self.kind in TIMED) != (self.remaining_s is not None):
            raise ValueError(f"a {self.kind} hold {'ends' if self.kind in TIMED else 'does not end'} by itself")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRelapses:
    """The memory of relapses (spec F11)."""

    ejected_for: tuple[FailureClass, ...] = ()
    watched_s: Mapping[FailureClass, float] = field(default_factory=dict)
    level: int = 0
    forget_in_s: float | None = None
    held_for_s: float | None = None

    def __post_init__(self) -> None:
        _not_negative(self, "level", "forget_in_s", "held_for_s")
        _counts(watched_s=self.watched_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedDrain:
    """What an operator asked for, and how far it has come (spec R4)."""

    reason: str
    url: str  # of the process that is drained
    age_s: float
    remaining_s: float  # to its deadline, 0 once that has passed
    wall: float  # of the command, seconds since the Unix epoch
    restart: bool
    whole: bool
    captured: bool
    identity: ProcessIdentity | None  # as captured; None: unknown
    settled: bool
    overdue: bool

    def __post_init__(self) -> None:
        _not_negative(self, "age_s", "remaining_s")
        if self.identity is not None and not self.captured:
            raise ValueError("names a process identity that was not captured")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedEngine:
    """One engine."""

    url: str
    role: Phase
    role_age_s: float | None  # since it changed its role, None: never
    incarnation: int
    holds: tuple[SavedHold, ...]
    identity: ProcessIdentity | None
    drain: SavedDrain | None
    admitted_age_s: float | None
    gate_in_s: float | None  # until its gate is tried next, None when it has none
    backoff_s: float
    streaks: Mapping[FailureClass, int]
    stalls: int
    timeout_is_stream: bool
    producers: Mapping[str, int]  # remembered by spec F7 → incarnation
    relapses: SavedRelapses
    misses: int
    outcomes: Mapping[Outcome, int]

    def __post_init__(self) -> None:
        _not_negative(self, "role_age_s", "incarnation", "admitted_age_s", "gate_in_s", "backoff_s", "stalls", "misses")
        if any(count < 1 for count in self.streaks.values()):
            raise ValueError("streaks must be at least 1")
        _counts(outcomes=self.outcomes, producers=self.producers)
        kinds = [h.kind for h in self.holds]
        if len(set(kinds)) < len(kinds):
            raise ValueError("a hold is listed twice")
        if {Hold.JOINING, Hold.EJECTED} <= set(kinds):
            raise ValueError("cannot be joining and ejected at once")
        if Hold.VERIFICATION in kinds and {Hold.JOINING, Hold.EJECTED} & set(kinds):
            raise ValueError("cannot be suspected while it is joining or ejected")
        if self.drain is None and {Hold.DRAIN, Hold.MAINTENANCE} & set(kinds):
            raise ValueError("is held by a drain that is not described")
        if self.drain is not None and not self.drain.whole and Hold.DRAIN not in kinds:
            raise ValueError("is drained, so it must carry the drain hold")
        if not self.incarnation and Hold.JOINING not in kinds:
            raise ValueError("was never admitted, so it must be joining")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedProxy:
    """One known proxy process; `counts_for_s` is None while it is connected, or counts for ever."""

    id: str
    slot: int
    boot: int
    connected: bool
    counts_for_s: float | None

    def __post_init__(self) -> None:
        _not_negative(self, "slot", "boot", "counts_for_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCursor:
    """The last report applied of one proxy process; `drop_in_s` is None while the proxy is connected."""

    id: str
    slot: int
    boot: int
    sequence: int
    drop_in_s: float | None

    def __post_init__(self) -> None:
        _not_negative(self, "slot", "boot", "sequence", "drop_in_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRisk:
    """A consolidation risk (spec C4)."""

    role: Phase  # that gave up an engine
    kind: RiskKind
    age_s: float  # of the newest event
    count: int

    def __post_init__(self) -> None:
        _not_negative(self, "age_s", "count")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRoles:
    """What role control remembers."""

    gave_age_s: Mapping[Phase, float] = field(default_factory=dict)  # since a role gave up an engine
    risks: tuple[SavedRisk, ...] = ()

    def __post_init__(self) -> None:
        _counts(gave_age_s=self.gave_age_s)
        known = [(r.role, r.kind) for r in self.risks]
        if len(set(known)) < len(known):
            raise ValueError("a risk is listed twice")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedLease:
    """Who wrote the document, under which lease."""

    epoch: int
    holder: str

    def __post_init__(self) -> None:
        _not_negative(self, "epoch")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFleet:
    """The whole state, as of the instant it was taken."""

    fleet: str
    model: str  # that the engines in service were found to serve
    engine_set: tuple[str, ...]
    engines: Mapping[str, SavedEngine]
    requests: RequestCounts
    unknown_outcomes: Mapping[Outcome, int]
    proxies: tuple[SavedProxy, ...]
    cursors: tuple[SavedCursor, ...]
    roles: SavedRoles

    def __post_init__(self) -> None:
        if len(set(self.engine_set)) < len(self.engine_set) or set(self.engine_set) != set(self.engines):
            raise ValueError("engine_set does not list exactly the engines")
        _counts(unknown_outcomes=self.unknown_outcomes)
        _not_negative(self.requests, "served", "failed", "rejected", "cancelled", "retried")


@dataclass(frozen=True, kw_only=True, slots=True)
class Handoff:
    """A document: the state, when it was written, and by whom."""

    state: SavedFleet
    written_at: float  # seconds since the Unix epoch
    lease: SavedLease


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    schema: str
    schema_version: int
    written_at: float
    lease: SavedLease


def to_document(state: SavedFleet, *, wall: float, epoch: int, holder: str) -> dict[str, Any]:
    """The JSON document of a state taken at the wall time `wall`, written under the lease of `holder`."""
    lease = SavedLease(epoch=epoch, holder=holder)
    header = _Header(schema=SCHEMA, schema_version=SCHEMA_VERSION, written_at=wall, lease=lease)
    return {**encode(header), **encode(state)}


def from_document(document: object) -> Handoff:
    """The state in `document`, as of its writing. Raises `HandoffError` with the reason when it is not exactly a
    document of this version: an unknown schema, version or field, a missing field, a wrong type, an impossible value.
    """
    if not isinstance(document, dict):
        raise HandoffError(f"must be an object, got {type(document).__name__}")
    if document.get("schema") != SCHEMA:
        raise HandoffError(f"unknown schema {document.get('schema')!r}, this release reads {SCHEMA!r}")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise HandoffError(f"unknown schema_version {version!r}, this release reads {SCHEMA_VERSION}")
    names = {f.name for f in fields(_Header)}
    try:
        header: _Header = decode(_Header, {k: v for k, v in document.items() if k in names})
        state: SavedFleet = decode(SavedFleet, {k: v for k, v in document.items() if k not in names})
    except CodecError as error:
        raise HandoffError(str(error)) from None
    return Handoff(state=state, written_at=header.written_at, lease=header.lease)


# --- time passes ------------------------------------------------------------------------------------------------------


def _less(remaining_s: float | None, elapsed_s: float) -> float | None:
    return None if remaining_s is None else max(0.0, remaining_s - elapsed_s)


def _older(engine: SavedEngine, elapsed_s: float) -> SavedEngine:
    relapses = engine.relapses
    return replace(
        engine,
        holds=tuple(
            replace(h, age_s=h.age_s + elapsed_s, remaining_s=_less(h.remaining_s, elapsed_s)) for h in engine.holds
        ),
        role_age_s=None if engine.role_age_s is None else engine.role_age_s + elapsed_s,
        admitted_age_s=None if engine.admitted_age_s is None else engine.admitted_age_s + elapsed_s,
        gate_in_s=_less(engine.gate_in_s, elapsed_s),
        drain=None
        if engine.drain is None
        else replace(
            engine.drain,
            age_s=engine.drain.age_s + elapsed_s,
            remaining_s=max(0.0, engine.drain.remaining_s - elapsed_s),
        ),
        relapses=replace(
            relapses,
            watched_s={c: max(0.0, s - elapsed_s) for c, s in relapses.watched_s.items()},
            forget_in_s=_less(relapses.forget_in_s, elapsed_s),
            held_for_s=_less(relapses.held_for_s, elapsed_s),
        ),
    )


def aged(handoff: Handoff, *, wall: float) -> SavedFleet:
    """The state as it is at the wall time `wall`: remaining times shorter, never below 0, ages longer.

    A wall clock that went back lets no time pass.
    """
    elapsed_s = max(0.0, wall - handoff.written_at)
    state = handoff.state
    return replace(
        state,
        engines={engine: _older(saved, elapsed_s) for engine, saved in state.engines.items()},
        proxies=tuple(replace(p, counts_for_s=_less(p.counts_for_s, elapsed_s)) for p in state.proxies),
        cursors=tuple(replace(c, drop_in_s=_less(c.drop_in_s, elapsed_s)) for c in state.cursors),
        roles=SavedRoles(
            gave_age_s={role: age_s + elapsed_s for role, age_s in state.roles.gave_age_s.items()},
            risks=tuple(replace(r, age_s=r.age_s + elapsed_s) for r in state.roles.risks),
        ),
    )


# --- may it be applied? -----------------------------------------------------------------------------------------------


class Resume(StrEnum):
    """What a start with `--resume` does with a saved handoff (spec S2)."""

    APPLY = "apply"
    FRESH = "fresh"  # start without it, say so, and keep the document aside
    REFUSE = "refuse"  # stop the start


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A saved handoff beside the configured fleet."""

    resume: Resume
    message: str
    forgotten_drains: tuple[str, ...] = ()  # engines whose drain a fresh start forgets


def drains(saved: SavedFleet) -> tuple[str, ...]:
    """The engines that it knows to be drained."""
    return tuple(e for e in saved.engine_set if saved.engines[e].drain is not None)


def compare(saved: SavedFleet, *, fleet: str, model: str, engines: Collection[str]) -> Comparison:
    """Whether `saved` is of this fleet, of this model and of these engines, whatever their order."""
    if saved.fleet != fleet:
        return Comparison(resume=Resume.REFUSE, message=f"the handoff is of fleet {saved.fleet!r}, not of {fleet!r}")
    added = sorted(set(engines) - set(saved.engine_set))
    removed = sorted(set(saved.engine_set) - set(engines))
    drained = drains(saved)
    parts = [f"added: {', '.join(added)}"] if added else []
    parts += [f"removed: {', '.join(removed)}"] if removed else []
    parts += [f"drains forgotten: {', '.join(drained)}"] if drained else []
    words = f" ({'; '.join(parts)})" if parts else ""
    if saved.model != model:
        # Nobody has asked these engines for it: each has to pass its gate.
        message = f"the handoff is of model {saved.model!r}, not of {model!r}{words}"
    elif added or removed:
        message = f"the handoff has another set of engines{words}"
    else:
        return Comparison(resume=Resume.APPLY, message="the handoff matches the fleet")
    return Comparison(resume=Resume.FRESH, message=message, forgotten_drains=drained)
