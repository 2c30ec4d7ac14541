"""Several choices of one prompt (`n`): a decode engine reads the handoff once, into its own cache, and is asked for the
choices then. Each choice would read it for itself otherwise, and it is there for the first one only."""

import asyncio
import itertools
from typing import Any

import orjson
import pytest

from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import sim_engines
from narwhal.sim.text import expected_chat_text, expected_text
from narwhal.vocabulary import Outcome, RequestResult
from tests.metronome import Metronome
from tests.proxy.harness import (
    MODEL,
    WAIT_S,
    Asked,
    Script,
    answer,
    answers,
    before,
    data_path,
    on_uvloop,
    placed,
    prefills,
    settings,
    until,
)

PROMPT = "the narwhal dives under the ice " * 4
MESSAGES = [{"role": "user", "content": "how deep?"}]
REFUSAL = b'{"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}'
ABORTED = b'{"choices": [{"text": "a", "finish_reason": "abort"}]}'


def loads(asked: Asked) -> bool:
    """Whether this is the request that reads the handoff."""
    return "kv_transfer_params" in orjson.loads(asked.body)


def decodes(load: Script = answers, choices: Script = answers) -> Script:
    """A decode engine that answers the two requests of a leg so."""

    async def run(asked: Asked) -> None:
        await (load if loads(asked) else choices)(asked)

    return run


async def fails(asked: Asked) -> None:
    asked.send(answer(b"{}", "500 Internal Server Error"))


async def refuses(asked: Asked) -> None:
    asked.send(answer(REFUSAL, "400 Bad Request"))


async def gives_up(asked: Asked) -> None:
    asked.send(answer(ABORTED))


async def closes(asked: Asked) -> None:
    asked.writer.close()


async def cuts(asked: Asked) -> None:
    asked.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
    asked.writer.close()


async def hangs(asked: Asked) -> None:
    await asyncio.Event().wait()


def texts_of(body: bytes, stream: bool, count: int) -> list[str]:
    """The text of each choice of an answer that ended well."""
    texts = [""] * count
    parts = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event] if stream else [body]
    if stream:
        assert parts.pop() == b"[DONE]"
    for part in map(orjson.loads, parts):
        for choice in part["choices"]:
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            texts[choice["index"]] += said.get("content") or ""
    return texts


@pytest.mark.rule("V5", "V6")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@on_uvloop
async def test_every_choice_has_its_own_right_text_and_the_handoff_is_read_once(stream: bool) -> None:
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d", tpot_ms=1.0)) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url})) as path,
    ):
        body = {"model": MODEL, "max_tokens": 9, "n": 4, "stream": stream}
        got = await path.post({**body, "prompt": PROMPT})
        assert texts_of(got.body, stream, 4) == [expected_text(PROMPT, 9, index=at) for at in range(4)]
        got = await path.post({**body, "messages": MESSAGES}, route="/v1/chat/completions")
        assert texts_of(got.body, stream, 4) == [expected_chat_text(MESSAGES, 9, index=at) for at in range(4)]
        totals = p.totals()
        assert (totals["issued"], totals["freed"], totals["pulled"], totals["open"]) == (2, 2, 2, 0)
        complete = Outcome.STREAM_COMPLETE if stream else Outcome.ANSWER_COMPLETE
        assert path.reporter.outcomes == [Outcome.HANDOFF, complete] * 2, "one leg, told of once"
        assert path.data.metrics.handoffs_abandoned == 0


@on_uvloop
async def test_the_choices_are_asked_for_on_the_same_engine_in_the_clients_own_bytes() -> None:
    raw = b'{ "n" : 3, "model":"%b", "prompt":"x", "max_tokens": 4 }' % MODEL.encode()
    async with before(answers) as (path, _, d):
        assert (await path.post(raw, headers={"X-Request-Id": "me"})).status == 200
        load, choices = d.asked
        assert [asked.headers["x-request-id"] for asked in d.asked] == ["me-1-load", "me-1-decode"]
        assert orjson.loads(load.body)["n"] == 1
        assert choices.body == raw
        assert d.connections == 1


@pytest.mark.rule("R4")
@pytest.mark.case("D10", "H1")
@on_uvloop
async def test_the_decode_engine_is_needed_throughout_and_the_producer_until_the_handoff_is_read() -> None:
    go = {True: asyncio.Event(), False: asyncio.Event()}
    idle: list[str] = []

    async def run(asked: Asked) -> None:
        await go[loads(asked)].wait()
        await answers(asked)

    async with before(run) as (path, _, d):
        inflight = path.data.inflight
        inflight.on_idle = idle.append
        asking = asyncio.create_task(path.post(n=2))
        await until(lambda: len(d.asked) == 1)
        assert (inflight.legs, inflight.unread) == ({"d": 1}, {"p": 1})
        idle.clear()
        go[True].set()
        await until(lambda: len(d.asked) == 2)
        assert (inflight.legs, inflight.unread, idle) == ({"d": 1}, {}, ["p"])  # never without d
        go[False].set()
        assert (await asking).status == 200
        await path.at_rest()
        assert idle == ["p", "d"]


FAILURES: list[tuple[str, Script, Outcome]] = [
    ("load", fails, Outcome.HTTP_5XX),
    ("load", closes, Outcome.RESET),  # of the choices' the connection is a reused one: below
    ("load", cuts, Outcome.ANSWER_CUT),
    ("load", gives_up, Outcome.ANSWER_CUT),
    ("choices", fails, Outcome.HTTP_5XX),
    ("choices", cuts, Outcome.ANSWER_CUT),
    ("choices", gives_up, Outcome.ANSWER_CUT),
]


