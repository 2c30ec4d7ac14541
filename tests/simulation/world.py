"""The simulated world: one heap, one seed, one virtual clock; processes that can die or freeze, links that can fail.

Decides only when things happen. Everything that happens is a call on the heap, so a run is a function of its seed.
A process never reads the world's clock: it reads its own, which started elsewhere (no two clocks may ever be compared).
"""

import heapq
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from random import Random
from typing import Any

Call = Callable[..., None]

# A run that does more than this without time passing, or within one virtual second, is a livelock.
MOST_AT_ONCE = 20_000
MOST_PER_SECOND = 40_000


class Invariant(StrEnum):
    """What must hold, whatever happens."""

    LEGS_FOLLOW_PLACEMENT = "legs follow placement"  # a proxy starts a leg only where its placement permits
    NO_RETRY_AFTER_OUTPUT = "no retry after output"
    REQUEST_ENDS_ONCE = "a request ends once"
    HANDOFF_USED_ONCE = "no handoff is used twice"
    LEGS_END = "legs end"  # at rest nothing is in flight
    NO_LOWER_EPOCH = "no lower epoch is accepted"  # than the one seen
    EJECTED_IS_OUT = "no placement names an ejected engine"  # until it is readmitted
    STORED_FIRST = "stored before placement"  # an engine is put in once its incarnation is stored
    PHASES_COVERED = "soft holds never empty a phase"
    DRAINED = "a drained engine has no work"  # once it is reported ready to stop, and gets none
    TOTALS = "totals are exact"  # a report counts once, however often it comes
    ACKNOWLEDGED_STORED = "acknowledged when stored"
    RESUME = "a resume loses nothing"  # no ejection, hold, drain or counter
    ONE_ACTS = "one control acts"  # at most, at any instant
    BLAME = "the right engine is blamed"  # a healthy one is not ejected, nor held for long, by others' faults
    DETECTION = "failures are detected"  # at the threshold, and silence within a bound
    ONE_PROBE = "one probe per engine"  # at a time
    NO_KV_LEFT = "probes leave no KV"
    ROLE_FLOORS = "a role keeps its floor"  # whatever moves, but by failures
    NO_REVERSAL = "no move is reversed within 60 s"  # by the load
    RECOVERY = "recovery is bounded"  # after the last fault all are eligible, and every proxy current
    NO_LIVELOCK = "no livelock"
    NOTHING_RAISES = "nothing raises"


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, rule: Invariant, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class Timer:
    """One call to come."""

    __slots__ = ("args", "call", "off")

    def __init__(self, call: Call, args: tuple[Any, ...]) -> None:
        self.call = call
        self.args = args
        self.off = False


class World:
    """The heap and the clock."""

    def __init__(self, seed: int, tell: Callable[[float, str, str], None] | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.now = 0.0
        self.events = 0
        self.tracing = tell is not None
        self.after_each: Callable[[], None] = _nothing
        self._tell = tell
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._at_once = 0
        self._second = (0, 0)

    def after(self, delay: float, call: Call, *args: Any) -> Timer:
        """Call in `delay` seconds."""
        timer = Timer(call, args)
        self._count += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay), self._count, timer))
        return timer

    def say(self, who: str, what: str) -> None:
        """A line of the trace."""
        if self._tell is not None:
            self._tell(self.now, who, what)

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> bool:
        """Let things happen until the instant `until`, or until `stop` says so after one of them; whether it did."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            at, _, timer = heapq.heappop(heap)
            if timer.off:
                continue
            self._budget(at)
            self.now = at
            timer.call(*timer.args)
            self.after_each()
            if stop is not None and stop():
                return True
        self.now = max(self.now, until)
        return False

    def _budget(self, at: float) -> None:
        self.events += 1
        self._at_once = self._at_once + 1 if at == self.now else 0
        second, count = self._second
        self._second = (int(at), count + 1 if second == int(at) else 0)
        if self._at_once > MOST_AT_ONCE or count > MOST_PER_SECOND:
            raise Violation(Invariant.NO_LIVELOCK, f"{self._at_once} events at one instant, {count} in one second")


def _nothing() -> None:
    """No check."""


class Node:
    """One process. Its timers die with it and wait while it is frozen."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused = False
        self.life = 0
        self.skew = world.rng.uniform(10.0, 100_000.0)
        self._frozen: deque[tuple[int, Call, tuple[Any, ...]]] = deque()

    def now(self) -> float:
        """Its own monotonic clock, which goes on while it is frozen."""
        return self.world.now + self.skew

    def after(self, delay: float, call: Call, *args: Any) -> Timer:
        """Call in `delay` seconds, if this life of the process lasts that long."""
        return self.world.after(delay, self._fire, self.life, call, args)

    def deliver(self, call: Call, *args: Any) -> None:
        """Something reaches the process now."""
        self._fire(self.life, call, args)

    def _fire(self, life: int, call: Call, args: tuple[Any, ...]) -> None:
        if life != self.life or not self.alive:
            return
        if self.paused or self._frozen:
            self._frozen.append((life, call, args))
        else:
            call(*args)

    def say(self, what: str) -> None:
        """A line of the trace."""
        self.world.say(self.name, what)

    def die(self) -> None:
        """kill -9."""
        self.alive = self.paused = False
        self.life += 1
        self._frozen.clear()
        self.say("killed")

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True
        self.say("frozen")

    def resume(self) -> None:
        """SIGCONT: what came meanwhile happens now, in its order."""
        if self.paused:
            self.paused = False
            self.say("thawed")
            self._thaw()

    def _thaw(self) -> None:
        if self._frozen and not self.paused:
            life, call, args = self._frozen.popleft()
            if life == self.life and self.alive:
                call(*args)
            # One at a time, so that the invariants are looked at between them; `_fire` queues behind.
            self.world.after(0.0, self._thaw)


