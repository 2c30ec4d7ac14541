"""The client's side: what is refused and how, what never reaches an engine, and the end of a worker."""

import asyncio
import gc
import json

import orjson
import pytest

from narwhal.placement import Placement
from narwhal.proxy.seams import Picture
from narwhal.vocabulary import NotReady, Outcome, Phase, RequestResult
from tests.metronome import Metronome
from tests.proxy.harness import (
    DONE,
    LAST,
    MODEL,
    STREAM_HEAD,
    WAIT_S,
    Asked,
    answers,
    before,
    chunk,
    data_path,
    entry,
    full_listener,
    on_uvloop,
    placed,
    prefill_answer,
    read_answer,
    request_bytes,
    settings,
    token,
    until,
)

BODY = {"model": MODEL, "prompt": "a narwhal", "max_tokens": 3}


# --- G9: odd bodies ---

ODD: dict[str, tuple[bytes, set[int]]] = {
    "deep nesting of lists": (
        b'{"model": "sim-model", "prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        {400},
    ),
    "nesting beyond what can be written": (
        b'{"model": "sim-model", "prompt": "a", "x": ' + b'{"a":' * 600 + b"1" + b"}" * 600 + b"}",
        {400},
    ),
    "an endless opening": (b"[" * 200_000, {400}),
    "NaN": (b'{"model": "sim-model", "prompt": "a", "temperature": NaN}', {400}),
    "Infinity": (b'{"model": "sim-model", "prompt": "a", "temperature": -Infinity}', {400}),
    "a lone surrogate": (b'{"model": "sim-model", "prompt": "\\ud800"}', {400}),
    "a lone surrogate in bytes": (b'{"model": "sim-model", "prompt": "\xed\xa0\x80"}', {400}),
    "not UTF-8": (b'{"model": "sim-model", "prompt": "\xff\xfe"}', {400}),
    "duplicate keys": (b'{"model": "other", "prompt": "a", "prompt": "b", "model": "sim-model"}', {200}),
    "a byte order mark": (b'\xef\xbb\xbf{"model": "sim-model", "prompt": "a"}', {400}),
    "1e400": (b'{"model": "sim-model", "prompt": "a", "temperature": 1e400}', {400}),
    "an integer of 40 digits": (b'{"model": "sim-model", "prompt": "a", "seed": ' + b"9" * 40 + b"}", {200}),
    "nothing": (b"", {400}),
    "a list": (b"[1, 2]", {400}),
    "a string": (b'"hello"', {400}),
    "null": (b"null", {400}),
    "cut short": (b'{"model": "sim-model", "pro', {400}),
    "more behind it": (b'{"model": "sim-model", "prompt": "a"} {"b": 1}', {400}),
    "a model that is a number": (b'{"model": 5, "prompt": "a"}', {400}),
    "no model": (b'{"prompt": "a"}', {400}),
    "a stream that is a word": (b'{"model": "sim-model", "prompt": "a", "stream": "yes"}', {400}),
    "two prompts for one handoff": (b'{"model": "sim-model", "prompt": ["a", "b"]}', {400}),
    "two prompts as embeddings": (b'{"model": "sim-model", "prompt": "", "prompt_embeds": ["QUFB", "QkJC"]}', {400}),
    "two and no other": (b'{"model": "sim-model", "prompt_embeds": ["QUFB", "QkJC"]}', {400}),
    "embeddings beside a prompt": (b'{"model": "sim-model", "prompt": "x", "prompt_embeds": ["QUFB", "QkJC"]}', {400}),
    "one embedding beside a prompt": (b'{"model": "sim-model", "prompt": "x", "prompt_embeds": "QUFB"}', {400}),
    "one in a list beside token ids": (b'{"model": "sim-model", "prompt": [1], "prompt_embeds": ["QUFB"]}', {400}),
    "one beside an empty prompt in a list": (b'{"model": "sim-model", "prompt": [""], "prompt_embeds": "QUFB"}', {400}),
    "one embedding": (b'{"model": "sim-model", "prompt": "", "prompt_embeds": "QUFB"}', {200}),
    "one embedding in a list": (b'{"model": "sim-model", "prompt": null, "prompt_embeds": ["QUFB"]}', {200}),
    "no embeddings": (b'{"model": "sim-model", "prompt": "x", "prompt_embeds": null}', {200}),
    "an empty list of them": (b'{"model": "sim-model", "prompt": "x", "prompt_embeds": []}', {200}),
    "one prompt in a list": (b'{"model": "sim-model", "prompt": ["a"]}', {200}),
    "token ids": (b'{"model": "sim-model", "prompt": [1, 2, 3]}', {200}),
    "white space around": (b'\r\n {"model": "sim-model", "prompt": "a"} \n\t', {200}),
}


