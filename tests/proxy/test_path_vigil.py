"""Legs that give nothing, and legs on engines that are out."""

import asyncio
import dataclasses
import time

import orjson
import pytest

from narwhal.placement import Placement
from narwhal.vocabulary import Hold, Outcome, Phase, RequestResult
from tests.metronome import Metronome
from tests.proxy.harness import (
    DONE,
    LAST,
    STREAM_HEAD,
    WAIT_S,
    WHOLE,
    Asked,
    Path,
    before,
    chunk,
    data_path,
    on_uvloop,
    placed,
    prefills,
    scripted,
    settings,
    token,
    until,
)

QUICK = settings(recovery={"stall_s": 0.5, "silent_leg_s": 0.5})


def ejected(placement: Placement, engine: str, hold: Hold = Hold.EJECTED) -> Placement:
    """The next placement, in which `engine` is ejected, or has that hold."""
    out = dataclasses.replace(placement.engines[engine], phases=frozenset(), holds=(hold,))
    engines = {**placement.engines, engine: out}
    return Placement(epoch=placement.epoch, version=placement.version + 1, engines=engines)


def eject(path: Path, engine: str) -> None:
    assert path.feed.placement is not None
    path.feed.placement = ejected(path.feed.placement, engine)


async def one_token_then_nothing(asked: Asked) -> None:
    asked.send(STREAM_HEAD, chunk(token()))


# --- F10 --------------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F10")
@on_uvloop
async def test_a_stream_that_gives_nothing_is_told_of_once_and_goes_on() -> None:
    async with before(one_token_then_nothing, chosen=QUICK) as (path, _, d):
        request = asyncio.create_task(path.post(stream=True))
        await until(lambda: Outcome.STALLED in path.reporter.outcomes, "the suspicion is told")
        seen = path.reporter.legs[-1]
        assert seen.engine == "d"
        assert seen.run is not None
        assert seen.run.failure is not None
        assert seen.run.failure.producer == "p"
        await asyncio.sleep(0.8)  # longer than another suspicion would take
        d.asked[0].send(chunk(token("b")), chunk(DONE), LAST)
        got = await request
        assert got.body == token() + token("b") + DONE
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.STALLED, Outcome.STREAM_COMPLETE]
        assert path.reporter.results == [RequestResult.SERVED]


@pytest.mark.rule("F10")
@on_uvloop
async def test_an_engine_that_gives_something_to_another_leg_is_not_suspected() -> None:
    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD, chunk(token()))
        if b"flows" in asked.body:
            for _ in range(15):
                await asyncio.sleep(0.1)
                asked.send(chunk(token()))
            asked.send(chunk(DONE), LAST)

    async with before(script, chosen=QUICK) as (path, _, d):
        silent = asyncio.create_task(path.post(stream=True))
        await until(lambda: len(d.asked) == 1)
        assert (await path.post(stream=True, prompt="flows")).status == 200
        assert Outcome.STALLED not in path.reporter.outcomes
        await until(lambda: Outcome.STALLED in path.reporter.outcomes, "once nothing comes any more")
        silent.cancel()


@pytest.mark.rule("F10")
@on_uvloop
async def test_an_engine_that_only_accepts_new_streams_gives_nothing() -> None:
    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD)
        if b"first" in asked.body:
            asked.send(chunk(token()))

    async with before(script, chosen=QUICK) as (path, _, d):
        requests = [asyncio.create_task(path.post(stream=True, prompt="first"))]
        await until(lambda: len(d.asked) == 1)
        for _ in range(15):
            requests.append(asyncio.create_task(path.post(stream=True)))
            await asyncio.sleep(0.1)
        assert path.reporter.outcomes.count(Outcome.STALLED) == 1
        for request in requests:
            request.cancel()


@pytest.mark.rule("F10")
@on_uvloop
async def test_answers_that_are_quicker_than_the_watchdog_looks_are_progress() -> None:
    async def script(asked: Asked) -> None:
        if b"hangs" not in asked.body:
            await prefills(asked)

    async def decodes(asked: Asked) -> None:
        asked.send(WHOLE)

    async with before(decodes, script, QUICK) as (path, p, _):
        silent = asyncio.create_task(path.post(prompt="hangs"))
        await until(lambda: len(p.asked) == 1)
        for _ in range(15):
            assert (await path.post()).status == 200
            await asyncio.sleep(0.1)
        assert Outcome.STALLED not in path.reporter.outcomes
        await until(lambda: Outcome.STALLED in path.reporter.outcomes, "once nothing comes any more")
        silent.cancel()


