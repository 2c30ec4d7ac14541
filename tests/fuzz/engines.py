"""What must hold of whatever bytes an engine, or who attests it, answers: properties, each of one kind of bytes.

Shared by the tests beside this file, which draw such bytes, and by `scripts/fuzz.py`, which searches for them.
"""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import orjson

from narwhal.clock import RealClock
from narwhal.connectors.base import CountUnusable, HandoffUnusable
from narwhal.connectors.said import LONGEST, said
from narwhal.connectors.sse import Event, answer_given_up, classify
from narwhal.connectors.usage import OUTPUT_TOKENS, PROMPT_TOKENS, tokens_said
from narwhal.connectors.vllm_nixl import VllmNixl
from narwhal.control.checks import capture_identity, run_check
from narwhal.control.core.codec import decode
from narwhal.control.core.effects import CaptureIdentity, RunCheck
from narwhal.control.core.events import CheckAnswered, IdentityCaptured
from narwhal.control.engine_client import Answer as Fetched
from narwhal.control.inference import ProbedStream
from narwhal.control.journal import encoded
from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.connection import Answer, EngineConnection, Result
from narwhal.proxy.outcome import LegKind
from narwhal.proxy.stream import LAST_CHUNK, StreamRelay
from narwhal.vocabulary import Check, Outcome

T = TypeVar("T")
CONNECTOR = VllmNixl()
LONGEST_WORDS = 1000  # characters that operators are told of one answer
HEAD = b"HTTP/1.1 200 OK\r\nClient: yes\r\n\r\n"
TOLD = b'data: {"error": {"code": "decode"}}\n\n'  # what a client gets of a stream that failed


def worded(*sentences: str) -> None:
    """A refusal says why, in words that an operator can read and a store can keep."""
    assert sentences
    assert all(0 < len(sentence) < 2 * LONGEST_WORDS for sentence in sentences)
    "".join(sentences).encode()


def cut(data: bytes) -> tuple[bytes, list[bytes], int]:
    """All but the first three bytes, whole and in pieces, which two of the three decide; and the third."""
    head, body = data[:3].ljust(3, b"\0"), data[3:]
    draw, at, pieces = Random(head[:2]), 0, []
    longest = draw.choice((1, 3, 40, 4000))
    while at < len(body):
        size = draw.randint(1, longest)
        pieces.append(body[at : at + size])
        at += size
    return body, pieces, head[2]


# --- bodies -----------------------------------------------------------------------------------------------------------


def safe(descriptor: dict[str, Any]) -> None:
    """What the protocol says a decode engine must get, or it dies; typed here once more."""
    assert descriptor["do_remote_prefill"] is True
    assert descriptor["do_remote_decode"] is False
    assert descriptor["remote_engine_id"]
    assert isinstance(descriptor["remote_engine_id"], str)
    assert descriptor["remote_host"]
    assert isinstance(descriptor["remote_host"], str)
    assert type(descriptor["remote_port"]) is int
    assert 1 <= descriptor["remote_port"] <= 65535
    for group in descriptor["remote_block_ids"]:
        assert all(type(block) is int and block >= 0 for block in group)


def prefill_answer(data: bytes) -> None:
    """Refused in words, or a handoff that kills nobody and is what the engine sent, whole."""
    tokens_said(data, PROMPT_TOKENS)
    try:
        handoff = CONNECTOR.handoff(data)
    except HandoffUnusable as refused:
        worded(str(refused))
        return
    safe(json.loads(handoff))
    assert orjson.loads(handoff) == orjson.loads(data)["kv_transfer_params"]
    assert CONNECTOR.handoff(b'{"kv_transfer_params":%b}' % handoff) == handoff


def decode_answer(data: bytes) -> None:
    """A whole answer: given up or not, its tokens no more than its bytes can say; words for operators."""
    answer_given_up(data)
    assert 0 <= tokens_said(data, OUTPUT_TOKENS) < 10**12
    words = said(data)
    assert len(words) <= LONGEST
    assert len(words.splitlines()) <= 1
    words.encode()  # storable, printable
    try:
        assert CONNECTOR.counted(data) >= 0
    except CountUnusable as refused:
        worded(str(refused))


