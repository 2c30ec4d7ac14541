"""Protobuf messages as no correct peer would send them: every field of the type at its extremes, or absent.

Little is drawn in CI; `NARWHAL_FUZZ_EXAMPLES=100000 pytest tests/fuzz` draws more.
"""

import os
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

fuzz = settings(
    max_examples=int(os.environ.get("NARWHAL_FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

M = TypeVar("M", bound=Message)

F = FieldDescriptor
_NAMES = ["", "p1", "d1", "edge", "no-such", "é\u202e", "x" * 5000, "a\nb", "\x00"]
_INTEGERS = {
    F.TYPE_UINT64: (0, 2**64 - 1),
    F.TYPE_UINT32: (0, 2**32 - 1),
    F.TYPE_INT64: (-(2**63), 2**63 - 1),
    F.TYPE_INT32: (-(2**31), 2**31 - 1),
}
_SIMPLE = {
    F.TYPE_DOUBLE: st.floats(),
    F.TYPE_FLOAT: st.floats(width=32),
    F.TYPE_BOOL: st.booleans(),
    F.TYPE_STRING: st.sampled_from(_NAMES) | st.text(max_size=20),
    F.TYPE_BYTES: st.binary(max_size=20),
}


def messages(kind: type[M]) -> st.SearchStrategy[M]:
    """Messages of `kind`."""
    return _message(kind.DESCRIPTOR).map(lambda fields: _built(kind(), fields))


def _message(descriptor: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={f.name: _field(f) for f in descriptor.fields})


def _field(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    one = _value(field)
    return st.lists(one, max_size=3) if field.is_repeated else one


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return _message(field.message_type)
    if field.enum_type is not None:
        return st.sampled_from([*[v.number for v in field.enum_type.values], 77])
    if field.type in _INTEGERS:
        low, high = _INTEGERS[field.type]
        return st.sampled_from([low, 0, 1, 2, high]) | st.integers(low, high)
    return _SIMPLE[field.type]


def _built(message: M, fields: dict[str, Any]) -> M:
    for name, value in fields.items():
        if isinstance(value, dict):
            _built(getattr(message, name), value).SetInParent()
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                _built(getattr(message, name).add(), item)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message
