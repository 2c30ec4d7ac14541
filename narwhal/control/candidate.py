"""How a control process comes to lead: it looks, judges, acquires and resumes; until then it follows (spec S2, S7, S8).

Knows the newest state handoff that this process has seen, and whether it could go on from it. Decides nothing about
engines; whether a saved handoff may be applied is `core/handoff.py`'s to say.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import orjson

from narwhal.clock import Clock
from narwhal.control.core.handoff import Handoff, Resume, drains
from narwhal.control.core.history import History, HistoryError, from_document
from narwhal.control.core.records import EventKind, Record
from narwhal.control.plan import Plan
from narwhal.control.resume import Judged, judge, newest
from narwhal.control.standing import told
from narwhal.control.store.base import Lease, NotYet, Owner, Store, StoreError

# A process that yielded leaves the lease to others for so long; when nobody took it by then, it is better than nobody.
GIVE_WAY_S = 5.0
# When the store was away for everybody, whoever led before has so long to lead again: it needs no takeover then.
RETURN_S = 2.0
_SLOW_S = 1.0  # a store that took so long to answer was away


def forgotten(handoff: Handoff | None) -> str:
    """What a start that does not apply a saved handoff says of drains (spec S2). `handoff`: None when unreadable."""
    if handoff is None:
        return "; it cannot be read: drains that it may have are forgotten"
    drained = drains(handoff.state)
    return f"; drains forgotten: {', '.join(drained)}" if drained else ""


class ResumeRefusedError(Exception):
    """The saved handoff stops the start (spec S2)."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a term begins with."""

    lease: Lease
    saved: Handoff | None
    history: History
    before: Owner | None  # who led last, as far as this process knew before it took the lease
    records: tuple[Record, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """The newest state handoff that this process has read or stored."""

    judged: Judged
    plan: Plan  # by which it was judged
    known_at: float  # monotonic seconds at which it was the stored one last
    own: bool = False  # this process stored it, under the highest epoch that it knows of


class Candidate:
    """One control process that wants to lead."""

    def __init__(
        self,
        *,
        plan: Plan,
        store: Store,
        clock: Clock,
        record: Callable[[Record], None],
        holder: str,
        address: str,
        resume: bool,
        stands_by: Callable[[bool], None],
    ) -> None:
        """`resume` is the flag of the start. `stands_by` hears that another process leads, and whether that is news."""
        self.plan = plan
        self.owner: Owner | None = None  # who leads, as far as this process knows
        self.takeovers = 0
        self.highest_epoch = 0  # seen anywhere
        self.copy: Copy | None = None
        self._store = store
        self._clock = clock
        self._record = record
        self._holder = holder
        self._address = address
        self._resume = resume
        self._stands_by = stands_by
        self._trouble = (EventKind.STORE_RECOVERED, "")  # as told last
        self._gave_way: tuple[int, float] | None = None  # the epoch given up, and until when others go first
        self._away = False  # the store did not answer when it was asked last
        self._return_until = -math.inf  # until when who led last goes first, monotonic seconds

    # --- what others read -------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """Why this process would not take over; empty when it would (spec S7)."""
        return (self.copy.judged.problem if self.copy is not None else "") or self._too_old()

    def stored(self, document: bytes) -> None:
        """This process led, and this is the newest document that it stored."""
        self.copy = self._copy(document, own=True)

    def seen(self, epoch: int) -> None:
        """Somebody has seen this epoch."""
        self.highest_epoch = max(self.highest_epoch, epoch)

    def active_heard(self) -> None:
        """Another process leads, and is well: it needs no time to come back any more."""
        self._return_until = -math.inf

    def gives_way(self, epoch: int) -> None:
        """This process yields the lease of `epoch`: others may take it first."""
        self._gave_way = (epoch, self._clock.monotonic() + GIVE_WAY_S)

    def trouble(self, kind: EventKind, words: str) -> None:
        """One line for each new trouble, and one when it is over."""
        before, self._trouble = self._trouble, (kind, words)
        if words == before[1]:
            return
        if words:
            self._record(told(kind, words))
        elif before[0] is not EventKind.CONTROL_WAITING:
            self._record(told(kind, f"over: {before[1]}"))

    # --- acquiring --------------------------------------------------------------------------------------------------

    async def attain(self, takeover: bool) -> Start:
        """Waits until this process may lead. `takeover`: it follows another's term, or its own; not a first start.

        Raises ResumeRefusedError, at the start only.
        """
        while True:
            try:
                if await self._others_first():
                    began = self._clock.monotonic()
                    start = await self._try(takeover)
                    self._away = self._clock.monotonic() - began > _SLOW_S
                    takeover = takeover or start is None
                    if start is not None:
                        self.trouble(EventKind.STORE_RECOVERED, "")
                        self.takeovers += takeover
                        return start
            except NotYet as error:
                self.trouble(EventKind.CONTROL_WAITING, str(error))
            except StoreError as error:
                self._away = True
                # Nobody was seen to lead: what this start is, with --resume or without, is still to be decided.
                words = self._too_old()
                words = f"; does not take over: {words}" if words else ""
                self.trouble(EventKind.STORE_FAILED, f"the store cannot be used: {error}{words}")
            await self._store.changed(self.plan.poll_s)

    async def _others_first(self) -> bool:
        """Whether it is this process's turn, after it has yielded. Raises StoreError."""
        if self._gave_way is None:
            return True
        epoch, until = self._gave_way
        if self._clock.monotonic() < until:
            owner = await self._store.owner()
            if owner is None or owner.epoch <= epoch:
                return False
        self._gave_way = None
        return True

    async def _loaded(self) -> bytes | None:
        """The stored document. Notices that the store is back. Raises StoreError."""
        began = self._clock.monotonic()
        document = await self._store.load()
        now = self._clock.monotonic()
        if self._away or now - began > _SLOW_S:
            self._away, self._return_until = False, now + RETURN_S
        return document

    async def _former_first(self) -> bool:
        """Whether another process led when the store went away, and may be about to lead again. Raises StoreError."""
        if self._clock.monotonic() >= self._return_until:
            return False
        owner = await self._store.owner()
        return owner is not None and owner.holder != self._holder

    async def _try(self, takeover: bool) -> Start | None:
        """One try. None, and what is in the way was told, when it is not to be now."""
        if takeover:
            # Whether it may be applied is looked at before anybody else is kept from leading.
            self._look(await self._loaded())
            if self.problem:
                await self._stand_by()
                self.trouble(EventKind.HANDOFF_NOT_RESUMED, f"does not take over: {self.problem}")
                return None
            if await self._former_first():
                await self._stand_by()
                return None
        lease = await self._store.acquire(self._holder, self._address, above=self.highest_epoch)
        if lease is None:
            await self._stand_by()
            self.trouble(EventKind.STORE_RECOVERED, "")
            return None
        try:
            return await self._started(lease, takeover)
        except BaseException:
            with contextlib.suppress(StoreError):
                await self._store.release(lease)
            raise

    async def _started(self, lease: Lease, takeover: bool) -> Start | None:
        document = await self._store.load()
        judged = self._look(document) if takeover else judge(document, self.plan.core)
        history = self._read(await self._store.history())

        def start(saved: Handoff | None, *records: Record) -> Start:
            return Start(lease=lease, saved=saved, history=history, before=self.owner, records=records)

        if judged.document is None:
            if takeover or self._resume:
                return start(None, told(EventKind.HANDOFF_NOT_RESUMED, "no saved handoff: starting fresh"))
            return start(None)
        handoff = judged.handoff
        if handoff is not None and handoff.lease.epoch >= lease.epoch:
            # The store forgot its epochs, or lost the newest: nobody may ever see one twice.
            above = await self._store.acquire(self._holder, self._address, above=handoff.lease.epoch)
            lease = above or lease
        if handoff is not None and (takeover or self._resume) and not (judged.problem or (takeover and self.problem)):
            return start(handoff, self._resumed(handoff))
        if takeover:
            await self._store.release(lease)  # another handoff was stored since it was looked at: look again
            return None
        if self._resume and judged.resume is Resume.REFUSE:
            raise ResumeRefusedError(judged.problem)
        kept = await self._store.set_aside(lease, judged.document)
        words = f"{judged.problem}; starting fresh"
        if not self._resume:
            words = "started without --resume beside a saved handoff, which is not applied"
            words += forgotten(handoff)
        return start(None, told(EventKind.HANDOFF_NOT_RESUMED, f"{words}; it is kept as {kept}"))

    async def _stand_by(self) -> None:
        owner = await self._store.owner()
        known, self.owner = self.owner, owner
        if owner is not None:
            self.seen(owner.epoch)  # a store that is wiped forgets it
        self._stands_by(known != owner)

    def _look(self, document: bytes | None) -> Judged:
        """The newest of what is stored and what is known. What is stored is known from now on.

        The same document is judged once: a standby looks several times a second.
        """
        known = self.copy
        if known is not None and known.plan is not self.plan:
            known = self.copy = replace(known, judged=judge(known.judged.document, self.plan.core), plan=self.plan)
        if known is not None and known.judged.document == document:
            self.copy = replace(known, known_at=self._clock.monotonic())
            return known.judged
        found = self._copy(document, own=False)
        if known is None or newest(found.judged, known.judged) is found.judged:
            self.copy = found
            return found.judged
        return known.judged

    def _copy(self, document: bytes | None, *, own: bool) -> Copy:
        judged = judge(document, self.plan.core)
        return Copy(judged=judged, plan=self.plan, known_at=self._clock.monotonic(), own=own)

    def _read(self, document: bytes | None) -> History:
        if document is None:
            return History()
        try:
            return from_document(orjson.loads(document))
        except (orjson.JSONDecodeError, HistoryError) as error:
            self._record(
                told(EventKind.STORE_WARNING, f"the history of epochs begins anew, it cannot be read: {error}")
            )
            return History()

    def _too_old(self) -> str:
        """Why the copy of the state handoff is too old to go on from (spec S7); empty when it is not.

        What this process stored itself under the newest epoch is the newest there is, however long ago.
        """
        copy, limit_s = self.copy, self.plan.max_handoff_age_s
        if copy is None or self._clock.monotonic() - copy.known_at <= limit_s:
            return ""
        if copy.own and copy.judged.order[0] >= self.highest_epoch:
            return ""
        return f"its copy of the state handoff is more than {limit_s:g} s old and cannot be read anew"

    def _resumed(self, handoff: Handoff) -> Record:
        age = max(0.0, self._clock.wall() - handoff.written_at)
        words = f"resumed the handoff of {handoff.lease.holder}, epoch {handoff.lease.epoch}, {age:.1f} s old"
        return told(EventKind.HANDOFF_RESUMED, words)
