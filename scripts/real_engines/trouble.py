"""Trouble: handoffs that are not what they should be, clients that leave, engines that stop and engines that end."""

import time
from typing import Any

from scripts.real_engines.bench import CHAT, COMPLETIONS, MODEL, Bench, Fault, Who
from scripts.real_engines.engines import Settings, free_port
from scripts.real_engines.rawhttp import Exchange, Request
from scripts.real_engines.situation import USAGE, Steps, after_events, messages, prompt, situation, text

PRODUCER = frozenset({Who.PRODUCER})
CONSUMER = frozenset({Who.CONSUMER})

# Handoffs that are not what they should be, and engines that live on.


@situation("a handoff without the fields that the engine can do without")
def handoff_without_optional_fields(bench: Bench) -> None:
    body = prompt("optional fields")
    handoff = bench.prefill(COMPLETIONS, body)
    for name in ("tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode"):
        handoff.pop(name, None)
    bench.decode(COMPLETIONS, body, handoff)


@situation("a handoff sent to the engine that made it")
def handoff_sent_home(bench: Bench) -> None:
    body = prompt("sent home")
    handoff = bench.prefill(COMPLETIONS, body)
    bench.post(Who.PRODUCER, "decode leg at home", COMPLETIONS, {**body, "kv_transfer_params": handoff})


@situation("a handoff that names a request which the producer does not know")
def handoff_of_unknown_request(bench: Bench) -> None:
    body = prompt("unknown request")
    handoff = bench.prefill(COMPLETIONS, body)
    bench.decode(COMPLETIONS, body, {**handoff, "remote_request_id": "cmpl-unknown-0-00000000"})
    bench.serves(Who.CONSUMER)


@situation("a handoff in a transfer mode that the engine does not run")
def handoff_by_push(bench: Bench) -> None:
    body = prompt("by push")
    handoff = bench.prefill(COMPLETIONS, body)
    bench.decode(COMPLETIONS, body, {**handoff, "transfer_mode": "push"})
    bench.serves(Who.CONSUMER)


@situation("a handoff under an engine id that the producer does not have")
def handoff_of_unknown_engine(bench: Bench) -> None:
    body = prompt("unknown engine")
    handoff = bench.prefill(COMPLETIONS, body)
    bench.decode(COMPLETIONS, body, {**handoff, "remote_engine_id": "nobody"})
    handoff["remote_engine_id"] = "nobody-else"
    bench.decode(COMPLETIONS, {**body, "stream": True}, handoff, "decode leg, streamed")
    bench.serves(Who.CONSUMER)


@situation("a handoff whose address nobody listens at")
def handoff_of_dead_address(bench: Bench) -> None:
    body = prompt("dead address")
    handoff = bench.prefill(COMPLETIONS, body)
    handoff |= {"remote_engine_id": "never-met", "remote_port": free_port()}
    bench.decode(COMPLETIONS, body, handoff)
    handoff["remote_engine_id"] = "never-met-too"
    bench.decode(COMPLETIONS, {**body, "stream": True}, handoff, "decode leg, streamed")
    bench.serves(Who.CONSUMER)


@situation("one handoff used twice")
def handoff_used_twice(bench: Bench) -> None:
    body = prompt("twice")
    handoff = bench.prefill(COMPLETIONS, body)
    bench.decode(COMPLETIONS, body, handoff)
    bench.decode(COMPLETIONS, body, handoff, "decode leg again")
    # Another prompt of the same length, so that the consumer cannot answer from what it has.
    other = {**body, "prompt": body["prompt"].replace("twice", "stole")}
    bench.decode(COMPLETIONS, other, handoff, "decode leg of another prompt")
    bench.serves(Who.CONSUMER)


@situation("a handoff older than the producer's lease, its blocks taken by others: 200, and a wrong text")
def handoff_expired(bench: Bench) -> None:
    body = prompt("expired")
    handoff = bench.prefill(COMPLETIONS, body)
    time.sleep(bench.pace.kv_lease_s * 1.2)
    bench.decode(COMPLETIONS, body, handoff)
    bench.serves(Who.CONSUMER)


# Clients that leave.


@situation("the client leaves inside a stream; the engine soon runs nothing")
def client_leaves_stream(bench: Bench) -> None:
    body = prompt("leaves stream", max_tokens=1500, stream=True)
    bench.decode(COMPLETIONS, body, bench.prefill(COMPLETIONS, body), enough=after_events(3))
    _until_idle(bench, Who.CONSUMER)


@situation("the client leaves before a whole answer; the engine soon runs nothing")
def client_leaves_whole_answer(bench: Bench) -> None:
    body = prompt("leaves whole answer", max_tokens=1500)
    bench.decode(COMPLETIONS, body, bench.prefill(COMPLETIONS, body), timeout_s=bench.pace.leave_s)
    _until_idle(bench, Who.CONSUMER)


