"""Connections to engines that are used again, and what it means when one of them closes (V9)."""

import asyncio

import pytest

from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.connection import EngineConnection, Result
from narwhal.proxy.outcome import LegKind
from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import sim_engines
from narwhal.vocabulary import Outcome, RequestResult
from tests.proxy.harness import (
    DONE,
    LAST,
    STREAM_HEAD,
    WAIT_S,
    WHOLE,
    Asked,
    Script,
    ScriptedEngine,
    answers,
    before,
    chunk,
    data_path,
    on_uvloop,
    placed,
    prefill_answer,
    prefills,
    scripted,
    settings,
    token,
    until,
)


@pytest.mark.rule("V9")
@on_uvloop
async def test_connections_are_reused_last_in_first_out_and_dropped_before_the_engine_would() -> None:
    async with before(answers, chosen=settings(engine={"keepalive_s": 0.4})) as (path, p, _):
        await asyncio.gather(*(path.post() for _ in range(4)))
        opened = p.connections
        assert opened > 1
        for _ in range(5):
            await path.post()
        assert p.connections == opened
        assert len({asked.connection for asked in p.asked[-5:]}) == 1, "the same one again and again"
        await until(lambda: len(p.closed_at) == opened, "idle connections are closed", within_s=2.0)
        await path.post()
        assert p.connections == opened + 1


def closes_reused(first: Script) -> Script:
    """Answers the first request of each connection; closes it when another comes: its idle time was over."""

    async def script(asked: Asked) -> None:
        if asked.connection in seen:
            asked.writer.transport.abort()
            return
        seen.add(asked.connection)
        await first(asked)

    seen: set[int] = set()
    return script


@pytest.mark.rule("V9")
@on_uvloop
async def test_a_prefill_leg_on_a_connection_that_just_closed_is_sent_once_more() -> None:
    async with before(answers, closes_reused(prefills)) as (path, p, d):
        for _ in range(6):
            assert (await path.post()).status == 200
        assert len(d.asked) == 6
        assert len(p.asked) == 11, "five were sent twice"
        assert set(path.reporter.outcomes) == {Outcome.HANDOFF, Outcome.ANSWER_COMPLETE}


@pytest.mark.rule("V9", "V5")
@pytest.mark.case("A1")
@pytest.mark.parametrize("stream", [False, True])
@on_uvloop
async def test_a_decode_leg_is_not_sent_again_but_the_request_gets_one_more_attempt(stream: bool) -> None:
    async def decode(asked: Asked) -> None:
        asked.send(*((STREAM_HEAD, chunk(token()), chunk(DONE), LAST) if stream else (WHOLE,)))

    count = 0

    async def prefill(asked: Asked) -> None:
        nonlocal count
        count += 1
        asked.send(prefill_answer(remote_request_id=f"cmpl-{count}"))

    async with before(closes_reused(decode), prefill) as (path, p, d):
        for _ in range(4):
            assert (await path.post(stream=stream)).status == 200
        sent = [asked.body.rpartition(b'"remote_request_id":"')[2].partition(b'"')[0] for asked in d.asked]
        assert len(set(sent)) == len(sent) == 7, "no handoff goes to two decode legs"
        assert len(p.asked) == 7
        assert {asked.headers["x-request-id"].rpartition("-1-")[1] for asked in d.asked[:1]} == {"-1-"}
        assert [asked.headers["x-request-id"].split("-")[-2] for asked in d.asked[1:3]] == ["1", "2"]
        assert path.reporter.results == [RequestResult.SERVED] * 4
        assert all(seen.run is None for seen in path.reporter.legs), "not a failure"


@pytest.mark.rule("V9")
@on_uvloop
async def test_a_fresh_connection_that_closes_without_an_answer_is_a_failure() -> None:
    async def closes(asked: Asked) -> None:
        asked.writer.transport.abort()

    async with before(closes) as (path, _, d):
        assert (await path.post()).status == 502
        assert len(d.asked) == 1
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.RESET]


WITHIN_S, BEYOND_S = 0.4, 1.6  # of the time in which an idle connection that was closed answers with its end


def closes_later(first: Script, after_s: float) -> Script:
    """Answers the first request of each connection; closes it so long after another came, without an answer."""

    async def script(asked: Asked) -> None:
        if asked.connection in seen:
            await asyncio.sleep(after_s)
            asked.writer.transport.abort()
            return
        seen.add(asked.connection)
        await first(asked)

    seen: set[int] = set()
    return script


@pytest.mark.rule("V9", "F2")
@pytest.mark.parametrize("after_s", [WITHIN_S, BEYOND_S])
@on_uvloop
async def test_a_prefill_leg_whose_connection_closes_later_is_a_failure(after_s: float) -> None:
    async with before(answers, closes_later(prefills, after_s)) as (path, p, _):
        assert (await path.post()).status == 200
        got = await path.post()
        if after_s < 1.0:
            assert (got.status, len(p.asked)) == (200, 3)
            assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.ANSWER_COMPLETE] * 2
        else:
            assert (got.status, got.error["code"], len(p.asked)) == (502, "prefill", 2)
            assert path.reporter.outcomes[2:] == [Outcome.RESET]


