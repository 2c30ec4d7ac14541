"""A control process, active or standby: the lease that lets it act, resume, the streams of its proxies.

Mirrors the real leader: acquire, load, lead until it is over, try again. Every process starts with --resume.
"""

import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from narwhal.control.core.events import (
    Input,
)
from narwhal.control.core.handoff import aged, from_document, to_document
from narwhal.reports import Batch
from narwhal.vocabulary import Stage
from tests.simulation.engines import Engine
from tests.simulation.links import Stream
from tests.simulation.plan import Plan
from tests.simulation.publisher import HEARTBEAT_S, Publisher
from tests.simulation.store import BOOT_MARGIN_S, Document, Failed, Lease, LeaseLost, Store
from tests.simulation.term import Term
from tests.simulation.world import Network, Node

if TYPE_CHECKING:
    from tests.simulation.invariants import Watch

POLL_S = 0.5
MOST_DRIFT = 0.02  # of any clock; far beyond what machines do, far within the safety margin of a lease


class Reports:
    """Control's side of one report stream: takes batches, acknowledges the newest that is stored."""

    def __init__(self, control: "Control", stream: Stream) -> None:
        self.control = control
        self.stream = stream
        self.taken = self.acknowledged = 0

    def broken(self, _why: str) -> None:
        """The stream is over."""

    def hear(self, kind: str, *rest: object) -> None:
        """One message of the proxy."""
        batch = rest[0]
        term = self.control.term
        if self.stream.control_side is not self:
            return
        if term is None:
            self.stream.end_at_control("does not lead")
        elif kind == "closed":
            self.stream.end_at_control(str(batch))
        elif isinstance(batch, Batch):
            if self.taken and batch.sequence > self.taken + 1:
                self.stream.end_at_control(f"report {batch.sequence} came after {self.taken}")
                return
            self.taken = max(self.taken, batch.sequence)
            term.report(batch, lambda: self._durable(batch.sequence))

    def _durable(self, sequence: int) -> None:
        if sequence > self.acknowledged and self.stream.control_side is self:
            self.acknowledged = sequence
            self.control.watch.acknowledging(self.stream.proxy, sequence)
            self.stream.down.send("acked", sequence)


