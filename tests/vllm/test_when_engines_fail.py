"""Real engines that are killed, stopped, asked to end, drained and restarted under Narwhal, one prefill and two decode.

What each failure looks like in `explain` is printed (`pytest -s`); docs/vllm.md shows it.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest

from scripts.real_engines.bench import CHAT, COMPLETIONS, MODEL
from scripts.real_engines.rawhttp import Exchange, Request, send
from tests.vllm.stack import BACK_S, Stack, messages, metric, post, prompt, status, streamed_text, text_of, wait_until

DECODERS = ("decode-0", "decode-1")
KV_LEASE_S = 30.0  # vLLM's kv_lease_duration, and Narwhal's engine.kv_lease_s


def body_of(name: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt(name), "max_tokens": 12, "temperature": 0, **more}


def running(stack: Stack, name: str) -> float:
    """Requests that an engine works on."""
    return metric(stack.engines[name].url, "vllm:num_requests_running")


def ejections(stack: Stack, name: str) -> float:
    return metric(stack.control, "narwhal_ejections_total", engine=name)


def serves_well(stack: Stack, name: str, count: int = 6) -> None:
    """That clients notice nothing: so many requests at once, whole and streamed, with the right texts."""

    def ask(number: int) -> bool:
        body = body_of(f"{name} {number}")
        answer = post(stack.url, COMPLETIONS, {**body, "stream": number % 2 == 0})
        got = streamed_text(answer) if number % 2 == 0 else text_of(answer)
        return got == text_of(post(stack.decode.url, COMPLETIONS, body))

    with ThreadPoolExecutor(count) as clients:
        assert all(clients.map(ask, range(count)))


def until_served(stack: Stack, name: str, timeout_s: float = BACK_S) -> float:
    """Until clients are served again; the seconds it took."""
    count = 0

    def served() -> bool:
        nonlocal count
        count += 1
        return post(stack.url, COMPLETIONS, body_of(f"{name} {count}"), timeout_s=30).status == 200

    return wait_until(served, "clients are served again", timeout_s)


def broken_as_it_must(answer: Exchange) -> bool:
    """Whether a stream broke, and was not passed off as whole (spec V8): one error event, no marker."""
    told = answer.events()
    if "[DONE]" in told:
        return False
    errors = [event for event in map(json.loads, told) if "error" in event]
    assert len(errors) == 1, told
    assert "error" in json.loads(told[-1])
    assert answer.end == "complete", answer.end
    return True


@contextmanager
def load(stack: Stack) -> Iterator[list[int | None]]:
    """Clients that ask one after the other until the block ends; the statuses that they got."""
    seen: list[int | None] = []
    over = threading.Event()

    def client(number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            seen.append(post(stack.url, COMPLETIONS, body_of(f"load {number} {count}")).status)

    with ThreadPoolExecutor(2) as clients:
        asking: list[Future[None]] = [clients.submit(client, number) for number in range(2)]
        try:
            yield seen
        finally:
            over.set()
    for each in asking:
        each.result()


# --- killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F2", "F7", "V8", "P4")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_producer_that_is_killed_between_the_legs(healed: Stack, path: str) -> None:
    """The decode engines hold what they were sent until the producer is gone: then they cannot read it."""
    serves_well(healed, f"before the kill {path}")
    before = {name: ejections(healed, name) for name in healed.engines}
    prefills = metric(healed.prefill.url, "vllm:request_success_total")
    asked: dict[str, Any] = {"messages": messages("killed")} if path == CHAT else {"prompt": prompt("killed")}
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0, **asked}
    incarnation = healed.incarnation("prefill-0")
    for name in DECODERS:
        healed.stop_core(name)
    try:
        with ThreadPoolExecutor(2) as clients:
            asking = [clients.submit(post, healed.url, path, {**body, "stream": stream}) for stream in (True, False)]
            done = prefills + 2
            wait_until(lambda: metric(healed.prefill.url, "vllm:request_success_total") >= done, "both prefilled", 4)
            healed.sigkill("prefill-0")
            for name in DECODERS:
                healed.cont_core(name)
            answers = [each.result() for each in asking]
    finally:
        for name in DECODERS:
            healed.cont_core(name)
    # Nothing had gone to a client, not even who speaks in a chat: the error has a status, also of a stream.
    for answer in answers:
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (502, "decode")
    took = until_served(healed, f"without a producer {path}")
    print(f"served by the decode engines {took:.1f} s after the producer was killed")
    healed.wait_explained("prefill-0", "is not eligible: ejected")
    serves_well(healed, f"a decode engine prefills {path}")
    healed.explain("decode-0")
    assert [ejections(healed, name) for name in DECODERS] == [before[name] for name in DECODERS]
    healed.relaunch("prefill-0")
    print(f"back {healed.wait_back('prefill-0', incarnation):.1f} s after it was healthy")
    serves_well(healed, f"after the kill {path}")


@pytest.mark.rule("V8", "F2", "R8")
def test_a_decode_engine_that_is_killed_inside_a_stream(healed: Stack) -> None:
    killed: list[str] = []

    def strike(answer: Exchange) -> None:
        if not killed and len(answer.events()) >= 3:
            killed.append(next(name for name in DECODERS if running(healed, name)))
            healed.sigkill(killed[0])

    body = body_of("killed inside", max_tokens=1500, ignore_eos=True, stream=True)
    before = {name: healed.incarnation(name) for name in DECODERS}
    answer = send(healed.url, Request(method="POST", path=COMPLETIONS, body=body), on_piece=strike)
    assert answer.status == 200
    assert broken_as_it_must(answer)
    (name,) = killed
    until_served(healed, "beside the killed one")
    healed.wait_explained(name, "is not eligible: ejected")
    assert all(post(healed.url, COMPLETIONS, body_of(f"beside {count}")).status == 200 for count in range(6))
    healed.relaunch(name)
    print(f"back {healed.wait_back(name, before[name]):.1f} s after it was healthy")
    serves_well(healed, "after the killed one")


# --- stopped ----------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F3", "F6", "V13", "F10")
@pytest.mark.case("C1")
def test_an_engine_whose_core_is_stopped_while_its_health_is_green(healed: Stack) -> None:
    serves_well(healed, "before the stop")
    # One that has just come back gets little work, and what is not asked of it cannot fail.
    wait_until(lambda: all(healed.seen(name)["weight"] == 1 for name in DECODERS), "both take their full share", 60)
    before = healed.incarnation("decode-0")
    began = time.monotonic()
    healed.stop_core("decode-0")
    try:
        with ThreadPoolExecutor(12) as clients:
            bodies = [body_of(f"core stopped {number}", stream=True) for number in range(12)]
            answers = list(clients.map(lambda body: post(healed.url, COMPLETIONS, body), bodies))
        # Those that the stopped one was given wait for its first-token deadline, and no longer.
        assert [answer.status for answer in answers].count(504) >= 3
        assert {answer.status for answer in answers} == {200, 504}
        assert max(answer.end_s for answer in answers) < 12
        healed.wait_explained("decode-0", "is not eligible: ejected")
        print(f"ejected {time.monotonic() - began:.1f} s after its core was stopped")
        assert status(healed.decode.url, "/health") == 200
        assert all(post(healed.url, COMPLETIONS, body_of(f"past it {count}")).status == 200 for count in range(6))
        healed.wait_explained("decode-0", "check generation: fail")
    finally:
        healed.cont_core("decode-0")
    healed.wait_back("decode-0", before)
    serves_well(healed, "after the stop")


@pytest.mark.rule("V11", "V4", "F10")
def test_whole_answers_on_a_core_that_goes_on_after_the_lease(healed: Stack) -> None:
    """Nothing but whole answers, so no deadline of a first token ends them. What the stopped engine goes on with has
    been freed by then: nobody may get its answer."""
    healed.write_fleet(serving={"max_attempts": 2})
    try:
        serves_well(healed, "before whole answers")
        wait_until(lambda: all(healed.seen(name)["weight"] == 1 for name in DECODERS), "both take their full share", 60)
        bodies = [body_of(f"whole {number}") for number in range(8)]
        right = [healed.alone(COMPLETIONS, body) for body in bodies]
        expired = metric(healed.prefill.url, "vllm:nixl_num_kv_expired_reqs_total")
        before = healed.incarnation("decode-0")
        failed = len(healed.events("leg_failed"))
        with ThreadPoolExecutor(len(bodies)) as clients:
            healed.stop_core("decode-0")
            began, began_at = time.monotonic(), time.time()
            try:
                answers = list(clients.map(lambda body: post(healed.url, COMPLETIONS, body), bodies))
                print(f"the last of them was answered after {max(answer.end_s for answer in answers):.1f} s")

                def lease_is_over() -> bool:
                    # An engine that has nothing to do does not look at its leases.
                    text_of(post(healed.prefill.url, COMPLETIONS, body_of(f"others {time.monotonic()}", max_tokens=1)))
                    return metric(healed.prefill.url, "vllm:nixl_num_kv_expired_reqs_total") > expired

                wait_until(lease_is_over, "the producer's lease is over", 2 * KV_LEASE_S)
                print(f"the lease was over {time.monotonic() - began:.1f} s after the core was stopped")
                healed.wait_explained("decode-0", "is not eligible: ejected")
            finally:
                healed.cont_core("decode-0")
        assert [text_of(answer) for answer in answers] == right
        legs = healed.events("leg_failed")[failed:]
        ended = [leg for leg in legs if (leg["engine"], leg["outcome"]) == ("decode-0", "read_timeout")]
        waited_s = [datetime.fromisoformat(leg["timestamp"]).timestamp() - began_at for leg in ended]
        print("\n".join(f"after {s:.1f} s: {leg['detail']}" for s, leg in zip(waited_s, ended, strict=True)))
        assert ended
        assert max(waited_s) < KV_LEASE_S  # however busy the machine was: then they are tried elsewhere
        healed.wait_back("decode-0", before)
        serves_well(healed, "after whole answers")
    finally:
        healed.write_fleet()


@pytest.mark.rule("V6")
@pytest.mark.case("A2")
def test_a_handoff_that_outlived_its_lease_is_not_sent_on(healed: Stack) -> None:
    """The proxy is stopped while the prefill runs, until the lease of what it is given is over: the engine would read
    blocks that are others' by then, and answer 200 with a wrong text."""
    serves_well(healed, "before the lease")
    worker = healed.worker()
    expired = metric(healed.prefill.url, "vllm:nixl_num_kv_expired_reqs_total")
    prefilled = metric(healed.prefill.url, "vllm:request_success_total")
    pulled = healed.transfers()
    blamed = {name: healed.seen(name)["streaks"] for name in healed.engines}
    with ThreadPoolExecutor(1) as client:
        healed.stop_core("prefill-0")
        try:
            asking = client.submit(post, healed.url, COMPLETIONS, body_of("past the lease"))
            wait_until(lambda: metric(healed.admin, "narwhal_inflight") >= 1, "the prefill leg runs", 5)
            time.sleep(0.5)  # for the request to reach the engine: nothing tells, its core being stopped
            os.kill(worker, signal.SIGSTOP)
        finally:
            healed.cont_core("prefill-0")
        try:
            wait_until(
                lambda: metric(healed.prefill.url, "vllm:request_success_total") > prefilled, "prefilled, unread", 20
            )

            def lease_is_over() -> bool:
                # An engine that has nothing to do does not look at its leases.
                text_of(post(healed.prefill.url, COMPLETIONS, body_of(f"others {time.monotonic()}", max_tokens=1)))
                return metric(healed.prefill.url, "vllm:nixl_num_kv_expired_reqs_total") > expired

            wait_until(lease_is_over, "the producer's lease is over", 2 * KV_LEASE_S)
        finally:
            os.kill(worker, signal.SIGCONT)
        answer = asking.result()
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (504, "decode")
    assert healed.events("handoff_expired")
    assert healed.transfers() == pulled
    # What the proxy itself did not do in that time is nobody's fault.
    assert {name: healed.seen(name)["streaks"] for name in healed.engines} == blamed
    until_served(healed, "after the lease")


