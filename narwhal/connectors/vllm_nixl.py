"""vLLM's OpenAI API with KV transfer by its NixlConnector, as captured from vLLM 0.32.

A prefill leg answers with `kv_transfer_params`, the descriptor of its KV; the decode leg carries it back. A malformed
descriptor, or one that a client made up, would kill the engine that reads it: none is passed on unchecked, and what a
client sends under that name is removed.
"""

from typing import Any

import orjson

from narwhal.connectors.base import BadRequest, ClientRequest, CountUnusable, Handoff, HandoffUnusable, Route

HANDOFF_FIELD = "kv_transfer_params"

# Fields by which a client could steer a transfer between engines; removed from every body.
CLIENT_MAY_NOT_SEND = frozenset({HANDOFF_FIELD, "ec_transfer_params"})
# vLLM merges this mapping into the same place as the handoff, so the same names are removed inside of it.
EXTRA_ARGS_FIELD = "vllm_xargs"

# Fields of the client that a request of one token, not streamed, does not get.
NOT_FOR_ONE_TOKEN = ("stream_options", "min_tokens")

BYTES_PER_TOKEN = 4

# Fields of a chat that its template turns into tokens.
OF_A_CHAT = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")

ASK_FOR_HANDOFF = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# Engines that send one of these also send `remote_request_id`; the decode engine hangs without it.
SENT_WITH_REQUEST_ID = frozenset(
    {"remote_num_tokens", "transfer_mode", "dcp_size", "pp_size", "remote_blocks_expiry_time"}
)


