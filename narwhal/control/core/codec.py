"""Frozen dataclasses ⇄ JSON values, strictly: the fields of the class, all of them, and nothing else. Pure.

Knows `bool`, `int`, `float`, `str`, enumerations of strings, `X | None`, `tuple[X, ...]`, `frozenset[X]` of strings,
`Mapping[K, X]` and `dict[K, X]` with strings, enumerations or integers as keys, and dataclasses of these. Decoding
raises `CodecError` with the path of what is wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

_UNION = type(int | None)


class CodecError(ValueError):
    """The value does not fit the class."""


def encode(value: Any) -> Any:
    """`value` as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    if isinstance(value, frozenset):
        return sorted(encode(v) for v in value)
    return value


def decode(kind: Any, value: Any, path: str = "") -> Any:
    """`value` as a `kind`. Raises `CodecError`."""
    if is_dataclass(kind):
        return _record(kind, value, path)
    origin = get_origin(kind)
    if origin is _UNION:
        (inner,) = (k for k in get_args(kind) if k is not type(None))
        return None if value is None else decode(inner, value, path)
    if origin is tuple:
        inner = get_args(kind)[0]
        return tuple(decode(inner, v, f"{path}[{i}]") for i, v in enumerate(_expect(list, value, path)))
    if origin is frozenset:
        inner = get_args(kind)[0]
        return frozenset(decode(inner, v, f"{path}[{i}]") for i, v in enumerate(_expect(list, value, path)))
    if origin in (Mapping, dict):
        key, inner = get_args(kind)
        items = _expect(dict, value, path).items()
        return {_key(key, k, f"{path}.{k}"): decode(inner, v, f"{path}.{k}") for k, v in items}
    return _scalar(kind, value, path)


def _key(kind: Any, value: Any, path: str) -> Any:
    """A key, which JSON has as a string."""
    if kind is not int:
        return decode(kind, value, path)
    try:
        return int(value)
    except ValueError:
        raise CodecError(f"{path}: must be an integer") from None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _record(kind: Any, value: Any, path: str) -> Any:
    given = _expect(dict, value, path)
    hints = _hints(kind)
    below = f"{path}." if path else ""
    unknown = sorted(str(name) for name in given if name not in hints)
    if unknown:
        raise CodecError(f"unknown field {below}{unknown[0]}")
    missing = [name for name in hints if name not in given]
    if missing:
        raise CodecError(f"missing field {below}{missing[0]}")
    decoded = {name: decode(hint, given[name], f"{below}{name}") for name, hint in hints.items()}
    try:
        return kind(**decoded)
    except ValueError as error:
        raise CodecError(f"{path}: {error}" if path else str(error)) from error


def _scalar(kind: type, value: Any, path: str) -> Any:
    if issubclass(kind, StrEnum):
        word = _expect(str, value, path)
        try:
            return kind(word)
        except ValueError:
            raise CodecError(f"{path}: unknown {kind.__name__} {word!r}") from None
    if kind is float:
        number = _number(value, path)
        if not math.isfinite(number):
            raise CodecError(f"{path}: must be finite, got {number}")
        return number
    return _expect(kind, value, path)


def _number(value: Any, path: str) -> float:
    if isinstance(value, float):
        return value
    whole = _expect(int, value, path, "a number")
    try:
        return float(whole)
    except OverflowError:  # JSON has integers of any length
        return math.inf if whole > 0 else -math.inf


_NAMES = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false"}


def _expect(kind: type, value: Any, path: str, name: str = "") -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        what = f"{path}: " if path else ""
        raise CodecError(f"{what}must be {name or _NAMES[kind]}, got {type(value).__name__}")
    return value
