"""What hostile clients and engines put into bodies: refused by name, or a body that another engine can read safely."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import clients, engines
from tests.fuzz.messages import fuzz
from tests.proxy.harness import HANDOFF

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


@pytest.mark.rule("V10")
@fuzz
@given(CHANGES, st.sets(st.sampled_from(sorted(HANDOFF)), max_size=2), st.binary(max_size=3), st.integers(0, 400))
def test_any_prefill_answer_is_refused_or_a_handoff_that_kills_nobody(
    changes: dict[str, Any], missing: set[str], junk: bytes, cut: int
) -> None:
    descriptor = {k: v for k, v in {**HANDOFF, **changes}.items() if k not in missing}
    answer = text_of({"id": "cmpl-1", "kv_transfer_params": descriptor})
    for body in (answer, answer[:cut] + junk + answer[cut:], answer[:cut]):
        engines.prefill_answer(body)


@pytest.mark.rule("V10")
@pytest.mark.case("G9")
@fuzz
@given(st.dictionaries(NAMES, VALUES, max_size=5), st.binary(max_size=2), st.integers(0, 60))
def test_no_body_of_a_client_steers_a_transfer(body: dict[str, Any], junk: bytes, at: int) -> None:
    whole = text_of({**body, "model": "tiny", "prompt": "hello"})
    for sent in (whole, text_of(body), whole[:at] + junk + whole[at:]):
        clients.body(sent)


@pytest.mark.rule("V8")
@fuzz
@given(
    st.lists(
        st.binary(max_size=30)
        | VALUES.map(lambda v: b"data: " + text_of(v))
        | st.sampled_from([b"data: [DONE]", b"data:", b": ping", b'data: {"error": {}}', b"event: x", b"\xff"]),
        max_size=4,
    ),
)
def test_any_event_is_classified_and_only_the_marker_is_one(lines: list[bytes]) -> None:
    engines.event(b"\n".join(lines) + b"\n\n")


@fuzz
@given(st.binary(max_size=300) | VALUES.map(text_of))
def test_any_answer_has_words_for_operators(data: bytes) -> None:
    engines.decode_answer(data)
