"""What the operators' commands show of a fleet, as plain values: who leads, its proxies, its roles, what happened.

Engines are in `engine_model`, placements in `placement_model`, what commands brought about in `outcomes`. The names of
the fields are the keys of `-o json` and `-o yaml`.

Words are strings here, not the enums of `narwhal.vocabulary`: a control service newer than this client may know holds
or kinds of event that the client does not, and an operator has to see them all the same. Ages and remaining times are
seconds at the moment of the answer. Keys are only ever added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from narwhal.cli.engine_model import Engine
from narwhal.cli.plain import utc

# What `/ready`, and so `status`, gives as its reason on a process that does not own the lease.
NOT_LEADING = frozenset({"standby", "fenced"})


@dataclass(frozen=True, kw_only=True)
class StageError:
    """Errors of one monitor stage and exception class since the control process started."""

    stage: str
    error_class: str
    count: int
    message: str  # of the newest
    age_s: float  # of the newest


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """The monitor."""

    passes: int
    failure_streak: int
    degraded: bool
    errors: tuple[StageError, ...]


@dataclass(frozen=True, kw_only=True)
class ControlProcess:
    """The active control process."""

    address: str  # where it answered
    ready: bool  # owns a valid lease and is not degraded
    epoch: int
    holder: str
    version: int  # newest placement


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Client requests over the fleet's life."""

    served: int
    failed: int
    rejected: int
    cancelled: int
    retried: int


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """One proxy worker, connected or lost."""

    id: str
    slot: int
    boot: int  # start of the process in microseconds since the Unix epoch
    address: str
    pid: int
    connected: bool
    acked_epoch: int
    acked_version: int  # 0 when it has acknowledged nothing yet
    lag: int  # versions behind
    refused_epoch: int  # of the placement refused last and not got past; 0 for none
    refused_version: int
    refused_reason: str
    silent_s: float
    resident: Mapping[str, int]  # legs in flight by engine
    unread: Mapping[str, int]  # its KV handoffs by engine that are still to be read
    suspect: str  # why it is thought to be the fault itself; empty when it is not

    @property
    def name(self) -> str:
        """As events and log lines call it."""
        return f"{self.id}/{self.slot}"


@dataclass(frozen=True, kw_only=True)
class Risk:
    """A sign that a role is short of an engine that it gave up."""

    kind: str
    count: int
    age_s: float  # of the newest
    blocks_s: float  # for so long the role gives up no engine


@dataclass(frozen=True, kw_only=True)
class Role:
    """One role; latencies are those that nine of ten legs kept within, None where nothing was measured."""

    role: str
    engines: int  # that its floor counts
    floor: int
    load: float  # the largest of its latencies and its queue over their targets
    latency: float  # its latencies alone
    first_s: float | None  # to a leg's first token
    step_s: float | None  # per output token
    wait_s: float | None  # before a request's first leg
    prompt_tokens: float | None  # the median
    output_tokens: float | None  # the median
    queue_s: float
    waiting: int  # legs without their first token
    busy: float  # how much of the time its engines have such legs
    above: int  # monitor passes in a row at or above the load from which it wants an engine
    gave_age_s: float | None  # since it gave up an engine
    risks: tuple[Risk, ...]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A change of a role that was decided."""

    engine: str
    to: str
    cause: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Role control."""

    mode: str
    roles: tuple[Role, ...]
    proposal: Proposal | None
    why_not: str  # empty where there is a proposal


@dataclass(frozen=True, kw_only=True)
class Standby:
    """A control process that stands by."""

    holder: str
    address: str
    copy_epoch: int  # of its copy of the state handoff; 0 when it has none
    copy_age_s: float  # since the active wrote that
    problem: str  # why it would not take over; empty when it would
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One period of leadership. Instants in seconds since the Unix epoch."""

    epoch: int
    holder: str
    address: str
    began_at: float | None  # None when nobody wrote it down
    ended_at: float | None  # None while it lasts, and when nobody knows
    ending: str
    reason: str  # empty while it lasts


@dataclass(frozen=True, kw_only=True)
class Status:
    """The whole fleet, as the active control process sees it."""

    fleet: str
    model: str
    ready: bool
    reason: str  # why not; empty when ready
    control: ControlProcess
    monitor: Monitor
    engines: tuple[Engine, ...]  # in the fleet file's order
    proxies: tuple[Proxy, ...]
    totals: Totals
    roles: Roles
    standbys: tuple[Standby, ...]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened."""

    sequence: int  # counts within one control process
    at: float  # seconds since the Unix epoch
    kind: str
    message: str
    engine: str  # empty for none
    proxy: str  # as id/slot; empty for none
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def time(self) -> str:
        """`at` as UTC, to the millisecond."""
        return utc(self.at)
