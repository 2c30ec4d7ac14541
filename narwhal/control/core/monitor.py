"""The monitor's own health: failed passes → streak → degraded → recovered (spec M4–M7).

Decides: whether admission is closed because monitoring fails. It cannot see: what a stage does, or how it failed beyond
the class of its exception. Lives in memory only: a restart or a takeover starts at zero. Pure.
"""

from dataclasses import dataclass

from narwhal.control.core.effects import Effect
from narwhal.control.core.events import PassEnded, StageFailure
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.view import MonitorView, StageErrorView
from narwhal.vocabulary import NotReady, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class _Errors:
    count: int
    message: str
    at: float


class Monitor:
    """Counts failed passes in a row."""

    def __init__(self, *, failure_limit: int) -> None:
        self._limit = failure_limit
        self._streak = 0
        self._passes = 0
        self._degraded = ""
        self._errors: dict[tuple[Stage, str], _Errors] = {}
        self._failing: frozenset[tuple[Stage, str]] = frozenset()

    def configure(self, *, failure_limit: int) -> None:
        """The fleet file changed."""
        self._limit = failure_limit

    @property
    def degraded(self) -> str:
        """`monitoring degraded: <stage> <class>`, or empty."""
        return self._degraded

    def pass_ended(self, event: PassEnded, *, now: float) -> list[Effect]:
        """One pass more. A pass counts once, however many of its stages failed."""
        self._passes += 1
        effects = self._count(event.failures, now)
        if not event.failures:
            self._streak = 0
            if self._degraded:
                effects.append(Record(kind=EventKind.MONITOR_RECOVERED, message=f"recovered from {self._degraded}"))
                self._degraded = ""
            return effects
        self._streak += 1
        if self._streak >= self._limit and not self._degraded:
            first = event.failures[0]
            self._degraded = f"{NotReady.DEGRADED}: {first.stage} {first.error_class}"
            effects.append(
                Record(
                    kind=EventKind.MONITOR_DEGRADED,
                    message=f"{self._degraded}, after {self._streak} failed passes in a row; admission is closed",
                    fields={"stage": first.stage, "class": first.error_class},
                )
            )
        return effects

    def _count(self, failures: tuple[StageFailure, ...], now: float) -> list[Effect]:
        """Count every failure; tell of those that the pass before did not have, so that a lasting one is told once."""
        effects: list[Effect] = []
        for failure in failures:
            key = (failure.stage, failure.error_class)
            before = self._errors.get(key)
            self._errors[key] = _Errors(count=before.count + 1 if before else 1, message=failure.message, at=now)
            if key not in self._failing:
                effects.append(
                    Record(
                        kind=EventKind.STAGE_FAILED,
                        message=f"stage {failure.stage} failed: {failure.error_class}: {failure.message}",
                        fields={"stage": failure.stage, "class": failure.error_class},
                    )
                )
        self._failing = frozenset((f.stage, f.error_class) for f in failures)
        return effects

    def view(self, *, now: float) -> MonitorView:
        """What to show."""
        errors = tuple(
            StageErrorView(stage=stage, error_class=name, count=e.count, message=e.message, age_s=now - e.at)
            for (stage, name), e in self._errors.items()
        )
        return MonitorView(streak=self._streak, degraded=self._degraded, passes=self._passes, errors=errors)
