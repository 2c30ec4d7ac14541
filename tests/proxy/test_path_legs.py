"""The engine-side client: limits, local causes, addresses, answers of every shape."""

import ast
import asyncio
import errno
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from narwhal.placement import EngineEntry
from narwhal.proxy.connection import MAX_ERROR_BYTES
from narwhal.proxy.legs import Pairs, connect_outcome, origin_of
from narwhal.vocabulary import Outcome, Phase
from tests.metronome import Metronome
from tests.proxy.harness import (
    LAST,
    STREAM_HEAD,
    Asked,
    Script,
    answer,
    answers,
    before,
    chunk,
    data_path,
    entry,
    full_listener,
    on_uvloop,
    placed,
    prefills,
    scripted,
    settings,
    token,
    until,
)

# --- what a failed connection attempt means ---

ERRORS: list[tuple[OSError, Outcome]] = [
    (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), Outcome.REFUSED),
    (OSError("Multiple exceptions: [Errno 111] a ('::1', 1), [Errno 111] b ('127.0.0.1', 1)"), Outcome.REFUSED),
    (OSError(errno.EHOSTUNREACH, "no route"), Outcome.UNREACHABLE),
    (OSError(errno.ENETUNREACH, "no net"), Outcome.UNREACHABLE),
    (socket.gaierror(socket.EAI_NONAME, "unknown name"), Outcome.UNREACHABLE),
    (ConnectionResetError(errno.ECONNRESET, "reset"), Outcome.RESET),
    (TimeoutError(errno.ETIMEDOUT, "the kernel gave up"), Outcome.CONNECT_TIMEOUT),
    (ssl.SSLError(1, "handshake failure"), Outcome.TLS_FAILED),
    (ssl.SSLCertVerificationError(1, "self-signed"), Outcome.TLS_FAILED),
    (OSError(errno.EMFILE, "too many open files"), Outcome.LOCAL),
    (OSError(errno.ENFILE, "file table overflow"), Outcome.LOCAL),
    (OSError(errno.EADDRNOTAVAIL, "no local port"), Outcome.LOCAL),
    (OSError(errno.ENOBUFS, "no buffers"), Outcome.LOCAL),
    (OSError(errno.ENOMEM, "no memory"), Outcome.LOCAL),
    (socket.gaierror(socket.EAI_AGAIN, "resolver is down"), Outcome.LOCAL),
    (socket.gaierror(socket.EAI_FAIL, "resolver is broken"), Outcome.LOCAL),
    (OSError("Multiple exceptions: [Errno 111] a, [Errno 24] b"), Outcome.LOCAL),
]


@pytest.mark.rule("F2", "F5")
@pytest.mark.parametrize(("error", "outcome"), ERRORS, ids=[repr(error)[:60] for error, _ in ERRORS])
def test_what_a_failed_connection_attempt_means(error: OSError, outcome: Outcome) -> None:
    assert connect_outcome(error) is outcome