@pytest.mark.rule("F10")
@pytest.mark.parametrize("phase", Phase)
@on_uvloop
async def test_a_leg_without_a_stream_has_a_limit_of_its_own(phase: Phase) -> None:
    async def hangs(_asked: Asked) -> None:
        return

    chosen = settings(recovery={"stall_s": 0, "silent_leg_s": 0.5})
    legs = {"decode": hangs} if phase is Phase.DECODE else {"decode": hangs, "prefill": hangs}
    async with before(chosen=chosen, **legs) as (path, _, _):
        request = asyncio.create_task(path.post())
        await until(lambda: Outcome.STALLED in path.reporter.outcomes, "told of")
        assert path.reporter.legs[-1].phase is phase
        request.cancel()


@pytest.mark.rule("F10")
@on_uvloop
async def test_both_suspicions_can_be_turned_off() -> None:
    chosen = settings(
        recovery={"stall_s": 0, "silent_leg_s": 0},
        engine={"decode_read_timeout_s": 1.2},
    )
    async with before(one_token_then_nothing, chosen=chosen) as (path, _, _):
        await path.post(stream=True)
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.STREAM_SILENT]


@pytest.mark.rule("F10")
@pytest.mark.parametrize(("stall_s", "told"), [(0.3, True), (0.0, False), (2.0, False)])
@on_uvloop
async def test_a_stream_that_ends_in_silence_says_whether_the_whole_engine_was_silent(
    stall_s: float, told: bool
) -> None:
    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD)
        if b"well" in asked.body:
            asked.send(chunk(token()), chunk(DONE), LAST)

    chosen = settings(
        recovery={"stall_s": stall_s}, engine={"first_token_timeout_s": 0.8, "kv_first_pull_timeout_s": 0.8}
    )
    async with before(script, chosen=chosen) as (path, _, _):
        await path.post(stream=True, prompt="well")
        await path.post(stream=True)
        run = path.reporter.legs[-1].run
        assert run is not None
        assert run.failure is not None
        assert (run.outcome, run.failure.engine_silent) == (Outcome.FIRST_TOKEN_TIMEOUT, told)


@pytest.mark.rule("F10")
@on_uvloop
async def test_an_engine_that_gives_something_to_others_is_not_silent() -> None:
    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD)
        for _ in range(20 if b"flows" in asked.body else 0):
            asked.send(chunk(token()))
            await asyncio.sleep(0.1)

    chosen = settings(recovery={"stall_s": 0.3}, engine={"first_token_timeout_s": 0.8, "kv_first_pull_timeout_s": 0.8})
    async with before(script, chosen=chosen) as (path, _, d):
        flowing = asyncio.create_task(path.post(stream=True, prompt="flows"))
        await until(lambda: len(d.asked) == 1)
        await path.post(stream=True)
        run = path.reporter.legs[-1].run
        assert run is not None
        assert run.failure is not None
        assert (run.outcome, run.failure.engine_silent) == (Outcome.FIRST_TOKEN_TIMEOUT, False)
        flowing.cancel()


# --- V11 --------------------------------------------------------------------------------------------------------------


@pytest.mark.rule("V11")
@on_uvloop
async def test_a_silent_stream_ends_once_its_engine_is_ejected() -> None:
    async with before(one_token_then_nothing, chosen=QUICK) as (path, _, d):
        request = asyncio.create_task(path.post(stream=True))
        await until(lambda: Outcome.STALLED in path.reporter.outcomes, "silent for long enough")
        assert not request.done()
        eject(path, "d")
        with Metronome() as metronome:
            got = await request
        assert metronome.ran_s < 1.0
        assert got.body.startswith(token())
        assert DONE not in got.body
        assert orjson.loads(got.events[-1])["error"]["type"] == "upstream_error"
        assert path.reporter.outcomes[-1] is Outcome.STREAM_SILENT
        await asyncio.wait_for(d.asked[0].gone.wait(), WAIT_S)


@pytest.mark.rule("V11")
@on_uvloop
async def test_a_stream_that_flows_on_an_ejected_engine_is_left_alone() -> None:
    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD)
        for _ in range(15):
            asked.send(chunk(token()))
            await asyncio.sleep(0.1)
        asked.send(chunk(DONE), LAST)

    async with before(script, chosen=QUICK) as (path, _, d):
        request = asyncio.create_task(path.post(stream=True))
        await until(lambda: len(d.asked) == 1)
        eject(path, "d")
        assert (await request).body == token() * 15 + DONE


