from narwhal._pb import placement_pb2 as _placement_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldStatus(_message.Message):
    __slots__ = ("kind", "reason", "age_s", "remaining_s", "effective")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    reason: str
    age_s: float
    remaining_s: float
    effective: bool
    def __init__(self, kind: _Optional[str] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ..., remaining_s: _Optional[float] = ..., effective: _Optional[bool] = ...) -> None: ...

class CheckStatus(_message.Message):
    __slots__ = ("check", "verdict", "detail", "age_s", "latency_s")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    check: str
    verdict: str
    detail: str
    age_s: float
    latency_s: float
    def __init__(self, check: _Optional[str] = ..., verdict: _Optional[str] = ..., detail: _Optional[str] = ..., age_s: _Optional[float] = ..., latency_s: _Optional[float] = ...) -> None: ...

class EvidenceStatus(_message.Message):
    __slots__ = ("failure_class", "streak", "limit", "total", "last")
    FAILURE_CLASS_FIELD_NUMBER: _ClassVar[int]
    STREAK_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    failure_class: str
    streak: int
    limit: int
    total: int
    last: FailureStatus
    def __init__(self, failure_class: _Optional[str] = ..., streak: _Optional[int] = ..., limit: _Optional[int] = ..., total: _Optional[int] = ..., last: _Optional[_Union[FailureStatus, _Mapping]] = ...) -> None: ...

class FailureStatus(_message.Message):
    __slots__ = ("words", "outcome", "status", "detail", "phase", "proxy", "producer_id", "request_id", "age_s")
    WORDS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROXY_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    words: str
    outcome: str
    status: int
    detail: str
    phase: _placement_pb2.Phase
    proxy: str
    producer_id: str
    request_id: str
    age_s: float
    def __init__(self, words: _Optional[str] = ..., outcome: _Optional[str] = ..., status: _Optional[int] = ..., detail: _Optional[str] = ..., phase: _Optional[_Union[_placement_pb2.Phase, str]] = ..., proxy: _Optional[str] = ..., producer_id: _Optional[str] = ..., request_id: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class HealthStatus(_message.Message):
    __slots__ = ("detail", "outcome", "latency_s", "age_s")
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    detail: str
    outcome: str
    latency_s: float
    age_s: float
    def __init__(self, detail: _Optional[str] = ..., outcome: _Optional[str] = ..., latency_s: _Optional[float] = ..., age_s: _Optional[float] = ...) -> None: ...

class DrainStatus(_message.Message):
    __slots__ = ("reason", "age_s", "remaining_s", "planned", "maintenance", "settled", "overdue", "waits_for", "process", "captured")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    MAINTENANCE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    age_s: float
    remaining_s: float
    planned: bool
    maintenance: bool
    settled: bool
    overdue: bool
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    process: ProcessIdentity
    captured: bool
    def __init__(self, reason: _Optional[str] = ..., age_s: _Optional[float] = ..., remaining_s: _Optional[float] = ..., planned: _Optional[bool] = ..., maintenance: _Optional[bool] = ..., settled: _Optional[bool] = ..., overdue: _Optional[bool] = ..., waits_for: _Optional[_Iterable[str]] = ..., process: _Optional[_Union[ProcessIdentity, _Mapping]] = ..., captured: _Optional[bool] = ...) -> None: ...

class ProcessIdentity(_message.Message):
    __slots__ = ("version", "started_at")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    version: str
    started_at: float
    def __init__(self, version: _Optional[str] = ..., started_at: _Optional[float] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("id", "url", "role", "pinned", "incarnation", "phases", "weight", "holds", "checks", "streaks", "outcomes", "inflight", "evidence", "producer_ids", "misses", "suspicion", "gate_in_s", "health", "drain", "process")
    class StreaksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class OutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    STREAKS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_IDS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    GATE_IN_S_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    url: str
    role: _placement_pb2.Phase
    pinned: bool
    incarnation: int
    phases: _containers.RepeatedScalarFieldContainer[_placement_pb2.Phase]
    weight: float
    holds: _containers.RepeatedCompositeFieldContainer[HoldStatus]
    checks: _containers.RepeatedCompositeFieldContainer[CheckStatus]
    streaks: _containers.ScalarMap[str, int]
    outcomes: _containers.ScalarMap[str, int]
    inflight: int
    evidence: _containers.RepeatedCompositeFieldContainer[EvidenceStatus]
    producer_ids: _containers.RepeatedScalarFieldContainer[str]
    misses: int
    suspicion: str
    gate_in_s: float
    health: _containers.RepeatedCompositeFieldContainer[HealthStatus]
    drain: DrainStatus
    process: ProcessIdentity
    def __init__(self, id: _Optional[str] = ..., url: _Optional[str] = ..., role: _Optional[_Union[_placement_pb2.Phase, str]] = ..., pinned: _Optional[bool] = ..., incarnation: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[_placement_pb2.Phase, str]]] = ..., weight: _Optional[float] = ..., holds: _Optional[_Iterable[_Union[HoldStatus, _Mapping]]] = ..., checks: _Optional[_Iterable[_Union[CheckStatus, _Mapping]]] = ..., streaks: _Optional[_Mapping[str, int]] = ..., outcomes: _Optional[_Mapping[str, int]] = ..., inflight: _Optional[int] = ..., evidence: _Optional[_Iterable[_Union[EvidenceStatus, _Mapping]]] = ..., producer_ids: _Optional[_Iterable[str]] = ..., misses: _Optional[int] = ..., suspicion: _Optional[str] = ..., gate_in_s: _Optional[float] = ..., health: _Optional[_Iterable[_Union[HealthStatus, _Mapping]]] = ..., drain: _Optional[_Union[DrainStatus, _Mapping]] = ..., process: _Optional[_Union[ProcessIdentity, _Mapping]] = ...) -> None: ...

