"""Who receives placement, and what each of them still has to be sent (spec P1, P2, P6, P9, P10).

Every message is serialised once and shared as bytes by all subscribers at the same base. A subscriber's backlog is
bounded: one that falls behind gets the newest snapshot instead of what it missed. Decides nothing about engines.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping

from narwhal._pb import placement_pb2
from narwhal.clock import Clock
from narwhal.control.core.events import ProxyConnected
from narwhal.placement import Placement
from narwhal.reports import ProxyKey
from narwhal.wire import NOTHING, change_to_wire, residency_to_wire, snapshot_to_wire

HEARTBEAT_S = 1.0  # spec P10
RESIDENCY_S = 0.5  # spec P9
SILENCE_S = 10.0  # spec P10
# An observer acknowledges nothing, so nothing tells one that dropped its call from one that listens: each has to come
# again after this long.
OBSERVER_AGE_S = 3600.0
SNAPSHOT_AGAIN_S = 1.0  # between two snapshots for one subscriber that keeps refusing
LONGEST_BACKLOG = 32  # changes


class Superseded(Exception):
    """A newer boot of the same worker has been seen."""


class Subscriber:
    """One stream's outgoing side. The stream's handler awaits `next`; everything else is called by the publisher."""

    def __init__(self, publisher: "Publisher", *, hello: ProxyConnected | None, now: float) -> None:
        self.hello = hello  # None for an observer
        self.joined_at = now
        self.heard_at = now
        self.ended = ""  # why the stream is to end
        self.replaced = False  # by a stream of the same or a newer boot, or a goodbye
        self.over = asyncio.Event()  # set when it is to end
        self.resident: Mapping[str, int] = {}
        self.tokens: Mapping[str, int] = {}
        self._publisher = publisher
        self._settings = b""
        self._changes: deque[bytes] = deque()
        self._needs_snapshot = True
        self._snapshot_due = now
        self._newest: dict[str, bytes] = {}  # of messages of which only the newest counts
        self._farewell = b""
        self._wake = asyncio.Event()

    async def next(self) -> bytes | None:
        """The next message to send; None when the stream is to end."""
        while True:
            if self._farewell:
                farewell, self._farewell = self._farewell, b""
                return farewell
            if self.ended:
                return None
            message = self._due()
            if message:
                return message
            self._wake.clear()
            await self._wake.wait()

    def _due(self) -> bytes:
        if self._settings:
            settings, self._settings = self._settings, b""
            return settings
        if self._needs_snapshot:
            snapshot = self._publisher.snapshot(above=self.hello.highest_epoch if self.hello is not None else 0)
            now = self._publisher.now()
            if snapshot and now >= self._snapshot_due:
                self._needs_snapshot = False
                self._snapshot_due = now + SNAPSHOT_AGAIN_S
                self._changes.clear()
                return snapshot
        elif self._changes:
            return self._changes.popleft()
        if self._newest:
            return self._newest.pop(next(iter(self._newest)))
        return b""

    def change(self, message: bytes) -> None:
        """Queues a change on what the subscriber has by then."""
        if self._needs_snapshot:
            pass  # the snapshot will be newer
        elif len(self._changes) >= LONGEST_BACKLOG:
            self.snapshot()
        else:
            self._changes.append(message)
        self._wake.set()

    def snapshot(self, *, paced: bool = False) -> None:
        """Has a snapshot sent next; when paced, not before `SNAPSHOT_AGAIN_S` have passed since the last one."""
        self._needs_snapshot = True
        self._changes.clear()
        if not paced:
            self._snapshot_due = self._publisher.now()
        elif (delay := self._snapshot_due - self._publisher.now()) > 0:
            asyncio.get_running_loop().call_later(delay, self._wake.set)
        self._wake.set()

    def settings(self, message: bytes) -> None:
        """Has settings sent before anything else."""
        self._settings = message
        self._wake.set()

    def newest(self, kind: str, message: bytes) -> None:
        """Replaces the unsent message of this kind."""
        self._newest[kind] = message
        self._wake.set()

    def end(self, reason: str, *, replaced: bool = False) -> None:
        """Ends the stream, with a farewell as its last message."""
        if self.ended:
            return
        self.ended = reason
        self.replaced = replaced
        self._farewell = _message(farewell=placement_pb2.Farewell(reason=reason))
        self.over.set()
        self._wake.set()


class Publisher:
    """All subscribers of this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._settings = b""
        self._proxies: dict[tuple[str, int], Subscriber] = {}
        self._observers: set[Subscriber] = set()
        self._resident: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._resident_changed = False
        self._snapshot = b""
        self._snapshot_at = 0.0
        self.placement: Placement | None = None  # what is published; None while this process does not lead

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    @property
    def proxies(self) -> list[ProxyConnected]:
        """What the proxies with an open stream said of themselves."""
        return [s.hello for s in self._proxies.values() if s.hello is not None]

    @property
    def observers(self) -> int:
        """Open observer streams."""
        return len(self._observers)

    # --- what is published ---

    def configure(self, fleet: str, settings: bytes) -> None:
        """Sets what proxies work by and sends it to all of them."""
        self._settings = _message(settings=placement_pb2.Settings(fleet=fleet, json=settings))
        for proxy in self._proxies.values():
            proxy.settings(self._settings)

    def publish(self, placement: Placement) -> None:
        """Sends `placement` to every subscriber: as a change where it follows the one before, else as a snapshot."""
        base, self.placement = self.placement, placement
        self._snapshot = b""
        if base is not None and base.epoch == placement.epoch:
            change = _message(change=change_to_wire(base, placement, now=self.now()))
            for subscriber in self._everybody():
                subscriber.change(change)
        else:
            for subscriber in self._everybody():
                subscriber.snapshot()

    def withdraw(self, reason: str) -> None:
        """Ends every stream: this process is not to be believed any more."""
        self.placement = None
        self._snapshot = b""
        for subscriber in self._everybody():
            self.leave(subscriber)
            subscriber.end(reason)

    def snapshot(self, *, above: int = 0) -> bytes:
        """The newest placement as a snapshot message; empty when there is none of epoch `above` or higher, which a
        proxy that has seen that epoch would refuse."""
        if self.placement is None or self.placement.epoch < above:
            return b""
        now = self.now()
        # A quarantine is written as the time it has left, so such a message ages.
        ages = any(e.quarantine_due is not None for e in self.placement.engines.values())
        if not self._snapshot or (ages and now - self._snapshot_at > RESIDENCY_S / 2):
            self._snapshot = _message(snapshot=snapshot_to_wire(self.placement, now=now))
            self._snapshot_at = now
        return self._snapshot

    # --- who receives it ---

    def join(self, hello: ProxyConnected) -> Subscriber:
        """A proxy's stream. Ends the stream that the same worker had. Raises Superseded when that one was newer."""
        place = _place(hello.proxy)
        before = self._proxies.get(place)
        if before is not None and before.hello is not None:
            if before.hello.proxy.boot > hello.proxy.boot:
                raise Superseded(f"a newer boot of {hello.proxy} is connected")
            newer = before.hello.proxy.boot < hello.proxy.boot
            self.leave(before)
            before.end("a newer boot is connected" if newer else "a newer stream is connected", replaced=True)
        subscriber = Subscriber(self, hello=hello, now=self.now())
        if self._settings:
            subscriber.settings(self._settings)
        self._proxies[place] = subscriber
        self._resident_changed = True  # the number of proxies
        return subscriber

    def observe(self) -> Subscriber:
        """A read-only stream."""
        subscriber = Subscriber(self, hello=None, now=self.now())
        self._observers.add(subscriber)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """Forgets a stream. One that was forgotten before is no error."""
        self._observers.discard(subscriber)
        if self._open(subscriber):
            assert subscriber.hello is not None
            self.resides(subscriber, {})
            del self._proxies[_place(subscriber.hello.proxy)]
            self._resident_changed = True

    def dismiss(self, key: ProxyKey, reason: str) -> None:
        """Ends the stream of a proxy that somebody else said goodbye for."""
        subscriber = self._proxies.get(_place(key))
        if subscriber is not None and subscriber.hello is not None and subscriber.hello.proxy == key:
            self.leave(subscriber)
            subscriber.end(reason, replaced=True)

    def heard(self, subscriber: Subscriber) -> None:
        """The proxy has shown that it lives."""
        subscriber.heard_at = self.now()

    def resides(self, subscriber: Subscriber, legs: Mapping[str, int], tokens: Mapping[str, int] = NOTHING) -> None:
        """The proxy has these legs in flight, with so many prompt tokens; also its proof of life."""
        self.heard(subscriber)
        if (legs == subscriber.resident and tokens == subscriber.tokens) or not self._open(subscriber):
            return
        for total, before, now in (
            (self._resident, subscriber.resident, legs),
            (self._tokens, subscriber.tokens, tokens),
        ):
            total.subtract(before)
            total.update(now)
            for engine in before:
                if not total[engine]:
                    del total[engine]
        subscriber.resident, subscriber.tokens = dict(legs), dict(tokens)
        self._resident_changed = True

    def _open(self, subscriber: Subscriber) -> bool:
        hello = subscriber.hello
        return hello is not None and self._proxies.get(_place(hello.proxy)) is subscriber

    # --- time ---

    async def run(self) -> None:
        """Heartbeats, residency, and an end to whoever is silent; until cancelled."""
        beat_due = self.now()
        while True:
            now = self.now()
            self.send_residency()
            if now >= beat_due:
                beat_due = now + HEARTBEAT_S - RESIDENCY_S / 2
                self.beat()
                self.end_silent()
            await asyncio.sleep(RESIDENCY_S)

    def beat(self) -> None:
        """A heartbeat to everybody; a standby's names epoch 0 and keeps the connection warm for a takeover."""
        epoch, version = self.placement.order if self.placement is not None else (0, 0)
        message = _message(heartbeat=placement_pb2.Heartbeat(epoch=epoch, version=version))
        for subscriber in self._everybody():
            subscriber.newest("heartbeat", message)

    def send_residency(self) -> None:
        """The legs in flight over all proxies to everybody, when they have changed."""
        if not self._resident_changed or self.placement is None:
            return
        self._resident_changed = False
        resident = residency_to_wire(self._resident, self._tokens)
        picture = placement_pb2.FleetResidency(resident=resident, proxies=len(self._proxies))
        message = _message(residency=picture)
        for subscriber in self._everybody():
            subscriber.newest("residency", message)

    def end_silent(self) -> None:
        """Ends the streams that have acknowledged nothing for too long, and those of observers that are too old."""
        now = self.now()
        for proxy in list(self._proxies.values()):
            if now - proxy.heard_at >= SILENCE_S:
                self.leave(proxy)
                proxy.end(f"acknowledged nothing for {SILENCE_S:g} s")
        for observer in list(self._observers):
            if now - observer.joined_at >= OBSERVER_AGE_S:
                self.leave(observer)
                observer.end("subscribe again")

    def _everybody(self) -> list[Subscriber]:
        return [*self._proxies.values(), *self._observers]


def _place(key: ProxyKey) -> tuple[str, int]:
    return (key.id, key.slot)


def _message(**fields: object) -> bytes:
    return placement_pb2.PlacementMessage(**fields).SerializeToString()  # type: ignore[arg-type]