@pytest.mark.rule("V11", "V4")
@on_uvloop
async def test_before_its_first_token_it_is_a_failed_leg_that_may_be_tried_again() -> None:
    async def headers_only(asked: Asked) -> None:
        asked.send(STREAM_HEAD)

    async def well(asked: Asked) -> None:
        asked.send(STREAM_HEAD, chunk(token("well")), chunk(DONE), LAST)

    chosen = settings(recovery={"stall_s": 0.5}, serving={"max_attempts": 2, "retry_base_s": 0.01})
    async with scripted(prefills) as p, scripted(headers_only) as bad, scripted(well) as good:
        placement = placed({"p": p.url}, {"bad": bad.url, "good": good.url})
        async with data_path(ejected(placement, "good"), chosen) as path:
            request = asyncio.create_task(path.post(stream=True))
            await until(lambda: len(bad.asked) == 1)
            path.feed.placement = ejected(placement, "bad")
            assert (await request).body == token("well") + DONE
            assert path.reporter.outcomes == [
                Outcome.HANDOFF,
                Outcome.FIRST_TOKEN_TIMEOUT,
                Outcome.HANDOFF,
                Outcome.STREAM_COMPLETE,
            ]


@pytest.mark.rule("V11", "V4", "F10")
@on_uvloop
async def test_a_prefill_that_was_told_of_ends_once_its_engine_is_ejected_and_is_tried_elsewhere() -> None:
    async def hangs(_asked: Asked) -> None:
        return

    async def well(asked: Asked) -> None:
        asked.send(WHOLE)

    chosen = settings(recovery={"stall_s": 0.3, "silent_leg_s": 1.0}, serving={"max_attempts": 2, "retry_base_s": 0.01})
    async with scripted(hangs) as bad, scripted(prefills) as good, scripted(well) as d:
        placement = placed({"bad": bad.url, "good": good.url}, {"d": d.url})
        async with data_path(ejected(placement, "good"), chosen) as path:
            request = asyncio.create_task(path.post())
            await until(lambda: len(bad.asked) == 1)
            path.feed.placement = ejected(placement, "bad")
            await asyncio.sleep(0.6)  # longer than a stream may be silent there
            assert Outcome.PREFILL_TIMEOUT not in path.reporter.outcomes
            assert (await asyncio.wait_for(request, 5.0)).status == 200
            assert path.reporter.outcomes == [
                Outcome.STALLED,
                Outcome.PREFILL_TIMEOUT,
                Outcome.HANDOFF,
                Outcome.ANSWER_COMPLETE,
            ]


@pytest.mark.rule("V11", "V4", "F10")
@pytest.mark.parametrize("attempts", [1, 2])
@on_uvloop
async def test_a_whole_answer_that_was_told_of_ends_once_its_engine_is_ejected(attempts: int) -> None:
    """It is tried elsewhere where the policy allows it. An engine that goes on much later would answer 200 with another
    prompt's text."""

    async def hangs(_asked: Asked) -> None:
        return

    async def well(asked: Asked) -> None:
        asked.send(WHOLE)

    chosen = settings(
        recovery={"stall_s": 0.3, "silent_leg_s": 1.0}, serving={"max_attempts": attempts, "retry_base_s": 0.01}
    )
    async with scripted(prefills) as p, scripted(hangs) as bad, scripted(well) as good:
        placement = placed({"p": p.url}, {"bad": bad.url, "good": good.url})
        async with data_path(ejected(placement, "good"), chosen) as path:
            request = asyncio.create_task(path.post())
            await until(lambda: len(bad.asked) == 1)
            began = time.monotonic()
            path.feed.placement = ejected(placement, "bad")
            got = await asyncio.wait_for(request, 5.0)
            assert time.monotonic() - began > 0.9  # a stream would have ended before
            ended = [Outcome.HANDOFF, Outcome.STALLED, Outcome.READ_TIMEOUT]
            if attempts == 1:
                assert (got.status, got.error["code"]) == (504, "decode")
                assert path.reporter.outcomes == ended
            else:
                assert (got.status, got.json["choices"][0]["text"]) == (200, "b")
                assert path.reporter.outcomes == [*ended, Outcome.HANDOFF, Outcome.ANSWER_COMPLETE]
            await asyncio.wait_for(bad.asked[0].gone.wait(), 1.0)


@pytest.mark.rule("V11", "V6", "V4")
@on_uvloop
async def test_a_whole_answer_does_not_wait_on_a_held_engine_until_its_handoff_is_too_old() -> None:
    """Probes of an engine that gives nothing may take longer than the lease. Until then there is hope."""

    async def hangs(_asked: Asked) -> None:
        return

    async def well(asked: Asked) -> None:
        asked.send(WHOLE)

    chosen = settings(
        recovery={"silent_leg_s": 0.5},
        serving={"max_attempts": 2, "retry_base_s": 0.01, "handoff_max_age_s": 2.0},
        engine={"first_token_timeout_s": 0.5},
    )
    async with scripted(prefills) as p, scripted(hangs) as bad, scripted(well) as good:
        placement = placed({"p": p.url}, {"bad": bad.url, "good": good.url})
        async with data_path(ejected(placement, "good"), chosen) as path:
            request = asyncio.create_task(path.post())
            await until(lambda: len(bad.asked) == 1)
            began = time.monotonic()
            path.feed.placement = ejected(placement, "bad", Hold.VERIFICATION)
            assert (await asyncio.wait_for(request, 5.0)).json["choices"][0]["text"] == "b"
            assert 1.9 < time.monotonic() - began < 4.0
            assert path.reporter.outcomes == [
                Outcome.HANDOFF,
                Outcome.STALLED,
                Outcome.READ_TIMEOUT,
                Outcome.HANDOFF,
                Outcome.ANSWER_COMPLETE,
            ]


