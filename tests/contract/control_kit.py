"""A control process in this process: real gRPC on loopback, engines that answer as told, a model store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
from aiohttp import web

from narwhal._pb import fleet_pb2_grpc, outcome_pb2, outcome_pb2_grpc, placement_pb2, placement_pb2_grpc
from narwhal.clock import RealClock
from narwhal.config import TlsConfig
from narwhal.control.core.settings import CoreSettings, EngineSpec
from narwhal.control.endpoints import control_http
from narwhal.control.engine_client import ProbeSettings
from narwhal.control.fleet_service import FleetService
from narwhal.control.leader import Leader, Runners, stage_runners
from narwhal.control.metrics import ControlMetrics
from narwhal.control.observe import Observer
from narwhal.control.peer import dialler
from narwhal.control.plan import Plan
from narwhal.control.publisher import Publisher
from narwhal.control.servers import Servers
from narwhal.control.service import OutcomeService, PlacementService
from narwhal.control.standby import Standby
from narwhal.control.store.base import Store
from narwhal.control.yielding import Yielding
from narwhal.vocabulary import Phase
from tests.contract.model_store import Medium, ModelStore

T = TypeVar("T")
BOUND_S = 60.0  # nothing here takes longer: shared machines stop a process for tens of seconds now and then


class ShiftedClock(RealClock):
    """The machine's clocks, and a hand on them."""

    def __init__(self) -> None:
        self.monotonic_shift = 0.0
        self.boottime_shift = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.monotonic_shift

    def boottime(self) -> float:
        return super().boottime() + self.boottime_shift


@dataclass
class Engines:
    """Engines behind one port, told apart by a path below which each has its API."""

    base: str = ""
    status: dict[str, int] = field(default_factory=dict)  # of /health
    models: dict[str, list[str]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)  # (engine, path)
    authorization: list[str] = field(default_factory=list)
    hang: set[str] = field(default_factory=set)
    versions: dict[str, str] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)
    transfers: list[tuple[str, str]] = field(default_factory=list)  # (producer, consumer) of every decode leg
    documents: dict[str, Any] = field(default_factory=dict)  # attestation documents, below /documents/
    strangers: set[tuple[str, str]] = field(default_factory=set)  # pairs between which no KV goes over

    async def answer(self, request: web.Request) -> web.Response:  # noqa: PLR0911  one return a route
        """Any request of any engine."""
        engine, path = request.match_info["engine"], "/" + request.match_info["path"]
        self.asked.append((engine, path))
        self.authorization.append(request.headers.get("Authorization", ""))
        if engine in self.hang:
            await asyncio.sleep(BOUND_S)
        if engine == "documents":
            document = self.documents.get(path.removeprefix("/"))
            return web.Response(status=404) if document is None else web.json_response(document)
        if path == "/health":
            return web.Response(status=self.status.get(engine, 200))
        if path == "/v1/models":
            return web.json_response({"data": [{"id": m} for m in self.models.get(engine, ["tiny"])]})
        if path == "/version":
            return web.json_response({"version": self.versions.get(engine, "1")})
        if path == "/metrics":
            return web.Response(text=f"process_start_time_seconds {self.started_at.get(engine, 1000.0)}\n")
        if path == "/v1/completions":
            return await self._complete(engine, await request.json())
        return web.Response(status=404)

    async def _complete(self, engine: str, body: dict[str, Any]) -> web.Response:
        """A completion, a prefill leg or a decode leg: all work, but for pairs that do not."""
        transfer = body.get("kv_transfer_params")
        if transfer is not None and transfer.get("do_remote_decode"):
            handoff = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": engine,
                "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 1, "remote_block_ids": [[1]],
            }  # fmt: skip
            return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": handoff})
        if transfer is not None:
            pair = (transfer["remote_engine_id"], engine)
            self.transfers.append(pair)
            if pair in self.strangers:
                return web.Response(status=500, text="no KV came")
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "a"}]})
        event = 'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
        text = event * int(body["max_tokens"]) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")


