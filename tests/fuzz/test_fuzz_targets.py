"""Bytes of every kind that Narwhal reads, spoilt here and there: the same properties that `scripts/fuzz.py` searches by
coverage, held to in every run of the tests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.messages import fuzz
from tests.fuzz.targets import TARGETS, seeds


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_target_begins_with_holds(name: str) -> None:
    assert seeds(name)
    for data in seeds(name):
        TARGETS[name].holds(data)


def spoilt(name: str) -> st.SearchStrategy[bytes]:
    """One of a target's seeds with bytes lost, doubled or put in; or anything."""
    pieces = st.sampled_from((b"", *TARGETS[name].words)) | st.binary(max_size=6)

    def changed(whole: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
        for at, lost, put in changes:
            start = at % (len(whole) + 1)
            whole = whole[:start] + put + whole[start + lost :]
        return whole

    places = st.tuples(st.integers(0, 4000), st.integers(0, 12), pieces)
    return st.builds(changed, st.sampled_from(seeds(name)), st.lists(places, max_size=3)) | st.binary(max_size=60)


@pytest.mark.rule("V8", "V10", "S2", "S6")
@pytest.mark.parametrize("name", TARGETS)
def test_spoilt_bytes_are_refused_or_mean_something(name: str) -> None:
    @fuzz
    @given(spoilt(name))
    def holds(data: bytes) -> None:
        TARGETS[name].holds(data)

    holds()
