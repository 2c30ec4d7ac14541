"""The gRPC service that operators call. No decision."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from narwhal._pb import fleet_pb2
from narwhal.clock import Clock
from narwhal.control.core.commands import probed
from narwhal.control.core.effects import Effect
from narwhal.control.core.events import (
    Command,
    CommandRefusedError,
    EjectCommand,
    ForgetCommand,
    ProbeCommand,
    Refusal,
    RoleCommand,
)
from narwhal.control.drains import Drains, Undrains
from narwhal.control.fleet_messages import (
    engine_message,
    epoch_message,
    event_message,
    proxy_message,
    standby_message,
    status_message,
    words_of,
)
from narwhal.control.leader import Leader
from narwhal.control.loop import ControlLoop
from narwhal.control.observe import Observer
from narwhal.control.publisher import OBSERVER_AGE_S, Publisher
from narwhal.control.service import Context, refuse, refuse_standby
from narwhal.control.writer import NotLeading
from narwhal.control.yielding import Said, Yielding, YieldRefused
from narwhal.wire import WireError, phase_from_wire

M = TypeVar("M", bound=Message)

MOST_FOLLOWERS = 500


class FleetService:
    """`narwhal.v1.FleetService`."""

    def __init__(
        self, leader: Leader, publisher: Publisher, observer: Observer, clock: Clock, yielding: Yielding
    ) -> None:
        self._leader = leader
        self._publisher = publisher
        self._observer = observer
        self._clock = clock
        self._yielding = yielding
        self._followers = 0
        self._drains = Drains(observer, clock)
        self._undrains = Undrains(observer, publisher)

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
                "SetRole": self._unary(fleet_pb2.SetRoleRequest, self.set_role),
                "ForgetProxy": self._unary(fleet_pb2.ForgetProxyRequest, self.forget_proxy),
                "GetHistory": self._unary(fleet_pb2.GetHistoryRequest, self.get_history),
                "StandBy": self._unary(fleet_pb2.StandByRequest, self.stand_by),
                "Yield": self._unary(fleet_pb2.YieldRequest, self.yield_lease),
                "DrainEngines": self._stream(fleet_pb2.DrainEnginesRequest, self._drains.run),
                "UndrainEngines": self._stream(fleet_pb2.UndrainEnginesRequest, self._undrains.run),
                "WatchEvents": grpc.unary_stream_rpc_method_handler(self.watch_events, response_serializer=_serialize),
            },
        )

    def _unary(self, request: type[M], call: Callable[[ControlLoop, M, Context], Awaitable[Message]]) -> Any:
        """A call that only the active answers."""

        async def handle(data: bytes, context: Context) -> Message:
            message, loop = await self._asked(request, data, context)
            try:
                return await call(loop, message, context)
            except YieldRefused as error:
                await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error), reason="YIELD_REFUSED")
            except (CommandRefusedError, NotLeading) as error:
                await _refused(context, error)
            raise AssertionError("abort returned")

        return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)

    def _stream(self, request: type[M], call: Callable[[ControlLoop, M, Context], AsyncIterator[Message]]) -> Any:
        """The same with many answers."""

        async def handle(data: bytes, context: Context) -> AsyncIterator[Message]:
            message, loop = await self._asked(request, data, context)
            try:
                async for answer in call(loop, message, context):
                    yield answer
            except (CommandRefusedError, NotLeading) as error:
                await _refused(context, error)

        return grpc.unary_stream_rpc_method_handler(handle, response_serializer=_serialize)

    async def _asked(self, request: type[M], data: bytes, context: Context) -> tuple[M, ControlLoop]:
        message = await _parsed(request, data, context)
        loop = self._leader.loop
        if loop is None:
            await refuse_standby(context, self._leader)
        return message, loop

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
        status.standbys.extend(standby_message(known, self._clock) for known in self._yielding.standbys())
        return status

    async def list_proxies(
        self, loop: ControlLoop, _request: fleet_pb2.ListProxiesRequest, _context: Context
    ) -> fleet_pb2.ListProxiesResponse:
        """The proxies that are known, connected or lost."""
        placement = self._publisher.placement
        published = placement.order if placement is not None else (0, 0)
        return fleet_pb2.ListProxiesResponse(proxies=[proxy_message(p, published) for p in loop.view().proxies])

    async def get_handoff(
        self, loop: ControlLoop, _request: fleet_pb2.GetHandoffRequest, context: Context
    ) -> fleet_pb2.StateHandoff:
        """The state handoff as it is stored."""
        document = loop.writer.document
        if document is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no state handoff has been stored yet")
        return fleet_pb2.StateHandoff(document=document, epoch=loop.lease.epoch)

    async def get_history(
        self, _loop: ControlLoop, _request: fleet_pb2.GetHistoryRequest, _context: Context
    ) -> fleet_pb2.GetHistoryResponse:
        """The epochs of this fleet."""
        return fleet_pb2.GetHistoryResponse(epochs=map(epoch_message, self._leader.history().epochs))

    # --- standbys -----------------------------------------------------------------------------------------------------

    async def stand_by(
        self, _loop: ControlLoop, request: fleet_pb2.StandByRequest, context: Context
    ) -> fleet_pb2.StandByResponse:
        """A standby says what it has, and hears how this process is."""
        if not request.holder or not math.isfinite(request.copy_written_at):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "holder must be named, copy_written_at finite")
        said = Said(
            holder=request.holder,
            address=request.address,
            copy_epoch=request.copy_epoch,
            copy_written_at=request.copy_written_at,
            problem=request.problem,
        )
        prove, readiness = self._yielding.heard(said), self._leader.readiness()
        return fleet_pb2.StandByResponse(
            control_ready=readiness.control_ready,
            reason="" if readiness.control_ready else readiness.reason,
            epoch=readiness.epoch,
            prove=prove,
        )

    async def yield_lease(
        self, _loop: ControlLoop, request: fleet_pb2.YieldRequest, context: Context
    ) -> fleet_pb2.YieldResponse:
        """Hands the lease on."""
        if request.operator:
            yielded = await self._yielding.by_operator(request.standby, dry_run=request.dry_run)
        elif request.standby and not request.dry_run:
            yielded = await self._yielding.to_standby(request.standby)
        else:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a standby names itself, and means what it asks for")
        heir = yielded.heir
        return fleet_pb2.YieldResponse(epoch=yielded.epoch, standby=heir.holder, address=heir.address)

    # --- commands: translate, ask, await ------------------------------------------------------------------------------

    async def explain_engine(
        self, loop: ControlLoop, request: fleet_pb2.ExplainEngineRequest, _context: Context
    ) -> fleet_pb2.Explanation:
        """Why one engine is, or is not, eligible."""
        explanation = loop.explain(request.engine_id)
        return fleet_pb2.Explanation(
            engine=engine_message(explanation.engine),
            lines=explanation.lines,
            history=[fleet_pb2.HistoryEntry(age_s=h.age_s, message=h.message) for h in explanation.history],
        )

    async def eject_engine(
        self, loop: ControlLoop, request: fleet_pb2.EjectEngineRequest, _context: Context
    ) -> fleet_pb2.EjectEngineResponse:
        """Takes an engine out."""
        command = EjectCommand(engine=request.engine_id, reason=request.reason)
        return fleet_pb2.EjectEngineResponse(told=words_of(await self._command(loop, command, request.dry_run)))

    async def probe_engine(
        self, loop: ControlLoop, request: fleet_pb2.ProbeEngineRequest, context: Context
    ) -> fleet_pb2.ProbeEngineResponse:
        """Probes an engine, and answers when the probe has ended."""
        before = self._observer.sequence
        effects = await self._command(loop, ProbeCommand(engine=request.engine_id), request.dry_run)
        if request.dry_run:
            return fleet_pb2.ProbeEngineResponse(told=words_of(effects))
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

    async def set_role(
        self, loop: ControlLoop, request: fleet_pb2.SetRoleRequest, context: Context
    ) -> fleet_pb2.SetRoleResponse:
        """Gives an engine a role."""
        try:
            role = phase_from_wire(request.role)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        command = RoleCommand(engine=request.engine_id, role=role)
        return fleet_pb2.SetRoleResponse(told=words_of(await self._command(loop, command, request.dry_run)))

    async def forget_proxy(
        self, loop: ControlLoop, request: fleet_pb2.ForgetProxyRequest, _context: Context
    ) -> fleet_pb2.ForgetProxyResponse:
        """Forgets a lost proxy."""
        command = ForgetCommand(id=request.id, slot=request.slot if request.HasField("slot") else None)
        return fleet_pb2.ForgetProxyResponse(told=words_of(await self._command(loop, command, request.dry_run)))

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
                yield event_message(entry)
            return
        if self._followers >= MOST_FOLLOWERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_FOLLOWERS} others follow already")
        self._followers += 1
        until = self._clock.monotonic() + OBSERVER_AGE_S
        try:
            async for entry in self._observer.follow(request.after, until=until):
                yield event_message(entry)
        finally:
            self._followers -= 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "ask again after the last event received")


_CODES = {
    Refusal.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Refusal.PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
}


async def _refused(context: Context, error: CommandRefusedError | NotLeading) -> None:
    if isinstance(error, CommandRefusedError):
        # The reason tells it from a process that does not lead.
        await refuse(context, _CODES[error.refusal], str(error), reason=error.refusal.name)
    words = f"leads no more ({error}), and whether what was asked was done is not known"
    await context.abort(grpc.StatusCode.UNAVAILABLE, words)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


async def _parsed(kind: type[M], data: bytes, context: Context) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {kind.__name__}: {error}")
        raise
