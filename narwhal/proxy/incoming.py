"""A client's HTTP/1.1 connection: requests are read whole, within bounds, and answered one after the other.

Decides: where a request begins and ends, what is too large, too slow or no HTTP, and when a connection ends. It cannot
see: routes, engines, or what a request asks for. Answers are written straight to the transport (`client.py`).

Bounded for every connection: a head, a body (the rest is discarded, never kept), what is read ahead of requests that
wait for their turn, and the time that a client takes to send, and to read.

The second place where our code replaces an HTTP library; llhttp, by httptools, still decides what is well-formed. With
aiohttp's server here a one-token request cost 1.65 times as much as the bare relay does, and 1.31 with this (medians of
five interleaved pairs, `scripts/bench/cost.py`); and it bounds neither the time that a head takes nor what is read
ahead.
"""

import asyncio
from collections import deque
from typing import Protocol

import structlog
from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from narwhal.proxy.client import Client, Service, Stream
from narwhal.proxy.errors import Refusal
from narwhal.proxy.framing import faulty_head

MAX_HEAD_BYTES = 32_768  # a request's target, names and values of headers, trailers too
MAX_AHEAD_BYTES = 65_536  # of requests whose turn has not come; beyond it the socket is not read
MAX_AHEAD = 64  # such requests; with so many, nothing more is parsed
SLICE = 16_384  # bytes that are parsed at once; what requests they hold comes on top of MAX_AHEAD
MAX_DISCARDED_BYTES = 67_108_864  # of a body that was refused, read so that the client gets to see the answer
MAX_FRAMING = 8  # bytes of a chunked body, its framing included, for each byte that a body may have

# Headers that a request is known by; all others are neither kept nor passed on.
KEPT = {
    name: name
    for name in (b"content-length", b"expect", b"host", b"traceparent", b"transfer-encoding", b"x-request-id")
}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = structlog.get_logger(__name__)


class Registry(Protocol):
    """Who keeps all connections."""

    def opened(self, connection: "ClientConnection") -> None:
        """A client is there."""

    def lost(self, connection: "ClientConnection") -> None:
        """It is gone."""


class _Refused(Exception):
    """Reading ends here; the connection knows why."""


