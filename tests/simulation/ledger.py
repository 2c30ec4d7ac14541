"""The KV ledger: what became of every handoff, as a fact and not as a guess."""

from dataclasses import dataclass, field

from tests.simulation.world import Invariant, Violation


@dataclass(slots=True, eq=False)
class Handoff:
    """One KV handoff."""

    number: int
    producer: str
    process: int  # which process of the producer holds the blocks
    made_at: float
    probe: bool  # made by control, not for a client
    sent_to: list[str] = field(default_factory=list)
    heard: bool = False  # who asked for it has it
    excused: bool = False  # who had it ended before it could be sent
    pulled: bool = False


class Ledger:
    """All handoffs of one run."""

    def __init__(self) -> None:
        self.entries: list[Handoff] = []

    def open(self, producer: str, process: int, *, probe: bool, now: float) -> Handoff:
        """A prefill leg has put its blocks aside."""
        entry = Handoff(len(self.entries), producer, process, now, probe)
        self.entries.append(entry)
        return entry

    def send(self, entry: Handoff, consumer: str) -> None:
        """A decode leg carries it to `consumer`."""
        if entry.sent_to:
            raise Violation(
                Invariant.HANDOFF_USED_ONCE,
                f"handoff {entry.number} of {entry.producer} was sent to {entry.sent_to[0]} and then to {consumer}",
            )
        entry.sent_to.append(consumer)
