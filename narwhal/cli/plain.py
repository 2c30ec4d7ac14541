"""The values of `model` and its neighbours as JSON and YAML show them."""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import Any


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
