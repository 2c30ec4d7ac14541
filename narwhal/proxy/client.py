"""One request of a client: what is known of it, and the way back. Answers are written straight to the transport, so
that a stream's bytes go out as they came and an answer costs one write.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

from narwhal.clock import Clock
from narwhal.config import ServingConfig
from narwhal.proxy.errors import Refusal, Reply

REQUEST_ID = re.compile(rb"[!-~]{1,128}")
TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}[!-~]{0,128}")

_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
_JSON = "application/json"


class Stream(Protocol):
    """Whoever writes to a client without waiting for it."""

    def client_slow(self) -> None:
        """The client does not read: its buffer is full."""

    def client_reads(self) -> None:
        """The buffer has drained."""

    def client_gone(self) -> None:
        """The connection is lost. Nothing may be written any more."""


class Connection(Protocol):
    """The client's connection, as far as an answer needs it."""

    transport: asyncio.Transport | None  # None when the client has gone
    stream: Stream | None
    writing_paused: bool

    async def drained(self, within_s: float) -> None:
        """Wait until the client has read what was written; if it does not in `within_s`, drop it."""

    def finished(self, client: "Client") -> None:
        """`client` has its whole answer."""

    def end_reading(self) -> None:
        """What is still being read will not be served: refuse it."""


class Letterhead:
    """What all answers of a worker share: the date, and ids for requests that came without one."""

    def __init__(self, clock: Clock, ids: Iterator[str]) -> None:
        self._clock = clock
        self._ids = ids
        self._second = 0
        self._date = b""

    def date(self) -> bytes:
        """`Date: …` with its line end, made once a second."""
        second = int(self._clock.wall())
        if second != self._second:
            self._second = second
            self._date = f"Date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._date

    def id(self) -> str:
        """A new id."""
        return next(self._ids)


class Client:
    """One request's way in and back."""

    __slots__ = (
        "_letterhead",
        "arrived_at",
        "body",
        "connection",
        "due",
        "expects",
        "http11",
        "id_line",
        "keep_alive",
        "length",
        "method",
        "refusal",
        "request_id",
        "started",
        "status",
        "target",
        "task",
        "trace_line",
    )

    def __init__(
        self,
        connection: Connection,
        letterhead: Letterhead,
        method: bytes,
        target: bytes,
        *,
        arrived_at: float,
        due: float,
    ) -> None:
        """`arrived_at`, `due`: when its head was there, and its deadline; monotonic seconds."""
        self.connection = connection
        self.method = method
        self.target = target
        self._letterhead = letterhead
        self.arrived_at = arrived_at
        self.due = due
        self.body: bytes | bytearray = b""
        self.length = 0  # as announced
        self.expects = False  # a word before it sends its body
        self.http11 = True
        self.keep_alive = True
        self.refusal: Refusal | None = None  # why it cannot be served
        self.request_id = ""
        self.id_line = self.trace_line = b""
        self.status = 0  # what was sent, 0 before
        self.task: asyncio.Task[None] | None = None  # of the request while it is served
        self.started = False  # whether that has taken its first step

    def take(self, fields: Mapping[bytes, bytes], *, http11: bool, keep_alive: bool) -> None:
        """What its head said. `fields`: the headers that are kept, by lower-case name."""
        self.http11 = http11
        self.keep_alive = keep_alive
        given = fields.get(b"x-request-id")
        if given is not None and REQUEST_ID.fullmatch(given):
            self._identify(given.decode())
        else:
            self._identify(self._letterhead.id())
        parent = fields.get(b"traceparent")
        if parent is not None and TRACEPARENT.fullmatch(parent):
            self.trace_line = b"traceparent: %b\r\n" % parent
        self.length = int(fields.get(b"content-length", 0))
        expect = fields.get(b"expect")
        self.expects = expect is not None and http11 and expect.lower() == b"100-continue"

    def _identify(self, request_id: str) -> None:
        self.request_id = request_id
        self.id_line = b"X-Request-Id: " + request_id.encode()  # without its end

    def cancel(self) -> None:
        """End the request's task. One that has not taken its first step sees by itself that it is over: a task that is
        cancelled before it never runs, not even to give its seat back."""
        if self.task is not None and self.started:
            self.task.cancel()

    @property
    def transport(self) -> asyncio.Transport | None:
        """The client's socket; None when it has gone."""
        return self.connection.transport

    def stream_head(self) -> bytes:
        """The head of a stream's answer. To HTTP/1.0 the end of the connection ends the body."""
        if not self.http11:
            self.keep_alive = False
        framing = b"Transfer-Encoding: chunked\r\n" if self.http11 else b""
        return (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
            b"X-Accel-Buffering: no\r\n%b%b" % (framing, self._common())
        )

    def send(self, status: int, body: bytes, content_type: str = _JSON, *, extra: str = "", bare: bool = False) -> None:
        """Write a whole answer. `extra`: more header lines, each with its end; `bare`: leave the body out (HEAD)."""
        transport = self.connection.transport
        self.status = status
        if transport is None:
            return
        head = b"%bContent-Type: %b\r\nContent-Length: %d\r\n%b%b" % (
            _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status,
            content_type.encode("latin-1"),
            len(body),
            extra.encode("latin-1"),
            self._common(),
        )
        transport.write(head if bare else head + body)

    def refuse(self, told: Reply, *, bare: bool = False, extra: str = "") -> None:
        """Write an error."""
        if told.retry_after:
            extra += f"Retry-After: {told.retry_after}\r\n"
        self.send(told.status, told.body, extra=extra, bare=bare)

    def allow(self, methods: str) -> None:
        """Answer what is allowed (OPTIONS)."""
        self.status = 204
        if self.transport is not None:
            self.transport.write(b"%bAllow: %b\r\n%b" % (_STATUS_LINES[204], methods.encode(), self._common()))

    def _common(self) -> bytes:
        if not self.id_line:  # there was no head to take one from
            self._identify(self._letterhead.id())
        if not self.keep_alive:
            connection = b"Connection: close\r\n"
        else:
            connection = b"" if self.http11 else b"Connection: keep-alive\r\n"
        return b"%b\r\n%b%b\r\n" % (self.id_line, self._letterhead.date(), connection)


class Service(Protocol):
    """Whom requests are for."""

    def bounds(self) -> ServingConfig:
        """What clients are held to now."""

    def make(self, connection: Connection, method: bytes, target: bytes) -> Client:
        """A request's head has come."""

    def begun(self, client: Client) -> None:
        """Its body is still to come."""

    def wants_body(self, client: Client) -> bool:
        """Whether the answer to what asks for a word before it sends its body depends on that."""

    def serve(self, client: Client) -> None:
        """It is there, whole or with its `refusal`: answer it, now or later, then tell its connection `finished`."""

    def gone(self, client: Client) -> None:
        """The client went away before it could be served."""

    def now(self) -> float:
        """Monotonic seconds."""
