"""Keeps the stored state handoff up with the fleet: one write at a time, the newest state only.

Decisions are written at once, counters with the next pass; whoever must not be answered before something is durable
waits here for it. Decides nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from narwhal.control.store.base import Lease, LeaseLost, Store, StoreError


class NotLeading(Exception):
    """This process does not lead any more; what was asked may or may not have been stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """How far a state is: both numbers only rise."""

    decisions: int = -1
    counters: int = -1

    def covers(self, other: "Mark") -> bool:
        """Whether a document at this mark holds everything of `other`."""
        return self.decisions >= other.decisions and self.counters >= other.counters


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A state as it is written."""

    document: bytes
    mark: Mark
    incarnations: Mapping[str, int] = field(default_factory=dict)  # per engine, as the document has them


class HandoffWriter:
    """Writes for as long as a lease lasts."""

    def __init__(
        self,
        *,
        store: Store,
        lease: Lease,
        snapshot: Callable[[], Snapshot],
        stored: Callable[[], None],
        lost: Callable[[str], None],
        results: Counter[str],
    ) -> None:
        """`snapshot` gives the newest state; `stored` is called after each successful write, `lost` when the store says
        that the lease is over. `results` counts writes by `ok` and `failed`."""
        self._store = store
        self._snapshot = snapshot
        self._stored = stored
        self._lost = lost
        self._results = results
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._wanted = Mark()
        self._failing = False
        self._news = asyncio.Event()
        self._over = ""
        self.lease = lease
        self.mark = Mark()  # of the newest document that is stored
        self.incarnations: Mapping[str, int] = {}  # in that document
        self.document: bytes | None = None  # it

    def want(self, mark: Mark) -> None:
        """Has the newest state written soon, unless what is stored covers `mark`. After a write that failed it is the
        next pass that tries again, so that a store in trouble is asked once an interval and not with every event."""
        self._wanted = mark
        if self._over or self._failing or self.mark.covers(mark):
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._write_wanted())

    async def write(self) -> None:
        """Writes the newest state. Raises StoreError when that failed."""
        async with self._turn:
            if self._over:
                raise LeaseLost(self._over)
            self._failing = True  # unless it is seen to succeed
            snapshot = self._snapshot()
            try:
                await self._store.save(self.lease, snapshot.document)
            except StoreError as error:
                self._results["failed"] += 1
                if isinstance(error, LeaseLost):
                    self._lost(str(error))
                raise
            self._failing = False
            self._results["ok"] += 1
            self.mark, self.incarnations, self.document = snapshot.mark, snapshot.incarnations, snapshot.document
        self._tell()
        self._stored()

    async def move(self, acquire: Callable[[], Awaitable[Lease | None]]) -> Lease | None:
        """Takes the lease anew between two writes, so that none is under way with the old one. None when it is gone."""
        async with self._turn:
            lease = await acquire()
            if lease is not None:
                self.lease = lease
            return lease

    async def durable(self, mark: Mark) -> None:
        """Returns once a stored document covers `mark`. Raises NotLeading when that will not happen here."""
        while not self.mark.covers(mark):
            if self._over:
                raise NotLeading(self._over)
            await self._news.wait()

    def end(self, reason: str) -> None:
        """Starts no further write; whoever waits is told so."""
        self._over = self._over or reason
        if self._task is not None:
            self._task.cancel()
        self._tell()

    async def _write_wanted(self) -> None:
        try:
            while not self._over and not self.mark.covers(self._wanted):
                await self.write()
        except Exception:
            return  # told and counted by the next pass, which tries again

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
