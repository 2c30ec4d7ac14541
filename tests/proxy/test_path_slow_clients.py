"""Clients that are slow to send, slow to read, or do neither."""

import asyncio
import socket
import time

import pytest

from narwhal.vocabulary import Outcome, RequestResult
from tests.metronome import Metronome
from tests.proxy.harness import (
    DONE,
    LAST,
    STREAM_HEAD,
    Asked,
    answer,
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

PATIENCE_S = 0.5


SLOW: dict[str, tuple[bytes, str | None]] = {
    "nothing": (b"", None),
    "a head that does not end": (POST + b"X: ", "head"),
    "one byte": (b"P", "head"),
    "a body that stands still": (POST + b"Content-Length: 50\r\n\r\n{", "body"),
    "a chunk that stands still": (CHUNKED + b"\r\n50\r\n{", "body"),
}


@pytest.mark.case("D12")
@pytest.mark.parametrize("name", SLOW)
@on_uvloop
async def test_who_is_slow_to_send_is_sent_away(name: str) -> None:
    data, code = SLOW[name]
    async with before(answers, chosen=settings(serving={"client_timeout_s": PATIENCE_S})) as (path, p, _):
        with Metronome() as metronome:
            reader, _ = await path.raw(data)
            if code is None:
                assert await asyncio.wait_for(reader.read(), 5.0) == b""
            else:
                assert await error_of(reader) == (408, "timeout", code)
        assert metronome.took_s > PATIENCE_S - 0.05
        assert metronome.ran_s < PATIENCE_S + 0.5
        assert p.asked == []
        await until(lambda: not path.data.handler.connections)


@pytest.mark.case("D12")
@on_uvloop
async def test_a_head_that_comes_byte_by_byte_gets_no_more_time_and_a_body_that_flows_does() -> None:
    async with before(answers, chosen=settings(serving={"client_timeout_s": PATIENCE_S})) as (path, _, _):
        reader, writer = await path.raw(POST)

        async def trickle() -> None:
            while True:
                writer.write(b"X: y\r\n")
                await asyncio.sleep(PATIENCE_S / 10)

        with Metronome() as metronome:
            trickling = asyncio.create_task(trickle())
            assert (await asyncio.wait_for(read_answer(reader), 5.0))[0] == 408
        assert metronome.ran_s < PATIENCE_S + 0.5
        trickling.cancel()
        writer.close()
        await asyncio.gather(trickling, return_exceptions=True)

        reader, writer = await path.raw(POST + b"Content-Length: %d\r\n\r\n" % len(DATA))
        step = len(DATA) // 6
        for at in range(0, len(DATA), step):
            writer.write(DATA[at : at + step])
            await asyncio.sleep(PATIENCE_S / 3)
        assert (await asyncio.wait_for(read_answer(reader), 5.0))[0] == 200
        writer.close()


@pytest.mark.case("D12")
@on_uvloop
async def test_idle_connections_stay_for_as_long_as_a_request_may_take() -> None:
    serving = {"client_timeout_s": 0.2, "request_timeout_s": 1.0}
    async with before(answers, chosen=settings(serving=serving)) as (path, _, _):
        reader, writer = await path.raw(request_bytes(BODY))
        assert (await read_answer(reader))[0] == 200
        with Metronome() as metronome:
            assert await asyncio.wait_for(reader.read(), 5.0) == b""
        assert metronome.took_s > 0.9
        assert metronome.ran_s < 1.5
        writer.close()


@pytest.mark.case("D12")
@pytest.mark.rule("F5", "V7")
@pytest.mark.parametrize("stream", [True, False])
@on_uvloop
async def test_who_does_not_read_is_dropped_and_no_engine_is_blamed(stream: bool) -> None:
    async def endless(asked: Asked) -> None:
        if not stream:
            asked.send(answer(b'{"choices": [{"text": "%b"}]}' % (b"x" * 20_000_000)))
            return
        asked.send(STREAM_HEAD)
        while not asked.writer.is_closing():
            asked.send(chunk(token("x" * 50_000)))
            await asked.writer.drain()

    chosen = settings(serving={"client_timeout_s": PATIENCE_S}, engine={"decode_read_timeout_s": 30})
    async with before(endless, chosen=chosen) as (path, _, d):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", path.port))
            client.sendall(request_bytes({**BODY, "stream": stream}))
            await until(lambda: d.asked)
            await until(lambda: path.reporter.requests, "the request has ended")
            await path.at_rest()
        assert path.reporter.outcomes[-1] in {Outcome.CANCELLED, Outcome.ANSWER_COMPLETE}
        assert path.reporter.outcomes[-1] is (Outcome.CANCELLED if stream else Outcome.ANSWER_COMPLETE)
        assert path.reporter.results == [RequestResult.CANCELLED]


@on_uvloop
async def test_who_reads_slowly_but_steadily_gets_all_of_it() -> None:
    size = 400_000

    async def large(asked: Asked) -> None:
        asked.send(STREAM_HEAD, *(chunk(token("x" * 20_000)) for _ in range(size // 20_000)), chunk(DONE), LAST)

    async with before(large, chosen=settings(serving={"client_timeout_s": PATIENCE_S})) as (path, _, _):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", path.port))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, request_bytes({**BODY, "stream": True}))
            got = b""
            started = time.monotonic()
            while not got.endswith(LAST):
                piece = await loop.sock_recv(client, 8_000)
                assert piece, "the connection was cut"
                got += piece
                await asyncio.sleep(0.03)
        assert time.monotonic() - started > 2 * PATIENCE_S, "slow enough to tell"
        assert got.count(b"data: ") == size // 20_000 + 1
