"""The KV ledger of one engine: every handoff it issued, and what became of it.

A handoff's blocks are pinned from the prefill's answer until a decode engine has read them, or until the lease is over.
Reading blocks that were freed, because they were read before or because the lease is over, succeeds and yields
something else than the prompt's content: the engine cannot tell, so neither can its caller. The ledger can.
`now` is monotonic seconds and always an argument.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from narwhal.sim.text import freed_content

_BLOCK_IDS = 1 << 16


class HandoffState(StrEnum):
    """Where a handoff's blocks are."""

    OPEN = "open"
    FREED = "freed"  # read by a decode engine
    EXPIRED = "expired"  # the lease ran out first
    LOST = "lost"  # the process that held them ended


@dataclass(slots=True)
class Pull:
    """One reading of a handoff."""

    by: str
    age_s: float
    late: bool
    double: bool


@dataclass(slots=True, kw_only=True)
class Handoff:
    """One handoff that this engine issued."""

    id: str
    request_id: str
    engine_id: str
    generation: int
    issued_at: float
    tokens: int
    blocks: tuple[int, ...]
    content: str
    state: HandoffState = HandoffState.OPEN
    pulls: list[Pull] = field(default_factory=list)
    ended_at: float | None = None


class Ledger:
    """What one engine issued, over all its generations. Ended handoffs are kept up to `keep`, the totals for ever."""

    def __init__(
        self, *, producer: str, lease_s: float, block_size: int, empty_short: bool = False, keep: int = 10_000
    ) -> None:
        self._producer = producer
        self._lease_s = lease_s
        self._block_size = block_size
        self._empty_short = empty_short
        self._keep = keep
        self._open: dict[str, Handoff] = {}  # in the order of issue, which is the order of expiry
        self._ended: dict[str, Handoff] = {}
        self._order: deque[str] = deque()
        self._next_block = 5
        self.issued = 0
        self.pulled = 0
        self.freed = 0
        self.expired = 0
        self.lost = 0
        self.late_pulls = 0
        self.double_pulls = 0
        self.unknown_pulls = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks of a handoff for so many tokens."""
        if self._empty_short and tokens < self._block_size:
            return 0
        return -(-tokens // self._block_size)

    def issue(
        self,
        handoff_id: str,
        *,
        request_id: str,
        engine_id: str,
        generation: int,
        tokens: int,
        content: str,
        now: float,
    ) -> Handoff:
        """Pin the blocks of a finished prefill."""
        self.expire(now)
        count = self.blocks_for(tokens)
        first, self._next_block = self._next_block, (self._next_block + count) % _BLOCK_IDS
        handoff = Handoff(
            id=handoff_id,
            request_id=request_id,
            engine_id=engine_id,
            generation=generation,
            issued_at=now,
            tokens=tokens,
            blocks=tuple((first + at) % _BLOCK_IDS for at in range(count)),
            content=content,
        )
        self._open[handoff_id] = handoff
        self.issued += 1
        return handoff

    def pull(self, handoff_id: str, *, by: str, generation: int, now: float) -> str | None:
        """A decode engine reads these blocks: the content it gets, or None where this process knows no such handoff."""
        self.expire(now)
        handoff = self._open.get(handoff_id) or self._ended.get(handoff_id)
        if handoff is None or handoff.generation != generation:
            self.unknown_pulls += 1
            return None
        late = handoff.state is HandoffState.EXPIRED
        double = bool(handoff.pulls)
        handoff.pulls.append(Pull(by, now - handoff.issued_at, late, double))
        self.pulled += 1
        self.late_pulls += late
        self.double_pulls += double
        if handoff.state is HandoffState.OPEN:
            self._end(handoff, HandoffState.FREED, now)
            self.freed += 1
            return handoff.content
        return freed_content(handoff.id)

    def expire(self, now: float) -> None:
        """Free the blocks of handoffs whose lease is over."""
        while self._open:
            oldest = next(iter(self._open.values()))
            if now - oldest.issued_at <= self._lease_s:
                return
            self._end(oldest, HandoffState.EXPIRED, oldest.issued_at + self._lease_s)
            self.expired += 1

    def forget(self, now: float) -> None:
        """The process ended: what was still pinned is lost."""
        self.expire(now)
        for handoff in list(self._open.values()):
            self._end(handoff, HandoffState.LOST, now)
            self.lost += 1

    def _end(self, handoff: Handoff, state: HandoffState, at: float) -> None:
        handoff.state = state
        handoff.ended_at = at
        del self._open[handoff.id]
        self._ended[handoff.id] = handoff
        self._order.append(handoff.id)
        if len(self._order) > self._keep:
            self._ended.pop(self._order.popleft(), None)

    def totals(self, now: float) -> dict[str, int]:
        """Counts since the engine was first started."""
        self.expire(now)
        return {
            "issued": self.issued,
            "open": len(self._open),
            "pulled": self.pulled,
            "freed": self.freed,
            "expired": self.expired,
            "lost": self.lost,
            "late_pulls": self.late_pulls,
            "double_pulls": self.double_pulls,
            "unknown_pulls": self.unknown_pulls,
        }

    def view(self, now: float) -> dict[str, Any]:
        """The whole ledger as JSON values, oldest handoff first."""
        totals = self.totals(now)
        entries = sorted([*self._ended.values(), *self._open.values()], key=lambda handoff: handoff.issued_at)
        return {
            "producer": self._producer,
            "totals": totals,
            "handoffs": [self._entry(entry, now) for entry in entries],
        }

    def _entry(self, handoff: Handoff, now: float) -> dict[str, Any]:
        return {
            "id": handoff.id,
            "request_id": handoff.request_id,
            "producer": self._producer,
            "engine_id": handoff.engine_id,
            "generation": handoff.generation,
            "issued_at": handoff.issued_at,
            "age_s": now - handoff.issued_at,
            "tokens": handoff.tokens,
            "blocks": len(handoff.blocks),
            "state": handoff.state.value,
            "held_s": (now if handoff.ended_at is None else handoff.ended_at) - handoff.issued_at,
            "pulled": len(handoff.pulls),
            "pulled_by": [pull.by for pull in handoff.pulls],
            "pull_ages_s": [pull.age_s for pull in handoff.pulls],
            "late_pulls": sum(pull.late for pull in handoff.pulls),
            "double_pulls": sum(pull.double for pull in handoff.pulls),
        }
