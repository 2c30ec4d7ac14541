"""Prompt tokens: known, asked of an engine, or estimated; the cap on them; a failed count as evidence (spec P9, F2)."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from narwhal.connectors.base import CountUnusable, Route
from narwhal.connectors.vllm_nixl import VllmNixl
from narwhal.placement import Placement
from narwhal.proxy.seams import Picture
from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import sim_engines
from narwhal.sim.text import tokenize
from narwhal.vocabulary import Outcome, Phase
from tests.proxy.harness import (
    MODEL,
    Asked,
    Path,
    Script,
    ScriptedEngine,
    answer,
    answers,
    data_path,
    entry,
    on_uvloop,
    placed,
    prefill_answer,
    scripted,
    settings,
    until,
)

COUNT = 40
ON = {"tokenize": True, "tokenize_timeout_s": 0.3}


def counts(reply: bytes | None = None) -> Script:
    """A prefill engine whose tokenizer answers `reply`; None: not at all."""

    async def script(asked: Asked) -> None:
        if not asked.head.startswith(b"POST /tokenize "):
            asked.send(prefill_answer())
        elif reply is None:
            await asked.gone.wait()
        else:
            asked.send(reply)

    return script


GOOD = answer(b'{"count": %d, "max_model_len": 512, "tokens": []}' % COUNT)


@asynccontextmanager
async def capped(
    *scripts: Script, decode: Script = answers, cap: int = 100, **engine: Any
) -> AsyncIterator[tuple[Path, list[ScriptedEngine]]]:
    """A data path before prefill engines of these scripts, each with a cap of tokens, and a decode engine without."""
    async with scripted(decode) as d, data_path(None, settings(engine=ON | engine)) as path:
        engines = [ScriptedEngine(script) for script in scripts]
        entries = [entry("d", d.url, Phase.DECODE)]
        for number, each in enumerate(engines):
            await each.start()
            entries.append(entry(f"p{number}", each.url, Phase.PREFILL, max_inflight_tokens=cap))
        path.feed.placement = Placement(epoch=1, version=1, engines={e.id: e for e in entries})
        yield path, engines
        for each in engines:
            await each.stop()


def bodies(engine: ScriptedEngine, route: bytes) -> list[Any]:
    return [json.loads(a.body) for a in engine.asked if a.head.startswith(b"POST " + route + b" ")]


@pytest.mark.rule("P9", "V1")
@on_uvloop
async def test_an_engine_is_asked_once_and_its_count_is_what_is_in_flight() -> None:
    async def slow(asked: Asked) -> None:
        if asked.head.startswith(b"POST /tokenize "):
            asked.send(GOOD)
        else:
            await release.wait()
            asked.send(prefill_answer())

    release = asyncio.Event()
    async with capped(slow) as (path, (p,)):
        body = {"model": MODEL, "prompt": "the narwhal dives", "max_tokens": 4}
        running = [asyncio.create_task(path.post(body)) for _ in range(2)]
        await until(lambda: path.data.inflight.tokens.get("p0") == 2 * COUNT)
        # A third would go beyond the cap of 100.
        third = await path.post(body)
        assert (third.status, third.error["type"]) == (429, "server_overloaded_error")
        release.set()
        assert [(await each).status for each in running] == [200, 200]
        assert bodies(p, b"/tokenize") == [{"model": MODEL, "prompt": "the narwhal dives"}] * 3
        assert p.asked[0].headers["x-request-id"].endswith("-1-count")
        await path.at_rest()
        assert path.data.inflight.tokens == {}
        # What others have counts, too.
        path.feed.picture = Picture(tokens={"p0": 70})
        assert (await path.post(body)).status == 429
        path.feed.picture = Picture(tokens={"p0": 60})
        assert (await path.post(body)).status == 200
        # A prompt that is larger than the cap alone is served when nothing else is.
        path.feed.picture = Picture()
        assert (await path.post({**body, "prompt": list(range(500))})).status == 200
        assert len(bodies(p, b"/tokenize")) == 5, "token ids need no counting"


FAILS = {
    "500": (answer(b"{}", "500 Oops"), Outcome.HTTP_5XX),
    "429": (answer(b"{}", "429 Busy"), Outcome.HTTP_429),
    "401": (answer(b"{}", "401 Who"), Outcome.WRONG_IDENTITY),
    "silent": (None, Outcome.READ_TIMEOUT),
    "cut": (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{", Outcome.READ_TIMEOUT),
}
MEANS_NOTHING = {
    "400": answer(b"{}", "400 Bad"),
    "404": answer(b"{}", "404 None"),
    "no JSON": answer(b"hello"),
    "no count": answer(b'{"count": true}'),
    "a negative count": answer(b'{"count": -1}'),
}


@pytest.mark.rule("F2", "V1")
@pytest.mark.parametrize("name", FAILS)
@on_uvloop
async def test_a_failed_count_is_evidence_and_the_request_goes_on_elsewhere(name: str) -> None:
    reply, outcome = FAILS[name]
    async with capped(counts(reply), counts(GOOD), cap=10_000) as (path, (bad, _)):
        while not bodies(bad, b"/tokenize"):
            path.reporter.legs.clear()
            assert (await path.post()).status == 200
        seen = [(leg.engine, leg.phase, leg.outcome) for leg in path.reporter.legs]
        assert seen[0] == ("p0", Phase.PREFILL, outcome)
        assert seen[1:] == [
            ("p1", Phase.PREFILL, Outcome.HANDOFF),
            ("d", Phase.DECODE, Outcome.ANSWER_COMPLETE),
        ]
        await path.at_rest()
        assert path.data.inflight.tokens == {}


@pytest.mark.rule("F4", "F5")
@pytest.mark.parametrize("name", MEANS_NOTHING)
@on_uvloop
async def test_an_answer_without_a_count_means_nothing(name: str) -> None:
    async with capped(counts(MEANS_NOTHING[name]), cap=10_000) as (path, _):
        assert (await path.post()).status == 200
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.ANSWER_COMPLETE]


@pytest.mark.rule("V9")
@on_uvloop
async def test_a_count_on_a_connection_that_was_closed_meanwhile_is_sent_once_more() -> None:
    async with capped(counts(GOOD), cap=10_000) as (path, (p,)):
        assert (await path.post()).status == 200
        await until(lambda: path.data.legs.connections)
        for asked in p.asked:
            asked.writer.transport.abort()  # as an engine that restarts its idle connections
        assert (await path.post()).status == 200
        assert Outcome.RESET not in path.reporter.outcomes


@pytest.mark.rule("V9", "F2")
@pytest.mark.parametrize("after_s", [0.4, 1.6])
@on_uvloop
async def test_a_count_whose_connection_closes_later_is_a_failure(after_s: float) -> None:
    """And its prompt is estimated."""
    closing = False

    async def script(asked: Asked) -> None:
        if closing and asked.head.startswith(b"POST /tokenize") and len(bodies(p, b"/tokenize")) == 2:
            await asyncio.sleep(after_s)
            asked.writer.transport.abort()
        else:
            await counts(GOOD)(asked)

    async with capped(script, cap=10_000, tokenize_timeout_s=5) as (path, (p,)):
        assert (await path.post()).status == 200
        closing = True
        assert (await path.post()).status == 200
        assert len(bodies(p, b"/tokenize")) == (3 if after_s < 1.0 else 2)
        assert (Outcome.RESET in path.reporter.outcomes) == (after_s > 1.0)


@on_uvloop
async def test_nobody_is_asked_where_no_cap_wants_to_know_or_counting_is_off() -> None:
    async with (
        scripted(counts(GOOD)) as p,
        scripted(answers) as d,
        data_path(placed({"p": p.url}, {"d": d.url}), settings(engine=ON)) as path,
    ):
        assert (await path.post()).status == 200
        assert bodies(p, b"/tokenize") == []
    async with capped(counts(GOOD), cap=100, tokenize=False) as (path, (p,)):
        # 4 bytes a token, of the whole body.
        assert (await path.post({"model": MODEL, "prompt": "x" * 200})).status == 200
        path.feed.picture = Picture(tokens={"p0": 50})
        assert (await path.post({"model": MODEL, "prompt": "x" * 200})).status == 429
        assert bodies(p, b"/tokenize") == []


def test_what_the_connector_asks_and_understands() -> None:
    connector = VllmNixl()

    def asks(route: Route, **fields: Any) -> Any:
        body = json.dumps({"model": "m", "max_tokens": 3, **fields}).encode()
        request = connector.parse(route, body)
        return connector.known_tokens(request), json.loads(connector.count_body(request))

    messages = [{"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert asks(Route.COMPLETIONS, prompt="a b") == (None, {"model": "m", "prompt": "a b"})
    assert asks(Route.COMPLETIONS, prompt=["a b"]) == (None, {"model": "m", "prompt": "a b"})
    assert asks(Route.COMPLETIONS, prompt=[1, 2, 3])[0] == 3
    assert asks(Route.COMPLETIONS, prompt=[[1, 2]])[0] == 2
    assert asks(Route.CHAT, messages=messages, tools=tools, temperature=1) == (
        None,
        {"model": "m", "add_generation_prompt": True, "messages": messages, "tools": tools},
    )
    assert connector.counted(b'{"count": 7}') == 7
    for bad in (b"", b"[]", b"{}", b'{"count": "7"}', b'{"count": 1.5}', b'{"count": -1}', b"[" * 5000):
        with pytest.raises(CountUnusable):
            connector.counted(bad)


@on_uvloop
async def test_with_an_engine_that_counts_as_real_ones_do() -> None:
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d")) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url}), settings(engine=ON)) as path,
    ):
        placement = path.feed.placement
        assert placement is not None
        engines = {**placement.engines, "p": entry("p", p.url, Phase.PREFILL, max_inflight_tokens=1000)}
        path.feed.placement = Placement(epoch=1, version=2, engines=engines)
        await p.set_fault("delay", seconds=0.3, phase="prefill")
        prompt = "the narwhal dives " * 8
        running = asyncio.create_task(path.post({"model": MODEL, "prompt": prompt, "max_tokens": 2}))
        await until(lambda: path.data.inflight.tokens.get("p") == len(tokenize(prompt)))
        assert (await running).status == 200
