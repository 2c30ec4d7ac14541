"""What hostile clients and engines put into bodies: refused by name, or a body that another engine can read safely."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.connectors.base import BadRequest, HandoffUnusable, Route
from narwhal.connectors.said import LONGEST, said
from narwhal.connectors.sse import Event, answer_given_up, classify
from narwhal.connectors.vllm_nixl import VllmNixl
from tests.fuzz.messages import fuzz
from tests.proxy.harness import HANDOFF

CONNECTOR = VllmNixl()
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**65)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["kv_transfer_params", "}", '"', "\ud800", "[DONE]"])
)
NAMES = st.sampled_from(
    ["model", "prompt", "messages", "stream", "max_tokens", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"]
) | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)
CHANGES = st.dictionaries(st.sampled_from(sorted(HANDOFF)) | st.text(max_size=4), VALUES, max_size=3)


def text_of(value: Any) -> bytes:
    """JSON as a careless peer writes it: NaN, huge numbers, lone surrogates."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def safe(descriptor: dict[str, Any]) -> None:
    """What the protocol says a decode engine must get, or it dies; typed here once more."""
    assert descriptor["do_remote_prefill"] is True
    assert descriptor["do_remote_decode"] is False
    assert descriptor["remote_engine_id"]
    assert isinstance(descriptor["remote_engine_id"], str)
    assert descriptor["remote_host"]
    assert isinstance(descriptor["remote_host"], str)
    assert type(descriptor["remote_port"]) is int
    assert 1 <= descriptor["remote_port"] <= 65535
    for group in descriptor["remote_block_ids"]:
        assert all(type(block) is int and block >= 0 for block in group)


@pytest.mark.rule("V10")
@fuzz
@given(CHANGES, st.sets(st.sampled_from(sorted(HANDOFF)), max_size=2), st.binary(max_size=3), st.integers(0, 400))
def test_any_prefill_answer_is_refused_or_a_handoff_that_kills_nobody(
    changes: dict[str, Any], missing: set[str], junk: bytes, cut: int
) -> None:
    descriptor = {k: v for k, v in {**HANDOFF, **changes}.items() if k not in missing}
    answer = text_of({"id": "cmpl-1", "kv_transfer_params": descriptor})
    for body in (answer, answer[:cut] + junk + answer[cut:], answer[:cut]):
        try:
            handoff = CONNECTOR.handoff(body)
        except HandoffUnusable:
            continue
        safe(json.loads(handoff))


@pytest.mark.rule("V10")
@pytest.mark.case("G9")
@fuzz
@given(st.dictionaries(NAMES, VALUES, max_size=5), st.sampled_from(Route), st.binary(max_size=2), st.integers(0, 60))
def test_no_body_of_a_client_steers_a_transfer(body: dict[str, Any], route: Route, junk: bytes, at: int) -> None:
    whole = text_of({**body, "model": "tiny", "prompt": "hello"})
    handoff = CONNECTOR.handoff(text_of({"kv_transfer_params": HANDOFF}))
    for sent in (whole, text_of(body), whole[:at] + junk + whole[at:]):
        try:
            request = CONNECTOR.parse(route, sent)
            first = json.loads(CONNECTOR.prefill_body(request))
        except BadRequest:
            continue
        second = CONNECTOR.decode_body(request, handoff)
        pairs: list[tuple[str, Any]] = json.loads(second, object_pairs_hook=list)
        steering = [value for name, value in pairs if name in ("kv_transfer_params", "ec_transfer_params")]
        assert len(steering) == 1
        assert orjson.loads(second)["kv_transfer_params"] == HANDOFF
        extra = orjson.loads(second).get("vllm_xargs")
        assert not isinstance(extra, dict) or not {"kv_transfer_params", "ec_transfer_params"} & set(extra)
        assert (first["stream"], first["max_tokens"]) == (False, 1)
        assert first["kv_transfer_params"]["do_remote_decode"] is True


@pytest.mark.rule("V8")
@fuzz
@given(
    st.lists(
        st.binary(max_size=30)
        | VALUES.map(lambda v: b"data: " + text_of(v))
        | st.sampled_from([b"data: [DONE]", b"data:", b": ping", b'data: {"error": {}}', b"event: x", b"\xff"]),
        max_size=4,
    ),
    st.booleans(),
)
def test_any_event_is_classified_and_only_the_marker_is_one(lines: list[bytes], token_seen: bool) -> None:
    event = b"\n".join(lines) + b"\n\n"
    found = classify(event, token_seen=token_seen)
    if found is Event.MARKER:
        data = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        assert b"".join(data) == b"[DONE]"
    answer_given_up(event)


@fuzz
@given(st.binary(max_size=300) | VALUES.map(text_of))
def test_any_answer_has_words_for_operators(data: bytes) -> None:
    words = said(data)
    assert len(words) <= LONGEST
    assert len(words.splitlines()) <= 1
    words.encode()  # storable, printable