# --- streams ----------------------------------------------------------------------------------------------------------


def event(data: bytes) -> None:
    """One event is something, before the first token and after it; only the marker is the marker."""
    for token_seen in (False, True):
        if classify(data, token_seen=token_seen) is Event.MARKER:
            lines = [line[5:].strip() for line in data.splitlines() if line.startswith(b"data:")]
            assert b"".join(lines) == b"[DONE]"


class Kept:
    """Transport, source and listener of a relayed stream: keeps what becomes of it."""

    def __init__(self) -> None:
        self.written = b""
        self.ends: list[LegEnd] = []

    def write(self, data: bytes) -> None:
        self.written += data

    def settle(self, end: LegEnd, *, abort: bool) -> None:
        self.ends.append(end)

    def first_token(self) -> None:
        assert not self.written

    def output(self) -> None:
        assert not self.written


def unchunked(data: bytes, *, ended: bool = True) -> bytes:
    """The body of chunks as we write them, each whole; the last one must have come when it has `ended`, and not
    before."""
    body = b""
    while data if not ended else not data.startswith(LAST_CHUNK):
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        assert length > 0
        assert rest[length : length + 2] == b"\r\n"
        body, data = body + rest[:length], rest[length + 2 :]
    assert data == (LAST_CHUNK if ended else b"")
    return body


def _relayed(pieces: list[bytes], *, chunked: bool) -> tuple[Outcome, bytes, int]:
    """How a stream that came in these pieces ended, and what the client got of it."""
    kept = Kept()
    relay = StreamRelay(kept, kept, kept, HEAD, chunked=chunked)  # type: ignore[arg-type]
    for piece in pieces:
        relay.feed(piece)
    relay.complete()
    (end,) = kept.ends
    assert len(end.detail) < LONGEST_WORDS
    whole = end.outcome is Outcome.STREAM_COMPLETE
    if not relay.output:
        assert not kept.written
        return end.outcome, b"", relay.events
    if not whole:
        relay.fail(TOLD)
    assert kept.written.startswith(HEAD)
    body = kept.written[len(HEAD) :]
    return end.outcome, unchunked(body) if chunked else body, relay.events


def _probed(pieces: list[bytes]) -> Outcome:
    """What control's own probe makes of the same stream."""
    stream = ProbedStream()
    if not any(stream.feed(piece) for piece in pieces):
        stream.complete()
    assert len(stream.words) < LONGEST_WORDS
    return stream.outcome


def _markers(body: bytes) -> int:
    """Terminal markers in a stream, found without our reader."""
    events = body.replace(b"\r\n", b"\n").split(b"\n\n")
    return sum([b"".join(x[5:].strip() for x in e.split(b"\n") if x.startswith(b"data:")) == b"[DONE]" for e in events])


def stream(data: bytes) -> None:
    """However a stream's bytes are cut, it ends the same, and the client gets the same: what the engine sent up to
    some event, with a marker when it was whole and never otherwise (spec V8). Control's probe judges as proxies do."""
    body, pieces, chunked = cut(data)
    outcome, got, events = _relayed([body], chunked=bool(chunked % 2))
    assert _relayed(pieces, chunked=bool(chunked % 2)) == (outcome, got, events)
    if outcome is Outcome.STREAM_COMPLETE:
        assert (body + b"\n\n").startswith(got)  # a marker that nothing can follow gets its blank line
        assert b"[DONE]" in got
    else:
        passed = got.removesuffix(TOLD)
        assert body.startswith(passed)
        assert b"\r" in body or not _markers(passed)
    if b'"role"' not in body:  # which only opens a stream for a proxy, that can still try another engine
        assert _probed([body]) is outcome
        assert _probed(pieces) is outcome


# --- HTTP -------------------------------------------------------------------------------------------------------------

_loops: list[asyncio.AbstractEventLoop] = []