class MonitorStatus(_message.Message):
    __slots__ = ("failure_streak", "degraded", "errors", "passes")
    FAILURE_STREAK_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    failure_streak: int
    degraded: bool
    errors: _containers.RepeatedCompositeFieldContainer[StageError]
    passes: int
    def __init__(self, failure_streak: _Optional[int] = ..., degraded: _Optional[bool] = ..., errors: _Optional[_Iterable[_Union[StageError, _Mapping]]] = ..., passes: _Optional[int] = ...) -> None: ...

class StageError(_message.Message):
    __slots__ = ("stage", "error_class", "count", "message", "age_s")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_CLASS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    stage: str
    error_class: str
    count: int
    message: str
    age_s: float
    def __init__(self, stage: _Optional[str] = ..., error_class: _Optional[str] = ..., count: _Optional[int] = ..., message: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class RequestTotals(_message.Message):
    __slots__ = ("served", "failed", "rejected", "cancelled", "retried")
    SERVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RETRIED_FIELD_NUMBER: _ClassVar[int]
    served: int
    failed: int
    rejected: int
    cancelled: int
    retried: int
    def __init__(self, served: _Optional[int] = ..., failed: _Optional[int] = ..., rejected: _Optional[int] = ..., cancelled: _Optional[int] = ..., retried: _Optional[int] = ...) -> None: ...

class FleetStatus(_message.Message):
    __slots__ = ("fleet", "model", "ready", "reason", "control_ready", "epoch", "holder", "version", "engines", "monitor", "totals", "proxies", "standbys")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CONTROL_READY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    MONITOR_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    PROXIES_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    model: str
    ready: bool
    reason: str
    control_ready: bool
    epoch: int
    holder: str
    version: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    monitor: MonitorStatus
    totals: RequestTotals
    proxies: int
    standbys: _containers.RepeatedCompositeFieldContainer[StandbyStatus]
    def __init__(self, fleet: _Optional[str] = ..., model: _Optional[str] = ..., ready: _Optional[bool] = ..., reason: _Optional[str] = ..., control_ready: _Optional[bool] = ..., epoch: _Optional[int] = ..., holder: _Optional[str] = ..., version: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., monitor: _Optional[_Union[MonitorStatus, _Mapping]] = ..., totals: _Optional[_Union[RequestTotals, _Mapping]] = ..., proxies: _Optional[int] = ..., standbys: _Optional[_Iterable[_Union[StandbyStatus, _Mapping]]] = ...) -> None: ...

class StandbyStatus(_message.Message):
    __slots__ = ("holder", "address", "copy_epoch", "copy_age_s", "problem", "silent_s")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COPY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COPY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    holder: str
    address: str
    copy_epoch: int
    copy_age_s: float
    problem: str
    silent_s: float
    def __init__(self, holder: _Optional[str] = ..., address: _Optional[str] = ..., copy_epoch: _Optional[int] = ..., copy_age_s: _Optional[float] = ..., problem: _Optional[str] = ..., silent_s: _Optional[float] = ...) -> None: ...

class ListProxiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProxyStatus(_message.Message):
    __slots__ = ("proxy", "address", "pid", "connected", "acked_epoch", "acked_version", "lag", "refused_version", "refused_reason", "silent_s", "resident", "refused_epoch", "suspect", "unread")
    PROXY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ACKED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACKED_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    REFUSED_VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REASON_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    proxy: _placement_pb2.ProxyIdentity
    address: str
    pid: int
    connected: bool
    acked_epoch: int
    acked_version: int
    lag: int
    refused_version: int
    refused_reason: str
    silent_s: float
    resident: _containers.RepeatedCompositeFieldContainer[_placement_pb2.Residency]
    refused_epoch: int
    suspect: str
    unread: _containers.RepeatedCompositeFieldContainer[_placement_pb2.Residency]
    def __init__(self, proxy: _Optional[_Union[_placement_pb2.ProxyIdentity, _Mapping]] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., connected: _Optional[bool] = ..., acked_epoch: _Optional[int] = ..., acked_version: _Optional[int] = ..., lag: _Optional[int] = ..., refused_version: _Optional[int] = ..., refused_reason: _Optional[str] = ..., silent_s: _Optional[float] = ..., resident: _Optional[_Iterable[_Union[_placement_pb2.Residency, _Mapping]]] = ..., refused_epoch: _Optional[int] = ..., suspect: _Optional[str] = ..., unread: _Optional[_Iterable[_Union[_placement_pb2.Residency, _Mapping]]] = ...) -> None: ...

class ListProxiesResponse(_message.Message):
    __slots__ = ("proxies",)
    PROXIES_FIELD_NUMBER: _ClassVar[int]
    proxies: _containers.RepeatedCompositeFieldContainer[ProxyStatus]
    def __init__(self, proxies: _Optional[_Iterable[_Union[ProxyStatus, _Mapping]]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after", "follow")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after: int
    follow: bool
    def __init__(self, after: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "at", "kind", "message", "engine_id", "proxy", "fields", "boottime")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    PROXY_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    BOOTTIME_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    at: float
    kind: str
    message: str
    engine_id: str
    proxy: str
    fields: _containers.ScalarMap[str, str]
    boottime: float
    def __init__(self, sequence: _Optional[int] = ..., at: _Optional[float] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., engine_id: _Optional[str] = ..., proxy: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ..., boottime: _Optional[float] = ...) -> None: ...

class GetHandoffRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StateHandoff(_message.Message):
    __slots__ = ("document", "epoch")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    document: bytes
    epoch: int
    def __init__(self, document: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class ExplainEngineRequest(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("engine", "lines", "history")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    engine: EngineStatus
    lines: _containers.RepeatedScalarFieldContainer[str]
    history: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    def __init__(self, engine: _Optional[_Union[EngineStatus, _Mapping]] = ..., lines: _Optional[_Iterable[str]] = ..., history: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ...) -> None: ...

class HistoryEntry(_message.Message):
    __slots__ = ("age_s", "message")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    message: str
    def __init__(self, age_s: _Optional[float] = ..., message: _Optional[str] = ...) -> None: ...

class EjectEngineRequest(_message.Message):
    __slots__ = ("engine_id", "reason", "dry_run")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    reason: str
    dry_run: bool
    def __init__(self, engine_id: _Optional[str] = ..., reason: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class EjectEngineResponse(_message.Message):
    __slots__ = ("told",)
    TOLD_FIELD_NUMBER: _ClassVar[int]
    told: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, told: _Optional[_Iterable[str]] = ...) -> None: ...

class ProbeEngineRequest(_message.Message):
    __slots__ = ("engine_id", "dry_run")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    dry_run: bool
    def __init__(self, engine_id: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ProbeEngineResponse(_message.Message):
    __slots__ = ("verdict", "told")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    verdict: str
    told: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, verdict: _Optional[str] = ..., told: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainEnginesRequest(_message.Message):
    __slots__ = ("engine_ids", "all", "deadline_s", "reason", "no_restart", "wait", "dry_run")
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NO_RESTART_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    deadline_s: float
    reason: str
    no_restart: bool
    wait: bool
    dry_run: bool
    def __init__(self, engine_ids: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ..., deadline_s: _Optional[float] = ..., reason: _Optional[str] = ..., no_restart: _Optional[bool] = ..., wait: _Optional[bool] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("told", "engines")
    TOLD_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    told: _containers.RepeatedScalarFieldContainer[str]
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    def __init__(self, told: _Optional[_Iterable[str]] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ...) -> None: ...

class UndrainEnginesRequest(_message.Message):
    __slots__ = ("engine_ids", "all", "except_ids", "wait", "dry_run")
    ENGINE_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    EXCEPT_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    engine_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    except_ids: _containers.RepeatedScalarFieldContainer[str]
    wait: bool
    dry_run: bool
    def __init__(self, engine_ids: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ..., except_ids: _Optional[_Iterable[str]] = ..., wait: _Optional[bool] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class UndrainProgress(_message.Message):
    __slots__ = ("told", "engines", "waits_for")
    TOLD_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    told: _containers.RepeatedScalarFieldContainer[str]
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, told: _Optional[_Iterable[str]] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., waits_for: _Optional[_Iterable[str]] = ...) -> None: ...

class ForgetProxyRequest(_message.Message):
    __slots__ = ("id", "slot", "dry_run")
    ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    id: str
    slot: int
    dry_run: bool
    def __init__(self, id: _Optional[str] = ..., slot: _Optional[int] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ForgetProxyResponse(_message.Message):
    __slots__ = ("told",)
    TOLD_FIELD_NUMBER: _ClassVar[int]
    told: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, told: _Optional[_Iterable[str]] = ...) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EpochEntry(_message.Message):
    __slots__ = ("epoch", "holder", "address", "began_at", "ended_at", "ending", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    holder: str
    address: str
    began_at: float
    ended_at: float
    ending: str
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., holder: _Optional[str] = ..., address: _Optional[str] = ..., began_at: _Optional[float] = ..., ended_at: _Optional[float] = ..., ending: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GetHistoryResponse(_message.Message):
    __slots__ = ("epochs",)
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    epochs: _containers.RepeatedCompositeFieldContainer[EpochEntry]
    def __init__(self, epochs: _Optional[_Iterable[_Union[EpochEntry, _Mapping]]] = ...) -> None: ...

class StandByRequest(_message.Message):
    __slots__ = ("holder", "address", "copy_epoch", "copy_written_at", "problem")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COPY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COPY_WRITTEN_AT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    holder: str
    address: str
    copy_epoch: int
    copy_written_at: float
    problem: str
    def __init__(self, holder: _Optional[str] = ..., address: _Optional[str] = ..., copy_epoch: _Optional[int] = ..., copy_written_at: _Optional[float] = ..., problem: _Optional[str] = ...) -> None: ...

class StandByResponse(_message.Message):
    __slots__ = ("control_ready", "reason", "epoch", "prove")
    CONTROL_READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROVE_FIELD_NUMBER: _ClassVar[int]
    control_ready: bool
    reason: str
    epoch: int
    prove: str
    def __init__(self, control_ready: _Optional[bool] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., prove: _Optional[str] = ...) -> None: ...

class YieldRequest(_message.Message):
    __slots__ = ("standby", "operator", "dry_run")
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    standby: str
    operator: bool
    dry_run: bool
    def __init__(self, standby: _Optional[str] = ..., operator: _Optional[bool] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class YieldResponse(_message.Message):
    __slots__ = ("epoch", "standby", "address")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    standby: str
    address: str
    def __init__(self, epoch: _Optional[int] = ..., standby: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...
