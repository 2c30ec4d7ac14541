"""From an engine's socket to the client's: however a stream was chunked and cut, the client gets the same."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.connection import Answer, EngineConnection
from narwhal.proxy.outcome import LegKind
from narwhal.proxy.stream import StreamRelay
from narwhal.vocabulary import Outcome
from tests.proxy.harness import DONE, LAST, STREAM_HEAD, chunk, token

ERROR_EVENT = b'data: {"error": {"message": "boom", "code": 500}}\n\n'
BIG = token("a\\r\\n0\\r\\n\\r\\n" * 40)
EVENTS = [
    token("a"),
    token("é🐋"),
    token('"error"'),
    BIG,
    b": ping\n\n",
    token("x").replace(b"\n", b"\r\n"),
    ERROR_EVENT,
    DONE,
]
FAR = 1e12


class Engine(asyncio.Transport):
    """The engine's side of a connection: nothing is sent anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


class Client(Engine):
    """The client's side: keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def first_token(self) -> None:
        pass

    def output(self) -> None:
        pass


def unchunked(data: bytes) -> bytes:
    """The content of whole chunks."""
    content = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        assert size == b"%x" % length
        assert rest[length : length + 2] == b"\r\n"
        content, data = content + rest[:length], rest[length + 2 :]
    return content


def relayed(segments: list[bytes]) -> tuple[bytes, LegEnd | Answer | None, int]:
    """(what the client got, how the leg ended, connections given back) of a stream that came in these segments."""
    loop = asyncio.new_event_loop()
    freed: list[EngineConnection] = []

    async def run() -> tuple[bytes, LegEnd | Answer | None, int]:
        engine, client = Engine(), Client()
        connection = EngineConnection("http://x", freed.append, lambda _: None)
        connection.connection_made(engine)
        stream = StreamRelay(connection, client, client, b"", chunked=True)
        waiter = connection.start(b"", b"", LegKind.FIRST_TOKEN, due=FAR, quiet_s=0.0, deadline=FAR, stream=stream)
        for segment in segments:
            if engine.aborted:
                break
            connection.data_received(segment)
        if not waiter.done() and not engine.aborted:
            connection.connection_lost(None)
        return unchunked(client.written.removesuffix(LAST)), waiter.result() if waiter.done() else None, len(freed)

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=1, max_size=6),
    chunks=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    segments=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    whole_events=st.booleans(),
    odd_size_lines=st.booleans(),
)
def test_the_client_gets_the_same_however_it_was_chunked_and_cut(
    events: list[bytes], chunks: list[int], segments: list[int], whole_events: bool, odd_size_lines: bool
) -> None:
    data = b"".join(events)
    pieces: list[bytes] = []
    at = 0
    while at < len(data):
        size = len(events[len(pieces)]) if whole_events else chunks[len(pieces) % len(chunks)]
        pieces.append(data[at : at + size])
        at += size
    framed = [chunk(piece) for piece in pieces]
    if odd_size_lines:
        framed = [b"00%X\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    wire = STREAM_HEAD + b"".join(framed) + LAST
    cut: list[bytes] = []
    at = 0
    while at < len(wire):
        size = segments[len(cut) % len(segments)]
        cut.append(wire[at : at + size])
        at += size
    in_one = relayed([wire])
    assert relayed(cut) == in_one
    assert relayed([STREAM_HEAD, *framed, LAST]) == in_one
    got, end, freed = in_one
    assert isinstance(end, LegEnd)
    if end.outcome is Outcome.STREAM_COMPLETE:
        assert data.startswith(got)
        assert got.endswith(DONE)
        assert ERROR_EVENT not in got
        assert freed == 1, "the connection is used again"
    else:
        assert DONE not in got


def test_a_segment_that_only_looks_like_a_chunk_is_no_chunk() -> None:
    """Inside of a larger chunk, bytes that read like a whole chunk are content."""
    inner = chunk(token("b"))
    outer = b"data: x\r\n" + inner  # a chunk whose content has CRLFs at the places where segments end
    wire = chunk(outer)
    head = wire[: wire.index(inner)]
    rest = wire[len(head) + len(inner) :]
    cut = relayed([STREAM_HEAD, chunk(token("a")), head, inner, rest, chunk(DONE), LAST])
    assert cut == relayed([STREAM_HEAD + chunk(token("a")) + wire + chunk(DONE) + LAST])


def test_a_second_answer_behind_a_stream_is_no_part_of_it() -> None:
    """Also in one segment with the end of the first one, which had no event's end."""
    first = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\ndata: {"
    more = token("b").removeprefix(b"data: {") + DONE
    second = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(more), more)
    got, end, _ = relayed([first + second])
    assert (got, end) == relayed([first, second])[:2]
    assert isinstance(end, LegEnd)
    assert (got, end.outcome) == (b"", Outcome.STREAM_CUT)


def test_an_event_with_a_carriage_return_of_its_own_is_taken_the_same_way_whole_and_in_parts() -> None:
    odd = b'data: {"choices\r": 1}\n\n'
    wire = chunk(odd)
    ends = chunk(DONE) + LAST
    whole = relayed([STREAM_HEAD + chunk(token("a")), wire, ends])
    assert whole == relayed([STREAM_HEAD + chunk(token("a")), wire[:20], wire[20:], ends])
    assert whole[0] == token("a") + odd + DONE


def test_a_marker_behind_a_carriage_return_is_none() -> None:
    _, end, _ = relayed([STREAM_HEAD + chunk(token("a")) + chunk(b"data: \r[DONE]\n\n") + LAST])
    assert isinstance(end, LegEnd)
    assert end.outcome is Outcome.STREAM_CUT
