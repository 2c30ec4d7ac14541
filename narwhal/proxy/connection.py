"""One keep-alive HTTP/1.1 connection to an engine: a request out, its answer or stream in.

The one place where our code replaces an HTTP library. Decides: where an answer begins and ends, and what a connection
that ends means. It cannot see: pools, requests of clients, or what the bytes of a stream say (its sink does).
"""

import asyncio
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import structlog
from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.outcome import OUTCOMES, LegKind, Seen
from narwhal.vocabulary import Outcome

MAX_HEAD_BYTES = 65_536
MAX_ANSWER_BYTES = 67_108_864  # a whole non-streaming answer, or a prefill's; far above what engines send
MAX_ERROR_BYTES = 1_048_576  # the body of an answer whose status is not 200
# An engine that had closed an idle connection answers the request on it with a reset, within a round trip. What comes
# later than this, far above any round trip, closed on an engine that had the request (spec V9).
IDLE_CLOSE_S = 1.0

_JOINED_WRITE_BYTES = 65_536  # up to here head and body go out in one write: copying is cheaper than a second call
_OK = 200

log = structlog.get_logger(__name__)


class Answer(NamedTuple):
    """A complete answer, never a stream that ran."""

    status: int
    head: bytes
    body: bytes
    not_before: float = 0.0  # the answer was not complete at this instant; it may have lain unread since

    def header(self, name: bytes) -> str:
        """The first header of that name (given in lower case); empty when absent. The parser has checked it."""
        at = self.head.lower().find(b"\r\n%b:" % name)
        if at < 0:
            return ""
        return self.head[at + len(name) + 3 :].partition(b"\r\n")[0].strip().decode("latin-1")


class Sink(Protocol):
    """Takes the bytes of a stream that was answered 200, in the order they came."""

    def feed(self, data: bytes) -> None:
        """A piece of the body, cut anywhere."""

    def feed_chunks(self, data: bytes) -> int:
        """The body with its chunk framing, from the beginning of a chunk on. Returns how many bytes were taken, which
        are whole chunks; the rest comes again by `feed`."""

    def complete(self) -> None:
        """The body has ended as HTTP wants it."""


Result = Answer | LegEnd


def final_head(head: bytes) -> bytes:
    """The head of the final answer: interim ones (1xx) before it are skipped."""
    while head.startswith((b"HTTP/1.1 1", b"HTTP/1.0 1")):
        _, found, rest = head.partition(b"\r\n\r\n")
        if not found:
            break
        head = rest
    return head.partition(b"\r\n\r\n")[0]