@pytest.mark.rule("F5")
@pytest.mark.case("C14")
@on_uvloop
async def test_case_C14_no_descriptor_left_is_the_proxys_own_fault() -> None:
    async with before(answers) as (path, p, _):

        async def exhausted(*_args: Any, **_options: Any) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        loop = asyncio.get_running_loop()
        path.data.legs.reuse(p.url)  # no idle connection
        real = loop.create_connection
        client = await real(asyncio.Protocol, "127.0.0.1", path.port)
        loop.create_connection = exhausted  # type: ignore[method-assign, assignment]
        try:
            reader = asyncio.get_running_loop().create_future()

            class Reads(asyncio.Protocol):
                def data_received(self, data: bytes) -> None:
                    reader.set_result(data)

            client[0].set_protocol(Reads())
            body = b'{"model": "sim-model", "prompt": "a"}'
            client[0].write(
                b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            assert (await asyncio.wait_for(reader, 5.0)).startswith(b"HTTP/1.1 429 ")
        finally:
            loop.create_connection = real  # type: ignore[method-assign]
            client[0].close()
        assert path.reporter.outcomes == [Outcome.LOCAL]
        assert path.reporter.legs[0].run is None


# --- addresses ---

ADDRESSES = [
    ("http://10.0.0.5:8000", ("10.0.0.5", 8000, False, "", "10.0.0.5:8000")),
    ("http://engine-1/", ("engine-1", 80, False, "", "engine-1")),
    ("https://engine.example/base/", ("engine.example", 443, True, "/base", "engine.example")),
    ("http://[::1]:81/a/b", ("::1", 81, False, "/a/b", "[::1]:81")),
    ("http://user:secret@host:1", ("host", 1, False, "", "host:1")),
]


@pytest.mark.parametrize(("url", "origin"), ADDRESSES)
def test_addresses(url: str, origin: tuple[Any, ...]) -> None:
    assert tuple(origin_of(url)) == origin


@pytest.mark.parametrize("url", ["nonsense", "ftp://x", "http://", "http://[::1", "http://h:99999", "http://h/\u00e9"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError):
        origin_of(url)


@on_uvloop
async def test_ipv6_a_base_path_and_a_name() -> None:
    async with scripted(prefills, host="::1") as p, scripted(answers, host="127.0.0.1") as d:
        placement = placed({"p": f"http://[::1]:{p.port}"}, {"d": f"http://localhost:{d.port}/engine/7/"})
        async with data_path(placement) as path:
            assert (await path.post()).status == 200
            assert p.asked[0].head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:")
            assert d.asked[0].head.startswith(b"POST /engine/7/v1/completions HTTP/1.1\r\nHost: localhost:")


CERTIFICATE = Path(__file__).parent / "tls" / "localhost.pem"


@on_uvloop
async def test_engines_behind_tls() -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE, CERTIFICATE.with_suffix(".key"))
    async with scripted(prefills, ssl=tls) as p, scripted(answers) as d:
        url = f"https://localhost:{p.port}"
        async with data_path(placed({"p": url}, {"d": d.url})) as path:
            assert (await path.post()).status == 502, "nobody vouches for this certificate"
            assert path.reporter.outcomes == [Outcome.TLS_FAILED]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
            async with data_path(placed({"p": url}, {"d": d.url})) as path:
                assert (await path.post()).status == 200
                assert (await path.post()).status == 200
                assert len({asked.connection for asked in p.asked}) == 1
        async with data_path(placed({"p": url.replace("localhost", "127.0.0.1")}, {"d": d.url})) as path:
            assert (await path.post()).status == 502
            assert path.reporter.outcomes == [Outcome.TLS_FAILED]


@pytest.mark.rule("F2")
@on_uvloop
async def test_an_engine_that_speaks_no_tls() -> None:
    async def speaks_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    plain = await asyncio.start_server(speaks_http, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}"
    async with data_path(placed({"p": url}, {"d": url})) as path:
        assert (await path.post()).status == 502
        assert path.reporter.outcomes == [Outcome.TLS_FAILED]
    plain.close()


# --- limits: every one is a setting ---

SLACK_S = 1.0  # far below every default, enough for a busy machine


async def hangs(asked: Asked) -> None:
    await asyncio.Event().wait()


async def head_only(asked: Asked) -> None:
    asked.send(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{")
    await asyncio.Event().wait()


async def one_token(asked: Asked) -> None:
    asked.send(STREAM_HEAD, chunk(token()))
    await asyncio.Event().wait()


LIMITS: list[tuple[str, str, Script, Script, bool, Outcome]] = [
    ("serving", "prefill_timeout_s", hangs, answers, False, Outcome.PREFILL_TIMEOUT),
    ("serving", "prefill_timeout_s", head_only, answers, False, Outcome.PREFILL_TIMEOUT),
    ("serving", "request_timeout_s", hangs, answers, False, Outcome.DEADLINE),
    ("serving", "request_timeout_s", prefills, one_token, True, Outcome.DEADLINE),
    ("engine", "decode_read_timeout_s", prefills, hangs, False, Outcome.READ_TIMEOUT),
    ("engine", "decode_read_timeout_s", prefills, head_only, False, Outcome.READ_TIMEOUT),
    ("engine", "decode_read_timeout_s", prefills, one_token, True, Outcome.STREAM_SILENT),
    ("engine", "kv_first_pull_timeout_s", prefills, hangs, True, Outcome.FIRST_TOKEN_TIMEOUT),
]


@pytest.mark.case("D12")
@pytest.mark.rule("F2")
@pytest.mark.parametrize("value", [0.2, 0.6])
@pytest.mark.parametrize(
    ("section", "key", "prefill", "decode", "stream", "outcome"), LIMITS, ids=[f"{row[1]}-{row[5]}" for row in LIMITS]
)
@on_uvloop
async def test_case_D12_each_limit_is_the_setting_and_nothing_else(  # noqa: PLR0917
    section: str, key: str, prefill: Script, decode: Script, stream: bool, outcome: Outcome, value: float
) -> None:
    async with before(decode, prefill, settings(**{section: {key: value}})) as (path, _, _):
        with Metronome() as metronome:
            got = await path.post(stream=stream)
        assert metronome.took_s > value - 0.05
        assert metronome.ran_s < value + SLACK_S
        assert got.status == (200 if decode is one_token else 504)
        assert path.reporter.outcomes[-1] is outcome
        await path.at_rest()


@pytest.mark.case("D12")
@pytest.mark.rule("F2", "F5")
@pytest.mark.parametrize(
    ("engine_s", "request_s", "outcome"), [(0.3, 30, Outcome.CONNECT_TIMEOUT), (10, 0.3, Outcome.DEADLINE)]
)
@on_uvloop
async def test_case_D12_connecting_has_its_own_limit(engine_s: float, request_s: float, outcome: Outcome) -> None:
    chosen = settings(engine={"connect_timeout_s": engine_s}, serving={"request_timeout_s": request_s})
    with full_listener() as url:
        async with data_path(placed({"p": url}, {"d": url}), chosen) as path:
            with Metronome() as metronome:
                got = await path.post()
            assert metronome.took_s > 0.25
            assert metronome.ran_s < 0.3 + SLACK_S
            assert got.status == 504
            assert path.reporter.outcomes == [outcome]


@pytest.mark.case("D12")
def test_case_D12_no_limit_is_a_literal_in_the_code() -> None:
    """A number given where a time limit is expected: a call's argument of that name, or the like."""
    root = Path(__file__).resolve().parents[2] / "narwhal" / "proxy"
    found = []
    takes_seconds = {"timeout", "timeout_at", "wait_for", "call_later", "call_at", "sleep"}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            values = [keyword.value for keyword in node.keywords if keyword.arg and "timeout" in keyword.arg]
            if name in takes_seconds:
                values += node.args
            found += [
                f"{path.name}:{node.lineno}"
                for value in values
                if isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value
            ]
    assert found == []


# --- bounds and shapes of answers ---


def sends(*parts: bytes, close: bool = False) -> Script:
    async def script(asked: Asked) -> None:
        asked.send(*parts)
        if close:
            await asked.writer.drain()
            asked.writer.close()

    return script


BODY = b'{"choices": [{"text": "b"}]}'
SHAPES: dict[str, tuple[Script, int, Outcome]] = {
    "by length": (sends(answer(BODY)), 200, Outcome.ANSWER_COMPLETE),
    "in chunks": (
        sends(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(BODY[:5]), chunk(BODY[5:]), LAST),
        200,
        Outcome.ANSWER_COMPLETE,
    ),
    "to the end of the connection": (
        sends(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n", BODY, close=True),
        200,
        Outcome.ANSWER_COMPLETE,
    ),
    "after an interim answer": (
        sends(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", answer(BODY)),
        200,
        Outcome.ANSWER_COMPLETE,
    ),
    "with a second answer behind it": (sends(answer(BODY) + answer(b"smuggled")), 200, Outcome.ANSWER_COMPLETE),
    "with junk behind it": (sends(answer(BODY) + b"junk\r\n\r\n"), 200, Outcome.ANSWER_COMPLETE),
    "cut": (sends(answer(BODY)[:-1], close=True), 502, Outcome.ANSWER_CUT),
    "cut in chunks": (
        sends(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunk(BODY), close=True),
        502,
        Outcome.ANSWER_CUT,
    ),
    "given up": (sends(answer(b'{"choices": [{"text": "b", "finish_reason": "abort"}]}')), 502, Outcome.ANSWER_CUT),
    "cut in its head": (sends(b"HTTP/1.1 200 OK\r\ncontent-", close=True), 502, Outcome.RESET),
    "no HTTP": (sends(b"SSH-2.0-OpenSSH_9.2\r\n"), 502, Outcome.STREAM_MALFORMED),
    "an endless head": (sends(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000), 502, Outcome.STREAM_MALFORMED),
    "two lengths": (
        sends(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 5\r\n\r\nabcde"),
        502,
        Outcome.STREAM_MALFORMED,
    ),
    "an upgrade": (
        sends(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc"),
        502,
        Outcome.STREAM_MALFORMED,
    ),
    "a redirect": (sends(answer(b"", "302 Found", "location: http://other/\r\n")), 502, Outcome.HTTP_5XX),
    "no content": (sends(b"HTTP/1.1 204 No Content\r\n\r\n"), 502, Outcome.HTTP_5XX),
    "a huge error": (sends(answer(b"x" * (MAX_ERROR_BYTES + 9), "500 Oops")), 502, Outcome.HTTP_5XX),
}


@pytest.mark.rule("F2")
@pytest.mark.parametrize("name", SHAPES)
@on_uvloop
async def test_answers_of_every_shape(name: str) -> None:
    script, status, outcome = SHAPES[name]
    async with before(script) as (path, _, _):
        got = await path.post()
        assert got.status == status
        if status == 200:
            assert got.body == BODY
        assert path.reporter.outcomes == [Outcome.HANDOFF, outcome]
        again = await path.post()
        assert again.status == status, "the next request is none the worse"
        if status == 200:
            assert again.body == BODY
        await path.at_rest()


@on_uvloop
async def test_an_answer_keeps_the_engines_status_type_and_bytes() -> None:
    body = b'{ "choices" : [ ] , "odd" : "\xc3\xa9" }\n'
    script = sends(
        answer(body, headers="Content-Type: application/json; x=1\r\nset-cookie: a=b\r\nserver: uvicorn\r\n")
    )
    async with before(script) as (path, _, _):
        got = await path.post()
        assert got.body == body
        assert got.headers["Content-Type"] == "application/json; x=1"
        assert not {"Set-Cookie", "Server"} & set(got.headers)
        refusal = b'{"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}'
        path.feed.settings = settings()
    async with before(sends(answer(refusal, "422 Unprocessable Entity"))) as (path, _, _):
        got = await path.post(stream=True)
        assert (got.status, got.body) == (422, refusal)


@pytest.mark.rule("V1")
@on_uvloop
async def test_the_pool_never_holds_more_connections_than_seats() -> None:
    async with scripted(prefills) as p, scripted(answers) as d1, scripted(answers) as d2:
        placement = placed({"p": p.url}, {"d1": d1.url, "d2": d2.url})
        async with data_path(placement, settings(serving={"max_connections": 4})) as path:
            for _ in range(6):
                got = await asyncio.gather(*(path.post() for _ in range(4)))
                assert {one.status for one in got} == {200}
                assert path.data.legs.connections <= 4


def engine(name: str, incarnation: int) -> EngineEntry:
    return entry(name, "http://x", Phase.PREFILL, incarnation=incarnation)


@pytest.mark.rule("V13")
def test_pairs_are_remembered_by_incarnation() -> None:
    pairs = Pairs()
    assert pairs.first(engine("p", 1), engine("d", 1))
    pairs.saw(engine("p", 1), engine("d", 1))
    assert not pairs.first(engine("p", 1), engine("d", 1))
    for producer, consumer in ((2, 1), (1, 2), (2, 2)):
        assert pairs.first(engine("p", producer), engine("d", consumer))
    assert pairs.first(engine("d", 1), engine("p", 1)), "directions are told apart"


@pytest.mark.case("D10")
@on_uvloop
async def test_case_D10_residency_equals_the_open_legs_and_is_nothing_at_rest() -> None:
    opened = {"p": 0, "d": 0}
    go = {"p": asyncio.Event(), "d": asyncio.Event()}
    idle: list[str] = []

    def counted(name: str, script: Script) -> Script:
        async def run(asked: Asked) -> None:
            opened[name] += 1
            try:
                await go[name].wait()
            finally:
                opened[name] -= 1
            await script(asked)

        return run

    async with before(counted("d", answers), counted("p", prefills)) as (path, _, _):
        path.data.inflight.on_idle = idle.append
        legs = path.data.inflight.legs
        running = [asyncio.create_task(path.post()) for _ in range(12)]
        await until(lambda: legs == {"p": 12} and opened["p"] == 12)
        for task in running[:3]:
            task.cancel()
        await until(lambda: legs == {"p": 9} and opened["p"] == 9)
        go["p"].set()
        await until(lambda: legs == {"d": 9} and opened["d"] == 9)
        # No leg runs on p, but its handoffs have not been read: a drain must not let it stop yet.
        assert path.data.inflight.unread == {"p": 9}
        assert idle == []
        for task in running[3:6]:
            task.cancel()
        await until(lambda: legs == {"d": 6} and opened["d"] == 6)
        go["d"].set()
        await asyncio.gather(*running, return_exceptions=True)
        await path.at_rest()
        assert path.data.inflight.unread == {}
        assert idle == ["d", "p"]
