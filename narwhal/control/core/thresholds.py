"""What failures that have come in a row ask for: quarantine, relapse, the verdict of each class (spec F3, F7, F11, H4).

Decides: which classes are at the threshold, and whether that is a relapse, or another engine's doing. It cannot see:
which reports count as evidence, nor what is done about a class at the threshold. Pure.
"""

from collections.abc import Callable, Mapping

from narwhal.control.core import telling
from narwhal.control.core.decisions import Decision
from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.evidence import REMEMBERS, VERDICT_OF, Action
from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.suspect import Suspicion
from narwhal.vocabulary import FailureClass, Hold

# Spec H4: every counted failure brings the quarantine, but for this class.
NO_QUARANTINE = frozenset({FailureClass.OVERLOAD})


class Thresholds:
    """Of all engines. `known`: the suspicions there are."""

    def __init__(self, settings: CoreSettings, engines: Mapping[str, Engine], known: Mapping[str, Suspicion]) -> None:
        self.settings = settings
        self._engines = engines
        self._known = known

    def quarantine(self, engine: Engine, failure: FailureClass, *, now: float) -> list[Decision]:
        """A failure was counted (spec H4)."""
        if failure in NO_QUARANTINE or not self.settings.failure_quarantine_s:
            return []
        fresh = Hold.QUARANTINE not in engine.holds
        due = now + self.settings.failure_quarantine_s
        engine.place(Hold.QUARANTINE, f"after a failure ({failure})", now=now, due=due)
        return [telling.hold_placed(engine, Hold.QUARANTINE)] if fresh else []

    def reached(self, engine: Engine, failure: FailureClass, *, now: float) -> list[Decision]:
        """A class reached the threshold: was it so a moment ago already? (spec F11)"""
        evidence, window = engine.evidence, self.settings.relapse_window_s
        # Suspicions of missing progress are no relapses (spec F10).
        real = evidence.streaks[failure] - (evidence.stalls if failure is FailureClass.STREAM else 0)
        if real < self.settings.eject_after or not engine.relapses.is_relapse(failure, now=now):
            return []
        if failure in REMEMBERS and self._explained(engine):
            return []
        due = engine.relapses.begin(now=now, window_s=window)
        if failure is FailureClass.TIMEOUT:
            evidence.timeout_is_stream = True
        reason = f"{failure} again within {window:g} s of having been cleared"
        engine.place(Hold.RELAPSE, reason, now=now, due=due)
        return [
            telling.relapsed(engine.id, failure, reason, due - now),
            telling.hold_placed(engine, Hold.RELAPSE),
        ]

    def _explained(self, engine: Engine) -> bool:
        """Whether its failures all read from producers that are being found out about, or are out: such a failure
        counts, and is no word that the probe which the engine passed was wrong (spec F7)."""
        asked = {producer for s in self._known.values() for producer in (s.checking, *s.to_check)}
        return self._blameless(engine, lambda p: p in asked or p in self._known)

    def _blameless(self, engine: Engine, doubted: Callable[[str], bool]) -> bool:
        """Whether it remembers producers, and each of them is out, or `doubted`."""
        producers = [p for p in engine.evidence.producers if p in self._engines]
        return bool(producers) and all(
            doubted(p) or self._engines[p].standing is not Standing.IN_SERVICE for p in producers
        )

    def of(self, engine: Engine) -> dict[FailureClass, Action]:
        """The classes at the threshold and what each asks for (spec F3, F11)."""
        asked = {}
        for failure, streak in engine.evidence.streaks.items():
            if streak >= self.settings.eject_after:
                stream = failure is FailureClass.TIMEOUT and engine.evidence.timeout_is_stream
                asked[failure] = VERDICT_OF[FailureClass.STREAM if stream else failure]
        return asked

    def asked(self, engine: Engine) -> dict[FailureClass, Action]:
        """As `of`, without the failures to read from producers that have the hold which these ask for (spec F7)."""
        asked = self.of(engine)
        if engine.evidence.own or not self._blameless(engine, self._held):
            return asked
        return {failure: action for failure, action in asked.items() if failure not in REMEMBERS}

    def _held(self, engine: str) -> bool:
        suspicion = self._known.get(engine)
        return suspicion is not None and suspicion.held
