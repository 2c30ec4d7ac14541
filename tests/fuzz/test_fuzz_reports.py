"""Reports, acknowledgements and greetings of a hostile or broken proxy: refused, or counted; the control plane goes on.

What was taken must be storable: a document that cannot be written, or read again, would degrade the control plane for
good.
"""

from collections.abc import Callable, Iterable
from typing import Any

import orjson
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from narwhal import wire
from narwhal._pb import outcome_pb2, placement_pb2
from narwhal.control.core.events import Input, ProxyAcked, ProxyConnected, ProxyLeft, ProxyNacked, Reported
from narwhal.control.core.handoff import from_document, to_document
from narwhal.wire import WireError
from tests.core.rig import Rig, decode, prefill
from tests.fuzz.messages import fuzz, messages

LARGEST = 64 * 1024  # bytes of the stored document of four engines and a few proxies, whatever the peers sent


def take(fleet: Rig, events: Iterable[Callable[[], Input]]) -> None:
    """Hands the core what the messages mean, as the services do; what means nothing is refused there."""
    for event in events:
        try:
            read = event()
        except WireError:
            continue
        fleet.send(read)
    fleet.publish()
    fleet.run_pass()
    state = fleet.fleet.save(now=fleet.now)
    stored = orjson.dumps(to_document(state, wall=1.0, epoch=1, holder="a"))
    assert from_document(orjson.loads(stored)).state == state
    assert len(stored) < LARGEST
    Rig(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"), saved=state)


def rig() -> Rig:
    return Rig(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))


def received(message: Message) -> Any:
    return type(message).FromString(message.SerializeToString())


def reported(message: outcome_pb2.ReportBatch) -> Callable[[], Input]:
    return lambda: Reported(batch=wire.batch_from_wire(received(message)))


@pytest.mark.rule("S6")
@fuzz
@given(st.lists(messages(outcome_pb2.ReportBatch), min_size=1, max_size=5))
def test_any_report_is_refused_or_counted(reports: list[outcome_pb2.ReportBatch]) -> None:
    take(rig(), map(reported, reports))


@pytest.mark.rule("S6")
def test_counts_that_no_fleet_ever_reaches_are_refused_and_the_state_stays_storable() -> None:
    fleet = rig()
    most = outcome_pb2.RequestCounts(served=2**64 - 1)
    run = outcome_pb2.OutcomeRun(
        engine_id="d1",
        phase=placement_pb2.PHASE_DECODE,
        incarnation=1,
        outcome=outcome_pb2.LEG_OUTCOME_STREAM_COMPLETE,
        count=2**64 - 1,
    )
    proxy = placement_pb2.ProxyIdentity(id="edge", boot=1)
    batches = [outcome_pb2.ReportBatch(proxy=proxy, sequence=n, requests=most, runs=[run]) for n in (1, 2)]
    take(fleet, map(reported, batches))


def greeting(message: placement_pb2.ProxyMessage) -> Callable[[], Input]:
    """What the placement stream makes of a message, with the identity that it names."""
    given_ = received(message)

    def read() -> Input:
        kind = given_.WhichOneof("message")
        if kind == "ack":
            key = wire.proxy_from_wire(placement_pb2.ProxyIdentity(id="edge", boot=1))
            residents = wire.residency_from_wire(list(given_.ack.resident))
            unread = wire.residency_from_wire(list(given_.ack.unread))
            return ProxyAcked(
                proxy=key, epoch=given_.ack.epoch, version=given_.ack.version, resident=residents, unread=unread
            )
        if kind == "nack":
            key = wire.proxy_from_wire(placement_pb2.ProxyIdentity(id="edge", boot=1))
            return ProxyNacked(
                proxy=key, epoch=given_.nack.epoch, version=given_.nack.version, reason=given_.nack.reason
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

    return read


@pytest.mark.rule("P6")
@fuzz
@given(st.lists(messages(placement_pb2.ProxyMessage), min_size=1, max_size=6))
def test_anything_on_the_placement_stream_is_refused_or_taken(said: list[placement_pb2.ProxyMessage]) -> None:
    take(rig(), map(greeting, said))
