"""A proxy's streams to control: placement with acknowledgements, and reports with theirs.

In order within a stream, nothing between streams: what an old stream still carries may arrive after what a newer one
has brought, and what it carried may be lost. Messages are the real ones on the wire where their meaning depends on it.
"""

from typing import TYPE_CHECKING, Protocol

from narwhal._pb import placement_pb2
from narwhal.proxy.held import Outdated, Refused
from narwhal.proxy.pace import RETRY_CAP_S, backoff_s
from narwhal.reports import Batch
from narwhal.wire import WireError, apply_change, snapshot_from_wire
from tests.simulation.world import Pipe

if TYPE_CHECKING:
    from tests.simulation.control import Control
    from tests.simulation.proxies import Proxy

SILENCE_S = 5.0  # spec P10
SUCCESSES_EVERY_S = 1.0  # spec S6
WINDOW = 256


class Side(Protocol):
    """One end of a stream."""

    def broken(self, why: str) -> None:
        """The stream is over."""


class Stream:
    """Two pipes between a proxy and control. Ends as a whole; each side learns of it in its own time."""

    def __init__(self, proxy: "Proxy", control: "Control") -> None:
        self.proxy = proxy
        self.control = control
        self.down = Pipe(proxy.network, control, proxy, _nobody)
        self.up = Pipe(proxy.network, proxy, control, _nobody)
        self.proxy_side: Side | None = None
        self.control_side: Side | None = None

    def end_at_proxy(self, why: str) -> None:
        """The proxy hangs up: it takes nothing more, control hears of it behind what was sent before."""
        side, self.proxy_side = self.proxy_side, None
        self.down.drop()
        if side is not None:
            side.broken(why)
            self.up.send("closed", why)

    def end_at_control(self, why: str) -> None:
        """Control hangs up."""
        side, self.control_side = self.control_side, None
        self.up.drop()
        if side is not None:
            side.broken(why)
            self.down.send("closed", why)

    def reset(self) -> None:
        """The connection itself breaks: what is under way is lost, and both are told."""
        self.down.drop()
        self.up.drop()
        for node, side in ((self.proxy, self.proxy_side), (self.control, self.control_side)):
            if side is not None:
                node.deliver(side.broken, "connection reset")
        self.proxy_side = self.control_side = None


def _nobody(*_message: object) -> None:
    """Nobody listens yet."""


class Link:
    """One control address as a proxy sees it: connect, introduce, read, answer, and again."""

    def __init__(self, proxy: "Proxy", control: "Control") -> None:
        self.proxy = proxy
        self.control = control
        self.stream: Stream | None = None
        self.failures = 0
        self.began_at = 0.0
        self.heard_at = 0.0
        self.heard = False
        self.followed_epoch = 0

    def connect(self) -> None:
        """One try. To a process that is not there it fails at once, to a stopped one it only stays silent."""
        proxy, control = self.proxy, self.control
        self.began_at = self.heard_at = proxy.now()
        self.heard = False
        cut = proxy.network.cut(proxy.name, control.name)
        if not control.alive and not cut:
            proxy.after(proxy.network.delay(), self.broken, "refused")
            return
        self.stream = stream = Stream(proxy, control)
        stream.proxy_side = self
        stream.down.hear = self._hear
        if cut:
            stream.up.drop()  # nothing was ever connected
        stream.up.hear = control.hearer(stream)
        stream.up.send("hello", proxy.key, proxy.held.highest_epoch)
        proxy.after(SILENCE_S, self._silence, stream)

    def broken(self, why: str) -> None:
        """The stream is over: try again, soon the first time."""
        proxy = self.proxy
        self.stream = None
        proxy.unfollow(self)
        proxy.say(f"stream to {self.control.name} over: {why}")
        lasted = self.heard and proxy.now() - self.began_at > RETRY_CAP_S
        self.failures = 1 if lasted else self.failures + 1
        proxy.after(backoff_s(self.failures, proxy.world.rng), self.connect)

    def _silence(self, stream: Stream) -> None:
        if self.stream is not stream:
            return
        left = self.heard_at + SILENCE_S - self.proxy.now()
        if left > 1e-6:
            self.proxy.after(left, self._silence, stream)
        else:
            stream.end_at_proxy(f"nothing heard for {SILENCE_S:g} s")

    def _hear(self, kind: str, *rest: object) -> None:
        stream = self.stream
        if stream is None:
            return
        self.heard = True
        self.heard_at = self.proxy.now()
        if kind == "closed":
            stream.end_at_proxy(str(rest[0]))
        elif kind == "heartbeat":
            epoch, version = rest
            if self.proxy.lead is self:
                self.proxy.held.confirm((epoch, version), now=self.proxy.now())  # type: ignore[arg-type]
            self._acknowledge(stream)
        elif isinstance(rest[0], bytes):
            self._placement(stream, placement_pb2.PlacementMessage.FromString(rest[0]))

    def _placement(self, stream: Stream, message: placement_pb2.PlacementMessage) -> None:
        proxy, held = self.proxy, self.proxy.held
        named = message.snapshot if message.HasField("snapshot") else message.change
        now = proxy.now()
        try:
            held.meet(named.epoch)
            proxy.watch.met(proxy, named.epoch)
            proxy.follow(self)
            if message.HasField("snapshot"):
                placement = snapshot_from_wire(message.snapshot, now=now)
            else:
                placement = apply_change(held.placement, message.change, now=now)
            held.offer(placement, now=now)
        except Outdated as refusal:
            proxy.say(f"refuses {named.epoch}.{named.version}: {refusal}")
            stream.up.send("nack", named.epoch, named.version, str(refusal))
            stream.end_at_proxy(f"refused: {refusal}")
            return
        except (Refused, WireError) as refusal:
            proxy.say(f"refuses {named.epoch}.{named.version}: {refusal}")
            stream.up.send("nack", named.epoch, named.version, str(refusal))
            return
        proxy.applied(placement)
        self._acknowledge(stream)

    def _acknowledge(self, stream: Stream) -> None:
        proxy = self.proxy
        unread = {engine: count for engine, count in proxy.unread.items() if count}
        stream.up.send("ack", *proxy.held.order, dict(proxy.inflight), unread)