@pytest.mark.rule("F2", "F7", "V4", "V5")
@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize(
    ("where", "script", "outcome"), FAILURES, ids=[f"{where}-{script.__name__}" for where, script, _ in FAILURES]
)
@on_uvloop
async def test_a_failure_of_either_request_is_one_of_the_leg(
    where: str, script: Script, outcome: Outcome, attempts: int
) -> None:
    """Its producer is named as long as its KV had a part in it; another attempt has a prefill of its own."""
    broken = iter([script])

    async def once(asked: Asked) -> None:
        await next(broken, answers)(asked)

    run = decodes(load=once) if where == "load" else decodes(choices=once)
    chosen = settings(serving={"max_attempts": attempts, "retry_base_s": 0.01})
    async with before(run, chosen=chosen) as (path, p, d):
        got = await path.post(n=2)
        await path.at_rest()
        (failed,) = [seen.run for seen in path.reporter.legs if seen.run is not None]
        assert failed.outcome is outcome
        assert failed.failure is not None
        assert failed.failure.producer == ("p" if where == "load" else "")
        assert path.reporter.outcomes[:2] == [Outcome.HANDOFF, outcome]
        assert len(p.asked) == attempts
        if attempts == 1:
            assert (got.status, got.error["code"]) == (502, "decode")
            assert path.reporter.requests == [(RequestResult.FAILED, 0)]
        else:
            assert got.status == 200
            assert sum(map(loads, d.asked)) == 2, "each attempt reads its own"
            assert path.reporter.requests == [(RequestResult.SERVED, 1)]


@pytest.mark.rule("V13", "F2")
@pytest.mark.case("D12")
@pytest.mark.parametrize("first", [True, False], ids=["first transfer", "later"])
@on_uvloop
async def test_reading_the_handoff_has_the_deadline_of_a_first_token(first: bool) -> None:
    chosen = settings(engine={"kv_first_pull_timeout_s": 1.2, "first_token_timeout_s": 0.4})
    scripts = iter([] if first else [answers])

    async def load(asked: Asked) -> None:
        await next(scripts, hangs)(asked)

    async with before(decodes(load=load), chosen=chosen) as (path, _, _):
        if not first:
            assert (await path.post(n=2)).status == 200
        with Metronome() as metronome:
            got = await path.post(n=2)
        assert metronome.took_s > (1.15 if first else 0.35)
        assert metronome.ran_s < (2.2 if first else 1.1)
        assert got.status == 504
        assert path.reporter.outcomes[-1] is Outcome.FIRST_TOKEN_TIMEOUT


@pytest.mark.case("A5", "D4")
@pytest.mark.rule("F4")
@pytest.mark.parametrize("where", ["load", "choices"])
@on_uvloop
async def test_case_A5_a_refusal_is_passed_on_and_only_an_unread_handoff_is_abandoned(where: str) -> None:
    async with before(decodes(**{where: refuses})) as (path, _, d):
        got = await path.post(n=2, stream=True)
        assert (got.status, got.body) == (400, REFUSAL)
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.CLIENT_ERROR]
        assert path.data.metrics.handoffs_abandoned == (where == "load")
        assert len(d.asked) == (1 if where == "load" else 2)


@pytest.mark.case("F14", "A15")
@pytest.mark.rule("V7", "F5")
@pytest.mark.parametrize("where", ["load", "choices"])
@on_uvloop
async def test_case_F14_a_client_that_leaves_is_seen_by_the_engine(where: str) -> None:
    async with before(decodes(**{where: hangs})) as (path, p, d):
        asking = asyncio.create_task(path.post(n=2))
        await until(lambda: len(d.asked) == (1 if where == "load" else 2))
        asking.cancel()
        await asyncio.wait_for(d.asked[-1].gone.wait(), WAIT_S)
        await path.at_rest()
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.CANCELLED]
        assert path.data.inflight.unread == {}
        assert len(p.asked) == 1


@pytest.mark.rule("V9")
@pytest.mark.parametrize("where", ["load", "choices"])
@on_uvloop
async def test_an_idle_connection_that_was_closed_costs_no_attempt(where: str) -> None:
    """Not sent again: it may have been read, or begun."""
    numbers = itertools.count()
    closing = {"load": 2, "choices": 3}[where]  # of the requests to the decode engine; the first two go well

    async def run(asked: Asked) -> None:
        if next(numbers) == closing:
            asked.writer.close()
        else:
            await answers(asked)

    async with before(run) as (path, p, d):
        assert (await path.post(n=2)).status == 200
        assert (await path.post(n=2)).status == 200
        assert len(p.asked) == 3
        assert [loads(asked) for asked in d.asked] == [
            True,
            False,
            *([True] if where == "load" else [True, False]),
            True,
            False,
        ]
        assert path.reporter.requests == [(RequestResult.SERVED, 0)] * 2


@pytest.mark.rule("V6")
@pytest.mark.case("A2")
@on_uvloop
async def test_case_A2_only_the_request_that_reads_the_handoff_needs_it_young() -> None:
    async def slow(asked: Asked) -> None:
        await asyncio.sleep(0.6)
        await answers(asked)

    chosen = settings(serving={"handoff_max_age_s": 0.5})
    async with before(decodes(load=slow), chosen=chosen) as (path, _, _):
        assert (await path.post(n=2)).status == 200


@pytest.mark.rule("F2")
@on_uvloop
async def test_a_beam_search_is_refused_before_any_engine_is_asked() -> None:
    async with before(answers, prefills) as (path, p, d):
        body: dict[str, Any] = {"model": MODEL, "prompt": "x", "use_beam_search": True, "n": 2}
        got = await path.post(body)
        assert (got.status, got.error["param"]) == (400, "use_beam_search")
        assert (p.asked, d.asked) == ([], [])
