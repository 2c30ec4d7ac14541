"""What goes into the core and what comes out of it. Pure, frozen, complete: the journal replays exactly these.

Inputs are facts and commands; effects ask for outside work only. Publishing and persisting are not effects: the loop
compares placement content and handoff revision with what it last sent and stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from narwhal.reports import Batch, ProxyKey
from narwhal.vocabulary import Check, Stage, Verdict


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


Input = Reported | CheckAnswered | ProxyConnected | ProxyAcked | ProxyNacked | ProxyLost | ProxyLeft | PassEnded | Woke


# --- effects ----------------------------------------------------------------------------------------------------------


class EventKind(StrEnum):
    """Everything an operator can be told of, one kind each."""

    ENGINE_JOINED = "engine_joined"
    ENGINE_READMITTED = "engine_readmitted"
    ENGINE_EJECTED = "engine_ejected"
    ENGINE_CHECK_FAILED = "engine_check_failed"
    HOLD_PLACED = "hold_placed"
    HOLD_ENDED = "hold_ended"
    PROXY_CONNECTED = "proxy_connected"
    PROXY_LOST = "proxy_lost"
    PROXY_LEFT = "proxy_left"
    PROXY_RETIRED = "proxy_retired"
    PLACEMENT_REFUSED = "placement_refused"
    STAGE_FAILED = "stage_failed"
    MONITOR_DEGRADED = "monitor_degraded"
    MONITOR_RECOVERED = "monitor_recovered"
    READY = "ready"
    NOT_READY = "not_ready"
    # Told by the shell: what the process itself is and does.
    CONTROL_ACTIVE = "control_active"
    CONTROL_STANDBY = "control_standby"
    CONTROL_FENCED = "control_fenced"
    CONTROL_STOPPING = "control_stopping"
    HANDOFF_RESUMED = "handoff_resumed"
    HANDOFF_NOT_RESUMED = "handoff_not_resumed"
    STORE_FAILED = "store_failed"
    STORE_RECOVERED = "store_recovered"
    RELOADED = "reloaded"
    RELOAD_REFUSED = "reload_refused"
    INPUT_FAILED = "input_failed"


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


Effect = Record | RunCheck