@asynccontextmanager
async def engines() -> AsyncIterator[Engines]:
    """Engines on a free port."""
    served = Engines()
    application = web.Application()
    application.router.add_route("*", "/{engine}/{path:.*}", served.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield served
    finally:
        await runner.cleanup()


def plan_of(served: Engines, roles: Mapping[str, Phase], *, name: str = "fleet", interval_s: float = 0.05) -> Plan:
    """What the control process works by."""
    specs = tuple(EngineSpec(id=e, url=f"{served.base}/{e}", role=role) for e, role in roles.items())
    return Plan(
        core=CoreSettings(
            name=name, model="tiny", engines=specs, monitor_interval_s=interval_s, readmit_every=1, ramp_s=0.0
        ),
        probes=ProbeSettings(connections=8, connect_timeout_s=2.0, pool_timeout_s=2.0, keepalive_s=4.0),
        proxy_settings=b'{"name": "fleet"}',
        interval_s=interval_s,
        stage_timeout_s=5.0,
        poll_s=0.02,
        takeover_after=4,
        max_handoff_age_s=30.0,
    )


ROLES = {"p0": Phase.PREFILL, "d0": Phase.DECODE}


@dataclass
class Control:
    """A running control process and what tests want of it."""

    leader: Leader
    publisher: Publisher
    observer: Observer
    clock: ShiftedClock
    engines: Engines
    address: str
    http: str
    channel: grpc.aio.Channel
    metrics: ControlMetrics
    store: Store

    @property
    def placement(self) -> "placement_pb2_grpc.PlacementServiceAsyncStub":
        """The placement service's client."""
        return placement_pb2_grpc.PlacementServiceStub(self.channel)

    @property
    def outcomes(self) -> "outcome_pb2_grpc.OutcomeServiceAsyncStub":
        """The outcome service's client."""
        return outcome_pb2_grpc.OutcomeServiceStub(self.channel)

    @property
    def fleet(self) -> "fleet_pb2_grpc.FleetServiceAsyncStub":
        """The operators' client."""
        return fleet_pb2_grpc.FleetServiceStub(self.channel)

    def told(self) -> list[str]:
        """The kinds of everything that was told so far."""
        return [str(entry.record.kind) for entry in self.observer.after(0)]

    def serving(self) -> set[str]:
        """Engines that the published placement lets serve."""
        placement = self.publisher.placement
        return {e.id for e in placement.engines.values() if e.phases} if placement is not None else set()


@asynccontextmanager
async def control(
    served: Engines,
    *,
    medium: Medium | None = None,
    store: Store | None = None,
    plan: Plan | None = None,
    holder: str = "a",
    resume: bool = False,
    runners: Runners = stage_runners,
) -> AsyncIterator[Control]:
    """A control process, ended as SIGTERM ends it."""
    clock, servers = ShiftedClock(), Servers()
    publisher, observer = Publisher(clock), Observer(clock)
    servers.bind_grpc(("127.0.0.1", 0), None)
    kept: Store = store if store is not None else ModelStore(medium if medium is not None else Medium())
    leader = Leader(
        plan=plan if plan is not None else plan_of(served, ROLES),
        store=kept,
        clock=clock,
        publisher=publisher,
        observer=observer,
        holder=holder,
        address=servers.grpc_address,
        resume=resume,
        runners=runners,
    )
    metrics = ControlMetrics(leader, publisher, observer, clock)
    yielding = Yielding(leader, store=kept, clock=clock, record=observer.record)
    standby = Standby(leader, store=kept, clock=clock, record=observer.record, dial=dialler(TlsConfig()))
    await servers.start_http(control_http(leader, metrics.render), ("127.0.0.1", 0))
    await servers.start(
        [
            PlacementService(leader, publisher, fleet=leader.plan.core.name).handlers(),
            OutcomeService(leader).handlers(),
            FleetService(leader, publisher, observer, clock, yielding).handlers(),
        ]
    )
    work = [asyncio.create_task(each) for each in (leader.run(), publisher.run(), standby.run())]
    channel = grpc.aio.insecure_channel(
        servers.grpc_address, options=(("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    )
    try:
        yield Control(
            leader=leader,
            publisher=publisher,
            observer=observer,
            clock=clock,
            engines=served,
            address=servers.grpc_address,
            http=f"http://{servers.http_address}",
            channel=channel,
            metrics=metrics,
            store=kept,
        )
    finally:
        await leader.stop()
        await channel.close()
        await servers.stop()
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await kept.close()


async def until(condition: Callable[[], T], *, what: str = "") -> T:
    """The condition's value as soon as it is true; fails after a bound."""
    deadline = asyncio.get_running_loop().time() + BOUND_S
    while not (value := condition()):
        assert asyncio.get_running_loop().time() < deadline, f"did not come true: {what or condition}"
        await asyncio.sleep(0.005)
    return value


async def soon(awaitable: Awaitable[T]) -> T:
    """The result, within a bound."""
    return await asyncio.wait_for(asyncio.ensure_future(awaitable), BOUND_S)


def identity(name: str = "proxy", *, slot: int = 0, boot: int = 1) -> placement_pb2.ProxyIdentity:
    """A proxy."""
    return placement_pb2.ProxyIdentity(id=name, slot=slot, boot=boot)


async def until_answer(ask: Callable[[], Awaitable[T]], right: Callable[[T], object]) -> T:
    """The answer, asked for until it is right; fails after a bound."""
    deadline = asyncio.get_running_loop().time() + BOUND_S
    while not right(answer := await soon(ask())):
        assert asyncio.get_running_loop().time() < deadline, f"never right: {answer}"
        await asyncio.sleep(0.005)
    return answer


async def drain(call: Any) -> list[Any]:
    """Everything that is still to be read of a call, to its end."""
    messages = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (message := await soon(call.read())) is not grpc.aio.EOF:
            messages.append(message)
    return messages


class Proxy:
    """A proxy's placement stream, by hand. Use as a context: it cancels its call, as ours do."""

    def __init__(self, process: Control, who: placement_pb2.ProxyIdentity | None = None, **hello: object) -> None:
        self.who = who if who is not None else identity()
        self.call = process.placement.StreamPlacement()
        self._hello = placement_pb2.Hello(proxy=self.who, address="10.0.0.1:8000", pid=7, **hello)  # type: ignore[arg-type]

    async def __aenter__(self) -> "Proxy":
        await soon(self.call.write(placement_pb2.ProxyMessage(hello=self._hello)))
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self.call.code()

    async def read(self) -> placement_pb2.PlacementMessage:
        """The next message. Raises EOFError at the end of the stream."""
        message = await soon(self.call.read())
        if not isinstance(message, placement_pb2.PlacementMessage):
            raise EOFError
        return message

    async def next(self, *kinds: str) -> placement_pb2.PlacementMessage:
        """The next message of one of these kinds."""
        while (message := await self.read()).WhichOneof("message") not in kinds:
            pass
        return message

    async def ack(self, epoch: int, version: int, **legs: int) -> None:
        """Acknowledges."""
        resident = [placement_pb2.Residency(engine_id=e, legs=n) for e, n in legs.items()]
        ack = placement_pb2.Ack(epoch=epoch, version=version, resident=resident)
        await soon(self.call.write(placement_pb2.ProxyMessage(ack=ack)))

    async def nack(self, epoch: int, version: int, reason: str) -> None:
        """Refuses."""
        nack = placement_pb2.Nack(epoch=epoch, version=version, reason=reason)
        await soon(self.call.write(placement_pb2.ProxyMessage(nack=nack)))

    async def goodbye(self, reason: str, proxy: placement_pb2.ProxyIdentity | None = None) -> None:
        """Says goodbye."""
        goodbye = placement_pb2.Goodbye(reason=reason, proxy=proxy)
        await soon(self.call.write(placement_pb2.ProxyMessage(goodbye=goodbye)))

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Reads to the end of the stream; its status."""
        with contextlib.suppress(EOFError, grpc.aio.AioRpcError):
            while True:
                await self.read()
        return await soon(self.call.code()), await soon(self.call.details()) or ""


def batch(sequence: int, who: placement_pb2.ProxyIdentity | None = None, *, served: int = 1) -> outcome_pb2.ReportBatch:
    """A report: so many requests served over p0 and d0."""

    def run(engine: str, phase: placement_pb2.Phase, outcome: outcome_pb2.LegOutcome) -> outcome_pb2.OutcomeRun:
        return outcome_pb2.OutcomeRun(engine_id=engine, phase=phase, incarnation=1, outcome=outcome, count=served)

    return outcome_pb2.ReportBatch(
        proxy=who if who is not None else identity(),
        sequence=sequence,
        runs=[
            run("p0", placement_pb2.PHASE_PREFILL, outcome_pb2.LEG_OUTCOME_HANDOFF),
            run("d0", placement_pb2.PHASE_DECODE, outcome_pb2.LEG_OUTCOME_ANSWER_COMPLETE),
        ],
        requests=outcome_pb2.RequestCounts(served=served),
    )


def with_engines(plan: Plan, served: Engines, roles: Mapping[str, Phase]) -> Plan:
    """The plan of another fleet file."""
    return replace(plan, core=plan_of(served, roles).core)
