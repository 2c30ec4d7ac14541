"""Serving while control is away: engines that take no connection are stepped around (spec P7)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from narwhal.config import ProxySettings
from narwhal.vocabulary import Outcome
from tests.ports import free_ports
from tests.proxy.harness import (
    FixedFeed,
    Path,
    ScriptedEngine,
    answers,
    data_path,
    on_uvloop,
    placed,
    prefills,
    scripted,
    settings,
    until,
)

ASKED = 20


async def many(path: Path) -> list[int]:
    """The statuses of some requests, one after the other."""
    return [(await path.post()).status for _ in range(ASKED)]


@asynccontextmanager
async def two(chosen: ProxySettings | None = None) -> AsyncIterator[tuple[Path, ScriptedEngine]]:
    """A data path before two decode engines, and the one that is `bad`."""
    async with (
        scripted(prefills) as p,
        scripted(answers) as good,
        scripted(answers, port=free_ports(1)[0]) as bad,  # nobody else takes it while it is away
        data_path(placed({"p": p.url}, {"good": good.url, "bad": bad.url}), chosen) as path,
    ):
        yield path, bad


def alone(feed: FixedFeed) -> None:
    feed.controlled = False


@pytest.mark.rule("P7")
@pytest.mark.case("J8")
@on_uvloop
async def test_case_J8_an_engine_that_refuses_is_stepped_around_until_it_takes_connections_again() -> None:
    async with two() as (path, bad):
        alone(path.feed)
        await bad.stop()
        first = await many(path)
        assert first.count(502) <= 1, "one request may find out"
        while 502 not in first:
            first = await many(path)
        assert await many(path) == [200] * ASKED
        assert path.reporter.outcomes.count(Outcome.REFUSED) == 1, "and what it found is reported"
        # It is back: found by a connection that no request waits for.
        back = ScriptedEngine(answers)
        back.port = bad.port
        await back.start()
        await until(lambda: back.connections, "it is tried again")
        while not back.asked:
            assert (await path.post()).status == 200
        await back.stop()


@pytest.mark.rule("P7", "V4")
@on_uvloop
async def test_with_attempts_left_nobody_notices() -> None:
    chosen = settings(serving={"max_attempts": 2, "retry_base_s": 0.01})
    async with two(chosen) as (path, bad):
        alone(path.feed)
        await bad.stop()
        while Outcome.REFUSED not in path.reporter.outcomes:
            assert await many(path) == [200] * ASKED
        assert await many(path) == [200] * ASKED
        assert path.reporter.outcomes.count(Outcome.REFUSED) == 1


@pytest.mark.rule("P7")
@on_uvloop
async def test_where_no_other_can_serve_it_is_asked_all_the_same() -> None:
    async with (
        scripted(prefills) as p,
        scripted(answers, port=free_ports(1)[0]) as d,
        data_path(placed({"p": p.url}, {"d": d.url})) as path,
    ):
        alone(path.feed)
        await d.stop()
        assert (await path.post()).status == 502
        back = ScriptedEngine(answers)
        back.port = d.port
        await back.start()
        assert (await path.post()).status == 200
        await back.stop()


@pytest.mark.rule("P7", "F1")
@on_uvloop
async def test_while_control_judges_every_leg_counts() -> None:
    async with two() as (path, bad):
        await bad.stop()
        async with asyncio.timeout(20.0):
            while path.reporter.outcomes.count(Outcome.REFUSED) < 3:
                await path.post()


@pytest.mark.rule("P7")
@on_uvloop
async def test_who_was_judged_since_is_not_stepped_around() -> None:
    async with two() as (path, bad):
        alone(path.feed)
        await bad.stop()
        while Outcome.REFUSED not in path.reporter.outcomes:
            await path.post()
        path.feed.controlled = True
        assert await many(path) == [200] * ASKED, "control's being back alone changes nothing"
        placement = path.feed.placement
        assert placement is not None
        readmitted = replace(placement.engines["bad"], incarnation=2)
        path.feed.placement = replace(placement, version=2, engines={**placement.engines, "bad": readmitted})
        async with asyncio.timeout(20.0):
            while path.reporter.outcomes.count(Outcome.REFUSED) < 2:
                await path.post()
