"""What goes into the core and what comes out of it. Pure, frozen, complete: the journal replays exactly these.

Inputs are facts and commands; effects ask for outside work only. Publishing and persisting are not effects: the loop
compares placement content and handoff revision with what it last sent and stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from narwhal.control.core.settings import CoreSettings
from narwhal.reports import Batch, ProxyKey
from narwhal.vocabulary import Check, Outcome, Phase, Stage, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """What tells one engine process from its successor."""

    version: str
    started_at: float  # seconds since the Unix epoch, as the engine's metrics say


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Answer of one check."""

    verdict: Verdict
    detail: str  # what was seen, in words, for people
    latency_s: float = 0.0
    identity: ProcessIdentity | None = None


# --- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """A proxy's batch arrived. One that was applied before changes nothing."""

    batch: Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckAnswered:
    """A `RunCheck` came back. Dropped unless incarnation and number are those last asked for."""

    engine: str
    incarnation: int
    number: int
    check: Check
    result: CheckResult


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthAnswered:
    """A `ProbeHealth` came back. Dropped unless incarnation and number are those last asked for.

    `outcome`: None for a 200. Otherwise what was seen: REFUSED, UNREACHABLE, RESET, TLS_FAILED, CONNECT_TIMEOUT,
    READ_TIMEOUT (no answer in time), ANSWER_CUT, HTTP_408, HTTP_429, HTTP_5XX, CLIENT_ERROR for every other status, and
    LOCAL when it could not be asked (no control connection in time, or a cause of control's own).
    """

    engine: str
    incarnation: int
    number: int
    outcome: Outcome | None
    status: int = 0  # HTTP status, 0 without an answer
    detail: str = ""  # what was seen, in words, for people: `GET /health answered 404`
    latency_s: float = 0.0
    identity: ProcessIdentity | None = None  # None when it was not asked for or not to be had


@dataclass(frozen=True, kw_only=True, slots=True)
class LegSeen:
    """What one leg of an inference probe came to: any `Outcome` that a proxy could see; LOCAL when no control
    connection was to be had in time."""

    outcome: Outcome
    status: int = 0
    detail: str = ""
    elapsed_s: float = 0.0
    step_s: float = 0.0  # seconds for each token after the first, 0 where that was not to be seen
    steps: int = 0  # how many tokens that is the mean of


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceAnswered:
    """A `ProbeInference` came back. Dropped unless incarnation and number are those last asked for."""

    engine: str
    incarnation: int
    number: int
    produced: LegSeen | None  # the prefill leg; None when it was not begun
    consumed: LegSeen | None  # the decode leg, or the completion without a handoff; None when it was not begun


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferAnswered:
    """A `RunTransfer` came back. Dropped unless incarnation and number are among those asked for."""

    engine: str
    incarnation: int
    number: int
    produced: LegSeen | None  # the prefill leg; None when it was not begun
    consumed: LegSeen | None  # the decode leg; None when it was not begun


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentityCaptured:
    """A `CaptureIdentity` came back. Dropped unless incarnation and number are those last asked for."""

    engine: str
    incarnation: int
    number: int
    identity: ProcessIdentity | None  # None: the engine does not say
    local: bool = False  # it could not be asked, for a cause of control's own


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainCommand:
    """An operator takes engines out until they are undrained. All of the fleet's engines: maintenance (spec R6).

    Raises `CommandRefusedError` for an unknown engine and for one that is drained already; then nothing was changed.
    """

    engines: tuple[str, ...]
    reason: str
    deadline_s: float  # after which a drain that has not settled is overdue
    restart: bool  # planned maintenance: a newer process is asked for when it returns (spec R4)
    wall: float  # of the command, seconds since the Unix epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class UndrainCommand:
    """An operator wants drained engines back: their gates are tried now. The answer is told by events.

    Raises `CommandRefusedError` for an unknown engine, one that is not drained, or whose gate is being tried for an
    earlier command; then nothing was begun.
    """

    engines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetCommand:
    """An operator says that a lost proxy is gone (spec R4). Raises `CommandRefusedError` when it is not known or is
    connected."""

    id: str
    slot: int | None = None  # None: every worker of that id


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A placement has gone out to the proxies."""

    epoch: int
    version: int
    serving: frozenset[str]  # engines with a phase to serve in it, now or when a quarantine ends
    closed: str  # why admission is closed in it, empty when it is open


@dataclass(frozen=True, kw_only=True, slots=True)
class EjectCommand:
    """An operator takes an engine out. Raises `CommandRefusedError` when it is not in service."""

    engine: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCommand:
    """An operator asks for an inference probe now, or for a try of the gate when the engine is out.

    Raises `CommandRefusedError` when a probe or a gate is under way. The answer is told by events.
    """

    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleCommand:
    """An operator gives an engine a role; new placements follow it (spec C1). Raises `CommandRefusedError` when it has
    that role, is pinned, or the role that it leaves would fall below its floor."""

    engine: str
    role: Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyConnected:
    """A proxy said hello."""

    proxy: ProxyKey
    address: str
    pid: int
    highest_epoch: int
    stream: int = 0  # number of the stream, rising with each hello; tells a late loss of an older stream apart


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyAcked:
    """A proxy applies this placement and has these legs in flight."""

    proxy: ProxyKey
    epoch: int
    version: int
    resident: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[str, int] = field(default_factory=dict)  # engine → its KV handoffs that nobody has read yet


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyNacked:
    """A proxy refused this placement."""

    proxy: ProxyKey
    epoch: int
    version: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyLost:
    """A proxy's stream ended without a goodbye, or was ended for silence. Changes nothing when the proxy has said hello
    on a newer stream since."""

    proxy: ProxyKey
    reason: str
    stream: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyLeft:
    """A proxy said goodbye, or its supervisor did for it."""

    proxy: ProxyKey
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFailure:
    """One exception of one stage."""

    stage: Stage
    error_class: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PassEnded:
    """A monitor pass is over; failures in the order of the stages."""

    failures: tuple[StageFailure, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Woke:
    """The instant `next_due()` named has come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reloaded:
    """The fleet file was read again: another set of engines, other numbers. The fleet's name is the same."""

    settings: CoreSettings


