"""The gRPC service that operators call, and the fleet's view as its messages. No decision."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from narwhal._pb import fleet_pb2
from narwhal.clock import Clock
from narwhal.control.core.commands import probed
from narwhal.control.core.events import (
    Command,
    CommandRefusedError,
    Effect,
    EjectCommand,
    ProbeCommand,
    Record,
    Refusal,
)
from narwhal.control.core.proxies import lag
from narwhal.control.core.view import EngineView, EvidenceView, FleetView, MonitorView, ProxyView
from narwhal.control.leader import Leader
from narwhal.control.loop import ControlLoop
from narwhal.control.observe import Entry, Observer
from narwhal.control.publisher import OBSERVER_AGE_S, Publisher
from narwhal.control.service import Context, refuse, refuse_standby
from narwhal.control.writer import NotLeading
from narwhal.vocabulary import Phase
from narwhal.wire import phase_to_wire, proxy_to_wire, residency_to_wire

M = TypeVar("M", bound=Message)

MOST_FOLLOWERS = 500


class FleetService:
    """`narwhal.v1.FleetService`."""

    def __init__(self, leader: Leader, publisher: Publisher, observer: Observer, clock: Clock) -> None:
        self._leader = leader
        self._publisher = publisher
        self._observer = observer
        self._clock = clock
        self._followers = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """For `Server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            "narwhal.v1.FleetService",
            {
                "GetStatus": self._unary(fleet_pb2.GetStatusRequest, self.get_status),
                "ListProxies": self._unary(fleet_pb2.ListProxiesRequest, self.list_proxies),
                "GetHandoff": self._unary(fleet_pb2.GetHandoffRequest, self.get_handoff),
                "ExplainEngine": self._unary(fleet_pb2.ExplainEngineRequest, self.explain_engine),
                "EjectEngine": self._unary(fleet_pb2.EjectEngineRequest, self.eject_engine),
                "ProbeEngine": self._unary(fleet_pb2.ProbeEngineRequest, self.probe_engine),
                "WatchEvents": grpc.unary_stream_rpc_method_handler(self.watch_events, response_serializer=_serialize),
            },
        )

    def _unary(self, request: type[M], call: Callable[[ControlLoop, M, Context], Awaitable[Message]]) -> Any:
        """A call that only the active answers."""

        async def handle(data: bytes, context: Context) -> Message:
            message = await _parsed(request, data, context)
            loop = self._leader.loop
            if loop is None:
                await refuse_standby(context, self._leader)
            try:
                return await call(loop, message, context)
            except CommandRefusedError as error:
                # The reason tells it from a process that does not lead.
                await refuse(context, _CODES[error.refusal], str(error), reason=error.refusal.name)
            except NotLeading as error:
                words = f"leads no more ({error}), and whether what was asked was done is not known"
                await context.abort(grpc.StatusCode.UNAVAILABLE, words)
            raise AssertionError("abort returned")

        return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)

    async def get_status(
        self, loop: ControlLoop, _request: fleet_pb2.GetStatusRequest, _context: Context
    ) -> fleet_pb2.FleetStatus:
        """Everything that `narwhalctl status` and `engines` show."""
        readiness, placement = self._leader.readiness(), self._publisher.placement
        status = status_message(loop.view())
        status.ready = not readiness.reason
        status.reason = readiness.reason
        status.control_ready = readiness.control_ready
        status.epoch = readiness.epoch
        status.holder = readiness.holder
        status.version = placement.version if placement is not None else 0
        return status

    async def list_proxies(
        self, loop: ControlLoop, _request: fleet_pb2.ListProxiesRequest, _context: Context
    ) -> fleet_pb2.ListProxiesResponse:
        """The proxies that are known, connected or lost."""
        placement = self._publisher.placement
        published = placement.order if placement is not None else (0, 0)
        return fleet_pb2.ListProxiesResponse(proxies=[_proxy(p, published) for p in loop.view().proxies])

    async def get_handoff(
        self, loop: ControlLoop, _request: fleet_pb2.GetHandoffRequest, context: Context
    ) -> fleet_pb2.StateHandoff:
        """The state handoff as it is stored."""
        document = loop.writer.document
        if document is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no state handoff has been stored yet")
        return fleet_pb2.StateHandoff(document=document, epoch=loop.lease.epoch)

    # --- commands: translate, ask, await ------------------------------------------------------------------------------

    async def explain_engine(
        self, loop: ControlLoop, request: fleet_pb2.ExplainEngineRequest, _context: Context
    ) -> fleet_pb2.Explanation:
        """Why one engine is, or is not, eligible."""
        explanation = loop.explain(request.engine_id)
        return fleet_pb2.Explanation(
            engine=_engine(explanation.engine),
            lines=explanation.lines,
            history=[fleet_pb2.HistoryEntry(age_s=h.age_s, message=h.message) for h in explanation.history],
        )

    async def eject_engine(
        self, loop: ControlLoop, request: fleet_pb2.EjectEngineRequest, _context: Context
    ) -> fleet_pb2.EjectEngineResponse:
        """Takes an engine out."""
        command = EjectCommand(engine=request.engine_id, reason=request.reason)
        return fleet_pb2.EjectEngineResponse(told=_words(await self._command(loop, command, request.dry_run)))

    async def probe_engine(
        self, loop: ControlLoop, request: fleet_pb2.ProbeEngineRequest, context: Context
    ) -> fleet_pb2.ProbeEngineResponse:
        """Probes an engine, and answers when the probe has ended."""
        before = self._observer.sequence
        effects = await self._command(loop, ProbeCommand(engine=request.engine_id), request.dry_run)
        if request.dry_run:
            return fleet_pb2.ProbeEngineResponse(told=_words(effects))
        until, told, verdict = self._clock.monotonic() + OBSERVER_AGE_S, [], ""
        async for entry in self._observer.follow(before, until=until):
            if loop.over:
                raise NotLeading(loop.over)
            if entry.record.engine == request.engine_id:
                told.append(entry.record.message)
                verdict = verdict or probed(entry.record) or ""
            if verdict and entry.sequence == self._observer.sequence:
                # What follows from the verdict was told with it.
                return fleet_pb2.ProbeEngineResponse(verdict=verdict, told=told)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the probe has not ended yet")
        raise AssertionError("abort returned")

    async def _command(self, loop: ControlLoop, command: Command, dry_run: bool) -> tuple[Effect, ...]:
        return loop.rehearse(command) if dry_run else await loop.ask(command)

    # --- events -------------------------------------------------------------------------------------------------------

    async def watch_events(self, data: bytes, context: Context) -> AsyncIterator[fleet_pb2.Event]:
        """Events of this process."""
        request = await _parsed(fleet_pb2.WatchEventsRequest, data, context)
        if self._leader.loop is None:
            await refuse_standby(context, self._leader)
        if not request.follow:
            for entry in self._observer.after(request.after):
                yield _event(entry)
            return
        if self._followers >= MOST_FOLLOWERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_FOLLOWERS} others follow already")
        self._followers += 1
        until = self._clock.monotonic() + OBSERVER_AGE_S
        try:
            async for entry in self._observer.follow(request.after, until=until):
                yield _event(entry)
        finally:
            self._followers -= 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "ask again after the last event received")


_CODES = {
    Refusal.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Refusal.PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
}


def _words(effects: tuple[Effect, ...]) -> list[str]:
    return [effect.message for effect in effects if isinstance(effect, Record)]


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


async def _parsed(kind: type[M], data: bytes, context: Context) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {kind.__name__}: {error}")
        raise


# --- views as messages ------------------------------------------------------------------------------------------------


def status_message(view: FleetView) -> fleet_pb2.FleetStatus:
    """What the core knows; readiness and lease are the caller's to add."""
    totals = view.totals
    return fleet_pb2.FleetStatus(
        fleet=view.name,
        model=view.model,
        engines=[_engine(e) for e in view.engines],
        monitor=_monitor(view.monitor),
        totals=fleet_pb2.RequestTotals(
            served=totals.served,
            failed=totals.failed,
            rejected=totals.rejected,
            cancelled=totals.cancelled,
            retried=totals.retried,
        ),
        proxies=sum(p.connected for p in view.proxies),
    )


def _engine(engine: EngineView) -> fleet_pb2.EngineStatus:
    return fleet_pb2.EngineStatus(
        id=engine.id,
        url=engine.url,
        role=phase_to_wire(engine.role),
        pinned=engine.pinned,
        incarnation=engine.incarnation,
        phases=[phase_to_wire(p) for p in Phase if p in engine.phases],
        weight=engine.weight,
        holds=[
            fleet_pb2.HoldStatus(
                kind=h.kind, reason=h.reason, age_s=h.age_s, remaining_s=h.remaining_s, effective=h.effective
            )
            for h in engine.holds
        ],
        checks=[
            fleet_pb2.CheckStatus(
                check=c.check, verdict=c.verdict, detail=c.detail, age_s=c.age_s, latency_s=c.latency_s
            )
            for c in engine.checks
        ],
        streaks={str(kind): count for kind, count in engine.streaks.items() if count},
        outcomes={str(outcome): count for outcome, count in engine.outcomes.items() if count},
        inflight=engine.inflight,
        evidence=[_evidence(known) for known in engine.evidence],
        producer_ids=engine.producers,
        misses=engine.misses,
        suspicion=engine.suspicion,
        gate_in_s=engine.gate_in_s,
        health=[
            fleet_pb2.HealthStatus(detail=h.detail, outcome=h.outcome, latency_s=h.latency_s, age_s=h.age_s)
            for h in engine.health
        ],
    )


def _evidence(known: EvidenceView) -> fleet_pb2.EvidenceStatus:
    message = fleet_pb2.EvidenceStatus(
        failure_class=known.failure, streak=known.streak, limit=known.limit, total=known.total
    )
    last = known.last
    if last is not None:
        message.last.CopyFrom(
            fleet_pb2.FailureStatus(
                words=known.last_words,
                outcome=last.outcome,
                status=last.status,
                detail=last.detail,
                phase=phase_to_wire(last.phase) if last.phase is not None else None,
                proxy=last.proxy,
                producer_id=last.producer,
                request_id=last.request_id,
                age_s=known.last_age_s,
            )
        )
    return message


def _monitor(monitor: MonitorView) -> fleet_pb2.MonitorStatus:
    return fleet_pb2.MonitorStatus(
        failure_streak=monitor.streak,
        degraded=bool(monitor.degraded),
        passes=monitor.passes,
        errors=[
            fleet_pb2.StageError(
                stage=e.stage, error_class=e.error_class, count=e.count, message=e.message, age_s=e.age_s
            )
            for e in monitor.errors
        ],
    )


def _proxy(proxy: ProxyView, published: tuple[int, int]) -> fleet_pb2.ProxyStatus:
    return fleet_pb2.ProxyStatus(
        proxy=proxy_to_wire(proxy.key),
        address=proxy.address,
        pid=proxy.pid,
        connected=proxy.connected,
        acked_epoch=proxy.acked[0],
        acked_version=proxy.acked[1],
        lag=lag(proxy.acked, published),
        refused_version=proxy.refused[1] if proxy.refused is not None else 0,
        refused_epoch=proxy.refused[0] if proxy.refused is not None else 0,
        refused_reason=proxy.refused_reason,
        silent_s=proxy.silent_s,
        resident=residency_to_wire(dict(proxy.resident)),
        suspect=proxy.suspect,
    )


def _event(entry: Entry) -> fleet_pb2.Event:
    record = entry.record
    return fleet_pb2.Event(
        sequence=entry.sequence,
        at=entry.at,
        kind=record.kind,
        message=record.message,
        engine_id=record.engine,
        proxy=record.proxy,
        fields=dict(record.fields),
    )