@pytest.mark.rule("V9", "F2")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_s", [WITHIN_S, BEYOND_S])
@on_uvloop
async def test_a_decode_leg_whose_connection_closes_later_is_a_failure(after_s: float, stream: bool) -> None:
    async def well(asked: Asked) -> None:
        asked.send(*((STREAM_HEAD, chunk(token()), chunk(DONE), LAST) if stream else (WHOLE,)))

    async with before(closes_later(well, after_s)) as (path, p, d):
        assert (await path.post(stream=stream)).status == 200
        got = await path.post(stream=stream)
        if after_s < 1.0:
            assert (got.status, len(p.asked), len(d.asked)) == (200, 3, 3)
            assert Outcome.RESET not in path.reporter.outcomes
        else:
            assert (got.status, got.error["code"], len(d.asked)) == (502, "decode", 2)
            assert path.reporter.outcomes[2:] == [Outcome.HANDOFF, Outcome.RESET]
        assert path.reporter.requests[-1][1] == 0, "no retry of the policy"


async def sent_on_a_reused_one(engine: ScriptedEngine) -> tuple[EngineConnection, asyncio.Future[Result]]:
    """A request that its engine has, on a connection without a watchdog."""
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: EngineConnection(engine.url, lambda _: None, lambda _: None), "127.0.0.1", engine.port
    )
    connection.reused = True
    head = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n"
    result = connection.start(head, b"{}", LegKind.ANSWER, due=1e9, quiet_s=0.0, deadline=1e9)
    await until(lambda: engine.asked)
    return connection, result


LOOKS: dict[str, tuple[tuple[float, ...], float, bool]] = {
    "closed at once": ((100.0,), 0.0, True),
    "closed within a second": ((100.0, 100.5, 100.9, 101.0), 0.0, True),
    "closed later": ((100.0, 100.5, 101.0, 101.1), 0.0, False),
    "this process was stopped before": ((100.0, 105.1, 105.2, 105.3), 5.0, True),
    "stopped, and closed later": ((100.0, 105.1, 106.1, 106.2), 5.0, False),
    # The look may come before what had arrived meanwhile is read.
    "closed while this process did not run for so long": ((100.0, 100.1, 102.1), 0.0, True),
}


@pytest.mark.rule("V9", "F5")
@pytest.mark.parametrize("what", LOOKS)
@on_uvloop
async def test_time_in_which_this_process_did_not_run_does_not_count(what: str) -> None:
    looks, stopped_s, idle_closed = LOOKS[what]

    async def waits(_asked: Asked) -> None:
        return

    async with scripted(waits) as engine:
        connection, result = await sent_on_a_reused_one(engine)
        first, *others = looks
        connection.check(first)
        connection.excuse(stopped_s)
        for now in others:
            connection.check(now)
        engine.asked[0].writer.transport.abort()
        end = await asyncio.wait_for(result, WAIT_S)
        assert isinstance(end, LegEnd)
        assert (end.outcome, end.idle_closed) == (Outcome.RESET, idle_closed)


@pytest.mark.rule("V9", "F2")
@on_uvloop
async def test_a_reused_connection_that_closes_inside_an_answer_is_a_failure() -> None:
    async def cuts_the_second(asked: Asked) -> None:
        if len(d.asked) == 1:
            asked.send(WHOLE)
        else:
            asked.send(WHOLE[:-3])
            await asked.writer.drain()
            asked.writer.close()

    async with before(cuts_the_second) as (path, _, d):
        assert (await path.post()).status == 200
        assert (await path.post()).status == 502
        assert d.connections == 1
        assert path.reporter.outcomes[-1] is Outcome.ANSWER_CUT


@pytest.mark.case("F13")
@pytest.mark.rule("V9")
@on_uvloop
async def test_case_F13_requests_that_meet_the_end_of_the_idle_time() -> None:
    """The engine closes idle connections after 0.2 s, and ours would live longer: every request meets the race."""
    idle_s = 0.2
    async with (
        sim_engines(EngineOptions(id="p", keepalive_s=idle_s), EngineOptions(id="d", keepalive_s=idle_s)) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url})) as path,
    ):
        for turn in range(24):
            got = await path.post(stream=bool(turn % 2), max_tokens=1)
            assert got.status == 200
            assert b'"error"' not in got.body
            await asyncio.sleep(idle_s + (turn % 5 - 2) * 0.002)
        assert all(seen.run is None for seen in path.reporter.legs)
        assert p.totals()["double_pulls"] == 0
