"""The gRPC services that proxies and observers call: translate, post, await. No decision.

Messages come in as bytes and are parsed here, so that a bad one is INVALID_ARGUMENT and never an exception of the
library; messages to subscribers go out as the bytes that the publisher serialised once for all.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from narwhal._pb import outcome_pb2, placement_pb2
from narwhal.control.core.events import ProxyAcked, ProxyConnected, ProxyLeft, ProxyLost, ProxyNacked
from narwhal.control.leader import Leader
from narwhal.control.loop import ControlLoop
from narwhal.control.publisher import SILENCE_S, Publisher, Subscriber, Superseded
from narwhal.control.writer import Mark, NotLeading
from narwhal.placement import HIGHEST_EPOCH
from narwhal.reports import ProxyKey
from narwhal.wire import (
    LONGEST_NAME,
    LONGEST_TEXT,
    WireError,
    batch_from_wire,
    proxy_from_wire,
    residency_from_wire,
    tokens_from_wire,
)

Context = grpc.aio.ServicerContext[bytes, bytes]
T = TypeVar("T")

FAREWELL_S = 1.0  # for a last message to a peer that may have stopped reading
IDLE_REPORTS_S = 120.0  # a report stream that says nothing for so long may belong to nobody any more
MOST_OBSERVERS = 500

log = structlog.get_logger()


class BadMessage(Exception):
    """The peer's message makes no sense."""


async def refuse_standby(context: Any, leader: Leader) -> NoReturn:
    """Ends a call that only the active takes, and says who that is."""
    owner = leader.owner
    metadata = {"active": owner.address, "holder": owner.holder} if owner is not None else {}
    words = f"{leader.readiness().reason}; " + (
        f"the active is {owner.address}" if owner else "the active is not known"
    )
    await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, words, reason="NOT_ACTIVE", metadata=metadata)


async def refuse(
    context: Any,
    code: grpc.StatusCode,
    words: str,
    *,
    reason: str,
    metadata: Mapping[str, str] | None = None,
    more: Iterable[Message] = (),
) -> NoReturn:
    """Ends a call with an error whose details name the reason, for programs, and say `more`."""
    details = []
    for message in (error_details_pb2.ErrorInfo(reason=reason, domain="narwhal", metadata=metadata), *more):
        detail = AnyMessage()
        detail.Pack(message)
        details.append(detail)
    status = status_pb2.Status(code=code.value[0], message=words, details=details)
    await context.abort(code, words, (("grpc-status-details-bin", status.SerializeToString()),))
    raise AssertionError("abort returned")


def _parse(parse: Callable[[bytes], T], data: bytes) -> T:
    try:
        return parse(data)
    except DecodeError as error:
        raise BadMessage(f"not a message of this stream: {error}") from None


