"""A proxy that is stopped while requests run: what it holds when it goes on may be too old to be used, and the time in
which it did not run is not the engines'."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from narwhal.sim.text import expected_text
from tests.process.harness import MODEL, Stage, until
from tests.signals import send

LEASE_S = 1.5
PROMPT = "the same text whoever prefills " * 8


async def is_more(count: Callable[[], Awaitable[int]], than: int) -> bool:
    return await count() > than


@pytest.mark.rule("V6", "V5")
@pytest.mark.case("A2")
@pytest.mark.parametrize("attempts", [1, 2])
async def test_case_A2_an_answer_that_lay_unread_for_longer_than_the_lease_is_not_used(
    stage: Stage, attempts: int
) -> None:
    """The prefill's answer waits in the kernel while the worker is stopped: it is as old as that when it is read."""
    stage.write_fleet(
        "p1", "d1",
        serving={"handoff_max_age_s": 1.0, "max_attempts": attempts},
        engine={"kv_lease_s": LEASE_S},
    )  # fmt: skip
    await stage.engines("p1", "d1", arguments=("--kv-lease-s", str(LEASE_S), "--prefill-base-ms", "400"))
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"])
    await stage.ready(proxy.at["admin"])
    (worker,) = [e["pid"] for e in proxy.events("worker started")]

    async def prefill_runs() -> bool:
        _, body = await stage.get(f"127.0.0.1:{stage.ports['p1']}", "/sim/requests?phase=prefill")
        listed: list[dict[str, Any]] = json.loads(body)
        return any(r["ended_at"] is None for r in listed)

    async def expired() -> int:
        return (await stage.ledger("p1", "d1"))["expired"]

    url = f"http://{proxy.at['http']}/v1/completions"
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6}
    async with aiohttp.ClientSession() as session:
        for _ in range(20):
            before = await expired()
            asking = asyncio.create_task(session.post(url, json=body))
            await until(lambda: asking.done() or prefill_runs(), "the prefill leg runs")  # noqa: B023 - awaited at once
            send(worker, signal.SIGSTOP)
            try:
                # On a busy machine the prefill may have ended before the worker was stopped: then once more.
                if caught := await prefill_runs():
                    await until(lambda: is_more(expired, before), "the producer's lease is over")  # noqa: B023
            finally:
                os.kill(worker, signal.SIGCONT)
            async with await asking as answer:
                answered = await answer.json()
            if caught:
                break
        else:
            pytest.fail("never stopped while a prefill ran")
    totals = await stage.ledger("p1", "d1")
    assert totals["late_pulls"] == 0
    if attempts == 1:
        assert (answer.status, answered["error"]["code"]) == (504, "decode")
    else:
        assert answer.status == 200, answered
        assert answered["choices"][0]["text"] == expected_text(PROMPT, 6)
    # Nobody is to blame, and nothing is held against anybody.
    status = await stage.status(control.at["grpc"])
    assert not any(count for engine in status.engines for count in engine.streaks.values())


@pytest.mark.rule("F5", "F10", "V13")
async def test_engines_are_not_late_while_the_proxy_did_not_run(stage: Stage) -> None:
    """Streams that wait for their first token, streams that flow, whole answers: all of them come, none is held against
    an engine, though far more than each limit has passed."""
    limits = {"first_token_timeout_s": 1.5, "kv_first_pull_timeout_s": 1.5, "decode_read_timeout_s": 1.5}
    stage.write_fleet(
        "p1", "d1",
        serving={"prefill_timeout_s": 1.5},
        engine=limits,
        recovery={"stall_s": 1, "silent_leg_s": 1.5},
    )  # fmt: skip
    await stage.engines("p1", "d1", tpot_ms=30, arguments=("--prefill-base-ms", "300"))
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"])
    await stage.ready(proxy.at["admin"])
    (worker,) = [e["pid"] for e in proxy.events("worker started")]
    url = f"http://{proxy.at['http']}/v1/completions"
    answers: list[tuple[int, str]] = []

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        tokens = 20
        body = {"model": MODEL, "prompt": f"{number} {PROMPT}", "max_tokens": tokens, "stream": number % 2 == 0}
        async with session.post(url, json=body) as answer:
            answers.append((answer.status, await answer.text()))

    async def decodes() -> bool:
        _, body = await stage.get(f"127.0.0.1:{stage.ports['d1']}", "/sim/requests?phase=decode")
        # On a busy machine they may have ended before anybody looked.
        return len(answers) == 4 or any(r["ended_at"] is None for r in json.loads(body))

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as clients:
        for number in range(4):
            clients.create_task(ask(session, number))
        await until(decodes, "streams flow")
        for number in range(4, 8):  # whose prefill runs
            clients.create_task(ask(session, number))
        await asyncio.sleep(0.1)
        send(worker, signal.SIGSTOP)
        try:
            await asyncio.sleep(3)  # no outcome to wait for: what is tested is that time alone has no consequence
        finally:
            os.kill(worker, signal.SIGCONT)
    assert [status for status, _ in answers] == [200] * 8, answers
    assert not any("error" in text for _, text in answers)
    status = await stage.status(control.at["grpc"])
    assert not any(engine.evidence for engine in status.engines)
