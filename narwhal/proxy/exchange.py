"""What goes on between a leg and its engine: a connection, a request out, its result, and the watch over them.

Decides: which connection carries a request, how long the engine gets, and what is sent once more (spec V9). It cannot
see: what a result means for the client, the legs before and after, or the bytes of a stream.
"""

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple, Protocol

from narwhal.config import ProxySettings
from narwhal.connectors.base import Route
from narwhal.placement import EngineEntry
from narwhal.proxy.attempt import LegEnd, StartLeg
from narwhal.proxy.client import Client
from narwhal.proxy.connection import EngineConnection, Result
from narwhal.proxy.measuring import Flow
from narwhal.proxy.outcome import LegKind
from narwhal.proxy.shared import Shared
from narwhal.proxy.stream import StreamRelay
from narwhal.proxy.vigil import Watched
from narwhal.proxy.witness import Leg
from narwhal.vocabulary import Phase

# The end of the request id that engines get: the phase, but for requests that are not the leg itself.
PHASE_NAMES = {phase: phase.value.encode() for phase in Phase}
NAMES = {LegKind.COUNT: b"count", LegKind.LOAD: b"load"}


class Ask(NamedTuple):
    """A request of a leg."""

    leg: Leg
    step: StartLeg
    body: bytes
    producer: EngineEntry | None  # of the KV that a decode leg reads
    handoff_due: float  # when what it reads is too old to be used
    first_pull: bool  # it is the first transfer of the two that this process sees


class Sender(Protocol):
    """Whose requests these are."""

    def sending(self, leg: Leg, connection: EngineConnection, now: float) -> StreamRelay | LegEnd | None:
        """The connection is there, and the request is about to be written. Returns what takes the stream that answers
        it, if one does; or how the leg ends when it must not be sent any more."""


class Exchange:
    """One client's request and the engine that works for it now."""

    __slots__ = ("_client", "_connection", "_flow", "_result", "_route", "_settings", "_shared", "_watched")

    def __init__(self, shared: Shared, client: Client, route: Route, settings: ProxySettings) -> None:
        self._shared = shared
        self._client = client
        self._route = route
        self._settings = settings
        self._connection: EngineConnection | None = None
        self._result: asyncio.Future[Result] | None = None  # of what runs, or ran, on it for this request
        self._watched: Watched | None = None
        self._flow: Flow | None = None

    # --- asking ---

    async def ask(self, asked: Ask, sender: Sender) -> Result:
        """Ask the engine of `asked`; everything that can go wrong is a result. When cancelled, `abort` ends it."""
        legs, url = self._shared.legs, asked.leg.entry.url
        connection = None if asked.step.fresh else legs.reuse(url)
        result = await (self._fresh(asked, sender) if connection is None else self._send(connection, asked, sender))
        self._unwatch()  # the connection may be another request's before ours goes on
        if isinstance(result, LegEnd) and result.idle_closed:
            legs.drop_idle(url)
            if asked.leg.phase is Phase.PREFILL:
                result = await self._fresh(asked, sender)
                self._unwatch()
        return result

    async def _fresh(self, asked: Ask, sender: Sender) -> Result:
        """The same on a new connection."""
        connection = await self._shared.legs.connect(asked.leg.entry.url, self._client.due)
        if isinstance(connection, LegEnd):
            self._shared.sidestep.failed(asked.leg.entry, connection)
            return connection
        return await self._send(connection, asked, sender)

    def _send(self, connection: EngineConnection, asked: Ask, sender: Sender) -> Awaitable[Result]:
        """Write the request; the result comes later."""
        shared, client, leg = self._shared, self._client, asked.leg
        now = shared.clock.monotonic()
        stream = sender.sending(leg, connection, now)
        if isinstance(stream, LegEnd):
            connection.release()  # unused
            return connection.never(stream)
        head = b"%b%b-%d-%b\r\n%bContent-Length: %d\r\n\r\n" % (
            shared.legs.head(
                leg.entry.url,
                shared.connector.count_path if leg.kind is LegKind.COUNT else self._route,
                self._settings.engine.api_key,
            ),
            client.id_line,
            asked.step.attempt,
            NAMES.get(leg.kind) or PHASE_NAMES[leg.phase],
            client.trace_line,
            len(asked.body),
        )
        self._connection = connection
        self._watched = Watched(
            leg, connection, asked.producer, client.request_id, asked.step.attempt, asked.handoff_due
        )
        shared.vigil.begin(self._watched)
        limit_s, quiet_s = self._limits(leg.kind, asked.first_pull)
        self._result = connection.start(
            head, asked.body, leg.kind, due=now + limit_s, quiet_s=quiet_s, deadline=client.due, stream=stream
        )
        return self._result

    def _limits(self, kind: LegKind, first_pull: bool) -> tuple[float, float]:
        """(seconds that the engine gets, seconds that it gets anew after every byte or 0)."""
        engine = self._settings.engine
        if kind is LegKind.COUNT:
            return engine.tokenize_timeout_s, 0.0
        if kind is LegKind.PREFILL:
            return self._settings.serving.prefill_timeout_s, 0.0
        if kind is LegKind.ANSWER:
            return engine.decode_read_timeout_s, engine.decode_read_timeout_s
        return (engine.kv_first_pull_timeout_s if first_pull else engine.first_token_timeout_s), 0.0

    # --- while it runs ---

    @property
    def _running(self) -> EngineConnection | None:
        """The connection, for as long as it works for this request. Once it has its result it may serve another one
        before this task is awake."""
        connection = self._connection
        return connection if connection is not None and connection.runs(self._result) else None

    def first_token(self, now: float, stream: StreamRelay | None) -> None:
        """From now on silence is what ends the leg. `stream`: what is measured as it flows."""
        quiet_s = self._settings.engine.decode_read_timeout_s
        if self._connection is not None:
            self._connection.streaming(now + quiet_s, quiet_s)
        if stream is not None and self._watched is not None:
            self._flow = self._shared.measuring.first_token(self._watched.leg, stream, now)

    def pause(self) -> None:
        """Read no more from the engine for now: the client is slow."""
        if (connection := self._running) is not None:
            connection.pause()
        if self._flow is not None:
            self._flow.slow = True

    def resume(self) -> None:
        """Go on reading."""
        if (connection := self._running) is not None:
            connection.resume()

    def abort(self) -> None:
        """End it at once; the engine sees it now (spec V7)."""
        if (connection := self._running) is not None:
            connection.abort()

    def cut(self, end: LegEnd) -> bool:
        """End it at once, with this result. False when nothing runs."""
        if (connection := self._running) is None:
            return False
        connection.settle(end, abort=True)
        return True

    def over(self) -> None:
        """The leg is over, however it ended."""
        self._connection = self._result = None
        self._unwatch()
        if self._flow is not None:
            self._shared.measuring.ended(self._flow, self._shared.clock.monotonic())
            self._flow = None

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._shared.vigil.end(self._watched)
            self._watched = None
