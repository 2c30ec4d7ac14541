"""Who gets a seat, who waits, who is turned away; and how many retries the worker may afford (spec V2, V3). Pure.

Decides: admission, first come first served, and retry credit. It cannot see: engines, requests, clocks.
A seat is one admitted request; a queue of capacity 0 turns the excess away at once.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum


class Entry(StrEnum):
    """The answer to a request that wants in."""

    ADMITTED = "admitted"
    QUEUED = "queued"
    SATURATED = "saturated"


class Waiting(StrEnum):
    """Where a queued request is."""

    WAITS = "waits"
    SEATED = "seated"
    LATE = "late"
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Ticket:
    """A place in the queue; `due` is the monotonic instant at which waiting ends."""

    due: float
    state: Waiting = Waiting.WAITS


@dataclass(slots=True)
class Admission:
    """The seats of one worker and the queue before them. `taken` never exceeds the seats it was last given."""

    taken: int = 0
    _queue: deque[Ticket] = field(default_factory=deque)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def enter(self, seats: int) -> bool:
        """Take a seat if one is free and nobody waits for it."""
        if self.taken >= seats or self._queue:
            return False
        self.taken += 1
        return True

    def queue(self, capacity: int, due: float) -> Ticket | None:
        """A place in the queue until `due`, or None when it is full."""
        if len(self._queue) >= capacity:
            return None
        ticket = Ticket(due)
        self._queue.append(ticket)
        return ticket

    def leave(self, seats: int) -> list[Ticket]:
        """A seat is free again: the tickets that are seated by it (more than one when `seats` has grown)."""
        if self.taken < 1:
            raise ValueError("a seat was given back that nobody had")
        self.taken -= 1
        return self._seat(seats)

    def _seat(self, seats: int) -> list[Ticket]:
        seated = []
        while self._queue and self.taken < seats:
            ticket = self._queue.popleft()
            ticket.state = Waiting.SEATED
            self.taken += 1
            seated.append(ticket)
        return seated

    def expire(self, now: float) -> list[Ticket]:
        """Tickets whose wait is over at `now`; they have left the queue."""
        late = [ticket for ticket in self._queue if now >= ticket.due]
        for ticket in late:
            ticket.state = Waiting.LATE
            self._queue.remove(ticket)
        return late

    def close(self) -> list[Ticket]:
        """Admission has closed: everybody who waits is sent away."""
        gone = list(self._queue)
        self._queue.clear()
        for ticket in gone:
            ticket.state = Waiting.GONE
        return gone

    def forget(self, ticket: Ticket) -> None:
        """The client of a waiting ticket went away."""
        if ticket.state is Waiting.WAITS:
            ticket.state = Waiting.GONE
            self._queue.remove(ticket)


@dataclass(slots=True)
class RetryBudget:
    """Credits of one worker: a retry takes one, a request that succeeds gives `retry_replenish` back."""

    credits: float
    denied: int = 0

    def take(self) -> bool:
        """Take a credit; False, and counted, when there is none."""
        if self.credits < 1:
            self.denied += 1
            return False
        self.credits -= 1
        return True

    def replenish(self, share: float, limit: float) -> None:
        """A request succeeded."""
        if self.credits < limit:
            self.credits = min(limit, self.credits + share)
