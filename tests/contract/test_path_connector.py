"""The `vllm-nixl` connector against the captured protocol: what it takes for a handoff, and how it passes one on."""

import json
from typing import Any

import pytest

from narwhal.connectors.base import BadRequest, ClientRequest, Handoff, HandoffUnusable, Route
from narwhal.connectors.vllm_nixl import VllmNixl

# As vLLM 0.32 answered.
CAPTURED: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[5, 6, 7, 8, 9]],
    "remote_engine_id": "prefill-0",
    "remote_request_id": "cmpl-1111-0-a85d803b",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 139,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}
ABSENT = object()


def answer(**changes: Any) -> bytes:
    """A prefill's answer with some fields of its handoff changed or left out."""
    descriptor = {key: value for key, value in (CAPTURED | changes).items() if value is not ABSENT}
    return json.dumps({"id": "cmpl-1", "choices": [], "kv_transfer_params": descriptor}).encode()


GOOD: dict[str, dict[str, Any]] = {
    "as captured": {},
    "a prompt shorter than a block": {"remote_block_ids": []},
    "an empty group": {"remote_block_ids": [[]]},
    "several groups": {"remote_block_ids": [[1, 2], [3]]},
    "unknown fields": {"new": {"a": [1.5, None]}},
    "without optional fields": dict.fromkeys(
        ("tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode", "remote_prefill_cached_tokens"), ABSENT
    ),
    "an older engine, which has no request id": dict.fromkeys(
        (
            *("remote_request_id", "remote_num_tokens", "transfer_mode", "dcp_size", "pp_size"),
            *("remote_blocks_expiry_time", "remote_prefill_cached_tokens"),
        ),
        ABSENT,
    ),
}


@pytest.mark.rule("V10")
@pytest.mark.parametrize("name", GOOD)
def test_a_handoff_goes_on_whole(name: str) -> None:
    connector = VllmNixl()
    sent = json.loads(answer(**GOOD[name]))["kv_transfer_params"]
    handoff = connector.handoff(answer(**GOOD[name]))
    for body in (b'{"model": "m", "prompt": "a"}', b' {"model":"m","messages":[{"role":"user","content":"}"}]}\r\n\t'):
        route = Route.CHAT if b"messages" in body else Route.COMPLETIONS
        request: ClientRequest = connector.parse(route, body)
        assert json.loads(connector.decode_body(request, handoff)) == {**json.loads(body), "kv_transfer_params": sent}


# Every field that a decode engine relies on, each in every wrong way that JSON has.
WRONG: dict[str, list[Any]] = {
    "do_remote_prefill": [ABSENT, None, False, 1, "true"],
    "do_remote_decode": [ABSENT, None, True, 0, "false"],
    "remote_engine_id": [ABSENT, None, "", 5, ["prefill-0"]],
    "remote_request_id": [ABSENT, None, "", 5, {}],
    "remote_host": [ABSENT, None, "", 5],
    "remote_port": [ABSENT, None, 0, -1, 65536, "5600", 5600.0, True],
    "remote_block_ids": [
        ABSENT,
        None,
        5,
        "5",
        {},
        [5, 6],
        [[5], None],
        [[5], "6"],
        [["5"]],
        [[-1]],
        [[1.0]],
        [[True]],
        [[None]],
    ],
}


@pytest.mark.rule("V10", "F2")
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_malformed_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(HandoffUnusable, match=field):
        VllmNixl().handoff(answer(**{field: value}))


@pytest.mark.rule("V10", "F2")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"null",
        b"[1]",
        b'"text"',
        b"{}",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": "garbage"}',
        b'{"kv_transfer_params": [1]}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": {"do_remote_prefill": true}}',
        b'{"kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": NaN}}',
        b"[" * 100_000,
        # Can be read, and cannot be written again.
        answer(unknown=ABSENT)[:-2] + b',"unknown":' + b"[" * 300 + b"]" * 300 + b"}}",
    ],
    ids=range(14),
)
def test_an_answer_without_a_usable_handoff(body: bytes) -> None:
    with pytest.raises(HandoffUnusable):
        VllmNixl().handoff(body)


# `n` as a client may send it, and as a request of one token has it. Engines take numbers as text, too.
SEVERAL = [
    (4, 1), (2, 1), ("4", 1), (3.0, 1),
    (1, 1), ("1", "1"), (0, 0), (-1, -1), (True, True), (None, None), ("many", "many"), ([3], [3]), (1e300, 1),
]  # fmt: skip


@pytest.mark.parametrize(("n", "sent"), SEVERAL)
def test_a_prefill_leg_keeps_the_kv_of_one_choice(n: Any, sent: Any) -> None:
    """What is no count is left to the engine, which refuses it."""
    asked = json.dumps({"model": "m", "prompt": "x", "n": n}).encode()
    request = VllmNixl().parse(Route.COMPLETIONS, asked)
    assert json.loads(VllmNixl().prefill_body(request))["n"] == sent
    assert json.loads(VllmNixl().decode_body(request, Handoff(b"{}")))["n"] == n


@pytest.mark.rule("V5")
@pytest.mark.parametrize(("n", "sent"), SEVERAL)
def test_only_several_choices_are_loaded_for_and_by_a_request_for_one(n: Any, sent: Any) -> None:
    asked = {"model": "m", "prompt": "x", "n": n, "stream": True, "max_tokens": 9, "min_tokens": 3, "top_p": 0.5}
    request = VllmNixl().parse(Route.COMPLETIONS, json.dumps(asked).encode())
    assert request.several == (n != sent)
    loaded = json.loads(VllmNixl().load_body(request, VllmNixl().handoff(answer())))
    assert loaded == {
        "model": "m", "prompt": "x", "n": sent, "stream": False, "max_tokens": 1, "top_p": 0.5,
        "kv_transfer_params": CAPTURED,
    }  # fmt: skip
    assert json.loads(request.raw) == asked, "the choices themselves are asked for as the client does"


def test_a_chat_is_loaded_with_one_token_too() -> None:
    asked = {"model": "m", "messages": [], "n": 2, "max_completion_tokens": 9}
    request = VllmNixl().parse(Route.CHAT, json.dumps(asked).encode())
    loaded = json.loads(VllmNixl().load_body(request, Handoff(b"{}")))
    assert (loaded["n"], loaded["max_tokens"], loaded["max_completion_tokens"]) == (1, 1, 1)


@pytest.mark.parametrize(("beams", "served"), [(True, False), ("true", False), (1, False), (False, True), (None, True)])
def test_a_beam_search_is_refused(beams: Any, served: bool) -> None:
    """Engines answer its prefill without a handoff, and that would be held against them."""
    body = json.dumps({"model": "m", "prompt": "x", "use_beam_search": beams}).encode()
    if served:
        assert VllmNixl().parse(Route.COMPLETIONS, body).fields["use_beam_search"] == beams
    else:
        with pytest.raises(BadRequest, match="use_beam_search") as refused:
            VllmNixl().parse(Route.COMPLETIONS, body)
        assert refused.value.param == "use_beam_search"
