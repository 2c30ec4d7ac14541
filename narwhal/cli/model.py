"""What the operators' commands show, as plain values. Their field names are the keys of `-o json` and `-o yaml`.

Words are strings here, not the enums of `narwhal.vocabulary`: a control service newer than this client may know holds
or kinds of event that the client does not, and an operator has to see them all the same. Ages and remaining times are
seconds at the moment of the answer. Keys are only ever added.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

# What `/ready`, and so `status`, gives as its reason on a process that does not own the lease.
NOT_LEADING = frozenset({"standby", "fenced"})


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


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command brought about, or of a dry run would have."""

    engine: str
    dry_run: bool
    told: tuple[str, ...]  # in the words of the events


@dataclass(frozen=True, kw_only=True)
class Probed(Done):
    """What a probe came to."""

    verdict: str  # pass, fail or inconclusive; empty for a dry run


@dataclass(frozen=True, kw_only=True)
class Drained:
    """How far a drain has come, or what it would bring about."""

    engines: tuple[str, ...]
    dry_run: bool
    told: tuple[str, ...]  # in the words of the events
    settled: tuple[str, ...]  # of them those that are ready to stop
    waits_for: Mapping[str, tuple[str, ...]]  # what the others wait for


@dataclass(frozen=True, kw_only=True)
class Returned:
    """Engines that are back, or would be tried."""

    engines: tuple[str, ...]
    dry_run: bool
    told: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """A proxy that drains wait for no longer, or would not."""

    proxy: str  # as it was named
    dry_run: bool
    told: tuple[str, ...]


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
class Switched:
    """What a switchover came to."""

    dry_run: bool
    before: int  # epoch that is over; of a dry run the one that lasts
    epoch: int  # of the new active; 0 for a dry run
    holder: str  # who leads now; of a dry run who would
    address: str
    took_s: float  # from asking to the answer of the new active; 0 for a dry run


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


@dataclass(frozen=True, kw_only=True)
class PlacedEngine:
    """One engine as placement tells the proxies."""

    id: str
    url: str
    role: str
    phases: tuple[str, ...]
    incarnation: int
    weight: float
    pinned: bool
    holds: tuple[str, ...]
    quarantine_remaining_s: float | None
    phases_after_quarantine: tuple[str, ...]
    max_inflight: int  # soft cap on legs, 0 for none
    max_inflight_tokens: int  # soft cap on prompt tokens, 0 for none


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One published placement."""

    epoch: int
    version: int
    closed: str  # why admission is closed; empty when it is open
    engines: tuple[PlacedEngine, ...]

    @property
    def order(self) -> str:
        """What placements are named by."""
        return f"{self.epoch}.{self.version}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One fact that differs between two placements. `engine` is empty for admission (`closed`) and for the epoch."""

    engine: str
    field: str
    before: Any  # None: was not there
    after: Any  # None: is gone


@dataclass(frozen=True, kw_only=True)
class PlacementStep:
    """From one placement seen to the next."""

    epoch: int
    version: int
    closed: str
    changes: tuple[Difference, ...]


# Remaining time differs in every message that carries it and is no news; that a quarantine begins or ends is in holds.
_NO_NEWS = frozenset({"id", "quarantine_remaining_s"})


def step(before: Placement, after: Placement) -> PlacementStep:
    """What changed from `before` to `after`, engines in the order of `after`, gone ones last."""
    old = {engine.id: engine for engine in before.engines}
    new = {engine.id: engine for engine in after.engines}
    changes: list[Difference] = []
    if before.epoch != after.epoch:
        changes.append(Difference(engine="", field="epoch", before=before.epoch, after=after.epoch))
    if before.closed != after.closed:
        changes.append(Difference(engine="", field="closed", before=before.closed, after=after.closed))
    for engine in after.engines:
        was = old.get(engine.id)
        if was is None:
            changes.append(Difference(engine=engine.id, field="engine", before=None, after=plain(engine)))
            continue
        changes += [
            Difference(engine=engine.id, field=f.name, before=plain(a), after=plain(b))
            for f in fields(PlacedEngine)
            if f.name not in _NO_NEWS and (a := getattr(was, f.name)) != (b := getattr(engine, f.name))
        ]
    changes += [
        Difference(engine=engine.id, field="engine", before=plain(engine), after=None)
        for engine in before.engines
        if engine.id not in new
    ]
    return PlacementStep(epoch=after.epoch, version=after.version, closed=after.closed, changes=tuple(changes))


def utc(at: float) -> str:
    """Seconds since the Unix epoch as UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain(value: Any) -> Any:
    """Any of these values as dicts, lists and scalars, ready for JSON and YAML."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    # Twelve digits of a float that was measured in milliseconds help nobody.
    return round(value, 6) if isinstance(value, float) else value
