"""The script of a streamed completion: one event a step, and the end as vLLM writes it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from narwhal.sim import text
from narwhal.sim.openai_answer import Tokens, choices, logprobs_of, tokens_of, usage
from narwhal.sim.openai_api import Ask, Json
from narwhal.sim.options import EngineOptions
from narwhal.sim.stream import DONE, Do, Script, Step


class Timing:
    """The times of one request: pure functions of the options and the request's number."""

    def __init__(self, options: EngineOptions, number: int, slowed: float) -> None:
        self._options = options
        if options.jitter or options.tokens_per_step > 1:  # seeding costs more than a small request
            self._random = random.Random(f"{options.seed}/{number}")
        self._tpot_s = options.tpot_ms * slowed / 1000

    def _vary(self, seconds: float) -> float:
        jitter = self._options.jitter
        return seconds * (1 + jitter * (2 * self._random.random() - 1)) if jitter else seconds

    def prefill_s(self, tokens: int) -> float:
        """Seconds from the request to the first token where the prompt is computed here."""
        return self._vary((self._options.prefill_base_ms + tokens * self._options.prefill_ms_per_token) / 1000)

    def step_s(self) -> float:
        """Seconds to the next step."""
        return self._vary(self._tpot_s)

    def step_tokens(self) -> int:
        """Tokens of the next step."""
        most = self._options.tokens_per_step
        return 1 if most == 1 else self._random.randint(1, most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """What every event of a stream says of itself."""

    ident: str
    created: int
    fingerprint: str

    def start(self, ask: Ask) -> bytes:
        """The beginning of every event."""
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        said = {"id": self.ident, "object": kind, "created": self.created, "model": ask.model}
        return b"data: " + orjson.dumps(said)[:-1] + b","


class _Choice:
    """Writes the events of one choice; of the common event everything but the text is encoded once."""

    def __init__(self, ask: Ask, index: int, raw: bytes, start: bytes) -> None:
        self._ask = ask
        self._raw = raw
        self._common = ask.logprobs is None and not ask.return_token_ids and not ask.continuous_usage
        opening = b'"delta":{"content":' if ask.chat else b'"text":'
        self._before = start + b'"choices":[{"index":%d,' % index + opening
        self._said = 0
        self.tokens = 0
        self._after = self._tail([], None, None, {})

    def _tail(self, tokens: Tokens, finish: str | None, stop_reason: str | None, top: Json) -> bytes:
        ask = self._ask
        rest: Json = {"logprobs": logprobs_of(ask, tokens, self._said), "finish_reason": finish}
        if finish is not None or not ask.chat:
            rest["stop_reason"] = stop_reason
        if not ask.chat:
            first = ask.return_token_ids and self.tokens == len(tokens) > 0
            rest["prompt_token_ids"] = text.token_ids(self._raw) if first else None
        rest["token_ids"] = [text.token_id(piece) for piece, _ in tokens] if ask.return_token_ids else None
        if ask.continuous_usage:
            top = top | {"usage": usage(text.count_tokens(self._raw), self.tokens)}
        return (b"}," if ask.chat else b",") + orjson.dumps(rest)[1:] + b"]" + _more(top)

    def event(self, tokens: Tokens, finish: str | None, stop_reason: str | None, top: Json) -> bytes:
        """The event of one step; `top` goes beside the choices."""
        said = tokens[0][1] if len(tokens) == 1 else "".join(delta for _, delta in tokens)
        self.tokens += len(tokens)
        common = self._common and finish is None
        after = self._after if common else self._tail(tokens, finish, stop_reason, top)
        self._said += len(said)
        return self._before + orjson.dumps(said) + after


def _more(top: Json) -> bytes:
    """The end of an event, with these fields beside the choices."""
    return b"," + orjson.dumps(top)[1:] + b"\n\n" if top else b"}\n\n"


def roles(ask: Ask, naming: Naming, contents: tuple[str, ...]) -> Iterator[Step]:
    """The events that begin a chat: the role, with empty content. They come with the first token or the error."""
    if not ask.chat:
        return
    start = naming.start(ask)
    for index, raw, _ in choices(ask, contents):
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        top: Json = {"prompt_token_ids": text.token_ids(raw) if ask.return_token_ids else None, "prompt_text": None}
        if ask.continuous_usage:
            top["usage"] = usage(text.count_tokens(raw), 0)
        yield Step(Do.EVENT, 0.0, start + b'"choices":[' + orjson.dumps(choice) + b"]" + _more(top))


def aborted_events(ask: Ask, naming: Naming, contents: tuple[str, ...]) -> bytes:
    """The last events of a stream whose engine ends: no text, and the finish reason `abort`, for each choice."""
    listed = [_Choice(ask, index, raw, naming.start(ask)) for index, raw, _ in choices(ask, contents)]
    tops: list[Json] = [{} for _ in listed[:-1]] + [{"system_fingerprint": naming.fingerprint}]
    return b"".join(choice.event([], "abort", None, top) for choice, top in zip(listed, tops, strict=True))


def script(ask: Ask, naming: Naming, contents: tuple[str, ...], timing: Timing) -> Script:
    """A stream's steps from its first token on; the wait before that is the caller's."""
    yield from roles(ask, naming, contents)
    start = naming.start(ask)
    mark = {"system_fingerprint": naming.fingerprint}
    running = []
    for index, raw, content in choices(ask, contents):
        spoken, finish, stop_reason = tokens_of(ask, content, index)
        running.append((_Choice(ask, index, raw, start), _steps(spoken, timing), finish, stop_reason))
    writers = [choice for choice, *_ in running]
    wait_s = 0.0
    while running:
        for entry in list(running):
            choice, steps, finish, stop_reason = entry
            tokens, last = next(steps)
            if last:
                running.remove(entry)
                top = {} if running or ask.include_usage else mark
                event = choice.event(tokens, finish, stop_reason, top)
            else:
                event = choice.event(tokens, None, None, {})
            yield Step(Do.EVENT, wait_s, event, len(tokens))
            wait_s = 0.0
        wait_s = timing.step_s()
    if ask.include_usage:
        counted = usage(sum(map(text.count_tokens, ask.prompts)), sum(choice.tokens for choice in writers))
        yield Step(Do.EVENT, 0.0, start + b'"choices":[]' + _more({"usage": counted, **mark}))
    yield Step(Do.EVENT, 0.0, DONE)
    yield Step(Do.END)


def _steps(spoken: Iterator[tuple[bytes, str]], timing: Timing) -> Iterator[tuple[Tokens, bool]]:
    """The tokens of each step of one choice, and whether it is the last. The first step has one token."""
    group = [next(spoken)]
    while True:
        following = next(spoken, None)
        yield group, following is None
        if following is None:
            return
        group = [following]
        for _ in range(timing.step_tokens() - 1):
            more = next(spoken, None)
            if more is None:
                break
            group.append(more)
