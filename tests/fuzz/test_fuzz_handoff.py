"""A stored state handoff that was damaged, made up, or written by another release: refused with a reason, or applied
whole, by a control plane that then works on (spec S2)."""

import copy
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.control.core.handoff import Resume
from narwhal.control.resume import judge
from narwhal.vocabulary import Hold
from tests.fuzz.files import SETTINGS, document, good
from tests.fuzz.messages import fuzz

VALUES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**53, 2**63, 2**64 - 1, -(2**63), 1e308, -1.0, 0.5])
    | st.sampled_from(["", "d1", "p1", "prefill", "decode", "drain", "joining", "ejected", "stream", *Hold, "x" * 3000])
    | st.just([])
    | st.just({})
)
Path = tuple[Any, ...]


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place in a document."""
    if at:
        yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from paths(inner, (*at, key))


def changed(whole: Any, path: Path, value: Any, how: str) -> Any:
    whole = copy.deepcopy(whole)
    holder = whole
    try:
        for key in path[:-1]:
            holder = holder[key]
        old = holder[path[-1]]
    except (KeyError, IndexError, TypeError):
        return whole  # an earlier change took the place away
    if how == "remove":
        del holder[path[-1]]
    elif how == "twice" and isinstance(holder, list):
        holder.append(old)
    elif how == "more" and isinstance(old, dict):
        old["unheard_of"] = value
    else:
        holder[path[-1]] = value
    return whole


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(list(paths(orjson.loads(good())))), VALUES, st.sampled_from(["set", "remove", "twice", "more"])
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
def test_the_document_that_is_changed_below_is_document() -> None:
    assert judge(good(), SETTINGS).resume is Resume.APPLY
    document(good())


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
@fuzz
@given(CHANGES)
def test_a_document_with_anything_changed_is_refused_or_worked_with(changes: list[tuple[Path, Any, str]]) -> None:
    value_of = orjson.loads(good())
    for path, value, how in changes:
        value_of = changed(value_of, path, value, how)
    document(orjson.dumps(value_of))


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
@fuzz
@given(st.integers(0, 20_000), st.integers(0, 20), st.binary(max_size=8))
def test_a_document_with_bytes_changed_is_refused_or_worked_with(at: int, lost: int, junk: bytes) -> None:
    whole = good()
    at %= len(whole)
    document(whole[:at] + junk + whole[at + lost :])
    document(whole[:at])
