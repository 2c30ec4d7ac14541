from narwhal._pb import placement_pb2 as _placement_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LegOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_OUTCOME_UNSPECIFIED: _ClassVar[LegOutcome]
    LEG_OUTCOME_HANDOFF: _ClassVar[LegOutcome]
    LEG_OUTCOME_STREAM_COMPLETE: _ClassVar[LegOutcome]
    LEG_OUTCOME_ANSWER_COMPLETE: _ClassVar[LegOutcome]
    LEG_OUTCOME_CLIENT_ERROR: _ClassVar[LegOutcome]
    LEG_OUTCOME_REFUSED: _ClassVar[LegOutcome]
    LEG_OUTCOME_UNREACHABLE: _ClassVar[LegOutcome]
    LEG_OUTCOME_RESET: _ClassVar[LegOutcome]
    LEG_OUTCOME_TLS_FAILED: _ClassVar[LegOutcome]
    LEG_OUTCOME_ANSWER_CUT: _ClassVar[LegOutcome]
    LEG_OUTCOME_CONNECT_TIMEOUT: _ClassVar[LegOutcome]
    LEG_OUTCOME_PREFILL_TIMEOUT: _ClassVar[LegOutcome]
    LEG_OUTCOME_READ_TIMEOUT: _ClassVar[LegOutcome]
    LEG_OUTCOME_FIRST_TOKEN_TIMEOUT: _ClassVar[LegOutcome]
    LEG_OUTCOME_STREAM_SILENT: _ClassVar[LegOutcome]
    LEG_OUTCOME_STREAM_CUT: _ClassVar[LegOutcome]
    LEG_OUTCOME_MARKER_WITHOUT_TOKEN: _ClassVar[LegOutcome]
    LEG_OUTCOME_ERROR_EVENT: _ClassVar[LegOutcome]
    LEG_OUTCOME_STREAM_MALFORMED: _ClassVar[LegOutcome]
    LEG_OUTCOME_STALLED: _ClassVar[LegOutcome]
    LEG_OUTCOME_HTTP_408: _ClassVar[LegOutcome]
    LEG_OUTCOME_HTTP_429: _ClassVar[LegOutcome]
    LEG_OUTCOME_HTTP_5XX: _ClassVar[LegOutcome]
    LEG_OUTCOME_WRONG_IDENTITY: _ClassVar[LegOutcome]
    LEG_OUTCOME_HANDOFF_UNUSABLE: _ClassVar[LegOutcome]
    LEG_OUTCOME_CANCELLED: _ClassVar[LegOutcome]
    LEG_OUTCOME_LOCAL: _ClassVar[LegOutcome]
    LEG_OUTCOME_DEADLINE: _ClassVar[LegOutcome]
LEG_OUTCOME_UNSPECIFIED: LegOutcome
LEG_OUTCOME_HANDOFF: LegOutcome
LEG_OUTCOME_STREAM_COMPLETE: LegOutcome
LEG_OUTCOME_ANSWER_COMPLETE: LegOutcome
LEG_OUTCOME_CLIENT_ERROR: LegOutcome
LEG_OUTCOME_REFUSED: LegOutcome
LEG_OUTCOME_UNREACHABLE: LegOutcome
LEG_OUTCOME_RESET: LegOutcome
LEG_OUTCOME_TLS_FAILED: LegOutcome
LEG_OUTCOME_ANSWER_CUT: LegOutcome
LEG_OUTCOME_CONNECT_TIMEOUT: LegOutcome
LEG_OUTCOME_PREFILL_TIMEOUT: LegOutcome
LEG_OUTCOME_READ_TIMEOUT: LegOutcome
LEG_OUTCOME_FIRST_TOKEN_TIMEOUT: LegOutcome
LEG_OUTCOME_STREAM_SILENT: LegOutcome
LEG_OUTCOME_STREAM_CUT: LegOutcome
LEG_OUTCOME_MARKER_WITHOUT_TOKEN: LegOutcome
LEG_OUTCOME_ERROR_EVENT: LegOutcome
LEG_OUTCOME_STREAM_MALFORMED: LegOutcome
LEG_OUTCOME_STALLED: LegOutcome
LEG_OUTCOME_HTTP_408: LegOutcome
LEG_OUTCOME_HTTP_429: LegOutcome
LEG_OUTCOME_HTTP_5XX: LegOutcome
LEG_OUTCOME_WRONG_IDENTITY: LegOutcome
LEG_OUTCOME_HANDOFF_UNUSABLE: LegOutcome
LEG_OUTCOME_CANCELLED: LegOutcome
LEG_OUTCOME_LOCAL: LegOutcome
LEG_OUTCOME_DEADLINE: LegOutcome

