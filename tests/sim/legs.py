"""The two legs of a request, sent to engines by hand."""

from typing import Any

from tests.sim.raw import Answer, ask

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LONG = "The narwhal dives under the ice and comes back with a fish. " * 4


def prompt(text: str = LONG, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 12, **more}


def chat(text: str = LONG, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}


def path_of(body: dict[str, Any]) -> str:
    return CHAT if "messages" in body else COMPLETIONS


async def prefill(url: str, body: dict[str, Any], *, request_id: str = "r-1") -> dict[str, Any]:
    """The handoff of a prefill leg."""
    leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL_PARAMS}
    leg.pop("stream_options", None)
    answer = await ask(url, "POST", path_of(body), leg, headers={"X-Request-Id": request_id})
    assert answer.status == 200, answer.body
    handoff: dict[str, Any] = answer.json["kv_transfer_params"]
    return handoff


async def decode(url: str, body: dict[str, Any], handoff: Any, **how: Any) -> Answer:
    """A decode leg with that handoff."""
    return await ask(url, "POST", path_of(body), {**body, "kv_transfer_params": handoff}, **how)
