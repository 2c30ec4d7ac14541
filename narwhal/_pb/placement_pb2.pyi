from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase

class ProxyIdentity(_message.Message):
    __slots__ = ("id", "slot", "boot")
    ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    id: str
    slot: int
    boot: int
    def __init__(self, id: _Optional[str] = ..., slot: _Optional[int] = ..., boot: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("proxy", "fleet", "highest_epoch", "address", "pid")
    PROXY_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    proxy: ProxyIdentity
    fleet: str
    highest_epoch: int
    address: str
    pid: int
    def __init__(self, proxy: _Optional[_Union[ProxyIdentity, _Mapping]] = ..., fleet: _Optional[str] = ..., highest_epoch: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class Residency(_message.Message):
    __slots__ = ("engine_id", "legs", "tokens")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    legs: int
    tokens: int
    def __init__(self, engine_id: _Optional[str] = ..., legs: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("epoch", "version", "resident", "unread")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    resident: _containers.RepeatedCompositeFieldContainer[Residency]
    unread: _containers.RepeatedCompositeFieldContainer[Residency]
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., resident: _Optional[_Iterable[_Union[Residency, _Mapping]]] = ..., unread: _Optional[_Iterable[_Union[Residency, _Mapping]]] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("epoch", "version", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason", "proxy")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROXY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    proxy: ProxyIdentity
    def __init__(self, reason: _Optional[str] = ..., proxy: _Optional[_Union[ProxyIdentity, _Mapping]] = ...) -> None: ...

class ProxyMessage(_message.Message):
    __slots__ = ("hello", "ack", "nack", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ack: Ack
    nack: Nack
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class WatchPlacementRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class EnginePlacement(_message.Message):
    __slots__ = ("id", "url", "role", "phases", "incarnation", "weight", "holds", "quarantine_remaining_s", "phases_after_quarantine", "pinned", "max_inflight", "max_inflight_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    PHASES_AFTER_QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MAX_INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_INFLIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    url: str
    role: Phase
    phases: _containers.RepeatedScalarFieldContainer[Phase]
    incarnation: int
    weight: float
    holds: _containers.RepeatedScalarFieldContainer[str]
    quarantine_remaining_s: float
    phases_after_quarantine: _containers.RepeatedScalarFieldContainer[Phase]
    pinned: bool
    max_inflight: int
    max_inflight_tokens: int
    def __init__(self, id: _Optional[str] = ..., url: _Optional[str] = ..., role: _Optional[_Union[Phase, str]] = ..., phases: _Optional[_Iterable[_Union[Phase, str]]] = ..., incarnation: _Optional[int] = ..., weight: _Optional[float] = ..., holds: _Optional[_Iterable[str]] = ..., quarantine_remaining_s: _Optional[float] = ..., phases_after_quarantine: _Optional[_Iterable[_Union[Phase, str]]] = ..., pinned: _Optional[bool] = ..., max_inflight: _Optional[int] = ..., max_inflight_tokens: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("epoch", "version", "closed", "engines")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    closed: str
    engines: _containers.RepeatedCompositeFieldContainer[EnginePlacement]
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., closed: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[EnginePlacement, _Mapping]]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("epoch", "base_version", "version", "closed", "engines", "removed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_version: int
    version: int
    closed: str
    engines: _containers.RepeatedCompositeFieldContainer[EnginePlacement]
    removed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., base_version: _Optional[int] = ..., version: _Optional[int] = ..., closed: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[EnginePlacement, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("epoch", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Settings(_message.Message):
    __slots__ = ("fleet", "json")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    fleet: str
    json: bytes
    def __init__(self, fleet: _Optional[str] = ..., json: _Optional[bytes] = ...) -> None: ...

class FleetResidency(_message.Message):
    __slots__ = ("resident", "proxies")
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    PROXIES_FIELD_NUMBER: _ClassVar[int]
    resident: _containers.RepeatedCompositeFieldContainer[Residency]
    proxies: int
    def __init__(self, resident: _Optional[_Iterable[_Union[Residency, _Mapping]]] = ..., proxies: _Optional[int] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PlacementMessage(_message.Message):
    __slots__ = ("settings", "snapshot", "change", "heartbeat", "residency", "farewell")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    settings: Settings
    snapshot: Snapshot
    change: Change
    heartbeat: Heartbeat
    residency: FleetResidency
    farewell: Farewell
    def __init__(self, settings: _Optional[_Union[Settings, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., change: _Optional[_Union[Change, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., residency: _Optional[_Union[FleetResidency, _Mapping]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ...) -> None: ...
