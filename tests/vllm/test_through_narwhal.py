"""What clients get through Narwhal from real engines: the same text as from one engine alone, whatever the form."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from scripts.real_engines import engines
from scripts.real_engines.bench import CHAT, COMPLETIONS, MODEL
from scripts.real_engines.rawhttp import Request, send
from scripts.real_engines.record import core
from tests.vllm.stack import Stack, messages, metric, post, prompt, status, streamed_text, wait_until


@contextmanager
def core_stopped(engine: engines.Engine, seconds: float) -> Iterator[None]:
    """Stops the engine's computing process for so long, beside the block: headers come, tokens wait."""
    pid = core(engine)
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


# First in the file: only here the proxy has not yet seen a transfer between the two.
@pytest.mark.rule("V13", "R8")
def test_a_first_transfer_of_eight_seconds_is_survived(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": prompt("first"), "max_tokens": 12, "temperature": 0}
    expected = stack.alone(COMPLETIONS, body)
    before = stack.transfers()
    with core_stopped(stack.decode, 8.0):
        answer = post(stack.url, COMPLETIONS, {**body, "stream": True})
    assert answer.status == 200, answer.body
    assert streamed_text(answer) == expected
    assert answer.timed_events()[0][0] > 6
    assert stack.transfers() == before + 1
    assert status(stack.control, "/ready") == 200
    assert metric(stack.control, "narwhal_ejections_total") == 0


@pytest.mark.rule("V13")
def test_a_later_transfer_has_the_shorter_deadline(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": prompt("later"), "max_tokens": 12, "temperature": 0}
    with core_stopped(stack.decode, 8.0):
        answer = post(stack.url, COMPLETIONS, {**body, "stream": True})
    assert answer.status == 504, answer.body
    assert json.loads(answer.body)["error"]["code"] == "decode"
    assert 4.5 < answer.end_s < 7
    assert status(stack.url, "/ready") == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_completion_has_the_text_of_one_engine_alone(stack: Stack, stream: bool) -> None:
    body = {"model": MODEL, "prompt": prompt(f"completion {stream}"), "max_tokens": 40, "temperature": 0}
    before = stack.transfers()
    answer = post(stack.url, COMPLETIONS, {**body, "stream": stream})
    assert answer.status == 200, answer.body
    text = streamed_text(answer) if stream else json.loads(answer.body)["choices"][0]["text"]
    assert stack.transfers() == before + 1
    assert text == stack.alone(COMPLETIONS, body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_chat_has_the_text_of_one_engine_alone(stack: Stack, stream: bool) -> None:
    body = {"model": MODEL, "messages": messages(f"chat {stream}"), "max_tokens": 40, "temperature": 0}
    before = stack.transfers()
    answer = post(stack.url, CHAT, {**body, "stream": stream})
    assert answer.status == 200, answer.body
    text = streamed_text(answer) if stream else json.loads(answer.body)["choices"][0]["message"]["content"]
    assert stack.transfers() == before + 1
    assert text == stack.alone(CHAT, body)


def test_usage_comes_last_when_it_was_asked_for(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": prompt("usage"), "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    answer = post(stack.url, COMPLETIONS, {**body, "stream": True, "stream_options": {"include_usage": True}})
    usage = json.loads(answer.events()[-2])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9


def test_a_short_prompt_without_any_kv_block(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": "Ice", "max_tokens": 8, "temperature": 0}
    answer = post(stack.url, COMPLETIONS, body)
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["choices"][0]["text"] == stack.alone(COMPLETIONS, body)


def test_the_official_client(stack: Stack) -> None:
    body = {"model": MODEL, "messages": messages("official"), "max_tokens": 16, "temperature": 0}
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        stream = client.chat.completions.create(**body, stream=True)  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == stack.alone(CHAT, body)


@pytest.mark.rule("V10")
@pytest.mark.parametrize(
    "planted",
    [{"do_remote_prefill": True}, {"do_remote_decode": True}, "garbage"],
    ids=["would kill the decode engine", "would pin blocks", "no object"],
)
def test_a_clients_own_handoff_never_reaches_an_engine(stack: Stack, planted: Any) -> None:
    body = {"model": MODEL, "prompt": prompt(f"planted {planted}"), "max_tokens": 8, "temperature": 0}
    answer = post(stack.url, COMPLETIONS, {**body, "kv_transfer_params": planted})
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["choices"][0]["text"] == stack.alone(COMPLETIONS, body)
    assert engines.alive(stack.decode)
    assert status(stack.decode.url, "/health") == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_engines_refusal_is_passed_on(stack: Stack, path: str) -> None:
    long = prompt("too long") * 40
    asked = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
    body = {"model": MODEL, "max_tokens": 4, **asked}
    through, direct = post(stack.url, path, body), post(stack.prefill.url, path, body)
    assert through.status == direct.status == 400
    assert json.loads(through.body).keys() == json.loads(direct.body).keys()
    assert status(stack.url, "/ready") == 200


@pytest.mark.rule("V7")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_is_seen_by_the_engine(stack: Stack, stream: bool) -> None:
    body = {"model": MODEL, "prompt": prompt(f"leaves {stream}"), "max_tokens": 1500, "ignore_eos": True}
    request = Request(method="POST", path=COMPLETIONS, body={**body, "stream": stream})
    before = metric(stack.decode.url, "vllm:generation_tokens_total")
    if stream:
        left = send(stack.url, request, enough=lambda exchange: len(exchange.events()) >= 3)
        assert left.end == "left"
    else:
        assert send(stack.url, request, timeout_s=2.0).end == "silent"

    def idle() -> bool:
        return metric(stack.decode.url, "vllm:num_requests_running") == 0

    # The engine looks for a lost client between steps; on a busy machine a step takes its time.
    wait_until(idle, "the decode engine runs nothing", 10.0)
    assert metric(stack.decode.url, "vllm:generation_tokens_total") - before < 1500


# Last in the file: it replaces an engine.
@pytest.mark.rule("V13", "R8")
@pytest.mark.case("B3")
def test_a_decode_engine_that_was_replaced_is_taken_back_before_clients_meet_it(stack: Stack) -> None:
    incarnation = stack.incarnation("decode-0")
    stack.relaunch("decode-0")
    stack.wait_back("decode-0", incarnation)
    fresh = stack.decode
    body = {"model": MODEL, "prompt": prompt("replaced"), "max_tokens": 12, "temperature": 0}
    before = metric(fresh.url, "vllm:nixl_bytes_transferred_count")
    answer = post(stack.url, COMPLETIONS, body)
    assert answer.status == 200, answer.body
    assert json.loads(answer.body)["choices"][0]["text"] == stack.alone(COMPLETIONS, body)
    assert metric(fresh.url, "vllm:nixl_bytes_transferred_count") == before + 1
