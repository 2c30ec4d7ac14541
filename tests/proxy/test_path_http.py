"""HTTP that holds: framing, sizes, order, methods, and clients that are slow to send or to read."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path as FilePath

import orjson
import pytest

from narwhal.proxy.accepting import Acceptor
from narwhal.proxy.incoming import MAX_AHEAD, MAX_HEAD_BYTES, SLICE
from tests.metronome import Metronome
from tests.proxy.harness import (
    DONE,
    LAST,
    MODEL,
    Asked,
    Path,
    answers,
    before,
    chunk,
    on_uvloop,
    read_answer,
    request_bytes,
    settings,
    token,
    until,
)
from tests.proxy.raw import BODY, CHUNKED, DATA, POST, error_of

# --- F18: framing ---

MALFORMED = {
    "both lengths": CHUNKED + b"Content-Length: 5\r\n\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA),
    "both lengths, the other order": POST + b"Content-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA),
    "a chunk size that is no number": CHUNKED + b"\r\nzz\r\n" + DATA + b"\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"\r\n-5\r\n" + DATA + b"\r\n0\r\n\r\n",
    "a chunk that is longer than its size": CHUNKED + b"\r\n5\r\n" + DATA + b"\r\n0\r\n\r\n",
    "two different lengths": POST + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n" + DATA,
    "a negative length": POST + b"Content-Length: -1\r\n\r\n" + DATA,
    "a header with a space in its name": POST + b"X y: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a folded header": POST + b"X: 1\r\n 2\r\nContent-Length: 2\r\n\r\n{}",
    "no host": b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(DATA), DATA),
    "no host, and another protocol": b"GET /health HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    "two hosts": POST + b"Host: t\r\nContent-Length: %d\r\n\r\n%b" % (len(DATA), DATA),
    "two hosts to HTTP/1.0": b"GET /health HTTP/1.0\r\nHost: t\r\nHost: u\r\n\r\n",
    "a host with a space": b"GET /health HTTP/1.1\r\nHost: t u\r\n\r\n",
    "a host with a path": b"GET /health HTTP/1.1\r\nHost: t/u\r\n\r\n",
    "chunks to HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST,
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
}


@pytest.mark.case("F18")
@pytest.mark.parametrize("name", MALFORMED)
@on_uvloop
async def test_case_F18_malformed_framing_is_a_400_and_the_end_of_the_connection(name: str) -> None:
    async with before(answers) as (path, p, d):
        reader, writer = await path.raw(MALFORMED[name])
        data = await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        head, _, rest = data.partition(b"\r\n\r\n")
        assert head.split()[1] == b"400"
        assert b"connection: close" in head.lower()
        assert json.loads(rest)["error"]["type"] == "invalid_request_error"
        assert data.count(b"HTTP/1.") == 1
        assert (p.asked, d.asked) == ([], [])


CODINGS = {
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n",
    "in two lines": b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
    "twice chunked": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "chunked, with a parameter": b"Transfer-Encoding: x;q=1, chunked\r\n",
}


@pytest.mark.case("F18")
@pytest.mark.parametrize("name", CODINGS)
@on_uvloop
async def test_case_F18_a_coding_that_nobody_undoes_is_not_taken_for_plain(name: str) -> None:
    async with before(answers) as (path, p, d):
        reader, _ = await path.raw(POST + CODINGS[name] + b"\r\n" + chunk(DATA) + LAST)
        assert await error_of(reader) in (
            (501, "invalid_request_error", "transfer_encoding"),
            (400, "invalid_request_error", None),  # by the parser, where it knows better
        )
        assert (p.asked, d.asked) == ([], [])
        reader, writer = await path.raw(POST + b"Transfer-Encoding:  Chunked \r\n\r\n" + chunk(DATA) + LAST)
        assert (await asyncio.wait_for(read_answer(reader), 5.0))[0] == 200
        writer.close()


@pytest.mark.parametrize("host", ["", "[::1]:8000", "t:", "a_b.c-d:80", "127.0.0.1"])
@on_uvloop
async def test_hosts_that_may_be(host: str) -> None:
    async with before(answers) as (path, _, _):
        reader, writer = await path.raw(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert (await asyncio.wait_for(read_answer(reader), 5.0))[0] == 200
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await asyncio.wait_for(read_answer(reader), 5.0))[0] == 200
        writer.close()


@pytest.mark.case("F18")
@on_uvloop
async def test_case_F18_pipelined_requests_are_answered_in_order() -> None:
    async with before(answers) as (path, p, d):
        reader, writer = await path.raw(
            request_bytes(BODY, headers="X-Request-Id: first\r\n")
            + request_bytes(b"{", headers="X-Request-Id: second\r\n")
            + b"GET /health HTTP/1.1\r\nHost: t\r\nX-Request-Id: third\r\n\r\n"
            + request_bytes({**BODY, "stream": True}, headers="X-Request-Id: fourth\r\nConnection: close\r\n")
        )
        seen = [await read_answer(reader) for _ in range(3)]
        assert [status for status, _, _ in seen] == [200, 400, 200]
        for (_, head, _), name in zip(seen, (b"first", b"second", b"third"), strict=True):
            assert b"x-request-id: " + name in head.lower()
        rest = await reader.read()
        writer.close()
        assert b"x-request-id: fourth" in rest.lower()
        assert rest.endswith(chunk(DONE) + LAST)
        assert (len(p.asked), len(d.asked)) == (2, 2)


@on_uvloop
async def test_an_http_1_0_client_gets_its_stream_without_chunks() -> None:
    async with before(answers) as (path, _, _):
        data = orjson.dumps({**BODY, "stream": True})
        reader, writer = await path.raw(
            b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%b"
            % (len(data), data)
        )
        head, _, body = (await asyncio.wait_for(reader.read(), 5.0)).partition(b"\r\n\r\n")
        writer.close()
        assert b"chunked" not in head.lower()
        assert b"connection: close" in head.lower()
        assert body == token() + DONE


# --- F19: sizes ---


@pytest.mark.case("F19")
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("over", "status"), [(-1, 200), (0, 200), (1, 413), (200_000, 413)])
@on_uvloop
async def test_case_F19_bodies_around_the_limit(chunked: bool, over: int, status: int) -> None:
    limit = 300_000
    empty = orjson.dumps({**BODY, "prompt": ""})
    body = orjson.dumps({**BODY, "prompt": "x" * (limit + over - len(empty))})
    assert len(body) == limit + over
    async with before(answers, chosen=settings(serving={"max_request_bytes": limit})) as (path, p, _):
        if chunked:
            pieces = [body[at : at + 9000] for at in range(0, len(body), 9000)]
            request = CHUNKED + b"\r\n" + b"".join(chunk(piece) for piece in pieces) + LAST
        else:
            request = request_bytes(body)
        reader, writer = await path.raw(request)
        got, head, text = await asyncio.wait_for(read_answer(reader), 5.0)
        writer.close()
        assert got == status
        if status == 413:
            assert json.loads(text)["error"]["type"] == "request_too_large"
            assert b"connection: close" in head.lower()
            assert p.asked == []
        else:
            assert len(json.loads(p.asked[0].body)["prompt"]) == limit + over - len(empty)


@pytest.mark.case("F19")
@pytest.mark.parametrize("headers", ["Content-Length: 900000000\r\n", "Transfer-Encoding: chunked\r\n"])
@on_uvloop
async def test_case_F19_an_endless_body_is_not_buffered(headers: str) -> None:
    async with before(answers, chosen=settings(serving={"max_request_bytes": 100_000})) as (path, _, _):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: t\r\n{headers}\r\n".encode()
        reader, writer = await path.raw(head)
        sent = 0

        async def feed() -> None:
            nonlocal sent
            piece = chunk(b"x" * 60_000) if "chunked" in headers else b"x" * 60_000
            while sent < 600_000_000:
                writer.write(piece)
                sent += len(piece)
                await writer.drain()

        feeding = asyncio.create_task(feed())
        status, _, _ = await asyncio.wait_for(read_answer(reader), 5.0)
        assert status == 413
        assert sent < 20_000_000
        feeding.cancel()
        writer.close()
        await asyncio.gather(feeding, return_exceptions=True)


@on_uvloop
async def test_expect_is_answered_before_the_body_and_refused_when_it_is_too_large() -> None:
    async with before(answers, chosen=settings(serving={"max_request_bytes": 1000})) as (path, _, _):
        head = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n"
        reader, writer = await path.raw(head.format(len(DATA)).encode())
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5.0) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(DATA)
        assert (await read_answer(reader))[0] == 200
        writer.close()
        reader, writer = await path.raw(head.format(5000).encode())
        assert (await asyncio.wait_for(read_answer(reader), 5.0))[0] == 413
        writer.close()


@pytest.mark.parametrize(("line", "status"), [("POST /nope", 404), ("PUT /v1/completions", 405), ("GET /health", 200)])
@pytest.mark.parametrize("sends", [False, True])
@on_uvloop
async def test_who_waits_to_send_what_nobody_will_read_has_its_answer_at_once(
    line: str, status: int, sends: bool
) -> None:
    async with before(answers) as (path, _, _):
        head = f"{line} HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n".encode()
        # Also in its turn, behind another.
        reader, writer = await path.raw(request_bytes(BODY) + head)
        assert (await asyncio.wait_for(read_answer(reader), 5.0))[0] == 200
        got, answered, _ = await asyncio.wait_for(read_answer(reader), 5.0)
        assert (got, b"connection: close" in answered.lower()) == (status, True)
        if sends:
            writer.write(b"hello" + request_bytes(BODY))
        assert await asyncio.wait_for(reader.read(), 5.0) == b"", "what comes after it is not read as a request"
        writer.close()
        assert len(path.reporter.results) == 1
        await until(lambda: not path.data.handler.connections)


@pytest.mark.case("E2")
@on_uvloop
async def test_a_body_that_does_not_come_ends_at_the_deadline() -> None:
    async with before(answers, chosen=settings(serving={"request_timeout_s": 0.3})) as (path, _, _):
        reader, writer = await path.raw(POST + b"Content-Length: 50\r\n\r\n{")
        with Metronome() as metronome:
            status, _, body = await asyncio.wait_for(read_answer(reader), 5.0)
        assert metronome.took_s > 0.15
        assert metronome.ran_s < 0.45
        assert (status, json.loads(body)["error"]["type"]) == (408, "timeout")
        writer.close()


# --- routes ---


@on_uvloop
async def test_other_routes_and_methods() -> None:
    async with before(answers) as (path, p, _):
        for method, route, status, code in (
            ("GET", "/health", 200, None),
            ("GET", "/ready", 200, None),
            ("HEAD", "/ready", 200, None),
            ("GET", "/v1/models", 200, None),
            ("GET", "/nothing", 404, "not_found"),
            ("POST", "/v1/embeddings", 404, "not_found"),
            ("GET", "/v1/completions", 405, "method_not_allowed"),
            ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
            ("POST", "/health", 405, "method_not_allowed"),
            ("HEAD", "/nothing", 404, None),
        ):
            async with path.session.request(method, path.url + route) as got:
                body = await got.read()
                assert (got.status, got.content_type) == (status, "application/json"), (method, route)
                assert ("Allow" in got.headers) == (status == 405)
                if method == "HEAD":
                    assert body == b""
                elif status >= 400:
                    assert json.loads(body)["error"]["code"] == code
        async with path.session.options(path.url + "/v1/chat/completions") as got:
            assert (got.status, got.headers["Allow"], await got.read()) == (204, "POST, OPTIONS", b"")
        reader, writer = await path.raw(b"OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\nGET /health HTTP/1.1\r\nHost: t\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 No Content\r\nAllow: ")
        assert (await read_answer(reader))[0] == 200, "nothing is left of the one before"
        writer.close()
        models = await (await path.session.get(path.url + "/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL]
        # A query string or an absolute target is no other route.
        reader, writer = await path.raw(request_bytes(BODY, route="http://t/v1/completions?x=1"))
        assert (await read_answer(reader))[0] == 200
        writer.close()
        assert p.asked[0].head.startswith(b"POST /v1/completions HTTP/1.1\r\n")


# --- heads ---


@pytest.mark.case("F18")
@pytest.mark.parametrize("where", ["target", "one header", "many headers", "a header without end", "trailers"])
@on_uvloop
async def test_a_head_beyond_its_limit_is_refused(where: str) -> None:
    big = b"x" * (MAX_HEAD_BYTES + 1)
    requests = {
        "target": (b"GET /%b HTTP/1.1\r\n\r\n" % big, 431),
        "one header": (POST + b"X: %b\r\n\r\n" % big, 431),
        "many headers": (POST + b"X: yz\r\n" * (MAX_HEAD_BYTES // 3) + b"\r\n", 431),
        "a header without end": (POST + b"X: " + big, 431),
        "trailers": (CHUNKED + b"\r\n" + chunk(DATA) + b"0\r\nX: %b\r\n\r\n" % big, 431),
    }
    async with before(answers) as (path, p, _):
        data, status = requests[where]
        reader, _ = await path.raw(data)
        assert await error_of(reader) == (status, "request_too_large", None)
        assert p.asked == []
        # Just below it is served.
        reader, writer = await path.raw(request_bytes(BODY, headers=f"X: {'y' * (MAX_HEAD_BYTES - 300)}\r\n"))
        assert (await read_answer(reader))[0] == 200
        writer.close()


@pytest.mark.case("F18")
@pytest.mark.parametrize("size", [1, 2, 7, 64])
@on_uvloop
async def test_case_F18_a_request_is_the_same_however_it_was_cut(size: int) -> None:
    async with before(answers) as (path, p, d):
        data = CHUNKED + b"X-Request-Id: cut\r\n\r\n" + chunk(DATA[:9]) + chunk(DATA[9:]) + LAST + request_bytes(BODY)
        reader, writer = await path.raw(b"")
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await asyncio.sleep(0)
        first, second = await read_answer(reader), await read_answer(reader)
        writer.close()
        assert (first[0], second[0]) == (200, 200)
        assert b"x-request-id: cut\r\n" in first[1].lower()
        assert (len(p.asked), len(d.asked)) == (2, 2)
        assert d.asked[0].body.startswith(DATA[:-1])


@pytest.mark.parametrize("framing", ["length", "chunks"])
@on_uvloop
async def test_an_upgrade_is_not_taken_up_and_the_request_goes_on(framing: str) -> None:
    """Some clients offer HTTP/2 with their first request, body included."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nX-Request-Id: up\r\n"
    whole = b"Content-Length: %d\r\n\r\n%b" % (len(DATA), DATA)
    if framing == "chunks":
        whole = b"Transfer-Encoding: chunked\r\n\r\n" + chunk(DATA) + LAST
    async with before(answers) as (path, p, _):
        for cut in (0, 40, len(POST + offer) + 20):
            reader, writer = await path.raw((POST + offer + whole)[:cut])
            await asyncio.sleep(0.02)
            writer.write((POST + offer + whole)[cut:] + b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            status, head, _ = await asyncio.wait_for(read_answer(reader), 5.0)
            assert status == 200
            assert b"x-request-id: up\r\n" in head.lower()
            assert (await asyncio.wait_for(read_answer(reader), 5.0))[0] == 200
            writer.close()
        assert len(p.asked) == 3
        reader, _ = await path.raw(b"CONNECT t:443 HTTP/1.1\r\nHost: t:443\r\n\r\nx")
        assert (await error_of(reader))[0] == 400


# --- order and memory ---


@pytest.mark.case("F18")
@on_uvloop
async def test_case_F18_what_is_sent_ahead_of_its_turn_is_bounded() -> None:
    release = asyncio.Event()

    async def waits(asked: Asked) -> None:
        await release.wait()
        await answers(asked)

    async with before(waits) as (path, p, _):
        # By bytes: beyond them the socket is not read.
        reader, writer = await path.raw(request_bytes(BODY))
        await until(lambda: path.data.inflight.legs.get("d"))
        writer.transport.set_write_buffer_limits(0)
        sent = 0
        big = request_bytes({**BODY, "prompt": "x" * 900_000})
        try:
            async with asyncio.timeout(1.0):
                while sent < 200_000_000:
                    writer.write(big)
                    sent += len(big)
                    await writer.drain()
        except TimeoutError:
            pass
        assert sent < 50_000_000
        release.set()
        for _ in range(sent // len(big)):
            assert (await asyncio.wait_for(read_answer(reader), 10.0))[0] == 200
        writer.close()
        # By number: many small ones in one go.
        release.clear()
        get = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"
        many = 20_000
        reader, writer = await path.raw(request_bytes(BODY))
        await until(lambda: path.data.inflight.legs.get("d"))
        writer.write(get * many)
        (connection,) = path.data.handler.connections
        await until(lambda: connection._rest, "more has come than is parsed")
        assert len(connection._waiting) <= MAX_AHEAD + SLICE // len(get)
        release.set()
        statuses = [(await asyncio.wait_for(read_answer(reader), 5.0))[0] for _ in range(1 + many)]
        assert statuses == [200] * (1 + many)
        writer.close()
        assert len(p.asked) == 2 + sent // len(big)


@pytest.mark.case("F18")
@on_uvloop
async def test_case_F18_any_number_of_completions_may_be_sent_at_once() -> None:
    async with before(answers) as (path, p, _):
        many = 3 * MAX_AHEAD
        data = b"".join(request_bytes({**BODY, "prompt": f"no. {n}"}) for n in range(many))
        reader, writer = await path.raw(data)
        assert [(await asyncio.wait_for(read_answer(reader), 5.0))[0] for _ in range(many)] == [200] * many
        writer.close()
        assert [json.loads(a.body)["prompt"] for a in p.asked] == [f"no. {n}" for n in range(many)]


@on_uvloop
async def test_a_body_in_very_small_chunks_takes_no_more_memory_than_it_has_bytes() -> None:
    async with before(answers, chosen=settings(serving={"max_request_bytes": 60_000})) as (path, p, _):
        body = orjson.dumps({**BODY, "prompt": "x" * 50_000})
        pieces = b"".join(chunk(body[at : at + 1]) for at in range(len(body)))
        reader, writer = await path.raw(CHUNKED + b"\r\n" + pieces + LAST)
        assert (await asyncio.wait_for(read_answer(reader), 10.0))[0] == 200
        writer.close()
        assert len(p.asked) == 1
        # Framing that never ends is no way around the limit.
        reader, writer = await path.raw(CHUNKED + b"\r\n1;" + b"x" * 600_000)
        assert await error_of(reader) == (413, "request_too_large", None)


# --- sockets of other families ---


@asynccontextmanager
async def accepted(path: Path, listener: socket.socket) -> AsyncIterator[None]:
    """The data path behind one more listening socket, accepted from as workers do."""
    listener.listen()
    listener.setblocking(False)
    acceptor = Acceptor(listener, path.data.handler)
    acceptor.start()
    try:
        yield
    finally:
        acceptor.stop()
        listener.close()


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET6])
@on_uvloop
async def test_unix_sockets_and_ipv6(family: socket.AddressFamily, tmp_path: FilePath) -> None:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "proxy.sock") if family == socket.AF_UNIX else ("::1", 0))
    async with before(answers) as (path, _, _), accepted(path, listener):
        if family == socket.AF_UNIX:
            reader, writer = await asyncio.open_unix_connection(tmp_path / "proxy.sock")
        else:
            reader, writer = await asyncio.open_connection("::1", listener.getsockname()[1])
        path.writers.append(writer)
        writer.write(request_bytes(BODY))
        assert (await asyncio.wait_for(read_answer(reader), 5.0))[0] == 200
        writer.write(request_bytes({**BODY, "stream": True}))
        assert (await asyncio.wait_for(reader.readuntil(LAST), 5.0)).endswith(chunk(DONE) + LAST)
        writer.write(POST + b"Content-Length: 999999999\r\n\r\n")
        assert (await error_of(reader))[0] == 413
