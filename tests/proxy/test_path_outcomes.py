"""Which outcome each thing that an engine does is reported as, and what the client gets: rows typed from the spec."""

import asyncio
import itertools
from typing import Any

import pytest

from narwhal.proxy.attempt import FAULTS
from narwhal.proxy.errors import TABLE
from narwhal.proxy.outcome import NEUTRALS, SUCCESSES
from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import sim_engines
from narwhal.sim.text import expected_chat_text, expected_text
from narwhal.vocabulary import Outcome, RequestResult
from tests.proxy.harness import Asked, answer, before, data_path, on_uvloop, placed, prefill_answer, settings, until

FAST: dict[str, dict[str, Any]] = {
    "engine": {"first_token_timeout_s": 0.4, "kv_first_pull_timeout_s": 0.4, "decode_read_timeout_s": 0.4},
    "serving": {"prefill_timeout_s": 0.4},
}


def test_every_outcome_that_can_end_a_request_has_an_answer() -> None:
    ended = set(Outcome) - SUCCESSES - {Outcome.CANCELLED, Outcome.STALLED}
    assert set(FAULTS) == ended
    assert set(FAULTS.values()) <= set(TABLE)
    assert SUCCESSES.isdisjoint(NEUTRALS)


# (fault of the decode engine, its parameters, streaming, outcome, status, code)
DECODE_ROWS: list[tuple[str, dict[str, Any], bool, Outcome, int, str | None]] = [
    ("refuse", {}, False, Outcome.REFUSED, 502, "decode"),
    ("reset-on-accept", {}, False, Outcome.RESET, 502, "decode"),
    ("close-before-answer", {"how": "clean"}, False, Outcome.RESET, 502, "decode"),
    ("close-before-answer", {"how": "reset"}, True, Outcome.RESET, 502, "decode"),
    ("cut-answer", {"after": 20}, False, Outcome.ANSWER_CUT, 502, "decode"),
    ("cut-answer", {"after": 20, "how": "reset"}, False, Outcome.ANSWER_CUT, 502, "decode"),
    ("hang", {}, False, Outcome.READ_TIMEOUT, 504, "decode"),
    ("hang-headers", {}, False, Outcome.READ_TIMEOUT, 504, "decode"),
    ("hang", {}, True, Outcome.FIRST_TOKEN_TIMEOUT, 504, "decode"),
    ("hang-headers", {}, True, Outcome.FIRST_TOKEN_TIMEOUT, 504, "decode"),
    ("core-stopped", {}, True, Outcome.FIRST_TOKEN_TIMEOUT, 504, "decode"),
    ("stall", {"after": 2}, True, Outcome.STREAM_SILENT, 200, None),
    ("cut", {"after": 2}, True, Outcome.STREAM_CUT, 200, None),
    ("cut", {"after": 2, "how": "reset"}, True, Outcome.STREAM_CUT, 200, None),
    ("no-done", {}, True, Outcome.STREAM_CUT, 200, None),
    ("finish-silence", {}, True, Outcome.STREAM_SILENT, 200, None),
    ("done-without-tokens", {}, True, Outcome.MARKER_WITHOUT_TOKEN, 502, "decode"),
    ("error-event", {"after": 0}, True, Outcome.ERROR_EVENT, 502, "decode"),
    ("error-event", {"after": 2}, True, Outcome.ERROR_EVENT, 200, None),
    ("error-event", {"after": 2, "done": False}, True, Outcome.ERROR_EVENT, 200, None),
    ("bad-framing", {"after": 2}, True, Outcome.STREAM_MALFORMED, 200, None),
    ("transfer-fails", {}, True, Outcome.ERROR_EVENT, 502, "decode"),
    ("transfer-fails", {}, False, Outcome.HTTP_5XX, 502, "decode"),
    ("status", {"status": 408}, True, Outcome.HTTP_408, 504, "decode"),
    ("status", {"status": 429}, True, Outcome.HTTP_429, 429, None),
    ("status", {"status": 500}, True, Outcome.HTTP_5XX, 502, "decode"),
    ("status", {"status": 503}, False, Outcome.HTTP_5XX, 502, "decode"),
    ("status", {"status": 401}, False, Outcome.WRONG_IDENTITY, 502, "engine_identity"),
    ("status", {"status": 403}, True, Outcome.WRONG_IDENTITY, 502, "engine_identity"),
    ("wrong-model", {}, True, Outcome.WRONG_IDENTITY, 502, "engine_identity"),
]


