"""Placement streams as a proxy sees them: what the tests of streams share."""

from narwhal._pb import placement_pb2
from tests.contract.control_kit import (
    Proxy,
)


async def settled(proxy: Proxy) -> placement_pb2.Snapshot:
    """The proxy's first placement, acknowledged."""
    snapshot = (await proxy.next("snapshot")).snapshot
    await proxy.ack(snapshot.epoch, snapshot.version)
    return snapshot
