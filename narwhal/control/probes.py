"""Checks of engines over HTTP, through the connections reserved for control (spec V1): a full data pool, or a hundred
checks that hang, delay nothing else.

Each check is a coroutine in `CHECKS`; its answer goes back as an event. Decides: pass, fail or inconclusive of one
check. Inconclusive is whatever says nothing about the engine: no free control connection, no descriptor, no resolver.
"""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp
import orjson
import structlog

from narwhal.clock import Clock
from narwhal.control.core.events import CheckAnswered, CheckResult, RunCheck
from narwhal.vocabulary import Check, Verdict

LARGEST_ANSWER = 1_048_576  # bytes; a list of models is a few kilobytes

# What went wrong on this side of the connection.
_OWN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
_OWN_RESOLVER = frozenset({socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM})

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """What checks depend on. Seconds."""

    connections: int
    connect_timeout_s: float
    pool_timeout_s: float
    keepalive_s: float
    api_key: str = ""


class Inconclusive(Exception):
    """Nothing was learnt about the engine."""


class Failed(Exception):
    """The engine gave no answer, or a wrong one."""


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
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.keepalive_s),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(sock_connect=settings.connect_timeout_s),
        )

    async def get(self, base: str, path: str, *, timeout_s: float) -> Answer:
        """GET `path` of the engine at `base`. Raises Failed or Inconclusive."""
        what = f"GET {path}"
        try:
            async with asyncio.timeout(self.settings.pool_timeout_s):
                await self._seats.acquire()
        except TimeoutError:
            raise Inconclusive(f"{what}: no control connection within {self.settings.pool_timeout_s:g} s") from None
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.get(base.rstrip("/") + path, allow_redirects=False) as response:
                    return Answer(status=response.status, body=await _bounded(response, what))
        except TimeoutError as error:
            connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
            bound = self.settings.connect_timeout_s if connecting else timeout_s
            raise Failed(f"{what}: no {'connection' if connecting else 'answer'} within {bound:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _told(what, error) from error
        finally:
            self._seats.release()

    async def close(self) -> None:
        """Drops every connection."""
        await self._session.close()


async def _bounded(response: aiohttp.ClientResponse, what: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > LARGEST_ANSWER:
            raise Failed(f"{what} answered more than {LARGEST_ANSWER} bytes")
    return bytes(body)


def _told(what: str, error: Exception) -> Failed | Inconclusive:
    """A client library's error as ours, in words that name no address."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    code = cause.errno if isinstance(cause, OSError) else None
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        words = f"{what}: the name does not resolve"
        return Inconclusive(f"{words} (own resolver)") if code in _OWN_RESOLVER else Failed(words)
    if code in _OWN_ERRNOS:
        return Inconclusive(f"{what}: {errno.errorcode.get(code or 0, 'error')} on our side")
    words = {
        errno.ECONNREFUSED: "connection refused",
        errno.ECONNRESET: "connection reset",
        errno.EPIPE: "connection reset",
        errno.EHOSTUNREACH: "host unreachable",
        errno.ENETUNREACH: "network unreachable",
    }.get(code or 0, "")
    if not words:
        if isinstance(error, aiohttp.ClientSSLError):
            words = "TLS failed"
        elif isinstance(error, aiohttp.ServerDisconnectedError):
            words = "connection closed without an answer"
        else:
            words = type(error).__name__
    return Failed(f"{what}: {words}")


# --- the checks -------------------------------------------------------------------------------------------------------

CheckRunner = Callable[[EngineClient, RunCheck], Awaitable[str]]


async def check_health(client: EngineClient, request: RunCheck) -> str:
    """GET /health answers 200."""
    answer = await client.get(request.url, "/health", timeout_s=request.timeout_s)
    if answer.status != 200:
        raise Failed(f"GET /health answered {answer.status}")
    return "GET /health answered 200"


async def check_model(client: EngineClient, request: RunCheck) -> str:
    """GET /v1/models lists the configured model."""
    answer = await client.get(request.url, "/v1/models", timeout_s=request.timeout_s)
    if answer.status != 200:
        raise Failed(f"GET /v1/models answered {answer.status}")
    served = _models(answer.body)
    if request.model not in served:
        raise Failed(f"serves {', '.join(sorted(served)) or 'no model'}, not {request.model}")
    return f"serves {request.model}"


def _models(body: bytes) -> set[str]:
    try:
        listed = orjson.loads(body)["data"]
        return {str(model["id"]) for model in listed}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise Failed("GET /v1/models answered something else than a list of models") from None


CHECKS: Mapping[Check, CheckRunner] = {Check.HEALTH: check_health, Check.MODEL: check_model}


class Probes:
    """Runs what the core asks for; each answer is posted once, unless the check is cancelled."""

    def __init__(
        self,
        settings: ProbeSettings,
        *,
        clock: Clock,
        post: Callable[[CheckAnswered], None],
        checks: Mapping[Check, CheckRunner] = CHECKS,
    ) -> None:
        self._clock = clock
        self._post = post
        self._checks = checks
        self._client = EngineClient(settings)
        self._running: dict[asyncio.Task[None], str] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Checks under way."""
        return len(self._running)

    def start(self, request: RunCheck) -> None:
        """Starts a check; returns at once."""
        task = asyncio.get_running_loop().create_task(self._run(request, self._client))
        self._running[task] = request.engine
        task.add_done_callback(lambda done: self._running.pop(done, None))

    def configure(self, settings: ProbeSettings, engines: frozenset[str]) -> None:
        """Works by other settings from now on; ends the checks of engines that are not in `engines`."""
        for task, engine in self._running.items():
            if engine not in engines:
                task.cancel()
        if settings == self._client.settings:
            return
        old, self._client = self._client, EngineClient(settings)
        left = {task for task, engine in self._running.items() if engine in engines}
        task = asyncio.get_running_loop().create_task(_retire(old, left))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Ends every check without an answer, and drops every connection."""
        tasks = [*self._running, *self._closing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _run(self, request: RunCheck, client: EngineClient) -> None:
        began = self._clock.monotonic()
        verdict, detail = await self._verdict(request, client)
        result = CheckResult(verdict=verdict, detail=detail, latency_s=self._clock.monotonic() - began)
        self._post(
            CheckAnswered(
                engine=request.engine,
                incarnation=request.incarnation,
                number=request.number,
                check=request.check,
                result=result,
            )
        )

    async def _verdict(self, request: RunCheck, client: EngineClient) -> tuple[Verdict, str]:
        runner = self._checks.get(request.check)
        if runner is None:
            return Verdict.NOT_TESTED, f"this release cannot check {request.check}"
        try:
            return Verdict.PASS, await runner(client, request)
        except Failed as failed:
            return Verdict.FAIL, str(failed)
        except Inconclusive as nothing:
            return Verdict.INCONCLUSIVE, str(nothing)
        except Exception as error:  # a fault of ours says nothing about the engine, and must not end the checks
            log.error("check raised", engine=request.engine, check=request.check.value, exc_info=error)
            return Verdict.INCONCLUSIVE, f"{request.check}: {type(error).__name__} in the check itself"


async def _retire(client: EngineClient, users: set["asyncio.Task[None]"]) -> None:
    """Closes a client once nobody uses it any more."""
    try:
        if users:
            await asyncio.wait(users)
    finally:
        await client.close()
