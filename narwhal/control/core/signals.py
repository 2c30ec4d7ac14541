"""What proxies measure, engine by engine and phase by phase, in windows that the monitor's `rollover` closes. Pure.

Decides: which measures speak of an engine as it is now. It cannot see: targets, baselines, or what follows. Lives in
memory only: a takeover measures anew.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from narwhal.control.core.engine import Engine, Standing
from narwhal.measures import LegMeasures, Measure, Sketch, together
from narwhal.reports import Batch, ProxyKey
from narwhal.vocabulary import Phase

KEPT = 10  # closed windows of each engine and phase
# Measures over a longer span were kept while nobody took them: they tell of a time that is over.
LONGEST_SPAN_S = 5.0
# A proxy tells every second who waits, as long as anybody does.
WAITING_KEPT_S = 2.5

Key = tuple[str, Phase]


@dataclass(slots=True)
class Window:
    """One interval's measures of one engine in one phase."""

    sketches: dict[Measure, Sketch] = field(default_factory=dict)

    def add(self, measures: Mapping[Measure, Sketch]) -> None:
        """Count them in."""
        for measure, sketch in measures.items():
            mine = self.sketches.get(measure)
            if mine is None:
                mine = self.sketches[measure] = Sketch()
            mine.merge(sketch)


class Signals:
    """The measures of the last intervals."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._open: dict[Key, Window] = {}
        self._closed: dict[Key, deque[Window]] = {}
        self._waiting: dict[Key, dict[ProxyKey, tuple[int, float]]] = {}  # legs, and until when that is believed
        self.closed = 0  # windows since this process began

    def take(self, batch: Batch, *, now: float) -> list[LegMeasures]:
        """A proxy's measures that count. Only for a report that was not applied before; returns what was counted."""
        if batch.measured_s > LONGEST_SPAN_S:
            return []
        counted = [m for m in batch.measures if self._speaks(m)]
        for measures in counted:
            key = (measures.engine, measures.phase)
            if measures.sketches:
                self._open.setdefault(key, Window()).add(measures.sketches)
            if measures.waiting:
                self._waiting.setdefault(key, {})[batch.proxy] = (measures.waiting, now + WAITING_KEPT_S)
            elif key in self._waiting:
                self._waiting[key].pop(batch.proxy, None)
        return counted

    def _speaks(self, measures: LegMeasures) -> bool:
        engine = self._engines.get(measures.engine)
        return (
            engine is not None and engine.incarnation == measures.incarnation and engine.standing is Standing.IN_SERVICE
        )

    def rollover(self, *, now: float) -> None:
        """The interval is over."""
        self.closed += 1
        for key in self._open.keys() | self._closed.keys():
            windows = self._closed.setdefault(key, deque(maxlen=KEPT))
            windows.append(self._open.get(key, _NOTHING))
            if all(window is _NOTHING for window in windows):
                del self._closed[key]
        self._open = {}
        for key, told in list(self._waiting.items()):
            kept = {proxy: legs for proxy, legs in told.items() if now < legs[1]}
            if kept:
                self._waiting[key] = kept
            else:
                del self._waiting[key]

    def forget(self, engine: str) -> None:
        """The engine is another than the one that was measured, or out."""
        for phase in Phase:
            for kept in (self._open, self._closed, self._waiting):
                kept.pop((engine, phase), None)

    # --- what they say ------------------------------------------------------------------------------------------------

    def sketch(self, engines: Iterable[str], phase: Phase, measure: Measure, *, windows: int) -> Sketch:
        """What was measured in the last closed `windows`, of all these engines together."""
        return together(
            window.sketches[measure]
            for engine in engines
            for window in list(self._closed.get((engine, phase), ()))[-windows:]
            if measure in window.sketches
        )

    def waiting(self, engine: str, phase: Phase, *, now: float) -> int:
        """Legs there that have had no first token yet, over all proxies, as last told."""
        told = self._waiting.get((engine, phase), {})
        return sum(legs for legs, due in told.values() if now < due)


_NOTHING = Window()