Answer = CheckAnswered | HealthAnswered | InferenceAnswered | TransferAnswered | IdentityCaptured
Command = EjectCommand | ProbeCommand | DrainCommand | UndrainCommand | ForgetCommand | RoleCommand
FromProxy = Reported | ProxyConnected | ProxyAcked | ProxyNacked | ProxyLost | ProxyLeft
Input = FromProxy | Answer | Command | PassEnded | Woke | Reloaded | Published


class Refusal(StrEnum):
    """Why a command cannot be done."""

    NOT_FOUND = "not found"
    PRECONDITION = "failed precondition"


class CommandRefusedError(Exception):
    """The command cannot be done, and nothing was changed. The message says why, for the operator."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


# --- effects ----------------------------------------------------------------------------------------------------------


class EventKind(StrEnum):
    """Everything an operator can be told of, one kind each."""

    ENGINE_JOINED = "engine_joined"
    ENGINE_READMITTED = "engine_readmitted"
    ENGINE_EJECTED = "engine_ejected"
    ENGINE_ADDED = "engine_added"
    ENGINE_REMOVED = "engine_removed"
    ENGINE_CHANGED = "engine_changed"
    ENGINE_CHECK_FAILED = "engine_check_failed"
    DRAIN_BEGUN = "drain_begun"
    DRAIN_SETTLED = "drain_settled"  # ready to stop (spec R4)
    DRAIN_OVERDUE = "drain_overdue"
    DRAIN_CHANGED = "drain_changed"
    UNDRAIN_BEGUN = "undrain_begun"
    UNDRAIN_FAILED = "undrain_failed"  # the drain stays (spec R5)
    IDENTITY_CAPTURED = "identity_captured"
    HOLD_PLACED = "hold_placed"
    HOLD_ENDED = "hold_ended"
    LAST_ENGINE_KEPT = "last_engine_kept"  # serves in spite of a soft hold (spec H2)
    HEALTH_CHANGED = "health_changed"
    ROLE_MOVED = "role_moved"
    ROLE_PROPOSED = "role_proposed"  # in advisory mode: decided, and nothing changed
    ROLE_RISK = "role_risk"  # a role that gave up an engine is short of it (spec C4)
    FLEET_SLOW = "fleet_slow"  # most engines drift: it is overload, not an engine (spec H5)
    FLEET_USUAL = "fleet_usual"  # it drifts no more, or what it takes is what is usual from now on
    PROBE_STARTED = "probe_started"
    PROBE_ENDED = "probe_ended"
    RELAPSED = "relapsed"
    PRODUCER_BLAMED = "producer_blamed"
    CONTROL_CUT_OFF = "control_cut_off"  # the sweep says so, not that the engines are dead (spec L4)
    CONTROL_BACK = "control_back"
    PROXY_SUSPECT = "proxy_suspect"  # it is itself the fault (spec F12)
    PROXY_TRUSTED = "proxy_trusted"
    PROXY_CONNECTED = "proxy_connected"
    PROXY_LOST = "proxy_lost"
    PROXY_LEFT = "proxy_left"
    PROXY_RETIRED = "proxy_retired"
    PROXY_FORGOTTEN = "proxy_forgotten"
    PLACEMENT_REFUSED = "placement_refused"
    STAGE_FAILED = "stage_failed"
    MONITOR_DEGRADED = "monitor_degraded"
    MONITOR_RECOVERED = "monitor_recovered"
    READY = "ready"
    NOT_READY = "not_ready"
    # Told by the shell: what the process itself is and does.
    CONTROL_ACTIVE = "control_active"
    CONTROL_STANDBY = "control_standby"
    CONTROL_WAITING = "control_waiting"  # nobody leads, and it may not yet
    CONTROL_FENCED = "control_fenced"
    CONTROL_YIELDED = "control_yielded"  # to a standby (spec M8), or as an operator asked
    CONTROL_STOPPING = "control_stopping"
    CONTROL_RELEASED = "control_released"  # it lets go of the lease and acts no more
    YIELD_REFUSED = "yield_refused"
    ACTIVE_MISSED = "active_missed"  # a standby counts answers of the active that are not control-ready (spec M8)
    ACTIVE_BACK = "active_back"
    HANDOFF_RESUMED = "handoff_resumed"
    HANDOFF_NOT_RESUMED = "handoff_not_resumed"
    STORE_FAILED = "store_failed"
    STORE_RECOVERED = "store_recovered"
    STORE_WARNING = "store_warning"  # it works, and somebody should look at it
    JOURNAL_FAILED = "journal_failed"
    JOURNAL_RECOVERED = "journal_recovered"
    RELOADED = "reloaded"
    RELOAD_REFUSED = "reload_refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Tell people: a log line, a journal line, an entry of `narwhalctl events`. The words are written here only."""

    kind: EventKind
    message: str
    engine: str = ""
    proxy: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCheck:
    """Run one check on one engine through the control pool, and answer with `CheckAnswered`."""

    engine: str
    url: str
    incarnation: int
    number: int
    check: Check
    model: str = ""  # the configured model
    timeout_s: float = 0.0  # for each answer of the engine
    attestation_url: str = ""  # where its attestation document is, for that check


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeHealth:
    """Ask one engine for its health through the control pool, and answer with `HealthAnswered`, always."""

    engine: str
    url: str
    incarnation: int
    number: int
    timeout_s: float  # for an HTTP answer, once a control connection is there
    identity: bool = False  # read the process identity too


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One engine that a probe speaks to."""

    engine: str
    url: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeInference:
    """Run one inference through the control pool, and answer with `InferenceAnswered`, always.

    With a producer: take the consumer's connection first, so that a consumer that cannot be reached leaves no KV behind
    (then `produced` is None); a prefill leg on the producer; the decode leg on the consumer reads its handoff. Without:
    a completion without a handoff on the consumer. The decode leg streams `tokens` tokens to its terminal marker.
    """

    engine: str  # on whose account; producer, consumer or both may be others
    incarnation: int
    number: int
    model: str
    tokens: int
    producer: Target | None
    consumer: Target
    silence_s: float  # a leg that gives nothing for this long has failed (spec F6)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTransfer:
    """One KV transfer of a gate (spec R2): as `ProbeInference` with a producer, answered with `TransferAnswered`."""

    engine: str  # on whose account; its incarnation and number name the answer
    incarnation: int
    number: int
    model: str
    tokens: int
    producer: Target
    consumer: Target
    silence_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureIdentity:
    """Read which process runs an engine, and answer with `IdentityCaptured`, always."""

    engine: str
    url: str
    incarnation: int
    number: int
    timeout_s: float


Effect = Record | RunCheck | ProbeHealth | ProbeInference | RunTransfer | CaptureIdentity
