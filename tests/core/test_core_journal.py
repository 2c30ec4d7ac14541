"""What the journal holds can be read back: every kind of input is made of what the codec knows."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from narwhal.control.core.events import Input
from narwhal.control.core.journal import Head

PLAIN = (bool, int, float, str)


def unreadable(kind: Any, path: str) -> list[str]:
    """Where below `kind` something is that the codec does not know."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return [found for name, hint in hints.items() for found in unreadable(hint, f"{path}.{name}")]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return [] if len(inner) == 2 and inner[1] is Ellipsis and not unreadable(inner[0], path) else [path]
    if origin in (frozenset, Mapping, dict):
        key, *rest = inner
        named = (
            key is str
            or (key is int and origin is not frozenset)
            or (isinstance(key, type) and issubclass(key, StrEnum))
        )
        return [found for each in rest for found in unreadable(each, path)] if named else [path]
    if inner and type(None) in inner:
        (only,) = (each for each in inner if each is not type(None))
        return unreadable(only, path)
    known = isinstance(kind, type) and (kind in PLAIN or issubclass(kind, StrEnum))
    return [] if known else [path]


@pytest.mark.parametrize("kind", [*get_args(Input), Head], ids=lambda kind: str(kind.__name__))
def test_every_input_is_made_of_what_can_be_read_back(kind: type) -> None:
    assert unreadable(kind, kind.__name__) == []
