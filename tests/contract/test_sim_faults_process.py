"""Faults of a simulated engine's process and connections, and how faults are set over HTTP."""

import asyncio
from typing import Any

import pytest

from narwhal.sim.testing import SimEngine, sim_engine
from narwhal.sim.text import expected_text
from tests.sim.legs import COMPLETIONS, LONG, prefill, prompt
from tests.sim.raw import Answer, Connection, ask, refused

TIMES: dict[str, Any] = {"tpot_ms": 1.0, "prefill_base_ms": 1.0, "core_death_s": 0.3, "shutdown_s": 0.3}
SHORT_S = 0.4  # how long a test waits to call something silent


async def stream_of(engine: SimEngine, timeout_s: float = 20.0, **more: Any) -> Answer:
    return await ask(engine.url, "POST", COMPLETIONS, prompt(stream=True, **more), timeout_s=timeout_s)


async def whole_of(engine: SimEngine, timeout_s: float = 20.0, **more: Any) -> Answer:
    return await ask(engine.url, "POST", COMPLETIONS, prompt(**more), timeout_s=timeout_s)


async def test_core_stopped_and_health_green() -> None:
    async with sim_engine(tpot_ms=5.0) as engine:
        running = asyncio.create_task(stream_of(engine, max_tokens=60))
        await engine.wait_for(lambda e: e.state()["in_flight"] == 1)
        await engine.set_fault("core-stopped")
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/metrics", None),
            ("POST", "/tokenize", {"prompt": "a"}),
        ):
            assert (await ask(engine.url, method, path, body)).status == 200
        stream = await stream_of(engine, timeout_s=SHORT_S)
        assert (stream.end, stream.status, stream.body) == ("silent", 200, b"")
        whole = await whole_of(engine, timeout_s=SHORT_S)
        assert (whole.end, whole.status) == ("silent", None)
        assert not running.done()
        await engine.clear_faults()
        assert (await running).text == expected_text(LONG, 60)


async def test_frozen_takes_connections_and_answers_nothing() -> None:
    async with sim_engine(tpot_ms=5.0) as engine:
        running = asyncio.create_task(stream_of(engine, max_tokens=60))
        await engine.wait_for(lambda e: e.state()["in_flight"] == 1)
        await engine.set_fault("frozen")
        for path in ("/health", "/metrics", "/version"):
            assert (await ask(engine.url, "GET", path, timeout_s=SHORT_S)).end == "silent"
        waiting = asyncio.create_task(ask(engine.url, "GET", "/health"))
        await engine.wait_for(lambda e: e.state()["requests"]["health"] == 2)
        await engine.clear_faults()
        assert (await waiting).status == 200
        assert (await running).text == expected_text(LONG, 60)


async def test_core_killed_gives_errors_then_the_end() -> None:
    async with sim_engine(**TIMES) as engine:
        running = asyncio.create_task(stream_of(engine, max_tokens=9000))
        await engine.wait_for(lambda e: e.state()["in_flight"] == 1)
        await engine.set_fault("core-killed")
        assert (await ask(engine.url, "GET", "/health")).status == 503
        assert (await whole_of(engine)).status == 500
        answer = await running
        assert (answer.end, answer.events[-1], answer.error is not None) == ("complete", "[DONE]", True)
        await refused(engine.url)


async def test_killed_cuts_streams_and_refuses() -> None:
    async with sim_engine(**TIMES) as engine:
        running = asyncio.create_task(stream_of(engine, max_tokens=9000))
        await engine.wait_for(lambda e: e.requests() and e.state()["in_flight"] == 1)
        await engine.set_fault("killed")
        answer = await running
        assert answer.end in ("cut", "reset")
        assert "[DONE]" not in answer.events
        assert (await ask(engine.url, "GET", "/health")).end == "refused"


async def test_terminated_ends_streams_with_error_and_marker() -> None:
    async with sim_engine(**TIMES) as engine:
        running = asyncio.create_task(stream_of(engine, max_tokens=9000))
        waiting = asyncio.create_task(whole_of(engine, max_tokens=9000))
        await engine.wait_for(lambda e: e.state()["in_flight"] == 2)
        await engine.set_fault("terminated")
        answer = await running
        assert (answer.end, answer.events[-1], answer.error is not None) == ("complete", "[DONE]", True)
        assert (await waiting).status == 500
        assert (await whole_of(engine)).status == 500
        await refused(engine.url)


