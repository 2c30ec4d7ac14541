"""The active's side of standbys: who follows, how fit each is, and the lease handed on to one of them (spec M8).

Whether to yield is `core/standby.py`'s to decide; here is found out what that depends on. A standby proves that it can
write to the store by leaving there what it was given in the answer to its last word.
"""

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from narwhal.clock import Clock
from narwhal.control.core.history import Ending
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.standby import Heir, Holder, refusal
from narwhal.control.leader import Leader
from narwhal.control.standing import told
from narwhal.control.store.base import Store, StoreError

HEARD_S = 2.0  # a standby that said nothing for so long, beyond its own interval, is not there
PROVE_S = 3.0  # from the challenge to its proof in the store
LOOK_S = 0.05
_NUMBERS = re.compile(r"[0-9.]+")


class YieldRefused(Exception):
    """The active does not yield, and nothing has changed. The words say why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a standby says of itself."""

    holder: str
    address: str
    copy_epoch: int  # of its copy of the state handoff; 0 when it has none
    copy_written_at: float  # seconds since the Unix epoch, by the clock of the active that wrote it
    problem: str  # why it would not take over; empty when it would


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A standby, and when it was heard."""

    said: Said
    heard_at: float  # monotonic seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Yielded:
    """The lease was let go of."""

    epoch: int  # that is over
    heir: Said


class Yielding:
    """The standbys of one active. Everything here is void while this process does not lead."""

    def __init__(self, leader: Leader, *, store: Store, clock: Clock, record: Callable[[Record], None]) -> None:
        self._leader = leader
        self._store = store
        self._clock = clock
        self._record = record
        self._known: dict[str, Known] = {}
        self._challenges: dict[str, str] = {}
        self._turn = asyncio.Lock()
        self._refused = ""  # as told last

    # --- who is there -----------------------------------------------------------------------------------------------

    def heard(self, said: Said) -> str:
        """A standby has spoken. What it is to leave in the store; empty for nothing."""
        self._known[said.holder] = Known(said=said, heard_at=self._clock.monotonic())
        return self._challenges.get(said.holder, "")

    def standbys(self) -> list[Known]:
        """Those that are there, by name."""
        oldest = self._clock.monotonic() - HEARD_S - self._leader.plan.poll_s
        self._known = {name: known for name, known in self._known.items() if known.heard_at >= oldest}
        return sorted(self._known.values(), key=lambda known: known.said.holder)

    # --- yielding ---------------------------------------------------------------------------------------------------

    async def to_standby(self, holder: str) -> Yielded:
        """A standby has counted enough answers that were not control-ready, and wants to lead. Raises YieldRefused, and
        NotLeading when this process has lost the lease meanwhile."""
        try:
            yielded = await self._yield(holder, by_operator=False)
        except YieldRefused as refused:
            self._tell(f"does not yield to {holder}: {refused}")
            raise
        self._refused = ""
        return yielded

    def _tell(self, words: str) -> None:
        """A standby goes on asking: people are told once, until the reason is another one."""
        kind = _NUMBERS.sub("", words)
        if self._degraded() and kind != self._refused:
            self._refused = kind
            self._record(told(EventKind.YIELD_REFUSED, words))

    async def by_operator(self, holder: str, *, dry_run: bool) -> Yielded:
        """An operator wants another process to lead: `holder`, or any that is fit. Raises as `to_standby` does."""
        return await self._yield(holder, by_operator=True, dry_run=dry_run)

    async def _yield(self, holder: str, *, by_operator: bool, dry_run: bool = False) -> Yielded:
        if self._turn.locked():
            raise YieldRefused("it is about to yield already")
        async with self._turn:
            heir = self._chosen(holder, by_operator)
            if dry_run:
                return Yielded(epoch=self._leader.readiness().epoch, heir=heir)
            await self._proven(heir)
            # Whatever was true before may have changed meanwhile.
            self._must(heir.holder, by_operator, proven=True)
            degraded = self._degraded()
            why = "an operator asked for it" if by_operator else degraded
            ending = Ending.SWITCHED if by_operator else Ending.YIELDED
            try:
                epoch = await self._leader.yield_lease(ending, f"to {heir.holder} at {heir.address}: {why}")
            except StoreError as error:
                raise YieldRefused(f"it cannot store its own state handoff: {error}") from error
            return Yielded(epoch=epoch, heir=heir)

    def _chosen(self, holder: str, by_operator: bool) -> Said:
        """The standby to yield to, fit as far as can be told without the store."""
        if holder:
            return self._must(holder, by_operator, proven=True)
        reasons = []
        for known in self.standbys():
            try:
                return self._must(known.said.holder, by_operator, proven=True)
            except YieldRefused as refused:
                reasons.append(str(refused))
        raise YieldRefused("; ".join(reasons) or "no standby is there")

    def _must(self, holder: str, by_operator: bool, *, proven: bool) -> Said:
        """The standby, when the rules allow to yield to it. Raises YieldRefused."""
        known = next((known.said for known in self.standbys() if known.said.holder == holder), None)
        if known is None and holder == self._leader.holder:
            raise YieldRefused(f"{holder} leads already")
        if known is None:
            raise YieldRefused(f"no standby {holder} is there")
        leader = self._leader
        active = Holder(
            epoch=leader.readiness().epoch,
            degraded=self._degraded(),
            since_yield_s=leader.since_yield_s,
            max_copy_age_s=leader.plan.max_handoff_age_s,
        )
        heir = Heir(
            holder=holder,
            problem=known.problem,
            copy_epoch=known.copy_epoch,
            copy_age_s=max(0.0, self._clock.wall() - known.copy_written_at),
            proven=proven,
        )
        words = refusal(active, heir, by_operator=by_operator)
        if words:
            raise YieldRefused(words)
        return known

    async def _proven(self, heir: Said) -> None:
        """Returns once a write of the standby, made for this, was found in the store. Raises YieldRefused."""
        proof = f"{heir.holder} {secrets.token_hex(8)}"
        self._challenges[heir.holder] = proof
        try:
            async with asyncio.timeout(PROVE_S):
                while await self._store.proof() != proof:  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            self._must(heir.holder, True, proven=False)
        except StoreError as error:
            raise YieldRefused(f"it cannot read what {heir.holder} wrote to the store: {error}") from error
        finally:
            del self._challenges[heir.holder]

    def _degraded(self) -> str:
        readiness = self._leader.readiness()
        return "" if readiness.control_ready else readiness.reason