# --- asked to end -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("V8", "F2")
def test_an_engine_that_is_asked_to_end_with_streams_running(healed: Stack) -> None:
    """It may send a finish reason and the marker, an error, or nothing more: no client takes a part for the whole."""
    tokens = 400
    name = "decode-1"
    before = healed.incarnation(name)
    with ThreadPoolExecutor(8) as clients:
        bodies = [
            body_of(f"asked to end {number}", max_tokens=tokens, ignore_eos=True, stream=number != 7,
                    **({"stream_options": {"include_usage": True}} if number != 7 else {}))
            for number in range(8)
        ]  # fmt: skip
        asking = [clients.submit(post, healed.url, COMPLETIONS, body) for body in bodies]
        wait_until(lambda: running(healed, name) >= 2, "it has streams", 30)
        os.kill(healed.engines[name].pid, signal.SIGTERM)
        answers = [each.result() for each in asking]
    cut = 0
    for answer in answers:
        if answer.status != 200:
            assert answer.status in (502, 504), answer.body
            cut += 1
        elif not answer.is_stream:
            assert json.loads(answer.body)["usage"]["completion_tokens"] == tokens
        elif broken_as_it_must(answer):
            cut += 1
        else:
            assert json.loads(answer.events()[-2])["usage"]["completion_tokens"] == tokens
    assert cut >= 2
    until_served(healed, "beside the ended one")
    healed.wait_explained(name, "is not eligible: ejected")
    healed.relaunch(name)
    healed.wait_back(name, before)


