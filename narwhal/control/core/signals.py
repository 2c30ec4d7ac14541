"""What proxies measure, phase by phase, in windows that the monitor's `rollover` closes. Pure.

Decides: which measures speak of an engine as it is now, and which of these speak for its role. It cannot see: targets,
baselines, or what follows. Lives in memory only: a takeover measures anew. Engines are added up as they are told of: a
pass costs the same in a large fleet as in a small one.
"""

from collections import deque
from collections.abc import Mapping
from enum import StrEnum

from narwhal.control.core.engine import Engine, Standing
from narwhal.measures import LegMeasures, Measure, Sketch, together
from narwhal.reports import Batch, ProxyKey
from narwhal.vocabulary import Phase

KEPT = 5  # closed windows
# Of this many intervals it is remembered whether an engine had work: of fewer the share would be mostly chance.
BUSY_KEPT = 30
# Measures over a longer span were kept while nobody took them: they tell of a time that is over.
LONGEST_SPAN_S = 5.0
# A proxy tells every second who waits, as long as anybody does or anything was measured.
WAITING_KEPT_S = 2.5


class Voice(StrEnum):
    """For whom the legs of an engine speak."""

    ROLE = "role"  # new work of its role goes to it
    OTHER = "other"  # it stands in for the other role, or is held: heard where nobody of the role has a word


Window = dict[Measure, Sketch]


class Signals:
    """The measures of the last intervals."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._open: dict[tuple[Phase, Voice], Window] = {}
        self._closed: deque[dict[tuple[Phase, Voice], Window]] = deque(maxlen=KEPT)
        # By proxy: until when it is believed, and its legs without a first token.
        self._waiting: dict[ProxyKey, tuple[float, dict[tuple[str, Phase], int]]] = {}
        # By phase and interval: engines of the role, and how many of these had a leg without its first token.
        self._busy: dict[Phase, deque[tuple[int, int]]] = {phase: deque(maxlen=BUSY_KEPT) for phase in Phase}

    def take(self, batch: Batch, *, now: float) -> list[LegMeasures]:
        """A proxy's measures that count. Only for a report that was not applied before; returns what was counted."""
        if batch.measured_s > LONGEST_SPAN_S:
            return []
        counted = [m for m in batch.measures if self._speaks(m)]
        for measures in counted:
            if measures.sketches:
                voice = self._voice(self._engines[measures.engine], measures.phase, now)
                window = self._open.setdefault((measures.phase, voice), {})
                for measure, sketch in measures.sketches.items():
                    window.setdefault(measure, Sketch()).merge(sketch)
        if batch.measured_s:
            legs = {(m.engine, m.phase): m.waiting for m in counted if m.waiting}
            self._waiting[batch.proxy] = (now + WAITING_KEPT_S, legs)
        return counted

    def _speaks(self, measures: LegMeasures) -> bool:
        engine = self._engines.get(measures.engine)
        return (
            engine is not None and engine.incarnation == measures.incarnation and engine.standing is Standing.IN_SERVICE
        )

    @staticmethod
    def _voice(engine: Engine, phase: Phase, now: float) -> Voice:
        return Voice.ROLE if engine.role is phase and engine.candidate(now=now).free else Voice.OTHER

    def rollover(self, *, now: float) -> None:
        """The interval is over."""
        self._closed.append(self._open)
        self._open = {}
        self._waiting = {proxy: told for proxy, told in self._waiting.items() if now < told[0]}
        busy = {key for _, legs in self._waiting.values() for key in legs}
        for phase in Phase:
            names = [e.id for e in self._engines.values() if self._voice(e, phase, now) is Voice.ROLE]
            self._busy[phase].append((len(names), sum((name, phase) in busy for name in names)))

    def forget(self, engine: str) -> None:
        """The engine is another than the one that was measured, or out: nobody waits there. What it took is over in
        `KEPT` intervals."""
        for _, legs in self._waiting.values():
            for phase in Phase:
                legs.pop((engine, phase), None)

    # --- what they say ------------------------------------------------------------------------------------------------

    @property
    def intervals(self) -> int:
        """How many closed windows there are."""
        return len(self._closed)

    def measured(self, phase: Phase) -> Mapping[Measure, Sketch]:
        """What was measured of the phase in the closed windows; every measure has an entry."""
        for voice in Voice:
            windows = [kept[phase, voice] for kept in self._closed if (phase, voice) in kept]
            if windows:
                return {m: together(window[m] for window in windows if m in window) for m in Measure}
        return {measure: Sketch() for measure in Measure}

    def waiting(self, phase: Phase, *, now: float) -> int:
        """Legs of the phase that have had no first token yet, as last told: of its role's engines, or, where none of
        these has any, of all others."""
        legs = dict.fromkeys(Voice, 0)
        for due, told in self._waiting.values():
            for (name, of), count in told.items():
                engine = self._engines.get(name)
                if engine is not None and of is phase and now < due:
                    legs[self._voice(engine, phase, now)] += count
        return legs[Voice.ROLE] or legs[Voice.OTHER]

    def busy(self, phase: Phase) -> float:
        """How much of the time the role's engines had a leg without its first token, 0 to 1."""
        engines = sum(count for count, _ in self._busy[phase])
        return sum(busy for _, busy in self._busy[phase]) / engines if engines else 0.0
