"""KV transfers between simulated engines: each row of the engine protocol's table that a handoff decides."""

import asyncio
from typing import Any

import pytest

from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import SimEngine, sim_engine, sim_engines
from narwhal.sim.text import expected_chat_text, expected_text
from tests.metronome import Metronome
from tests.sim.legs import LONG, chat, decode, prefill, prompt
from tests.sim.raw import Answer, ask, refused

SLOW_S = 20.0


def options(name: str, **more: Any) -> EngineOptions:
    times = {"tpot_ms": 1.0, "prefill_base_ms": 1.0, "first_pull_s": 0.001, "core_death_s": 0.1}
    return EngineOptions(id=name, **{**times, **more})


def failed(answer: Answer) -> bool:
    """Whether a decode leg failed as the engine shows it: 500, or on a stream 200, an error event and the marker."""
    if answer.status == 500:
        return bool(answer.json["error"]["code"] == 500)
    *_, error, marker = answer.events
    return answer.status == 200 and answer.end == "complete" and error["error"]["code"] == 500 and marker == "[DONE]"


async def serves(engine: SimEngine) -> None:
    """That an engine is well: it is healthy and completes on its own."""
    assert (await ask(engine.url, "GET", "/health")).status == 200
    answer = await ask(engine.url, "POST", "/v1/completions", {"prompt": "well?", "max_tokens": 3})
    assert (answer.status, answer.text) == (200, expected_text("well?", 3))


async def metric(engine: SimEngine, name: str) -> float:
    text = (await ask(engine.url, "GET", "/metrics")).body.decode()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))


async def dies(engine: SimEngine) -> None:
    """That an engine's process ends: errors for a moment, then connections are refused."""
    await engine.wait_for(lambda e: e.state()["life"] == "down", timeout_s=SLOW_S)
    await refused(engine.url)


async def test_a_handoff_has_every_field_of_the_recording() -> None:
    async with sim_engine(engine_id="prefill-0", block_size=32) as producer:
        handoff = await prefill(producer.url, prompt("x" * 4 * 139), request_id="1111")
        assert handoff.pop("remote_request_id").startswith("cmpl-1111-0-")
        assert isinstance(handoff.pop("remote_port"), int)
        (blocks,) = handoff.pop("remote_block_ids")
        assert len(blocks) == 5
        assert handoff == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "prefill-0",
            "remote_host": "127.0.0.1",
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 139,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }
        said = await prefill(producer.url, chat(), request_id="2222")
        assert said["remote_request_id"].startswith("chatcmpl-2222-")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [prompt(), chat(), prompt("short")])
async def test_both_legs_give_the_right_text_and_one_pull(body: dict[str, Any], stream: bool) -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, body, request_id="req")
        answer = await decode(consumer.url, {**body, "stream": stream}, handoff)
        right = expected_chat_text(body["messages"], 12) if "messages" in body else expected_text(body["prompt"], 12)
        assert (answer.status, answer.end, answer.text) == (200, "complete", right)
        (entry,) = producer.ledger()["handoffs"]
        assert (entry["id"], entry["request_id"]) == (handoff["remote_request_id"], "req")
        assert (entry["state"], entry["pulled_by"], entry["late_pulls"], entry["double_pulls"]) == (
            "freed",
            ["d"],
            0,
            0,
        )
        assert consumer.state()["transfers"] == {"ok": 1, "failed": 0}
        assert [record["phase"] for record in producer.requests()] == ["prefill"]
        assert [record["phase"] for record in consumer.requests()] == ["decode"]


async def test_a_short_prompt_may_come_without_blocks() -> None:
    empty = options("p", empty_short_handoffs=True), options("d", empty_short_handoffs=True)
    async with sim_engines(*empty) as (producer, consumer):
        handoff = await prefill(producer.url, prompt("short"))
        assert handoff["remote_block_ids"] == []
        assert (await decode(consumer.url, prompt("short"), handoff)).text == expected_text("short", 12)


async def test_the_text_is_that_of_the_kv_that_was_read() -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        other = LONG.replace("narwhal", "walruss")
        handoff = await prefill(producer.url, prompt(other))
        assert (await decode(consumer.url, prompt(), handoff)).text == expected_text(other, 12)


