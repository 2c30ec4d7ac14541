"""Streams: which bytes reach the client, when, and how each way of ending is told apart."""

import asyncio
import contextlib
import hashlib

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.stream import StreamRelay
from narwhal.vocabulary import Outcome, Phase, RequestResult
from tests.metronome import Metronome
from tests.proxy.harness import (
    DONE,
    LAST,
    STREAM_HEAD,
    WAIT_S,
    Asked,
    Script,
    before,
    chunk,
    on_uvloop,
    settings,
    token,
    until,
)

ERROR_EVENT = b'data: {"error": {"message": "boom", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
USAGE = b'data: {"id": "x", "choices": [], "usage": {"total_tokens": 9}}\n\n'
PING = b": ping\n\n"


def chat(finish: str | None = None, **delta: object) -> bytes:
    """One event of a chat."""
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + b"\n\n"


ROLE = chat(role="assistant", content="")
SAID = chat(content="a")
FINISHED = chat(finish="length", role="assistant", content="")
CALLED = chat(role="assistant", content="", tool_calls=[{"index": 0}])


class Out:
    """A transport that keeps what is written, and a source that keeps how the leg was settled."""

    def __init__(self) -> None:
        self.written = b""
        self.ends: list[tuple[LegEnd, bool]] = []
        self.tokens = self.begun = 0

    def write(self, data: bytes) -> None:
        self.written += data

    def settle(self, end: LegEnd, *, abort: bool) -> None:
        self.ends.append((end, abort))

    def first_token(self) -> None:
        assert not self.written, "output before the first token"
        self.tokens += 1

    def output(self) -> None:
        assert not self.written, "bytes before anybody knows that output begins"
        assert self.tokens == 1
        self.begun += 1


def relayed(data: bytes, sizes: list[int], *, complete: bool = True) -> tuple[Out, StreamRelay]:
    """Feed `data` cut into pieces of these sizes, again and again."""
    out = Out()
    relay = StreamRelay(out, out, out, b"", chunked=False)  # type: ignore[arg-type]
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        relay.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    if complete:
        relay.complete()
    return out, relay


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


STREAMS = {
    "plain": token("a") + token("b") + DONE,
    "held back before the first token": PING + USAGE + token("a") + USAGE + DONE,
    "several characters of several bytes": token("鯨🐋") + token("é–") + DONE,
    "the word error in the text": token('say "error" and [DONE]') + token("a") + DONE,
    "an error key that is null": token() + b'data: {"choices": [{"text": "b"}], "error": null}\n\n' + DONE,
    "a first event with empty text": token("") + token("a") + DONE,
    "an event of two lines": b'event: x\ndata: {"choices":\ndata: [{"text": ""}]}\n\n' + token() + DONE,
}


@pytest.mark.rule("F4")
@pytest.mark.case("F6")
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("ends", [bytes, crlf])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 10_000])
def test_a_whole_stream_goes_on_as_it_came(name: str, ends: type[bytes], size: int) -> None:
    data = ends(STREAMS[name])
    out, _ = relayed(data, [size])
    assert out.written == data
    assert [(end.outcome, abort) for end, abort in out.ends] == [(Outcome.STREAM_COMPLETE, False)]


ENDINGS = {
    # what the engine sent → (what is seen, what reaches the client of it)
    token() + token() + LAST[:0]: (Outcome.STREAM_CUT, token() + token()),
    token() + token() + b"data: [DO": (Outcome.STREAM_CUT, token() + token()),
    b"": (Outcome.STREAM_CUT, b""),
    PING + USAGE: (Outcome.STREAM_CUT, b""),
    DONE: (Outcome.MARKER_WITHOUT_TOKEN, b""),
    USAGE + DONE: (Outcome.MARKER_WITHOUT_TOKEN, b""),
    ERROR_EVENT + DONE: (Outcome.ERROR_EVENT, b""),
    token() + ERROR_EVENT + DONE: (Outcome.ERROR_EVENT, token() + ERROR_EVENT),
    token() + ERROR_EVENT + ERROR_EVENT + token() + DONE: (Outcome.ERROR_EVENT, token() + ERROR_EVENT),
    b'data: {"choices": [{"text": "a"}], "error": {"code": 1}}\n\n' + DONE: (Outcome.ERROR_EVENT, b""),
    b"<html>it works</html>\n\n": (Outcome.STREAM_MALFORMED, b""),
    b"data: {not json\n\n" + token() + DONE: (Outcome.STREAM_MALFORMED, b""),
    b"data: [1]\n\n" + token() + DONE: (Outcome.STREAM_MALFORMED, b""),
    token() + b"garbage\n\n" + token() + DONE: (Outcome.STREAM_MALFORMED, token()),
    token() + b"data: [DONE]": (Outcome.STREAM_COMPLETE, token() + DONE),  # ended for good: no blank line can follow
    token() + DONE + token(): (Outcome.STREAM_COMPLETE, token() + DONE),
    # Who speaks is no output yet; what is said is, be it nothing but its end.
    ROLE + ERROR_EVENT + DONE: (Outcome.ERROR_EVENT, b""),
    ROLE + PING + ROLE + ERROR_EVENT: (Outcome.ERROR_EVENT, b""),
    ROLE: (Outcome.STREAM_CUT, b""),
    ROLE + b"data: {not json\n\n": (Outcome.STREAM_MALFORMED, b""),
    ROLE + SAID + ERROR_EVENT: (Outcome.ERROR_EVENT, ROLE + SAID + ERROR_EVENT),
    ROLE + FINISHED + ERROR_EVENT: (Outcome.ERROR_EVENT, ROLE + FINISHED + ERROR_EVENT),
    ROLE + CALLED + ERROR_EVENT: (Outcome.ERROR_EVENT, ROLE + CALLED + ERROR_EVENT),
    ROLE + DONE: (Outcome.STREAM_COMPLETE, ROLE + DONE),
    ROLE + PING + SAID + DONE: (Outcome.STREAM_COMPLETE, ROLE + PING + SAID + DONE),
}


