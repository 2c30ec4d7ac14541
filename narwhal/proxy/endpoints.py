"""The proxy's HTTP API: the OpenAI routes, /health, /ready, /metrics; admission; and the end of a worker.

`DataPath` is what `app.py` builds: `handler` is the protocol factory for the listening socket.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import orjson
import structlog

from narwhal.clock import Clock
from narwhal.config import ServingConfig
from narwhal.connectors.base import BadRequest, ClientRequest, Connector, Route
from narwhal.proxy.admission import Admission, RetryBudget, Ticket, Waiting
from narwhal.proxy.attempt import Fault
from narwhal.proxy.choosing import Chooser
from narwhal.proxy.client import Client, Connection, Letterhead
from narwhal.proxy.errors import Refusal, Reply, reply
from narwhal.proxy.legs import WATCH_EVERY_S, Legs
from narwhal.proxy.measuring import Measuring
from narwhal.proxy.metrics import Metrics
from narwhal.proxy.relay import Relay
from narwhal.proxy.seams import Feed, Inflight, Reporter
from narwhal.proxy.server import ClientServer
from narwhal.proxy.shared import Shared
from narwhal.proxy.sidestep import Sidestep
from narwhal.proxy.vigil import Vigil
from narwhal.proxy.witness import Witness
from narwhal.vocabulary import NotReady, Phase, RequestResult

ROUTES = {route.value.encode(): route for route in Route}
CLIENT_LEFT = "499"  # in metrics: the client went away before an answer

# What a request's end without an answer counts as; what is not here failed.
REJECTED = frozenset({Fault.SATURATED, Fault.ENGINE_BUSY, Fault.CLOSED, Fault.NO_ENGINES, Fault.QUEUE})

ALIVE = 200, b'{"status":"ok"}', "application/json"  # what /health answers
_TEXT = "text/plain; version=0.0.4; charset=utf-8"

log = structlog.get_logger(__name__)


class Refused(Exception):
    """A request that ends before it is one that engines could serve."""

    def __init__(self, told: Reply) -> None:
        super().__init__(told.status)
        self.told = told


def refused(condition: Refusal | Fault, **words: Any) -> Refused:
    """The exception for an error of the table."""
    return Refused(reply(condition, **words))


def path_of(target: bytes) -> bytes:
    """The path of a request's target: no query, no scheme and host (absolute form)."""
    if target.startswith((b"http://", b"https://")):
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
    return target.partition(b"?")[0]


def unready(reason: str) -> tuple[int, bytes, str]:
    """What /ready answers; an empty reason is ready."""
    body = {"status": "not ready" if reason else "ready", "reason": reason}
    return (503 if reason else 200), orjson.dumps(body), "application/json"


