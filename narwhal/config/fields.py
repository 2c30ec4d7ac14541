"""The kinds of value a fleet file may hold: numbers with their bounds, addresses, names, secrets.

Types only: a field's meaning and default stand in `sections.py`, its relations to others in `relations.py`. What a
type refuses, it refuses in one sentence that reads well after `path: `. Secrets and whatever came from the
environment never appear in a sentence.
"""

import re
from collections.abc import Mapping
from ipaddress import IPv6Address
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from narwhal.config.problems import shown

MASK = "***"
LONGEST_S = 31_536_000.0  # a year: beyond it timers of the operating system overflow and nobody means it
LARGEST = 2_147_483_647  # counts travel as 32-bit integers

_FROM_ENVIRONMENT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_ORIGIN = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?(/[!-~]*)?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Section(BaseModel):
    """A frozen part of the fleet file that refuses unknown keys and converts nothing but whole numbers to seconds."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        # An editor that checks against the schema must accept notes, as the loader does.
        json_schema_extra={"patternProperties": {"^_": {"description": "A note: never read."}}},
    )


def refuse(sentence: str) -> PydanticCustomError:
    """An error whose text is `sentence`, for validators to raise."""
    return PydanticCustomError("fleet_value", "{sentence}", {"sentence": sentence})


def _resolved(value: str, info: ValidationInfo) -> tuple[str, str]:
    """(`value` or what the environment holds for it, how to name it in a sentence)."""
    match = _FROM_ENVIRONMENT.fullmatch(value)
    environ: Mapping[str, str] | None = info.context.get("environ") if isinstance(info.context, Mapping) else None
    if match is None or environ is None:
        return value, shown(value)
    name = match.group(1)
    if name not in environ:
        raise refuse(f"the environment variable {name} is not set")
    return environ[name], f"the value of the environment variable {name}"


def _parts(value: str, named: str) -> tuple[str, int | None, str]:
    """(scheme://host[:port] in lower case, port, path) of an http address."""
    if "${" in value:
        raise refuse("${NAME} must be the whole value, not a part of it")
    if "@" in value:
        raise refuse("must not carry a user name or a password")
    match = _ORIGIN.fullmatch(value)
    if match is None:
        raise refuse(f"must be an address like http://10.0.0.5:8000, got {named}")
    scheme, host, port, path = match.groups()
    if host.startswith("["):
        try:
            IPv6Address(host[1:-1])
        except ValueError:
            raise refuse(f"must name an IPv6 address between the brackets, got {named}") from None
    if port is not None and not 1 <= int(port) <= 65535:
        raise refuse(f"must have a port between 1 and 65535, got {named}")
    origin = f"{scheme}://{host}".lower() + (f":{int(port)}" if port else "")
    return origin, int(port) if port else None, path or ""


def _base_url(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str):
        return value
    text, named = _resolved(value, info)
    origin, _, path = _parts(text, named)
    if path not in ("", "/"):
        raise refuse(f"must be scheme, host and port without a path, got {named}")
    return origin


def _endpoint(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str):
        return value
    text, named = _resolved(value, info)
    origin, port, path = _parts(text, named)
    if port is None or path not in ("", "/"):
        raise refuse(f"must be http://host:port or https://host:port, got {named}")
    return origin


def _document_url(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str):
        return value
    text, named = _resolved(value, info)
    origin, _, path = _parts(text, named)
    if "#" in path:
        raise refuse(f"must not have a fragment, got {named}")
    return origin + path


def _secret(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, str):
        raise refuse("must be text (put it in quotes)")
    text, _ = _resolved(value, info)
    if not text:
        raise refuse("must not be empty")
    return SecretStr(text)


def _dumped_secret(value: SecretStr, info: SerializationInfo) -> str:
    revealed = isinstance(info.context, Mapping) and info.context.get("reveal") is True
    return value.get_secret_value() if revealed else MASK


def _header_safe(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!-~]+", value.get_secret_value()):
        raise refuse("must be printable ASCII without spaces, since it is sent in an HTTP header")
    return value


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise refuse(
            "must be letters, digits, dots, underscores and hyphens, and start with a letter or a digit, "
            f"got {shown(value)}"
        )
    if len(value) > 63:
        raise refuse(f"must be at most 63 characters, got {len(value)}")
    return value


def _text(value: str) -> str:
    if _FROM_ENVIRONMENT.fullmatch(value):
        raise refuse("only a URL or a secret may be read from the environment")
    if not value.strip():
        raise refuse("must not be empty")
    if not value.isprintable():
        raise refuse(f"must be printable text, got {shown(value)}")
    return value


def _prefix(value: str) -> str:
    trimmed = value.rstrip("/")
    if not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", trimmed):
        raise refuse(f"must be a path of plain names such as /narwhal, got {shown(value)}")
    return trimmed


def _given(value: Any, info: ValidationInfo) -> Any:
    if value is None and isinstance(info.context, Mapping):  # in a file; a value built in code may say None
        raise refuse("has no value")
    return value


T = TypeVar("T")
Maybe = Annotated[T | None, BeforeValidator(_given)]
Positive = Annotated[float, Field(gt=0, le=LONGEST_S)]
# Between two times of what is done for ever: more often it is a busy loop, and finds nothing new.
Interval = Annotated[float, Field(ge=0.05, le=LONGEST_S)]
Duration = Annotated[float, Field(ge=0, le=LONGEST_S)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Amount = Annotated[float, Field(ge=0, le=LARGEST)]
Name = Annotated[str, AfterValidator(_name)]
Text = Annotated[str, AfterValidator(_text)]
BaseUrl = Annotated[str, BeforeValidator(_base_url)]
DocumentUrl = Annotated[str, BeforeValidator(_document_url)]
Endpoint = Annotated[str, BeforeValidator(_endpoint)]
Prefix = Annotated[str, AfterValidator(_prefix)]
Secret = Annotated[SecretStr, BeforeValidator(_secret), PlainSerializer(_dumped_secret, return_type=str)]
HeaderSecret = Annotated[Secret, AfterValidator(_header_safe)]
