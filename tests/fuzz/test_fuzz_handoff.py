"""A stored state handoff that was damaged, made up, or written by another release: refused with a reason, or applied
whole, by a control plane that then works on (spec S2)."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.control.core.handoff import Resume, aged, from_document, to_document
from narwhal.control.core.settings import CoreSettings
from narwhal.control.resume import judge
from tests.core.rig import Rig
from tests.core.test_core_handoff import ENGINES, busy
from tests.fuzz.messages import fuzz

WALL = 5000.0
VALUES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**53, 2**63, 2**64 - 1, -(2**63), 1e308, -1.0, 0.5])
    | st.sampled_from(["", "d1", "p1", "prefill", "decode", "drain", "joining", "ejected", "stream", "x" * 3000])
    | st.just([])
    | st.just({})
)
Path = tuple[Any, ...]


@cache
def good() -> bytes:
    return orjson.dumps(to_document(busy().fleet.save(now=busy().now), wall=WALL, epoch=3, holder="a"))


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place in a document."""
    if at:
        yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from paths(inner, (*at, key))


def changed(document: Any, path: Path, value: Any, how: str) -> Any:
    document = copy.deepcopy(document)
    holder = document
    try:
        for key in path[:-1]:
            holder = holder[key]
        old = holder[path[-1]]
    except (KeyError, IndexError, TypeError):
        return document  # an earlier change took the place away
    if how == "remove":
        del holder[path[-1]]
    elif how == "twice" and isinstance(holder, list):
        holder.append(old)
    elif how == "more" and isinstance(old, dict):
        old["unheard_of"] = value
    else:
        holder[path[-1]] = value
    return document


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(list(paths(orjson.loads(good())))), VALUES, st.sampled_from(["set", "remove", "twice", "more"])
    ),
    min_size=1,
    max_size=3,
)
SETTINGS = CoreSettings(name="fleet", model="tiny", engines=ENGINES)


def applied(document: bytes) -> None:
    """What is not refused is applied, worked with, and stored again."""
    judged = judge(document, SETTINGS)
    if judged.resume is not Resume.APPLY:
        assert judged.problem
        return
    assert judged.handoff is not None
    rig = Rig(*ENGINES, saved=aged(judged.handoff, wall=WALL + 1.0))
    for _ in range(3):
        rig.run_pass()
    rig.publish()
    for engine in rig.fleet.view(now=rig.now).engines:
        rig.fleet.explain(engine.id, now=rig.now)
    stored = orjson.dumps(to_document(rig.fleet.save(now=rig.now), wall=WALL, epoch=4, holder="b"))
    from_document(orjson.loads(stored))


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
def test_the_document_that_is_changed_below_is_applied() -> None:
    assert judge(good(), SETTINGS).resume is Resume.APPLY
    applied(good())


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
@fuzz
@given(CHANGES)
def test_a_document_with_anything_changed_is_refused_or_worked_with(changes: list[tuple[Path, Any, str]]) -> None:
    document = orjson.loads(good())
    for path, value, how in changes:
        document = changed(document, path, value, how)
    applied(orjson.dumps(document))


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
@fuzz
@given(st.integers(0, 20_000), st.integers(0, 20), st.binary(max_size=8))
def test_a_document_with_bytes_changed_is_refused_or_worked_with(at: int, lost: int, junk: bytes) -> None:
    whole = good()
    at %= len(whole)
    applied(whole[:at] + junk + whole[at + lost :])
    applied(whole[:at])