async def test_restart_in_place_is_a_new_process_at_the_same_address() -> None:
    async with sim_engine(**TIMES) as engine:
        before = engine.state()
        await prefill(engine.url, prompt())
        await engine.set_fault("restart", down_s=0.2)
        await refused(engine.url)
        await engine.wait_for(lambda e: e.state()["life"] == "running")
        after = engine.state()
        assert (after["url"], after["generation"]) == (before["url"], before["generation"] + 1)
        assert after["start_time"] > before["start_time"]
        assert after["engine_id"] != before["engine_id"]
        assert engine.totals()["lost"] == 1
        assert (await whole_of(engine)).status == 200


async def test_refuse_closes_the_listener_for_a_while() -> None:
    async with sim_engine(tpot_ms=5.0) as engine:
        idle = await Connection.to(engine.url)
        idle.send("GET", "/health")
        assert (await idle.receive()).status == 200
        running = asyncio.create_task(stream_of(engine, max_tokens=60))
        await engine.wait_for(lambda e: e.state()["in_flight"] == 1)
        await engine.set_fault("refuse", for_s=0.5)
        assert (await ask(engine.url, "GET", "/health")).end == "refused"
        assert await idle.closed() == "closed"
        await idle.close()
        assert (await running).text == expected_text(LONG, 60)
        await engine.wait_for(lambda e: not e.state()["faults"])
        assert (await ask(engine.url, "GET", "/health")).status == 200


async def test_reset_on_accept() -> None:
    async with sim_engine(**TIMES) as engine:
        await engine.set_fault("reset-on-accept", count=2)
        assert [(await whole_of(engine)).end for _ in range(3)] == ["reset", "reset", "complete"]


@pytest.mark.parametrize("how", ["option", "fault", "fault on an idle connection"])
async def test_idle_connections_are_closed(how: str) -> None:
    async with sim_engine(**TIMES, keepalive_s=1.2 if how == "option" else 30.0) as engine:
        if how == "fault":
            await engine.set_fault("idle-close", seconds=1.2)
        connection = await Connection.to(engine.url)
        loop = asyncio.get_running_loop()
        for _ in range(3):  # each request counts the idle time anew
            connection.send("GET", "/health")
            assert (await connection.receive()).status == 200
            idle_at = loop.time()
            await asyncio.sleep(0.5)
        if how == "fault on an idle connection":
            await engine.set_fault("idle-close", seconds=1.2)
        assert await connection.closed() == "closed"
        assert loop.time() - idle_at >= 1.18
        await connection.close()


async def test_faults_over_http() -> None:
    async with sim_engine(**TIMES) as engine:
        made = await ask(
            engine.url, "POST", "/sim/fault", {"mode": "status", "status": 503, "count": 1, "phase": "local"}
        )
        assert made.json["fault"]["left"] == 1
        assert (await ask(engine.url, "GET", "/sim/state")).json["faults"][0]["mode"] == "status"
        assert (await whole_of(engine)).status == 503
        assert (await whole_of(engine)).status == 200
        await ask(engine.url, "POST", "/sim/fault", {"mode": "hang"})
        await ask(engine.url, "POST", "/sim/fault", {"mode": "stall"})
        gone = await ask(engine.url, "DELETE", "/sim/fault?mode=hang")
        assert (gone.json["cleared"], [fault["mode"] for fault in gone.json["state"]["faults"]]) == (1, ["stall"])
        assert (await ask(engine.url, "DELETE", "/sim/fault")).json["cleared"] == 1
        for body in ({"mode": "nothing"}, {"mode": "stall", "after": "x"}, {}):
            assert (await ask(engine.url, "POST", "/sim/fault", body)).status == 400
        assert (await ask(engine.url, "POST", "/sim/fault", {"mode": "hang", "engine": "who"})).status == 404
        assert (await ask(engine.url, "GET", "/sim/nothing")).status == 404
        assert (await ask(engine.url, "GET", "/sim/requests?after=x")).status == 400


@pytest.mark.parametrize("mode", ["killed", "refuse", "terminated"])
async def test_what_ends_the_connection_is_answered_first(mode: str) -> None:
    async with sim_engine(**TIMES) as engine:
        answer = await ask(engine.url, "POST", "/sim/fault", {"mode": mode})
        assert (answer.status, answer.json["fault"]["mode"]) == (200, mode)
        await refused(engine.url)
