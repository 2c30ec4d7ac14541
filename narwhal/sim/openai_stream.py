"""The script of a streamed completion: one event a step, and the end as vLLM writes it."""

import random
from collections.abc import Iterator

import orjson

from narwhal.sim import text
from narwhal.sim.openai_api import Ask, Json, choices, logprobs_of, tokens_of, usage
from narwhal.sim.options import EngineOptions
from narwhal.sim.stream import DONE, Do, Script, Step

Tokens = list[tuple[bytes, str]]


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


class _Writer:
    """Writes the events of one choice; the constant parts are encoded once."""

    def __init__(self, ask: Ask, index: int, start: bytes) -> None:
        self._ask = ask
        self._plain = not ask.logprobs and not ask.return_token_ids
        delta = b'"delta":{"content":' if ask.chat else b'"text":'
        self._before = start + b'"choices":[{"index":%d,' % index + delta
        self._close = b"}" if ask.chat else b""
        self._usage = b"" if ask.chat else b',"usage":null'
        self._after = self._tail(None, None, [])

    def _tail(self, finish: str | None, stop_reason: str | None, tokens: Tokens) -> bytes:
        rest: Json = {"logprobs": logprobs_of(self._ask, tokens), "finish_reason": finish, "stop_reason": stop_reason}
        if self._ask.return_token_ids:
            rest["token_ids"] = [text.token_id(piece) for piece, _ in tokens]
        return self._close + b"," + orjson.dumps(rest)[1:] + b"]" + self._usage + b"}\n\n"

    def event(self, tokens: Tokens, finish: str | None, stop_reason: str | None) -> bytes:
        """The event of one step."""
        said = tokens[0][1] if len(tokens) == 1 else "".join(delta for _, delta in tokens)
        after = self._after if finish is None and self._plain else self._tail(finish, stop_reason, tokens)
        return self._before + orjson.dumps(said) + after


def script(ask: Ask, ident: str, created: int, contents: tuple[str, ...], timing: Timing) -> Script:
    """A stream's steps from its first token on; the wait before that is the caller's."""
    kind = "chat.completion.chunk" if ask.chat else "text_completion"
    start = b"data: " + orjson.dumps({"id": ident, "object": kind, "created": created, "model": ask.model})[:-1] + b","
    total = 0
    if ask.chat:
        for index, _, _ in choices(ask, contents):
            first: Json = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            yield Step(Do.EVENT, 0.0, start + b'"choices":[' + orjson.dumps(first) + b"]}\n\n")
    running = [
        _steps(_Writer(ask, index, start), *tokens_of(ask, content, index % ask.n), timing)
        for index, _, content in choices(ask, contents)
    ]
    wait_s = 0.0
    while running:
        for steps in list(running):
            event = next(steps, None)
            if event is None:
                running.remove(steps)
                continue
            total += event[1]
            yield Step(Do.EVENT, wait_s, *event)
            wait_s = 0.0
        wait_s = timing.step_s()
    if ask.include_usage:
        counted = usage(sum(map(text.count_tokens, ask.prompts)), total)
        yield Step(Do.EVENT, 0.0, start + b'"choices":[],"usage":' + orjson.dumps(counted) + b"}\n\n")
    yield Step(Do.EVENT, 0.0, DONE)
    yield Step(Do.END)


def _steps(
    writer: _Writer, spoken: Iterator[tuple[bytes, str]], finish: str, stop_reason: str | None, timing: Timing
) -> Iterator[tuple[bytes, int]]:
    """The events of one choice with their tokens. The finish reason comes with the last token."""
    group = [next(spoken)]
    while True:
        following = next(spoken, None)
        if following is None:
            yield writer.event(group, finish, stop_reason), len(group)
            return
        yield writer.event(group, None, None), len(group)
        group = [following]
        for _ in range(timing.step_tokens() - 1):
            more = next(spoken, None)
            if more is None:
                break
            group.append(more)
