"""The active as a standby calls it. The only client of the control service within it."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from narwhal._pb import fleet_pb2, fleet_pb2_grpc
from narwhal.config import TlsConfig
from narwhal.control.yielding import Said
from narwhal.tls import read_tls

Dial = Callable[[str], grpc.aio.Channel]

_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # The library's own pauses grow to two minutes: an active that comes back is to be seen at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 250),
)


class PeerError(Exception):
    """No usable answer. The words say what came instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """How the active is."""

    control_ready: bool
    reason: str  # why it is not; empty when it is
    prove: str  # what to leave in the store; empty for nothing


def dialler(tls: TlsConfig) -> Dial:
    """How other control processes are called: over TLS where this one serves it. Raises TlsError."""
    if tls.files is None:
        return lambda address: grpc.aio.insecure_channel(address, options=_CHANNEL)
    read = read_tls(tls.files)
    credentials = grpc.ssl_channel_credentials(read.ca, read.key, read.cert)
    return lambda address: grpc.aio.secure_channel(address, credentials, options=_CHANNEL)


class Peer:
    """One control process at its gRPC address. Close it."""

    def __init__(self, address: str, dial: Dial) -> None:
        self.address = address
        self._channel = dial(address)
        self._fleet = fleet_pb2_grpc.FleetServiceStub(self._channel)

    async def stand_by(self, said: Said, *, timeout_s: float) -> Heard:
        """Tells what this standby has, and hears how the active is. Raises PeerError."""
        request = fleet_pb2.StandByRequest(
            holder=said.holder,
            address=said.address,
            copy_epoch=said.copy_epoch,
            copy_written_at=said.copy_written_at,
            problem=said.problem,
        )
        try:
            answer = await self._fleet.StandBy(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise PeerError(_words(error)) from error
        return Heard(control_ready=answer.control_ready, reason=answer.reason, prove=answer.prove)

    async def ask_to_yield(self, holder: str, *, timeout_s: float) -> int:
        """Asks the active to yield to `holder`. Returns the epoch that is over. Raises PeerError with its reason."""
        try:
            answer = await self._fleet.Yield(fleet_pb2.YieldRequest(standby=holder), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise PeerError(_words(error)) from error
        return answer.epoch

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close()


def _words(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return error.details() or "refused"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return f"no answer: {(error.details() or error.code().name).rpartition(': ')[2].lower()}"
