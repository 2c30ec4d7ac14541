"""What this process is: standby, active, fenced, and how it comes to be each of them (spec S2, S5, S7, S8).

Acquire the lease → resume → lead until it is over → follow again. Owns everything that exists only while leading.
Decides nothing about engines; whether a saved handoff may be applied is `core/handoff.py`'s to say.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import structlog

from narwhal.clock import Clock
from narwhal.control.core.events import Answer, EventKind, Record, Reloaded, StageFailure
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import Handoff, Resume, aged
from narwhal.control.journal import Journal
from narwhal.control.loop import ControlLoop
from narwhal.control.monitor import Monitor, Runner
from narwhal.control.observe import Observer
from narwhal.control.plan import Plan
from narwhal.control.probes import Probes
from narwhal.control.publisher import Publisher
from narwhal.control.resume import judge, newer
from narwhal.control.snapshot import pack
from narwhal.control.store.base import Lease, Owner, Store, StoreError
from narwhal.vocabulary import NotReady, Stage

LEASE_LOOK_S = 0.1  # how often the lease of an idle loop is looked at
LAST_WRITE_S = 0.4  # what a clean end waits for the store
RELEASE_S = 0.3

log = structlog.get_logger()


class ResumeRefusedError(Exception):
    """The saved handoff stops the start (spec S2)."""


class Standing(StrEnum):
    """What this process is."""

    STARTING = "starting"
    STANDBY = "standby"
    ACTIVE = "active"
    FENCED = "fenced"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """What /ready says (spec M9)."""

    reason: str  # empty when ready
    control_ready: bool
    epoch: int
    holder: str


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a term begins with."""

    lease: Lease
    saved: Handoff | None
    records: tuple[Record, ...] = ()


