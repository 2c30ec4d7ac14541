"""What goes into the core: facts, answers, commands. Pure, frozen, complete: the journal replays exactly these.

What comes out of it is in `effects`.
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