class ClientConnection(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_ahead",
        "_answered",
        "_begun",
        "_buffered",
        "_codings",
        "_current",
        "_discarded",
        "_ending",
        "_fields",
        "_head_bytes",
        "_heard",
        "_heard_at",
        "_hosts",
        "_in_head",
        "_parser",
        "_paused",
        "_raw",
        "_read_at",
        "_reading",
        "_refusal",
        "_registry",
        "_rest",
        "_service",
        "_serving",
        "_since",
        "_target",
        "_upgrading",
        "_waiting",
        "_written_all",
        "stream",
        "transport",
        "writing_paused",
    )

    def __init__(self, service: Service, registry: Registry) -> None:
        self._service = service
        self._registry = registry
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self.stream: Stream | None = None  # whoever writes without waiting for the client
        self.writing_paused = False
        self._written_all: asyncio.Future[None] | None = None
        self._current: Client | None = None  # is being answered
        self._waiting: deque[Client] = deque()  # came whole; their turn has not come
        self._reading: Client | None = None  # its head has come, its body has not
        self._fields: dict[bytes, bytes] = {}
        self._target = b""
        self._head_bytes = self._raw = 0
        self._hosts = self._codings = 0  # headers of these names
        self._begun = 0  # requests, in the slice that is parsed
        self._rest = b""  # came, and is not parsed until the requests before it have been answered
        self._in_head = False
        self._refusal: Refusal | None = None
        self._upgrading = False
        self._serving = False
        self._ending = False  # nothing more is read
        self._discarded = 0
        self._paused = False
        self._ahead = 0
        self._answered = False  # at least one request
        self._heard = True
        # Instants: of the last bytes; of the beginning of what is read or waited for; at which the client last read.
        self._heard_at = self._since = self._read_at = service.now()
        self._buffered = 0  # bytes that waited for the client to read at the last look

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._registry.opened(self)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._ending:
            self._discard(len(data))
            return
        if self._rest:
            self._rest += data
            return
        if self._current is not None:
            self._ahead += len(data)
        self._take(data)
        if (self._ahead > MAX_AHEAD_BYTES or self._rest) and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self.writing_paused = True
        if self.stream is not None:
            self.stream.client_slow()

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self.stream is not None:
            self.stream.client_reads()
        if self._written_all is not None and not self._written_all.done():
            self._written_all.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._ending = True
        self._parser = None  # the two refer to each other
        if self.stream is not None:
            self.stream.client_gone()
            self.stream = None
        if self._written_all is not None and not self._written_all.done():
            self._written_all.set_result(None)
        if self._current is not None:
            self._current.cancel()
        for client in self._waiting:
            self._service.gone(client)
        if self._reading is not None:
            self._service.gone(self._reading)
        self._waiting.clear()
        self._reading, self._rest = None, b""
        self._registry.lost(self)

    # --- reading ---

    def _take(self, data: bytes) -> None:
        """Parse what has come, as far as there is room for requests whose turn has not come."""
        for at in range(0, len(data), SLICE):
            if len(self._waiting) >= MAX_AHEAD:
                self._rest = data[at:]
                return
            piece = data[at : at + SLICE]
            if self._ending:
                self._discard(len(piece))
                continue
            fresh = not self._in_head and self._reading is None
            self._begun = 0
            self._feed(piece)
            if self._waiting and self._current is None:
                self._advance()
            if self._reading is not None or self._in_head:
                # Of a piece that others ended or began in, it is not known how much belongs to this one.
                self._partly(len(piece) if self._begun == fresh else 0)

    def _feed(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            return
        try:
            parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._upgrading = False
            self._decline(data[upgrade.args[0] :])
        except HttpParserCallbackError:
            if self._refusal is None:
                log.exception("request_crashed")
                self._refusal = Refusal.INTERNAL
            self._refuse(self._refusal)
        except HttpParserError:
            if not self._ending:  # else: something after the last request
                self._refuse(Refusal.NO_HTTP)

    def _decline(self, rest: bytes) -> None:
        """The client asks for another protocol. It does not get it; what it asked for goes on in this one, but the
        parser has stopped after the head."""
        parser, fields = self._parser, self._fields
        method = parser.get_method() if parser is not None else b""
        version = parser.get_http_version().encode() if parser is not None else b""
        if method == b"CONNECT":
            self._refuse(Refusal.NO_HTTP)
            return
        self._parser = HttpRequestParser(self)
        head = b"".join(b"%b: %b\r\n" % field for field in fields.items())
        self._feed(b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self._target, version, head, rest))

    def on_message_begin(self) -> None:
        self._fields = {}
        self._target = b""
        self._head_bytes = self._raw = self._hosts = self._codings = 0
        self._begun += 1
        self._in_head = True
        self._since = self._service.now()

    def on_url(self, url: bytes) -> None:
        self._target = self._target + url if self._target else url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        kept = KEPT.get(name.lower())
        if kept is not None and self._reading is None:  # else: a trailer
            self._fields[kept] = value
            if kept == b"host":
                self._hosts += 1
            elif kept == b"transfer-encoding":
                self._codings += 1

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = Refusal.HEAD_TOO_LARGE
            raise _Refused

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser is None:
            return
        http11 = parser.get_http_version() == "1.1"
        faulty = faulty_head(self._fields, hosts=self._hosts, codings=self._codings, http11=http11)
        if faulty is None and parser.should_upgrade():
            self._upgrading = True
            return
        self._in_head = False
        client = self._reading = self._service.make(self, parser.get_method(), self._target)
        client.take(self._fields, http11=http11, keep_alive=parser.should_keep_alive())
        if client.length > self._service.bounds().max_request_bytes:
            self._refusal = Refusal.TOO_LARGE
        if faulty is not None:
            self._refusal = faulty
        if self._refusal is not None:
            raise _Refused

    def on_body(self, data: bytes) -> None:
        client = self._reading
        if client is None:
            return
        body = client.body
        if not body:
            client.body = body = data
        else:
            if isinstance(body, bytes):  # more than one piece: grows in place
                client.body = body = bytearray(body)
            body += data
        if len(body) > self._service.bounds().max_request_bytes:
            self._refusal = Refusal.TOO_LARGE
            raise _Refused

    def on_message_complete(self) -> None:
        client = self._reading
        if client is None or self._upgrading:
            return
        self._reading = None
        self._waiting.append(client)
        if not client.keep_alive:
            self._ending = True

    def _partly(self, size: int) -> None:
        """`size` more bytes of a request have come, and it is not whole yet."""
        self._raw += size
        client = self._reading
        if client is None:
            if self._raw > MAX_HEAD_BYTES:
                self._refuse(Refusal.HEAD_TOO_LARGE)
                self._advance()
            return
        self._invite(client)
        # What the parser keeps of framing that never ends, nobody else sees.
        if self._raw > MAX_HEAD_BYTES + MAX_FRAMING * self._service.bounds().max_request_bytes:
            self._refuse(Refusal.TOO_LARGE)
            self._advance()

    def _invite(self, client: Client) -> None:
        """The body is still to come: once its turn has come, a client that waits for a word gets it."""
        self._service.begun(client)
        if not client.expects or self._current is not None or self._waiting or self.transport is None:
            return
        if self._service.wants_body(client):
            client.expects = False
            self.transport.write(_CONTINUE)
            return
        # It is answered now. Whether the body comes all the same nobody can tell, so nothing can follow (RFC 9110,
        # 10.1.1).
        client.keep_alive = False
        self._reading = None
        self._ending = True
        self._waiting.append(client)
        self._advance()

    def _refuse(self, refusal: Refusal) -> None:
        """What is being read cannot be served: it is answered in its turn, and nothing after it is read."""
        client, self._reading = self._reading, None
        if client is None:
            client = self._service.make(self, b"", b"")
        client.body = b""
        client.keep_alive = False
        client.refusal = refusal
        self._in_head = False
        self._ending = True
        self._waiting.append(client)

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > MAX_DISCARDED_BYTES and self.transport is not None:
            self.transport.abort()

    # --- one after the other ---

    def _advance(self) -> None:
        """Serve those that wait, until one of them takes its time."""
        if self._serving:
            return
        self._serving = True
        while self._waiting and self._current is None and self.transport is not None:
            client = self._current = self._waiting.popleft()
            self._service.serve(client)
        self._serving = False
        if self._current is None and self._reading is not None:
            self._invite(self._reading)

    def finished(self, client: Client) -> None:
        """`client` has its whole answer."""
        self._current = None
        self._answered = True
        self._since = self._service.now()
        transport = self.transport
        if transport is None:
            return
        if not client.keep_alive:
            self._end(client)
            return
        if self._rest and len(self._waiting) < MAX_AHEAD:
            rest, self._rest = self._rest, b""
            self._take(rest)
        self._ahead = sum(len(waits.body) for waits in self._waiting) if self._waiting else 0
        if self._paused and self._ahead <= MAX_AHEAD_BYTES and not self._rest:
            self._paused = False
            transport.resume_reading()
        if self._waiting or self._reading is not None:
            self._advance()

    def _end(self, client: Client) -> None:
        """The last answer was written. A client that is still sending must get to read it: closing under it would
        reset the connection, and throw the answer away."""
        self._ending = True
        transport = self.transport
        if transport is None:
            return
        self._rest = b""
        if (client.refusal is None and not client.expects) or not transport.can_write_eof():
            transport.close()
            return
        transport.write_eof()
        if self._paused:
            self._paused = False
            transport.resume_reading()

    def end_idle(self) -> None:
        """Close, unless a request is being served."""
        if self._current is None and self.transport is not None:
            self._ending = True
            self.transport.close()

    def end_reading(self) -> None:
        """What is still being read will not be served: refuse it."""
        if self._reading is not None:
            self._refuse(Refusal.BODY_LATE)
            self._advance()

    def abort(self) -> None:
        """Drop the client."""
        if self.transport is not None:
            self.transport.abort()

    async def drained(self, within_s: float) -> None:
        """Wait until the client has read what was written; if it does not in `within_s`, drop it."""
        if not self.writing_paused or self.transport is None:
            return
        self._written_all = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                await self._written_all
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
        finally:
            self._written_all = None

    # --- time ---

    def check(self, now: float) -> None:
        """The watchdog's look at what the client owes us."""
        transport = self.transport
        if transport is None:
            return
        if self._heard:
            self._heard = False
            self._heard_at = now
        bounds = self._service.bounds()
        patience_s = bounds.client_timeout_s
        if self.writing_paused or transport.is_closing():
            self._check_reads(transport, now, patience_s)
            return
        self._buffered = 0
        if self._current is not None or self._waiting:
            return  # the request has its own deadline
        late = now - self._since >= patience_s
        if self._reading is not None:
            if now - self._heard_at >= patience_s or now >= self._reading.due:
                self.end_reading()
        elif self._in_head and late:
            self._refuse(Refusal.HEAD_LATE)
            self._advance()
        elif self._ending and late:
            transport.abort()
        elif now - self._since >= (bounds.request_timeout_s if self._answered else patience_s):
            transport.close()

    def _check_reads(self, transport: asyncio.Transport, now: float, patience_s: float) -> None:
        """The client has something to read: end it when it does not."""
        unread = transport.get_write_buffer_size()
        if unread < self._buffered or not self._buffered:
            self._read_at = now
        self._buffered = unread
        if now - self._read_at >= patience_s:
            transport.abort()
