"""The control service as `narwhalctl` calls it: asks one process, and translates what it says.

The only module of the command line that opens gRPC channels; everything goes out as a plain value (`model` and its
neighbours) or as an exception of `failures`. A read that failed may simply be made again. Of a call that changes
something only NOT_ACTIVE says for certain that nothing was done, so only then is it made again.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc import aio

from narwhal._pb import fleet_pb2, fleet_pb2_grpc, placement_pb2, placement_pb2_grpc
from narwhal.cli import engine_model, messages, model, outcomes, placement_model
from narwhal.cli.failures import CLOSED, Lost, NotActive, Refused, Unreachable, of_a_change, translated
from narwhal.cli.secure import FLAGS, Secure, speaks_tls

T = TypeVar("T")

CALL_TIMEOUT_S = 5.0  # deadline of one question
SWITCH_TIMEOUT_S = 15.0  # a standby has to prove that it can write, and the last state handoff is stored
LOOK_S = 2.0  # how often it asks how a long call goes on, and whether the process behind it still leads
_CHANNEL_OPTIONS = (
    # A control plane is inside: a web proxy of the operator's shell has no part in it.
    ("grpc.enable_http_proxy", 0),
    # Without it a new channel inherits the back-off of the one before, and answers "refused" without having tried.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)


@dataclass(frozen=True, kw_only=True)
class Drain:
    """What `narwhalctl drain` asks for."""

    engines: tuple[str, ...]
    everybody: bool
    deadline_s: float
    reason: str
    restart: bool
    wait: bool
    dry_run: bool


@dataclass(frozen=True, kw_only=True)
class Undrain:
    """What `narwhalctl undrain` asks for."""

    engines: tuple[str, ...]
    everybody: bool
    but: tuple[str, ...]
    wait: bool
    dry_run: bool


def waits_for(engines: Iterable[engine_model.Engine]) -> dict[str, tuple[str, ...]]:
    """What those of the drained engines wait for that are not ready to stop."""
    return {e.id: e.drain.waits_for for e in engines if e.drain is not None and not e.drain.settled}


def drained(engines: Sequence[engine_model.Engine], *, told: Sequence[str]) -> outcomes.Drained:
    """How far the drain of these engines has come."""
    return outcomes.Drained(
        engines=tuple(engine.id for engine in engines),
        dry_run=False,
        told=tuple(told),
        settled=tuple(engine.id for engine in engines if engine.drain is not None and engine.drain.settled),
        waits_for=waits_for(engines),
    )


class Control:
    """One control process. Made by `reach.connect`, of the active one; usable until its block is left."""

    def __init__(self, address: str, secure: Secure | None = None) -> None:
        """`secure`: what TLS is spoken with; None without."""
        self.address = address
        self._secure = secure
        if secure is None:
            self._channel = aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            options = (*_CHANNEL_OPTIONS, *secure.options)
            self._channel = aio.secure_channel(address, secure.credentials, options=options)
        self._fleet = fleet_pb2_grpc.FleetServiceStub(self._channel)
        self._placement = placement_pb2_grpc.PlacementServiceStub(self._channel)

    async def close(self) -> None:
        """End what is under way, and the connection."""
        await self._channel.close()

    async def at_odds(self, error: Unreachable | Refused) -> Unreachable | Refused:
        """`error` of a first call, or a clearer one where the two sides differ about TLS."""
        if str(error) != f"{self.address}: {CLOSED}":
            return error
        if self._secure is not None:
            return Unreachable(f"{error}: it may not know the CA of the certificate it was shown")
        if await speaks_tls(self.address):
            return Unreachable(f"{self.address}: speaks TLS: give {FLAGS}")
        return error

    async def status(self, *, proxies: bool = True) -> model.Status:
        """The whole fleet; without its proxies that costs one call instead of two."""
        fleet = await self._ask(self._fleet.GetStatus, fleet_pb2.GetStatusRequest())
        if not fleet.ready and fleet.reason in model.NOT_LEADING:
            raise NotActive(f"{self.address}: not active: {fleet.reason}", "")
        known = await self.proxies() if proxies else ()
        return messages.status(fleet, self.address, known)

    async def proxies(self) -> tuple[model.Proxy, ...]:
        """The proxy workers that are known, connected or lost."""
        answer = await self._ask(self._fleet.ListProxies, fleet_pb2.ListProxiesRequest())
        return tuple(messages.proxy(message) for message in answer.proxies)

    async def explain(self, engine: str) -> engine_model.Explanation:
        """Why an engine is, or is not, eligible."""
        answer = await self._ask(self._fleet.ExplainEngine, fleet_pb2.ExplainEngineRequest(engine_id=engine))
        return engine_model.Explanation(
            engine=messages.engine(answer.engine),
            lines=tuple(answer.lines),
            history=tuple(engine_model.Told(age_s=told.age_s, message=told.message) for told in answer.history),
        )

    async def eject(self, engine: str, *, reason: str, dry_run: bool) -> outcomes.Done:
        """Takes an engine out of placement."""
        request = fleet_pb2.EjectEngineRequest(engine_id=engine, reason=reason, dry_run=dry_run)
        answer = await self._change(self._fleet.EjectEngine, request, timeout_s=CALL_TIMEOUT_S)
        return outcomes.Done(engine=engine, dry_run=dry_run, told=tuple(answer.told))

    async def set_role(self, engine: str, role: str, *, dry_run: bool) -> outcomes.Done:
        """Gives an engine a role, `prefill` or `decode`."""
        request = fleet_pb2.SetRoleRequest(engine_id=engine, role=messages.role_of(role), dry_run=dry_run)
        answer = await self._change(self._fleet.SetRole, request, timeout_s=CALL_TIMEOUT_S)
        return outcomes.Done(engine=engine, dry_run=dry_run, told=tuple(answer.told))

    async def probe(self, engine: str, *, dry_run: bool, progress: Callable[[str], None]) -> outcomes.Probed:
        """Probes an engine and returns when that has ended. `progress` is told what it waits for, when that changes."""
        request = fleet_pb2.ProbeEngineRequest(engine_id=engine, dry_run=dry_run)
        # However long it takes: while the process behind it leads and answers other questions, it is at it.
        call = asyncio.ensure_future(self._change(self._fleet.ProbeEngine, request, timeout_s=None))
        said = ""
        try:
            while not (await asyncio.wait({call}, timeout=LOOK_S))[0]:
                waiting = await self._suspicion(engine)
                if waiting not in ("", said):
                    progress(waiting)
                said = waiting
        finally:
            await cancelled([call])
        answer = call.result()
        return outcomes.Probed(engine=engine, dry_run=dry_run, told=tuple(answer.told), verdict=answer.verdict)

    async def _suspicion(self, engine: str) -> str:
        """What is being found out about an engine while a probe of it is waited for."""
        try:
            status = await self.status(proxies=False)
        except Unreachable as error:
            # As it is, NotActive would have the probe begun anew elsewhere.
            raise Lost(f"{error}, while the probe was waited for; it may go on: see narwhalctl events") from error
        return next((known.suspicion for known in status.engines if known.id == engine), "")

    async def drain(self, request: Drain, *, told: list[str], progress: Callable[[str], None]) -> outcomes.Drained:
        """Takes engines out; asked to wait, returns when each of them is ready to stop or its deadline has passed.

        What happens is added to `told`, so that it is known when this raises; then the drain has begun if anything is.
        `progress` hears that too when it waits, and what is waited for, as that changes.
        """
        asked = fleet_pb2.DrainEnginesRequest(
            engine_ids=request.engines,
            all=request.everybody,
            deadline_s=request.deadline_s,
            reason=request.reason,
            no_restart=not request.restart,
            wait=request.wait,
            dry_run=request.dry_run,
        )
        engines: tuple[engine_model.Engine, ...] = ()
        said = ""
        async for message in self._lasting(self._fleet.DrainEngines(asked), "the drain"):
            told += message.told
            engines = tuple(messages.engine(engine) for engine in message.engines)
            waiting = "; ".join(f"{name}: {', '.join(words)}" for name, words in waits_for(engines).items())
            for words in (*message.told, f"waits for {waiting}" if waiting and waiting != said else ""):
                if words and request.wait and not request.dry_run:
                    progress(words)
            said = waiting
        if request.dry_run:
            return outcomes.Drained(engines=request.engines, dry_run=True, told=tuple(told), settled=(), waits_for={})
        if request.wait and any(e.drain is not None and not (e.drain.settled or e.drain.overdue) for e in engines):
            raise Lost(f"{self.address}: ended the stream; the drain goes on: see narwhalctl events")
        return drained(engines, told=told)

    async def undrain(self, request: Undrain, *, progress: Callable[[str], None]) -> outcomes.Returned:
        """Has the gates of drained engines tried, and returns when all of them are back; asked to wait, when the
        proxies know that too. Raises `Refused` with what failed where one stays drained."""
        asked = fleet_pb2.UndrainEnginesRequest(
            engine_ids=request.engines,
            all=request.everybody,
            except_ids=request.but,
            wait=request.wait,
            dry_run=request.dry_run,
        )
        told: list[str] = []
        names = request.engines
        said = ""
        async for message in self._lasting(self._fleet.UndrainEngines(asked), "the return"):
            told += message.told
            names = tuple(engine.id for engine in message.engines) or names
            waiting = "; ".join(message.waits_for)
            if waiting and waiting != said:
                progress(f"waits for {waiting}" if not request.dry_run else waiting)
            said = waiting
        return outcomes.Returned(engines=names, dry_run=request.dry_run, told=tuple(told))

    async def forget(self, proxy: str, *, dry_run: bool) -> outcomes.Forgotten:
        """Says that a lost proxy, `ID` or `ID/SLOT`, is gone."""
        name, _, slot = proxy.rpartition("/")
        request = fleet_pb2.ForgetProxyRequest(id=proxy, dry_run=dry_run)
        if name and slot.isdecimal():
            request = fleet_pb2.ForgetProxyRequest(id=name, slot=int(slot), dry_run=dry_run)
        answer = await self._change(self._fleet.ForgetProxy, request, timeout_s=CALL_TIMEOUT_S)
        return outcomes.Forgotten(proxy=proxy, dry_run=dry_run, told=tuple(answer.told))

    async def history(self) -> tuple[model.Epoch, ...]:
        """The epochs of the fleet, oldest first."""
        answer = await self._ask(self._fleet.GetHistory, fleet_pb2.GetHistoryRequest())
        return tuple(messages.epoch(message) for message in answer.epochs)

    async def switch(self, standby: str, *, dry_run: bool) -> outcomes.Switched:
        """Has this process let go of the lease for `standby`, or for any that is fit when that is empty. Returns when
        it has; who leads next is not known then."""
        request = fleet_pb2.YieldRequest(standby=standby, operator=True, dry_run=dry_run)
        answer = await self._change(self._fleet.Yield, request, timeout_s=SWITCH_TIMEOUT_S)
        return outcomes.Switched(
            dry_run=dry_run,
            before=answer.epoch,
            epoch=0,
            holder=answer.standby,
            address=answer.address,
            took_s=0.0,
        )

    async def _lasting(self, call: aio.UnaryStreamCall[Any, Any], what: str) -> AsyncGenerator[Any]:
        """The messages of a command that lasts, for as long as the process behind it answers and leads."""
        begun = False
        reading: asyncio.Task[Any] | None = None
        try:
            while True:
                reading = asyncio.create_task(_read(call))
                while not (await asyncio.wait({reading}, timeout=LOOK_S))[0]:
                    await self.status(proxies=False)
                message = reading.result()
                if message is aio.EOF:
                    return
                begun = True
                yield message
        except aio.AioRpcError as error:
            if begun and error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                # However the stream of a process that is going away ends: what it had begun goes on elsewhere.
                why = translated(self.address, error, timeout_s=CALL_TIMEOUT_S)
                raise Lost(f"{why}; {what} goes on: see narwhalctl events") from error
            raise of_a_change(self.address, error, timeout_s=CALL_TIMEOUT_S) from error
        except Unreachable as error:
            fate = "goes on" if begun else "may have been begun"
            raise Lost(f"{error}; {what} {fate}: see narwhalctl events") from error
        finally:
            call.cancel()
            if reading is not None:
                await cancelled([reading])

    async def events(self, *, after: int = 0, follow: bool = False) -> AsyncGenerator[model.Event]:
        """Events after a sequence, oldest first; ends after the newest, or goes on with new ones when it follows."""
        request = fleet_pb2.WatchEventsRequest(after=after, follow=follow)
        # Without following the events that are kept are an answer like any other, and have its deadline.
        call = self._fleet.WatchEvents(request, timeout=None if follow else CALL_TIMEOUT_S)
        async for message in self._messages(call):
            yield messages.event(message)

    async def placements(self, *, name: str, follow: bool = True) -> AsyncGenerator[placement_model.Placement]:
        """The newest placement, then every later one; only the newest, within the deadline, when it does not follow.

        `name`: how control's logs call this subscriber.
        """
        held: placement_model.Placement | None = None
        call = self._placement.WatchPlacement(
            placement_pb2.WatchPlacementRequest(name=name), timeout=None if follow else CALL_TIMEOUT_S
        )
        async for message in self._messages(call):
            kind = message.WhichOneof("message")
            if kind == "snapshot":
                held = messages.snapshot(message.snapshot)
                yield held
            elif kind == "change":
                before, held = held, messages.changed(held, message.change)
                if held is None:
                    base = f"{message.change.epoch}.{message.change.base_version}"
                    have = before.order if before else "none"
                    raise Lost(f"{self.address}: a change is based on placement {base}, held is {have}")
                yield held
            elif kind == "farewell":
                raise Lost(f"{self.address}: ended the stream: {message.farewell.reason}")

    async def _ask(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        try:
            return await method(request, timeout=CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            raise translated(self.address, error, timeout_s=CALL_TIMEOUT_S) from error

    async def _change(self, method: Callable[..., Awaitable[T]], request: Any, *, timeout_s: float | None) -> T:
        """A call that changes something, unless it is answered NotActive or Refused."""
        try:
            return await method(request, timeout=timeout_s)
        except aio.AioRpcError as error:
            raise of_a_change(self.address, error, timeout_s=CALL_TIMEOUT_S) from error

    async def _messages(self, call: aio.UnaryStreamCall[Any, Any]) -> AsyncGenerator[Any]:
        """The messages of a stream. Ends the call whatever happens: a dropped one leaves its handler behind."""
        try:
            async for message in call:
                yield message
        except aio.AioRpcError as error:
            raise translated(self.address, error, timeout_s=CALL_TIMEOUT_S) from error
        finally:
            call.cancel()


async def cancelled(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks and waits for their end."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read(call: aio.UnaryStreamCall[Any, Any]) -> Any:
    return await call.read()
