"""What control decided and when, from its own streams: placements and events, with instants of the monotonic clock."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from narwhal._pb import fleet_pb2, fleet_pb2_grpc, placement_pb2, placement_pb2_grpc

EVIDENCE_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """One engine in a placement that control published."""

    at: float
    engine: str
    serves: bool
    holds: tuple[str, ...]
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """One event of control."""

    at: float
    kind: str
    engine: str
    proxy: str
    message: str
    fields: dict[str, str]


@dataclass(kw_only=True)
class Watch:
    """Everything that was published and told since the watch began."""

    placed: list[Placed] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    counted: list[tuple[float, str, int]] = field(default_factory=list)  # instant, engine, failures counted until then
    suspect_proxies: set[str] = field(default_factory=set)

    def serves(self, engine: str) -> bool:
        """Whether the newest placement gives work to the engine."""
        return next((p.serves for p in reversed(self.placed) if p.engine == engine), False)

    def out_at(self, engine: str, *, since: float) -> float | None:
        """When it first was published without work since then."""
        return next((p.at for p in self.placed if p.engine == engine and p.at >= since and not p.serves), None)

    def back_at(self, engine: str, *, since: float) -> float | None:
        """When it first was published with work since then; at once when it had some all the time."""
        before = [p for p in self.placed if p.engine == engine and p.at < since]
        if before and before[-1].serves:
            return since
        return next((p.at for p in self.placed if p.engine == engine and p.at >= since and p.serves), None)

    def held(self, engine: str, hold: str, *, since: float) -> float:
        """Seconds for which the engine carried that hold, as published since then."""
        total, began = 0.0, None
        for p in self.placed:
            if p.engine != engine or p.at < since:
                continue
            if hold in p.holds and began is None:
                began = p.at
            elif hold not in p.holds and began is not None:
                total, began = total + p.at - began, None
        return total if began is None else total + time.monotonic() - began

    def events(self, *, since: float, engine: str = "") -> list[Told]:
        """Events since then, of one engine when it is given."""
        return [t for t in self.told if t.at >= since and engine in ("", t.engine)]

    def first_counted(self, *, since: float) -> float | None:
        """When control first counted a failure since then."""
        return next((at for at, _, _ in self.counted if at >= since), None)


@contextlib.asynccontextmanager
async def watching(control: str) -> AsyncIterator[Watch]:
    """Watches the control process at this gRPC address until the block ends."""
    watch = Watch()
    async with grpc.aio.insecure_channel(control, options=[("grpc.enable_http_proxy", 0)]) as channel:
        tasks = [asyncio.create_task(each(channel, watch)) for each in (_placements, _events, _evidence)]
        try:
            yield watch
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    for result in ended:
        if isinstance(result, Exception):
            raise result


async def _placements(channel: grpc.aio.Channel, watch: Watch) -> None:
    stub = placement_pb2_grpc.PlacementServiceStub(channel)
    call = stub.WatchPlacement(placement_pb2.WatchPlacementRequest(name="watching"))
    try:
        async for message in call:
            now = time.monotonic()
            which = message.WhichOneof("message")
            if which in ("snapshot", "change"):
                content = getattr(message, which)
                for e in content.engines:
                    placed = Placed(
                        at=now, engine=e.id, serves=bool(e.phases), holds=tuple(e.holds), version=content.version
                    )
                    watch.placed.append(placed)
    finally:
        call.cancel()


async def _events(channel: grpc.aio.Channel, watch: Watch) -> None:
    call = fleet_pb2_grpc.FleetServiceStub(channel).WatchEvents(fleet_pb2.WatchEventsRequest(follow=True))
    try:
        async for e in call:
            told = Told(
                at=time.monotonic(),
                kind=e.kind,
                engine=e.engine_id,
                proxy=e.proxy,
                message=e.message,
                fields=dict(e.fields),
            )
            watch.told.append(told)
    finally:
        call.cancel()


async def _evidence(channel: grpc.aio.Channel, watch: Watch) -> None:
    stub = fleet_pb2_grpc.FleetServiceStub(channel)
    known: dict[str, int] = {}
    while True:
        status = await stub.GetStatus(fleet_pb2.GetStatusRequest(), timeout=30)
        now = time.monotonic()
        for engine in status.engines:
            total = sum(e.total for e in engine.evidence)
            if total > known.get(engine.id, 0):
                watch.counted.append((now, engine.id, total))
            known[engine.id] = total
        proxies = await stub.ListProxies(fleet_pb2.ListProxiesRequest(), timeout=30)
        watch.suspect_proxies |= {p.proxy.id for p in proxies.proxies if p.suspect}
        await asyncio.sleep(EVIDENCE_EVERY_S)