@pytest.mark.rule("F2", "R9", "V2")
@pytest.mark.parametrize(
    ("fault", "params", "stream", "outcome", "status", "code"),
    DECODE_ROWS,
    ids=[f"{row[0]}-{next(iter(row[1].values()), '')}-{'stream' if row[2] else 'answer'}" for row in DECODE_ROWS],
)
@on_uvloop
async def test_what_a_decode_engine_does(  # noqa: PLR0917
    fault: str, params: dict[str, Any], stream: bool, outcome: Outcome, status: int, code: str | None
) -> None:
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d", tpot_ms=1.0)) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url}), settings(**FAST)) as path,
    ):
        await d.set_fault(fault, **params)
        got = await path.post(stream=stream, max_tokens=6)
        assert got.status == status
        assert path.reporter.outcomes == [Outcome.HANDOFF, outcome]
        run = path.reporter.legs[-1].run
        assert run is not None
        assert run.failure is not None
        assert (run.engine, run.failure.producer, run.failure.producer_incarnation) == ("d", "p", 1)
        if status == 200:
            assert b"[DONE]" not in got.body
            assert got.body.count(b'"error"') == 1
        else:
            assert got.error["code"] == code
            assert set(got.error) == {"message", "type", "param", "code"}
        for address in (p.url, d.url, "127.0.0.1"):
            assert address.removeprefix("http://") not in got.body.decode()
        assert path.reporter.results == [RequestResult.REJECTED if status == 429 else RequestResult.FAILED]
        await path.at_rest()
        await d.clear_faults()


BAD_HANDOFFS = [
    *("missing", "null", "not-an-object", "empty", "not-json", "only-flag", "wrong-flags"),
    *("no-engine-id", "empty-engine-id", "no-request-id", "no-host", "no-port", "port-not-a-number"),
    *("no-blocks", "blocks-not-lists", "negative-block"),
]
PREFILL_ROWS: list[tuple[str, dict[str, Any], Outcome, int, str | None]] = [
    *(("bad-handoff", {"variant": variant}, Outcome.HANDOFF_UNUSABLE, 502, "prefill") for variant in BAD_HANDOFFS),
    ("hang", {}, Outcome.PREFILL_TIMEOUT, 504, "prefill"),
    ("refuse", {}, Outcome.REFUSED, 502, "prefill"),
    ("cut-answer", {"after": 20}, Outcome.ANSWER_CUT, 502, "prefill"),
    ("status", {"status": 500}, Outcome.HTTP_5XX, 502, "prefill"),
    ("status", {"status": 429}, Outcome.HTTP_429, 429, None),
    ("status", {"status": 404}, Outcome.WRONG_IDENTITY, 502, "engine_identity"),
]


@pytest.mark.case("D2")
@pytest.mark.rule("F2", "V10")
@pytest.mark.parametrize(
    ("fault", "params", "outcome", "status", "code"),
    PREFILL_ROWS,
    ids=[f"{row[0]}-{next(iter(row[1].values()), '')}" for row in PREFILL_ROWS],
)
@on_uvloop
async def test_case_D2_after_a_failed_prefill_the_decode_engine_hears_nothing(
    fault: str, params: dict[str, Any], outcome: Outcome, status: int, code: str | None
) -> None:
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d")) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url}), settings(**FAST)) as path,
    ):
        await p.set_fault(fault, **params)
        got = await path.post(stream=True)
        assert (got.status, got.error["code"]) == (status, code)
        assert path.reporter.outcomes == [outcome]
        assert d.requests() == []
        await path.at_rest()


@pytest.mark.rule("V2")
@pytest.mark.parametrize(("given", "told"), [("7", "7"), ("", "1"), ("soon\x01", "1")])
@on_uvloop
async def test_an_engines_429_keeps_its_own_retry_after(given: str, told: str) -> None:
    async def busy(asked: Asked) -> None:
        asked.send(answer(b"{}", "429 Too Many", f"retry-after: {given}\r\n" if given.isdigit() else ""))

    async with before(busy) as (path, _, _):
        got = await path.post()
        assert (got.status, got.headers["Retry-After"]) == (429, told)
        assert got.error["type"] == "server_overloaded_error"


@pytest.mark.case("A12")
@pytest.mark.rule("F4")
@on_uvloop
async def test_case_A12_a_prompt_that_is_too_long_is_the_prefill_engines_own_400() -> None:
    async with (
        sim_engines(EngineOptions(id="p", max_model_len=64), EngineOptions(id="d", max_model_len=64)) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url})) as path,
    ):
        body = {"model": "sim-model", "prompt": "long " * 400, "max_tokens": 4}
        direct = await path.session.post(p.url + "/v1/completions", json={**body, "max_tokens": 1, "stream": False})
        got = await path.post(body)
        assert got.status == 400
        assert got.body == await direct.read()
        assert d.requests() == []
        assert path.reporter.outcomes == [Outcome.CLIENT_ERROR]
        assert path.reporter.results == [RequestResult.REJECTED]