class Reporting:
    """Reports over one stream to whoever is followed, resent from the start of what is not acknowledged."""

    def __init__(self, proxy: "Proxy") -> None:
        self.proxy = proxy
        self.stream: Stream | None = None
        self._control: Control | None = None
        self._failures = 0
        self._began_at = 0.0
        self._hurrying = False

    def follow(self, control: "Control") -> None:
        """Another control process is followed, or the same one under another epoch."""
        self.disconnect()
        self._control = control
        self._failures = 0
        self._open()

    def disconnect(self) -> None:
        """Nobody is followed."""
        self._control = None
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.proxy_side = None
            stream.down.drop()
            stream.up.send("closed", "followed no more")

    def _open(self) -> None:
        control, proxy = self._control, self.proxy
        if control is None or self.stream is not None:
            return
        self._began_at = proxy.now()
        if not control.alive:
            proxy.after(proxy.network.delay(), self.broken, "refused")
            return
        self.stream = stream = Stream(proxy, control)
        stream.proxy_side = self
        stream.down.hear = self._hear
        stream.up.hear = control.report_hearer(stream)
        for batch in proxy.backlog.sent:
            self._send(batch)
        self._send_new()

    def broken(self, why: str) -> None:
        """The stream is over: again, unless nobody is followed."""
        proxy = self.proxy
        self.stream = None
        proxy.say(f"report stream over: {why}")
        self._failures = 1 if proxy.now() - self._began_at > RETRY_CAP_S else self._failures + 1
        proxy.after(backoff_s(self._failures, proxy.world.rng), self._open)

    def _send(self, batch: Batch) -> None:
        if self.stream is not None:
            self.stream.up.send("report", batch)

    def _send_new(self, *, measures: bool = False) -> None:
        backlog, proxy = self.proxy.backlog, self.proxy
        while self.stream is not None and len(backlog.sent) < WINDOW:
            batch = backlog.cut(*(proxy.paces.take(proxy.now()) if measures else ()))
            measures = False
            if batch is None:
                return
            self.proxy.watch.cut(self.proxy, batch)
            self._send(batch)

    def beat(self) -> None:
        """Successes go out every second, and what was measured."""
        self._send_new(measures=True)
        self.proxy.after(SUCCESSES_EVERY_S, self.beat)

    def hurry(self) -> None:
        """A failure goes out at once."""
        if not self._hurrying:
            self._hurrying = True
            self.proxy.after(0.0, self._hurried)

    def _hurried(self) -> None:
        self._hurrying = False
        self._send_new()

    def _hear(self, kind: str, *rest: object) -> None:
        stream = self.stream
        if stream is None:
            return
        if kind == "closed":
            stream.end_at_proxy(str(rest[0]))
        elif kind == "acked" and isinstance(rest[0], int):
            self.proxy.watch.acknowledged(self.proxy, rest[0])
            self.proxy.backlog.acknowledge(rest[0])
