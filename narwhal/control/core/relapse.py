"""An engine that passes its checks and fails real work, again (spec F11). Pure.

Decides: whether a class that reached the threshold did so before, too recently, and for how long that keeps the engine
to a trickle. It cannot see: what else follows from the class.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from narwhal.vocabulary import FailureClass

FIRST_S = 5.0
LONGEST_S = 300.0


@dataclass(kw_only=True, slots=True)
class Relapses:
    """The memory that makes a second time a relapse.

    Windows begin when the engine can work again, that is at the end of its relapse hold when that is later: counted
    from the passed probe, a hold longer than the window would outlive the memory that should double it.
    """

    ejected_for: frozenset[FailureClass] = frozenset()  # classes at the threshold when it was ejected
    watched: dict[FailureClass, float] = field(default_factory=dict)  # → until when reaching it again is a relapse
    level: int = 0  # relapses in a row
    forget_due: float | None = None
    held_until: float | None = None

    def watch(self, classes: Iterable[FailureClass], *, now: float, window_s: float) -> None:
        """These classes had reached the threshold and were cleared by a passed probe or by readmission."""
        start = now if self.held_until is None else max(now, self.held_until)
        for failure in classes:
            self.watched[failure] = start + window_s

    def is_relapse(self, failure: FailureClass, *, now: float) -> bool:
        """Whether reaching the threshold of this class now is a relapse."""
        due = self.watched.get(failure)
        return due is not None and now < due

    def begin(self, *, now: float, window_s: float) -> float:
        """One relapse more: returns when its hold ends."""
        if self.forget_due is not None and now >= self.forget_due:
            self.level = 0
        self.held_until = now + min(FIRST_S * 2.0**self.level, LONGEST_S)
        self.level = min(self.level + 1, 16)
        self.forget_due = self.held_until + window_s
        return self.held_until