async def test_a_handoff_used_twice_gives_a_wrong_text_and_is_counted() -> None:
    async with sim_engines(options("p"), options("d"), options("e")) as (producer, first, second):
        handoff = await prefill(producer.url, prompt())
        await decode(first.url, prompt(), handoff)
        again = await decode(second.url, prompt(), handoff)
        assert again.status == 200
        assert again.text != expected_text(LONG, 12)
        assert producer.totals()["double_pulls"] == 1
        assert producer.ledger()["handoffs"][0]["pulled_by"] == ["d", "e"]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_reads_the_handoff_and_only_the_first_finds_it(stream: bool) -> None:
    """As on an engine that has no room for all of them at once."""
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        answer = await decode(consumer.url, prompt(n=3, stream=stream), handoff)
        texts = ["", "", ""]
        for part in [event for event in answer.events if event != "[DONE]"] if stream else [answer.json]:
            for choice in part["choices"]:
                texts[choice["index"]] += choice["text"]
        right = [text == expected_text(LONG, 12, index=at) for at, text in enumerate(texts)]
        assert right == [True, False, False]
        totals = producer.totals()
        assert (totals["pulled"], totals["double_pulls"], totals["open"]) == (3, 2, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("known", [False, True])
async def test_the_producer_is_dead(stream: bool, known: bool) -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        if known:
            await decode(consumer.url, prompt("before"), await prefill(producer.url, prompt("before")))
        handoff = await prefill(producer.url, prompt())
        await producer.kill()
        answer = await decode(consumer.url, prompt(stream=stream), handoff)
        assert failed(answer)
        assert answer.status == (200 if stream else 500)
        assert answer.end_s < 4.0  # the host refuses: at once, not after the handshake's 5 s
        await serves(consumer)
        assert await metric(consumer, "vllm:nixl_num_failed_transfers_total") == 1.0


async def test_a_failed_chat_says_its_role_before_the_error() -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, chat())
        await producer.kill()
        answer = await decode(consumer.url, chat(stream=True), handoff)
        role, error, marker = answer.events
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert (error["error"]["code"], marker) == (500, "[DONE]")


async def test_headers_come_before_the_transfer() -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        await consumer.set_fault("first-transfer-slow", seconds=0.5)
        answer = await decode(consumer.url, prompt(stream=True), await prefill(producer.url, prompt()))
        assert answer.headers_s is not None
        assert answer.end_s - answer.headers_s > 0.4
        assert answer.text == expected_text(LONG, 12)


async def test_a_producer_that_answers_no_handshake_fails_after_its_timeout() -> None:
    async with sim_engines(options("p"), options("d", handshake_timeout_s=0.3)) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        await producer.set_fault("frozen")
        answer = await decode(consumer.url, prompt(), handoff)
        assert failed(answer)
        assert answer.end_s >= 0.3
        await serves(consumer)


async def test_a_host_whose_name_does_not_resolve_fails_after_its_timeout() -> None:
    async with sim_engines(options("p"), options("d", resolve_timeout_s=0.4)) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        answer = await decode(consumer.url, prompt(), {**handoff, "remote_host": "nowhere.invalid"})
        assert failed(answer)
        assert answer.end_s >= 0.4
        await serves(consumer)


async def test_a_producer_stopped_while_the_consumer_pulls_delays_only_that() -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        await decode(consumer.url, prompt("before"), await prefill(producer.url, prompt("before")))
        handoff = await prefill(producer.url, prompt())
        await producer.set_fault("frozen", for_s=1.0)
        leg = asyncio.create_task(decode(consumer.url, prompt(stream=True), handoff))
        await consumer.wait_for(lambda e: e.state()["in_flight"] == 1)
        await serves(consumer)
        answer = await leg
        assert answer.text == expected_text(LONG, 12)
        assert answer.headers_s is not None
        assert answer.end_s - answer.headers_s > 0.5


