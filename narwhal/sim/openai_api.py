"""The bodies of the OpenAI routes as vLLM reads them: what is asked, and how it is refused."""

import json
from dataclasses import dataclass
from typing import Any, TypeGuard

import orjson

from narwhal.sim import text
from narwhal.sim.options import EngineOptions

Json = dict[str, Any]


class ApiError(Exception):
    """An answer other than 200, in vLLM's shape: the code is a number."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.body = orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


INTERNAL = ApiError(500, "Internal server error", "InternalServerError")

MOST_LOGPROBS = 20  # vLLM's --max-logprobs
MOST_CHOICES = 16_384  # of one request, as engines have it by default


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
    continuous_usage: bool
    logprobs: int | None
    """Alternatives listed beside each token, or None."""
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
    stream = _flag(fields, "stream")
    stream_options = _object(fields, "stream_options") or {}
    if stream_options and not stream:
        raise _bad("Stream options can only be defined when `stream=True`.", "stream_options")
    ask = Ask(
        chat=chat,
        model=model,
        prompts=_messages(fields) if chat else _prompts(fields),
        n=_number(fields, "n", 1),
        max_tokens=_max_tokens(fields, chat),
        min_tokens=_number(fields, "min_tokens", 0),
        stop=_stop(fields),
        seed=_number(fields, "seed", 0),
        stream=stream,
        include_usage=bool(stream_options.get("include_usage")),
        continuous_usage=bool(stream_options.get("continuous_usage_stats")),
        logprobs=_logprobs(fields, chat),
        return_token_ids=_flag(fields, "return_token_ids"),
        kv=_object(fields, "kv_transfer_params"),
    )
    asked = fields.get("model", model)
    if asked != model:
        raise no_such_model(asked, model)
    _check(ask, fields, options)
    return ask


def refused_late(ask: Ask) -> ApiError | None:
    """What the engine notices only when a stream has its headers: it is told inside of it, after a 200."""
    if ask.logprobs is not None and ask.logprobs > MOST_LOGPROBS:
        most = f"Requested sample logprobs of {ask.logprobs}, which is greater than max allowed: {MOST_LOGPROBS}"
        return _bad(most, "logprobs", ask.logprobs)
    return None


def no_such_model(asked: object, served: str) -> ApiError:
    """The answer to a model that is not served."""
    return ApiError(404, f"The model `{asked}` does not exist. Valid aliases: {served}.", "NotFoundError", "model")


def invalid(kind: str, where: str, message: str, given: object) -> ApiError:
    """The answer to a field of the wrong type."""
    names = {list: "list", dict: "dict"}
    shown = f"<{names[type(given)]} of {len(given)} items>" if isinstance(given, (list, dict)) else given
    detail = f"{{'type': '{kind}', 'loc': '{where}', 'msg': '{message}', 'input': {shown!r}}}"
    return ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", where)


def _bad(message: str, param: str, value: object = None) -> ApiError:
    """The answer to a field whose value does not do."""
    named = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
    return ApiError(400, f"{message} ({named})", param=param)


def load(body: bytes) -> Json:
    """A body as a JSON object; what Python reads beyond the standard, such as NaN, is taken. Raises ApiError."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            fields = json.loads(body)
        except json.JSONDecodeError as error:
            raise invalid("json_invalid", f"body.{error.pos}", "JSON decode error", {}) from None
        except (UnicodeDecodeError, RecursionError):
            raise ApiError(400, "There was an error parsing the body", "Bad Request") from None
    if not isinstance(fields, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", message, fields)
    return fields


def _check(ask: Ask, fields: Json, options: EngineOptions) -> None:
    """The bounds of values, and the relations between them."""
    longest = options.max_model_len
    if ask.n < 1:
        raise ApiError(400, f"n must be at least 1, got {ask.n}.")
    if ask.n > MOST_CHOICES:
        most = f"n must be at most {MOST_CHOICES}, got {ask.n}."
        raise ApiError(400, f"{most} To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable.")
    if ask.max_tokens is not None and ask.max_tokens < 1:
        raise _bad(f"max_tokens must be at least 1, got {ask.max_tokens}.", "max_tokens", ask.max_tokens)
    if ask.max_tokens is not None and ask.max_tokens > longest:
        message = f"max_tokens={ask.max_tokens} cannot be greater than max_model_len={longest}. "
        raise _bad(message + "Please request fewer output tokens.", "max_tokens", ask.max_tokens)
    if ask.min_tokens < 0 or (ask.max_tokens is not None and ask.min_tokens > ask.max_tokens):
        raise ApiError(400, f"min_tokens must be between 0 and max_tokens={ask.max_tokens}, got {ask.min_tokens}.")
    temperature, top_p = fields.get("temperature"), fields.get("top_p")
    if isinstance(temperature, (int, float)) and temperature < 0:
        raise _bad(f"temperature must be non-negative, got {float(temperature)}.", "temperature", float(temperature))
    if isinstance(top_p, (int, float)) and not 0 < top_p <= 1:
        raise _bad(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    if temperature == 0 and ask.n > 1:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {ask.n}.")
    for raw in ask.prompts:
        _check_length(text.count_tokens(raw), ask.max_tokens, longest)


def _check_length(count: int, wanted: int | None, longest: int) -> None:
    """That prompt and answer fit the model."""
    most = f"This model's maximum context length is {longest} tokens. However, "
    if count >= longest:
        said = f"your prompt contains at least {count} input tokens, which exceeds this limit even without any output "
        raise _bad(most + said + "tokens. Please reduce the length of the input prompt.", "input_tokens", count)
    if count + (wanted or 0) > longest:
        said = f"you requested {wanted} output tokens and your prompt contains at least {count} input tokens. "
        raise _bad(most + said + "Please reduce the length of the input prompt or the output.", "input_tokens", count)


def _number(fields: Json, name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, str):
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{name}", message, value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid("int_type", f"body.{name}", "Input should be a valid integer", value)
    return value


def _flag(fields: Json, name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid("bool_parsing", f"body.{name}", "Input should be a valid boolean", value)
    return bool(value)


def _object(fields: Json, name: str) -> Json | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid("dict_type", f"body.{name}", "Input should be a valid dictionary", value)
    return value


def _stop(fields: Json) -> tuple[str, ...]:
    stop = fields.get("stop") or ()
    words = (stop,) if isinstance(stop, str) else stop
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise invalid("string_type", "body.stop", "Input should be a valid string", stop)
    if not all(words):
        raise ApiError(400, "stop cannot contain an empty string.")
    return tuple(words)


def _logprobs(fields: Json, chat: bool) -> int | None:
    if not chat:
        return None if fields.get("logprobs") is None else _number(fields, "logprobs", 0)
    return _number(fields, "top_logprobs", 0) if _flag(fields, "logprobs") else None


def _max_tokens(fields: Json, chat: bool) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    name = next((name for name in names if fields.get(name) is not None), None)
    return None if name is None else _number(fields, name, 0)


def _prompts(fields: Json) -> tuple[bytes, ...]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str) or _is_tokens(prompt):
        listed: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        listed = prompt
    elif prompt is None or prompt == []:
        raise _bad("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    else:
        raise invalid("string_type", "body.prompt", "Input should be a valid string", prompt)
    if not all(isinstance(item, str) or _is_tokens(item) for item in listed):
        raise invalid("string_type", "body.prompt", "Input should be a valid string", prompt)
    try:
        raw = tuple(text.prompt_bytes(item) for item in listed)
    except ValueError as error:
        raise _bad(str(error), "prompt") from None
    if not all(raw):
        raise _bad("The decoder prompt cannot be empty.", "prompt")
    return raw


def _is_tokens(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


def _messages(fields: Json) -> tuple[bytes, ...]:
    if "messages" not in fields:
        raise invalid("missing", "body.messages", "Field required", fields)
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid("missing", f"body.messages.{at}.role", "Field required", message)
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise invalid("string_type", f"body.messages.{at}.content", "Input should be a valid string", content)
    return (text.prompt_bytes(text.render_chat(messages)),)