@pytest.mark.rule("R4", "R5")
@pytest.mark.case("H2")
@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_drain_a_restart_and_the_way_back_under_load(healed: Stack, name: str) -> None:
    before = healed.incarnation(name)
    with load(healed) as seen:
        drained = healed.ctl("drain", name, "--wait", "--reason", "new image")
        assert drained.returncode == 0, drained.stderr
        assert drained.stdout.endswith(f"engine {name} is ready to stop\n")
        healed.explain(name)
        refused = healed.ctl("undrain", name, "--wait")
        assert refused.returncode == 1
        assert "not restarted" in refused.stderr
        took = healed.relaunch(name)
        back = healed.ctl("undrain", name, "--wait")
        assert back.returncode == 0, back.stderr
        print(f"restarted in {took:.0f} s\n$ narwhalctl undrain {name} --wait\n{back.stdout}{back.stderr}")
        count = len(seen) + 6
        wait_until(lambda: len(seen) >= count, "load goes on", 60)
    assert set(seen) == {200}
    assert healed.incarnation(name) > before
    serves_well(healed, f"after the drain of {name}")


@pytest.mark.rule("R2", "R8", "H3")
@pytest.mark.case("C9", "G2")
def test_the_whole_fleet_is_restarted(healed: Stack) -> None:
    """Candidates are each other's peers, and nobody has to do anything."""
    before = {name: healed.incarnation(name) for name in healed.engines}
    for name in healed.engines:
        healed.sigkill(name)

    def refused() -> bool:
        answer = post(healed.url, COMPLETIONS, body_of("nobody"))
        if answer.status == 503:
            assert json.loads(answer.body)["error"]["code"] == "no eligible engines"
            assert answer.header("retry-after") == "1"
        return answer.status == 503

    took = wait_until(refused, "503 for want of engines", BACK_S)
    print(f"no eligible engines {took:.1f} s after the kill\n{healed.ctl('status').stdout}")
    healthy = healed.relaunch(*healed.engines)
    back = [healed.wait_back(name, before[name]) for name in healed.engines]
    print(f"healthy {healthy:.0f} s after the start, the last one back {sum(back):.1f} s later")
    serves_well(healed, "after the restart of all")