def _until_idle(bench: Bench, who: Who) -> None:
    """Notes how long the engine went on running something after the client had left."""
    began = time.monotonic()
    while bench.running(who) and time.monotonic() - began < bench.pace.answer_s:
        time.sleep(0.02)
    idle = not bench.running(who)
    request = Request(method="GET", path="/metrics")
    timing = {"idle_s": round(time.monotonic() - began, 2)}
    bench.note(who, "idle afterwards", request, {"idle": idle, "timing": timing})


# Engines that stop for a while and go on.


@situation("the producer is stopped while the consumer pulls, then goes on")
def producer_frozen(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt("before the freeze"))
    body = prompt("frozen producer", stream=True)
    handoff = bench.prefill(COMPLETIONS, body)
    bench.fault(Who.PRODUCER, Fault.FREEZE)
    with bench.later(bench.pace.frozen_s, lambda: bench.fault(Who.PRODUCER, Fault.THAW)):
        bench.decode(COMPLETIONS, body, handoff)
    bench.serves(Who.CONSUMER)


@situation("the consumer's core is stopped while its HTTP process lives: health lies")
def consumer_core_frozen(bench: Bench) -> None:
    body = prompt("frozen core")
    bench.fault(Who.CONSUMER, Fault.FREEZE_CORE)
    try:
        bench.get(Who.CONSUMER, "/health")
        bench.get(Who.CONSUMER, "/metrics", "metrics", timeout_s=bench.pace.hang_s)
        bench.post(Who.CONSUMER, "tokenize", "/tokenize", {"model": MODEL, "prompt": text("frozen core")})
        bench.post(Who.CONSUMER, "stream", COMPLETIONS, {**body, "stream": True}, timeout_s=bench.pace.hang_s)
        bench.post(Who.CONSUMER, "whole answer", COMPLETIONS, body, timeout_s=bench.pace.hang_s)
    finally:
        bench.fault(Who.CONSUMER, Fault.THAW_CORE)
    bench.serves(Who.CONSUMER)


@situation("the whole consumer is stopped: the kernel takes connections, nobody answers")
def consumer_frozen(bench: Bench) -> None:
    bench.fault(Who.CONSUMER, Fault.FREEZE)
    try:
        bench.get(Who.CONSUMER, "/health", timeout_s=bench.pace.hang_s / 4)
        bench.post(Who.CONSUMER, "stream", COMPLETIONS, prompt("x", stream=True), timeout_s=bench.pace.hang_s / 4)
    finally:
        bench.fault(Who.CONSUMER, Fault.THAW)
    bench.serves(Who.CONSUMER)


# Engines that end.


@situation("the producer dies between the legs; the consumer knew it and lives on", spoils=PRODUCER)
def producer_dead(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt("before"))
    whole, stream, chat = prompt("dead, whole"), prompt("dead, streamed"), messages("dead, chat")
    first = bench.prefill(COMPLETIONS, whole, "prefill leg for a whole answer")
    second = bench.prefill(COMPLETIONS, stream, "prefill leg for a stream")
    third = bench.prefill(CHAT, chat, "prefill leg for a streamed chat")
    bench.fault(Who.PRODUCER, Fault.KILL)
    bench.decode(COMPLETIONS, whole, first, "decode leg, whole answer")
    bench.decode(COMPLETIONS, {**stream, **USAGE}, second, "decode leg, stream")
    bench.decode(CHAT, {**chat, "stream": True}, third, "decode leg, streamed chat")
    bench.serves(Who.CONSUMER)


@situation("the producer's process is new and its KV identity too: transfers work")
def producer_restarted(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt("before"))
    bench.restart(Who.PRODUCER)
    body = prompt("after")
    bench.decode(COMPLETIONS, body, bench.prefill(COMPLETIONS, body, "new prefill leg"), "new decode leg")


def _hit_stream(bench: Bench, who: Who, fault: Fault) -> None:
    """Runs a long local stream and applies the fault once, after its third event."""
    done: list[Fault] = []

    def strike(exchange: Exchange) -> None:
        if not done and len(exchange.events()) >= 3:
            done.append(fault)
            bench.fault(who, fault)

    body = prompt("endless", max_tokens=1500, stream=True)
    bench.post(who, "stream", COMPLETIONS, body, on_piece=strike, timeout_s=2 * bench.pace.hang_s)
    _forget_connection(bench)


def _forget_connection(bench: Bench) -> None:
    """Whether a connection outlives its last answer by a moment is a race with the end of the process."""
    bench.steps[-1]["response"].pop("connection", None)


def _until_gone(bench: Bench) -> None:
    bench.until_health(Who.CONSUMER, "health in the end", lambda e: e.end == "refused", bench.pace.answer_s)


def _aborted(steps: Steps) -> bool:
    """The stream said `abort` where a reason for its end belongs."""
    events = steps[0]["response"].get("events", [])
    return any(e != "[DONE]" and e.get("choices") and e["choices"][0]["finish_reason"] == "abort" for e in events)


