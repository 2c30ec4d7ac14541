"""A connection that has given its answer may serve another request before the first one's task is awake: nothing that
happens to the first client reaches it any more."""

import asyncio
from collections.abc import Callable

import pytest

from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.connection import Answer, EngineConnection, Result
from narwhal.proxy.outcome import LegKind
from narwhal.proxy.relay import Relay
from narwhal.vocabulary import Outcome
from tests.proxy.harness import (
    DONE,
    LAST,
    STREAM_HEAD,
    WAIT_S,
    Asked,
    Path,
    answer,
    before,
    chunk,
    on_uvloop,
    request_bytes,
    until,
)

HAPPENS: dict[str, Callable[[Relay], object]] = {
    "leaves": Relay.client_gone,
    "stops reading": Relay.client_slow,
    "is cut off by a proxy on its way out": Relay.cut,
}


async def answers(asked: Asked) -> None:
    asked.send(answer(b'{"choices": [{"text": "b"}]}'))


def relay_of(path: Path) -> Relay:
    """That of the one request under way."""
    relay = next(c.stream for c in path.data.handler.connections if c.stream is not None)
    assert isinstance(relay, Relay)
    return relay


@pytest.mark.rule("V7", "F5")
@pytest.mark.parametrize("what", HAPPENS)
@on_uvloop
async def test_what_happens_to_a_client_ends_no_other_ones_request(what: str) -> None:
    second: list[asyncio.Future[Result]] = []

    async with before(answers) as (path, _, d):
        legs = path.data.legs
        freed = legs._freed

        def freed_and_taken(connection: EngineConnection) -> None:
            freed(connection)
            if connection.url != d.url or second:
                return
            # The first request has its answer, and its task sleeps still.
            again = legs.reuse(d.url)
            assert again is connection
            now = asyncio.get_running_loop().time()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: d\r\nContent-Length: 2\r\n\r\n"
            end = now + WAIT_S
            second.append(again.start(head, b"{}", LegKind.ANSWER, due=end, quiet_s=0.0, deadline=end))
            HAPPENS[what](relay_of(path))

        legs._freed = freed_and_taken  # type: ignore[method-assign]
        got = await path.post()
        assert got.status == 200
        result = await asyncio.wait_for(second[0], WAIT_S)
        assert isinstance(result, Answer)
        assert result.status == 200


@pytest.mark.rule("V7")
@pytest.mark.case("F14")
@on_uvloop
async def test_clients_that_come_and_go_disturb_nobody_else() -> None:
    """The same by chance, as it was found: many clients, of whom some leave at any instant."""
    request = request_bytes({"model": "sim-model", "prompt": "a b c", "max_tokens": 1})
    whole = 0

    async def stays(path: Path, requests: int) -> None:
        nonlocal whole
        reader, writer = await path.raw(b"")
        for _ in range(requests):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")  # raises when the proxy closes
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            whole += 1
        writer.close()

    async def leaves(path: Path, times: int) -> None:
        for turn in range(times):
            _, writer = await path.raw(request)
            for _ in range(turn % 16):
                await asyncio.sleep(0)
            writer.transport.abort()

    async with before(answers) as (path, _, _):
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(stays(path, 100))
                group.create_task(leaves(path, 100))
        assert whole == 800


class Ends:
    """A stream whose client is slow, and that has its end with its first bytes."""

    def __init__(self, connection: EngineConnection) -> None:
        self.connection = connection

    def feed(self, _data: bytes) -> None:
        self.connection.pause()
        self.connection.settle(LegEnd(Outcome.STREAM_COMPLETE), abort=False)

    def feed_chunks(self, _data: bytes) -> int:
        return 0

    def complete(self) -> None:
        raise AssertionError("it had ended before")


@pytest.mark.rule("V1")
@on_uvloop
async def test_a_stream_that_ended_while_its_client_was_slow_leaves_its_connection_free() -> None:
    """Back-pressure pauses the engine's socket; once the stream has its end nothing is left to hold back."""

    async def script(asked: Asked) -> None:
        asked.send(STREAM_HEAD, chunk(DONE))
        await asyncio.sleep(0.02)
        asked.send(LAST)

    async with before(script) as (path, _, d):
        legs, now = path.data.legs, asyncio.get_running_loop().time()
        connection = await legs.connect(d.url, now + WAIT_S)
        assert isinstance(connection, EngineConnection)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: d\r\nContent-Length: 2\r\n\r\n"
        stream, end = Ends(connection), now + WAIT_S
        result = await connection.start(
            head, b"{}", LegKind.STREAM, due=end, quiet_s=WAIT_S, deadline=end, stream=stream
        )
        assert result == LegEnd(Outcome.STREAM_COMPLETE)
        await until(lambda: legs.reuse(d.url) is connection, "the connection is free")
