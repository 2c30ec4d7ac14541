"""Bytes of every kind that Narwhal reads, spoilt here and there: the same properties that `scripts/fuzz.py` searches by
coverage, held to in every run of the tests."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.engines import answered
from tests.fuzz.messages import fuzz
from tests.fuzz.shapes import changed, mutator
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


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.json])
def test_json_is_changed_and_is_json_still(name: str) -> None:
    words, begun = TARGETS[name].words, seeds(name)[0]
    others = [changed(begun, seed, words, 20_000) for seed in range(60)]
    assert others == [changed(begun, seed, words, 20_000) for seed in range(60)]
    known = {other for other in others if other is not None} - {begun}
    assert len(known) > 20
    for other in known:
        for part in other.split(b"\0" if b"\0" in begun else b"\n"):
            assert not part or not part.startswith(b"{") or isinstance(json.loads(part), dict)
    assert max(len(mutator(words)(begun, 50, seed)) for seed in range(20)) <= 50


EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
OPEN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.rule("V8")
@pytest.mark.parametrize("rest", [b"data: [D'ONE]\n\n", b"data: [D"])
@pytest.mark.parametrize("size", [1, 7, 40])
async def test_a_stream_that_goes_on_has_come_to_the_same_however_it_was_cut(rest: bytes, size: int) -> None:
    body = EVENT * 3 + rest
    whole = OPEN + b"%x\r\n%b\r\n" % (len(body), body)
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert answered([whole], streamed=True, ends=False) == answered(pieces, streamed=True, ends=False)
    waits, got = answered(pieces, streamed=True, ends=False)
    assert (waits, got) == ("waits", body[: body.rindex(b"\n\n") + 2])