@pytest.mark.parametrize("fixed", [False, True])
async def test_a_producer_that_restarted_under_the_same_engine_id_poisons_its_peers(fixed: bool) -> None:
    producer_options = options("p", engine_id="same" if fixed else None)
    async with sim_engines(producer_options, options("d")) as (producer, consumer):
        await decode(consumer.url, prompt("before"), await prefill(producer.url, prompt("before")))
        await producer.restart()
        for _ in range(5):
            answer = await decode(consumer.url, prompt(), await prefill(producer.url, prompt()))
            assert failed(answer) if fixed else answer.text == expected_text(LONG, 12)
        await serves(producer)
        await serves(consumer)
        await consumer.restart()
        healed = await decode(consumer.url, prompt(), await prefill(producer.url, prompt()))
        assert healed.text == expected_text(LONG, 12)


async def test_a_handoff_of_a_process_before_is_not_served_by_the_next() -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        await producer.restart()
        assert failed(await decode(consumer.url, prompt(), handoff))
        assert producer.totals()["lost"] == 1
        await serves(consumer)


@pytest.mark.parametrize("stream", [False, True])
async def test_recompute_gives_the_right_text_without_the_producer(stream: bool) -> None:
    async with sim_engines(options("p"), options("d", kv_load_failure_policy="recompute")) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        await producer.kill()
        answer = await decode(consumer.url, prompt(stream=stream), handoff)
        assert (answer.status, answer.text) == (200, expected_text(LONG, 12))
        assert consumer.state()["transfers"] == {"ok": 0, "failed": 1}


async def test_an_expired_handoff_gives_200_and_a_wrong_text() -> None:
    async with sim_engines(options("p", kv_lease_s=0.2), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        await producer.wait_for(lambda e: e.totals()["expired"] == 1)
        answer = await decode(consumer.url, prompt(stream=True), handoff)
        assert (answer.status, answer.events[-1], answer.error) == (200, "[DONE]", None)
        assert answer.text != expected_text(LONG, 12)
        assert producer.totals()["late_pulls"] == 1
        assert await metric(producer, "vllm:nixl_num_kv_expired_reqs_total") == 1.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        "only the flag",
        "no engine id",
        "empty engine id",
        "fewer blocks",
        "no blocks",
        "negative block",
        "no host",
        "no port",
    ],
)
async def test_a_handoff_that_kills_the_engine_that_receives_it(how: str, stream: bool) -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        blocks = handoff["remote_block_ids"][0]
        bad: dict[str, dict[str, Any]] = {
            "only the flag": {"do_remote_prefill": True},
            "no engine id": {key: value for key, value in handoff.items() if key != "remote_engine_id"},
            "empty engine id": {**handoff, "remote_engine_id": ""},
            "fewer blocks": {**handoff, "remote_block_ids": [blocks[:1]]},
            "no blocks": {**handoff, "remote_block_ids": []},
            "negative block": {**handoff, "remote_block_ids": [[-1] * len(blocks)]},
            "no host": {key: value for key, value in handoff.items() if key != "remote_host"},
            "no port": {key: value for key, value in handoff.items() if key != "remote_port"},
        }
        bystander = asyncio.create_task(
            ask(consumer.url, "POST", "/v1/completions", prompt(max_tokens=9000, stream=True))
        )
        await consumer.wait_for(lambda e: e.state()["in_flight"] == 1)
        assert failed(await decode(consumer.url, prompt(stream=stream), bad[how]))
        assert failed(await bystander)
        await dies(consumer)
        await serves(producer)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_the_request_id_it_hangs_and_kills_at_disconnect(stream: bool) -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        del handoff["remote_request_id"]
        answer = await decode(consumer.url, prompt(stream=stream), handoff, timeout_s=0.5)
        assert (answer.end, answer.body) == ("silent", b"")
        await dies(consumer)


@pytest.mark.parametrize("left_out", ["tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode"])
async def test_fields_that_the_engine_can_do_without(left_out: str) -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        del handoff[left_out]
        assert (await decode(consumer.url, prompt(), handoff)).text == expected_text(LONG, 12)


@pytest.mark.parametrize(
    "wrong",
    [{"remote_request_id": "cmpl-nobody-0-00000000"}, {"transfer_mode": "push"}, {"remote_engine_id": "nobody"}],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_handoffs_that_fail_and_let_the_engine_live(wrong: dict[str, str], stream: bool) -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, prompt())
        assert failed(await decode(consumer.url, prompt(stream=stream), {**handoff, **wrong}))
        await serves(consumer)
        assert (await decode(consumer.url, prompt(), handoff)).text == expected_text(LONG, 12)


