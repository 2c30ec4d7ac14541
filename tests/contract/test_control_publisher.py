"""The publisher by itself: what is serialised, how often, and for whom."""

from narwhal._pb import placement_pb2
from narwhal.control.core.events import ProxyConnected
from narwhal.control.publisher import LONGEST_BACKLOG, Publisher
from narwhal.placement import EngineEntry, Placement
from narwhal.reports import ProxyKey
from narwhal.vocabulary import Phase
from tests.contract.control_kit import ShiftedClock


def placement(version: int, *, engines: int = 2, epoch: int = 1) -> Placement:
    entries = {
        f"e{i}": EngineEntry(
            id=f"e{i}",
            url=f"http://h:{i + 1}",
            role=Phase.DECODE,
            phases=frozenset({Phase.DECODE}),
            incarnation=version,
        )
        for i in range(engines)
    }
    return Placement(epoch=epoch, version=version, engines=entries)


def hello(number: int) -> ProxyConnected:
    return ProxyConnected(
        proxy=ProxyKey(id=f"p{number}", slot=0, boot=1), address="", pid=1, highest_epoch=0, stream=number
    )


async def test_every_message_is_serialised_once_and_shared() -> None:
    publisher = Publisher(ShiftedClock())
    publisher.configure("fleet", b"{}")
    publisher.publish(placement(1))
    subscribers = [publisher.join(hello(i)) for i in range(3)] + [publisher.observe()]
    settings = [await s.next() for s in subscribers[:3]]
    first = [await s.next() for s in subscribers]
    publisher.publish(placement(2))
    publisher.beat()
    changes = [await s.next() for s in subscribers]
    beats = [await s.next() for s in subscribers]
    for shared in (settings, first, changes, beats):
        assert len({id(m) for m in shared}) == 1
    assert len({settings[0], first[0], changes[0], beats[0]}) == 4


async def test_a_subscriber_that_falls_behind_gets_one_snapshot_instead_of_a_backlog() -> None:
    publisher = Publisher(ShiftedClock())
    publisher.publish(placement(1))
    slow = publisher.observe()
    assert await slow.next()
    for version in range(2, LONGEST_BACKLOG + 10):
        publisher.publish(placement(version))
        publisher.beat()
    data = await slow.next()
    assert data is not None
    parsed = placement_pb2.PlacementMessage.FromString(data)
    assert parsed.snapshot.version == LONGEST_BACKLOG + 9
    data = await slow.next()
    assert data is not None
    assert placement_pb2.PlacementMessage.FromString(data).WhichOneof("message") == "heartbeat"
    publisher.publish(placement(LONGEST_BACKLOG + 10))
    data = await slow.next()
    assert data is not None
    assert placement_pb2.PlacementMessage.FromString(data).change.base_version == LONGEST_BACKLOG + 9


async def test_a_new_epoch_is_a_snapshot_for_everybody() -> None:
    publisher = Publisher(ShiftedClock())
    publisher.publish(placement(5))
    subscriber = publisher.observe()
    await subscriber.next()
    publisher.publish(placement(1, epoch=2))
    data = await subscriber.next()
    assert data is not None
    snapshot = placement_pb2.PlacementMessage.FromString(data).snapshot
    assert (snapshot.epoch, snapshot.version) == (2, 1)
