"""The situations in which engines are recorded, each written once (see bench.py for who runs them).

The order within a group is the order of recording: what spoils an engine comes last, so that few restarts are needed.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.real_engines.bench import CHAT, COMPLETIONS, MODEL, Bench, Fault, Who
from scripts.real_engines.engines import Settings, free_port
from scripts.real_engines.rawhttp import Exchange, Request

SENTENCE = "The narwhal dives under the ice and comes back with a fish. "
PROMPT = SENTENCE * 4
MESSAGES = [{"role": "system", "content": SENTENCE * 2}, {"role": "user", "content": "Where does it breathe?"}]
OPTIONS = {"include_usage": True}
USAGE = {"stream": True, "stream_options": OPTIONS}


@dataclass(frozen=True, kw_only=True)
class Situation:
    """`spoils` names the engines that are unusable afterwards; `settings` how the engines must have been started."""

    name: str
    what: str
    run: Callable[[Bench], None]
    spoils: frozenset[Who] = frozenset()
    settings: Settings = field(default_factory=Settings)


ALL: list[Situation] = []


def situation(
    what: str, *, spoils: frozenset[Who] = frozenset(), settings: Settings | None = None
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Adds a function to the list under its own name, with dashes."""

    def add(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
        name = run.__name__.replace("_", "-")
        ALL.append(Situation(name=name, what=what, run=run, spoils=spoils, settings=settings or Settings()))
        return run

    return add


def prompt(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}


def messages(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **more}


def after_events(count: int) -> Callable[[Exchange], bool]:
    return lambda exchange: len(exchange.events()) >= count


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
    bench.post(Who.CONSUMER, "prompt", "/tokenize", {"model": MODEL, "prompt": PROMPT})
    body = {"model": MODEL, "messages": MESSAGES, "add_generation_prompt": True}
    bench.post(Who.CONSUMER, "messages", "/tokenize", body)
    bench.post(Who.CONSUMER, "wrong model", "/tokenize", {"model": "another", "prompt": PROMPT})


@situation("metrics after some traffic: names, types and labels")
def metrics(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt())
    bench.get(Who.CONSUMER, "/metrics")


# The ordinary request, in its forms.

simple("completion", "a completion", COMPLETIONS, prompt())
simple("completion-stream", "a streamed completion", COMPLETIONS, prompt(stream=True))
simple("completion-stream-usage", "a streamed completion that ends with its usage", COMPLETIONS, prompt(**USAGE))
simple("chat", "a chat completion", CHAT, messages())
simple("chat-stream", "a streamed chat completion: the first event carries the role", CHAT, messages(stream=True))
simple("chat-stream-usage", "a streamed chat completion that ends with its usage", CHAT, messages(**USAGE))
simple(
    "chat-max-completion-tokens",
    "the newer name of the token limit",
    CHAT,
    {k: v for k, v in messages(max_completion_tokens=4).items() if k != "max_tokens"},
)
simple(
    "continuous-usage",
    "usage with every event",
    COMPLETIONS,
    prompt(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
)
simple("one-token-stream", "a stream of one token", COMPLETIONS, prompt(**{**USAGE, "max_tokens": 1}))
simple("short-prompt", "a prompt shorter than one KV block", COMPLETIONS, prompt(prompt="A narwhal"))
simple("two-choices", "two choices", COMPLETIONS, prompt(n=2, temperature=1, seed=7))
simple("two-choices-stream", "two choices, streamed", COMPLETIONS, prompt(n=2, temperature=1, seed=7, **USAGE))
simple("logprobs", "log probabilities", COMPLETIONS, prompt(logprobs=2, max_tokens=3))
simple("logprobs-stream", "log probabilities, streamed", COMPLETIONS, prompt(logprobs=2, max_tokens=3, stream=True))
simple("chat-logprobs", "log probabilities in chat", CHAT, messages(logprobs=True, top_logprobs=2, max_tokens=3))
simple(
    "chat-logprobs-stream",
    "log probabilities in chat, streamed",
    CHAT,
    messages(logprobs=True, top_logprobs=2, max_tokens=3, stream=True),
)
simple("token-ids", "the ids of the tokens", COMPLETIONS, prompt(return_token_ids=True, max_tokens=3))
simple(
    "token-ids-stream",
    "the ids of the tokens, streamed",
    COMPLETIONS,
    prompt(return_token_ids=True, max_tokens=3, stream=True),
)
simple("prompt-of-token-ids", "a prompt given as token ids", COMPLETIONS, prompt(prompt=list(range(40, 120))))
simple("min-tokens", "a least number of tokens, which a prefill leg must not carry", COMPLETIONS, prompt(min_tokens=4))


@situation("a stop string ends the text")
def stop_string(bench: Bench) -> None:
    text = str(json.loads(bench.both_legs(COMPLETIONS, prompt()).body)["choices"][0]["text"])
    printable = [c for c in text[2:] if c.isprintable() and c != "\ufffd"]
    body = prompt(stop=[printable[0]])
    bench.decode(COMPLETIONS, body, bench.prefill(COMPLETIONS, body, "prefill leg with stop"), "decode leg with stop")
    body |= {"stream": True}
    bench.decode(COMPLETIONS, body, bench.prefill(COMPLETIONS, body, "prefill leg again"), "decode leg, streamed")


@situation("the same prompt answered in one place, to compare the text with the two legs'")
def local(bench: Bench) -> None:
    bench.post(Who.PRODUCER, "completion", COMPLETIONS, prompt())
    bench.post(Who.PRODUCER, "streamed chat", CHAT, messages(stream=True))


# What an engine refuses. Nothing of this is a fault of the engine.

LONG_MESSAGES = [{"role": "user", "content": SENTENCE * 400}]
LONG = prompt(prompt=SENTENCE * 400)
refused("too-long", "a prompt beyond the model's length", COMPLETIONS, LONG)
refused("too-long-stream", "the same, streamed: the answer is no stream", COMPLETIONS, {**LONG, **USAGE})
refused(
    "chat-too-long",
    "messages beyond the model's length",
    CHAT,
    messages(messages=LONG_MESSAGES),
)
refused(
    "too-many-tokens-asked",
    "prompt and answer together too long",
    COMPLETIONS,
    prompt(max_tokens=5000),
)
refused("bad-parameter", "a parameter out of its range", COMPLETIONS, prompt(temperature=-1))
refused("bad-parameter-stream", "the same with a stream asked for", COMPLETIONS, prompt(temperature=-1, stream=True))
refused("wrong-type", "a parameter of the wrong type", COMPLETIONS, prompt(max_tokens="many"))
refused("no-choices", "no choices asked for", COMPLETIONS, prompt(n=0))
refused("wrong-model", "a model that is not served", COMPLETIONS, prompt(model="another"))
refused("chat-wrong-model", "a model that is not served, in chat", CHAT, messages(model="another"))
refused("no-messages", "chat without messages", CHAT, {"model": MODEL, "max_tokens": 4})
refused("no-prompt", "a completion without a prompt", COMPLETIONS, {"model": MODEL, "max_tokens": 4})
refused("malformed", "a body that is not JSON", COMPLETIONS, b'{"model": "tiny", "prompt": ')
refused("not-an-object", "a body that is not an object", COMPLETIONS, [1, 2])
refused(
    "stream-options-alone",
    "stream options without a stream",
    COMPLETIONS,
    prompt(stream_options={"include_usage": True}),
)
refused("handoff-a-string", "a handoff that is a string", COMPLETIONS, prompt(kv_transfer_params="garbage"))
refused("handoff-a-list", "a handoff that is a list", COMPLETIONS, prompt(kv_transfer_params=[1]))
refused("handoff-empty", "an empty handoff: computed in place, silently", COMPLETIONS, prompt(kv_transfer_params={}))
refused("handoff-unknown-fields", "unknown fields: the same", COMPLETIONS, prompt(kv_transfer_params={"x": 1}))


# Handoffs that are not what they should be, and engines that live on.


@situation("a handoff without the fields that the engine can do without")
def handoff_without_optional_fields(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    for name in ("tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode"):
        handoff.pop(name, None)
    bench.decode(COMPLETIONS, prompt(), handoff)


@situation("a handoff sent to the engine that made it")
def handoff_sent_home(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    bench.post(Who.PRODUCER, "decode leg at home", COMPLETIONS, prompt(kv_transfer_params=handoff))


@situation("a handoff that names a request which the producer does not know")
def handoff_of_unknown_request(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    bench.decode(COMPLETIONS, prompt(), {**handoff, "remote_request_id": "cmpl-unknown-0-00000000"})
    bench.serves(Who.CONSUMER)


@situation("a handoff in a transfer mode that the engine does not run")
def handoff_by_push(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    bench.decode(COMPLETIONS, prompt(), {**handoff, "transfer_mode": "push"})
    bench.serves(Who.CONSUMER)


@situation("a handoff under an engine id that the producer does not have")
def handoff_of_unknown_engine(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    bench.decode(COMPLETIONS, prompt(), {**handoff, "remote_engine_id": "nobody"})
    body = prompt(stream=True)
    bench.decode(COMPLETIONS, body, {**handoff, "remote_engine_id": "nobody-else"}, "decode leg, streamed")
    bench.serves(Who.CONSUMER)


@situation("a handoff whose address nobody listens at")
def handoff_of_dead_address(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    handoff |= {"remote_engine_id": "never-met", "remote_port": free_port()}
    bench.decode(COMPLETIONS, prompt(), handoff)
    bench.decode(
        COMPLETIONS, prompt(stream=True), {**handoff, "remote_engine_id": "never-met-too"}, "decode leg, streamed"
    )
    bench.serves(Who.CONSUMER)


@situation("one handoff used twice")
def handoff_used_twice(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    bench.decode(COMPLETIONS, prompt(), handoff)
    bench.decode(COMPLETIONS, prompt(), handoff, "decode leg again")
    bench.serves(Who.CONSUMER)


@situation("a handoff older than the producer's lease: 200, and perhaps a wrong text")
def handoff_expired(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    time.sleep(bench.pace.kv_lease_s * 1.2)
    for number in range(3):
        bench.prefill(COMPLETIONS, prompt(prompt=f"{number} {PROMPT}"), f"other prefill {number}")
    bench.decode(COMPLETIONS, prompt(), handoff)
    bench.serves(Who.CONSUMER)


# Clients that leave.


@situation("the client leaves inside a stream; the engine soon runs nothing")
def client_leaves_stream(bench: Bench) -> None:
    body = prompt(max_tokens=1500, stream=True, ignore_eos=True)
    bench.decode(COMPLETIONS, body, bench.prefill(COMPLETIONS, body), enough=after_events(3))
    _until_idle(bench, Who.CONSUMER)


@situation("the client leaves before a whole answer; the engine soon runs nothing")
def client_leaves_whole_answer(bench: Bench) -> None:
    body = prompt(max_tokens=1500, ignore_eos=True)
    bench.decode(COMPLETIONS, body, bench.prefill(COMPLETIONS, body), timeout_s=bench.pace.leave_s)
    _until_idle(bench, Who.CONSUMER)


def _until_idle(bench: Bench, who: Who) -> None:
    """Notes how long the engine went on running something after the client had left."""
    began = time.monotonic()
    while bench.running(who) and time.monotonic() - began < bench.pace.answer_s:
        time.sleep(0.02)
    idle = not bench.running(who)
    request = Request(method="GET", path="/metrics")
    bench.note(
        who, "idle afterwards", request, {"idle": idle, "timing": {"idle_s": round(time.monotonic() - began, 2)}}
    )


# Engines that stop for a while and go on.


@situation("the producer is stopped while the consumer pulls, then goes on")
def producer_frozen(bench: Bench) -> None:
    body = prompt(stream=True)
    handoff = bench.prefill(COMPLETIONS, body)
    bench.fault(Who.PRODUCER, Fault.FREEZE)
    with bench.later(bench.pace.frozen_s, lambda: bench.fault(Who.PRODUCER, Fault.THAW)):
        bench.decode(COMPLETIONS, body, handoff)
    bench.serves(Who.CONSUMER)


@situation("the consumer's core is stopped while its HTTP process lives: health lies")
def consumer_core_frozen(bench: Bench) -> None:
    bench.fault(Who.CONSUMER, Fault.FREEZE_CORE)
    try:
        bench.get(Who.CONSUMER, "/health")
        bench.get(Who.CONSUMER, "/metrics", "metrics", timeout_s=bench.pace.hang_s)
        bench.post(Who.CONSUMER, "tokenize", "/tokenize", {"model": MODEL, "prompt": PROMPT})
        bench.post(Who.CONSUMER, "stream", COMPLETIONS, prompt(stream=True), timeout_s=bench.pace.hang_s)
        bench.post(Who.CONSUMER, "whole answer", COMPLETIONS, prompt(), timeout_s=bench.pace.hang_s)
    finally:
        bench.fault(Who.CONSUMER, Fault.THAW_CORE)
    bench.serves(Who.CONSUMER)


@situation("the whole consumer is stopped: the kernel takes connections, nobody answers")
def consumer_frozen(bench: Bench) -> None:
    bench.fault(Who.CONSUMER, Fault.FREEZE)
    try:
        bench.get(Who.CONSUMER, "/health", timeout_s=bench.pace.hang_s / 4)
        bench.post(Who.CONSUMER, "stream", COMPLETIONS, prompt(stream=True), timeout_s=bench.pace.hang_s / 4)
    finally:
        bench.fault(Who.CONSUMER, Fault.THAW)
    bench.serves(Who.CONSUMER)


# Engines that end.

PRODUCER = frozenset({Who.PRODUCER})
CONSUMER = frozenset({Who.CONSUMER})
ENDLESS = prompt(max_tokens=1500, stream=True, ignore_eos=True)


@situation("the producer dies between the legs, and is met by a consumer that knows it", spoils=PRODUCER)
def producer_dead(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt())
    first = bench.prefill(COMPLETIONS, prompt(), "prefill leg for a whole answer")
    second = bench.prefill(COMPLETIONS, prompt(), "prefill leg for a stream")
    third = bench.prefill(CHAT, messages(), "prefill leg for a streamed chat")
    bench.fault(Who.PRODUCER, Fault.KILL)
    bench.decode(COMPLETIONS, prompt(), first, "decode leg, whole answer")
    bench.decode(COMPLETIONS, prompt(**USAGE), second, "decode leg, stream")
    bench.decode(CHAT, messages(stream=True), third, "decode leg, streamed chat")
    bench.serves(Who.CONSUMER)


@situation("the producer's process is new and its KV identity too: transfers work at once", spoils=frozenset())
def producer_restarted(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt())
    bench.restart(Who.PRODUCER)
    bench.decode(COMPLETIONS, prompt(), bench.prefill(COMPLETIONS, prompt(), "new prefill leg"), "new decode leg")


def _hit_stream(bench: Bench, who: Who, fault: Fault) -> None:
    """Runs an endless local stream and applies the fault once, after its third event."""
    done: list[Fault] = []

    def strike(exchange: Exchange) -> None:
        if not done and len(exchange.events()) >= 3:
            done.append(fault)
            bench.fault(who, fault)

    bench.post(who, "stream", COMPLETIONS, ENDLESS, on_piece=strike)


@situation("the consumer is asked to end while it streams", spoils=CONSUMER)
def terminated_in_stream(bench: Bench) -> None:
    _hit_stream(bench, Who.CONSUMER, Fault.TERMINATE)
    bench.until_health(Who.CONSUMER, "health in the end", lambda e: e.status is None, bench.pace.answer_s)


@situation("the consumer is killed while it streams", spoils=CONSUMER)
def killed_in_stream(bench: Bench) -> None:
    _hit_stream(bench, Who.CONSUMER, Fault.KILL)
    bench.get(Who.CONSUMER, "/health")


@situation("only the consumer's core is killed while it streams", spoils=CONSUMER)
def core_killed_in_stream(bench: Bench) -> None:
    _hit_stream(bench, Who.CONSUMER, Fault.KILL_CORE)
    bench.until_health(Who.CONSUMER, "health in the end", lambda e: e.status is None, bench.pace.answer_s)


# Handoffs that end the engine that is given them.


@situation("a handoff that says only that there is one: the consumer ends", spoils=CONSUMER)
def lethal_flag_alone(bench: Bench) -> None:
    _lethal(bench, {"do_remote_prefill": True})


@situation("a handoff without the producer's id: the consumer ends", spoils=CONSUMER)
def lethal_without_engine_id(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    del handoff["remote_engine_id"]
    _lethal(bench, handoff)


@situation("a handoff with fewer blocks than the prompt has: the consumer ends", spoils=CONSUMER)
def lethal_fewer_blocks(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    handoff["remote_block_ids"] = [group[:1] for group in handoff["remote_block_ids"]]
    _lethal(bench, handoff)


def _lethal(bench: Bench, handoff: Any) -> None:
    bench.decode(COMPLETIONS, prompt(), handoff)
    bench.until_health(Who.CONSUMER, "health in the end", lambda e: e.status is None, bench.pace.answer_s)


@situation("a handoff without the producer's request: hangs; the consumer ends when the client leaves", spoils=CONSUMER)
def lethal_without_request_id(bench: Bench) -> None:
    handoff = bench.prefill(COMPLETIONS, prompt())
    del handoff["remote_request_id"]
    bench.decode(COMPLETIONS, prompt(), handoff, timeout_s=bench.pace.hang_s)
    bench.until_health(Who.CONSUMER, "health in the end", lambda e: e.status is None, bench.pace.answer_s)


# Engines that were started in another way.


@situation(
    "the producer's process is new and its KV identity is not: every transfer to its old peer fails, both healthy",
    settings=Settings(fixed_engine_id=True),
    spoils=CONSUMER,
)
def producer_restarted_same_id(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt())
    bench.restart(Who.PRODUCER)
    for number in (1, 2):
        handoff = bench.prefill(COMPLETIONS, prompt(), f"new prefill leg {number}")
        bench.decode(COMPLETIONS, prompt(), handoff, f"new decode leg {number}")
    bench.get(Who.PRODUCER, "/health", "producer health")
    bench.get(Who.CONSUMER, "/health", "consumer health")


@situation(
    "the producer dies between the legs and the consumer may compute again: 200 and the right text",
    settings=Settings(kv_load_failure_policy="recompute"),
    spoils=PRODUCER,
)
def producer_dead_recompute(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt())
    handoff = bench.prefill(COMPLETIONS, prompt(), "prefill leg of a doomed producer")
    bench.fault(Who.PRODUCER, Fault.KILL)
    bench.decode(COMPLETIONS, prompt(), handoff, "decode leg without its producer")


BY_NAME = {one.name: one for one in ALL}
