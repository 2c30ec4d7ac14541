"""Each fault of a simulated engine as a client on the wire sees it."""

from collections.abc import Callable
from typing import Any

import pytest

from narwhal.sim.testing import SimEngine, sim_engine
from narwhal.sim.text import expected_chat_text, expected_text
from tests.sim.legs import CHAT, COMPLETIONS, LONG, PREFILL_PARAMS, chat, prefill, prompt
from tests.sim.raw import Answer, ask

TIMES: dict[str, Any] = {"tpot_ms": 1.0, "prefill_base_ms": 1.0, "core_death_s": 0.3, "shutdown_s": 0.3}
SHORT_S = 0.4  # how long a test waits to call something silent


async def stream_of(engine: SimEngine, timeout_s: float = 20.0, **more: Any) -> Answer:
    return await ask(engine.url, "POST", COMPLETIONS, prompt(stream=True, **more), timeout_s=timeout_s)


async def whole_of(engine: SimEngine, timeout_s: float = 20.0, **more: Any) -> Answer:
    return await ask(engine.url, "POST", COMPLETIONS, prompt(**more), timeout_s=timeout_s)


def tokens(answer: Answer) -> int:
    return sum(len(event["choices"]) for event in answer.events if isinstance(event, dict) and "choices" in event)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"status": 400}, "BadRequestError"),
        ({"status": 401}, "AuthenticationError"),
        ({"status": 403}, "PermissionDeniedError"),
        ({"status": 404}, "NotFoundError"),
        ({"status": 408}, "BadRequestError"),
        ({"status": 429, "retry_after": "7"}, "RateLimitError"),
        ({"status": 500}, "InternalServerError"),
        ({"status": 503, "retry_after": "2"}, "InternalServerError"),
    ],
)
async def test_any_status(params: dict[str, Any], kind: str) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("status", **params, count=2)
        for ask_one in (whole_of, stream_of):
            answer = await ask_one(engine)
            assert (answer.status, answer.json["error"]["type"]) == (params["status"], kind)
            assert answer.headers.get("retry-after") == params.get("retry_after")
        assert (await whole_of(engine)).status == 200
        assert (await ask(engine.url, "GET", "/health")).status == 200


async def test_a_status_for_everything() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("status", status=403, everything=True)
        for path in ("/health", "/v1/models", "/metrics", "/version"):
            assert (await ask(engine.url, "GET", path)).status == 403
        assert (await ask(engine.url, "GET", "/sim/state")).status == 200


@pytest.mark.parametrize("phase", ["prefill", "decode", "local", "tokenize"])
async def test_a_fault_of_one_phase(phase: str) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("status", status=418, phase=phase)
        local = prompt(max_tokens=1)
        handoff = {**PREFILL_PARAMS, "do_remote_decode": False, "do_remote_prefill": True}
        asked = {
            "tokenize": ("/tokenize", {"prompt": "a"}),
            "local": (COMPLETIONS, local),
            "prefill": (COMPLETIONS, {**local, "kv_transfer_params": PREFILL_PARAMS}),
            "decode": (COMPLETIONS, {**local, "kv_transfer_params": handoff}),  # last: it kills the engine otherwise
        }
        hit = [
            name for name, (path, body) in asked.items() if (await ask(engine.url, "POST", path, body)).status == 418
        ]
        assert hit == [phase]


async def test_hang_before_the_headers() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("hang")
        answer = await stream_of(engine, timeout_s=SHORT_S)
        assert (answer.end, answer.status) == ("silent", None)
        await engine.wait_for(lambda e: e.requests()[0]["outcome"] == "disconnected")


async def test_delay_before_the_headers() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("delay", seconds=0.4)
        answer = await stream_of(engine)
        assert answer.headers_s is not None
        assert answer.headers_s >= 0.4
        assert answer.text == expected_text(LONG, 12)


