"""Model engines: the protocol of the real ones at the level of answers, tokens and KV, with the real faults.

What each trouble looks like from outside is that of recorded engines: a 200 comes before the KV transfer and says
nothing; a dead producer shows as an error event in its reader's stream, followed by the terminal marker; a stopped
process accepts connections and answers nothing.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from narwhal.vocabulary import Phase
from tests.simulation.ledger import Handoff, Ledger
from tests.simulation.world import Network, Node, Pipe, World

KV_LEASE_S = 30.0
UNKNOWN_PEER_S = 5.0  # how long a reader tries a producer that does not answer as the one it knew


class Trouble(StrEnum):
    """What can be wrong with an engine."""

    DOWN = "down"  # nobody listens: refused
    RESET = "reset"  # connections are reset before an answer
    HANG = "hang"  # the whole process is stopped
    SLOW = "slow"  # everything takes many times as long
    HTTP_500 = "500"
    HTTP_503 = "503"
    BUSY = "429"
    CUT = "cut"  # answers and streams end in the middle
    SILENT = "silent"  # streams stop in the middle and stay open
    ERROR_EVENT = "error event"  # and the terminal marker after it
    EMPTY = "marker without token"
    BAD_HANDOFF = "unusable handoff"
    DEAD_GENERATION = "dead generation"  # health 200, nothing else answers
    UNREADABLE = "unreadable"  # prefill works, and who reads its KV gets an error
    MUTE_KV = "mute kv"  # prefill works, and who reads its KV waits
    SICK_HEALTH = "sick health"  # health 500, generation works
    MUTE_HEALTH = "mute health"  # health says nothing, generation works
    NOT_FOUND = "404"  # to whatever is to be generated; the model is listed, and health is 200


class Seen(StrEnum):
    """What reaches the client of a call."""

    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    RESET = "reset"
    STATUS = "status"  # not 200; the value is the status
    ANSWER = "answer"  # a whole 200 answer; the value is the handoff of a prefill
    UNUSABLE = "unusable"  # a prefill's 200 without a usable handoff
    TOKEN = "token"
    ERROR = "error event"
    MARKER = "marker"
    CLOSED = "closed"  # in the middle of an answer or a stream


class Ask(StrEnum):
    """What is asked of an engine."""

    PREFILL = "prefill"
    ANSWER = "answer"  # a decode leg that does not stream
    STREAM = "stream"
    HEALTH = "health"
    MODEL = "model"
    CONNECT = "connect"  # nothing is asked: the kernel answers, even for a stopped process


class Shape(NamedTuple):
    """How long generation takes, drawn by whoever asks."""

    prefill_s: float = 0.1
    first_s: float = 0.1
    chunks: int = 4
    gap_s: float = 0.2


USUAL = Shape()


class Wire:
    """One request on its connection: what the engine says goes to `hear`, until either side closes."""

    __slots__ = ("_back", "ask", "client", "closed", "connected", "engine", "handoff", "shape")

    def __init__(
        self,
        engine: "Engine",
        client: Node,
        ask: Ask,
        hear: Callable[[Seen, object], None],
        *,
        shape: Shape,
        handoff: Handoff | None,
    ) -> None:
        self.engine = engine
        self.client = client
        self.ask = ask
        self.shape = shape
        self.handoff = handoff
        self.connected = False
        self.closed = False  # the engine need not go on
        self._back = Pipe(engine.network, engine, client, hear)
        engine.world.after(engine.network.delay(), self._arrive)

    def _arrive(self) -> None:
        engine = self.engine
        if engine.network.cut(self.client.name, engine.name):
            if engine.unreachable_at_once and not self.closed:
                self.client.deliver(self._back.hear, Seen.UNREACHABLE, None)
            return  # else a black hole: the client's own time-out ends it
        # The kernel accepts for a stopped process, and answers for one that is gone.
        self.connected = True
        if not engine.alive:
            self.emit(Seen.REFUSED)
            return
        if self.ask is Ask.CONNECT:
            self.emit(Seen.ANSWER)
            return
        engine.open[self] = None
        engine.deliver(engine.accept, self)

    def emit(self, seen: Seen, value: object = None, extra_s: float = 0.0) -> None:
        """The engine says something."""
        if not self.closed:
            self._back.send(seen, value, extra_s=extra_s)

    def close(self) -> None:
        """The client hangs up: it hears nothing more, and the engine stops."""
        self.closed = True
        self._back.drop()


class Engine(Node):
    """One engine. A restart is a new process behind the same address."""

    def __init__(self, world: World, network: Network, ledger: Ledger, name: str, role: Phase) -> None:
        super().__init__(world, name)
        self.network = network
        self.ledger = ledger
        self.role = role
        self.peers: dict[str, Engine] = {}
        self.troubles: dict[Trouble, float] = {}  # → share of requests that meet it
        self.unreachable_at_once = world.rng.random() < 0.5
        self.slow_factor = 1.0
        self.started_at = 1_000_000.0 - world.rng.uniform(100.0, 1000.0)
        self.poisoned: set[str] = set()  # readers that cannot read from this process while they know the one before
        self.met: set[str] = set()  # readers that have read from it
        self.open: dict[Wire, None] = {}  # in the order they came, so that a seed is a run
        self.sick_at = -1e9  # when something was wrong with it last
        self.flickered_at = -1e9  # when a trouble that not every request meets was met last

    # --- its life -------------------------------------------------------------------------------------------------

    def trouble(self, kind: Trouble, share: float = 1.0) -> None:
        """Something begins to be wrong."""
        self.say(f"trouble: {kind} ({share:g})")
        self.troubles[kind] = share
        if kind is Trouble.DOWN:
            self._stop_process()
        elif kind is Trouble.HANG:
            self.pause()

    def relieve(self, kind: Trouble) -> None:
        """It is over."""
        self.troubles.pop(kind, None)
        self.say(f"over: {kind}")
        self.sick_at = self.world.now
        if kind is Trouble.DOWN:
            self._start_process(keep_id=False)
        elif kind is Trouble.HANG:
            self.resume()

    def restart(self, down_s: float, *, keep_id: bool) -> None:
        """Stopped and started in place; with a fixed id its old readers cannot read from it any more."""
        self._stop_process()
        self.troubles[Trouble.DOWN] = 1.0
        self.world.after(down_s, self._restarted, keep_id)

    def _restarted(self, keep_id: bool) -> None:
        self.troubles.pop(Trouble.DOWN, None)
        self._start_process(keep_id=keep_id)

    def _stop_process(self) -> None:
        self.sick_at = self.world.now
        self.die()
        for wire in self.open:
            # A stream's headers are out as soon as it is accepted; nothing of another answer is before its end.
            wire.emit(Seen.CLOSED if wire.ask is Ask.STREAM else Seen.RESET)
        self.open.clear()

    def _start_process(self, *, keep_id: bool) -> None:
        self.alive = True
        self.life += 1
        self.started_at = 1_000_000.0 + self.world.now
        self.poisoned = set(self.met) if keep_id else set()
        self.met = set()
        self.sick_at = self.world.now
        for other in self.peers.values():
            other.poisoned.discard(self.name)  # it knows nobody any more
            other.met.discard(self.name)
        self.say(f"started anew{' with its old id' if keep_id else ''}")

    @property
    def sick(self) -> bool:
        """Whether something is wrong with it now, transfers to some readers included."""
        return bool(self.troubles) or bool(self.poisoned) or not self.alive

    def _meets(self, kind: Trouble) -> bool:
        share = self.troubles.get(kind)
        if share is not None and share < 1.0:
            self.flickered_at = self.world.now
            return self.world.rng.random() < share
        return share is not None

    # --- requests -------------------------------------------------------------------------------------------------

    def request(
        self,
        client: Node,
        ask: Ask,
        hear: Callable[[Seen, object], None],
        *,
        shape: Shape = USUAL,
        handoff: Handoff | None = None,
    ) -> Wire:
        """Connect and ask; `hear` is told what comes back, in order."""
        if handoff is not None:
            self.ledger.send(handoff, self.name)
        return Wire(self, client, ask, hear, shape=shape, handoff=handoff)

    def accept(self, wire: Wire) -> None:
        """A request has arrived."""
        if wire.closed:
            self._done(wire)
        elif self._meets(Trouble.RESET):
            wire.emit(Seen.RESET)
            self._done(wire)
        elif wire.ask is Ask.HEALTH:
            self._health(wire)
        elif wire.ask is Ask.MODEL:
            self.after(0.002, self._answer, wire, None)
        elif self._meets(Trouble.DEAD_GENERATION):
            pass  # taken, and never answered
        elif self._meets(Trouble.NOT_FOUND):
            self._status(wire, 404)
        elif self._meets(Trouble.BUSY):
            self._status(wire, 429)
        elif self._meets(Trouble.HTTP_500):
            self._status(wire, 500)
        elif self._meets(Trouble.HTTP_503):
            self._status(wire, 503)
        elif wire.ask is Ask.PREFILL:
            self.after(self._takes(wire.shape.prefill_s), self._prefilled, wire)
        else:
            self._pull(wire)

    def _takes(self, seconds: float) -> float:
        return seconds * self.slow_factor if Trouble.SLOW in self.troubles else seconds

    def _health(self, wire: Wire) -> None:
        if self._meets(Trouble.SICK_HEALTH):
            self._status(wire, 500)
        elif not self._meets(Trouble.MUTE_HEALTH):
            self.after(0.002, self._answer, wire, None)

    def _status(self, wire: Wire, status: int) -> None:
        wire.emit(Seen.STATUS, status)
        self._done(wire)

    def _answer(self, wire: Wire, value: object) -> None:
        wire.emit(Seen.ANSWER, value)
        self._done(wire)

    def _done(self, wire: Wire) -> None:
        self.open.pop(wire, None)

    def _prefilled(self, wire: Wire) -> None:
        if wire.closed:
            self._done(wire)
        elif self._meets(Trouble.CUT):
            wire.emit(Seen.CLOSED)
            self._done(wire)
        elif self._meets(Trouble.BAD_HANDOFF):
            wire.emit(Seen.UNUSABLE)
            self._done(wire)
        else:
            probe = wire.client.name.startswith("control")
            handoff = self.ledger.open(self.name, self.life, probe=probe, now=self.world.now)
            self._answer(wire, handoff)

    # --- decode ---------------------------------------------------------------------------------------------------

    def _pull(self, wire: Wire) -> None:
        """Fetch the KV; the headers of a stream have gone out by now."""
        if wire.closed:
            self._done(wire)
            return
        handoff = wire.handoff
        if handoff is None or handoff.producer == self.name:
            self._generate(wire)
            return
        producer = self.peers[handoff.producer]
        if producer.paused or Trouble.MUTE_KV in producer.troubles or self.network.cut(self.name, producer.name):
            self.after(0.5, self._pull, wire)  # it waits for as long as the producer does not answer
        elif not producer.alive:
            self._no_kv(wire, 0.01)
        elif producer.life != handoff.process or self.name in producer.poisoned:
            self._no_kv(wire, UNKNOWN_PEER_S)
        elif Trouble.UNREADABLE in producer.troubles:
            self._no_kv(wire, 0.05)
        else:
            handoff.pulled = True
            producer.met.add(self.name)
            self._generate(wire)

    def _no_kv(self, wire: Wire, after_s: float) -> None:
        self.after(after_s, self._failed_pull, wire)

    def _failed_pull(self, wire: Wire) -> None:
        if wire.ask is Ask.STREAM:
            wire.emit(Seen.ERROR)
            wire.emit(Seen.MARKER)
        else:
            wire.emit(Seen.STATUS, 500)
        self._done(wire)

    def _generate(self, wire: Wire) -> None:
        shape = wire.shape
        if wire.ask is Ask.STREAM:
            self.after(self._takes(shape.first_s), self._chunk, wire, shape.chunks)
        else:
            self.after(self._takes(shape.first_s + shape.chunks * shape.gap_s), self._whole, wire)

    def _whole(self, wire: Wire) -> None:
        if self._meets(Trouble.CUT):
            wire.emit(Seen.CLOSED)
            self._done(wire)
        elif not self._meets(Trouble.SILENT):
            self._answer(wire, None)

    def _chunk(self, wire: Wire, left: int) -> None:
        if wire.closed:
            self._done(wire)
            return
        first = left == wire.shape.chunks
        if first and self._meets(Trouble.EMPTY):
            wire.emit(Seen.MARKER)
        elif self._meets(Trouble.ERROR_EVENT):
            wire.emit(Seen.ERROR)
            wire.emit(Seen.MARKER)
        elif self._meets(Trouble.CUT) and not first:
            wire.emit(Seen.CLOSED)
        elif self._meets(Trouble.SILENT) and not first:
            return
        elif left == 0:
            wire.emit(Seen.MARKER)
        else:
            wire.emit(Seen.TOKEN)
            self.after(self._takes(wire.shape.gap_s), self._chunk, wire, left - 1)
            return
        self._done(wire)
