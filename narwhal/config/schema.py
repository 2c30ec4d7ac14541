"""The fleet file as JSON Schema, for editors, and as rows for the documentation. Both come from the models."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from narwhal.config.fleet import FleetConfig
from narwhal.config.problems import section_of, shown


class _Schema(GenerateJsonSchema):
    """As the loader has it: a key is absent or has a value, so null is never one."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # "Stage Timeout S" says nothing that the key does not

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        default = schema.get("default")
        if default is None or isinstance(default, BaseModel):  # a section's defaults stand at its own keys
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def fleet_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the fleet file. It holds types and bounds; relations between fields it cannot say."""
    schema = FleetConfig.model_json_schema(by_alias=True, schema_generator=_Schema)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "Narwhal fleet file"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One key: its path, its default as a file would have it, what it means."""

    path: str
    default: str
    meaning: str


def rows(model: type[BaseModel] = FleetConfig, prefix: str = "") -> Iterator[Row]:
    """Every key of the fleet file in order. Sections are followed into; `engines[]` stands for each engine."""
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        inner = section_of(field.annotation)
        if inner is None:
            yield Row(path=path, default=_default(field), meaning=field.description or "")
        else:
            nested = f"{path}." if inner is field.annotation else f"{path}[]."
            yield from rows(inner, nested)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "–"
    return "`[]`" if field.default == () else f"`{shown(field.default)}`".replace('"', "")
