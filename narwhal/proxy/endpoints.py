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
from aiohttp import web

from narwhal.clock import Clock
from narwhal.connectors.base import BadRequest, ClientRequest, Connector, Route
from narwhal.proxy.admission import Admission, RetryBudget, Ticket, Waiting
from narwhal.proxy.attempt import Fault
from narwhal.proxy.client import Client, ClientServer, Dates
from narwhal.proxy.errors import Refusal, Reply, reply
from narwhal.proxy.legs import WATCH_EVERY_S, Legs
from narwhal.proxy.measuring import Measuring
from narwhal.proxy.metrics import Metrics
from narwhal.proxy.relay import FleetLoad, Relay, Shared
from narwhal.proxy.seams import Feed, Inflight, Reporter
from narwhal.proxy.vigil import Vigil
from narwhal.proxy.witness import Witness
from narwhal.vocabulary import NotReady, Phase, RequestResult

ROUTES = {route.value: route for route in Route}
CLIENT_LEFT = "499"  # in metrics: the client went away before an answer

# What a request's end without an answer counts as; what is not here failed.
REJECTED = frozenset({Fault.SATURATED, Fault.ENGINE_BUSY, Fault.CLOSED, Fault.NO_ENGINES, Fault.QUEUE})

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


def _uncancel() -> None:
    """The running task goes on after all."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


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
        witness = Witness(reporter, self.metrics, clock)
        self.vigil = Vigil(lambda: feed.settings, lambda: feed.placement, self.legs.heard_at, witness)
        self.measuring = measuring if measuring is not None else Measuring(clock.monotonic())
        self.measuring.running = self.vigil.legs
        self._shared = Shared(
            feed=feed,
            inflight=self.inflight,
            legs=self.legs,
            connector=connector,
            witness=witness,
            vigil=self.vigil,
            measuring=self.measuring,
            metrics=self.metrics,
            clock=clock,
            draws=draws,
            budget=RetryBudget(feed.settings.serving.retry_budget),
            load=FleetLoad(feed, self.inflight),
        )
        self._made_ids = map("{}-{:x}".format, itertools.repeat(f"nw-{draws.getrandbits(64):016x}"), itertools.count(1))
        self._dates = Dates(clock)
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
        self._get_routes: dict[str, Callable[[], tuple[int, bytes, str]]] = {
            "/health": lambda: (200, b'{"status":"ok"}', "application/json"),
            "/ready": self._ready,
            "/v1/models": self._models,
        }
        if exposition is not None:
            self._get_routes["/metrics"] = lambda: (200, exposition(), _TEXT)
        self.handler = ClientServer(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            # A connection on which nothing happens is held no longer than a request would be.
            keepalive_timeout=feed.settings.serving.request_timeout_s,
        )

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
                if relay is None or not relay.cut():
                    client.task.cancel()
            await self._idle.wait()  # nothing that was cut waits for anything
        self.handler.pre_shutdown()
        for connection in self.handler.connections:
            connection.force_close()
        await self.handler.shutdown(max(grace_s, WATCH_EVERY_S))  # 0 would mean for ever
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

    # --- routes ---

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        client = Client(request, self._dates, next(self._made_ids))
        if self._draining:
            client.keep_alive = False
        path = request.raw_path
        route = ROUTES.get(path)
        if route is None:
            path = request.path
            route = ROUTES.get(path)
        if route is not None and request.method == "POST":
            await self._completion(request, client, route)
        else:
            self._other(request.method, path, client)
        return client.written()

    def _other(self, method: str, path: str, client: Client) -> None:
        """Everything that is not a completion."""
        bare = method == "HEAD"
        get = self._get_routes.get(path)
        if get is not None and method in ("GET", "HEAD"):
            client.send(*get(), bare=bare)
        elif get is not None or path in ROUTES:
            allowed = "GET, HEAD" if get is not None else "POST"
            told = reply(Refusal.NO_METHOD, message=f"Allowed here: {allowed}")
            client.refuse(told, bare=bare, extra=f"Allow: {allowed}\r\n")
        else:
            client.refuse(reply(Refusal.NO_ROUTE), bare=bare)

    def _ready(self) -> tuple[int, bytes, str]:
        reason = self.not_ready()
        body = {"status": "not ready" if reason else "ready", "reason": reason}
        return (503 if reason else 200), orjson.dumps(body), "application/json"

    def _models(self) -> tuple[int, bytes, str]:
        model = {"id": self.feed.settings.model, "object": "model", "created": self._created, "owned_by": "narwhal"}
        return 200, orjson.dumps({"object": "list", "data": [model]}), "application/json"

    # --- completions ---

    async def _completion(self, request: web.BaseRequest, client: Client, route: Route) -> None:
        """One completion, from its body to its counters."""
        arrived_at = self._clock.monotonic()
        due = arrived_at + self.feed.settings.serving.request_timeout_s
        self._running[client] = None
        self._idle.clear()
        result, retries = RequestResult.REJECTED, 0
        try:
            asked = self._connector.parse(route, await self._body(request, client, due))
            self._admit(asked)
            await self._seat(due)
            try:
                relay = self._running[client] = Relay(self._shared, client, asked, due, arrived_at)
                await relay.run()
                retries, result = relay.retries, self._judge(relay)
            finally:
                self._unseat()
        except Refused as refusal:
            client.refuse(refusal.told)
        except BadRequest as error:
            client.refuse(reply(Refusal.BAD_REQUEST, message=str(error), param=error.param))
        except asyncio.CancelledError:
            result = RequestResult.CANCELLED
            if not self._cutting or client.transport is None:
                raise
            _uncancel()
            if client.status:  # all was said, but the client did not read it
                client.transport.abort()
            else:
                result = RequestResult.REJECTED
                client.keep_alive = False
                client.refuse(reply(Fault.CLOSED, code=NotReady.DRAINING.value))
        except Exception:
            log.exception("request_crashed", request_id=client.request_id)
            result = RequestResult.FAILED
            self._crashed(client)
        finally:
            del self._running[client]
            if not self._running:
                self._idle.set()
            code = str(client.status) if client.status else CLIENT_LEFT
            self.metrics.request(route, code, self._clock.monotonic() - arrived_at)
            self._reporter.request(result, retries)

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

    async def _body(self, request: web.BaseRequest, client: Client, due: float) -> bytes:
        """The whole body, never more than the limit in memory."""
        limit = self.feed.settings.serving.max_request_bytes
        content = request.content
        if content.is_eof():  # it came with the head: nothing to wait for
            body = content.read_nowait() if content.total_bytes else b""
            if len(body) > limit:
                raise self._too_large(client, limit)
            return body
        if (request.content_length or 0) > limit:
            raise self._too_large(client, limit)
        if request.headers.get("Expect", "").lower() == "100-continue" and client.http11 and client.transport:
            client.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts, size = [], 0
        try:
            async with asyncio.timeout(due - self._clock.monotonic()):
                while not content.at_eof():
                    part = await content.readany()
                    size += len(part)
                    if size > limit:
                        raise self._too_large(client, limit)
                    parts.append(part)
        except TimeoutError:
            client.keep_alive = False
            raise refused(Refusal.BODY_LATE) from None
        except (web.RequestPayloadError, web.HTTPException):
            client.keep_alive = False
            raise refused(Refusal.BAD_REQUEST, message="The request's body is not well-formed HTTP") from None
        return b"".join(parts)

    @staticmethod
    def _too_large(client: Client, limit: int) -> Refused:
        client.keep_alive = False  # the rest of the body is still to come
        return refused(Refusal.TOO_LARGE, message=f"The request's body is larger than {limit} bytes")

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

    async def _seat(self, due: float) -> None:
        """Take a seat, or wait for one. Raises Refused when there is none in time."""
        serving = self.feed.settings.serving
        if self.admission.enter(serving.max_connections):
            return
        wait_until = self._clock.monotonic() + serving.queue_timeout_s
        ticket = self.admission.queue(serving.queue_capacity, min(wait_until, due))
        if ticket is None:
            raise refused(Fault.SATURATED)
        waiter = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        self.legs.watch()
        try:
            await waiter
        except asyncio.CancelledError:
            if ticket.state is Waiting.SEATED:
                self._unseat()
            self.admission.forget(ticket)
            raise
        finally:
            del self._waiters[ticket]
        if ticket.state is Waiting.LATE:
            raise refused(Fault.QUEUE if wait_until <= due else Fault.DEADLINE)
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
        """Part of the watchdog's round: legs that give nothing, and who has waited too long, or for an admission that
        has closed."""
        self.vigil.look(now)
        if self.admission.waiting:
            if self.not_ready():
                self._send_away()
            else:
                self._wake(self.admission.expire(now))
        return self.admission.waiting > 0