HAS_ITS_TIME: dict[str, tuple[dict[str, float], int, Hold]] = {
    "its handoff is young": ({"silent_leg_s": 0.5}, 1, Hold.VERIFICATION),
    "the engine has read it": ({"silent_leg_s": 0.5}, 2, Hold.VERIFICATION),
    "control was not told": ({"silent_leg_s": 30}, 1, Hold.VERIFICATION),
    "the hold is another": ({"silent_leg_s": 0.5}, 1, Hold.DRAIN),
    "the probe has only begun": ({"silent_leg_s": 0.5}, 1, Hold.VERIFICATION),
}


@pytest.mark.rule("V11", "F10")
@pytest.mark.parametrize("why", HAS_ITS_TIME)
@on_uvloop
async def test_a_whole_answer_on_a_held_engine_has_its_time(why: str) -> None:
    recovery, choices, hold = HAS_ITS_TIME[why]

    async def script(asked: Asked) -> None:
        if b"kv_transfer_params" not in asked.body or choices == 1:
            await asyncio.sleep(2.0)
        asked.send(WHOLE)

    max_age_s = 25.0 if why == "its handoff is young" else 1.0
    probe_s = 5.0 if why == "the probe has only begun" else 0.3
    chosen = settings(
        recovery=recovery, serving={"handoff_max_age_s": max_age_s}, engine={"first_token_timeout_s": probe_s}
    )
    async with before(script, chosen=chosen) as (path, _, d):
        request = asyncio.create_task(path.post(n=choices))
        await until(lambda: len(d.asked) == choices)
        assert path.feed.placement is not None
        path.feed.placement = ejected(path.feed.placement, "d", hold)
        assert (await request).status == 200
        assert (Outcome.STALLED in path.reporter.outcomes) == (why != "control was not told")


@pytest.mark.rule("V11")
@on_uvloop
async def test_a_whole_answer_that_control_was_not_told_of_has_its_time_on_an_ejected_engine() -> None:
    async def slow(asked: Asked) -> None:
        await asyncio.sleep(1.5)
        asked.send(WHOLE)

    chosen = settings(recovery={"stall_s": 0.3, "silent_leg_s": 0})
    async with before(slow, chosen=chosen) as (path, _, d):
        request = asyncio.create_task(path.post())
        await until(lambda: len(d.asked) == 1)
        eject(path, "d")
        assert (await request).status == 200
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.ANSWER_COMPLETE]


@pytest.mark.rule("V11", "F10")
@pytest.mark.parametrize("when", ["before it is told of", "after it was told of"])
@on_uvloop
async def test_a_whole_answer_is_left_alone_while_its_ejected_engine_gives_others_something(when: str) -> None:
    flows = asyncio.Event()

    async def script(asked: Asked) -> None:
        if b"stream" not in asked.body:
            await asyncio.sleep(2.5)
            asked.send(WHOLE)
            return
        asked.send(STREAM_HEAD)
        await flows.wait()
        for _ in range(25):
            asked.send(chunk(token()))
            await asyncio.sleep(0.1)
        asked.send(chunk(DONE), LAST)

    chosen = settings(recovery={"stall_s": 0, "silent_leg_s": 0.5})
    async with before(script, chosen=chosen) as (path, _, d):
        if when == "before it is told of":
            flows.set()
        flowing = asyncio.create_task(path.post(stream=True))
        await until(lambda: len(d.asked) == 1)
        whole = asyncio.create_task(path.post())
        await until(lambda: len(d.asked) == 2)
        if when == "after it was told of":
            await until(lambda: Outcome.STALLED in path.reporter.outcomes, "told of", 3.0)
            flows.set()
            heard_at = path.data.legs.heard_at
            await until(lambda: d.url in heard_at and time.monotonic() - heard_at[d.url] < 0.4, "it gives something")
        eject(path, "d")
        assert (await whole).status == 200
        assert (await flowing).body == token() * 25 + DONE
        assert Outcome.READ_TIMEOUT not in path.reporter.outcomes
        assert (Outcome.STALLED in path.reporter.outcomes) == (when == "after it was told of")
