"""The bodies of the OpenAI routes as vLLM reads and writes them: what is asked, and answers that are not streamed."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import orjson

from narwhal.sim import text
from narwhal.sim.options import EngineOptions

Json = dict[str, Any]
Delta = tuple[list[bytes], str]


class ApiError(Exception):
    """An answer other than 200, in vLLM's shape: the code is a number."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.body = orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


INTERNAL = ApiError(500, "Internal server error", "InternalServerError")


def error_event(message: str, code: int = 500) -> bytes:
    """The stream event of a failure."""
    return b"data: " + ApiError(code, message, "InternalServerError").body + b"\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What one completion request asks."""

    chat: bool
    model: str
    prompts: tuple[bytes, ...]
    n: int
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    seed: int
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    kv: Json | None

    def limit(self, content: str) -> int:
        """Tokens of the answer to a prompt of this content, before stop strings."""
        if self.max_tokens is not None:
            return self.max_tokens
        return max(text.natural_length(content), self.min_tokens) if self.chat else text.COMPLETION_MAX_TOKENS

    @property
    def finish(self) -> str:
        """The finish reason of an answer that no stop string ended."""
        return "stop" if self.chat and self.max_tokens is None else "length"


def parse(fields: Json, *, chat: bool, options: EngineOptions, model: str) -> Ask:
    """Read a request's fields. Raises ApiError as the engine would answer."""
    asked = fields.get("model", model)
    if asked != model:
        raise ApiError(404, f"The model `{asked}` does not exist.", "NotFoundError", "model")
    kv = fields.get("kv_transfer_params")
    if kv is not None and not isinstance(kv, dict):
        raise ApiError(
            400, "body.kv_transfer_params: Input should be a valid dictionary", "Bad Request", "body.kv_transfer_params"
        )
    stop = fields.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
    if not isinstance(stop, tuple) or not all(isinstance(word, str) and word for word in stop):
        raise ApiError(400, "stop: must be a string or a list of strings, none of them empty", param="stop")
    stream_options = fields.get("stream_options")
    if stream_options is not None and not isinstance(stream_options, dict):
        raise ApiError(
            400, "body.stream_options: Input should be a valid dictionary", "Bad Request", "body.stream_options"
        )
    if stream_options and not fields.get("stream"):
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", "Bad Request", "stream_options")
    logprobs = fields.get("logprobs")
    ask = Ask(
        chat=chat,
        model=model,
        prompts=_messages(fields) if chat else _prompts(fields),
        n=_number(fields, "n", 1, least=1),
        max_tokens=_max_tokens(fields, chat),
        min_tokens=_number(fields, "min_tokens", 0, least=0),
        stop=stop,
        seed=_number(fields, "seed", 0, least=None),
        stream=_flag(fields, "stream"),
        include_usage=bool(stream_options and stream_options.get("include_usage")),
        logprobs=logprobs is not None and logprobs is not False,
        return_token_ids=_flag(fields, "return_token_ids"),
        kv=kv,
    )
    _check(ask, fields, options)
    return ask


