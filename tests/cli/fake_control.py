"""A control service on a real loopback port that says what a test tells it to."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from narwhal._pb import fleet_pb2, placement_pb2


class FakeControl:
    """Serves from the moment its block is entered until it is left, or until `stop`. Calls that it does not have are
    answered UNIMPLEMENTED."""

    def __init__(self) -> None:
        self.status = fleet_pb2.FleetStatus(fleet="demo", model="tiny", ready=True, control_ready=True, epoch=3)
        self.proxies: list[fleet_pb2.ProxyStatus] = []
        self.standby_of: str | None = None  # when set, it does not lead and names this address; may be empty
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.silent = threading.Event()  # while set, no call is answered
        self.asked_after: list[int] = []  # `after` of every WatchEvents call
        self.explanation = fleet_pb2.Explanation()
        self.told: list[str] = []  # what commands bring about
        self.verdict = "pass"
        self.ejections: list[fleet_pb2.EjectEngineRequest] = []
        self.probes: list[fleet_pb2.ProbeEngineRequest] = []
        self.roles: list[fleet_pb2.SetRoleRequest] = []
        self.drains: list[fleet_pb2.DrainEnginesRequest] = []
        self.undrains: list[fleet_pb2.UndrainEnginesRequest] = []
        self.forgotten: list[fleet_pb2.ForgetProxyRequest] = []
        self.progress: list[Any] = []  # what a drain or a return tells as it goes
        self.failed_gates: dict[str, tuple[str, str]] = {}  # engine → check, words: how a return ends
        self.lasting = threading.Event()  # while set, a drain does not end
        self.probing = threading.Event()  # while set, a probe does not end
        self.command_error: grpc.StatusCode | None = None  # a command's answer, with the words of `told`
        self.epochs: list[fleet_pb2.EpochEntry] = []
        self.yields: list[fleet_pb2.YieldRequest] = []
        self.heir: FakeControl | None = None  # leads once this one has yielded
        self.leads_no_more = 0  # so many commands find that it does not lead
        self.blinks = 0  # so many questions for the status find that it does not lead
        self._watching = 0  # open WatchPlacement calls
        self._events: list[fleet_pb2.Event] = []
        self._placements: list[placement_pb2.PlacementMessage] = []
        self._news = threading.Condition()
        self._stopped = False
        self._server = grpc.server(ThreadPoolExecutor(16))
        fleet, placement = fleet_pb2, placement_pb2
        services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {
            "FleetService": {
                "GetStatus": grpc.unary_unary_rpc_method_handler(
                    self._get_status, fleet.GetStatusRequest.FromString, fleet.FleetStatus.SerializeToString
                ),
                "ListProxies": grpc.unary_unary_rpc_method_handler(
                    self._list_proxies, fleet.ListProxiesRequest.FromString, fleet.ListProxiesResponse.SerializeToString
                ),
                "ExplainEngine": grpc.unary_unary_rpc_method_handler(
                    self._explain, fleet.ExplainEngineRequest.FromString, fleet.Explanation.SerializeToString
                ),
                "EjectEngine": grpc.unary_unary_rpc_method_handler(
                    self._eject, fleet.EjectEngineRequest.FromString, fleet.EjectEngineResponse.SerializeToString
                ),
                "ProbeEngine": grpc.unary_unary_rpc_method_handler(
                    self._probe, fleet.ProbeEngineRequest.FromString, fleet.ProbeEngineResponse.SerializeToString
                ),
                "SetRole": grpc.unary_unary_rpc_method_handler(
                    self._set_role, fleet.SetRoleRequest.FromString, fleet.SetRoleResponse.SerializeToString
                ),
                "DrainEngines": grpc.unary_stream_rpc_method_handler(
                    self._drain, fleet.DrainEnginesRequest.FromString, fleet.DrainProgress.SerializeToString
                ),
                "UndrainEngines": grpc.unary_stream_rpc_method_handler(
                    self._undrain, fleet.UndrainEnginesRequest.FromString, fleet.UndrainProgress.SerializeToString
                ),
                "GetHistory": grpc.unary_unary_rpc_method_handler(
                    self._get_history, fleet.GetHistoryRequest.FromString, fleet.GetHistoryResponse.SerializeToString
                ),
                "Yield": grpc.unary_unary_rpc_method_handler(
                    self._yield, fleet.YieldRequest.FromString, fleet.YieldResponse.SerializeToString
                ),
                "ForgetProxy": grpc.unary_unary_rpc_method_handler(
                    self._forget, fleet.ForgetProxyRequest.FromString, fleet.ForgetProxyResponse.SerializeToString
                ),
                "WatchEvents": grpc.unary_stream_rpc_method_handler(
                    self._watch_events, fleet.WatchEventsRequest.FromString, fleet.Event.SerializeToString
                ),
            },
            "PlacementService": {
                "WatchPlacement": grpc.unary_stream_rpc_method_handler(
                    self._watch_placement,
                    placement.WatchPlacementRequest.FromString,
                    placement.PlacementMessage.SerializeToString,
                ),
            },
        }
        for service, calls in services.items():
            handler = grpc.method_handlers_generic_handler(f"narwhal.v1.{service}", calls)
            self._server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> "FakeControl":
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends every call and the server, at once."""
        with self._news:
            self._stopped = True
            self._news.notify_all()
        self.silent.clear()
        self._server.stop(0).wait(30)

    def tell(self, event: fleet_pb2.Event) -> None:
        """A new event."""
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    def publish(self, **message: Any) -> None:
        """The next placement message for every observer: `snapshot=`, `change=` and so on."""
        with self._news:
            self._placements.append(placement_pb2.PlacementMessage(**message))
            self._news.notify_all()

    def unwatched(self, timeout_s: float) -> bool:
        """Whether within this time no WatchPlacement call is open."""
        with self._news:
            return self._news.wait_for(lambda: not self._watching, timeout_s)

    def _get_status(self, request: fleet_pb2.GetStatusRequest, context: Any) -> fleet_pb2.FleetStatus:
        self._lead(context)
        if self.blinks:
            self.blinks -= 1
            self._not_active(context, "")
        return self.status

    def _list_proxies(self, request: fleet_pb2.ListProxiesRequest, context: Any) -> fleet_pb2.ListProxiesResponse:
        self._lead(context)
        return fleet_pb2.ListProxiesResponse(proxies=self.proxies)

    def _explain(self, request: fleet_pb2.ExplainEngineRequest, context: Any) -> fleet_pb2.Explanation:
        self._lead(context)
        if request.engine_id != self.explanation.engine.id:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no engine {request.engine_id} in this fleet")
        return self.explanation

    def _eject(self, request: fleet_pb2.EjectEngineRequest, context: Any) -> fleet_pb2.EjectEngineResponse:
        self.ejections.append(request)
        self._command(context)
        return fleet_pb2.EjectEngineResponse(told=self.told)

    def _set_role(self, request: fleet_pb2.SetRoleRequest, context: Any) -> fleet_pb2.SetRoleResponse:
        self.roles.append(request)
        self._command(context)
        return fleet_pb2.SetRoleResponse(told=self.told)

    def _probe(self, request: fleet_pb2.ProbeEngineRequest, context: Any) -> fleet_pb2.ProbeEngineResponse:
        self.probes.append(request)
        self._command(context)
        while self.probing.is_set() and context.is_active() and not self._stopped:
            with self._news:
                self._news.wait(0.05)
        return fleet_pb2.ProbeEngineResponse(verdict="" if request.dry_run else self.verdict, told=self.told)

    def _drain(self, request: fleet_pb2.DrainEnginesRequest, context: Any) -> Iterator[fleet_pb2.DrainProgress]:
        self.drains.append(request)
        self._command(context)
        yield from self.progress
        while self.lasting.is_set() and context.is_active() and not self._stopped:
            with self._news:
                self._news.wait(0.05)

    def _undrain(self, request: fleet_pb2.UndrainEnginesRequest, context: Any) -> Iterator[fleet_pb2.UndrainProgress]:
        self.undrains.append(request)
        self._command(context)
        yield from self.progress
        if self.failed_gates:
            packed = [any_pb2.Any(), any_pb2.Any()]
            packed[0].Pack(error_details_pb2.ErrorInfo(reason="GATE_FAILED", domain="narwhal"))
            packed[1].Pack(
                error_details_pb2.PreconditionFailure(
                    violations=[
                        error_details_pb2.PreconditionFailure.Violation(type=check, subject=engine, description=words)
                        for engine, (check, words) in self.failed_gates.items()
                    ]
                )
            )
            status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="all in one", details=packed)
            context.abort_with_status(rpc_status.to_status(status))

    def _forget(self, request: fleet_pb2.ForgetProxyRequest, context: Any) -> fleet_pb2.ForgetProxyResponse:
        self.forgotten.append(request)
        self._command(context)
        return fleet_pb2.ForgetProxyResponse(told=self.told)

    def _get_history(self, request: fleet_pb2.GetHistoryRequest, context: Any) -> fleet_pb2.GetHistoryResponse:
        self._lead(context)
        return fleet_pb2.GetHistoryResponse(epochs=self.epochs)

    def _yield(self, request: fleet_pb2.YieldRequest, context: Any) -> fleet_pb2.YieldResponse:
        self.yields.append(request)
        self._command(context)
        address = self.heir.address if self.heir is not None else "127.0.0.1:1"
        if not request.dry_run:
            self.standby_of = address
            if self.heir is not None:
                self.heir.standby_of = None
        return fleet_pb2.YieldResponse(epoch=self.status.epoch, standby="c2", address=address)

    def _command(self, context: Any) -> None:
        self._lead(context)
        if self.leads_no_more:
            self.leads_no_more -= 1
            self._not_active(context, "")
        if self.command_error is not None:
            context.abort(self.command_error, *self.told)

    def _watch_events(self, request: fleet_pb2.WatchEventsRequest, context: Any) -> Iterator[fleet_pb2.Event]:
        self._lead(context)
        self.asked_after.append(request.after)
        reached = any(e.sequence >= request.after for e in self._events)
        after = request.after if reached else 0  # else it is a number of another process
        yield from (e for e in self._all(self._events, context, request.follow) if e.sequence > after)

    def _watch_placement(
        self, request: placement_pb2.WatchPlacementRequest, context: Any
    ) -> Iterator[placement_pb2.PlacementMessage]:
        self._lead(context)
        self._watchers(+1)
        try:
            yield from self._all(self._placements, context, True)
        finally:
            self._watchers(-1)

    def _watchers(self, more: int) -> None:
        with self._news:
            self._watching += more
            self._news.notify_all()

    def _all(self, items: list[Any], context: Any, follow: bool) -> Iterator[Any]:
        context.add_callback(self._wake)
        at = 0
        while True:
            with self._news:
                while follow and at >= len(items) and context.is_active() and not self._stopped:
                    self._news.wait()
                if at >= len(items) or not context.is_active():
                    return
                item = items[at]
            at += 1
            yield item

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def _lead(self, context: Any) -> None:
        while self.silent.is_set() and context.is_active() and not self._stopped:
            with self._news:
                self._news.wait(0.05)
        if self.refusal is not None:
            context.abort(*self.refusal)
        if self.standby_of is not None:
            self._not_active(context, self.standby_of)

    @staticmethod
    def _not_active(context: Any, active: str) -> NoReturn:
        packed = any_pb2.Any()
        packed.Pack(
            error_details_pb2.ErrorInfo(
                reason="NOT_ACTIVE", domain="narwhal", metadata={"active": active, "holder": "c2"}
            )
        )
        answer = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="standby", details=[packed])
        context.abort_with_status(rpc_status.to_status(answer))
        raise AssertionError("abort_with_status raises")