@dataclass(kw_only=True)
class Term:
    """One period of leadership."""

    loop: ControlLoop
    monitor: Monitor
    probes: Probes
    over: asyncio.Event


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
        self.plan = plan
        self.owner: Owner | None = None  # who leads, as far as this process knows
        self.standing = Standing.STARTING
        self.takeovers = 0
        self.writes: Counter[str] = Counter()
        self.passes = 0  # monitor passes since this process began
        self.passes_s = 0.0  # seconds that they took
        self.stale_refusals = 0  # hellos that named a higher epoch than ours
        self._store = store
        self._clock = clock
        self._publisher = publisher
        self._observer = observer
        self._holder = holder
        self._address = address
        self._resume = resume
        self._runners = runners
        self.journal = journal
        self._term: Term | None = None
        self._highest_epoch = 0  # seen anywhere
        self._kept: bytes | None = None  # the newest document that this process stored
        self._trouble = ""  # as told last
        self._moving: asyncio.Task[None] | None = None
        publisher.configure(plan.core.name, plan.proxy_settings)

    # --- what others read -------------------------------------------------------------------------------------------

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
            holder=self._holder,
        )

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
            start = await self._attain(takeover)
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
            loop.fence("shutting down")
            with contextlib.suppress(TimeoutError, StoreError):
                await asyncio.wait_for(self._store.release(loop.lease), RELEASE_S)
        self._publisher.withdraw("shutting down")

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
        self._highest_epoch = max(self._highest_epoch, epoch)
        if loop is None or epoch <= loop.lease.epoch:
            return
        self.stale_refusals += 1
        if self._moving is None or self._moving.done():
            self._moving = asyncio.get_running_loop().create_task(self._move_on(loop))

    # --- acquiring --------------------------------------------------------------------------------------------------

    async def _attain(self, takeover: bool) -> _Start:
        """Waits until this process may lead."""
        while True:
            try:
                start = await self._try(takeover)
            except StoreError as error:
                # Nobody was seen to lead: what this start is, with --resume or without, is still to be decided.
                self._tell_trouble(EventKind.STORE_FAILED, f"the store cannot be used: {error}")
            else:
                if start is not None:
                    self._tell_trouble(EventKind.STORE_RECOVERED, "")
                    self.takeovers += takeover
                    return start
                takeover = True
            await self._store.changed(self.plan.poll_s)

    async def _try(self, takeover: bool) -> _Start | None:
        """One try. None, and what is in the way was told, when it is not to be now."""
        if takeover:
            # Whether it may be applied is looked at before anybody else is kept from leading.
            judged = judge(newer(await self._store.load(), self._kept), self.plan.core)
            if judged.problem:
                await self._stand_by()
                self._tell_trouble(EventKind.HANDOFF_NOT_RESUMED, f"does not take over: {judged.problem}")
                return None
        lease = await self._store.acquire(self._holder, self._address, above=self._highest_epoch)
        if lease is None:
            await self._stand_by()
            return None
        try:
            return await self._started(lease, takeover)
        except BaseException:
            with contextlib.suppress(StoreError):
                await self._store.release(lease)
            raise

    async def _started(self, lease: Lease, takeover: bool) -> _Start | None:
        document = await self._store.load()
        document = newer(document, self._kept) if takeover else document
        if document is None:
            if takeover or self._resume:
                words = "no saved handoff: starting fresh"
                return _Start(lease=lease, saved=None, records=(_told(EventKind.HANDOFF_NOT_RESUMED, words),))
            return _Start(lease=lease, saved=None)
        judged = judge(document, self.plan.core)
        handoff = judged.handoff
        if handoff is not None and handoff.lease.epoch >= lease.epoch:
            # The store forgot its epochs, or lost the newest: nobody may ever see one twice.
            above = await self._store.acquire(self._holder, self._address, above=handoff.lease.epoch)
            lease = above or lease
        if handoff is not None and judged.resume is Resume.APPLY and (takeover or self._resume):
            return _Start(lease=lease, saved=handoff, records=(self._resumed(handoff),))
        if takeover:
            await self._store.release(lease)  # another handoff was stored since it was looked at: look again
            return None
        if self._resume and judged.resume is Resume.REFUSE:
            raise ResumeRefusedError(judged.problem)
        return await self._afresh(lease, document, judged.problem)

    async def _afresh(self, lease: Lease, document: bytes, problem: str) -> _Start:
        kept = await self._store.set_aside(lease, document)
        words = problem if self._resume else "started without --resume beside a saved handoff, which is not applied"
        record = _told(EventKind.HANDOFF_NOT_RESUMED, f"{words}; it is kept as {kept}")
        return _Start(lease=lease, saved=None, records=(record,))

    async def _stand_by(self) -> None:
        owner = await self._store.owner()
        known = self.owner
        self.owner = owner
        if owner is not None:
            self._highest_epoch = max(self._highest_epoch, owner.epoch)  # a store that is wiped forgets it
        if self.standing is Standing.STANDBY and known == owner:
            return
        self.standing = Standing.STANDBY
        who = f"{owner.holder} at {owner.address} leads under epoch {owner.epoch}" if owner else "another process leads"
        self._observer.record(_told(EventKind.CONTROL_STANDBY, f"standby: {who}"))

    def _tell_trouble(self, kind: EventKind, words: str) -> None:
        """One line for each new trouble, and one when it is over."""
        if words == self._trouble:
            return
        if words:
            self._observer.record(_told(kind, words))
        elif kind is EventKind.STORE_RECOVERED:
            self._observer.record(_told(kind, f"over: {self._trouble}"))
        self._trouble = words

    def _resumed(self, handoff: Handoff) -> Record:
        age = max(0.0, self._clock.wall() - handoff.written_at)
        words = f"resumed the handoff of {handoff.lease.holder}, epoch {handoff.lease.epoch}, {age:.1f} s old"
        return _told(EventKind.HANDOFF_RESUMED, words)

    # --- leading ----------------------------------------------------------------------------------------------------

    async def _lead(self, start: _Start) -> None:
        term = self._begin(start)
        monitor = asyncio.create_task(term.monitor.run())
        try:
            await self._watch(term, monitor)
        finally:
            monitor.cancel()
            await asyncio.gather(monitor, return_exceptions=True)
            await term.probes.close()
            self._kept = term.loop.writer.document or self._kept
            self._highest_epoch = max(self._highest_epoch, term.loop.lease.epoch)
            self._term = None
        with contextlib.suppress(StoreError):
            await self._store.release(term.loop.lease)

    def _begin(self, start: _Start) -> Term:
        lease, now = start.lease, self._clock.monotonic()
        saved = aged(start.saved, wall=self._clock.wall()) if start.saved is not None else None
        over = asyncio.Event()

        def fenced(reason: str) -> None:
            over.set()
            if self.standing is not Standing.STOPPED:
                self.standing = Standing.FENCED
                self._observer.record(_told(EventKind.CONTROL_FENCED, f"fenced: {reason}"))
            self._publisher.withdraw(reason)

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
        self._term = Term(loop=loop, monitor=monitor, probes=probes, over=over)
        self.standing = Standing.ACTIVE
        self.owner = lease.owner
        self._observer.record(_told(EventKind.CONTROL_ACTIVE, f"active under epoch {lease.epoch}"))
        for record in start.records:
            self._observer.record(record)
        loop.begin({} if saved is None else {engine: s.incarnation for engine, s in saved.engines.items()})
        for hello in self._publisher.proxies:
            loop.post(hello)
        self.epoch_seen(self._highest_epoch)
        return self._term

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
        above = self._highest_epoch
        try:
            await loop.move(lambda: self._store.acquire(self._holder, self._address, above=above))
        except StoreError as error:
            # The next hello that names a higher epoch tries again.
            self._tell_trouble(EventKind.STORE_FAILED, f"cannot take the lease above epoch {above}: {error}")
            return
        if not loop.over:
            self.owner = loop.lease.owner
            words = f"active under epoch {loop.lease.epoch}, above epoch {above} which proxies have seen"
            self._observer.record(_told(EventKind.CONTROL_ACTIVE, words))


def _told(kind: EventKind, message: str) -> Record:
    return Record(kind=kind, message=message)
