"""Attempts, their budget and the deadline over all of them, on real sockets (spec V3, V4; field cases E2, E7)."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from narwhal.vocabulary import Outcome, Phase, RequestResult
from tests.metronome import Metronome
from tests.proxy.harness import (
    DONE,
    LAST,
    MODEL,
    STREAM_HEAD,
    Asked,
    answer,
    answers,
    before,
    chunk,
    data_path,
    full_listener,
    on_uvloop,
    placed,
    prefills,
    scripted,
    settings,
    until,
)

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
SAID = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
ERROR_EVENT = b'data: {"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}}\n\n'
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "dive"}], "stream": True}


@pytest.mark.rule("V4")
@on_uvloop
async def test_a_chat_that_only_said_who_speaks_is_tried_again() -> None:
    async def transfer_fails(asked: Asked) -> None:
        asked.send(STREAM_HEAD, chunk(ROLE), chunk(ERROR_EVENT), chunk(DONE), LAST)

    async def well(asked: Asked) -> None:
        asked.send(STREAM_HEAD, chunk(ROLE), chunk(SAID), chunk(DONE), LAST)

    chosen = settings(serving={"max_attempts": 2, "retry_base_s": 0.01})
    async with scripted(prefills) as p, scripted(transfer_fails) as bad, scripted(well) as good:
        path_of = data_path(placed({"p": p.url}, {"bad": bad.url, "good": good.url}), chosen)
        async with path_of as path:
            while not bad.asked:
                got = await path.post(CHAT, route="/v1/chat/completions")
                assert got.body == ROLE + SAID + DONE
            assert Outcome.ERROR_EVENT in path.reporter.outcomes
            assert set(path.reporter.results) == {RequestResult.SERVED}
            assert path.data.metrics.retries[Outcome.ERROR_EVENT.value,] == 1


@pytest.mark.rule("V4")
@on_uvloop
async def test_without_another_attempt_the_client_gets_a_plain_error() -> None:
    async def transfer_fails(asked: Asked) -> None:
        asked.send(STREAM_HEAD, chunk(ROLE), chunk(ERROR_EVENT), chunk(DONE), LAST)

    async with before(transfer_fails) as (path, _, _):
        got = await path.post(CHAT, route="/v1/chat/completions")
        assert (got.status, got.error["type"], got.error["code"]) == (502, "upstream_error", "decode")


@pytest.mark.case("E7")
@pytest.mark.rule("V3")
@on_uvloop
async def test_case_E7_when_half_of_all_legs_fail_the_retry_budget_runs_out() -> None:
    draws, requests, credits, share = random.Random(7), 300, 10, 0.1

    async def half(asked: Asked) -> None:
        if draws.random() < 0.5:
            asked.send(answer(b"{}", "500 Oops"))
        elif b'"do_remote_decode":true' in asked.body:
            await prefills(asked)
        else:
            await answers(asked)

    serving = {
        "max_attempts": 3,
        "retry_base_s": 0.001,
        "retry_cap_s": 0.001,
        "retry_budget": credits,
        "retry_replenish": share,
    }
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted(half)) for _ in range(4)]
        p1, p2, d1, d2 = (engine.url for engine in engines)
        placement = placed({"p1": p1, "p2": p2}, {"d1": d1, "d2": d2})
        path = await stack.enter_async_context(data_path(placement, settings(serving=serving)))
        statuses: list[int] = []
        numbers = iter(range(requests))

        async def client() -> None:
            for _ in numbers:
                statuses.append((await path.post()).status)

        await asyncio.gather(*(client() for _ in range(8)))
        served, offered = statuses.count(200), len(engines[0].asked) + len(engines[1].asked)
        assert set(statuses) == {200, 502}
        assert len(statuses) == requests
        assert path.data.metrics.retries_denied > 0
        # Prefills count the attempts: one for each request, and one for each credit there was.
        assert requests < offered <= requests + credits + share * served
        assert offered - requests == sum(path.data.metrics.retries.values())
        await path.at_rest()
        # Healthy again, credit comes back with successes.
        draws.random = lambda: 1.0  # type: ignore[method-assign]
        before_s = path.data._shared.budget.credits
        for _ in range(20):
            assert (await path.post()).status == 200
        assert path.data._shared.budget.credits == pytest.approx(min(credits, before_s + 20 * share))


DEADLINE_S = 0.7


@pytest.mark.case("E2")
@pytest.mark.rule("V3")
@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("where", ["connecting", "prefill", "answer", "stream", "backoff"])
@on_uvloop
async def test_case_E2_every_engine_hangs_and_the_deadline_holds(where: str, attempts: int) -> None:
    async def hangs(asked: Asked) -> None:
        await asked.gone.wait()

    async def fails(asked: Asked) -> None:
        asked.send(answer(b"{}", "500 Oops"))

    serving = {"request_timeout_s": DEADLINE_S, "max_attempts": attempts}
    if where == "backoff":  # waits that do not fit are not begun
        serving |= {"retry_base_s": 0.5, "retry_cap_s": 5.0}
    async with AsyncExitStack() as stack:
        chosen = settings(serving=serving)
        p = await stack.enter_async_context(scripted(hangs if where == "prefill" else prefills))
        d = await stack.enter_async_context(scripted(fails if where == "backoff" else hangs))
        url = stack.enter_context(full_listener()) if where == "connecting" else p.url
        path = await stack.enter_async_context(data_path(placed({"p": url}, {"d": d.url}), chosen))
        with Metronome() as metronome:
            got = await path.post(stream=where == "stream")
        assert metronome.ran_s <= DEADLINE_S + 0.1
        if where == "backoff":
            assert got.status == 502
            return
        assert metronome.took_s >= DEADLINE_S - 0.1
        assert (got.status, got.error["type"], got.error["code"]) == (504, "timeout", "deadline")
        assert path.reporter.outcomes[-1] is Outcome.DEADLINE
        await path.at_rest()


@pytest.mark.case("G7")
@pytest.mark.rule("V3")
@on_uvloop
async def test_case_G7_the_deadline_counts_in_the_queue_too_and_the_seat_is_free_again() -> None:
    async def hangs(asked: Asked) -> None:
        await asked.gone.wait()

    serving = {"request_timeout_s": 0.6, "max_connections": 1, "queue_capacity": 4, "queue_timeout_s": 0.5}
    async with before(hangs, chosen=settings(serving=serving)) as (path, _, d):
        seated = asyncio.create_task(path.post())
        await until(lambda: d.asked)
        queued = [asyncio.create_task(path.post()) for _ in range(3)]
        assert (await seated).error["code"] == "deadline"
        told = [(got.status, got.error["code"]) for got in await asyncio.gather(*queued)]
        # The first of them got the seat for what was left of its own time; the others had waited for too long before.
        assert sorted(told) in ([(504, "queue")] * 3, [(504, "deadline"), *[(504, "queue")] * 2])
        await path.at_rest()
        d.script = answers
        assert (await path.post()).status == 200


@pytest.mark.rule("V4", "V5")
@on_uvloop
async def test_engines_that_failed_in_this_request_are_avoided_while_another_can_serve() -> None:
    """Decode on d1 fails: neither it nor the producer of what it read is asked again, in either phase."""

    async def fails(asked: Asked) -> None:
        asked.send(answer(b"{}", "503 Busy"))

    serving = {"max_attempts": 3, "retry_base_s": 0.001, "retry_cap_s": 0.01, "retry_budget": 100}
    chosen = settings(serving=serving)
    async with AsyncExitStack() as stack:
        names = ("p1", "p2", "d1", "d2")
        scripts = (prefills, prefills, fails, answers)
        engines = {
            name: await stack.enter_async_context(scripted(script)) for name, script in zip(names, scripts, strict=True)
        }
        url = {name: engine.url for name, engine in engines.items()}
        placement = placed({n: url[n] for n in ("p1", "p2")}, {n: url[n] for n in ("d1", "d2")})
        path = await stack.enter_async_context(data_path(placement, chosen))
        failed = 0
        for _ in range(60):
            path.reporter.legs.clear()
            assert (await path.post()).status == 200
            seen = [(leg.engine, leg.phase) for leg in path.reporter.legs]
            if len(seen) > 2:
                failed += 1
                first, bad, second, good = seen
                assert (bad, good) == (("d1", Phase.DECODE), ("d2", Phase.DECODE))
                assert {first[0], second[0]} == {"p1", "p2"}
        assert failed >= 8