@pytest.mark.rule("F2", "V8")
@pytest.mark.parametrize("data", ENDINGS, ids=range(len(ENDINGS)))
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_each_way_to_end_is_told_apart_however_the_bytes_were_cut(data: bytes, size: int) -> None:
    outcome, passed = ENDINGS[data]
    out, relay = relayed(data, [size])
    assert [end.outcome for end, _ in out.ends] == [outcome]
    assert out.written == passed
    assert relay.output == bool(passed) == out.begun


@pytest.mark.rule("V8")
@given(
    events=st.lists(
        st.sampled_from([token("a"), token("é🐋"), USAGE, PING, ERROR_EVENT, DONE, ROLE, SAID, b"junk\n\n"]), max_size=6
    ),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_the_cuts_never_matter(events: list[bytes], sizes: list[int]) -> None:
    data = b"".join(events)
    whole, _ = relayed(data, [len(data) + 1])
    cut, _ = relayed(data, sizes)
    one_by_one = Out()
    relay = StreamRelay(one_by_one, one_by_one, one_by_one, b"", chunked=False)  # type: ignore[arg-type]
    for event in events:
        relay.feed(event)
    relay.complete()
    assert cut.written == whole.written == one_by_one.written
    assert (
        [e.outcome for e, _ in cut.ends]
        == [e.outcome for e, _ in whole.ends]
        == [e.outcome for e, _ in one_by_one.ends]
    )


def test_an_event_without_end_is_bounded() -> None:
    out, _ = relayed(token() + b"data: " + b"x" * 5_000_000, [65_536], complete=False)
    assert [end.outcome for end, _ in out.ends] == [Outcome.STREAM_MALFORMED]


# --- through sockets ---


def sends(*parts: bytes, close: bool = False, hang: bool = False) -> Script:
    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD, *parts)
        if hang:
            await asyncio.Event().wait()
        if close:
            await asked.writer.drain()
            asked.writer.close()

    return script


@pytest.mark.case("F6")
@pytest.mark.rule("F2")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64])
@on_uvloop
async def test_case_F6_every_byte_in_a_segment_of_its_own(size: int) -> None:
    data = b"".join(token(text) for text in ("鯨", "🐋🐟", "é", "a")) + DONE

    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD)
        await asked.send_slowly(b"".join(chunk(data[at : at + size]) for at in range(0, len(data), size)) + LAST, 1)

    async with before(script) as (path, _, _):
        got = await path.post(stream=True)
        assert hashlib.sha256(got.body).digest() == hashlib.sha256(data).digest()
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.STREAM_COMPLETE]


@pytest.mark.case("F1")
@pytest.mark.rule("V8", "F2")
@pytest.mark.parametrize("how", ["clean end", "connection closed", "connection reset", "bad chunk size"])
@on_uvloop
async def test_case_F1_a_stream_that_breaks_off_is_never_a_finished_one(how: str) -> None:
    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD, chunk(token("a")), chunk(token("b")))
        await asked.writer.drain()
        if how == "clean end":
            asked.send(LAST)
        elif how == "bad chunk size":
            asked.send(b"zz\r\n")
        elif how == "connection closed":
            asked.writer.close()
        else:
            asked.writer.transport.abort()

    async with before(script) as (path, _, _):
        got = await path.post(stream=True)
        assert got.status == 200
        assert got.body.startswith(token("a") + token("b"))
        last = orjson.loads(got.events[-1])
        assert len(got.events) == 3
        assert last["error"]["type"] == "upstream_error"
        assert last["error"]["code"] == "decode"
        expected = Outcome.STREAM_MALFORMED if how == "bad chunk size" else Outcome.STREAM_CUT
        assert path.reporter.outcomes == [Outcome.HANDOFF, expected]
        assert path.reporter.results == [RequestResult.FAILED]
        failed = path.reporter.legs[-1].run
        assert failed is not None
        assert failed.failure is not None
        assert failed.failure.producer == "p"
        # The client's connection is in order: the next request on it is served.
        assert (await path.post(stream=True)).status == 200


