"""The control service as `narwhalctl` calls it: finds the active process, asks it, and translates what it says.

The only module of the command line that sees gRPC; everything goes out as a value of `narwhal.cli.model` or as an
exception of this module. A read that failed may simply be made again. Of a call that changes something only NOT_ACTIVE
says for certain that nothing was done, so only then is it made again.

A process that does not lead answers FAILED_PRECONDITION with a `google.rpc.ErrorInfo` of reason NOT_ACTIVE in the
status details; its metadata name the `active` as HOST:PORT and the `holder`, as far as the process knows them.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from narwhal._pb import fleet_pb2, fleet_pb2_grpc, placement_pb2, placement_pb2_grpc
from narwhal.cli import messages, model
from narwhal.cli.options import AnswerIsNo, ControlUnreachable

T = TypeVar("T")

CALL_TIMEOUT_S = 5.0  # deadline of one question
SWITCH_TIMEOUT_S = 15.0  # a standby has to prove that it can write, and the last state handoff is stored
NEXT_S = 15.0  # until somebody leads after a switchover
NEXT_LOOK_S = 0.05
LOOK_S = 2.0  # how often it asks how a long call goes on, and whether the process behind it still leads
_CHANNEL_OPTIONS = (
    # A control plane is inside: a web proxy of the operator's shell has no part in it.
    ("grpc.enable_http_proxy", 0),
    # Without it a new channel inherits the back-off of the one before, and answers "refused" without having tried.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)


class Unreachable(ControlUnreachable):
    """No active control process answered. The message is one line and names every address that was tried."""


class NotActive(Unreachable):
    """The process asked does not lead. `active`: HOST:PORT of the one that does, as far as it knows; may be empty."""

    def __init__(self, message: str, active: str) -> None:
        super().__init__(message)
        self.active = active


class Refused(AnswerIsNo):
    """The active control process answered with an error; the message says which, in one line."""


class Lost(Unreachable):
    """A stream ended that was to go on, or the process behind it leads no more."""


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


def waits_for(engines: Iterable[model.Engine]) -> dict[str, tuple[str, ...]]:
    """What those of the drained engines wait for that are not ready to stop."""
    return {e.id: e.drain.waits_for for e in engines if e.drain is not None and not e.drain.settled}


def drained(engines: Sequence[model.Engine], *, told: Sequence[str]) -> model.Drained:
    """How far the drain of these engines has come."""
    return model.Drained(
        engines=tuple(engine.id for engine in engines),
        dry_run=False,
        told=tuple(told),
        settled=tuple(engine.id for engine in engines if engine.drain is not None and engine.drain.settled),
        waits_for=waits_for(engines),
    )


class Control:
    """The active control process. Made by `connect`; usable until its block is left."""

    def __init__(self, address: str, channel: aio.Channel) -> None:
        self.address = address
        self._fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        self._placement = placement_pb2_grpc.PlacementServiceStub(channel)

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

    async def explain(self, engine: str) -> model.Explanation:
        """Why an engine is, or is not, eligible."""
        answer = await self._ask(self._fleet.ExplainEngine, fleet_pb2.ExplainEngineRequest(engine_id=engine))
        return model.Explanation(
            engine=messages.engine(answer.engine),
            lines=tuple(answer.lines),
            history=tuple(model.Told(age_s=told.age_s, message=told.message) for told in answer.history),
        )

    async def eject(self, engine: str, *, reason: str, dry_run: bool) -> model.Done:
        """Takes an engine out of placement."""
        request = fleet_pb2.EjectEngineRequest(engine_id=engine, reason=reason, dry_run=dry_run)
        answer = await self._change(self._fleet.EjectEngine, request, timeout_s=CALL_TIMEOUT_S)
        return model.Done(engine=engine, dry_run=dry_run, told=tuple(answer.told))

    async def probe(self, engine: str, *, dry_run: bool, progress: Callable[[str], None]) -> model.Probed:
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
        return model.Probed(engine=engine, dry_run=dry_run, told=tuple(answer.told), verdict=answer.verdict)

    async def _suspicion(self, engine: str) -> str:
        """What is being found out about an engine while a probe of it is waited for."""
        try:
            status = await self.status(proxies=False)
        except Unreachable as error:
            # As it is, NotActive would have the probe begun anew elsewhere.
            raise Lost(f"{error}, while the probe was waited for; it may go on: see narwhalctl events") from error
        return next((known.suspicion for known in status.engines if known.id == engine), "")

    async def drain(self, request: Drain, *, told: list[str], progress: Callable[[str], None]) -> model.Drained:
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
        engines: tuple[model.Engine, ...] = ()
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
            return model.Drained(engines=request.engines, dry_run=True, told=tuple(told), settled=(), waits_for={})
        if request.wait and any(e.drain is not None and not (e.drain.settled or e.drain.overdue) for e in engines):
            raise Lost(f"{self.address}: ended the stream; the drain goes on: see narwhalctl events")
        return drained(engines, told=told)

    async def undrain(self, request: Undrain, *, progress: Callable[[str], None]) -> model.Returned:
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
        return model.Returned(engines=names, dry_run=request.dry_run, told=tuple(told))

    async def forget(self, proxy: str, *, dry_run: bool) -> model.Forgotten:
        """Says that a lost proxy, `ID` or `ID/SLOT`, is gone."""
        name, _, slot = proxy.rpartition("/")
        request = fleet_pb2.ForgetProxyRequest(id=proxy, dry_run=dry_run)
        if name and slot.isdecimal():
            request = fleet_pb2.ForgetProxyRequest(id=name, slot=int(slot), dry_run=dry_run)
        answer = await self._change(self._fleet.ForgetProxy, request, timeout_s=CALL_TIMEOUT_S)
        return model.Forgotten(proxy=proxy, dry_run=dry_run, told=tuple(answer.told))

    async def history(self) -> tuple[model.Epoch, ...]:
        """The epochs of the fleet, oldest first."""
        answer = await self._ask(self._fleet.GetHistory, fleet_pb2.GetHistoryRequest())
        return tuple(messages.epoch(message) for message in answer.epochs)

    async def switch(self, standby: str, *, dry_run: bool) -> model.Switched:
        """Has this process let go of the lease for `standby`, or for any that is fit when that is empty. Returns when
        it has; who leads next is not known then."""
        request = fleet_pb2.YieldRequest(standby=standby, operator=True, dry_run=dry_run)
        answer = await self._change(self._fleet.Yield, request, timeout_s=SWITCH_TIMEOUT_S)
        return model.Switched(
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
                translated = _translated(self.address, error)
                raise Lost(f"{translated}; {what} goes on: see narwhalctl events") from error
            raise _of_a_change(self.address, error) from error
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

    async def placements(self, *, name: str, follow: bool = True) -> AsyncGenerator[model.Placement]:
        """The newest placement, then every later one; only the newest, within the deadline, when it does not follow.

        `name`: how control's logs call this subscriber.
        """
        held: model.Placement | None = None
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
            raise _translated(self.address, error) from error

    async def _change(self, method: Callable[..., Awaitable[T]], request: Any, *, timeout_s: float | None) -> T:
        """A call that changes something, unless it is answered NotActive or Refused."""
        try:
            return await method(request, timeout=timeout_s)
        except aio.AioRpcError as error:
            raise _of_a_change(self.address, error) from error

    async def _messages(self, call: aio.UnaryStreamCall[Any, Any]) -> AsyncGenerator[Any]:
        """The messages of a stream. Ends the call whatever happens: a dropped one leaves its handler behind."""
        try:
            async for message in call:
                yield message
        except aio.AioRpcError as error:
            raise _translated(self.address, error) from error
        finally:
            call.cancel()


# --- finding the active process ---------------------------------------------------------------------------------------


def ask(addresses: Sequence[str], question: Callable[[Control], Awaitable[T]]) -> T:
    """The active control process's answer to `question`, from code that is not a coroutine.

    Asks again, from the start, when the process loses its lease between two calls of a question.
    """

    async def once() -> T:
        async with connect(addresses) as control:
            return await question(control)

    for _ in range(2):
        try:
            return asyncio.run(once())
        except NotActive:
            continue
    return asyncio.run(once())


async def switchover(addresses: Sequence[str], standby: str, *, dry_run: bool) -> model.Switched:
    """Has the active process yield, and waits until another leads. Raises `Lost` when nobody does in time."""
    clock = asyncio.get_running_loop()
    began = clock.time()
    while True:
        try:
            async with connect(addresses) as control:
                begun = await control.switch(standby, dry_run=dry_run)
            break
        except NotActive:
            if clock.time() - began > CALL_TIMEOUT_S:
                raise
    if dry_run:
        return begun
    everybody = list(dict.fromkeys([*addresses, begun.address]))
    while clock.time() - began < NEXT_S:
        with suppress(Unreachable):
            async with connect(everybody) as control:
                now = (await control.status(proxies=False)).control
                if now.epoch > begun.before:
                    took_s = clock.time() - began
                    return replace(begun, epoch=now.epoch, holder=now.holder, address=control.address, took_s=took_s)
        await asyncio.sleep(NEXT_LOOK_S)
    raise Lost(f"epoch {begun.before} is over, and nobody leads after {NEXT_S:g} s: see narwhalctl status")


@asynccontextmanager
async def connect(addresses: Sequence[str]) -> AsyncIterator[Control]:
    """The active control process among `addresses`, or the one that a standby among them names.

    All are asked at once, so that a dead machine costs nothing while another answers. Raises `Unreachable` or, when
    a process answered that it may not or cannot say, `Refused`.
    """
    channels: list[aio.Channel] = []
    try:
        yield await _first_active(addresses, channels)
    finally:
        for channel in channels:
            await channel.close()


async def _first_active(addresses: Sequence[str], channels: list[aio.Channel]) -> Control:
    asked: dict[asyncio.Task[model.Status], str] = {}
    controls: dict[str, Control] = {}
    failed: dict[str, Unreachable | Refused] = {}

    def start(address: str) -> None:
        channels.append(aio.insecure_channel(address, options=_CHANNEL_OPTIONS))
        controls[address] = Control(address, channels[-1])
        asked[asyncio.create_task(controls[address].status(proxies=False))] = address

    for address in addresses:
        start(address)
    try:
        while asked:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                address = asked.pop(task)
                try:
                    task.result()
                except (Unreachable, Refused) as error:
                    failed[address] = error
                    named = error.active if isinstance(error, NotActive) else ""
                    if named and named not in controls:
                        start(named)
                else:
                    return controls[address]
    finally:
        await cancelled(asked)
    for refused in failed.values():
        if isinstance(refused, Refused):
            raise refused
    raise Unreachable("no active control process: " + "; ".join(str(failed[a]) for a in controls))


async def cancelled(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels tasks and waits for their end."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- translation ------------------------------------------------------------------------------------------------------

# How gRPC words what a person knows by another name; looked for in the details of UNAVAILABLE.
_TRANSPORT = (
    ("Failed parsing HTTP/2", "does not speak gRPC; is it the HTTP port?"),
    ("errors resolving", "name does not resolve"),
    ("DNS resolution failed", "name does not resolve"),
    ("Socket closed", "closed the connection"),
)


async def _read(call: aio.UnaryStreamCall[Any, Any]) -> Any:
    return await call.read()


def _of_a_change(address: str, error: aio.AioRpcError) -> Unreachable | Refused:
    """Of a call that changes something: one whose fate is not known must not be made again."""
    translated = _translated(address, error)
    if isinstance(translated, Unreachable) and not isinstance(translated, NotActive):
        return Lost(f"{translated}; it may have been done all the same: see narwhalctl events")
    return translated


def _translated(address: str, error: aio.AioRpcError) -> Unreachable | Refused:
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unreachable(f"{address}: no answer within {CALL_TIMEOUT_S:g} s")
    if code is grpc.StatusCode.FAILED_PRECONDITION and (info := _error_info(error)).reason == "NOT_ACTIVE":
        active = info.metadata.get("active", "")
        return NotActive(f"{address}: not active, " + (f"names {active}" if active else "knows no active"), active)
    if code is grpc.StatusCode.UNAVAILABLE:
        # Everything else ends in the system's own words, such as "Connection refused".
        words = next((words for part, words in _TRANSPORT if part in details), details.rpartition(": ")[2].lower())
        return Unreachable(f"{address}: {words or 'unavailable'}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unreachable(f"{address}: no control service of this kind: {details}")
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
        # Whole sentences about the fleet; of a failed gate one for each engine.
        return Refused("\n".join(_violations(error)) or details)
    return Refused(f"{address}: {code.name.lower().replace('_', ' ')}: {details}")


def _violations(error: aio.AioRpcError) -> list[str]:
    """What a failed gate says of each engine, a sentence each."""
    failed = error_details_pb2.PreconditionFailure()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(failed):
                    return [violation.description for violation in failed.violations]
    return []


def _error_info(error: aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return info
    return info
