"""The single writer: events → `Fleet` → effects, for as long as this process leads (one lease, one loop).

After events it compares what the fleet is with what was published and stored, and acts on the difference; it arms one
timer for the instant the fleet names. The lease is looked at before anything has an effect. Decides nothing.
"""

import asyncio
import copy
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping

import orjson
import structlog

from narwhal.clock import Clock
from narwhal.control.core.effects import Effect
from narwhal.control.core.events import Input, PassEnded, Published, Reported, StageFailure, Woke
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import to_document
from narwhal.control.core.publication import PlacementContent, publishable
from narwhal.control.core.records import Record
from narwhal.control.core.view import Explanation, FleetView
from narwhal.control.journal import Journal
from narwhal.control.probes import Request
from narwhal.control.publisher import Publisher
from narwhal.control.store.base import Lease, Store
from narwhal.control.writer import HandoffWriter, Mark, NotLeading, Snapshot
from narwhal.placement import Placement
from narwhal.reports import Batch
from narwhal.vocabulary import Stage

SHORTEST_WAIT_S = 0.001

log = structlog.get_logger()


class ControlLoop:
    """One term of leadership. Every method but the coroutines returns at once; all run on the event loop."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        lease: Lease,
        store: Store,
        clock: Clock,
        publisher: Publisher,
        probe: Callable[[Request], None],
        record: Callable[[Record], None],
        fenced: Callable[[str], None],
        writes: Counter[str],
        journal: Journal | None = None,
    ) -> None:
        """`probe` starts a check or a probe, `record` tells people, `fenced` hears once why the term is over. `writes`
        counts writes of the handoff by result. `journal` keeps what the core is given, where one is kept."""
        self._fleet = fleet
        self._clock = clock
        self._publisher = publisher
        self._probe = probe
        self._record = record
        self._fenced = fenced
        self._journal = journal
        self._inbox: deque[Input] = deque()
        self._handling = False
        self._settling: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at: tuple[PlacementContent, Mapping[str, int]] | None = None  # decided and stored, the last time
        self._content: PlacementContent | None = None  # published
        self._version = 0
        self._input_failures: list[StageFailure] = []  # since the last pass
        self._told_failures: frozenset[StageFailure] = frozenset()  # of the last pass
        self._over = ""
        self.writer = HandoffWriter(
            store=store, lease=lease, snapshot=self._snapshot, stored=self._settle_soon, lost=self.fence, results=writes
        )

    @property
    def lease(self) -> Lease:
        """The lease this term acts under."""
        return self.writer.lease

    @property
    def over(self) -> str:
        """Why this term is over; empty while it is not."""
        return self._over

    # --- events in --------------------------------------------------------------------------------------------------

    def begin(self, known: Mapping[str, int]) -> None:
        """Publishes what the fleet is at the start. `known`: the incarnations of the handoff that was resumed."""
        self.writer.incarnations = known
        self._settle()

    def post(self, event: Input) -> None:
        """Takes an event. Nothing happens when the term is over."""
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._handling = False

    async def ask(self, event: Input) -> tuple[Effect, ...]:
        """Takes a command; returns its effects once the handoff that holds what was decided is stored.

        Raises NotLeading when the term is, or comes to be, over before, and whatever the core raises.
        """
        if not self._may_act():
            raise NotLeading(self._over)
        effects = self._take(event)
        await self.writer.durable(self._mark())
        return effects

    def rehearse(self, event: Input) -> tuple[Effect, ...]:
        """What a command would bring about now; nothing is changed. Raises as `ask` does.

        The core itself is asked, on a copy: so it says what it would do. Copying a hundred engines takes 17 ms.
        """
        if not self._may_act():
            raise NotLeading(self._over)
        return copy.deepcopy(self._fleet).handle(event, now=self._clock.monotonic())

    def take(self, batch: Batch) -> Mark:
        """Takes a report. `durable` of the mark tells when it may be acknowledged (spec S6).

        Raises NotLeading, and whatever the core raises: the report does not count then.
        """
        if not self._may_act():
            raise NotLeading(self._over)
        try:
            self._take(Reported(batch=batch))
        except Exception as error:
            self._input_failed(Stage.TELEMETRY, error)
            raise
        return self._mark()

    async def durable(self, mark: Mark) -> None:
        """Returns once everything up to `mark` is stored. Raises NotLeading when that will not happen here."""
        await self.writer.durable(mark)

    async def stored(self) -> None:
        """Returns once everything that was decided until now is stored. Raises NotLeading when that will not happen
        here."""
        await self.writer.durable(Mark(decisions=self._fleet.revision))

    async def report(self, batch: Batch) -> None:
        """Takes a report and returns once it may be acknowledged. Raises as `take` and `durable` do."""
        await self.durable(self.take(batch))

    def tick(self, stage: Stage) -> None:
        """Runs the core's part of one monitor stage. Raises what the core raises, for the monitor to count."""
        if self._may_act():
            self._perform(self._given(stage))
            self._settle_soon()

    def pass_ended(self, failures: tuple[StageFailure, ...]) -> None:
        """A monitor pass is over. Events that could not be handled since the last one count as failures of it."""
        failed, self._input_failures = self._input_failures, []
        self._told_failures = frozenset(failed)
        known = {(f.stage, f.error_class): f for f in (*reversed(failed), *failures)}
        order = list(Stage)
        self.post(PassEnded(failures=tuple(sorted(known.values(), key=lambda f: order.index(f.stage)))))

    def view(self) -> FleetView:
        """What the fleet looks like now."""
        return self._fleet.view(now=self._clock.monotonic(), stored=self.writer.incarnations)

    def explain(self, engine: str) -> Explanation:
        """Why an engine is, or is not, eligible. Raises `CommandRefusedError` for an unknown one."""
        return self._fleet.explain(engine, now=self._clock.monotonic(), stored=self.writer.incarnations)

    # --- the end ----------------------------------------------------------------------------------------------------

    def fence(self, reason: str) -> None:
        """Decides, publishes and writes nothing from now on."""
        if self._over:
            return
        self._over = reason
        self._inbox.clear()
        for handle in (self._timer, self._settling):
            if handle is not None:
                handle.cancel()
        self.writer.end(reason)
        self._fenced(reason)

    def _may_act(self) -> bool:
        """The fence: asked before anything that others could see."""
        if not self._over and not self.lease.may_act(self._clock.boottime()):
            self.fence(self.lease.lost or "the lease was not renewed in time")
        return not self._over

    def check_lease(self) -> None:
        """Fences when the lease is over though nothing happens."""
        self._may_act()

    async def move(self, acquire: Callable[[], Awaitable[Lease | None]]) -> None:
        """Goes on under a higher epoch, with everything in memory kept. Raises StoreError when that could not be had;
        the term is over when the lease is somebody else's."""
        lease = await self.writer.move(acquire)
        if lease is None:
            self.fence("the lease is held by another process")
            return
        self._looked_at = self._content = None
        self._version = 0
        self._settle()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _handle(self, event: Input) -> None:
        if not self._may_act():
            return
        try:
            self._take(event)
        except Exception as error:
            self._input_failed(Stage.CONTROLLER, error)

    def _take(self, event: Input) -> tuple[Effect, ...]:
        effects = self._given(event)
        self._perform(effects)
        self._settle_soon()
        return effects

    def _given(self, what: Input | Stage) -> tuple[Effect, ...]:
        """What the core makes of an event, or of a stage of a pass."""
        fleet, now, journal = self._fleet, self._clock.monotonic(), self._journal
        try:
            effects = fleet.tick(what, now=now) if isinstance(what, Stage) else fleet.handle(what, now=now)
        except Exception as error:
            if journal is not None:
                journal.note(what, (), now=now, raised=f"{type(error).__name__}: {error}")
            raise
        if journal is not None:
            journal.note(what, effects, now=now)
        return effects

    def _input_failed(self, stage: Stage, error: Exception) -> None:
        """An event that the core could not handle is a fault of ours: it shows in /ready, in events and in metrics."""
        failure = StageFailure(stage=stage, error_class=type(error).__name__, message=str(error))
        if failure in self._input_failures:
            return
        self._input_failures.append(failure)
        if failure not in self._told_failures:
            log.error("event not handled", stage=stage.value, exc_info=error)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if not self._may_act():
                return
            match effect:
                case Record():
                    self._record(effect)
                case _:
                    self._probe(effect)

    def _mark(self) -> Mark:
        return Mark(decisions=self._fleet.revision, counters=self._fleet.counters_revision)

    def _snapshot(self) -> Snapshot:
        now = self._clock.monotonic()
        state = self._fleet.save(now=now)
        owner = self.lease.owner
        document = to_document(state, wall=self._clock.wall(), epoch=owner.epoch, holder=owner.holder)
        incarnations = {engine: saved.incarnation for engine, saved in state.engines.items()}
        return Snapshot(document=orjson.dumps(document), mark=self._mark(), incarnations=incarnations)

    def _settle_soon(self) -> None:
        """Many events may come in one turn of the event loop; what they amount to is looked at once, at its end."""
        if self._settling is None and not self._over:
            self._settling = asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Publishes and stores what differs, and arms the timer."""
        self._settling = None
        if not self._may_act():
            return
        try:
            self._publish()
            # Counters alone wait for the pass.
            self.writer.want(Mark(decisions=self._fleet.revision))
            self._arm()
        except Exception as error:
            self._input_failed(Stage.CONTROLLER, error)

    def _publish(self) -> None:
        decided, stored = self._fleet.placement(now=self._clock.monotonic()), self.writer.incarnations
        known = self._looked_at
        if known is not None and decided is known[0] and stored is known[1]:
            return  # as after nearly every report and acknowledgement
        content = publishable(decided, stored)
        self._looked_at = decided, stored
        if content == self._content:
            return
        self._content = content
        self._version += 1
        placement = Placement(
            epoch=self.lease.epoch, version=self._version, closed=content.closed, engines=content.engines
        )
        self._publisher.publish(placement)
        serving = frozenset(e.id for e in content.engines.values() if e.phases or e.phases_after_quarantine)
        self.post(Published(epoch=placement.epoch, version=placement.version, serving=serving, closed=placement.closed))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._fleet.next_due()
        if due is not None:
            wait = max(SHORTEST_WAIT_S, due - self._clock.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.post(Woke())
