"""Ordinary requests in all their forms, and what engines refuse. None of this is a fault of an engine."""

import json
from typing import Any

from scripts.real_engines.bench import CHAT, COMPLETIONS, MODEL, Bench, Who
from scripts.real_engines.situation import ALL, OPTIONS, SENTENCE, USAGE, Situation, messages, prompt, situation, text


def simple(name: str, what: str, path: str, body: dict[str, Any]) -> None:
    """A situation of both legs with nothing special about them."""
    ALL.append(Situation(name=name, what=what, run=lambda bench: _both(bench, path, body)))


def _both(bench: Bench, path: str, body: dict[str, Any]) -> None:
    bench.both_legs(path, body)


def refused(name: str, what: str, path: str, body: Any) -> None:
    """A situation of one request to the consumer, without a handoff."""
    ALL.append(Situation(name=name, what=what, run=lambda bench: _one(bench, path, body)))


def _one(bench: Bench, path: str, body: Any) -> None:
    bench.post(Who.CONSUMER, "request", path, body)


# What an engine tells about itself.


@situation("health, by GET and by HEAD")
def health(bench: Bench) -> None:
    bench.get(Who.CONSUMER, "/health")
    bench.get(Who.CONSUMER, "/health", method="HEAD")


@situation("version and served models")
def identity(bench: Bench) -> None:
    bench.get(Who.CONSUMER, "/version")
    bench.get(Who.CONSUMER, "/v1/models")


@situation("a path that does not exist, and a method that the path does not take")
def unknown_paths(bench: Bench) -> None:
    bench.get(Who.CONSUMER, "/v1/nothing-here")
    bench.get(Who.CONSUMER, COMPLETIONS)


@situation("token counting, for a prompt and for messages, and for a model that is not served")
def tokenize(bench: Bench) -> None:
    bench.post(Who.CONSUMER, "prompt", "/tokenize", {"model": MODEL, "prompt": text("tokenize")})
    body = {"model": MODEL, "messages": messages("tokenize")["messages"], "add_generation_prompt": True}
    bench.post(Who.CONSUMER, "messages", "/tokenize", body)
    bench.post(Who.CONSUMER, "wrong model", "/tokenize", {"model": "another", "prompt": text("tokenize")})


@situation("metrics after some traffic: names, types and labels")
def metrics(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt("metrics"))
    bench.get(Who.CONSUMER, "/metrics")


# The ordinary request, in its forms.