@pytest.mark.case("A5")
@pytest.mark.rule("F4")
@on_uvloop
async def test_case_A5_a_400_of_the_decode_engine_is_passed_on_and_the_handoff_counted_as_abandoned() -> None:
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d")) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url})) as path,
    ):
        await d.set_fault("status", status=400)
        got = await path.post(stream=True)
        assert got.status == 400
        assert got.error["message"] == "injected status 400"
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.CLIENT_ERROR]
        assert path.reporter.results == [RequestResult.REJECTED]
        assert path.data.metrics.handoffs_abandoned == 1
        assert p.totals()["open"] == 1


@pytest.mark.rule("V5")
@on_uvloop
async def test_answers_are_the_engines_own_and_every_handoff_is_pulled_once() -> None:
    prompt = "the narwhal dives under the ice " * 4
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d", tpot_ms=1.0)) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url})) as path,
    ):
        got = await path.post({"model": "sim-model", "prompt": prompt, "max_tokens": 12})
        assert got.json["choices"][0]["text"] == expected_text(prompt, max_tokens=12)
        messages = [{"role": "user", "content": "how deep?"}]
        chat = {"model": "sim-model", "messages": messages, "max_completion_tokens": 9}
        got = await path.post(chat, route="/v1/chat/completions")
        assert got.json["choices"][0]["message"]["content"] == expected_chat_text(messages, max_tokens=9)
        got = await path.post({**chat, "stream": True}, route="/v1/chat/completions")
        assert got.body.endswith(b"data: [DONE]\n\n")
        await asyncio.gather(*(path.post(stream=bool(number % 2)) for number in range(20)))
        totals = p.totals()
        assert (totals["issued"], totals["pulled"], totals["double_pulls"], totals["late_pulls"]) == (23, 23, 0, 0)
        assert path.data.metrics.handoffs_abandoned == 0
        assert {seen.outcome for seen in path.reporter.legs} == {
            Outcome.HANDOFF,
            Outcome.ANSWER_COMPLETE,
            Outcome.STREAM_COMPLETE,
        }


@pytest.mark.case("A1", "E1")
@pytest.mark.rule("V4", "V5")
@pytest.mark.parametrize("fault", ["hang", "status", "done-without-tokens", "cut-answer"])
@on_uvloop
async def test_case_A1_E1_a_retry_starts_after_the_old_leg_is_closed_with_a_handoff_of_its_own(fault: str) -> None:
    stream = fault != "cut-answer"
    chosen = settings(**(FAST | {"serving": {"max_attempts": 3, "retry_base_s": 0.05}}))
    async with (
        sim_engines(EngineOptions(id="p1"), EngineOptions(id="p2"), EngineOptions(id="d1"), EngineOptions(id="d2")) as (
            p1,
            p2,
            d1,
            d2,
        ),
        data_path(placed({"p1": p1.url, "p2": p2.url}, {"d1": d1.url, "d2": d2.url}), chosen) as path,
    ):
        for engine in (d1, d2):
            await engine.set_fault(fault, count=1)
        prompt = "ice floe " * 12
        got = await path.post({"model": "sim-model", "prompt": prompt, "max_tokens": 5, "stream": stream})
        assert got.status == 200
        text = expected_text(prompt, max_tokens=5)
        if not stream:
            assert got.json["choices"][0]["text"] == text
        assert path.reporter.requests == [(RequestResult.SERVED, 2)]
        decodes = sorted(d1.requests(phase="decode") + d2.requests(phase="decode"), key=lambda r: r["started_at"])
        prefills = p1.requests(phase="prefill") + p2.requests(phase="prefill")
        assert (len(decodes), len(prefills)) == (3, 3)
        ids = [record["body"]["kv_transfer_params"]["remote_request_id"] for record in decodes]
        assert len(set(ids)) == 3, "every attempt has a handoff of its own"
        for earlier, later in itertools.pairwise(decodes):
            assert earlier["ended_at"] is not None
            assert earlier["ended_at"] <= later["started_at"], "at most one attempt of a request runs"
        for engine in (p1, p2):
            assert engine.totals()["double_pulls"] == 0
        assert path.data.metrics.snapshot()["counters"]["retries"] != {}