@pytest.mark.parametrize("params", ["garbage", [1]])
async def test_what_is_no_object_is_400(params: Any) -> None:
    async with sim_engine() as consumer:
        answer = await decode(consumer.url, prompt(), params)
        assert answer.status == 400
        assert "body.kv_transfer_params" in answer.json["error"]["message"]
        await serves(consumer)


@pytest.mark.parametrize("params", [{}, {"unknown": 1}, None])
async def test_an_empty_handoff_is_recomputed_here(params: Any) -> None:
    async with sim_engine() as consumer:
        assert (await decode(consumer.url, prompt(), params)).text == expected_text(LONG, 12)


async def test_at_home_it_is_answered_and_the_blocks_stay_pinned() -> None:
    async with sim_engine(kv_lease_s=1.0) as producer:
        handoff = await prefill(producer.url, prompt())
        answer = await decode(producer.url, prompt(), handoff)
        assert answer.text == expected_text(LONG, 12)
        assert (producer.totals()["pulled"], producer.totals()["freed"]) == (0, 0)
        await producer.wait_for(lambda e: e.totals()["expired"] == 1)


async def test_at_home_it_may_fail_too() -> None:
    async with sim_engine(home_handoffs="fail") as producer:
        assert failed(await decode(producer.url, prompt(), await prefill(producer.url, prompt())))
        assert producer.totals()["open"] == 1
        await serves(producer)


async def test_a_pair_that_cannot_transfer_leaves_other_pairs_alone() -> None:
    async with sim_engines(options("p0"), options("p1"), options("d")) as (first, second, consumer):
        await consumer.set_fault("transfer-fails", peer="p0")
        assert failed(await decode(consumer.url, prompt(), await prefill(first.url, prompt())))
        right = await decode(consumer.url, prompt(), await prefill(second.url, prompt()))
        assert right.text == expected_text(LONG, 12)
        await serves(first)
        await serves(consumer)


async def test_a_producer_that_serves_nobody_fails_every_consumer() -> None:
    async with sim_engines(options("p"), options("d0"), options("d1")) as (producer, first, second):
        await producer.set_fault("serve-fails")
        for consumer in (first, second):
            assert failed(await decode(consumer.url, prompt(), await prefill(producer.url, prompt())))
        await producer.set_fault("serve-fails", peer="d1")
        await producer.clear_faults()
        await producer.set_fault("serve-fails", peer="d1")
        answers = [await decode(c.url, prompt(), await prefill(producer.url, prompt())) for c in (first, second)]
        assert [failed(answer) if answer.status == 500 else answer.text for answer in answers] == [
            expected_text(LONG, 12),
            True,
        ]


async def test_the_first_transfer_of_a_pair_fails_and_later_ones_work() -> None:
    async with sim_engines(options("p0"), options("p1"), options("d")) as (first, second, consumer):
        await consumer.set_fault("first-transfer-fails")
        for producer in (first, second):
            assert failed(await decode(consumer.url, prompt(), await prefill(producer.url, prompt())))
            again = await decode(consumer.url, prompt(), await prefill(producer.url, prompt()))
            assert again.text == expected_text(LONG, 12)


async def test_the_first_transfer_of_two_processes_takes_a_handshake() -> None:
    async with sim_engines(options("p"), options("d", first_pull_s=0.6)) as (producer, consumer):
        first = await decode(consumer.url, prompt(), await prefill(producer.url, prompt()))
        assert first.end_s >= 0.6
        with Metronome() as metronome:
            second = await decode(consumer.url, prompt(), await prefill(producer.url, prompt()))
        assert second.end_s - metronome.total_s < 0.3
        await consumer.restart()
        fresh = await decode(consumer.url, prompt(), await prefill(producer.url, prompt()))
        assert fresh.end_s >= 0.6


async def test_a_prefill_of_several_choices_pins_kv_that_nobody_is_told_of() -> None:
    async with sim_engines(options("p"), options("d")) as (producer, consumer):
        handoff = await prefill(producer.url, prompt(n=3))
        answer = await decode(consumer.url, prompt(), handoff)
        assert (answer.status, answer.text) == (200, expected_text(LONG, 12))
        totals = producer.totals()
        assert (totals["issued"], totals["freed"], totals["open"]) == (3, 1, 2)
