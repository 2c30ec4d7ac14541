"""The `vllm-nixl` connector against the captured protocol: what it takes for a handoff, and how it passes one on."""

import json
from typing import Any

import pytest

from narwhal.connectors.base import ClientRequest, Handoff, HandoffUnusable, Route
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


@pytest.mark.parametrize(("n", "sent"), [(4, 1), (1, 1), (0, 0), (-1, -1), ("4", "4"), (True, True), (None, None)])
def test_a_prefill_leg_keeps_the_kv_of_one_choice(n: Any, sent: Any) -> None:
    """What is no count is left to the engine, which refuses it."""
    asked = json.dumps({"model": "m", "prompt": "x", "n": n}).encode()
    request = VllmNixl().parse(Route.COMPLETIONS, asked)
    assert json.loads(VllmNixl().prefill_body(request))["n"] == sent
    assert json.loads(VllmNixl().decode_body(request, Handoff(b"{}")))["n"] == n
