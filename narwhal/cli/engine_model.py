"""One engine as operators are shown it, with the answer to why it is, or is not, eligible.

Plain values, by the rules of `model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A reason that keeps new work off an engine."""

    kind: str
    reason: str
    age_s: float
    remaining_s: float | None  # until it ends by itself; None when it does not
    effective: bool  # False when last-engine protection makes it yield


@dataclass(frozen=True, kw_only=True)
class Check:
    """Newest result of one check of the readmission gate."""

    check: str
    verdict: str
    detail: str
    age_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The newest failure of a class, as the proxy saw it, or control itself."""

    words: str  # the rest of these, said in one line
    outcome: str
    status: int  # HTTP status; 0 when there was none
    detail: str
    phase: str  # of the leg; empty where control's own probe saw it
    proxy: str  # as id/slot; empty where control saw it itself
    producer: str  # of the KV handoff; empty for none
    request_id: str
    age_s: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What counts against an engine in one failure class."""

    failure_class: str
    streak: int  # 0 when a success has cleared it
    limit: int  # the streak at which it is acted upon
    total: int  # counted since this epoch began
    last: Failure | None  # None where a takeover handed on the streak only


@dataclass(frozen=True, kw_only=True)
class Health:
    """One answer to a health probe."""

    detail: str
    outcome: str  # empty for a 200
    latency_s: float
    age_s: float


@dataclass(frozen=True, kw_only=True)
class Process:
    """Which process runs an engine."""

    version: str
    started_at: float  # seconds since the Unix epoch


@dataclass(frozen=True, kw_only=True)
class Drain:
    """What an operator asked for of an engine, and how far it has come."""

    reason: str
    age_s: float
    remaining_s: float  # to its deadline, 0 once that has passed
    planned: bool  # a newer process is asked for when the engine returns
    maintenance: bool  # of the whole fleet
    settled: bool  # ready to stop
    overdue: bool
    waits_for: tuple[str, ...]  # empty once it has settled
    captured: bool  # whether the process has been read, or has turned out not to be had
    process: Process | None  # that was drained; None while or where it is not known


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The newest window in which an engine's decode latency was judged."""

    step_s: float  # per output token, the median
    usual_s: float  # for it
    samples: int
    drifting: int  # windows in a row
    good: int  # windows in a row


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine."""

    id: str
    url: str
    role: str
    pinned: bool
    incarnation: int
    phases: tuple[str, ...]  # what it may serve now
    weight: float  # share of work, above 0 up to 1
    inflight: int  # legs over all proxies
    holds: tuple[Hold, ...]
    streaks: Mapping[str, int]  # consecutive failures by class, without zeros
    checks: tuple[Check, ...]
    outcomes: Mapping[str, int]  # legs by outcome over the fleet's life
    evidence: tuple[Evidence, ...]  # classes with a streak, or with a failure in this epoch
    producers: tuple[str, ...]  # whose KV handoffs its failed decode legs read, newest first
    misses: int  # liveness sweeps in a row in which it was silent
    suspicion: str  # what is being found out about it; empty for nothing
    gate_in_s: float | None  # until its gate is tried next by itself; None for an engine in service, and a drained one
    health: tuple[Health, ...]  # newest first
    drain: Drain | None
    process: Process | None  # that was accepted; None while it is not known
    drift: Drift | None  # None before its decode latency was first judged
    role_age_s: float | None  # since it changed its role; None when it never did
    stays: str  # why role control does not move it; empty when it may


@dataclass(frozen=True, kw_only=True)
class Told:
    """One thing that was told of an engine."""

    age_s: float
    message: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why an engine is, or is not, eligible."""

    engine: Engine
    lines: tuple[str, ...]  # the whole answer in words, most important first
    history: tuple[Told, ...]  # newest first