@situation("the consumer is asked to end while it streams: it looks finished", spoils=CONSUMER, seen=_aborted)
def terminated_in_stream_aborting(bench: Bench) -> None:
    _hit_stream(bench, Who.CONSUMER, Fault.TERMINATE_ABORTING)
    _until_gone(bench)


def _silent(steps: Steps) -> bool:
    return bool(steps[0]["response"]["end"] == "unfinished")


@situation("the consumer is asked to end while it streams: silence, the connection open", spoils=CONSUMER, seen=_silent)
def terminated_in_stream_silently(bench: Bench) -> None:
    _hit_stream(bench, Who.CONSUMER, Fault.TERMINATE_SILENTLY)
    _until_gone(bench)


@situation("the consumer is asked to end before a whole answer", spoils=CONSUMER)
def terminated_in_whole_answer(bench: Bench) -> None:
    body = prompt("endless", max_tokens=1500)
    with bench.later(bench.pace.leave_s, lambda: bench.fault(Who.CONSUMER, Fault.TERMINATE_ABORTING)):
        bench.post(Who.CONSUMER, "whole answer", COMPLETIONS, body, timeout_s=2 * bench.pace.hang_s)
    _forget_connection(bench)
    _until_gone(bench)


@situation("the consumer is killed while it streams", spoils=CONSUMER)
def killed_in_stream(bench: Bench) -> None:
    _hit_stream(bench, Who.CONSUMER, Fault.KILL)
    _until_gone(bench)


@situation("only the consumer's core is killed while it streams", spoils=CONSUMER)
def core_killed_in_stream(bench: Bench) -> None:
    _hit_stream(bench, Who.CONSUMER, Fault.KILL_CORE)
    _until_gone(bench)


# Handoffs that end the engine that is given them.


@situation("a handoff that says only that there is one: the consumer ends", spoils=CONSUMER)
def lethal_flag_alone(bench: Bench) -> None:
    bench.decode(COMPLETIONS, prompt("flag alone"), {"do_remote_prefill": True})
    _forget_connection(bench)
    _until_gone(bench)


@situation("a handoff without the producer's id: hangs; the consumer ends when the client leaves", spoils=CONSUMER)
def lethal_without_engine_id(bench: Bench) -> None:
    body = prompt("no engine id")
    handoff = bench.prefill(COMPLETIONS, body)
    del handoff["remote_engine_id"]
    bench.decode(COMPLETIONS, body, handoff, timeout_s=bench.pace.hang_s)
    _until_gone(bench)


@situation("a handoff with fewer blocks than the prompt has: the consumer ends", spoils=CONSUMER)
def lethal_fewer_blocks(bench: Bench) -> None:
    body = prompt("fewer blocks")
    handoff: dict[str, Any] = bench.prefill(COMPLETIONS, body)
    handoff["remote_block_ids"] = [group[:1] for group in handoff["remote_block_ids"]]
    bench.decode(COMPLETIONS, body, handoff)
    _forget_connection(bench)
    _until_gone(bench)


@situation("a handoff without the producer's request: hangs; the consumer ends when the client leaves", spoils=CONSUMER)
def lethal_without_request_id(bench: Bench) -> None:
    body = prompt("no request id")
    handoff = bench.prefill(COMPLETIONS, body)
    del handoff["remote_request_id"]
    bench.decode(COMPLETIONS, body, handoff, timeout_s=bench.pace.hang_s)
    _until_gone(bench)


# Engines that were started in another way.


@situation(
    "the producer's process is new and its KV identity is not: every transfer to its old peer fails, both healthy",
    settings=Settings(fixed_engine_id=True),
    spoils=CONSUMER,
)
def producer_restarted_same_id(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt("before"))
    bench.restart(Who.PRODUCER)
    for number in (1, 2):
        body = prompt(f"after {number}")
        handoff = bench.prefill(COMPLETIONS, body, f"new prefill leg {number}")
        bench.decode(COMPLETIONS, body, handoff, f"new decode leg {number}")
    bench.get(Who.PRODUCER, "/health", "producer health")
    bench.get(Who.CONSUMER, "/health", "consumer health")


@situation(
    "a handoff sent to the engine that made it, with a fixed KV identity", settings=Settings(fixed_engine_id=True)
)
def handoff_sent_home_same_id(bench: Bench) -> None:
    handoff_sent_home(bench)


@situation(
    "the producer dies between the legs and the consumer may compute again: 200 and the right text",
    settings=Settings(kv_load_failure_policy="recompute"),
    spoils=PRODUCER,
)
def producer_dead_recompute(bench: Bench) -> None:
    bench.both_legs(COMPLETIONS, prompt("before"))
    body = prompt("recomputed")
    handoff = bench.prefill(COMPLETIONS, body, "prefill leg of a doomed producer")
    bench.fault(Who.PRODUCER, Fault.KILL)
    bench.decode(COMPLETIONS, body, handoff, "decode leg without its producer")