simple("completion", "a completion", COMPLETIONS, prompt("completion"))
simple("completion-stream", "a streamed completion", COMPLETIONS, prompt("completion-stream", stream=True))
simple(
    "completion-stream-usage",
    "a streamed completion that ends with its usage",
    COMPLETIONS,
    prompt("completion-stream-usage", **USAGE),
)
simple("chat", "a chat completion", CHAT, messages("chat"))
simple(
    "chat-stream",
    "a streamed chat completion: the first event carries the role",
    CHAT,
    messages("chat-stream", stream=True),
)
simple(
    "chat-stream-usage",
    "a streamed chat completion that ends with its usage",
    CHAT,
    messages("chat-stream-usage", **USAGE),
)
simple(
    "chat-max-completion-tokens",
    "the newer name of the token limit",
    CHAT,
    {k: v for k, v in messages("chat-max-completion-tokens", max_completion_tokens=4).items() if k != "max_tokens"},
)
simple(
    "continuous-usage",
    "usage with every event",
    COMPLETIONS,
    prompt("continuous-usage", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
)
simple(
    "one-token-stream", "a stream of one token", COMPLETIONS, prompt("one-token-stream", **{**USAGE, "max_tokens": 1})
)
simple("short-prompt", "a prompt shorter than one KV block", COMPLETIONS, prompt("short-prompt", prompt="A narwhal"))
simple("two-choices", "two choices", COMPLETIONS, prompt("two-choices", n=2, temperature=1, seed=7))
simple(
    "two-choices-stream",
    "two choices, streamed",
    COMPLETIONS,
    prompt("two-choices-stream", n=2, temperature=1, seed=7, **USAGE),
)
simple("logprobs", "log probabilities", COMPLETIONS, prompt("logprobs", logprobs=2, max_tokens=3))
simple(
    "logprobs-stream",
    "log probabilities, streamed",
    COMPLETIONS,
    prompt("logprobs-stream", logprobs=2, max_tokens=3, stream=True),
)
simple(
    "chat-logprobs",
    "log probabilities in chat",
    CHAT,
    messages("chat-logprobs", logprobs=True, top_logprobs=2, max_tokens=3),
)
simple(
    "chat-logprobs-stream",
    "log probabilities in chat, streamed",
    CHAT,
    messages("chat-logprobs-stream", logprobs=True, top_logprobs=2, max_tokens=3, stream=True),
)
simple("token-ids", "the ids of the tokens", COMPLETIONS, prompt("token-ids", return_token_ids=True, max_tokens=3))
simple(
    "token-ids-stream",
    "the ids of the tokens, streamed",
    COMPLETIONS,
    prompt("token-ids-stream", return_token_ids=True, max_tokens=3, stream=True),
)
simple(
    "min-tokens",
    "a least number of tokens, which a prefill leg must not carry",
    COMPLETIONS,
    prompt("min-tokens", min_tokens=4),
)


@situation("a prompt given as token ids")
def prompt_of_token_ids(bench: Bench) -> None:
    counted = bench.post(Who.CONSUMER, "token ids", "/tokenize", {"model": MODEL, "prompt": text("token ids")})
    bench.both_legs(COMPLETIONS, prompt("", prompt=json.loads(counted.body)["tokens"]))


@situation("a stop string ends the text")
def stop_string(bench: Bench) -> None:
    said = str(json.loads(bench.both_legs(COMPLETIONS, prompt("stop")).body)["choices"][0]["text"])
    # Not in the first token, which the prefill leg makes.
    late = [c for c in said if c.isprintable() and c != "\ufffd" and said.index(c) >= 9]
    body = prompt("stop", stop=[late[0]])
    bench.decode(COMPLETIONS, body, bench.prefill(COMPLETIONS, body, "prefill leg with stop"), "decode leg with stop")
    body |= {"stream": True}
    bench.decode(COMPLETIONS, body, bench.prefill(COMPLETIONS, body, "prefill leg again"), "decode leg, streamed")


@situation("the same prompt answered in one place, to compare the text with the two legs'")
def local(bench: Bench) -> None:
    bench.post(Who.PRODUCER, "completion", COMPLETIONS, prompt("completion"))
    bench.post(Who.PRODUCER, "streamed chat", CHAT, messages("chat-stream", stream=True))


# What an engine refuses. Nothing of this is a fault of the engine.

LONG_MESSAGES = [{"role": "user", "content": SENTENCE * 400}]
LONG = prompt("", prompt=SENTENCE * 400)
refused("too-long", "a prompt beyond the model's length", COMPLETIONS, LONG)
refused("too-long-stream", "the same, streamed: the answer is no stream", COMPLETIONS, {**LONG, **USAGE})
refused(
    "chat-too-long",
    "messages beyond the model's length",
    CHAT,
    messages("chat-too-long", messages=LONG_MESSAGES),
)
refused(
    "too-many-tokens-asked",
    "prompt and answer together too long",
    COMPLETIONS,
    prompt("too-many-tokens-asked", max_tokens=5000),
)
refused("bad-parameter", "a parameter out of its range", COMPLETIONS, prompt("bad-parameter", temperature=-1))
refused(
    "bad-parameter-stream",
    "the same with a stream asked for",
    COMPLETIONS,
    prompt("bad-parameter-stream", temperature=-1, stream=True),
)
refused("wrong-type", "a parameter of the wrong type", COMPLETIONS, prompt("wrong-type", max_tokens="many"))
refused("no-choices", "no choices asked for", COMPLETIONS, prompt("no-choices", n=0))
refused("greedy-choices", "several choices of a greedy draw", COMPLETIONS, prompt("greedy-choices", n=2))
refused("too-many-logprobs", "more log probabilities than allowed", COMPLETIONS, prompt("too-many", logprobs=99))
refused(
    "too-many-logprobs-stream",
    "the same, streamed: noticed after the headers, an error event after a 200",
    COMPLETIONS,
    prompt("too-many", logprobs=99, stream=True),
)
refused(
    "chat-too-many-logprobs-stream",
    "the same in chat",
    CHAT,
    messages("too-many", logprobs=True, top_logprobs=99, stream=True),
)
refused("wrong-model", "a model that is not served", COMPLETIONS, prompt("wrong-model", model="another"))
refused("chat-wrong-model", "a model that is not served, in chat", CHAT, messages("chat-wrong-model", model="another"))
refused("no-messages", "chat without messages", CHAT, {"model": MODEL, "max_tokens": 4})
refused("no-prompt", "a completion without a prompt", COMPLETIONS, {"model": MODEL, "max_tokens": 4})
refused("malformed", "a body that is not JSON", COMPLETIONS, b'{"model": "tiny", "prompt": ')
refused("not-an-object", "a body that is not an object", COMPLETIONS, [1, 2])
refused(
    "stream-options-alone",
    "stream options without a stream",
    COMPLETIONS,
    prompt("stream-options-alone", stream_options=OPTIONS),
)
refused(
    "handoff-a-string",
    "a handoff that is a string",
    COMPLETIONS,
    prompt("handoff-a-string", kv_transfer_params="garbage"),
)
refused("handoff-a-list", "a handoff that is a list", COMPLETIONS, prompt("handoff-a-list", kv_transfer_params=[1]))
refused(
    "handoff-empty",
    "an empty handoff: computed in place, silently",
    COMPLETIONS,
    prompt("handoff-empty", kv_transfer_params={}),
)
refused(
    "handoff-unknown-fields",
    "unknown fields: the same",
    COMPLETIONS,
    prompt("handoff-unknown-fields", kv_transfer_params={"x": 1}),
)
