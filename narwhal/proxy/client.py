"""The client's side of the data path: its connection, and answers written straight to it.

aiohttp parses requests and keeps connections alive; heads and bodies of answers are ours, so that a stream's bytes go
out as they came and an answer costs one write.
"""

import asyncio
import re
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from narwhal.clock import Clock
from narwhal.proxy.errors import Refusal, Reply, reply

REQUEST_ID = re.compile(r"[!-~]{1,128}")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}[!-~]{0,128}")

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
_JSON = "application/json"

log = structlog.get_logger(__name__)


class Stream(Protocol):
    """Whoever writes to a client without waiting for it."""

    def client_slow(self) -> None:
        """The client does not read: its buffer is full."""

    def client_reads(self) -> None:
        """The buffer has drained."""

    def client_gone(self) -> None:
        """The connection is lost. Nothing may be written any more."""


class ClientConnection(web.RequestHandler):
    """A client's connection: tells the stream that runs on it of back-pressure and loss, at once."""

    __slots__ = ("stream",)

    stream: Stream | None

    def __init__(self, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self.stream = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.stream is not None:
            self.stream.client_slow()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stream is not None:
            self.stream.client_reads()

    async def drained(self, within_s: float) -> None:
        """Wait until the client has read what was written; if it does not in `within_s`, drop it."""
        try:
            async with asyncio.timeout(within_s):
                await self._drain_helper()
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.stream is not None:
            self.stream.client_gone()
            self.stream = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP request, as JSON; the connection closes."""
        if status == HTTPStatus.BAD_REQUEST:
            told = reply(Refusal.BAD_REQUEST, message="The request is not well-formed HTTP")
        else:
            log.error("request_crashed", exc_info=exc)
            told = reply(Refusal.INTERNAL)
        if self.transport is not None:
            head = (
                b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head % (told.status, _PHRASES[told.status], len(told.body)) + told.body)
        return CLOSES


class ClientServer(web.Server):
    """A protocol factory for `loop.create_server` that makes `ClientConnection`s."""

    def __call__(self) -> web.RequestHandler:
        return ClientConnection(self, loop=self._loop, **self._kwargs)


class Written(web.StreamResponse):
    """Tells aiohttp that the answer has been written already, and whether the connection stays."""

    def __init__(self, keep_alive: bool) -> None:
        super().__init__()
        self._stays = keep_alive

    @property
    def keep_alive(self) -> bool | None:
        return self._stays

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""


STAYS = Written(True)
CLOSES = Written(False)


class Dates:
    """The Date header, made once a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        """`Date: …` with its line end."""
        second = int(self._clock.wall())
        if second != self._second:
            self._second = second
            self._line = f"Date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


class Client:
    """One request's way back: what is known of the client, and writing to it."""

    __slots__ = ("_date", "connection", "http11", "id_line", "keep_alive", "request_id", "status", "task", "trace_line")

    def __init__(self, request: web.BaseRequest, dates: Dates, made_id: str) -> None:
        headers = request.headers
        given = headers.get("X-Request-Id")
        self.request_id = given if given is not None and REQUEST_ID.fullmatch(given) else made_id
        parent = headers.get("traceparent")
        self.id_line = b"X-Request-Id: " + self.request_id.encode()  # without its end
        traced = parent is not None and TRACEPARENT.fullmatch(parent)
        self.trace_line = f"traceparent: {parent}\r\n".encode() if traced else b""
        self.connection: Any = request.protocol
        self.task = request.task  # that of the connection; cancelling it cancels the request that runs on it
        self.keep_alive = request.keep_alive
        self.http11 = request.version >= (1, 1)
        self.status = 0  # what was sent, 0 before
        self._date = dates.line()

    @property
    def transport(self) -> asyncio.Transport | None:
        """The client's socket; None when it has gone."""
        transport: asyncio.Transport | None = self.connection.transport
        return transport

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
        transport = self.transport
        self.status = status
        if transport is None:
            return
        head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b%b" % (
            status,
            _PHRASES.get(status, b"Unknown"),
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

    def _common(self) -> bytes:
        if not self.keep_alive:
            connection = b"Connection: close\r\n"
        else:
            connection = b"" if self.http11 else b"Connection: keep-alive\r\n"
        return b"%b\r\n%b%b\r\n" % (self.id_line, self._date, connection)

    def written(self) -> web.StreamResponse:
        """What the handler returns to aiohttp."""
        return STAYS if self.keep_alive else CLOSES
