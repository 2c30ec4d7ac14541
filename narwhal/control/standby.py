"""A standby beside its active: says what it has, hears how the active is, and asks a degraded one to yield (spec M8).

When to ask is `core/standby.py`'s to decide. It takes nothing over: that is the lease's affair alone.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from narwhal.clock import Clock
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.standby import Misses
from narwhal.control.leader import Leader
from narwhal.control.peer import Dial, Heard, Peer, PeerError
from narwhal.control.standing import Standing, told
from narwhal.control.store.base import Owner, Store, StoreError
from narwhal.control.yielding import Said

YIELD_S = 10.0  # for the answer of an active that proves, persists and lets go

log = structlog.get_logger()


class Standby:
    """Runs beside a leader; idle while that one leads itself, or nobody does."""

    def __init__(
        self, leader: Leader, *, store: Store, clock: Clock, record: Callable[[Record], None], dial: Dial
    ) -> None:
        self._leader = leader
        self._store = store
        self._clock = clock
        self._record = record
        self._dial = dial
        self._misses = Misses(takeover_after=leader.plan.takeover_after)
        self._peer: Peer | None = None
        self._missed = ""  # the holder of whom people were told, until it is back
        self._proven = ""  # what was left in the store last
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Looks at the active for ever, until cancelled."""
        due = self._clock.monotonic()
        try:
            while True:
                owner = self._leader.owner if self._leader.standing is Standing.STANDBY else None
                if owner is None or not owner.address:
                    await self._idle()
                else:
                    await self._look(owner)
                now = self._clock.monotonic()
                due = max(due + self._leader.plan.poll_s, now)  # looks that were missed are left out
                await asyncio.sleep(due - now)
        finally:
            await self._idle()

    async def _idle(self) -> None:
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        peer, self._peer = self._peer, None
        if peer is not None:
            await peer.close()
        self._misses.count, self._missed = 0, ""

    async def _look(self, owner: Owner) -> None:
        if self._peer is None or self._peer.address != owner.address:
            await self._idle()
            self._peer = Peer(owner.address, self._dial)
        self._misses.takeover_after = self._leader.plan.takeover_after
        heard, words = None, ""
        try:
            heard = await self._peer.stand_by(self._said(), timeout_s=self._leader.plan.poll_s)
        except PeerError as error:
            words = str(error)
        if heard is not None:
            words = heard.reason
            await self._prove(heard)
        ready = heard is not None and heard.control_ready
        if ready:
            self._leader.candidate.active_heard()
        if ready and self._missed:
            self._record(told(EventKind.ACTIVE_BACK, f"{self._missed} is control-ready again"))
            self._missed = ""
        if self._misses.heard(control_ready=ready):
            self._ask(self._peer, owner, words)

    def _said(self) -> Said:
        candidate = self._leader.candidate
        epoch, written_at = candidate.copy.judged.order if candidate.copy is not None else (0, 0.0)
        return Said(
            holder=self._leader.holder,
            address=self._leader.address,
            copy_epoch=epoch,
            copy_written_at=written_at,
            problem=candidate.problem,
        )

    async def _prove(self, heard: Heard) -> None:
        """Leaves in the store what the active wants to find there."""
        if heard.prove in ("", self._proven):
            return
        try:
            await self._store.prove(heard.prove)
        except StoreError as error:
            log.debug("the proof was not written", why=str(error))
        else:
            self._proven = heard.prove

    def _ask(self, peer: Peer, owner: Owner, words: str) -> None:
        """Asks the active to yield, while the looks go on."""
        if self._missed != owner.holder:
            self._missed = owner.holder
            times = self._leader.plan.takeover_after
            self._record(
                told(
                    EventKind.ACTIVE_MISSED,
                    f"{owner.holder} is not control-ready, {times} answers in a row: {words}; asks it to yield, and "
                    f"takes over once its lease is free",
                )
            )
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._asked(peer))

    async def _asked(self, peer: Peer) -> None:
        with contextlib.suppress(PeerError):  # the active tells why it does not
            await peer.ask_to_yield(self._leader.holder, timeout_s=YIELD_S)