class Pipe:
    """One direction of a connection: in order, late, held back while its link is cut, and lost when it breaks."""

    __slots__ = ("_held", "_last", "_network", "broken", "hear", "receiver", "sender")

    def __init__(self, network: "Network", sender: Node, receiver: Node, hear: Call) -> None:
        self._network = network
        self.hear = hear
        self._held: list[tuple[Any, ...]] = []
        self._last = 0.0
        self.sender = sender
        self.receiver = receiver
        self.broken = False

    def send(self, *message: Any, extra_s: float = 0.0) -> None:
        """Reaches the receiver later, behind everything sent before."""
        world = self._network.world
        self._last = max(self._last, world.now + extra_s + self._network.delay())
        world.after(self._last - world.now, self._arrive, message)

    def _arrive(self, message: tuple[Any, ...]) -> None:
        if self.broken:
            return
        if self._held or self._network.cut(self.sender.name, self.receiver.name):
            if not self._held:
                self._network.waiting.append(self)
            self._held.append(message)
            return
        self.receiver.deliver(self._taken, message)

    def _taken(self, message: tuple[Any, ...]) -> None:
        if not self.broken:
            self.hear(*message)

    def flush(self) -> None:
        """The link is whole again: what was held back arrives."""
        held, self._held = self._held, []
        for message in held:
            self.send(*message)

    def drop(self) -> None:
        """Nothing that is under way arrives any more."""
        self.broken = True
        self._held = []


class Network:
    """Links between named processes: each may be cut in both directions, and each message takes its time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.waiting: list[Pipe] = []
        self._cuts: dict[frozenset[str], int] = {}
        rng = world.rng
        self._base = rng.choice((0.0005, 0.002, 0.01))
        self._spike = rng.choice((0.0, 0.01, 0.05))
        self._spike_s = rng.choice((0.1, 0.5, 2.0))

    def delay(self) -> float:
        """How long one message takes."""
        rng = self.world.rng
        took = self._base * (0.5 + rng.random())
        if self._spike and rng.random() < self._spike:
            took += rng.random() * self._spike_s
        return took

    def cut(self, one: str, other: str) -> bool:
        """Whether nothing gets through between the two now."""
        return bool(self._cuts) and frozenset((one, other)) in self._cuts

    def sever(self, one: str, other: str) -> None:
        """Cut a link; cuts of several causes add up."""
        pair = frozenset((one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1

    def mend(self, one: str, other: str) -> None:
        """Take one cut back."""
        pair = frozenset((one, other))
        left = self._cuts[pair] - 1
        if left:
            self._cuts[pair] = left
            return
        del self._cuts[pair]
        pipes, self.waiting = self.waiting, []
        for pipe in pipes:
            if self.cut(pipe.sender.name, pipe.receiver.name):
                self.waiting.append(pipe)
            elif not pipe.broken:
                pipe.flush()
