"""Control's side of the placement streams: a snapshot first, then changes; heartbeats; an end to whoever is silent."""

from typing import TYPE_CHECKING, Any

from narwhal._pb import placement_pb2
from narwhal.control.core.events import ProxyAcked, ProxyConnected, ProxyLost, ProxyNacked
from narwhal.placement import Placement
from narwhal.reports import ProxyKey
from narwhal.wire import change_to_wire, snapshot_to_wire
from tests.simulation.links import Stream

if TYPE_CHECKING:
    from tests.simulation.control import Control

HEARTBEAT_S = 1.0
SILENCE_S = 10.0
SNAPSHOT_AGAIN_S = 1.0


class Subscriber:
    """One proxy's stream."""

    def __init__(self, publisher: "Publisher", stream: Stream, hello: ProxyConnected) -> None:
        self.publisher = publisher
        self.stream = stream
        self.hello = hello
        self.heard_at = publisher.control.now()
        self.needs_snapshot = True
        self.replaced = False

    def broken(self, why: str) -> None:
        """The stream is over."""
        publisher = self.publisher
        if publisher.proxies.get(self.hello.proxy.id) is self:
            del publisher.proxies[self.hello.proxy.id]
        if not self.replaced:
            lost = ProxyLost(proxy=self.hello.proxy, reason=why, stream=self.hello.stream)
            publisher.control.post(lost)

    def send(self, message: placement_pb2.PlacementMessage) -> None:
        """One placement message."""
        self.stream.down.send("placement", message.SerializeToString())


class Publisher:
    """All proxies' streams at one control process."""

    def __init__(self, control: "Control") -> None:
        self.control = control
        self.proxies: dict[str, Subscriber] = {}
        self.placement: Placement | None = None
        self._streams = 0

    def publish(self, placement: Placement) -> None:
        """To everybody: a change where it follows the one before, else a snapshot."""
        base, self.placement = self.placement, placement
        now = self.control.now()
        change = None
        if base is not None and base.epoch == placement.epoch:
            change = placement_pb2.PlacementMessage(change=change_to_wire(base, placement, now=now))
        for subscriber in self.proxies.values():
            if change is None or subscriber.needs_snapshot:
                self.snapshot(subscriber)
            else:
                subscriber.send(change)

    def snapshot(self, subscriber: Subscriber) -> None:
        """The newest placement as a whole, unless the proxy has seen a higher epoch."""
        placement = self.placement
        if placement is None or placement.epoch < subscriber.hello.highest_epoch:
            subscriber.needs_snapshot = True
            return
        subscriber.needs_snapshot = False
        whole = snapshot_to_wire(placement, now=self.control.now())
        subscriber.send(placement_pb2.PlacementMessage(snapshot=whole))

    def withdraw(self, why: str) -> None:
        """This process is not to be believed any more."""
        self.placement = None
        for subscriber in list(self.proxies.values()):
            subscriber.stream.end_at_control(why)

    def beat(self) -> None:
        """A heartbeat to everybody; a standby's names epoch 0."""
        order = self.placement.order if self.placement is not None else (0, 0)
        for subscriber in list(self.proxies.values()):
            if self.control.now() - subscriber.heard_at >= SILENCE_S:
                subscriber.stream.end_at_control(f"acknowledged nothing for {SILENCE_S:g} s")
            else:
                subscriber.stream.down.send("heartbeat", *order)

    # --- what proxies say -----------------------------------------------------------------------------------------

    def hear(self, stream: Stream, kind: str, *rest: Any) -> None:
        """One message of a proxy."""
        side = stream.control_side
        if kind == "hello" and isinstance(rest[0], ProxyKey) and isinstance(rest[1], int):
            self._join(stream, rest[0], rest[1])
            return
        if not isinstance(side, Subscriber):
            return
        side.heard_at = self.control.now()
        if kind == "closed":
            stream.end_at_control(str(rest[0]))
        elif kind == "nack":
            epoch, version, reason = rest
            side.needs_snapshot = True
            self.control.after(SNAPSHOT_AGAIN_S, self._again, side)
            nacked = ProxyNacked(proxy=side.hello.proxy, epoch=epoch, version=version, reason=reason)
            self.control.post(nacked)
        elif kind == "ack":
            self._acked(side, *rest)

    def _join(self, stream: Stream, proxy: ProxyKey, highest_epoch: int) -> None:
        before = self.proxies.get(proxy.id)
        if before is not None:
            if before.hello.proxy.boot > proxy.boot:
                stream.up.drop()
                stream.down.send("closed", "a newer boot is connected")
                return
            before.replaced = True
            before.stream.end_at_control("replaced")
        self._streams += 1
        hello = ProxyConnected(
            proxy=proxy, address=proxy.id, pid=proxy.boot, highest_epoch=highest_epoch, stream=self._streams
        )
        subscriber = Subscriber(self, stream, hello)
        stream.control_side = subscriber
        self.proxies[proxy.id] = subscriber
        self.control.epoch_seen(highest_epoch)
        self.control.post(hello)
        self.snapshot(subscriber)

    def _again(self, subscriber: Subscriber) -> None:
        if subscriber.needs_snapshot and self.proxies.get(subscriber.hello.proxy.id) is subscriber:
            self.snapshot(subscriber)

    def _acked(self, side: Subscriber, epoch: Any, version: Any, resident: Any, unread: Any) -> None:
        published = self.placement
        if published is None or epoch > published.epoch:
            return
        if (epoch, version) > published.order:
            raise AssertionError(f"{side.hello.proxy} acknowledged {epoch}.{version}, which was never published")
        proxy = side.hello.proxy
        self.control.post(ProxyAcked(proxy=proxy, epoch=epoch, version=version, resident=resident, unread=unread))