class Control(Node):
    """One control process, active or standby."""

    def __init__(
        self,
        name: str,
        *,
        network: Network,
        plan: Plan,
        store: Store,
        engines: dict[str, Engine],
        watch: "Watch",
    ) -> None:
        super().__init__(network.world, name)
        self.network = network
        self.plan = plan
        self.store = store
        self.engines = engines
        self.watch = watch
        self.term: Term | None = None
        self.publisher = Publisher(self)
        self.failing_stage: Stage | None = None
        self.answers_in_trouble = False
        # By how much its clock runs too fast or too slow. Drawn apart, so that a seed is the run it was.
        self._drift = Random(f"clock {network.world.seed} {name}").uniform(-MOST_DRIFT, MOST_DRIFT)
        self._highest_epoch = 0
        self._reports: dict[Reports, None] = {}

    def boottime(self) -> float:
        """The clock by which it counts what is left of its lease. It is not the store's."""
        return self.skew + self.world.now * (1.0 + self._drift)

    def wall(self) -> float:
        """Its wall clock: another machine's is a little off."""
        return 1_000_000.0 + self.world.now + (self.skew % 1.0)

    # --- life -----------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """The process starts and tries to lead."""
        self._try()
        self._beat()

    def kill(self) -> None:
        """kill -9. A lease of the kernel's is free at once, another when its time is over."""
        if not self.alive:
            return
        self._stop("killed")
        self.die()
        if not self.store.ttl_s:
            self.store.release(self.name)

    def restart(self) -> None:
        """The process starts again, with --resume; one that runs already is left alone."""
        if self.alive:
            return
        self.alive = True
        self._highest_epoch = 0
        self.say("starts again")
        self.boot()

    def fence(self, why: str) -> None:
        """The term is over, the process is not."""
        if self.term is not None:
            self.say(f"fenced: {why}")
            self._stop(why)
            self.after(POLL_S, self._try)

    def _stop(self, why: str) -> None:
        term, self.term = self.term, None
        if term is not None:
            term.end(why)
        self.publisher.withdraw(why)
        for reports in self._reports:
            reports.stream.end_at_control(why)
        self._reports.clear()

    def _beat(self) -> None:
        if self.term is not None:
            self.term.may_act()
        self.publisher.beat()
        self.after(HEARTBEAT_S, self._beat)

    # --- leading --------------------------------------------------------------------------------------------------

    def _try(self) -> None:
        """Take the lease, if it is to be had."""
        if self.term is not None:
            return
        above, asked_at = self._highest_epoch, self.boottime()

        def done(epoch: Any, error: Failed | None) -> None:
            if error is not None or epoch is None:
                self.after(POLL_S, self._try)
                return
            self._load(self._lease(epoch, asked_at))

        self.store.call(self, lambda: self.store.acquire(self.name, above), done)

    def _lease(self, epoch: int, asked_at: float) -> Lease:
        return Lease(holder=self.name, epoch=epoch, valid_until=self._valid_until(asked_at))

    def _valid_until(self, asked_at: float) -> float:
        """Counted from before the store was asked: it cannot have begun to count earlier."""
        return asked_at + self.store.ttl_s - BOOT_MARGIN_S if self.store.ttl_s else math.inf

    def _load(self, lease: Lease) -> None:
        def done(document: Any, error: Failed | None) -> None:
            if error is not None or not lease.may_act(self.boottime()):
                self.after(POLL_S, self._try)
            else:
                self._lead(lease, document)

        self.store.call(self, lambda: self.store.document, done)

    def _lead(self, lease: Lease, document: Document | None) -> None:
        now = self.now()
        saved, known = None, {}
        if document is not None:
            # Read as it would be read: through the document that stands in the store.
            written = to_document(
                document.state, wall=document.written_at, epoch=document.epoch, holder=document.holder
            )
            saved = aged(from_document(self.watch.through_json(written)), wall=self.wall())
            known = {engine: s.incarnation for engine, s in saved.engines.items()}
        fleet = self.watch.fleet(self.plan.core, now=now, epoch=lease.epoch, saved=saved)
        self.term = term = Term(self, fleet, lease, known)
        self.say(f"leads under epoch {lease.epoch}{' after a resume' if saved else ''}")
        self.watch.leading(term, document)
        term.begin()
        self.epoch_seen(self._highest_epoch)
        if self.store.ttl_s:
            self._renew(term)

    def _renew(self, term: Term) -> None:
        lease, asked_at = term.lease, self.boottime()

        def done(_: Any, error: Failed | None) -> None:
            if term.lease is lease:
                self._renewed(lease, asked_at, error)

        if term.over:
            return
        self.store.call(self, lambda: self.store.renew(lease.holder, lease.epoch), done)
        self.after(self.store.ttl_s / 3, self._renew, term)

    def _renewed(self, lease: Lease, asked_at: float, error: Failed | None) -> None:
        """A renewal came back. One without an answer is neither lost nor renewed."""
        if isinstance(error, LeaseLost):
            lease.lost = str(error)
        elif error is None:
            lease.valid_until = max(lease.valid_until, self._valid_until(asked_at))

    def epoch_seen(self, epoch: int) -> None:
        """Somebody has seen this epoch: an active below it goes on above it."""
        self._highest_epoch = max(self._highest_epoch, epoch)
        term = self.term
        if term is not None and epoch > term.lease.epoch and not term.moving:
            term.moving = True
            self._move(term)

    def _move(self, term: Term) -> None:
        if term.over:
            return
        if term.writing:
            self.after(0.005, self._move, term)
            return
        asked_at = self.boottime()

        def done(fresh: Any, error: Failed | None) -> None:
            term.moving = False
            if term.over or error is not None:
                return
            if fresh is None:
                self.fence("the lease is held by another process")
            else:
                term.moved(self._lease(fresh, asked_at))

        self.store.call(self, lambda: self.store.acquire(self.name, self._highest_epoch), done)

    # --- streams --------------------------------------------------------------------------------------------------

    def post(self, event: Input) -> None:
        """For the core, while this process leads."""
        if self.term is not None:
            self.term.post(event)

    def hearer(self, stream: Stream) -> Callable[..., None]:
        """Who takes what a proxy says on a placement stream."""

        def hear(kind: str, *rest: object) -> None:
            self.publisher.hear(stream, kind, *rest)

        return hear

    def report_hearer(self, stream: Stream) -> Callable[..., None]:
        """Who takes a proxy's reports."""
        reports = Reports(self, stream)
        stream.control_side = reports
        self._reports[reports] = None
        return reports.hear