class DataPath:
    """One worker's data path. Build it on the running loop; `start` it, serve by `handler`, `stop` it."""

    def __init__(
        self,
        feed: Feed,
        reporter: Reporter,
        clock: Clock,
        connector: Connector,
        *,
        inflight: Inflight | None = None,
        metrics: Metrics | None = None,
        measuring: Measuring | None = None,
        draws: random.Random | None = None,
        exposition: Callable[[], bytes] | None = None,
    ) -> None:
        """`exposition`: what /metrics answers; without it there is no such route."""
        self.feed = feed
        self.inflight = inflight if inflight is not None else Inflight()
        self.metrics = metrics if metrics is not None else Metrics()
        self.admission = Admission()
        self.legs = Legs(lambda: feed.settings, clock)
        self._reporter = reporter
        self._clock = clock
        self._connector = connector
        self._exposition = exposition
        draws = draws if draws is not None else random.Random()
        witness = Witness(
            reporter,
            self.metrics,
            clock,
            heard_at=self.legs.heard_at,
            stall_s=lambda: feed.settings.recovery.stall_s,
        )
        self.vigil = Vigil(lambda: feed.settings, lambda: feed.placement, self.legs.heard_at, witness)
        self.measuring = measuring if measuring is not None else Measuring(clock.monotonic())
        self.measuring.running = self.vigil.legs
        self._sidestep = Sidestep(feed, self.legs, clock)
        self._shared = Shared(
            feed=feed,
            inflight=self.inflight,
            legs=self.legs,
            connector=connector,
            witness=witness,
            vigil=self.vigil,
            measuring=self.measuring,
            sidestep=self._sidestep,
            metrics=self.metrics,
            clock=clock,
            budget=RetryBudget(feed.settings.serving.retry_budget),
            chooser=Chooser(feed, self.inflight, clock, draws, vigil=self.vigil, sidestep=self._sidestep),
        )
        made_ids = map("{}-{:x}".format, itertools.repeat(f"nw-{draws.getrandbits(64):016x}"), itertools.count(1))
        self._letterhead = Letterhead(clock, made_ids)
        self._created = int(clock.wall())
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._running: dict[Client, Relay | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._cutting = False
        self.metrics.gauges["inflight"] = lambda: self.admission.taken
        self.metrics.gauges["queue_depth"] = lambda: self.admission.waiting
        self.legs.on_tick = self._tick
        self._get_routes: dict[bytes, Callable[[], tuple[int, bytes, str]]] = {
            b"/health": lambda: ALIVE,
            b"/ready": lambda: unready(self.not_ready()),
            b"/v1/models": self._models,
        }
        if exposition is not None:
            self._get_routes[b"/metrics"] = lambda: (200, exposition(), _TEXT)
        self.handler = ClientServer(self)

    # --- life ---

    def start(self) -> None:
        """Ready to be listened for. Nothing runs until the first request."""

    async def stop(self, grace_s: float) -> None:
        """/ready answers 503 at once and nothing new is admitted; what runs gets `grace_s`, then is cut and told so."""
        self._draining = True
        self._send_away()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self._cutting = True
            for client, relay in list(self._running.items()):
                if client.task is None:
                    client.connection.end_reading()
                elif relay is None or not relay.cut():
                    client.cancel()
            await self._idle.wait()  # nothing that was cut waits for anything
        await self.handler.close(max(grace_s, WATCH_EVERY_S))
        self._sidestep.close()
        self.legs.close()

    def not_ready(self) -> str:
        """Why /ready is 503 and nothing is admitted (spec M10); empty when ready."""
        if self._draining:
            return NotReady.DRAINING.value
        reason = self.feed.not_ready()
        if reason:
            return reason
        placement = self.feed.placement
        if placement is None:
            return NotReady.NO_PLACEMENT.value
        now = self._clock.monotonic()
        if not placement.candidates(Phase.PREFILL, now=now) or not placement.candidates(Phase.DECODE, now=now):
            return NotReady.NO_ENGINES.value
        return ""

    # --- what client connections ask of a service ---

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def bounds(self) -> ServingConfig:
        """What clients are held to now."""
        return self.feed.settings.serving

    def make(self, connection: Connection, method: bytes, target: bytes) -> Client:
        """A request's head has come."""
        now = self._clock.monotonic()
        due = now + self.feed.settings.serving.request_timeout_s
        return Client(connection, self._letterhead, method, target, arrived_at=now, due=due)

    def begun(self, client: Client) -> None:
        """A request's body is still to come."""
        if client not in self._running and self._route(client) is not None:
            self._running[client] = None
            self._idle.clear()

    def wants_body(self, client: Client) -> bool:
        """Whether the answer depends on a body that is still to come."""
        return self._route(client) is not None

    def gone(self, client: Client) -> None:
        """The client went away before its request could be served."""
        route = self._route(client)
        if route is not None:
            self._ended(client, route, RequestResult.CANCELLED, 0)

    def serve(self, client: Client) -> None:
        """A request has come whole, or with its `refusal`."""
        if self._draining:
            client.keep_alive = False
        route = self._route(client)
        if client.refusal is not None:
            self._refused(client, self._told(client.refusal))
        elif route is not None:
            self._completion(client, route)
        else:
            self._other(client)
            client.connection.finished(client)

    # --- routes ---

    def _route(self, client: Client) -> Route | None:
        """The completion that is asked for, if one is."""
        if client.method != b"POST":
            return None
        return ROUTES.get(client.target) or ROUTES.get(path_of(client.target))

    def _other(self, client: Client) -> None:
        """Everything that is not a completion."""
        path, method = path_of(client.target), client.method
        bare = method == b"HEAD"
        get = self._get_routes.get(path)
        allowed = "GET, HEAD, OPTIONS" if get is not None else "POST, OPTIONS"
        if get is not None and method in (b"GET", b"HEAD"):
            client.send(*get(), bare=bare)
        elif get is None and path not in ROUTES and path != b"*":
            client.refuse(reply(Refusal.NO_ROUTE), bare=bare)
        elif method == b"OPTIONS":
            client.allow("GET, HEAD, POST, OPTIONS" if path == b"*" else allowed)
        else:
            told = reply(Refusal.NO_METHOD, message=f"Allowed here: {allowed}")
            client.refuse(told, bare=bare, extra=f"Allow: {allowed}\r\n")

    def _models(self) -> tuple[int, bytes, str]:
        model = {"id": self.feed.settings.model, "object": "model", "created": self._created, "owned_by": "narwhal"}
        return 200, orjson.dumps({"object": "list", "data": [model]}), "application/json"

    def _told(self, refusal: Refusal) -> Reply:
        if self._cutting:
            return reply(Fault.CLOSED, code=NotReady.DRAINING.value)
        if refusal is Refusal.TOO_LARGE:
            limit = self.feed.settings.serving.max_request_bytes
            return reply(refusal, message=f"The request's body is larger than {limit} bytes")
        return reply(refusal)

    # --- completions ---

    def _completion(self, client: Client, route: Route) -> None:
        """One completion. What needs to wait for nothing is done at once."""
        body = bytes(client.body)
        client.body = b""
        try:
            asked = self._connector.parse(route, body)
            self._admit(asked)
            ticket = self._enter(client.due)
        except Refused as refusal:
            self._refused(client, refusal.told)
        except BadRequest as error:
            self._refused(client, reply(Refusal.BAD_REQUEST, message=str(error), param=error.param))
        else:
            self._running[client] = None
            self._idle.clear()
            client.task = asyncio.get_running_loop().create_task(self._serve(client, route, asked, ticket))

    def _refused(self, client: Client, told: Reply) -> None:
        """Answer a request that got no seat."""
        client.refuse(told)
        route = self._route(client)
        if route is not None:
            self._ended(client, route, RequestResult.REJECTED, 0)
        client.connection.finished(client)

    async def _serve(self, client: Client, route: Route, asked: ClientRequest, ticket: Ticket | None) -> None:
        """A completion that has its seat, or waits for one with `ticket`; to its counters."""
        result, retries = RequestResult.REJECTED, 0
        client.started = True
        try:
            if ticket is not None:
                await self._seat(ticket, client.due)
            try:
                if client.transport is None or self._cutting:
                    raise asyncio.CancelledError
                relay = self._running[client] = Relay(self._shared, client, asked)
                await relay.run()
                retries, result = relay.retries, self._judge(relay)
            finally:
                self._unseat()
        except Refused as refusal:
            client.refuse(refusal.told)
        except BadRequest as error:  # seen only when it was written for an engine
            client.refuse(reply(Refusal.BAD_REQUEST, message=str(error), param=error.param))
        except asyncio.CancelledError:  # by the client's connection when it is lost, or at the end of the grace
            result = self._stopped(client)
        except Exception:
            log.exception("request_crashed", request_id=client.request_id)
            result = RequestResult.FAILED
            self._crashed(client)
        finally:
            self._ended(client, route, result, retries)
            client.connection.finished(client)

    def _ended(self, client: Client, route: Route, result: RequestResult, retries: int) -> None:
        """Count a request."""
        self._running.pop(client, None)
        if not self._running:
            self._idle.set()
        code = str(client.status) if client.status else CLIENT_LEFT
        self.metrics.request(route, code, self._clock.monotonic() - client.arrived_at)
        self._reporter.request(result, retries)

    def _stopped(self, client: Client) -> RequestResult:
        """A request was cancelled."""
        transport = client.transport
        if transport is None:
            return RequestResult.CANCELLED
        if client.status:  # all was said, but the client did not read it
            transport.abort()
            return RequestResult.CANCELLED
        client.keep_alive = False
        client.refuse(reply(Fault.CLOSED, code=NotReady.DRAINING.value))
        return RequestResult.REJECTED

    def _judge(self, relay: Relay) -> RequestResult:
        """How an admitted request counts."""
        if relay.fault is None:
            if relay.passed_error:
                return RequestResult.REJECTED
            serving = self.feed.settings.serving
            self._shared.budget.replenish(serving.retry_replenish, serving.retry_budget)
            return RequestResult.SERVED
        self.metrics.retries_denied = self._shared.budget.denied
        return RequestResult.REJECTED if relay.fault in REJECTED and not relay.stream_failed else RequestResult.FAILED

    def _crashed(self, client: Client) -> None:
        """A fault of our own: an error if nothing was written yet, else the connection ends without a proper end."""
        if client.status == 0:
            client.keep_alive = False
            client.refuse(reply(Refusal.INTERNAL))
        elif client.transport is not None:
            client.transport.abort()

    def _admit(self, asked: ClientRequest) -> None:
        """Refuse what no engine should see. Raises Refused."""
        if asked.model != self.feed.settings.model:
            raise refused(
                Refusal.MODEL_NOT_FOUND, message=f"The model {asked.model!r} does not exist here", param="model"
            )
        reason = self.not_ready()
        if reason:
            raise refused(Fault.CLOSED, code=reason)

    # --- seats ---

    def _enter(self, due: float) -> Ticket | None:
        """Take a seat, or a place before the seats. Raises Refused when there is neither."""
        serving = self.feed.settings.serving
        if self.admission.enter(serving.max_connections):
            return None
        ticket = self.admission.queue(
            serving.queue_capacity, min(self._clock.monotonic() + serving.queue_timeout_s, due)
        )
        if ticket is None:
            raise refused(Fault.SATURATED)
        self._waiters[ticket] = asyncio.get_running_loop().create_future()
        self.legs.watch()
        return ticket

    async def _seat(self, ticket: Ticket, due: float) -> None:
        """Wait for the seat. Raises Refused when there is none in time."""
        try:
            await self._waiters[ticket]
        except asyncio.CancelledError:
            if ticket.state is Waiting.SEATED:
                self._unseat()
            self.admission.forget(ticket)
            raise
        finally:
            del self._waiters[ticket]
        if ticket.state is Waiting.LATE:
            raise refused(Fault.QUEUE if ticket.due < due else Fault.DEADLINE)
        if ticket.state is Waiting.GONE:
            raise refused(Fault.CLOSED, code=self.not_ready() or NotReady.DRAINING.value)

    def _unseat(self) -> None:
        self._wake(self.admission.leave(self.feed.settings.serving.max_connections))

    def _wake(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            waiter = self._waiters[ticket]
            if not waiter.done():
                waiter.set_result(None)

    def _send_away(self) -> None:
        self._wake(self.admission.close())

    def _tick(self, now: float) -> bool:
        """Part of the watchdog's round: legs that give nothing, engines that took no connection, and who has waited too
        long, or for an admission that has closed."""
        self.vigil.look(now)
        avoiding = self._sidestep.look(now)
        if self.admission.waiting:
            if self.not_ready():
                self._send_away()
            else:
                self._wake(self.admission.expire(now))
        return avoiding or self.admission.waiting > 0
