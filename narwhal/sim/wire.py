"""HTTP/1.1 on a socket, as uvicorn serves it: parsing, keep-alive, pipelining in order, chunks, and abrupt ends.

It knows bytes and connections only; what is answered is `server.py`'s business. A protocol of its own, since the faults
that an engine must show (a bad chunk size, half an answer, a reset) are what HTTP libraries exist to prevent.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast

import httptools

_PIPELINE_LIMIT = 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close() sends RST
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
LAST_CHUNK = b"0\r\n\r\n"
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class Request:
    """One HTTP request, complete with its body."""

    __slots__ = ("body", "conn", "headers", "keep_alive", "method", "on_disconnect", "path", "query")

    def __init__(self, conn: "HttpConnection") -> None:
        self.conn = conn
        self.method = ""
        self.path = ""
        self.query = ""
        self.headers: list[tuple[bytes, bytes]] = []
        """As received, names in lower case."""
        self.body = b""
        self.keep_alive = True
        self.on_disconnect: Callable[[], None] | None = None
        """Called once if the connection is lost before the answer was finished."""

    def header(self, name: bytes) -> str | None:
        """The value of the first header of that lower-case name."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)


class Owner(Protocol):
    """What a connection needs from the engine behind it."""

    connections: "set[HttpConnection]"
    bad_requests: int

    def accept(self, conn: "HttpConnection") -> bool:
        """A connection came; False when it was ended at once."""

    def dispatch(self, request: Request) -> None:
        """Answer this request, now or later; one at a time per connection."""

    def keepalive(self) -> float:
        """Seconds after which an idle connection is closed."""


class HttpConnection(asyncio.Protocol):
    """A server-side connection."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._building: Request | None = None
        self._parts: list[bytes] = []
        self._target = b""
        self._queue: deque[Request] = deque()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_due = 0.0
        self.current: Request | None = None
        """The request that is being answered."""
        self.answered = 0
        """Requests whose answer is finished."""
        self.writable = True
        """False while the peer does not read as fast as we write."""
        self.on_writable: Callable[[], None] | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._owner.accept(self):
            self._owner.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # answered as if nobody had asked for another protocol, as uvicorn does
        except httptools.HttpParserError:
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.connections.discard(self)
        self._queue.clear()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        request, self.current = self.current, None
        self.on_writable = None
        if request is not None and request.on_disconnect is not None:
            request.on_disconnect()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self.on_writable is not None:
            self.on_writable()

    # -- parser callbacks

    def on_message_begin(self) -> None:
        self._building = Request(self)
        self._parts = []
        self._target = b""

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._building is not None
        self._building.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._building is not None
        if (self._building.header(b"expect") or "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        request, self._building = self._building, None
        assert request is not None
        request.method = self._parser.get_method().decode("latin-1")
        path, _, query = self._target.decode("latin-1").partition("?")
        request.path, request.query = path, query
        request.body = b"".join(self._parts)
        request.keep_alive = self._parser.should_keep_alive()
        if self.current is not None:
            self._queue.append(request)
            if len(self._queue) >= _PIPELINE_LIMIT and self._transport is not None:
                self._transport.pause_reading()
            return
        self._begin(request)

    def _begin(self, request: Request) -> None:
        self.current = request
        self._owner.dispatch(request)

    def _refuse(self) -> None:
        self._owner.bad_requests += 1
        text = b"Invalid HTTP request received."
        self.write(head(400, b"text/plain; charset=utf-8", len(text), close=True) + text)
        self.close()

    # -- writing

    @property
    def open(self) -> bool:
        """Whether the connection still stands."""
        return self._transport is not None

    def write(self, data: bytes) -> None:
        """Send bytes; without effect once the connection is gone."""
        if self._transport is not None:
            self._transport.write(data)

    def finished(self) -> None:
        """The answer to the current request is complete: take the next one, wait idle, or close as the client asked."""
        request, self.current = self.current, None
        self.on_writable = None
        self.answered += 1
        if self._transport is None or request is None:
            return
        if not request.keep_alive:
            self.close()
        elif self._queue:
            following = self._queue.popleft()
            self._transport.resume_reading()
            self._loop.call_soon(self._begin_queued, following)
            self.current = following
        else:
            self.arm_idle()

    def _begin_queued(self, request: Request) -> None:
        if self._transport is not None:
            self._begin(request)

    def close(self) -> None:
        """End with FIN once everything written is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once, as the kernel does for a process that died: no final chunk, nothing more is sent."""
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        """End at once with RST."""
        if self._transport is not None:
            sock: socket.socket = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()

    async def drained(self) -> None:
        """Wait until what was written has reached the kernel, a second at most."""
        deadline = self._loop.time() + 1.0
        await asyncio.sleep(0)
        while self._buffered() and self._loop.time() < deadline:  # noqa: ASYNC110  the transport has no such event
            await asyncio.sleep(0.001)

    def _buffered(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    # -- idle close

    def arm_idle(self) -> None:
        """Count the idle time from now. One timer serves many requests: it looks again when it fires early."""
        if self.current is not None or not self.answered or self._transport is None:
            return
        self._idle_due = self._loop.time() + self._owner.keepalive()
        if self._idle_timer is not None and self._idle_timer.when() > self._idle_due:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_at(self._idle_due, self._idle)

    def _idle(self) -> None:
        self._idle_timer = None
        if self.current is not None or self._building is not None:
            return  # armed again when the answer is finished
        if self._loop.time() < self._idle_due:
            self._idle_timer = self._loop.call_at(self._idle_due, self._idle)
        else:
            self.close()


_date: tuple[float, bytes] = (-1.0, b"")


def _date_line() -> bytes:
    """The `date` header, made once a second."""
    global _date  # noqa: PLW0603  a cache of one value
    now = asyncio.get_running_loop().time() // 1
    if _date[0] != now:
        _date = (now, b"date: " + formatdate(usegmt=True).encode() + b"\r\nserver: uvicorn\r\n")
    return _date[1]


def head(
    status: int,
    content_type: bytes | None,
    length: int | None,
    *,
    extra: tuple[tuple[bytes, bytes], ...] = (),
    close: bool = False,
) -> bytes:
    """An answer's head; without a length the body is chunked."""
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"Unknown")), _date_line()]
    lines += [b"%b: %b\r\n" % pair for pair in extra]
    if length is not None:
        lines.append(b"content-length: %d\r\n" % length)
    if content_type is not None:
        lines.append(b"content-type: %b\r\n" % content_type)
    lines.append(b"vary: Origin\r\n")
    if length is None:
        lines.append(b"transfer-encoding: chunked\r\n")
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(lines)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