@pytest.mark.case("A2")
@pytest.mark.rule("V6")
@on_uvloop
async def test_case_A2_an_expired_handoff_is_not_sent() -> None:
    """The connection to the decode engine takes longer to come up than the handoff may age."""
    received = []

    async def decode(asked: Asked) -> None:
        received.append(asked)
        asked.send(answer(b"{}"))

    async def slow_to_place(path: Any) -> None:
        connect = path.data.legs.connect

        async def late(url: str, deadline: float) -> Any:
            made = await connect(url, deadline)
            if url == path.feed.placement.engines["d"].url:
                await asyncio.sleep(0.4)
            return made

        path.data.legs.connect = late

    chosen = settings(serving={"handoff_max_age_s": 0.3})
    async with before(decode, chosen=chosen) as (path, _, _):
        await slow_to_place(path)
        got = await path.post()
        assert (got.status, got.error["code"]) == (504, "decode")
        assert received == []
        assert path.data.metrics.handoffs_abandoned == 1
        assert path.reporter.outcomes == [Outcome.HANDOFF], "no engine is to blame"
        # The connection was not used: it serves the next request, in time.
        assert (await path.post()).status == 200
        await path.at_rest()


@pytest.mark.rule("F5")
@pytest.mark.case("G7")
@on_uvloop
async def test_the_requests_own_deadline_is_nobodys_fault() -> None:
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d")) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url}), settings(serving={"request_timeout_s": 0.5})) as path,
    ):
        for engine, expected in ((d, [Outcome.HANDOFF, Outcome.DEADLINE]), (p, [Outcome.DEADLINE])):
            await engine.set_fault("hang")
            path.reporter.legs.clear()
            started = asyncio.get_running_loop().time()
            got = await path.post(stream=True)
            assert asyncio.get_running_loop().time() - started == pytest.approx(0.5, abs=0.15)
            assert (got.status, got.error["type"], got.error["code"]) == (504, "timeout", "deadline")
            assert path.reporter.outcomes == expected
            assert all(seen.run is None for seen in path.reporter.legs)
            await path.at_rest()


@pytest.mark.case("A15", "F14")
@pytest.mark.rule("V7", "F5")
@pytest.mark.parametrize("where", ["prefill", "before the first token", "mid-stream", "answer", "queue"])
@on_uvloop
async def test_case_A15_F14_a_client_that_leaves_is_cancelled_at_once_wherever_it_was(where: str) -> None:
    chosen = settings(serving={"max_connections": 1, "queue_capacity": 4, "queue_timeout_s": 30})
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d", tpot_ms=1.0)) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url}), chosen) as path,
    ):
        engine = p if where in ("prefill", "queue") else d
        stream = where != "answer"
        await engine.set_fault(
            "stall" if where == "mid-stream" else "hang", **({"after": 2} if where == "mid-stream" else {})
        )
        body = {"model": "sim-model", "prompt": "narwhal " * 8, "max_tokens": 9, "stream": stream}
        tasks = [asyncio.create_task(path.post(body))]
        await until(lambda: any(r["phase"] in ("prefill", "decode") for r in engine.requests()))
        if where == "queue":
            tasks.append(asyncio.create_task(path.post(body)))
            await until(lambda: path.data.admission.waiting == 1)
            tasks[1].cancel()
            await until(lambda: path.data.admission.waiting == 0, within_s=0.2)
            assert path.reporter.results == [RequestResult.CANCELLED]
            assert path.data.admission.taken == 1
        elif where == "mid-stream":
            await until(lambda: path.data.metrics.ttft_seconds.total)
        loop = asyncio.get_running_loop()
        left_at = loop.time()
        tasks[0].cancel()
        await until(lambda: engine.requests()[-1]["outcome"] == "disconnected", within_s=1.0)
        assert loop.time() - left_at < 0.2
        await path.at_rest()
        await until(lambda: len(path.reporter.results) == len(tasks))
        assert set(path.reporter.results) == {RequestResult.CANCELLED}
        assert path.reporter.outcomes[-1] is Outcome.CANCELLED
        assert all(seen.run is None for seen in path.reporter.legs)
        if engine is p:
            assert d.requests() == [], "no decode leg for a client that has gone"
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.case("A15")
@pytest.mark.rule("V7")
@on_uvloop
async def test_case_A15_the_client_leaves_between_the_legs() -> None:
    """The client's end and the prefill's answer come in the same moment: still no decode leg."""
    asked_decode = []
    leave: list[asyncio.StreamWriter] = []

    async def prefill(asked: Asked) -> None:
        await until(lambda: leave)
        leave[0].transport.abort()
        await asyncio.sleep(0)
        asked.send(prefill_answer())

    async def decode(asked: Asked) -> None:
        asked_decode.append(asked)

    async with before(decode, prefill) as (path, _, _):
        for _ in range(20):
            leave.clear()
            body = b'{"model": "sim-model", "prompt": "a", "stream": true}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            _, writer = await path.raw(head + body)
            leave.append(writer)
            done = len(path.reporter.results)
            await path.one_more(done)
            await path.at_rest()
        assert set(path.reporter.results) == {RequestResult.CANCELLED}
        assert asked_decode == []
