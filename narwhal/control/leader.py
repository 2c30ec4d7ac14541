"""What this process is: standby, active, fenced, and how it passes from one to the other (spec S5, S7, S8).

A candidate attains the lease → a term leads until it is over → a candidate again. Owns everything that exists only
while leading. Decides nothing about engines.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import structlog

from narwhal.clock import Clock
from narwhal.control.candidate import Candidate, Start
from narwhal.control.chronicle import Chronicle
from narwhal.control.core.events import Answer, Reloaded, StageFailure
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import aged
from narwhal.control.core.history import Ending, History
from narwhal.control.core.records import EventKind, Record
from narwhal.control.journal import Journal
from narwhal.control.loop import ControlLoop
from narwhal.control.monitor import Monitor, Runner
from narwhal.control.observe import Observer
from narwhal.control.plan import Plan
from narwhal.control.probes import Probes
from narwhal.control.publisher import Publisher
from narwhal.control.snapshot import pack
from narwhal.control.standing import Readiness, Standing, active, over, told
from narwhal.control.store.base import Lease, Owner, Store, StoreError
from narwhal.control.writer import NotLeading
from narwhal.vocabulary import NotReady, Stage

LEASE_LOOK_S = 0.1  # how often the lease of an idle loop is looked at
LAST_WRITE_S = 0.4  # what a clean end waits for the store
RELEASE_S = 0.3
YIELD_WRITE_S = 2.0  # what a yield waits for its last state handoff

log = structlog.get_logger()


@dataclass(kw_only=True)
class Term:
    """One period of leadership."""

    loop: ControlLoop
    monitor: Monitor
    probes: Probes
    chronicle: Chronicle
    over: asyncio.Event = field(default_factory=asyncio.Event)  # it acts no more
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # and the lease is released, if the store let it
    ending: Ending = Ending.FENCED  # how it ends


Runners = Callable[[ControlLoop], Mapping[Stage, Runner]]


def stage_runners(loop: ControlLoop) -> dict[Stage, Runner]:
    """The runner of every stage: the core's share, and for `handoff` the write, the only one that waits for IO."""

    def tick(stage: Stage) -> Runner:
        async def run() -> None:
            loop.tick(stage)

        return run

    return {stage: loop.writer.write if stage is Stage.HANDOFF else tick(stage) for stage in Stage}