BEFORE_OUTPUT = {
    "no token, cut": ((), {"close": True}, Outcome.STREAM_CUT, 502),
    "marker without a token": ((chunk(DONE), LAST), {}, Outcome.MARKER_WITHOUT_TOKEN, 502),
    "error event": ((chunk(ERROR_EVENT), chunk(DONE), LAST), {}, Outcome.ERROR_EVENT, 502),
    "given up": (
        (chunk(b'data: {"choices": [{"finish_reason": "abort"}]}\n\n'), chunk(DONE), LAST),
        {},
        Outcome.ERROR_EVENT,
        502,
    ),
    "silence": ((), {"hang": True}, Outcome.FIRST_TOKEN_TIMEOUT, 504),
    "only comments": ((chunk(PING), chunk(PING)), {"hang": True}, Outcome.FIRST_TOKEN_TIMEOUT, 504),
    "no event": ((chunk(b"<html>\n\n"), LAST), {}, Outcome.STREAM_MALFORMED, 502),
}


@pytest.mark.rule("F2", "V8", "V4")
@pytest.mark.parametrize("name", BEFORE_OUTPUT)
@on_uvloop
async def test_a_stream_that_fails_before_its_first_token_is_an_http_error(name: str) -> None:
    parts, options, outcome, status = BEFORE_OUTPUT[name]
    chosen = settings(engine={"first_token_timeout_s": 0.3, "kv_first_pull_timeout_s": 0.3})
    async with before(sends(*parts, **options), chosen=chosen) as (path, _, _):
        got = await path.post(stream=True)
        assert got.status == status
        assert got.headers["Content-Type"] == "application/json"
        assert (got.error["type"], got.error["code"]) == ("upstream_error", "decode")
        assert "127.0.0.1" not in got.body.decode()
        assert path.reporter.outcomes == [Outcome.HANDOFF, outcome]
        await path.at_rest()


@pytest.mark.rule("V8")
@on_uvloop
async def test_an_engines_own_error_event_is_passed_on_once_and_its_marker_is_not() -> None:
    async with before(sends(chunk(token()), chunk(ERROR_EVENT), chunk(DONE), LAST)) as (path, _, _):
        got = await path.post(stream=True)
        assert got.body == token() + ERROR_EVENT
        assert path.reporter.outcomes[-1] is Outcome.ERROR_EVENT


GIVEN_UP = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}\n\n'


@pytest.mark.rule("F2", "V8")
@pytest.mark.parametrize("size", [0, 1, 7, 64])
@on_uvloop
async def test_an_answer_that_the_engine_gave_up_is_never_passed_off_as_whole(size: int) -> None:
    """An engine that is being stopped ends streams with the finish reason `abort` and the terminal marker."""

    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD)
        data = chunk(token("a")) + chunk(token("b")) + chunk(GIVEN_UP) + chunk(DONE) + LAST
        # The proxy hangs up where the engine gave up; what would follow has nowhere to go.
        with contextlib.suppress(RuntimeError, ConnectionError):
            if size:
                await asked.send_slowly(data, size)
            else:
                asked.send(data)

    async with before(script) as (path, _, _):
        got = await path.post(stream=True)
        assert got.body.startswith(token("a") + token("b"))
        assert DONE not in got.body
        assert b"abort" not in got.body
        assert orjson.loads(got.events[-1])["error"]["type"] == "upstream_error"
        assert path.reporter.outcomes[-1] is Outcome.ERROR_EVENT
        assert path.reporter.results == [RequestResult.FAILED]


@pytest.mark.rule("F2")
@on_uvloop
async def test_a_text_that_says_abort_is_a_text() -> None:
    said = (
        token('\\"abort\\"') + b'data: {"choices": [{"text": "abort", "stop": "abort", "finish_reason": "stop"}]}\n\n'
    )
    async with before(sends(chunk(token()), chunk(said), chunk(DONE), LAST)) as (path, _, _):
        got = await path.post(stream=True)
        assert got.body == token() + said + DONE
        assert path.reporter.outcomes[-1] is Outcome.STREAM_COMPLETE


