"""One term of leadership: the real core with the shell's two-phase rules around it.

Mirrors what the real loop and writer do, without asyncio: events to the core, effects out; at the end of the turn what
differs from what was published is published, and decisions are written at once; one write at a time, counters with the
pass; a report is acknowledged when a document that holds it is stored; the lease is looked at before any effect.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from narwhal.control.core.effects import Effect, ProbeHealth, ProbeInference, RunCheck
from narwhal.control.core.events import (
    Command,
    CommandRefusedError,
    Input,
    PassEnded,
    Published,
    Reported,
    StageFailure,
    Woke,
)
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.publication import PlacementContent, publishable
from narwhal.control.core.records import Record
from narwhal.placement import Placement
from narwhal.reports import Batch
from narwhal.vocabulary import Stage
from tests.simulation.prober import Prober
from tests.simulation.store import Document, Failed, Lease, LeaseLost
from tests.simulation.world import Timer

if TYPE_CHECKING:
    from tests.simulation.control import Control

SHORTEST_WAIT_S = 0.001
Mark = tuple[int, int]  # decisions, counters


class Term:
    """One period of leadership: what exists only while leading."""

    def __init__(self, control: "Control", fleet: Fleet, lease: Lease, known: dict[str, int]) -> None:
        self.control = control
        self.fleet = fleet
        self.lease = lease
        self.incarnations = known  # of the newest stored document
        self.mark: Mark = (-1, -1)  # of it
        self.over = ""
        self.prober = Prober(control, control.engines, self.post)
        self._content: PlacementContent | None = None
        self._version = 0
        self._settling = False
        self._timer: Timer | None = None
        self._writing = False
        self._failing = False
        self._waiting: list[tuple[Mark, Callable[[], None]]] = []
        self._pass_waits: Callable[[Failed | None], None] | None = None
        self.moving = False  # the lease is being taken anew: no write is under way with the old one

    # --- events in ------------------------------------------------------------------------------------------------

    def post(self, event: Input) -> None:
        """Something happened. Nothing is done when the term is over."""
        if not self.may_act():
            return
        self.control.watch.handling(self, event)
        self._perform(self.fleet.handle(event, now=self.control.now()))
        self.control.watch.handled(self, event)
        self._settle_soon()

    def report(self, batch: Batch, durable: Callable[[], None]) -> None:
        """A report; `durable` is called when it may be acknowledged."""
        self.post(Reported(batch=batch))
        if not self.over:
            self._waiting.append((self._mark(), durable))

    def command(self, event: Command) -> bool:
        """An operator's command; whether it was not refused."""
        if not self.may_act():
            return False
        try:
            self.post(event)
        except CommandRefusedError as refused:
            self.control.say(f"refuses a command: {refused}")
            return False
        return True

    def may_act(self) -> bool:
        """The fence: asked before anything that others could see."""
        if not self.over and not self.lease.may_act(self.control.boottime()):
            self.control.fence(self.lease.lost or "the lease was not renewed in time")
        return not self.over

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if not self.may_act():
                return
            match effect:
                case Record():
                    self.control.say(f"{effect.kind}: {effect.message}")
                    self.control.watch.recorded(self, effect)
                case RunCheck() | ProbeHealth() | ProbeInference():
                    self.control.watch.asked(self, effect)
                    self.prober.start(effect)
                case _:
                    self.prober.start(effect)

    # --- what differs ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Publish what the fleet is at the start, then the proxies that are connected already."""
        self._settle()
        for subscriber in list(self.control.publisher.proxies.values()):
            self.post(subscriber.hello)
        self.control.after(self.control.world.rng.random() * 0.01, self._pass, self.control.now())

    def _settle_soon(self) -> None:
        if not self._settling and not self.over:
            self._settling = True
            self.control.after(0.0, self._settle)

    def _settle(self) -> None:
        self._settling = False
        if not self.may_act():
            return
        self._publish()
        if not self._failing and self.mark[0] < self.fleet.revision:
            self.write()
        self._arm()

    def _publish(self) -> None:
        now = self.control.now()
        content = publishable(self.fleet.placement(now=now), self.incarnations)
        if content is self._content or content == self._content:
            return
        self._content = content
        self._version += 1
        placement = Placement(
            epoch=self.lease.epoch, version=self._version, closed=content.closed, engines=content.engines
        )
        self.control.watch.published(self, placement)
        self.control.publisher.publish(placement)
        serving = frozenset(e.id for e in content.engines.values() if e.phases or e.phases_after_quarantine)
        self.post(Published(epoch=placement.epoch, version=placement.version, serving=serving, closed=placement.closed))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.off = True
            self._timer = None
        due = self.fleet.next_due()
        if due is not None:
            self._timer = self.control.after(max(SHORTEST_WAIT_S, due - self.control.now()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.post(Woke())

    # --- the writer -----------------------------------------------------------------------------------------------

    def _mark(self) -> Mark:
        return (self.fleet.revision, self.fleet.counters_revision)

    @property
    def writing(self) -> bool:
        """Whether a write is under way."""
        return self._writing

    def write(self) -> None:
        """Write the newest state, unless a write is under way."""
        if self._writing or self.moving or self.over:
            return
        control, mark = self.control, self._mark()
        document = Document(
            state=self.fleet.save(now=control.now()),
            written_at=control.wall(),
            taken_at=control.world.now,
            epoch=self.lease.epoch,
            holder=self.lease.holder,
        )
        self._writing = True
        self._failing = True  # unless it is seen to succeed
        lease = self.lease

        def done(_: Any, error: Failed | None) -> None:
            self._writing = False
            if not self.over:
                self._written(document, mark, error)

        control.store.call(control, lambda: control.store.save(lease, document), done)

    def _written(self, document: Document, mark: Mark, error: Failed | None) -> None:
        waiting, self._pass_waits = self._pass_waits, None
        if isinstance(error, LeaseLost):
            self.control.fence(str(error))
            return
        if error is None:
            self._failing = False
            self.mark = mark
            self.incarnations = {e: saved.incarnation for e, saved in document.state.engines.items()}
            ready = [act for wanted, act in self._waiting if _covers(mark, wanted)]
            self._waiting = [w for w in self._waiting if not _covers(mark, w[0])]
            for act in ready:
                act()
        if waiting is not None:
            waiting(error)
        if error is None:
            self._settle()

    # --- the monitor ----------------------------------------------------------------------------------------------

    def _pass(self, due: float) -> None:
        """One pass. Only its last stage waits, for the store."""
        if not self.may_act():
            return
        failures: list[StageFailure] = []
        for stage in Stage:
            if stage is Stage.HANDOFF or not self.may_act():
                continue
            if self.control.failing_stage is stage:
                failures.append(StageFailure(stage=stage, error_class="RuntimeError", message="planted"))
                continue
            self._perform(self.fleet.tick(stage, now=self.control.now()))
            self.control.watch.ticked(self)
        self._settle_soon()

        def handed(error: Failed | None) -> None:
            if error is not None:
                failures.append(StageFailure(stage=Stage.HANDOFF, error_class="StoreError", message=str(error)))
            self.post(PassEnded(failures=tuple(failures)))
            now = self.control.now()
            again = max(due + self.control.plan.core.monitor_interval_s, now)
            self.control.after(again - now, self._pass, again)

        self._hand_off(handed)

    def _hand_off(self, handed: Callable[[Failed | None], None]) -> None:
        """The handoff stage's own write, after the one that is under way."""
        if self.over:
            return
        if self._writing or self.moving:
            self.control.after(0.005, self._hand_off, handed)
            return
        self._pass_waits = handed
        self.write()

    # --- the end --------------------------------------------------------------------------------------------------

    def moved(self, lease: Lease) -> None:
        """Goes on under a higher epoch, with everything in memory kept."""
        self.lease = lease
        self._content = None
        self._version = 0
        self._settle()

    def end(self, why: str) -> None:
        """Decides, publishes and writes nothing from now on."""
        self.over = why
        self.prober.over = True
        self._waiting.clear()
        self.control.watch.term_over(self)


def _covers(mark: Mark, wanted: Mark) -> bool:
    return mark[0] >= wanted[0] and mark[1] >= wanted[1]