class Leader:
    """The life of one control process. Run `run()` as a task, end with `stop()`."""

    def __init__(
        self,
        *,
        plan: Plan,
        store: Store,
        clock: Clock,
        publisher: Publisher,
        observer: Observer,
        holder: str,
        address: str,
        resume: bool,
        runners: Runners = stage_runners,
        journal: Journal | None = None,
    ) -> None:
        """`holder` and `address` are what the lease names; `resume` is the flag of the start. `runners` makes the
        stages of a monitor pass. `journal` keeps what the core is given, where one is kept."""
        self.standing = Standing.STARTING
        self.writes: Counter[str] = Counter()
        self.passes = 0  # monitor passes since this process began
        self.passes_s = 0.0  # seconds that they took
        self.stale_refusals = 0  # hellos that named a higher epoch than ours
        self.holder = holder
        self.address = address
        self._store = store
        self._clock = clock
        self._publisher = publisher
        self._observer = observer
        self._runners = runners
        self.journal = journal
        self._term: Term | None = None
        self._moving: asyncio.Task[None] | None = None
        self._yielded_at: float | None = None  # when anybody of the fleet yielded last, monotonic seconds
        self._untold: tuple[int, float, Ending, str] | None = None  # the end of an epoch of ours, for the history
        self.candidate = Candidate(
            plan=plan,
            store=store,
            clock=clock,
            record=observer.record,
            holder=holder,
            address=address,
            resume=resume,
            stands_by=self._stands_by,
        )
        publisher.configure(plan.core.name, plan.proxy_settings)

    # --- what others read -------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What this process works by."""
        return self.candidate.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.candidate.plan = plan

    @property
    def owner(self) -> Owner | None:
        """Who leads, as far as this process knows."""
        return self.candidate.owner

    @property
    def takeovers(self) -> int:
        """Terms that followed another one that this process saw."""
        return self.candidate.takeovers

    @property
    def since_yield_s(self) -> float | None:
        """Seconds since anybody of this fleet yielded; None when nobody did, as far as an active knows."""
        return None if self._yielded_at is None else self._clock.monotonic() - self._yielded_at

    @property
    def loop(self) -> ControlLoop | None:
        """The loop while this process leads, else None."""
        term = self._term
        return term.loop if term is not None and not term.loop.over else None

    @property
    def lease(self) -> Lease | None:
        """The lease while this process holds one."""
        loop = self.loop
        return loop.lease if loop is not None else None

    def readiness(self) -> Readiness:
        """Whether this process is control-ready and ready, and why not (spec M9)."""
        loop = self.loop
        if loop is None:
            owner = self.owner
            reason = NotReady.FENCED if self.standing is Standing.FENCED else NotReady.STANDBY
            return Readiness(
                reason=reason,
                control_ready=False,
                epoch=owner.epoch if owner else 0,
                holder=owner.holder if owner else "",
            )
        view = loop.view()
        return Readiness(
            reason=view.not_ready,
            control_ready=not view.monitor.degraded,
            epoch=loop.lease.epoch,
            holder=self.holder,
        )

    def history(self) -> History:
        """The epochs of this fleet. Raises NotLeading."""
        term = self._term
        if term is None or term.loop.over:
            raise NotLeading("only the active knows the history")
        return term.chronicle.history

    async def document(self) -> bytes | None:
        """The state handoff that is stored. Raises StoreError."""
        loop = self.loop
        return loop.writer.document if loop is not None else await self._store.load()

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Leads whenever the lease can be had, until cancelled or stopped.

        Raises ResumeRefusedError, at the start only.
        """
        takeover = False
        while self.standing is not Standing.STOPPED:
            start = await self.candidate.attain(takeover)
            takeover = True
            await self._lead(start)

    async def stop(self) -> None:
        """A clean end: persists, releases the lease, ends every stream. Bounded, whatever the store does."""
        self._observer.record(Record(kind=EventKind.CONTROL_STOPPING, message="stopping"))
        term, loop = self._term, self.loop
        self.standing = Standing.STOPPED
        if term is not None and loop is not None:
            try:
                await asyncio.wait_for(loop.writer.write(), LAST_WRITE_S)
            except Exception as error:
                log.warning("the last state handoff was not stored", error=str(error) or type(error).__name__)
            term.ending = Ending.STOPPED
            loop.fence("shutting down")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(term.gone.wait(), 2 * RELEASE_S)
        self._publisher.withdraw("shutting down")

    async def yield_lease(self, ending: Ending, reason: str) -> int:
        """Persists, fences itself and lets go of the lease, so that another process may lead at once. Returns the epoch
        that is over.

        Raises StoreError when the state handoff could not be stored: then nothing has changed. Raises NotLeading.
        """
        term, loop = self._term, self.loop
        if term is None or loop is None:
            raise NotLeading("it leads no more")
        try:
            await asyncio.wait_for(loop.writer.write(), YIELD_WRITE_S)
        except TimeoutError:
            raise StoreError(f"not within {YIELD_WRITE_S:g} s") from None
        loop.check_lease()
        if loop.over:
            raise NotLeading(loop.over)
        term.ending = ending
        self.candidate.gives_way(loop.lease.epoch)
        loop.fence(reason)
        await term.gone.wait()
        return loop.lease.epoch

    async def reload(self, plan: Plan) -> None:
        """Works by another fleet file from now on; returns once the handoff with its engines is stored.

        Raises NotLeading when the term ends before that.
        """
        self.plan = plan
        self._publisher.configure(plan.core.name, plan.proxy_settings)
        term, loop = self._term, self.loop
        if term is None or loop is None:
            return
        term.monitor.interval_s, term.monitor.timeout_s = plan.interval_s, plan.stage_timeout_s
        term.probes.configure(plan.probes, frozenset(e.id for e in plan.core.engines))
        await loop.ask(Reloaded(settings=plan.core))

    def epoch_seen(self, epoch: int) -> None:
        """Somebody has seen this epoch. An active below it goes on above it (spec S5)."""
        loop = self.loop
        self.candidate.seen(epoch)
        if loop is None or epoch <= loop.lease.epoch:
            return
        self.stale_refusals += 1
        if self._moving is None or self._moving.done():
            self._moving = asyncio.get_running_loop().create_task(self._move_on(loop))

    # --- leading ----------------------------------------------------------------------------------------------------

    async def _lead(self, start: Start) -> None:
        term = self._begin(start)
        work = [asyncio.create_task(term.monitor.run()), asyncio.create_task(term.chronicle.run())]
        try:
            await self._watch(term, work[0])
        finally:
            for task in work:
                task.cancel()
            await self._let_go(term)
            await asyncio.gather(*work, return_exceptions=True)
            await term.probes.close()
            self._term = None

    async def _let_go(self, term: Term) -> None:
        """The term is over: says so in the history, and frees the lease."""
        lease, reason = term.loop.lease, term.loop.over
        at = self._clock.wall()
        self._untold = (lease.epoch, at, term.ending, reason)
        if term.loop.writer.document is not None:
            self.candidate.stored(term.loop.writer.document)
        self.candidate.seen(lease.epoch)
        term.chronicle.end(lease.epoch, term.ending, reason, at=at)
        await term.chronicle.close()
        with contextlib.suppress(StoreError):
            await self._store.release(lease)
        term.gone.set()

    def _begin(self, start: Start) -> Term:
        lease, now, wall = start.lease, self._clock.monotonic(), self._clock.wall()
        saved = aged(start.saved, wall=wall) if start.saved is not None else None

        def fenced(reason: str) -> None:
            term.over.set()
            if self.standing is not Standing.STOPPED:
                self.standing = Standing.FENCED
            self._publisher.withdraw(reason)
            self._observer.record(over(loop.lease, term.ending, reason))

        def answered(event: Answer) -> None:
            self._observer.answered(event)
            loop.post(event)

        probes = Probes(self.plan.probes, clock=self._clock, post=answered)
        fleet = Fleet(self.plan.core, now=now, epoch=lease.epoch, saved=saved)
        if self.journal is not None:
            whole = partial(pack, fleet)
            self.journal.begin(self.plan.core, saved=saved, epoch=lease.epoch, now=now, pack=whole)
        loop = ControlLoop(
            fleet=fleet,
            lease=lease,
            store=self._store,
            clock=self._clock,
            publisher=self._publisher,
            probe=probes.start,
            record=self._observer.record,
            fenced=fenced,
            writes=self.writes,
            journal=self.journal,
        )

        def ended(failures: tuple[StageFailure, ...], took_s: float) -> None:
            self.passes += 1
            self.passes_s += took_s
            loop.pass_ended(failures)

        monitor = Monitor(
            self._runners(loop),
            interval_s=self.plan.interval_s,
            timeout_s=self.plan.stage_timeout_s,
            clock=self._clock,
            ended=ended,
        )
        chronicle = Chronicle(
            start.history, before=start.before, store=self._store, lease=lambda: loop.lease, clock=self._clock
        )
        if self._untold is not None:
            epoch, at, ending, reason = self._untold
            chronicle.end(epoch, ending, reason, at=at)
        since_yield_s = chronicle.history.since_yield_s(wall=wall)
        self._yielded_at = now - since_yield_s if since_yield_s is not None else None
        term = self._term = Term(loop=loop, monitor=monitor, probes=probes, chronicle=chronicle)
        self.standing = Standing.ACTIVE
        self.candidate.owner = lease.owner
        self._observer.record(active(lease))
        for record in start.records:
            self._observer.record(record)
        loop.begin({} if saved is None else {engine: s.incarnation for engine, s in saved.engines.items()})
        for hello in self._publisher.proxies:
            loop.post(hello)
        self.epoch_seen(self.candidate.highest_epoch)
        return term

    async def _watch(self, term: Term, monitor: "asyncio.Task[None]") -> None:
        """Returns when the term is over. A monitor that ends by itself is the end of it too."""
        over = asyncio.create_task(term.over.wait())
        try:
            while not over.done():
                await asyncio.wait({over, monitor}, timeout=LEASE_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                term.loop.check_lease()
                if monitor.done() and not term.over.is_set():
                    error = None if monitor.cancelled() else monitor.exception()
                    log.error("monitor ended", exc_info=error)
                    term.loop.fence("the monitor ended")
                if term.over.is_set():
                    return
        finally:
            over.cancel()

    async def _move_on(self, loop: ControlLoop) -> None:
        above, before = self.candidate.highest_epoch, loop.lease.epoch
        try:
            await loop.move(lambda: self._store.acquire(self.holder, self.address, above=above))
        except StoreError as error:
            # The next hello that names a higher epoch tries again.
            self.candidate.trouble(EventKind.STORE_FAILED, f"cannot take the lease above epoch {above}: {error}")
            return
        term = self._term
        if not loop.over and term is not None:
            self.candidate.owner = loop.lease.owner
            seen = f"above epoch {above}, which proxies have seen"
            term.chronicle.end(before, Ending.MOVED, f"moved {seen}")
            term.chronicle.begin()
            self._observer.record(active(loop.lease, seen))

    def _stands_by(self, news: bool) -> None:
        """Another process leads."""
        if self.standing is Standing.STANDBY and not news:
            return
        self.standing = Standing.STANDBY
        owner = self.owner
        who = f"{owner.holder} at {owner.address} leads under epoch {owner.epoch}" if owner else "another process leads"
        self._observer.record(told(EventKind.CONTROL_STANDBY, f"standby: {who}"))