class EngineConnection(asyncio.Protocol):
    """One connection. `done` is called when it is free for the next request, `lost` when it is gone."""

    __slots__ = (
        "_between_chunks",
        "_chunk_ended",
        "_complete",
        "_done",
        "_head",
        "_head_done",
        "_interim",
        "_keep",
        "_looked_at",
        "_loop",
        "_lost",
        "_not_before",
        "_now",
        "_parser",
        "_parts",
        "_sink",
        "_size",
        "_status",
        "_stream",
        "_touched",
        "_transport",
        "_waiter",
        "deadline",
        "due",
        "heard",
        "idle_since",
        "kind",
        "paused",
        "quiet_s",
        "quiet_since",
        "reused",
        "url",
    )

    def __init__(
        self,
        url: str,
        done: Callable[["EngineConnection"], None],
        lost: Callable[["EngineConnection"], None],
    ) -> None:
        self.url = url
        self._done = done
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Result] | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._stream: Sink | None = None
        self._head = b""
        self._head_done = True
        self._interim = False
        self._chunk_ended = False  # the parser's last word on chunks
        self._between_chunks = False  # a stream runs and the next byte begins a chunk
        self._complete = False
        self._keep = False
        self._touched = False
        # The watchdog's last two looks. The last is not enough: after the process was stopped it may come before the
        # bytes that arrived meanwhile.
        self._not_before = self._looked_at = 0.0
        self._status = 0
        self._size = 0
        self._parts: list[bytes] = []
        self.reused = False
        self.heard = False
        self.paused = False
        self.idle_since = 0.0  # 0 while it is not in the pool
        self.kind = LegKind.PREFILL
        self.due = self.deadline = math.inf  # nothing is late before a request is sent
        self.quiet_s = 0.0
        self.quiet_since = 0.0  # since when nothing has come for the request that runs, as the watchdog saw it; or 0

    # --- used by the leg ---

    @property
    def usable(self) -> bool:
        """Whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    def runs(self, exchange: "asyncio.Future[Result] | None") -> bool:
        """Whether the request of `exchange`, a future that `start` gave, is the one that runs."""
        return exchange is not None and self._waiter is exchange

    def start(
        self,
        head: bytes,
        body: bytes,
        kind: LegKind,
        *,
        due: float,
        quiet_s: float,
        deadline: float,
        stream: Sink | None = None,
    ) -> "asyncio.Future[Result]":
        """Send a request. The future gets an `Answer`, or a `LegEnd` when there is none or a stream has ended.

        Instants are monotonic seconds: `due` is the engine's limit, and with `quiet_s` it moves to that long after
        every byte; `deadline` is the request's own.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            seen = Seen.CLOSED_BEFORE
            return self.never(LegEnd(OUTCOMES[seen][kind], idle_closed=self.reused, detail=seen.value))
        self.kind = kind
        self.due = due
        self.quiet_s = quiet_s
        self.deadline = deadline
        self.idle_since = self.quiet_since = 0.0
        self._stream = stream
        self._sink = None
        self._head = b""
        self._chunk_ended = False
        self._head_done = self._complete = self._touched = self.heard = False
        self._not_before = self._looked_at = 0.0
        self._size = 0
        self._parts = []
        waiter = self._waiter = self._loop.create_future()
        if len(body) <= _JOINED_WRITE_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        return waiter

    def release(self) -> None:
        """Give the connection back unused."""
        if self.usable:
            self._done(self)

    @staticmethod
    def never(end: LegEnd) -> "asyncio.Future[Result]":
        """The result of a request that was not sent."""
        waiter: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        waiter.set_result(end)
        return waiter

    def settle(self, end: Result, *, abort: bool) -> None:
        """The exchange has its result. With `abort` the connection goes too; else it is free once its body ended."""
        waiter = self._waiter
        self._waiter = None
        self._sink = _discard
        self._stream = None
        self._between_chunks = False
        self._parts = []
        if waiter is not None and not waiter.done():
            waiter.set_result(end)
        if abort:
            self.abort()
        else:
            self.resume()  # what is left of the body goes to no client, however slow it is

    def abort(self) -> None:
        """Close at once; the engine sees it now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.cancel()
        self._waiter = None
        self._sink = _discard
        self._stream = None
        self._between_chunks = False
        if self._transport is not None:
            self._transport.abort()

    def streaming(self, due: float, quiet_s: float) -> None:
        """The first token has come: from here on silence is what is measured."""
        self.kind = LegKind.STREAM
        self.due, self.quiet_s = due, quiet_s

    def pause(self) -> None:
        """The client does not read: neither do we."""
        if not self.paused and self._transport is not None and not self._transport.is_closing():
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """The client reads again."""
        if self.paused:
            self.paused = False
            self.heard = True  # silence while we did not listen is not the engine's
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def check(self, now: float) -> None:
        """The watchdog's look: push the due instant after bytes, end what is late."""
        self._not_before, self._looked_at = self._looked_at, now
        if self.heard or self.paused or not self.quiet_since:
            self.quiet_since = now
        if self.heard or self.paused:
            self.heard = False
            if self.quiet_s:
                self.due = now + self.quiet_s
        if now >= self.deadline <= self.due:
            self.settle(LegEnd(Outcome.DEADLINE, detail="the request's deadline"), abort=True)
        elif now >= self.due:
            outcome = OUTCOMES[Seen.LATE][self.kind]
            self.settle(LegEnd(outcome, detail=f"nothing came for {now - self.quiet_since:.1f} s"), abort=True)

    def excuse(self, stopped_s: float) -> None:
        """This process did not run for so long: the engine's limits do not count that time, the request's own does."""
        self.due += stopped_s
        if self.quiet_since:
            self.quiet_since += stopped_s

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.heard = True
        if self._between_chunks and self._stream is not None:
            # What the stream takes in whole chunks need not be parsed: the parser is between chunks before and after.
            taken = self._stream.feed_chunks(data)
            if taken:
                data = data[taken:]
                if not data:
                    return
        if not self._head_done:
            self._touched = True
            self._head += data
            if len(self._head) > MAX_HEAD_BYTES and b"\r\n\r\n" not in self._head:
                self._broken("an endless head")
                return
        elif self._waiter is None and self._sink is None:
            self.abort()  # bytes that nobody asked for
            return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError:
            log.exception("relay_failed", engine_url=self.url)
            self.settle(LegEnd(Outcome.LOCAL, detail="a fault of the proxy itself"), abort=True)
        except HttpParserUpgrade:
            self._broken("an upgrade that nobody asked for")
        except HttpParserError as error:
            if self._complete:  # the answer stands; what follows it is not ours
                self._keep = False
                self._finish()
            else:
                self._broken(str(error))
        else:
            if self._complete:
                self._finish()
            else:
                self._between_chunks = self._chunk_ended and self._stream is not None and data.endswith(b"\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiter is not None:
            if self._head_done and self._close_delimited():
                self._keep = False
                self._finish()
            elif self._head_done:
                outcome = OUTCOMES[Seen.CLOSED_DURING][self.kind]
                self.settle(LegEnd(outcome, self._status, detail=_why(Seen.CLOSED_DURING, exc)), abort=False)
            else:
                outcome = OUTCOMES[Seen.CLOSED_BEFORE][self.kind]
                end = LegEnd(outcome, idle_closed=self._idle_closed(), detail=_why(Seen.CLOSED_BEFORE, exc))
                self.settle(end, abort=False)
        self._lost(self)

    # --- httptools ---

    def on_headers_complete(self) -> None:
        if self._complete:  # a second answer to one request
            if self._sink is not None:
                self._sink = _discard  # it is nobody's, and not what comes next in the stream
            return
        status = self._parser.get_status_code()
        if status < _OK:
            self._interim = True
            return
        self._status = status
        self._head_done = True
        if self._stream is not None and status == _OK:
            self._sink = self._stream.feed

    def on_body(self, data: bytes) -> None:
        sink = self._sink
        if sink is not None:
            sink(data)
            return
        if self._complete:
            return
        self._size += len(data)
        if self._size > (MAX_ANSWER_BYTES if self._status == _OK else MAX_ERROR_BYTES):
            detail = f"an answer of more than {self._size - len(data)} bytes"
            if self._status == _OK:
                self.settle(LegEnd(Outcome.ANSWER_CUT, self._status, detail=detail), abort=True)
            else:  # the status says enough
                self.settle(Answer(self._status, final_head(self._head), b""), abort=True)
            return
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            return
        self._keep = not self._complete and self._parser.should_keep_alive()
        self._complete = True

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    # --- inside ---

    def _finish(self) -> None:
        """The answer is complete: hand it over, then give the connection back."""
        self._complete = False
        if self._waiter is not None:
            if self._sink is not None and self._stream is not None:
                self._stream.complete()
            else:
                parts = self._parts
                body = parts[0] if len(parts) == 1 else b"".join(parts)
                answer = Answer(self._status, final_head(self._head), body, self._not_before)
                self.settle(answer, abort=False)
        self._sink = None
        self._head = b""
        if self._keep and self.usable and not self.paused:
            self._done(self)
        elif self._transport is not None:
            self._transport.abort()

    def _idle_closed(self) -> bool:
        """Whether the connection had been closed when the request was written, rather than by an engine that had it.
        Up to the last look but one: since then the end may have lain unread."""
        return self.reused and not self._touched and self._not_before - self.quiet_since < IDLE_CLOSE_S

    def _close_delimited(self) -> bool:
        """Whether the answer ends with the connection: it has no length and no chunks."""
        answer = Answer(self._status, final_head(self._head), b"")
        return not answer.header(b"content-length") and not answer.header(b"transfer-encoding")

    def _broken(self, detail: str) -> None:
        end = LegEnd(OUTCOMES[Seen.BROKEN][self.kind], self._status, detail=f"{Seen.BROKEN}: {detail}")
        self.settle(end, abort=True)


def _discard(_data: bytes) -> None:
    """Bytes after the result: read so that the connection can be used again, and forgotten."""


def _why(seen: Seen, exc: Exception | None) -> str:
    return f"{seen}: {exc}" if exc is not None else seen.value