def in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """Its result, in a loop that is kept: a new one for each input would take most of the time."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0].run_until_complete(work)


class Socket:
    """An engine's, as far as a connection asks for it."""

    def __init__(self) -> None:
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def answered(pieces: list[bytes], *, streamed: bool, ends: bool) -> tuple[Any, ...]:
    """What an exchange came to when the engine's bytes came in these pieces; and what the client got."""
    kept, socket = Kept(), Socket()
    free: list[EngineConnection] = []
    gone: list[EngineConnection] = []
    connection = EngineConnection("http://e", free.append, gone.append)
    connection.connection_made(socket)  # type: ignore[arg-type]
    relay = StreamRelay(connection, kept, kept, HEAD, chunked=True)  # type: ignore[arg-type]
    kind = LegKind.FIRST_TOKEN if streamed else LegKind.PREFILL
    far = 1e9
    exchange = connection.start(
        b"GET", b"", kind, due=far, quiet_s=far, deadline=far, stream=relay if streamed else None
    )
    for piece in pieces:
        if not socket.closing:
            connection.data_received(piece)
    if socket.closing or ends:
        connection.connection_lost(None)
        assert gone == [connection]
    if not exchange.done():
        connection.abort()
        # How much of it goes into one chunk depends on how it came; what the client has of it does not.
        return "waits", unchunked(kept.written[len(HEAD) :], ended=False) if relay.output else kept.written
    result: Result = exchange.result()
    assert result.outcome is not Outcome.LOCAL if isinstance(result, LegEnd) else 200 <= result.status < 1000
    if isinstance(result, Answer):
        assert len(result.body) <= sum(map(len, pieces))
        return result.status, result.head, result.body, kept.written
    assert len(result.detail) < LONGEST_WORDS
    whole = result.outcome is Outcome.STREAM_COMPLETE
    if relay.output and not whole:
        relay.fail(TOLD)
    body = unchunked(kept.written[len(HEAD) :]) if relay.output else kept.written
    return result.outcome, result.status, body


async def _exchanged(data: bytes) -> None:
    body, pieces, how = cut(data)
    asked = {"streamed": bool(how & 1), "ends": bool(how & 2)}
    assert answered([body], **asked) == answered(pieces, **asked)


def engine_http(data: bytes) -> None:
    """However the bytes of an engine's connection are cut, an exchange has one result and the client the same bytes,
    and no fault is ours."""
    in_a_loop(_exchanged(data))


# --- what control asks ------------------------------------------------------------------------------------------------


class Answers:
    """An engine client whose answers are these, one after the other, whatever is asked."""

    def __init__(self, bodies: list[bytes]) -> None:
        self.settings = SimpleNamespace(contract={"model": "tiny", "args": {"a": [1, True], "b": None}})
        self._bodies = iter(bodies)

    async def _next(self, *_: object, **__: object) -> Fetched:
        return Fetched(status=200, body=next(self._bodies, b""))

    get = post = fetch = _next


def _now(work: Coroutine[Any, Any, T]) -> T:
    """The result of what waits for nothing."""
    try:
        work.send(None)
    except StopIteration as over:
        result: T = over.value
        return result
    raise AssertionError("it waits")


def _answers(bodies: list[bytes]) -> Iterator[CheckAnswered | IdentityCaptured]:
    clock, asked = RealClock(), {"engine": "p1", "incarnation": 1, "number": 1, "url": "http://e", "timeout_s": 1.0}
    for check in (Check.HEALTH, Check.ATTESTATION, Check.MODEL, Check.GENERATION, Check.FINAL_HEALTH):
        request = RunCheck(check=check, model="tiny", attestation_url="http://a", **asked)  # type: ignore[arg-type]
        yield _now(run_check(Answers(bodies), request, clock))  # type: ignore[arg-type]
    capture = CaptureIdentity(**asked)  # type: ignore[arg-type]
    yield _now(capture_identity(Answers(bodies), capture, clock))  # type: ignore[arg-type]


def check_answers(data: bytes) -> None:
    """Whatever bodies (between NUL bytes) checks of the gate get, each passes or fails in words, and what it found can
    be written down and read again: else the journal, or the state handoff, could not."""
    for answer in _answers(data.split(b"\0")):
        assert decode(type(answer), orjson.loads(encoded(answer))) == answer
        assert len(encoded(answer)) < 4 * LONGEST_WORDS
