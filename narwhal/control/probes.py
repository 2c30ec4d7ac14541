"""Checks and probes of engines: the core asks, each is a coroutine from a table, each answer goes back as an event.

Decides: the outcome of one health probe. LOCAL is whatever says nothing about the engine: no free control connection,
no descriptor, no resolver. What answers mean is the core's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from narwhal.clock import Clock
from narwhal.control.checks import capture_identity, read_identity, run_check
from narwhal.control.core.effects import CaptureIdentity, ProbeHealth, ProbeInference, RunCheck, RunTransfer
from narwhal.control.core.events import Answer, HealthAnswered
from narwhal.control.engine_client import EngineClient, NoAnswer, ProbeSettings
from narwhal.control.inference import probe_inference, run_transfer
from narwhal.vocabulary import Outcome

Request = RunCheck | ProbeHealth | ProbeInference | RunTransfer | CaptureIdentity

log = structlog.get_logger()


# --- health probes ----------------------------------------------------------------------------------------------------


async def probe_health(client: EngineClient, request: ProbeHealth, clock: Clock) -> HealthAnswered:
    """One health probe, and the process identity when it is wanted and the engine is healthy."""
    began = clock.monotonic()
    outcome: Outcome | None
    status, identity = 0, None
    try:
        answer = await client.get(request.url, "/health", timeout_s=request.timeout_s)
        status, outcome = answer.status, _outcome(answer.status)
        detail = f"GET /health answered {status}"
    except NoAnswer as nothing:
        outcome, detail = nothing.outcome, str(nothing)
    latency_s = clock.monotonic() - began
    if outcome is None and request.identity:
        identity = await read_identity(client, request.url, timeout_s=request.timeout_s)
    return HealthAnswered(
        engine=request.engine,
        incarnation=request.incarnation,
        number=request.number,
        outcome=outcome,
        status=status,
        detail=detail,
        latency_s=latency_s,
        identity=identity,
    )


def _outcome(status: int) -> Outcome | None:
    named = {200: None, 408: Outcome.HTTP_408, 429: Outcome.HTTP_429}
    if status in named:
        return named[status]
    return Outcome.HTTP_5XX if status >= 500 else Outcome.CLIENT_ERROR


# --- running them -----------------------------------------------------------------------------------------------------

Runner = Callable[[EngineClient, Any, Clock], Awaitable[Answer]]
RUNNERS: Mapping[type[Request], Runner] = {
    RunCheck: run_check,
    ProbeHealth: probe_health,
    ProbeInference: probe_inference,
    RunTransfer: run_transfer,
    CaptureIdentity: capture_identity,
}


class Probes:
    """Runs what the core asks for; each answer is posted once, unless the probe is cancelled."""

    def __init__(
        self,
        settings: ProbeSettings,
        *,
        clock: Clock,
        post: Callable[[Answer], None],
        runners: Mapping[type[Request], Runner] = RUNNERS,
    ) -> None:
        self._clock = clock
        self._post = post
        self._runners = runners
        self._client = EngineClient(settings)
        self._running: dict[asyncio.Task[None], str] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Probes under way."""
        return len(self._running)

    def start(self, request: Request) -> None:
        """Starts a check or a probe; returns at once."""
        task = asyncio.get_running_loop().create_task(self._run(request, self._client))
        self._running[task] = request.engine
        task.add_done_callback(lambda done: self._running.pop(done, None))

    def configure(self, settings: ProbeSettings, engines: frozenset[str]) -> None:
        """Works by other settings from now on; ends the probes of engines that are not in `engines`."""
        for task, engine in self._running.items():
            if engine not in engines:
                task.cancel()
        if settings == self._client.settings:
            return
        old, self._client = self._client, EngineClient(settings)
        task = asyncio.get_running_loop().create_task(_retire(old, set(self._running)))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Ends every probe without an answer, and drops every connection."""
        tasks = [*self._running, *self._closing]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._client.close()

    async def _run(self, request: Request, client: EngineClient) -> None:
        try:
            answer = await self._runners[type(request)](client, request, self._clock)
        except Exception as error:
            # A fault of ours. The core gives up on an answer that never comes, and takes it for inconclusive.
            log.error("probe raised", engine=request.engine, probe=type(request).__name__, exc_info=error)
            return
        self._post(answer)


async def _retire(client: EngineClient, users: set["asyncio.Task[None]"]) -> None:
    """Closes a client once nobody uses it any more."""
    try:
        if users:
            await asyncio.wait(users)
    finally:
        await client.close()