class LegFailure(_message.Message):
    __slots__ = ("producer_id", "producer_incarnation", "status", "detail", "request_id", "elapsed_s", "engine_silent")
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SILENT_FIELD_NUMBER: _ClassVar[int]
    producer_id: str
    producer_incarnation: int
    status: int
    detail: str
    request_id: str
    elapsed_s: float
    engine_silent: bool
    def __init__(self, producer_id: _Optional[str] = ..., producer_incarnation: _Optional[int] = ..., status: _Optional[int] = ..., detail: _Optional[str] = ..., request_id: _Optional[str] = ..., elapsed_s: _Optional[float] = ..., engine_silent: _Optional[bool] = ...) -> None: ...

class OutcomeRun(_message.Message):
    __slots__ = ("engine_id", "phase", "incarnation", "outcome", "count", "failure")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    phase: _placement_pb2.Phase
    incarnation: int
    outcome: LegOutcome
    count: int
    failure: LegFailure
    def __init__(self, engine_id: _Optional[str] = ..., phase: _Optional[_Union[_placement_pb2.Phase, str]] = ..., incarnation: _Optional[int] = ..., outcome: _Optional[_Union[LegOutcome, str]] = ..., count: _Optional[int] = ..., failure: _Optional[_Union[LegFailure, _Mapping]] = ...) -> None: ...

class RequestCounts(_message.Message):
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

class Sketch(_message.Message):
    __slots__ = ("buckets", "counts")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, buckets: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class LegMeasures(_message.Message):
    __slots__ = ("engine_id", "phase", "incarnation", "first_s", "step_s", "wait_s", "prompt_tokens", "output_tokens", "waiting")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    phase: _placement_pb2.Phase
    incarnation: int
    first_s: Sketch
    step_s: Sketch
    wait_s: Sketch
    prompt_tokens: Sketch
    output_tokens: Sketch
    waiting: int
    def __init__(self, engine_id: _Optional[str] = ..., phase: _Optional[_Union[_placement_pb2.Phase, str]] = ..., incarnation: _Optional[int] = ..., first_s: _Optional[_Union[Sketch, _Mapping]] = ..., step_s: _Optional[_Union[Sketch, _Mapping]] = ..., wait_s: _Optional[_Union[Sketch, _Mapping]] = ..., prompt_tokens: _Optional[_Union[Sketch, _Mapping]] = ..., output_tokens: _Optional[_Union[Sketch, _Mapping]] = ..., waiting: _Optional[int] = ...) -> None: ...

class ReportBatch(_message.Message):
    __slots__ = ("proxy", "sequence", "runs", "requests", "measures", "measured_s")
    PROXY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_S_FIELD_NUMBER: _ClassVar[int]
    proxy: _placement_pb2.ProxyIdentity
    sequence: int
    runs: _containers.RepeatedCompositeFieldContainer[OutcomeRun]
    requests: RequestCounts
    measures: _containers.RepeatedCompositeFieldContainer[LegMeasures]
    measured_s: float
    def __init__(self, proxy: _Optional[_Union[_placement_pb2.ProxyIdentity, _Mapping]] = ..., sequence: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[OutcomeRun, _Mapping]]] = ..., requests: _Optional[_Union[RequestCounts, _Mapping]] = ..., measures: _Optional[_Iterable[_Union[LegMeasures, _Mapping]]] = ..., measured_s: _Optional[float] = ...) -> None: ...

class ReportAck(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...
