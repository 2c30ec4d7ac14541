"""The gRPC and the HTTP server of a control process: addresses, ports, TLS, health and reflection."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

import grpc
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from narwhal.config import TlsConfig
from narwhal.daemon import StartError, bound, joined, listen
from narwhal.tls import TlsError, read_tls

GRACE_S = 0.3  # for streams to take their last message
HEALTH_LOOK_S = 0.25
SERVICES = ("narwhal.v1.PlacementService", "narwhal.v1.OutcomeService", "narwhal.v1.FleetService")


def advertised(address: str) -> str:
    """What others reach a listening address by: the host's name where it listens on all interfaces."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address


def credentials(tls: TlsConfig) -> grpc.ServerCredentials | None:
    """Mutual TLS of the gRPC services; None without it. Raises StartError."""
    if tls.files is None:
        return None
    try:
        read = read_tls(tls.files)
    except TlsError as error:
        raise StartError(str(error), 2) from error
    return grpc.ssl_server_credentials([(read.key, read.cert)], root_certificates=read.ca, require_client_auth=True)


class Servers:
    """The gRPC and the HTTP server of one process."""

    def __init__(self) -> None:
        self._grpc = grpc.aio.server(
            options=(
                # Two processes on one port would each get half of the calls.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            )
        )
        self._health = health.aio.HealthServicer()
        self._runner: web.AppRunner | None = None
        self.grpc_address = ""
        self.http_address = ""

    def bind_grpc(self, address: tuple[str, int], secure: grpc.ServerCredentials | None) -> None:
        """Takes the port; nothing is answered before `start`. Raises StartError."""
        host, port = address
        listen(address, "gRPC").close()  # the library says less about what is wrong
        wanted = joined(host, port)
        try:
            if secure is not None:
                port = self._grpc.add_secure_port(wanted, secure)
            else:
                port = self._grpc.add_insecure_port(wanted)
        except RuntimeError as error:
            raise StartError(f"cannot listen on {wanted} (gRPC): {error}") from error
        self.grpc_address = joined(host, port)

    async def start(self, handlers: list[grpc.GenericRpcHandler]) -> None:
        """Answers gRPC from now on."""
        self._grpc.add_generic_rpc_handlers(tuple(handlers))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        await self._grpc.start()

    async def start_http(self, application: web.Application, address: tuple[str, int]) -> None:
        """Answers HTTP from now on. Raises StartError."""
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=GRACE_S)
        await self._runner.setup()
        listener = listen(address, "HTTP")
        await web.SockSite(self._runner, listener).start()
        self.http_address = joined(*bound(listener))

    async def follow(self, control_ready: Callable[[], bool]) -> None:
        """Keeps the health service up with `control_ready`, until cancelled.

        The process itself (the empty name) is serving for as long as it answers; its services are while it is
        control-ready.
        """
        told: bool | None = None
        while True:
            ready = control_ready()
            if ready is not told:
                told = ready
                answer = health_pb2.HealthCheckResponse
                status = answer.SERVING if ready else answer.NOT_SERVING
                # A watcher that does not read must not hold up the others.
                setting = [self._health.set(name, status) for name in SERVICES]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.gather(*setting), HEALTH_LOOK_S)
            await asyncio.sleep(HEALTH_LOOK_S)

    async def stop(self) -> None:
        """Ends both servers; streams get a moment for their last message."""
        await self._grpc.stop(GRACE_S)
        if self._runner is not None:
            await self._runner.cleanup()