@pytest.mark.case("G9")
@pytest.mark.parametrize("name", ODD)
@on_uvloop
async def test_case_G9_odd_bodies_are_refused_quickly_or_passed_through(name: str) -> None:
    body, statuses = ODD[name]
    async with before(answers) as (path, p, d):
        await path.post(BODY)  # connections are up
        asked = len(p.asked), len(d.asked)
        with Metronome() as metronome:
            got = await path.post(body)
        assert metronome.ran_s < 0.05
        assert got.status in statuses
        if got.status == 400:
            assert got.error["type"] == "invalid_request_error"
            assert (len(p.asked), len(d.asked)) == asked, "no engine hears of it"
            assert path.reporter.results[-1] is RequestResult.REJECTED
        else:
            sent = json.loads(d.asked[-1].body)
            kept = {key: value for key, value in sent.items() if key != "kv_transfer_params"}
            assert kept == json.loads(body), "the decode leg has the client's own fields"


@pytest.mark.rule("V10")
@on_uvloop
async def test_a_client_cannot_steer_transfers_and_unknown_fields_reach_the_engine() -> None:
    async with before(answers) as (path, p, d):
        steering = {
            "kv_transfer_params": {"do_remote_prefill": True},
            "ec_transfer_params": {"x": 1},
            "vllm_xargs": {"kv_transfer_params": "x", "mine": 1},
        }
        body = {**BODY, **steering, "new_in_next_year": {"a": [1.5, None, "é"]}}
        assert (await path.post(body)).status == 200
        escaped = orjson.dumps(BODY)[:-1] + b',"kv\\u005ftransfer_params":{"do_remote_prefill":true}}'
        assert (await path.post(escaped)).status == 200
        for asked in (*p.asked, *d.asked):
            sent = json.loads(asked.body, object_pairs_hook=list)
            names = [name for name, _ in sent]
            assert names.count("kv_transfer_params") == 1
            assert "ec_transfer_params" not in names
        for asked in (p.asked[0], d.asked[0]):
            sent = json.loads(asked.body)
            assert sent["new_in_next_year"] == body["new_in_next_year"]
            assert sent["vllm_xargs"] == {"mine": 1}
        assert json.loads(d.asked[0].body)["kv_transfer_params"]["remote_engine_id"] == "prefill-0"


