"""Raw bytes at the proxy, from hostile clients and from hostile engines: nothing crashes, hangs, or is passed off as
whole, and the next client is served.

Seeded, not shrunk: one seed is one run of many connections. `NARWHAL_FUZZ_EXAMPLES=10000` sends more.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from narwhal.vocabulary import RequestResult
from tests.proxy.harness import (
    DONE,
    LAST,
    MODEL,
    STREAM_HEAD,
    Asked,
    answer,
    answers,
    before,
    chunk,
    on_uvloop,
    prefill_answer,
    request_bytes,
    settings,
    token,
)

CONNECTIONS = max(1, int(os.environ.get("NARWHAL_FUZZ_EXAMPLES", "100")) // 4)
SEEDS = range(4)
BODY = {"model": MODEL, "prompt": "a narwhal", "max_tokens": 3}
WHOLE = [
    request_bytes(BODY),
    request_bytes({**BODY, "stream": True}),
    request_bytes({**BODY, "messages": []}, route="/v1/chat/completions"),
    b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n",
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: t\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
]
JUNK = [
    *(b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b",", b"\xff\xfe", b"HTTP/1.1", b"HTTP/9.9", b"POST ", b"0\r\n\r\n"),
    *(b"Content-Length: 99999999999999999999\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"X: " + b"y" * 40_000 + b"\r\n"),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00", b"ffffffffffffffff\r\n", b"-1\r\n", b"%00", b"../"),
]
SHORT: dict[str, Any] = {
    "engine": {"first_token_timeout_s": 0.5, "kv_first_pull_timeout_s": 0.5, "decode_read_timeout_s": 0.5},
    "serving": {"prefill_timeout_s": 0.5, "request_timeout_s": 3.0},
}


def spoilt(draw: random.Random, data: bytes) -> bytes:
    """`data` with some bytes lost, doubled, or put in."""
    for _ in range(draw.randint(0, 4)):
        at, to = draw.randint(0, len(data)), draw.randint(0, len(data))
        match draw.randrange(4):
            case 0:
                data = data[:at] + draw.choice(JUNK) + data[at:]
            case 1:
                data = data[:at] + data[min(at + draw.randint(1, 6), len(data)) :]
            case 2:
                data = data[:at] + draw.randbytes(draw.randint(1, 5)) + data[at:]
            case _:
                data = data[: max(at, to)] + data[min(at, to) : max(at, to)] + data[max(at, to) :]
    return data[: draw.randint(0, len(data))] if draw.random() < 0.1 else data


@contextmanager
def nothing_unhandled() -> Iterator[None]:
    """Fails when a callback or a task of the loop raised."""
    found: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.append(f"{context.get('message')}: {context.get('exception')}"))
    yield
    assert not found


@pytest.mark.case("F18")
@pytest.mark.parametrize("seed", SEEDS)
@on_uvloop
async def test_whatever_clients_send_they_get_answers_or_the_end_and_others_are_served(seed: int) -> None:
    draw = random.Random(seed)

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = b"".join(spoilt(draw, draw.choice(WHOLE)) for _ in range(draw.randint(1, 3)))
        size = draw.choice([1 << 20, 1 << 20, 7, 1000])
        try:
            for at in range(0, min(len(data), 20_000), size):
                writer.write(data[at : at + size])
                await writer.drain()
            writer.write_eof()
            got = await asyncio.wait_for(reader.read(), 10.0)
        except ConnectionError:
            return
        finally:
            writer.close()
        assert not got or got.startswith(b"HTTP/1.1 ")
        assert b" 500 " not in got.partition(b"\r\n")[0]
        assert b"Traceback" not in got

    async with before(answers, chosen=settings(**SHORT)) as (path, p, d):
        with nothing_unhandled():
            for _ in range(CONNECTIONS // 10 + 1):
                await asyncio.gather(*(client(path.port) for _ in range(10)))
            assert (await path.post(BODY)).status == 200
            await path.at_rest()
        for asked in (*p.asked, *d.asked):  # each was one request of ours, whole
            assert asked.head.startswith(b"POST /v1/")
            assert b'"model":"sim-model"' in asked.body.replace(b'": "', b'":"')


ENGINE_ANSWERS = [
    prefill_answer(),
    answer(b'{"id": "x", "choices": [{"text": "b"}]}'),
    STREAM_HEAD + chunk(token()) + chunk(token("b")) + chunk(DONE) + LAST,
    STREAM_HEAD + chunk(token() + DONE) + LAST,
    answer(b'{"error": {"message": "no", "code": 500}}', status="500 Internal Server Error"),
    b"HTTP/1.1 200 OK\r\n\r\n" + token() + DONE,
]


@pytest.mark.rule("V8", "F2")
@pytest.mark.parametrize("seed", SEEDS)
@on_uvloop
async def test_whatever_engines_answer_each_request_ends_once_and_only_a_marker_makes_it_whole(seed: int) -> None:
    draw = random.Random(seed)
    sent: dict[str, bytes] = {}

    async def hostile(asked: Asked) -> None:
        data = spoilt(draw, draw.choice(ENGINE_ANSWERS))[:60_000]
        sent[asked.headers["x-request-id"]] = data
        size = draw.choice([1 << 20, 1 << 20, 3, 100])
        for at in range(0, len(data), size):
            asked.writer.write(data[at : at + size])
            await asyncio.sleep(0)
        if draw.random() < 0.7:
            asked.writer.close()

    async def sometimes(asked: Asked) -> None:
        await (hostile(asked) if draw.random() < 0.3 else _prefilled(asked))

    async def _prefilled(asked: Asked) -> None:
        asked.send(prefill_answer())

    async def client(streamed: bool) -> None:
        got = await path.post({**BODY, "stream": streamed})
        if streamed and got.status == 200 and got.body.rstrip().endswith(b"data: [DONE]"):
            assert any(b"[DONE]" in data for data in sent.values())
            assert b'"error"' not in got.body

    async with before(hostile, sometimes, settings(**SHORT)) as (path, _, d):
        with nothing_unhandled():
            for _ in range(CONNECTIONS // 10 + 1):
                await asyncio.gather(*(client(streamed=draw.random() < 0.7) for _ in range(10)))
            await path.at_rest()
            results = path.reporter.results
            assert len(results) == 10 * (CONNECTIONS // 10 + 1)
            assert set(results) <= set(RequestResult)
            d.script = answers
            healthy = [await path.post(BODY) for _ in range(40)]
            assert 200 in {got.status for got in healthy}