def load(body: bytes) -> Json:
    """A body as a JSON object. Raises ApiError."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"body: JSON decode error: {error}", "Bad Request") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "body: Input should be a valid dictionary or object", "Bad Request")
    return fields


def _check(ask: Ask, fields: Json, options: EngineOptions) -> None:
    """The relations between fields that vLLM refuses."""
    if ask.max_tokens is not None and ask.min_tokens > ask.max_tokens:
        raise ApiError(
            400, f"min_tokens must be less than or equal to max_tokens={ask.max_tokens}, got {ask.min_tokens}."
        )
    for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0)):
        value = fields.get(name)
        if value is not None and not (isinstance(value, (int, float)) and low <= value <= high):
            raise ApiError(400, f"{name} must be in [{low}, {high}], got {value}.", param=name)
    for raw in ask.prompts:
        count = text.count_tokens(raw)
        wanted = ask.max_tokens or 0
        if count + max(wanted, 1) > options.max_model_len:
            raise ApiError(
                400,
                f"This model's maximum context length is {options.max_model_len} tokens. However, you requested "
                f"{wanted} output tokens and your prompt contains {count} input tokens. "
                "Please reduce the length of the input prompt.",
                param="input_tokens",
            )


def _number(fields: Json, name: str, default: int, *, least: int | None) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiError(400, f"body.{name}: Input should be a valid integer", "Bad Request", f"body.{name}")
    if least is not None and value < least:
        raise ApiError(400, f"{name} must be at least {least}, got {value}.", param=name)
    return value


def _flag(fields: Json, name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"body.{name}: Input should be a valid boolean", "Bad Request", f"body.{name}")
    return bool(value)


def _max_tokens(fields: Json, chat: bool) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    name = next((name for name in names if fields.get(name) is not None), None)
    return None if name is None else _number(fields, name, 0, least=1)


def _prompts(fields: Json) -> tuple[bytes, ...]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str) or _is_tokens(prompt):
        listed: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        listed = prompt
    else:
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if not all(isinstance(item, str) or _is_tokens(item) for item in listed):
        raise ApiError(
            400, "body.prompt: Input should be a valid string or a list of token ids", "Bad Request", "body.prompt"
        )
    try:
        raw = tuple(text.prompt_bytes(item) for item in listed)
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt") from None
    if not all(raw):
        raise ApiError(400, "The decoder prompt cannot be empty", param="prompt")
    return raw


def _is_tokens(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


def _messages(fields: Json) -> tuple[bytes, ...]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "body.messages: Input should be a non-empty list", "Bad Request", "body.messages")
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"body.messages.{at}.role: Field required", "Bad Request", "body.messages")
        if not isinstance(message.get("content"), (str, list, type(None))):
            where = f"body.messages.{at}.content"
            raise ApiError(400, f"{where}: Input should be a valid string", "Bad Request", where)
    return (text.prompt_bytes(text.render_chat(messages)),)


def tokens_of(ask: Ask, content: str, index: int) -> tuple[Iterator[tuple[bytes, str]], str, str | None]:
    """One choice: its tokens with the text each adds, the finish reason, and the stop string that ended it."""
    answer = text.deltas(content, ask.limit(content), seed=ask.seed, index=index)
    if not ask.stop:
        return answer, ask.finish, None
    whole = list(answer)
    end = text.stopped(whole, ask.stop, ask.min_tokens)
    if end is None:
        return iter(whole), ask.finish, None
    used, limit = end
    spoken = "".join(delta for _, delta in whole)
    word = next(word for word in ask.stop if spoken.startswith(word, limit))
    return _trimmed(whole[:used], limit), "stop", word


def _trimmed(answer: list[tuple[bytes, str]], limit: int) -> Iterator[tuple[bytes, str]]:
    said = 0
    for piece, delta in answer:
        yield piece, delta[: max(0, limit - said)]
        said += len(delta)


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """The usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
    }


def logprobs_of(ask: Ask, tokens: list[tuple[bytes, str]]) -> Json | None:
    """Log probabilities in the route's shape: every token was certain."""
    if not ask.logprobs:
        return None
    if ask.chat:
        return {
            "content": [
                {"token": said, "logprob": 0.0, "bytes": list(piece), "top_logprobs": []} for piece, said in tokens
            ]
        }
    offsets = itertools.accumulate((len(said) for _, said in tokens), initial=0)
    return {
        "text_offset": list(offsets)[:-1],
        "token_logprobs": [0.0] * len(tokens),
        "tokens": [said for _, said in tokens],
        "top_logprobs": [None] * len(tokens),
    }


def choices(ask: Ask, contents: tuple[str, ...]) -> Iterator[tuple[int, bytes, str]]:
    """Every choice's index, prompt and content."""
    for at, (raw, content) in enumerate(zip(ask.prompts, contents, strict=True)):
        for number in range(ask.n):
            yield at * ask.n + number, raw, content


def answer(ask: Ask, ident: str, created: int, contents: tuple[str, ...], handoff: Json | None) -> tuple[Json, int]:
    """The body of an answer that is not streamed, and the number of its tokens."""
    listed: list[Json] = []
    total = 0
    for index, raw, content in choices(ask, contents):
        spoken, finish, stop_reason = tokens_of(ask, content, index % ask.n)
        tokens = list(spoken)
        total += len(tokens)
        listed.append({**_choice(ask, index, raw, tokens), "finish_reason": finish, "stop_reason": stop_reason})
    body = {
        "id": ident,
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": created,
        "model": ask.model,
        "choices": listed,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage(sum(map(text.count_tokens, ask.prompts)), total),
        "kv_transfer_params": handoff,
    }
    return body, total


def _choice(ask: Ask, index: int, raw: bytes, tokens: list[tuple[bytes, str]]) -> Json:
    said = "".join(delta for _, delta in tokens)
    choice: Json = {"index": index}
    if ask.chat:
        choice["message"] = {"role": "assistant", "content": said, "refusal": None, "tool_calls": []}
    else:
        choice["text"] = said
    choice["logprobs"] = logprobs_of(ask, tokens)
    choice["token_ids"] = [text.token_id(piece) for piece, _ in tokens] if ask.return_token_ids else None
    choice["prompt_token_ids"] = text.token_ids(raw) if ask.return_token_ids else None
    return choice