@pytest.mark.rule("V10")
@on_uvloop
async def test_the_two_legs_bodies() -> None:
    async with before(answers) as (path, p, d):
        extra = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 3, "temperature": 0.5}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 9, **extra}
        raw = json.dumps(chat, indent=2).encode()
        assert (await path.post(raw, route="/v1/chat/completions")).status == 200
        assert json.loads(p.asked[0].body) == {
            "model": MODEL,
            "messages": chat["messages"],
            "max_completion_tokens": 1,
            "max_tokens": 1,
            "stream": False,
            "temperature": 0.5,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        assert d.asked[0].body.startswith(raw[:-1]), "the client's own bytes"
        assert set(json.loads(d.asked[0].body)) == {*chat, "kv_transfer_params"}


# --- F17: headers ---


@pytest.mark.case("F17")
@pytest.mark.parametrize("api_key", [None, "engines-only"])
@on_uvloop
async def test_case_F17_only_our_own_headers_reach_an_engine(api_key: str | None) -> None:
    chosen = settings(engine={"api_key": api_key} if api_key else {})
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    given = (
        "Connection: x-foo\r\nX-Foo: 1\r\nTE: trailers\r\nUpgrade: websocket\r\nProxy-Authorization: Basic eA==\r\n"
        "Proxy-Connection: keep-alive\r\nAuthorization: Bearer client\r\nCookie: a=b\r\nX-Forwarded-For: 10.0.0.1\r\n"
        f"Accept-Encoding: gzip\r\nX-Request-Id: mine-7\r\ntraceparent: {trace}\r\n"
    )
    async with before(answers, chosen=chosen) as (path, p, d):
        reader, writer = await path.raw(request_bytes(BODY, headers=given))
        status, head, _ = await read_answer(reader)
        writer.close()
        assert status == 200
        assert b"x-request-id: mine-7\r\n" in head.lower()
        for asked, suffix in ((p.asked[0], "1-prefill"), (d.asked[0], "1-decode")):
            headers = dict(asked.headers)
            assert headers.pop("authorization", None) == (f"Bearer {api_key}" if api_key else None)
            assert headers.pop("x-request-id") == f"mine-7-{suffix}"
            assert headers.pop("traceparent") == trace
            assert set(headers) == {"host", "content-type", "content-length"}
            assert b"client" not in asked.head


@pytest.mark.parametrize("bad", ["a b", "x" * 200, "ü", ""])
@on_uvloop
async def test_a_request_id_that_could_break_a_header_is_replaced(bad: str) -> None:
    async with before(answers) as (path, p, _):
        reader, writer = await path.raw(request_bytes(BODY, headers=f"X-Request-Id: {bad}\r\n"))
        status, head, _ = await read_answer(reader)
        writer.close()
        assert status == 200
        made = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id: "))[14:].decode()
        assert made.startswith("nw-")
        assert p.asked[0].headers["x-request-id"] == f"{made}-1-prefill"


# --- models ---


@pytest.mark.case("G4")
@on_uvloop
async def test_a_model_that_is_not_served() -> None:
    async with before(answers) as (path, p, d):
        got = await path.post({**BODY, "model": "gpt"})
        assert (got.status, got.error["type"], got.error["code"]) == (404, "invalid_request_error", "model_not_found")
        assert (p.asked, d.asked) == ([], [])


# --- admission ---


@pytest.mark.case("G2")
@pytest.mark.rule("V2", "H3")
@on_uvloop
async def test_case_G2_no_engine_and_no_seat_are_two_answers_and_two_reasons() -> None:
    async def hangs(asked: Asked) -> None:
        await asyncio.Event().wait()

    async with before(hangs, chosen=settings(serving={"max_connections": 1})) as (path, p, _):
        running = asyncio.create_task(path.post(BODY))
        await until(lambda: path.data.inflight.legs.get("d"))
        full = await path.post(BODY)
        assert (full.status, full.error["type"], full.headers["Retry-After"]) == (429, "server_overloaded_error", "1")
        placement = path.feed.placement
        path.feed.placement = Placement(epoch=1, version=2)
        none = await path.post(BODY)
        assert (none.status, none.error["type"], none.headers["Retry-After"]) == (503, "service_unavailable", "1")
        assert none.error["code"] == "no eligible engines"
        path.feed.placement = placement
        counted = path.data.metrics.requests
        assert counted["/v1/completions", "429"] == counted["/v1/completions", "503"] == 1
        assert path.reporter.results == [RequestResult.REJECTED] * 2
        assert len(p.asked) == 1
        running.cancel()


@pytest.mark.rule("V2", "P9")
@on_uvloop
async def test_every_engine_at_its_limit_is_saturation() -> None:
    async with before(answers) as (path, p, d):
        path.feed.placement = Placement(
            epoch=1,
            version=2,
            engines={
                "p": entry("p", p.url, Phase.PREFILL, max_inflight=2),
                "d": entry("d", d.url, Phase.DECODE),
            },
        )
        path.feed.picture = Picture(legs={"p": 1})
        assert (await path.post(BODY)).status == 200
        path.feed.picture = Picture(legs={"p": 2})
        assert (await path.post(BODY)).status == 429


@pytest.mark.rule("V5")
@on_uvloop
async def test_decode_leaves_its_producer_unless_nobody_else_can_take_it() -> None:
    async def both(asked: Asked) -> None:
        await (answers(asked) if b'"do_remote_prefill":true' in asked.body else _prefill(asked))

    async def _prefill(asked: Asked) -> None:
        asked.send(prefill_answer())

    phases = frozenset(Phase)
    async with before(both, both) as (path, p, d):
        engines = {
            "p": entry("p", p.url, Phase.PREFILL, phases=phases),
            "d": entry("d", d.url, Phase.DECODE, phases=phases),
        }
        path.feed.placement = Placement(epoch=1, version=2, engines=engines)
        for _ in range(12):
            assert (await path.post(BODY)).status == 200
        legs = path.reporter.legs
        pairs = {(legs[at].engine, legs[at + 1].engine) for at in range(0, len(legs), 2)}
        assert pairs == {("p", "d"), ("d", "p")}
        # The other is at its limit: the producer itself is better than nothing.
        engines["d"] = entry("d", d.url, Phase.DECODE, phases=phases, max_inflight=1)
        path.feed.placement = Placement(epoch=1, version=3, engines=engines)
        path.feed.picture = Picture(legs={"d": 1})
        assert (await path.post(BODY)).status == 200
        assert [seen.engine for seen in path.reporter.legs[-2:]] == ["p", "p"]


@pytest.mark.case("D9", "D1")
@pytest.mark.rule("M10", "H3")
@on_uvloop
async def test_case_D9_strange_placements_never_give_a_500() -> None:
    dead = "http://127.0.0.1:1"
    strange: list[tuple[Placement | None, int, str | None]] = [
        (None, 503, NotReady.NO_PLACEMENT.value),
        (Placement(epoch=1, version=1), 503, "no eligible engines"),
        (placed({"p": dead}, {}), 503, "no eligible engines"),
        (placed({}, {"d": dead}), 503, "no eligible engines"),
        (placed({"p": "nonsense"}, {"d": dead}), 502, "prefill"),
        (placed({"p": "ftp://x"}, {"d": dead}), 502, "prefill"),
        (placed({"p": "http://[::1"}, {"d": dead}), 502, "prefill"),
        (placed({"p": "http://127.0.0.1:99999"}, {"d": dead}), 502, "prefill"),
        (placed({"p": "http://a\r\nX: y"}, {"d": dead}), 502, "prefill"),
        (placed({"p": "http://name.invalid"}, {"d": dead}), 0, None),
    ]
    async with data_path(None) as path:
        for placement, status, code in strange:
            path.feed.placement = placement
            with Metronome() as metronome:
                got = await path.post(BODY)
            if status:
                assert (got.status, got.error["code"]) == (status, code), placement
            assert got.status in (429, 502, 503), placement
            if got.status == 503:
                assert metronome.ran_s < 0.05
            ready = await path.session.get(path.url + "/ready")
            assert ready.status == (503 if status == 503 else 200)
        await path.at_rest()


@pytest.mark.rule("M10", "M5")
@on_uvloop
async def test_ready_and_refusals_say_why_admission_is_closed() -> None:
    async with before(answers) as (path, _, _):
        for reason in ("monitoring degraded: health KeyError", "placement stale", "maintenance"):
            path.feed.reason = reason
            ready = await path.session.get(path.url + "/ready")
            assert (ready.status, (await ready.json())["reason"]) == (503, reason)
            got = await path.post(BODY)
            assert (got.status, got.error["type"], got.error["code"]) == (503, "service_unavailable", reason)
            assert (await path.session.get(path.url + "/health")).status == 200
        path.feed.reason = ""
        assert (await path.post(BODY)).status == 200


@pytest.mark.rule("V3", "M5")
@pytest.mark.case("G7")
@on_uvloop
async def test_waiting_for_a_seat_ends_in_time_and_in_order() -> None:
    release: list[asyncio.Event] = []

    async def waits(asked: Asked) -> None:
        release.append(asyncio.Event())
        await release[-1].wait()
        await answers(asked)

    serving = {"max_connections": 1, "queue_capacity": 2, "queue_timeout_s": 0.4, "request_timeout_s": 20}
    async with before(waits, chosen=settings(serving=serving)) as (path, p, _):
        first = asyncio.create_task(path.post(BODY))
        await until(lambda: release)
        second = asyncio.create_task(path.post(BODY))
        await until(lambda: path.data.admission.waiting == 1)
        third = asyncio.create_task(path.post(BODY))
        await until(lambda: path.data.admission.waiting == 2)
        assert (await path.post(BODY)).status == 429, "the queue is full"
        release[0].set()
        assert (await first).status == 200
        await until(lambda: len(release) == 2)
        late = await third
        assert (late.status, late.error["type"], late.error["code"]) == (504, "timeout", "queue")
        fourth = asyncio.create_task(path.post(BODY))
        await until(lambda: path.data.admission.waiting == 1)
        path.feed.reason = "maintenance"
        gone = await fourth
        assert (gone.status, gone.error["code"]) == (503, "maintenance")
        release[1].set()
        assert (await second).status == 200, "what was dispatched runs to its end"
        assert len(p.asked) == 2
        await path.at_rest()


@pytest.mark.parametrize("stream", [False, True])
@on_uvloop
async def test_requests_leave_no_cycles_behind(stream: bool) -> None:
    """The cycle collector of a worker runs seldom; nothing may pile up for it."""
    async with before(answers) as (path, _, _):
        reader, writer = await path.raw(b"")

        async def ask() -> None:
            writer.write(request_bytes({**BODY, "stream": stream}))
            await (reader.readuntil(chunk(DONE) + LAST) if stream else read_answer(reader))

        await ask()
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                await ask()
            assert gc.collect() < 50, "less than one object a request"
        finally:
            gc.enable()
        writer.close()


# --- the end of a worker ---


@pytest.mark.case("F21")
@on_uvloop
async def test_stopping_lets_streams_finish_within_the_grace_and_refuses_new_work() -> None:
    go = asyncio.Event()

    async def decode(asked: Asked) -> None:
        asked.send(STREAM_HEAD, chunk(token()))
        await go.wait()
        asked.send(chunk(DONE), LAST)

    async with before(decode) as (path, _, _):
        running = [asyncio.create_task(path.post({**BODY, "stream": True})) for _ in range(20)]
        await until(lambda: path.data.inflight.legs.get("d") == 20)
        stopping = asyncio.create_task(path.data.stop(10.0))
        await asyncio.sleep(0)
        ready = await path.session.get(path.url + "/ready")
        assert (ready.status, (await ready.json())["reason"]) == (503, "draining")
        assert (await path.session.get(path.url + "/health")).status == 200
        refused = await path.post(BODY)
        assert (refused.status, refused.error["code"]) == (503, "draining")
        go.set()
        for got in await asyncio.gather(*running):
            assert got.body == token() + DONE
        await asyncio.wait_for(stopping, 5.0)


@pytest.mark.case("F21")
@on_uvloop
async def test_who_waits_without_a_leg_is_told_too() -> None:
    """In the queue at once, while connecting and while sending the body when the grace is over."""
    with full_listener() as url:
        serving = {"max_connections": 1, "queue_capacity": 5, "queue_timeout_s": 30}
        async with data_path(placed({"p": url}, {"d": url}), settings(serving=serving)) as path:
            connecting = asyncio.create_task(path.post(BODY))
            await until(lambda: path.data.inflight.legs.get("p"))
            queued = asyncio.create_task(path.post(BODY))
            await until(lambda: path.data.admission.waiting)
            reader, writer = await path.raw(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 99\r\n\r\n{")
            stopping = asyncio.create_task(path.data.stop(0.3))
            assert (await queued).error["code"] == "draining"
            assert not connecting.done()
            assert (await connecting).error["code"] == "draining"
            status, _, body = await asyncio.wait_for(read_answer(reader), 5.0)
            assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
            writer.close()
            await asyncio.wait_for(stopping, 5.0)
            assert path.reporter.outcomes == [Outcome.LOCAL]
            assert path.reporter.results == [RequestResult.REJECTED] * 3


@pytest.mark.case("F21")
@pytest.mark.rule("V8")
@on_uvloop
async def test_what_outlives_the_grace_is_cut_and_told_so() -> None:
    async def decode(asked: Asked) -> None:
        if b"mid-stream" in asked.body:
            asked.send(STREAM_HEAD, chunk(token()))
        await asyncio.Event().wait()

    async with before(decode) as (path, _, d):
        begun = asyncio.create_task(path.post({**BODY, "prompt": "mid-stream", "stream": True}))
        silent = asyncio.create_task(path.post({**BODY, "stream": True}))
        await until(lambda: path.data.inflight.legs.get("d") == 2 and path.data.metrics.ttft_seconds.total)
        await asyncio.wait_for(path.data.stop(0.2), 5.0)
        cut, refused = await begun, await silent
        assert cut.status == 200
        assert cut.events[0] == token()[6:-2]
        assert json.loads(cut.events[1])["error"]["code"] == "draining"
        assert len(cut.events) == 2
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert path.reporter.outcomes[-2:] == [Outcome.LOCAL, Outcome.LOCAL], "no evidence against an engine"
        for asked in d.asked:
            await asyncio.wait_for(asked.gone.wait(), WAIT_S)