class VllmNixl:
    """The `vllm-nixl` connector."""

    count_path = "/tokenize"

    def parse(self, route: Route, body: bytes) -> ClientRequest:
        """Read a client's body. Raises BadRequest."""
        try:
            fields = orjson.loads(body)
        except (orjson.JSONDecodeError, RecursionError) as error:
            raise BadRequest(f"The body is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise BadRequest("The body must be a JSON object")
        model = fields.get("model")
        if not isinstance(model, str):
            raise BadRequest("model must be a string" if model is not None else "model is required", "model")
        stream = fields.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise BadRequest("stream must be true or false", "stream")
        if route is Route.COMPLETIONS:
            _one_prompt(fields.get("prompt"), fields.get("prompt_embeds"))
        if fields.get("use_beam_search") not in (None, False):
            # Of a beam search engines keep no KV for others, and the missing handoff would count against them.
            raise BadRequest("use_beam_search is not served: its KV cannot be handed over", "use_beam_search")
        raw = body
        if not CLIENT_MAY_NOT_SEND.isdisjoint(fields) or _steers(fields.get(EXTRA_ARGS_FIELD)):
            fields = _without_transfer_fields(fields)
            raw = _dumped(fields)
        return ClientRequest(route, model, bool(stream), fields, raw, _count(fields.get("n")) > 1)

    def prefill_body(self, request: ClientRequest) -> bytes:
        """The body of a prefill leg: one token, not streamed, its KV kept for another engine."""
        # A prefill of several choices keeps the KV of each, and answers with the handoff of one: nobody could read the
        # others, and they would stay pinned until their leases end.
        return _dumped({**_of_one_token(request), HANDOFF_FIELD: ASK_FOR_HANDOFF})

    def handoff(self, answer: bytes) -> Handoff:
        """The KV handoff in the body of a prefill's 200. Raises HandoffUnusable."""
        try:
            whole = orjson.loads(answer)
        except (orjson.JSONDecodeError, RecursionError) as error:
            raise HandoffUnusable(f"not JSON: {error}") from None
        descriptor = whole.get(HANDOFF_FIELD) if isinstance(whole, dict) else None
        if not isinstance(descriptor, dict):
            raise HandoffUnusable(f"no {HANDOFF_FIELD} object")
        check_descriptor(descriptor)
        try:
            return Handoff(orjson.dumps(descriptor))
        except orjson.JSONEncodeError:  # it reads to a depth of 1024, and writes to one of 254
            raise HandoffUnusable(f"{HANDOFF_FIELD} is nested too deeply") from None

    def decode_body(self, request: ClientRequest, handoff: Handoff) -> bytes:
        """The client's own bytes with the handoff as one more member at the end."""
        raw = request.raw
        # What was parsed as an object that has a `model` ends in a brace and is not empty.
        return b'%b,"kv_transfer_params":%b}' % (raw[: raw.rindex(b"}")], handoff)

    def load_body(self, request: ClientRequest, handoff: Handoff) -> bytes:
        """What a decode engine is asked before a request of several choices.

        It reads a handoff once for each choice, and the producer frees it after the first. Choices that begin later,
        because the engine had no room for all at once, would read what is others' by then, and be answered with 200.
        """
        return b'%b,"kv_transfer_params":%b}' % (_dumped(_of_one_token(request))[:-1], handoff)

    def known_tokens(self, request: ClientRequest) -> int | None:
        """The tokens of the prompt, where the client sent it as tokens."""
        if request.route is not Route.COMPLETIONS:
            return None
        prompt = _the_prompt(request)
        return len(prompt) if isinstance(prompt, list) else None

    def estimated_tokens(self, request: ClientRequest) -> int:
        """A quarter of the body's bytes: what English text comes to, and more than it for what JSON escapes."""
        return len(request.raw) // BYTES_PER_TOKEN

    def count_body(self, request: ClientRequest) -> bytes:
        """What `/tokenize` takes. Raises BadRequest when it cannot be written as JSON."""
        if request.route is Route.COMPLETIONS:
            return _dumped({"model": request.model, "prompt": _the_prompt(request)})
        fields = request.fields
        asked = {name: fields[name] for name in OF_A_CHAT if name in fields}
        return _dumped({"model": request.model, "add_generation_prompt": True, **asked})

    def counted(self, answer: bytes) -> int:
        """The count in the body of the 200. Raises CountUnusable."""
        try:
            whole = orjson.loads(answer)
        except (orjson.JSONDecodeError, RecursionError) as error:
            raise CountUnusable(f"not JSON: {error}") from None
        count = whole.get("count") if isinstance(whole, dict) else None
        if type(count) is not int or count < 0:
            raise CountUnusable("no count")
        return count


def check_descriptor(descriptor: dict[str, Any]) -> None:
    """Field by field what a decode engine relies on. Raises HandoffUnusable that names the field."""
    if descriptor.get("do_remote_prefill") is not True:
        raise HandoffUnusable("do_remote_prefill is not true")
    if descriptor.get("do_remote_decode") is not False:
        raise HandoffUnusable("do_remote_decode is not false")
    for name in ("remote_engine_id", "remote_host"):
        value = descriptor.get(name)
        if not isinstance(value, str) or not value:
            raise HandoffUnusable(f"{name} is not a non-empty string")
    if "remote_request_id" in descriptor or not SENT_WITH_REQUEST_ID.isdisjoint(descriptor):
        value = descriptor.get("remote_request_id")
        if not isinstance(value, str) or not value:
            raise HandoffUnusable("remote_request_id is not a non-empty string")
    port = descriptor.get("remote_port")
    if type(port) is not int or not 0 < port < 65536:
        raise HandoffUnusable("remote_port is not a port number")
    groups = descriptor.get("remote_block_ids")
    if not isinstance(groups, list):
        raise HandoffUnusable("remote_block_ids is not a list")
    for group in groups:
        if not isinstance(group, list) or (group and (set(map(type, group)) != {int} or min(group) < 0)):
            raise HandoffUnusable("remote_block_ids is not made of lists of non-negative integers")


def _of_one_token(request: ClientRequest) -> dict[str, Any]:
    """The client's fields, of a request for one choice of one token that is not streamed."""
    fields = request.fields
    body = {**fields, "stream": False, "max_tokens": 1}
    for name in NOT_FOR_ONE_TOKEN:
        body.pop(name, None)
    if request.several:
        body["n"] = 1
    if request.route is Route.CHAT and fields.get("max_completion_tokens") is not None:
        body["max_completion_tokens"] = 1
    return body


def _count(value: Any) -> int:
    """The choices that an engine understands by this `n`, which takes numbers as text, too. 1 for what is no count:
    that is the engine's to refuse."""
    try:
        return int(value) if isinstance(value, int | float | str) else 1
    except (ValueError, OverflowError):
        return 1


def _the_prompt(request: ClientRequest) -> Any:
    """The one prompt: text, or a list of token ids."""
    prompt = request.fields.get("prompt")
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and type(prompt[0]) is not int else prompt


def _one_prompt(prompt: Any, embeds: Any) -> None:
    """One request carries one handoff: a second prompt would read the first one's KV, or bring the engine down."""
    if isinstance(prompt, list) and len(prompt) > 1 and not all(type(token) is int for token in prompt):
        raise BadRequest("prompt must be one prompt: a string, a list of token ids, or a list of one of them", "prompt")
    # An engine makes a prompt of each of the embeddings, and one more of `prompt` unless that is empty.
    given = len(embeds) if isinstance(embeds, list) else embeds is not None
    if given > 1 or (given and prompt not in (None, "", [])):
        raise BadRequest("prompt_embeds must be one prompt, and be sent without another in prompt", "prompt_embeds")


def _steers(extra_args: Any) -> bool:
    return isinstance(extra_args, dict) and not CLIENT_MAY_NOT_SEND.isdisjoint(extra_args)


def _without_transfer_fields(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if name not in CLIENT_MAY_NOT_SEND}
    extra_args = kept.get(EXTRA_ARGS_FIELD)
    if isinstance(extra_args, dict) and _steers(extra_args):
        kept[EXTRA_ARGS_FIELD] = {name: value for name, value in extra_args.items() if name not in CLIENT_MAY_NOT_SEND}
    return kept


def _dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except (orjson.JSONEncodeError, RecursionError):
        raise BadRequest("The body is nested too deeply") from None
