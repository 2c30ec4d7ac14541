"""Engines that say that they are busy, or answer as another would, and are stepped around for a while (V12)."""

import time
from contextlib import AsyncExitStack

import pytest

from tests.metronome import Metronome
from tests.proxy.harness import (
    WHOLE,
    Asked,
    answer,
    before,
    data_path,
    on_uvloop,
    placed,
    prefills,
    scripted,
)

BUSY = {
    "429": (answer(b"{}", "429 Too Many Requests", ""), 1.0),
    "429 for 2 s": (answer(b"{}", "429 Too Many Requests", "retry-after: 2\r\n"), 2.0),
    "429 for no time": (answer(b"{}", "429 Too Many Requests", "retry-after: 0\r\n"), 1.0),
    "503 for 2 s": (answer(b"{}", "503 Service Unavailable", "retry-after: 2\r\n"), 2.0),
    "503": (answer(b"{}", "503 Service Unavailable", ""), 0.0),
    "500 for 2 s": (answer(b"{}", "500 Oops", "retry-after: 2\r\n"), 0.0),
}


@pytest.mark.rule("V12")
@pytest.mark.parametrize("name", BUSY)
@on_uvloop
async def test_an_engine_that_says_it_is_busy_is_stepped_around_for_the_time_it_names(name: str) -> None:
    said, named_s = BUSY[name]

    async def busy(asked: Asked) -> None:
        asked.send(said if len(first.asked) == 1 else WHOLE)

    async def idle(asked: Asked) -> None:
        asked.send(WHOLE)

    async with (
        scripted(prefills) as p,
        scripted(busy) as first,
        scripted(idle) as second,
        data_path(placed({"p": p.url}, {"busy": first.url, "idle": second.url})) as path,
    ):
        while not first.asked:
            await path.post()
        with Metronome() as metronome:  # it begins a moment after the proxy heard of it
            began = time.monotonic()
            while len(first.asked) == 1 and time.monotonic() - began < 4.0:
                assert (await path.post()).status == 200
        assert metronome.took_s >= named_s - 0.2
        assert metronome.ran_s < named_s + 1.0


@pytest.mark.rule("R9", "V12")
@pytest.mark.parametrize("status", ["401 Who", "403 No", "404 None"])
@on_uvloop
async def test_an_engine_that_answers_as_another_is_stepped_around_until_control_has_looked(status: str) -> None:
    async def another(asked: Asked) -> None:
        asked.send(answer(b"{}", status))

    async def right(asked: Asked) -> None:
        asked.send(WHOLE)

    async with (
        scripted(prefills) as p,
        scripted(another) as first,
        scripted(right) as second,
        data_path(placed({"p": p.url}, {"another": first.url, "right": second.url})) as path,
    ):
        while not first.asked:
            await path.post()
        heard_at = time.monotonic()
        assert [(await path.post()).status for _ in range(5)] == [200] * 5
        assert len(first.asked) == 1
        assert path.data.vigil.avoided(heard_at + 4.5) == {"another"}
        assert path.data.vigil.avoided(time.monotonic() + 5.1) == frozenset()


@pytest.mark.rule("V12")
@on_uvloop
async def test_where_no_other_can_serve_a_busy_engine_is_asked_all_the_same() -> None:
    async def busy_once(asked: Asked) -> None:
        asked.send(BUSY["429 for 2 s"][0] if len(d.asked) == 1 else WHOLE)

    async with AsyncExitStack() as stack:
        d = await stack.enter_async_context(scripted(busy_once))
        p = await stack.enter_async_context(scripted(prefills))
        path = await stack.enter_async_context(data_path(placed({"p": p.url}, {"d": d.url})))
        assert (await path.post()).status == 429
        assert (await path.post()).status == 200


@pytest.mark.rule("V12")
@pytest.mark.parametrize(("named", "least_s"), [("31", 30.0), ("999999", 30.0), ("7", 7.0)])
@on_uvloop
async def test_no_engine_is_stepped_around_for_longer_than_half_a_minute(named: str, least_s: float) -> None:
    said = answer(b"{}", "429 Too Many Requests", f"retry-after: {named}\r\n")

    async def busy(asked: Asked) -> None:
        asked.send(said)

    async with before(busy) as (path, _, _):
        await path.post()
        vigil, now = path.data.vigil, time.monotonic()
        assert vigil.avoided(now + least_s - 1.0) == {"d"}
        assert vigil.avoided(now + least_s + 0.1) == frozenset()