@pytest.mark.parametrize(("how", "end"), [("clean", "cut"), ("reset", "reset")])
async def test_close_before_an_answer(how: str, end: str) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("close-before-answer", how=how)
        answer = await whole_of(engine)
        assert (answer.end, answer.status, answer.segments) == (end, None, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_after_the_headers(stream: bool) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("hang-headers")
        answer = await whole_of(engine, timeout_s=SHORT_S, stream=stream)
        assert (answer.end, answer.status, answer.body) == ("silent", 200, b"")


@pytest.mark.parametrize("stream", [False, True])
async def test_slow_first_token(stream: bool) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("slow-first-token", seconds=0.5)
        answer = await whole_of(engine, stream=stream)
        assert answer.headers_s is not None
        assert answer.end_s - answer.headers_s > 0.4
        assert answer.text == expected_text(LONG, 12)


@pytest.mark.parametrize(("how", "end"), [("clean", "cut"), ("reset", "reset")])
async def test_a_whole_answer_cut_short(how: str, end: str) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("cut-answer", after=25, how=how)
        answer = await whole_of(engine)
        assert (answer.end, answer.status) == (end, 200)
        assert len(answer.body) == 25 or how == "reset"
        assert int(answer.headers["content-length"]) > 100


async def test_stall_in_the_stream() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("stall", after=4)
        answer = await stream_of(engine, timeout_s=SHORT_S)
        assert (answer.end, tokens(answer)) == ("silent", 4)
        await engine.set_fault("stall", after=4, seconds=0.3)
        answer = await stream_of(engine)
        assert (answer.end, answer.text) == ("complete", expected_text(LONG, 12))
        gaps = [after - before for before, after in zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False)]
        assert max(gaps) >= 0.25


@pytest.mark.parametrize(("how", "end"), [("clean", "cut"), ("reset", "reset")])
@pytest.mark.parametrize("after", [0, 3])
async def test_cut_in_the_stream(after: int, how: str, end: str) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("cut", after=after, how=how)
        answer = await stream_of(engine)
        assert (answer.end, answer.status) == (end, 200)
        assert tokens(answer) == after or how == "reset"
        assert "[DONE]" not in answer.events
        assert engine.requests()[0]["outcome"] == "faulted"


@pytest.mark.parametrize(("after", "sent"), [(-1, 12), (5, 5)])
async def test_an_end_without_the_marker(after: int, sent: int) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("no-done", after=after)
        answer = await stream_of(engine)
        assert (answer.end, tokens(answer)) == ("complete", sent)
        assert "[DONE]" not in answer.events


async def test_a_finish_reason_and_then_silence() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("finish-silence")
        answer = await stream_of(engine, timeout_s=SHORT_S)
        assert answer.end == "silent"
        assert answer.events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("after", [0, 4])
async def test_an_error_event(after: int, done: bool) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("error-event", after=after, done=done, code=503)
        answer = await stream_of(engine)
        assert (answer.end, answer.status, tokens(answer)) == ("complete", 200, after)
        assert answer.error is not None
        assert answer.error["code"] == 503
        assert (answer.events[-1] == "[DONE]") is done


async def test_a_marker_without_tokens() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("done-without-tokens")
        answer = await stream_of(engine)
        assert (answer.end, answer.events) == ("complete", ["[DONE]"])