@pytest.mark.case("F8")
@pytest.mark.rule("F2")
@on_uvloop
async def test_case_F8_a_finish_reason_and_then_silence() -> None:
    finish = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
    chosen = settings(engine={"decode_read_timeout_s": 0.3})
    async with before(sends(chunk(token()), chunk(finish), hang=True), chosen=chosen) as (path, _, d):
        with Metronome() as metronome:
            got = await path.post(stream=True)
        assert metronome.took_s > 0.25
        assert metronome.ran_s < 1.3
        assert got.body.startswith(token() + finish)
        assert DONE not in got.body
        assert orjson.loads(got.events[-1])["error"]["type"] == "upstream_error"
        assert path.reporter.outcomes[-1] is Outcome.STREAM_SILENT
        await asyncio.wait_for(d.asked[0].gone.wait(), WAIT_S)


@pytest.mark.case("F9")
@on_uvloop
async def test_case_F9_every_token_is_passed_on_at_once_and_nothing_is_held_back() -> None:
    got = b""

    async def script(asked: Asked) -> None:
        """It sends no token before the client has the one before."""
        asked.send(STREAM_HEAD)
        for number in range(12):
            asked.send(chunk(token(str(number))))
            await until(lambda: token(str(number)) in got, f"token {number}")  # noqa: B023 - awaited at once
        asked.send(chunk(DONE), LAST)

    async with before(script) as (path, _, _):
        body = {"model": "sim-model", "prompt": "a", "stream": True}
        async with path.session.post(path.url + "/v1/completions", json=body) as answer:
            headers = answer.headers
            async for data in answer.content.iter_any():
                got += data
        assert got == b"".join(token(str(number)) for number in range(12)) + DONE
        assert headers["X-Accel-Buffering"] == "no"
        assert headers["Cache-Control"] == "no-cache"
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert "Content-Length" not in headers
        assert "Content-Encoding" not in headers


@pytest.mark.rule("F2")
@on_uvloop
async def test_silence_counts_from_the_last_byte_not_from_the_first_token() -> None:
    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD)
        for _ in range(8):
            asked.send(chunk(token()))
            await asyncio.sleep(0.1)
        asked.send(chunk(DONE), LAST)

    async with before(script, chosen=settings(engine={"decode_read_timeout_s": 0.3})) as (path, _, _):
        got = await path.post(stream=True)
        assert got.body.endswith(DONE)


@on_uvloop
async def test_a_client_that_does_not_read_pauses_the_engine() -> None:
    big = token("x" * 50_000)
    sent = 0

    async def script(asked: Asked) -> None:
        nonlocal sent
        asked.send(STREAM_HEAD)
        for _ in range(600):
            asked.send(chunk(big))
            sent += 1
            await asked.writer.drain()
        asked.send(chunk(DONE), LAST)

    # Silence that the client causes is not the engine's: the limit is shorter than the pause.
    async with before(script, chosen=settings(engine={"decode_read_timeout_s": 0.4})) as (path, _, _):
        body = {"model": "sim-model", "prompt": "a", "stream": True}
        async with path.session.post(path.url + "/v1/completions", json=body) as answer:
            answer.connection.transport.pause_reading()  # type: ignore[union-attr]
            await until(lambda: sent > 1)
            before_pause = -1
            while before_pause != sent:
                before_pause = sent
                await asyncio.sleep(0.5)
            assert sent < 500, "the proxy read all of it"
            answer.connection.transport.resume_reading()  # type: ignore[union-attr]
            data = await answer.read()
        assert data == big * 600 + DONE
        assert path.reporter.outcomes == [Outcome.HANDOFF, Outcome.STREAM_COMPLETE]


@pytest.mark.rule("V13")
@on_uvloop
async def test_the_first_transfer_of_a_pair_gets_its_own_deadline_and_later_ones_do_not() -> None:
    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD)
        await asyncio.sleep(0.6)
        asked.send(chunk(token()), chunk(DONE), LAST)

    chosen = settings(engine={"first_token_timeout_s": 0.3, "kv_first_pull_timeout_s": 2.0})
    async with before(script, chosen=chosen) as (path, _, _):
        assert (await path.post(stream=True)).status == 200
        assert (await path.post(stream=True)).status == 504
        # A new incarnation of either engine: they have to shake hands again.
        for changed in ("p", "d"):
            placement = path.feed.placement
            assert placement is not None
            engines = dict(placement.engines)
            entry = engines[changed]
            kept = {name: getattr(entry, name) for name in ("id", "url", "role", "phases")}
            engines[changed] = type(entry)(**kept, incarnation=entry.incarnation + 1)
            path.feed.placement = type(placement)(epoch=1, version=placement.version + 1, engines=engines)
            assert (await path.post(stream=True)).status == 200
            assert (await path.post(stream=True)).status == 504
        assert path.reporter.legs[-1].phase is Phase.DECODE
