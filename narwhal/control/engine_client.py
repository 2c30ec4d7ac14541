"""HTTP to engines over the connections reserved for control (spec V1), and what a missing answer means.

The one place where the client library's errors become outcomes. A full data pool, or a hundred requests that hang,
delay nothing else: each waits for a seat of its own for a bounded time.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from narwhal.vocabulary import Outcome

LARGEST_ANSWER = 4_194_304  # bytes; an engine's metrics are the largest thing read whole, some hundred kilobytes

# What went wrong on this side of the connection says nothing about the engine (spec F5, L3).
_OWN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
_OWN_RESOLVER = frozenset({socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM})
_ERRNOS = {
    errno.ECONNREFUSED: (Outcome.REFUSED, "connection refused"),
    errno.ECONNRESET: (Outcome.RESET, "connection reset"),
    errno.ECONNABORTED: (Outcome.RESET, "connection reset"),
    errno.EPIPE: (Outcome.RESET, "connection reset"),
    errno.ETIMEDOUT: (Outcome.CONNECT_TIMEOUT, "connecting timed out"),
    errno.EHOSTUNREACH: (Outcome.UNREACHABLE, "host unreachable"),
    errno.ENETUNREACH: (Outcome.UNREACHABLE, "network unreachable"),
}


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What requests to engines depend on. Seconds."""

    connections: int
    connect_timeout_s: float
    pool_timeout_s: float
    keepalive_s: float
    api_key: str = ""
    contract: Mapping[str, Any] | None = None  # what attestation documents must match


class NoAnswer(Exception):
    """The engine gave no whole answer. `outcome` is LOCAL when nothing was learnt about the engine."""

    def __init__(self, outcome: Outcome, words: str) -> None:
        super().__init__(words)
        self.outcome = outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    body: bytes


class EngineClient:
    """The reserved pool, and requests over it."""

    def __init__(self, settings: ProbeSettings) -> None:
        self.settings = settings
        # Waiting for a connection is bounded apart from what is done with it, so the seats are counted here.
        self._seats = asyncio.Semaphore(settings.connections)
        credential = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}

        def session(connector: aiohttp.TCPConnector, headers: Mapping[str, str] = credential) -> aiohttp.ClientSession:
            timeout = aiohttp.ClientTimeout(sock_connect=settings.connect_timeout_s)
            return aiohttp.ClientSession(
                connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
            )

        self._session = session(aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.keepalive_s))
        # A connection that the engine closed while it was idle fails what is sent on it. The library sends a GET once
        # more; what must not be sent twice gets a connection of its own (spec V9).
        self.fresh = session(aiohttp.TCPConnector(limit=0, force_close=True))
        # An attestation document is not the engine's to serve: the engines' credential is not for who serves it.
        self._foreign = session(aiohttp.TCPConnector(limit=0, force_close=True), {})

    @asynccontextmanager
    async def seat(self, what: str) -> AsyncIterator[None]:
        """One reserved connection at a time. Raises NoAnswer (LOCAL) when none is free in time."""
        wait_s = self.settings.pool_timeout_s
        try:
            async with asyncio.timeout(wait_s):
                await self._seats.acquire()
        except TimeoutError:
            raise NoAnswer(Outcome.LOCAL, f"{what}: no control connection within {wait_s:g} s") from None
        try:
            yield
        finally:
            self._seats.release()

    async def get(self, base: str, path: str, *, timeout_s: float) -> Answer:
        """GET `path` of the engine at `base`. Raises NoAnswer."""
        return await self._answer(f"GET {path}", self._session.get, base.rstrip("/") + path, timeout_s=timeout_s)

    async def fetch(self, url: str, *, what: str, timeout_s: float) -> Answer:
        """GET a document that is not an engine's own, without the engines' credential. Raises NoAnswer."""
        return await self._answer(what, self._foreign.get, url, timeout_s=timeout_s)

    async def post(self, base: str, path: str, body: bytes, *, request_id: str, timeout_s: float) -> Answer:
        """POST a JSON body to the engine at `base`. Raises NoAnswer."""
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        url = base.rstrip("/") + path
        return await self._answer(f"POST {path}", self.fresh.post, url, timeout_s=timeout_s, data=body, headers=headers)

    async def _answer(self, what: str, method: Any, url: str, *, timeout_s: float, **more: Any) -> Answer:
        async with self.seat(what):
            try:
                async with asyncio.timeout(timeout_s), method(url, allow_redirects=False, **more) as response:
                    return Answer(status=response.status, body=await whole(response))
            except (aiohttp.ClientError, OSError) as error:  # time-outs are OSErrors
                raise self.told(what, error, timeout_s) from error

    async def close(self) -> None:
        """Drops every connection, also when whoever waits for that is cancelled."""
        sessions = (self._session, self.fresh, self._foreign)
        await asyncio.shield(asyncio.gather(*(session.close() for session in sessions)))

    def told(self, what: str, error: Exception, timeout_s: float) -> NoAnswer:
        """A client library's error as ours, in words that name no address."""
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            bound = self.settings.connect_timeout_s
            return NoAnswer(Outcome.CONNECT_TIMEOUT, f"{what}: no connection within {bound:g} s")
        if isinstance(error, TimeoutError):
            return NoAnswer(Outcome.READ_TIMEOUT, f"{what}: no answer within {timeout_s:g} s")
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        code = cause.errno if isinstance(cause, OSError) else None
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            if code in _OWN_RESOLVER:
                return NoAnswer(Outcome.LOCAL, f"{what}: our resolver does not answer")
            return NoAnswer(Outcome.UNREACHABLE, f"{what}: the name does not resolve")
        if code in _OWN_ERRNOS:
            return NoAnswer(Outcome.LOCAL, f"{what}: {errno.errorcode.get(code or 0)} on our side")
        outcome, words = _ERRNOS.get(code or 0) or _by_class(error)
        return NoAnswer(outcome, f"{what}: {words}")


def _by_class(error: Exception) -> tuple[Outcome, str]:
    if isinstance(error, aiohttp.ClientSSLError):
        return Outcome.TLS_FAILED, "TLS failed"
    if isinstance(error, aiohttp.ClientPayloadError):
        return Outcome.ANSWER_CUT, "the answer was cut short"
    if isinstance(error, aiohttp.ClientConnectionError):
        return Outcome.RESET, "connection closed without an answer"
    # What is not HTTP ends like a connection that was closed: no answer began.
    return Outcome.RESET, f"not an HTTP answer ({type(error).__name__})"


async def whole(response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises ClientPayloadError when it is cut short, or too large to be what was asked for."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > LARGEST_ANSWER:
            raise aiohttp.ClientPayloadError(f"more than {LARGEST_ANSWER} bytes")
    return bytes(body)