async def test_broken_framing() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("bad-framing", after=2)
        answer = await stream_of(engine)
        assert (answer.end, answer.status, tokens(answer)) == ("malformed", 200, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_byte_in_a_segment_of_its_own(stream: bool) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("dribble", gap_ms=1)
        answer = await whole_of(engine, max_tokens=4, stream=stream)
        assert (answer.end, answer.text) == ("complete", expected_text(LONG, 4))
        assert max(map(len, answer.segments)) < len(b"".join(answer.segments)) / 4
        assert len(answer.segments) > 100


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
async def test_chunks_of_any_size_carry_the_same_bytes(size: int) -> None:
    async with sim_engine(**TIMES) as engine:
        headers = {"X-Request-Id": "same"}
        body = chat(stream=True, max_tokens=30)
        plain = await ask(engine.url, "POST", CHAT, body, headers=headers)
        await engine.set_fault("dribble", segment=0, chunk=size)
        bent = await ask(engine.url, "POST", CHAT, body, headers=headers)
        assert bent.text == plain.text == expected_chat_text(body["messages"], 30)
        sizes = {line for line in b"".join(bent.segments).split(b"\r\n") if line == b"%x" % size}
        assert sizes == {b"%x" % size}
        # `created` may differ by a second between the two
        assert [len(event) for event in bent.events] == [len(event) for event in plain.events]


async def test_slow_tokens() -> None:
    async with sim_engine(tpot_ms=10.0, prefill_base_ms=0.0) as engine:
        await engine.set_fault("slow-tokens", factor=5)
        answer = await stream_of(engine, max_tokens=11)
        assert answer.end_s >= 0.5


HANDOFF_FAULTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "missing": lambda body: "kv_transfer_params" not in body,
    "null": lambda body: body["kv_transfer_params"] is None,
    "not-an-object": lambda body: body["kv_transfer_params"] == "garbage",
    "empty": lambda body: body["kv_transfer_params"] == {},
    "only-flag": lambda body: body["kv_transfer_params"] == {"do_remote_prefill": True},
    "wrong-flags": lambda body: body["kv_transfer_params"]["do_remote_decode"] is True,
    "push": lambda body: body["kv_transfer_params"]["transfer_mode"] == "push",
    "no-engine-id": lambda body: "remote_engine_id" not in body["kv_transfer_params"],
    "empty-engine-id": lambda body: body["kv_transfer_params"]["remote_engine_id"] == "",
    "no-request-id": lambda body: "remote_request_id" not in body["kv_transfer_params"],
    "wrong-request-id": lambda body: "nobody" in body["kv_transfer_params"]["remote_request_id"],
    "no-host": lambda body: "remote_host" not in body["kv_transfer_params"],
    "no-port": lambda body: "remote_port" not in body["kv_transfer_params"],
    "port-not-a-number": lambda body: body["kv_transfer_params"]["remote_port"] == "http",
    "no-blocks": lambda body: "remote_block_ids" not in body["kv_transfer_params"],
    "blocks-not-lists": lambda body: body["kv_transfer_params"]["remote_block_ids"] == [5, 6],
    "negative-block": lambda body: body["kv_transfer_params"]["remote_block_ids"] == [[-1]],
    "few-blocks": lambda body: len(body["kv_transfer_params"]["remote_block_ids"][0]) == 3,
}


@pytest.mark.parametrize("variant", list(HANDOFF_FAULTS))
async def test_unusable_handoffs(variant: str) -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("bad-handoff", variant=variant, count=1)
        body = {**prompt(max_tokens=1), "kv_transfer_params": PREFILL_PARAMS}
        answer = await ask(engine.url, "POST", COMPLETIONS, body)
        assert answer.status == 200
        assert HANDOFF_FAULTS[variant](answer.json)
        good = await prefill(engine.url, prompt())
        assert len(good["remote_block_ids"][0]) == 4


async def test_a_handoff_that_is_no_json() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("bad-handoff", variant="not-json")
        answer = await ask(engine.url, "POST", COMPLETIONS, {**prompt(), "kv_transfer_params": PREFILL_PARAMS})
        assert (answer.status, answer.body[:1]) == (200, b"<")


async def test_health_in_its_variants() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("health-hang")
        assert (await ask(engine.url, "GET", "/health", timeout_s=SHORT_S)).end == "silent"
        await engine.clear_faults()
        await engine.set_fault("health-slow", seconds=0.3)
        slow = await ask(engine.url, "GET", "/health")
        assert (slow.status, slow.end_s >= 0.3) == (200, True)
        await engine.clear_faults()
        for status in (404, 503):
            await engine.set_fault("health-status", status=status)
            assert (await ask(engine.url, "GET", "/health")).status == status
            assert (await whole_of(engine)).status == 200


async def test_another_model() -> None:
    async with sim_engine(model="mine", **TIMES) as engine:
        await engine.set_fault("wrong-model", model="theirs")
        assert (await ask(engine.url, "GET", "/v1/models")).json["data"][0]["id"] == "theirs"
        assert (await whole_of(engine, model="mine")).status == 404
        await engine.clear_faults()
        assert (await whole_of(engine, model="mine")).status == 200
