"""What must hold of whatever protobuf messages a peer sends: properties, each of one kind. Shared as
`engines.py` is."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import orjson
from google.protobuf.message import DecodeError, Message

from narwhal import wire
from narwhal._pb import outcome_pb2, placement_pb2
from narwhal.config import FleetFileError, ProxySettings
from narwhal.control.core.codec import decode as decoded
from narwhal.control.core.events import Input, ProxyAcked, ProxyConnected, ProxyLeft, ProxyNacked, Reported
from narwhal.control.core.handoff import from_document, to_document
from narwhal.control.journal import encoded
from narwhal.placement import Placement
from narwhal.proxy.held import Held, Refused
from narwhal.vocabulary import Phase
from narwhal.wire import WireError
from tests.core.rig import Rig, decode, prefill
from tests.fuzz.engines import worded

M = TypeVar("M", bound=Message)
LARGEST = 64 * 1024  # bytes of the stored document of four engines and a few proxies, whatever the peers sent
NOW = 1000.0


def read(kind: type[M], data: bytes) -> M:
    """A message as it is received. Raises WireError where it is none, as gRPC ends the call."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise WireError(str(error)) from None


# --- proxies → control ------------------------------------------------------------------------------------------------


def rig() -> Rig:
    return Rig(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))


def take(fleet: Rig, events: Iterable[Callable[[], Input]]) -> None:
    """Hands the core what the messages mean, as the services do; what means nothing is refused there. What was taken
    can be written into the journal and read again, and so can the state that came of it."""
    for event in events:
        try:
            read = event()
        except WireError as refused:
            worded(str(refused))
            continue
        assert decoded(type(read), orjson.loads(encoded(read))) == read
        fleet.send(read)
    fleet.publish()
    fleet.run_pass()
    state = fleet.fleet.save(now=fleet.now)
    stored = orjson.dumps(to_document(state, wall=1.0, epoch=1, holder="a"))
    assert from_document(orjson.loads(stored)).state == state
    assert len(stored) < LARGEST
    Rig(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"), saved=state)


def reported(data: bytes) -> Callable[[], Input]:
    """What the report stream makes of a message: the same when it is sent on."""

    def event() -> Input:
        batch = wire.batch_from_wire(read(outcome_pb2.ReportBatch, data))
        assert wire.batch_from_wire(wire.batch_to_wire(batch)) == batch
        return Reported(batch=batch)

    return event


def greeting(data: bytes) -> Callable[[], Input]:
    """What the placement stream makes of a message, with the identity that it names."""

    def event() -> Input:
        given_: Any = read(placement_pb2.ProxyMessage, data)
        edge = wire.proxy_from_wire(placement_pb2.ProxyIdentity(id="edge", boot=1))
        kind = given_.WhichOneof("message")
        if kind == "ack":
            residents = wire.residency_from_wire(list(given_.ack.resident))
            unread = wire.residency_from_wire(list(given_.ack.unread))
            return ProxyAcked(
                proxy=edge, epoch=given_.ack.epoch, version=given_.ack.version, resident=residents, unread=unread
            )
        if kind == "nack":
            return ProxyNacked(
                proxy=edge, epoch=given_.nack.epoch, version=given_.nack.version, reason=given_.nack.reason
            )
        if kind == "goodbye":
            return ProxyLeft(proxy=wire.proxy_from_wire(given_.goodbye.proxy), reason=given_.goodbye.reason)
        hello = given_.hello
        return ProxyConnected(
            proxy=wire.proxy_from_wire(hello.proxy),
            address=hello.address,
            pid=hello.pid,
            highest_epoch=hello.highest_epoch,
        )

    return event


def report(data: bytes) -> None:
    """One report."""
    take(rig(), [reported(data)])


def proxy_message(data: bytes) -> None:
    """One message of a placement stream."""
    take(rig(), [greeting(data)])


# --- control → proxies ------------------------------------------------------------------------------------------------


def serves(held: Held, draws: tuple[float, float] = (0.5, 0.5)) -> None:
    """A placement that was applied is one that legs can be placed by, now and when every quarantine is over."""
    placement = held.placement
    assert placement is not None
    for now in (NOW, NOW + 1e9):
        for phase in Phase:
            able = {e.id for e in placement.candidates(phase, now=now)}
            chosen = placement.choose(phase, now=now, load={}, draws=draws)
            assert (chosen is None) == (not able)
            assert chosen is None or chosen.id in able
    held.not_ready(now=NOW, max_age_s=600.0)
    again = wire.snapshot_from_wire(wire.snapshot_to_wire(placement, now=NOW), now=NOW)
    assert again.order == placement.order
    assert set(again.engines) == set(placement.engines)


def offered(held: Held, placement: Callable[[], Placement], draws: tuple[float, float] = (0.5, 0.5)) -> None:
    """Refused with a reason, and nothing has changed; or one to serve by."""
    before = held.placement
    try:
        held.offer(placement(), now=NOW)
    except (WireError, Refused) as refused:
        worded(str(refused))
        assert held.placement is before
    else:
        serves(held, draws)


def snapshot(data: bytes) -> None:
    """A whole placement, and then the same as a change of what came of it."""
    held = Held()
    offered(held, lambda: wire.snapshot_from_wire(read(placement_pb2.Snapshot, data), now=NOW))
    change(held, data)


def change(held: Held, data: bytes) -> None:
    """A change of the placement that is held, or of one without engines."""
    if held.placement is None:
        held.offer(Placement(epoch=max(1, held.highest_epoch), version=1, closed="maintenance"), now=NOW)

    def changed() -> Placement:
        message = read(placement_pb2.Change, data)
        assert held.placement is not None
        message.epoch, message.base_version = held.placement.order
        return wire.apply_change(held.placement, message, now=NOW)

    offered(held, changed)


def proxy_settings(data: bytes) -> None:
    """What control tells a proxy to work by: refused with all that is wrong, or the same when it is told on."""
    try:
        told = ProxySettings.from_json(data)
    except FleetFileError as refused:
        worded(*refused.problems)
        return
    assert ProxySettings.from_json(told.to_json()) == told