class PlacementService:
    """`narwhal.v1.PlacementService`."""

    def __init__(self, leader: Leader, publisher: Publisher, *, fleet: str) -> None:
        self._leader = leader
        self._publisher = publisher
        self._fleet = fleet
        self._streams = itertools.count(1)

    def handlers(self) -> grpc.GenericRpcHandler:
        """For `Server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            "narwhal.v1.PlacementService",
            {
                "StreamPlacement": grpc.stream_stream_rpc_method_handler(self.stream_placement),
                "WatchPlacement": grpc.unary_stream_rpc_method_handler(self.watch_placement),
            },
        )

    # --- proxies ----------------------------------------------------------------------------------------------------

    async def stream_placement(self, _requests: AsyncIterator[bytes], context: Context) -> None:
        """One proxy's stream."""
        try:
            hello = await self._hello(context)
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if hello is None:
            return
        if self._fleet != hello[0] and hello[0]:
            words = f"this is fleet {self._fleet}, not {hello[0]}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, words)
        event = hello[1]
        try:
            subscriber = self._publisher.join(event)
        except Superseded as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        self._leader.epoch_seen(event.highest_epoch)
        self._post(event)
        await self._serve_proxy(subscriber, event, context)

    async def _hello(self, context: Context) -> tuple[str, ProxyConnected] | None:
        """The first message: the fleet named, and the proxy. None when a supervisor only said goodbye for a worker."""
        try:
            async with asyncio.timeout(SILENCE_S):
                data = await context.read()
        except TimeoutError:
            raise BadMessage(f"no hello within {SILENCE_S:g} s") from None
        if not isinstance(data, bytes):
            raise BadMessage("the stream ended without a hello")
        message = _parse(placement_pb2.ProxyMessage.FromString, data)
        kind = message.WhichOneof("message")
        if kind == "goodbye" and message.goodbye.HasField("proxy"):
            self._left(_key(message.goodbye.proxy), message.goodbye.reason)
            return None
        if kind != "hello":
            raise BadMessage("the first message must be a hello")
        hello = message.hello
        if hello.highest_epoch > HIGHEST_EPOCH:
            raise BadMessage(f"highest_epoch must be at most {HIGHEST_EPOCH}")
        event = ProxyConnected(
            proxy=_key(hello.proxy),
            address=hello.address[:LONGEST_NAME] or context.peer(),
            pid=hello.pid,
            highest_epoch=hello.highest_epoch,
            stream=next(self._streams),
        )
        return hello.fleet, event

    async def _serve_proxy(self, subscriber: Subscriber, hello: ProxyConnected, context: Context) -> None:
        listening = asyncio.create_task(self._listen(subscriber, hello, context))
        gone = "connection lost"
        try:
            await _pump(subscriber, context, until=listening)
            if listening.done() and listening.result():
                gone = ""  # said goodbye
                return
            gone = subscriber.ended or "closed its stream"
            if not subscriber.ended:
                return
        except BadMessage as error:
            gone = f"sent nonsense: {error}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            await _end(listening)
            self._publisher.leave(subscriber)
            if gone and not subscriber.replaced:
                self._post(ProxyLost(proxy=hello.proxy, reason=gone, stream=hello.stream))
        await _close(subscriber, context)

    async def _listen(self, subscriber: Subscriber, hello: ProxyConnected, context: Context) -> bool:
        """Takes what the proxy says. True when it said goodbye, False when it only stopped."""
        while isinstance(data := await context.read(), bytes):
            message = _parse(placement_pb2.ProxyMessage.FromString, data)
            kind = message.WhichOneof("message")
            if kind == "ack":
                self._acked(subscriber, hello, message.ack)
            elif kind == "nack":
                self._nacked(subscriber, hello, message.nack)
            elif kind == "goodbye":
                goodbye = message.goodbye
                key = _key(goodbye.proxy) if goodbye.HasField("proxy") else hello.proxy
                self._left(key, goodbye.reason)
                if key == hello.proxy:
                    return True
            elif kind == "hello":
                raise BadMessage("a second hello")
            # Anything else is of a newer proxy, which knows that older controls ignore it.
        return False

    def _acked(self, subscriber: Subscriber, hello: ProxyConnected, ack: placement_pb2.Ack) -> None:
        resident = residency_from_wire(list(ack.resident))
        self._publisher.resides(subscriber, resident, tokens_from_wire(list(ack.resident)))
        published = self._publisher.placement
        if published is None or ack.epoch > published.epoch:
            return  # it follows another control process
        if (ack.epoch, ack.version) > published.order:
            raise BadMessage(f"acknowledged {ack.epoch}.{ack.version}, which was never published")
        event = ProxyAcked(
            proxy=hello.proxy,
            epoch=ack.epoch,
            version=ack.version,
            resident=resident,
            unread=residency_from_wire(list(ack.unread)),
        )
        self._post(event)

    def _nacked(self, subscriber: Subscriber, hello: ProxyConnected, nack: placement_pb2.Nack) -> None:
        self._publisher.heard(subscriber)
        subscriber.snapshot(paced=True)
        self._post(
            ProxyNacked(proxy=hello.proxy, epoch=nack.epoch, version=nack.version, reason=nack.reason[:LONGEST_TEXT])
        )

    def _left(self, key: ProxyKey, reason: str) -> None:
        reason = reason[:LONGEST_TEXT]
        self._publisher.dismiss(key, f"goodbye: {reason}")
        self._post(ProxyLeft(proxy=key, reason=reason))

    def _post(self, event: ProxyConnected | ProxyAcked | ProxyNacked | ProxyLost | ProxyLeft) -> None:
        loop = self._leader.loop
        if loop is not None:
            loop.post(event)

    # --- observers --------------------------------------------------------------------------------------------------

    async def watch_placement(self, data: bytes, context: Context) -> None:
        """One observer's stream."""
        try:
            _parse(placement_pb2.WatchPlacementRequest.FromString, data)
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if self._leader.loop is None:
            await refuse_standby(context, self._leader)
        if self._publisher.observers >= MOST_OBSERVERS:
            words = f"{MOST_OBSERVERS} observers are subscribed already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        subscriber = self._publisher.observe()
        try:
            await _pump(subscriber, context, until=None)
        finally:
            self._publisher.leave(subscriber)
        await _close(subscriber, context)


