"""Several choices of one prompt on engines that have no room for all of them at once: two seats, few KV blocks.

Each choice would read the handoff for itself, and the producer frees it after the first: those that begin later would
read what is others' by then. What others do to the producer's blocks meanwhile is done here, on purpose.
"""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from scripts.real_engines import engines
from scripts.real_engines.bench import COMPLETIONS, MODEL
from scripts.real_engines.rawhttp import Exchange, Request, send
from tests.vllm.stack import SENTENCE, SETTINGS, Stack, metric, post, streamed_text, text_of, wait_until
from tests.vllm.test_when_engines_fail import broken_as_it_must

BLOCKS, BLOCK = 80, 32
SEATS, CHOICES = 2, 5
HOG = 47 * BLOCK - 4  # tokens; beside it there is room for one prompt of 31 blocks, and for none of a second choice
LONG = 31 * BLOCK - 1  # the last block is not whole: no cache answers for it
SHARP = {"model": MODEL, "temperature": 1.0, "top_k": 1, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A prefill and a decode engine that are soon full, and narwhal before them."""
    run = tmp_path_factory.mktemp("tight")
    settings = replace(SETTINGS, kv_blocks=BLOCKS, max_num_seqs=SEATS)
    started, _ = engines.start([("prefill", 0), ("decode", 0)], settings=settings, run=run)
    stack = Stack(run, {each.name: each for each in started})
    try:
        stack.serve()
        yield stack
        assert stack.end() == 0
    finally:
        stack.kill()
        for engine in engines.running(run):
            engines.stop(engine, run)


def tokens(stack: Stack, name: str, count: int) -> list[int]:
    """A prompt of so many tokens, like no other from its first block on."""
    body = {"model": MODEL, "prompt": f"{name}: {SENTENCE * 200}"}
    found: list[int] = json.loads(post(stack.prefill.url, "/tokenize", body).body)["tokens"]
    return found[:count]


def waiting(stack: Stack) -> float:
    """Requests, or choices of one, that the decode engine has not begun."""
    return metric(stack.decode.url, "vllm:num_requests_waiting")


def pinned(stack: Stack) -> float:
    """The part of the producer's blocks that are in use."""
    return metric(stack.prefill.url, "vllm:kv_cache_usage_perc")


def expired(stack: Stack) -> float:
    return metric(stack.prefill.url, "vllm:nixl_num_kv_expired_reqs_total")


@contextmanager
def overwritten(stack: Stack) -> Iterator[None]:
    """The producer's free blocks are given to others all the time."""
    over = threading.Event()

    def others(number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            body = {"model": MODEL, "prompt": f"{number} {count} others: {SENTENCE * 70}", "max_tokens": 1}
            assert post(stack.prefill.url, COMPLETIONS, body).status == 200

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(others, number) for number in range(2)]
        try:
            yield
        finally:
            over.set()
    for each in asking:
        each.result()


@contextmanager
def crowded(stack: Stack, name: str) -> Iterator[None]:
    """The decode engine has one seat, and room for a prompt of `LONG` but not for more, for some seconds."""
    body = {**SHARP, "prompt": tokens(stack, f"hog {name}", HOG), "max_tokens": 400}
    with ThreadPoolExecutor(1) as pool:
        hog = pool.submit(post, stack.decode.url, COMPLETIONS, body)
        wait_until(lambda: metric(stack.decode.url, "vllm:num_requests_running") >= 1, "the decode engine is busy", 20)
        yield
        assert hog.result().status == 200


def unpinned(stack: Stack, before: float) -> None:
    """The producer holds nothing, and no lease had to end for that."""
    wait_until(lambda: pinned(stack) == 0, lambda: f"nothing is pinned: {pinned(stack)}", 15)
    assert expired(stack) == before


def texts(answer: Exchange, stream: bool) -> list[str]:
    found = [""] * CHOICES
    if stream:
        streamed_text(answer)
    else:
        text_of(answer)
    for part in map(json.loads, answer.events()[:-1] if stream else [answer.body]):
        for choice in part["choices"]:
            found[choice["index"]] += choice["text"]
    return found


@pytest.mark.rule("V5", "V6")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_choices_that_wait_for_room_have_the_right_text(tight: Stack, stream: bool) -> None:
    body = {**SHARP, "prompt": tokens(tight, f"room {stream}", LONG)}
    expected = tight.alone(COMPLETIONS, {**body, "temperature": 0})
    before = expired(tight)
    most = 0.0
    with crowded(tight, f"room {stream}"), overwritten(tight), ThreadPoolExecutor(1) as client:
        asking = client.submit(post, tight.url, COMPLETIONS, {**body, "n": CHOICES, "stream": stream})
        while not asking.done():
            most = max(most, waiting(tight))
        answer = asking.result()
    assert most >= CHOICES - SEATS, "choices had to wait"
    assert texts(answer, stream) == [expected] * CHOICES
    unpinned(tight, before)
    assert metric(tight.decode.url, "vllm:nixl_num_failed_transfers_total") == 0


def test_more_choices_than_seats_of_a_short_prompt(tight: Stack) -> None:
    """Shorter than a block: nothing of it is ever found in a cache."""
    body = {**SHARP, "prompt": tokens(tight, "short", BLOCK - 3)}
    expected = tight.alone(COMPLETIONS, {**body, "temperature": 0})
    before = expired(tight)
    with overwritten(tight):
        answer = post(tight.url, COMPLETIONS, {**body, "n": CHOICES})
    assert texts(answer, False) == [expected] * CHOICES
    unpinned(tight, before)


@pytest.mark.rule("V7")
@pytest.mark.case("F14")
def test_a_client_that_leaves_while_choices_wait(tight: Stack) -> None:
    body = {**SHARP, "prompt": tokens(tight, "leaves", LONG), "n": CHOICES, "max_tokens": 800, "stream": True}
    before = expired(tight)
    with crowded(tight, "leaves"):
        left = send(
            tight.url,
            Request(method="POST", path=COMPLETIONS, body=body),
            enough=lambda answer: len(answer.events()) >= 3 and waiting(tight) >= 1,
        )
        assert left.end == "left"
        wait_until(lambda: waiting(tight) == 0, "no choice waits any more", 10)
    unpinned(tight, before)


@pytest.mark.rule("V7", "V13", "F2")
@pytest.mark.parametrize("leaves", [True, False], ids=["the client leaves", "the deadline passes"])
def test_a_handoff_that_is_not_read_in_time_is_let_go(tight: Stack, leaves: bool) -> None:
    """The decode engine is stopped before it has read it: what it finds when it goes on is a request that is over."""
    body = {**SHARP, "prompt": tokens(tight, f"unread {leaves}", LONG), "n": CHOICES}
    before = expired(tight)
    prefilled = metric(tight.prefill.url, "vllm:request_success_total")
    tight.stop_core("decode-0")
    try:
        request = Request(method="POST", path=COMPLETIONS, body=body)
        with ThreadPoolExecutor(1) as client:
            asking: Future[Exchange] = client.submit(send, tight.url, request, timeout_s=2.0 if leaves else 30.0)
            done = prefilled + 1
            wait_until(lambda: metric(tight.prefill.url, "vllm:request_success_total") >= done, "prefilled", 10)
            assert pinned(tight) > 0
            answer = asking.result()
    finally:
        tight.cont_core("decode-0")
    if leaves:
        assert answer.end == "silent"
    else:
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (504, "decode")
        assert answer.end_s < 8
    unpinned(tight, before)


# Last in the file: it ends an engine.
@pytest.mark.rule("V8", "F7")
def test_an_engine_that_is_killed_while_choices_wait_leaves_nothing_pinned(tight: Stack) -> None:
    # A stream: of a whole answer on a connection that was used before, the engine's end is taken for that of an idle
    # connection, and another attempt's prefill would hold what nobody reads until its lease ends.
    body = {**SHARP, "prompt": tokens(tight, "killed", LONG), "n": CHOICES, "stream": True}
    before = expired(tight)
    hog = {**SHARP, "prompt": tokens(tight, "hog killed", HOG), "max_tokens": 400}
    with ThreadPoolExecutor(2) as clients:
        clients.submit(post, tight.decode.url, COMPLETIONS, hog)
        wait_until(lambda: metric(tight.decode.url, "vllm:num_requests_running") >= 1, "the decode engine is busy", 20)
        asking = clients.submit(post, tight.url, COMPLETIONS, body)
        wait_until(lambda: waiting(tight) >= CHOICES - SEATS, "choices wait", 20)
        tight.sigkill("decode-0")
        answer = asking.result()
    if answer.status == 200:  # a choice had begun
        assert broken_as_it_must(answer)
    else:
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (502, "decode")
    unpinned(tight, before)
    # The engine had read what it was sent: its producer has no part in this.
    failed = [each for each in tight.events("leg_failed") if each["phase"] == "decode"][-1]
    assert failed["engine"] == "decode-0"
    told = tight.wait_explained("decode-0", "decode leg: stream cut")
    assert "handoff of" not in next(line for line in told.splitlines() if "decode leg: stream cut" in line)
