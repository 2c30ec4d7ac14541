"""The fleet file as one validated value, and the part of it that a proxy needs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from narwhal.config.fields import Maybe, Name, Section, Text, refuse
from narwhal.config.problems import FleetFileError, sentences
from narwhal.config.relations import conflicts
from narwhal.config.sections import (
    AuthConfig,
    ControllerConfig,
    EngineConfig,
    EngineSettings,
    JournalConfig,
    LeaseConfig,
    ProxyConfig,
    RecoveryConfig,
    ServingConfig,
    SloConfig,
    StandbyConfig,
    StoreConfig,
    TlsConfig,
)


def _version(value: int) -> int:
    if value != 1:
        raise refuse(f"must be 1, the only version that this release reads, got {value}")
    return value


def _some(value: tuple[EngineConfig, ...]) -> tuple[EngineConfig, ...]:
    if not value:
        raise refuse("must name at least one engine")
    return value


def _contract(value: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise refuse("must hold text, finite numbers, true, false, null, lists and mappings only") from None
    return value


Version = Annotated[int, AfterValidator(_version)]
Contract = Annotated[Mapping[str, Any], AfterValidator(_contract)]
Engines = Annotated[tuple[EngineConfig, ...], AfterValidator(_some)]


class ProxySettings(Section):
    """What a proxy works by. Comes from the fleet file, or from control, which sends it as JSON."""

    name: Name = Field(description="Name of the fleet.")
    model: Text = Field(description="The one model served.")
    slo: SloConfig = SloConfig()
    serving: ServingConfig = ServingConfig()
    engine: EngineSettings = EngineSettings()
    recovery: RecoveryConfig = RecoveryConfig()
    proxy: ProxyConfig = ProxyConfig()

    def to_json(self) -> bytes:
        """The settings as a JSON object, secrets in clear: for the wire, never for a log."""
        return self.model_dump_json(by_alias=True, exclude_none=True, context={"reveal": True}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """The settings in `data`; keys that this version does not know are ignored, since control may be newer.

        Raises FleetFileError when `data` is not such an object or a known key has a wrong value.
        """
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FleetFileError([f"settings: not JSON: {error}"]) from None
        try:
            return cls.model_validate(_known(cls, value))
        except ValidationError as error:
            raise FleetFileError(sentences(cls, error)) from None


def _known(model: type[BaseModel], value: Any) -> Any:
    """`value` without the keys that `model` does not have, at every depth."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        if key in value:
            inner: Any = field.annotation
            nested = isinstance(inner, type) and issubclass(inner, BaseModel)
            kept[key] = _known(inner, value[key]) if nested else value[key]
    return kept


class FleetConfig(Section):
    """A fleet: its engines and how they are watched, recovered and served."""

    schema_: Literal["narwhal.fleet"] = Field(
        default="narwhal.fleet",
        alias="schema",
        description="What this file is.",
    )
    schema_version: Version = Field(default=1, description="Version of the file's format.")
    name: Name = Field(description="Name of the fleet: part of etcd keys and the metric label `fleet`.")
    model: Text = Field(description="The one model served, as clients and engines name it.")
    engines: Engines = Field(
        strict=False,
        description="The inference servers of the fleet.",
    )
    engine_contract: Maybe[Contract] = Field(
        default=None,
        description="Fields that every engine's attestation document must match.",
    )
    slo: SloConfig = Field(default=SloConfig(), description="Latency targets.")
    store: StoreConfig = Field(
        default=StoreConfig(),
        description="Where the lease and the state handoff are kept.",
    )
    journal: JournalConfig = Field(
        default=JournalConfig(),
        description="The event journal.",
    )
    lease: LeaseConfig = Field(
        default=LeaseConfig(),
        description="The lease of the active control process.",
    )
    standby: StandbyConfig = Field(
        default=StandbyConfig(),
        description="When a standby replaces the active.",
    )
    controller: ControllerConfig = Field(
        default=ControllerConfig(),
        description="The monitor and role control.",
    )
    serving: ServingConfig = Field(
        default=ServingConfig(),
        description="How a proxy admits, queues and retries.",
    )
    engine: EngineSettings = Field(
        default=EngineSettings(),
        description="How engines are spoken to.",
    )
    recovery: RecoveryConfig = Field(
        default=RecoveryConfig(),
        description="When an engine is taken out and how it returns.",
    )
    proxy: ProxyConfig = Field(
        default=ProxyConfig(),
        description="What a proxy does while control is away.",
    )
    tls: TlsConfig = Field(
        default=TlsConfig(),
        description="Mutual TLS of the gRPC services.",
    )
    auth: AuthConfig = Field(
        default=AuthConfig(),
        description="Who may call the gRPC services.",
    )

    @model_validator(mode="after")
    def _relations_hold(self) -> Self:
        found = conflicts(self)
        if found:
            sentences = "; ".join(f"{conflict.path}: {conflict.sentence}" for conflict in found)
            raise PydanticCustomError("fleet_relations", "{sentences}", {"sentences": sentences, "conflicts": found})
        return self

    @property
    def control_connections(self) -> int:
        """Connections of the control pool that apply: the setting, or twice the number of engines, at least 4."""
        return self.engine.control_connections or max(4, 2 * len(self.engines))

    @property
    def journal_directory(self) -> Path:
        """Where the event journal is kept."""
        return Path(self.journal.path) if self.journal.path is not None else Path(self.store.path) / "journal"

    def engine_set(self) -> frozenset[str]:
        """Ids of the engines: what a saved state handoff must agree with."""
        return frozenset(engine.id for engine in self.engines)

    def masked(self) -> dict[str, Any]:
        """The whole configuration as plain values, defaults filled in and secrets masked: for people to read."""
        values = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        if self.engine_contract is not None:
            values["engine_contract"] = dict(self.engine_contract)  # a contract may demand null
        return values

    def proxy_settings(self) -> ProxySettings:
        """The part that a proxy needs."""
        return ProxySettings(
            name=self.name,
            model=self.model,
            slo=self.slo,
            serving=self.serving,
            engine=self.engine,
            recovery=self.recovery,
            proxy=self.proxy,
        )