def _key(message: placement_pb2.ProxyIdentity) -> ProxyKey:
    try:
        return proxy_from_wire(message)
    except WireError as error:
        raise BadMessage(str(error)) from None


async def _pump(subscriber: Subscriber, context: Context, *, until: "asyncio.Task[bool] | None") -> None:
    """Sends what there is to send until the subscriber is ended or `until` is done, whose exception it raises.

    A peer that has stopped reading keeps a write waiting for ever: the last message gets a bounded time, and so does
    every other one.
    """

    async def send() -> None:
        while (message := await subscriber.next()) is not None:
            async with asyncio.timeout(SILENCE_S):
                await context.write(message)

    sending = asyncio.create_task(send())
    ended = asyncio.create_task(subscriber.over.wait())
    try:
        waiting: set[asyncio.Task[Any]] = {sending, ended}
        await asyncio.wait(waiting if until is None else waiting | {until}, return_when=asyncio.FIRST_COMPLETED)
        if until is not None and until.done() and (error := until.exception()) is not None:
            subscriber.end(str(error))
        if subscriber.ended:
            await asyncio.wait({sending}, timeout=FAREWELL_S)
        if not sending.done() or isinstance(sending.exception(), TimeoutError):
            subscriber.end(f"read nothing for {SILENCE_S:g} s")
        elif not subscriber.ended:
            sending.result()
        if until is not None and until.done():
            until.result()
    finally:
        await _end(sending)
        await _end(ended)


async def _close(subscriber: Subscriber, context: Context) -> NoReturn:
    """Ends the call of a subscriber that was ended.

    To a peer that does not read, the status waits behind the one message that it has not taken, until its connection
    ends: the library lets a server reset no call.
    """
    code = grpc.StatusCode.ABORTED if subscriber.replaced else grpc.StatusCode.UNAVAILABLE
    await context.abort(code, subscriber.ended)
    raise AssertionError("abort returned")


async def _end(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class OutcomeService:
    """`narwhal.v1.OutcomeService`."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def handlers(self) -> grpc.GenericRpcHandler:
        """For `Server.add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            "narwhal.v1.OutcomeService",
            {"ReportOutcomes": grpc.stream_stream_rpc_method_handler(self.report_outcomes)},
        )

    async def report_outcomes(self, _requests: AsyncIterator[bytes], context: Context) -> None:
        """One proxy's reports. Acknowledges what is stored, the newest only (spec S6)."""
        loop = self._leader.loop
        if loop is None:
            await refuse_standby(context, self._leader)
        taken = _Taken()
        reading = asyncio.create_task(_take_reports(loop, taken, context))
        reading.add_done_callback(lambda _: taken.news.set())
        try:
            while not (reading.done() and taken.acknowledged == taken.sequence):
                await taken.news.wait()
                taken.news.clear()
                sequence = taken.sequence
                if sequence > taken.acknowledged:
                    await loop.durable(taken.mark)
                    await context.write(outcome_pb2.ReportAck(sequence=sequence).SerializeToString())
                    taken.acknowledged = sequence
            reading.result()
        except NotLeading as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"not leading any more: {error}")
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Gap as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            await _end(reading)


class Gap(Exception):
    """A report is missing before this one."""


class _Taken:
    """The newest report that was applied, and how far the state was with it."""

    def __init__(self) -> None:
        self.sequence = 0
        self.mark = Mark()
        self.acknowledged = 0
        self.proxy: ProxyKey | None = None
        self.news = asyncio.Event()


async def _take_reports(loop: ControlLoop, taken: _Taken, context: Context) -> None:
    while True:
        try:
            async with asyncio.timeout(IDLE_REPORTS_S):
                data = await context.read()
        except TimeoutError:
            return
        if not isinstance(data, bytes):
            return
        message = _parse(outcome_pb2.ReportBatch.FromString, data)
        try:
            batch = batch_from_wire(message)
        except WireError as error:
            raise BadMessage(str(error)) from None
        if taken.proxy not in (None, batch.proxy):
            raise BadMessage(f"the stream is of {taken.proxy}, the report of {batch.proxy}")
        if taken.sequence and batch.sequence > taken.sequence + 1:
            raise Gap(f"report {batch.sequence} came after {taken.sequence}: send again what is between")
        taken.mark = loop.take(batch)
        taken.proxy = batch.proxy
        taken.sequence = max(taken.sequence, batch.sequence)
        taken.news.set()
