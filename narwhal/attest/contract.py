"""The contract file: what the people who deploy an engine say of it, as fields of their own choice.

Nothing here knows what a field means; the fleet's `engine_contract` asks for some of them, and the gate compares.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from narwhal.config.problems import FleetFileError
from narwhal.config.text import read

# What the sidecar itself says beside the file's fields.
OWN_FIELDS = ("process", "digest")


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The fields of one file. `digest` is the same wherever the fields are, in whatever order and notation."""

    fields: Mapping[str, Any]
    digest: str


def load_contract(path: Path) -> Contract:
    """The contract in the file at `path`, YAML or JSON. Raises FleetFileError with every problem."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise FleetFileError([f"file: cannot be read: {error.strerror or error}"]) from None
    except ValueError as error:  # not UTF-8; or a NUL in the path
        raise FleetFileError([f"file: cannot be read: {error}"]) from None
    document = read(text)
    fields = document.value
    if not isinstance(fields, dict):
        raise FleetFileError(["file: must be a mapping of fields"])
    problems = [*document.problems, *_problems(fields)]
    if not fields:
        problems.append("file: names no field; a contract without one says nothing")
    if problems:
        raise FleetFileError(problems)
    return Contract(fields=fields, digest=digest(fields))


def digest(fields: Mapping[str, Any]) -> str:
    """SHA-256 of the fields as JSON with sorted keys and no white space."""
    return f"sha256:{sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()}"


def _problems(fields: Mapping[str, Any]) -> Iterator[str]:
    for name in OWN_FIELDS:
        if name in fields:
            yield f"{name}: is what narwhal-attest says itself; leave it out"
    for path, value in _leaves(fields, ""):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{path}: must be a finite number"
        elif isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64:
            yield f"{path}: must be a number of at most 64 bits, or text"
        elif isinstance(value, str) and not _is_unicode(value):
            yield f"{path}: holds half a character"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value that holds no others, and every key, with where it stands."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield path or "file", key
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def _is_unicode(text: str) -> bool:
    """Whether it can be sent: JSON may name one half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
