"""A control service that says exactly what a test tells it to, over real gRPC on loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc

from narwhal._pb import outcome_pb2, outcome_pb2_grpc, placement_pb2, placement_pb2_grpc
from narwhal.placement import EngineEntry, Placement
from narwhal.reports import Batch
from narwhal.vocabulary import Phase
from narwhal.wire import batch_from_wire, snapshot_to_wire
from tests.ports import free_ports

WAIT_S = 60.0  # a bound, not a pace: shared machines stop a process for tens of seconds now and then


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Wait until `condition` holds; fail when it does not in time."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110  what is waited for has no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {WAIT_S:g} s: {what or condition}") from None


def dial(address: str) -> grpc.aio.Channel:
    """As the product dials, without keep-alive."""
    return grpc.aio.insecure_channel(
        address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    )


def entry(name: str, role: Phase = Phase.PREFILL, **changes: Any) -> EngineEntry:
    """An eligible engine."""
    values: dict[str, Any] = {
        "id": name,
        "url": f"http://127.0.0.1/{name}",
        "role": role,
        "phases": frozenset({role}),
        "incarnation": 1,
    }
    return EngineEntry(**(values | changes))


def placement(epoch: int, version: int, *engines: EngineEntry, closed: str = "") -> Placement:
    """A placement; one engine of each role unless told otherwise."""
    chosen = engines or (entry("p1"), entry("d1", Phase.DECODE))
    return Placement(epoch=epoch, version=version, closed=closed, engines={e.id: e for e in chosen})


def snapshot(value: Placement) -> placement_pb2.PlacementMessage:
    """As it goes over the wire."""
    return placement_pb2.PlacementMessage(snapshot=snapshot_to_wire(value, now=0.0))


def heartbeat(epoch: int, version: int) -> placement_pb2.PlacementMessage:
    """Proof of life."""
    return placement_pb2.PlacementMessage(heartbeat=placement_pb2.Heartbeat(epoch=epoch, version=version))


class Stream:
    """One proxy's placement stream as control sees it."""

    def __init__(self) -> None:
        self.received: list[placement_pb2.ProxyMessage] = []
        self.out: asyncio.Queue[placement_pb2.PlacementMessage | None] = asyncio.Queue()
        self.over = False

    def send(self, *messages: placement_pb2.PlacementMessage | Placement) -> None:
        """Say this."""
        for message in messages:
            self.out.put_nowait(snapshot(message) if isinstance(message, Placement) else message)

    def end(self) -> None:
        """End the stream after what was said."""
        self.out.put_nowait(None)

    @property
    def hello(self) -> placement_pb2.Hello:
        return self.received[0].hello

    @property
    def acks(self) -> list[tuple[int, int]]:
        return [(m.ack.epoch, m.ack.version) for m in self.received if m.HasField("ack")]

    @property
    def nacks(self) -> list[str]:
        return [m.nack.reason for m in self.received if m.HasField("nack")]

    @property
    def residents(self) -> list[dict[str, int]]:
        return [{r.engine_id: r.legs for r in m.ack.resident} for m in self.received if m.HasField("ack")]

    @property
    def goodbyes(self) -> list[placement_pb2.Goodbye]:
        return [m.goodbye for m in self.received if m.HasField("goodbye")]


class FakeControl(placement_pb2_grpc.PlacementServiceServicer, outcome_pb2_grpc.OutcomeServiceServicer):
    """Start with `async with`. `on_stream` runs at each new stream; `acknowledge` decides what a batch is answered."""

    def __init__(self, on_stream: Callable[[Stream], None] | None = None) -> None:
        self.streams: list[Stream] = []
        self.handlers = 0  # open on the server now
        self.on_stream = on_stream
        self.batches: list[Batch] = []
        self.report_streams: list[list[Batch]] = []
        self.stored = 0  # highest sequence acknowledged
        self.acknowledging = True
        self.ending = asyncio.Event()  # set: the report streams that are open end well, once
        self.cut_after = 0  # end a report stream after so many batches, 0 for never
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> "FakeControl":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; at the address of before when there was one."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        placement_pb2_grpc.add_PlacementServiceServicer_to_server(self, server)
        outcome_pb2_grpc.add_OutcomeServiceServicer_to_server(self, server)
        # A port that nobody else takes while it is away.
        self.address = self.address or f"127.0.0.1:{free_ports(1)[0]}"
        server.add_insecure_port(self.address)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """End every stream as a killed process does, as far as one process can."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    @property
    def newest(self) -> Stream:
        return self.streams[-1]

    async def StreamPlacement(
        self, request_iterator: AsyncIterator[placement_pb2.ProxyMessage], context: Any
    ) -> AsyncIterator[placement_pb2.PlacementMessage]:
        stream = Stream()
        self.handlers += 1
        reader = asyncio.create_task(self._listen(stream, request_iterator))
        try:
            await until(lambda: stream.received, "hello")
            self.streams.append(stream)
            if self.on_stream is not None:
                self.on_stream(stream)
            while (message := await stream.out.get()) is not None:
                yield message
        finally:
            stream.over = True
            self.handlers -= 1
            reader.cancel()

    async def _listen(self, stream: Stream, messages: AsyncIterator[placement_pb2.ProxyMessage]) -> None:
        async for message in messages:
            stream.received.append(message)
            if message.HasField("goodbye"):
                stream.end()
        stream.end()

    def WatchPlacement(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("proxies do not watch")

    async def ReportOutcomes(
        self, request_iterator: AsyncIterator[outcome_pb2.ReportBatch], context: Any
    ) -> AsyncIterator[outcome_pb2.ReportAck]:
        seen: list[Batch] = []
        self.report_streams.append(seen)
        reading = aiter(request_iterator)
        while (message := await self._next_report(reading)) is not None:
            batch = batch_from_wire(message)
            seen.append(batch)
            self.batches.append(batch)
            if self.cut_after and len(seen) >= self.cut_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            if self.acknowledging:
                self.stored = max(self.stored, batch.sequence)
                yield outcome_pb2.ReportAck(sequence=self.stored)

    async def _next_report(self, reading: AsyncIterator[outcome_pb2.ReportBatch]) -> outcome_pb2.ReportBatch | None:
        """The next batch; None when the proxy has ended, or the test wants this stream to end."""
        message = asyncio.ensure_future(anext(reading, None))
        ending = asyncio.ensure_future(self.ending.wait())
        try:
            await asyncio.wait({message, ending}, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return message.result()
            self.ending.clear()
            return None
        finally:
            message.cancel()
            ending.cancel()
