"""What the fleet looks like from outside at one instant. Pure values.

`/ready`, placement, metrics, `narwhalctl` and the console all show these and nothing else, so that no two surfaces can
disagree. Ages and remaining times are seconds at the instant of the view.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from narwhal.control.core.decisions import RoleMove
from narwhal.control.core.events import ProcessIdentity
from narwhal.control.core.evidence import Seen
from narwhal.control.core.loads import Load
from narwhal.control.core.settings import RoleMode
from narwhal.reports import ProxyKey, RequestCounts
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Phase, RiskKind, Stage, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldView:
    """One hold of an engine."""

    kind: Hold
    reason: str
    age_s: float
    remaining_s: float | None = None
    effective: bool = True  # False when last-engine protection makes it yield


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckView:
    """The newest result of one check."""

    check: Check
    verdict: Verdict
    detail: str
    age_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceView:
    """What counts against an engine in one class, and the newest failure of it."""

    failure: FailureClass
    streak: int  # 0 when a success has cleared it
    limit: int  # the streak at which the class is acted upon
    total: int = 0  # counted since this process began
    last: Seen | None = None  # None where a takeover handed on the streak only
    last_words: str = ""
    last_age_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthView:
    """One answer to a health probe."""

    outcome: Outcome | None  # None: 200
    detail: str
    latency_s: float
    age_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainView:
    """A drain of an engine (spec R4)."""

    reason: str
    url: str  # of the process that is drained
    age_s: float
    remaining_s: float  # to its deadline, 0 once that has passed
    restart: bool  # a newer process is asked for on the way back
    whole: bool  # of the whole fleet
    captured: bool
    identity: ProcessIdentity | None  # of the process that is drained; None: unknown, or not captured yet
    settled: bool  # ready to stop
    overdue: bool
    waits_for: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftView:
    """The newest window in which an engine's decode latency was judged (spec H5)."""

    step_s: float  # seconds per output token, the median
    usual_s: float  # what it was judged by: its baseline
    samples: int
    drifting: int  # drifting windows in a row
    good: int  # good windows in a row


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineView:
    """One engine."""

    id: str
    url: str
    role: Phase
    pinned: bool
    incarnation: int
    phases: frozenset[Phase]
    weight: float
    holds: tuple[HoldView, ...] = ()
    checks: tuple[CheckView, ...] = ()
    streaks: Mapping[FailureClass, int] = field(default_factory=dict)
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    identity: ProcessIdentity | None = None
    inflight: int = 0  # legs over all proxies by their last word
    evidence: tuple[EvidenceView, ...] = ()  # classes with a streak, or that failed since this process began
    producers: tuple[str, ...] = ()  # whose handoffs its failed decode legs read, newest first
    health: tuple[HealthView, ...] = ()  # newest first
    gates: Mapping[tuple[Verdict, str], int] = field(default_factory=dict)  # tries by result and check that decided
    misses: int = 0  # silent liveness sweeps in a row
    suspicion: str = ""  # what is being found out about it, in words
    gate_in_s: float | None = None  # until its gate is tried next by itself
    drain: DrainView | None = None
    drift: DriftView | None = None  # None before its decode latency was first judged
    role_age_s: float | None = None  # since it changed its role, None: never
    stays: str = ""  # why role control does not move it, empty when it may

    @property
    def eligible(self) -> bool:
        """Whether any work may be placed here."""
        return bool(self.phases)


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """One thing that was told of an engine."""

    age_s: float
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Why an engine is, or is not, eligible: in words, the answer first, and as the facts behind them."""

    engine: EngineView
    lines: tuple[str, ...]
    history: tuple[Told, ...]  # newest first


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyView:
    """One proxy worker, connected or lost."""

    key: ProxyKey
    address: str
    pid: int
    connected: bool
    acked: tuple[int, int]  # (epoch, version), (0, 0) for none
    refused: tuple[int, int] | None
    refused_reason: str
    silent_s: float
    resident: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[str, int] = field(default_factory=dict)  # its KV handoffs of each engine that nobody has read
    suspect: str = ""  # why it is thought to be the fault itself, empty when it is not (spec F12)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageErrorView:
    """Errors of one stage and exception class since this process started."""

    stage: Stage
    error_class: str
    count: int
    message: str  # of the newest
    age_s: float  # of the newest


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorView:
    """The monitor (spec M)."""

    streak: int = 0
    degraded: str = ""  # the whole reason, `monitoring degraded: <stage> <class>`; empty when not degraded
    passes: int = 0
    errors: tuple[StageErrorView, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RiskView:
    """A consolidation risk of a role (spec C4)."""

    kind: RiskKind
    count: int
    age_s: float  # of the newest event
    blocks_s: float  # for so long the role gives up no engine


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleView:
    """One role (spec C2, C3)."""

    role: Phase
    engines: int  # that its floor counts
    floor: int
    load: Load
    above: int  # passes in a row at or above `controller.thresholds.expand`
    gave_age_s: float | None  # since it gave up an engine, None: not within memory
    risks: tuple[RiskView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolesView:
    """Role control."""

    mode: RoleMode
    roles: tuple[RoleView, ...]
    proposal: RoleMove | None  # what the newest pass decided; done at once in `auto`
    why_not: str  # why it decided nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetView:
    """Everything."""

    name: str
    model: str
    not_ready: str  # the first reason of spec M9 that the core can see; empty when ready
    closed: str  # why admission is closed for proxies (degraded, maintenance); empty when open
    engines: tuple[EngineView, ...]
    proxies: tuple[ProxyView, ...]
    monitor: MonitorView
    totals: RequestCounts
    roles: RolesView
