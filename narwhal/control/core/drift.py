"""Performance drift: an engine that has grown slow, against its own healthy baseline (spec H5). Pure.

Decides: when a window drifts, when probation begins and ends, when a probe is wanted. It cannot see: why an engine is
slow, nor what a probe comes to beyond its tokens' times. Baselines live in memory only: a takeover learns them anew,
and judges an engine that came to it on probation by its peers' until it is released.

| the window of a scored engine | what follows |
|---|---|
| most scored engines drift, or the only one | nothing; evict_windows of these in a row are the fleet's new normal |
| drifts | probation_windows in a row: probation; every evict_windows in a row: an inference probe |
| is good | recovery_windows in a row end probation; without probation it is part of the baseline |
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from narwhal.control.core import telling
from narwhal.control.core.decisions import Decision
from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.events import LegSeen, ProcessIdentity, Record
from narwhal.control.core.process import same_process
from narwhal.control.core.settings import DriftSettings
from narwhal.control.core.suspicion import Suspicions
from narwhal.control.core.view import DriftView
from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.vocabulary import Hold, Outcome, Phase

BASELINE_WINDOWS = 10  # good windows that the baseline is the median of
# Nobody is judged by less: one odd window, such as tokens that lay in a buffer and came at once, would otherwise be
# what is normal for as long as the engine lives, and the engine on probation for as long.
LEARNT_WINDOWS = 3
SAMPLED = "sampled on probation"


@dataclass(kw_only=True, slots=True)
class Pace:
    """What is known of one engine's time per output token."""

    samples: Sketch = field(default_factory=Sketch)  # of the open window
    baseline: deque[float] = field(default_factory=lambda: deque(maxlen=BASELINE_WINDOWS))
    drifting: int = 0  # windows in a row
    good: int = 0  # windows in a row
    sampled: bool = False  # a probe was asked for in the open window
    last: "Scored | None" = None  # the newest scored window


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One engine's closed window: enough samples, and something to judge them by."""

    engine: Engine
    value_s: float
    samples: int
    reference_s: float
    drifts: bool


class Drift:
    """The decode latency of all engines, in windows that are the same for all."""

    def __init__(
        self, settings: DriftSettings, engines: Mapping[str, Engine], suspicions: Suspicions, *, now: float
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._suspicions = suspicions
        self._due = now + settings.window_s
        self._known: dict[str, Pace] = {}
        self._closed: dict[str, Sketch] | None = None  # a window that is yet to be judged
        self._overloaded = 0  # windows in a row in which most engines drifted

    def configure(self, settings: DriftSettings, *, now: float) -> None:
        """The fleet file changed."""
        self._settings = settings
        self._due = min(self._due, now + settings.window_s)

    def forget(self, engine: str) -> None:
        """The engine is another, or works under other conditions: what was normal says nothing any more."""
        self._known.pop(engine, None)
        if self._closed is not None:
            self._closed.pop(engine, None)

    def _of(self, engine: str) -> Pace:
        return self._known.setdefault(engine, Pace())

    # --- samples ------------------------------------------------------------------------------------------------------

    def measured(self, measures: LegMeasures) -> None:
        """What a proxy told, of an engine as it is now. One that ramps up has less work than it will have."""
        steps = measures.sketches.get(Measure.STEP)
        if steps is not None and measures.phase is Phase.DECODE and not self._engines[measures.engine].ramp:
            self._of(measures.engine).samples.merge(steps)

    def probed(self, reader: str, leg: LegSeen | None) -> None:
        """A probe's decode leg on `reader` came back; on probation it speaks for a whole window."""
        engine = self._engines.get(reader)
        if engine is None or Hold.DRIFT not in engine.holds or leg is None:
            return
        if leg.outcome is Outcome.STREAM_COMPLETE and leg.step_s > 0:
            self._of(reader).samples.add(leg.step_s, max(leg.steps, self._settings.min_samples))

    def _sample(self, *, now: float) -> list[Decision]:
        """Probe the engines on probation of which proxies have told too little when half of the window is over, each
        once a window."""
        if now < self._due - self._settings.window_s / 2:
            return []
        decisions: list[Decision] = []
        for engine in self._engines.values():
            if Hold.DRIFT not in engine.holds or engine.standing is not Standing.IN_SERVICE:
                continue
            record = self._of(engine.id)
            if not record.sampled and record.samples.total < self._settings.min_samples:
                record.sampled = True
                decisions += self._suspicions.look_into(engine, SAMPLED, now=now)
        return decisions

    # --- windows ------------------------------------------------------------------------------------------------------

    def rollover(self, *, now: float) -> None:
        """Close the window when it is over."""
        if now < self._due:
            return
        self._due = now + self._settings.window_s
        self._closed = {name: record.samples for name, record in self._known.items()}
        for record in self._known.values():
            record.samples, record.sampled = Sketch(), False

    def tick(self, *, now: float) -> list[Decision]:
        """Judge the window that was closed last, once, and ask for the probes that are wanted."""
        closed, self._closed = self._closed, None
        decisions = self._judge(closed, now=now) if closed is not None else []
        return decisions + self._sample(now=now)

    def _judge(self, closed: Mapping[str, Sketch], *, now: float) -> list[Decision]:
        scored = self._scored(closed)
        drifting = sum(s.drifts for s in scored)
        if drifting * 2 > len(scored):
            return self._overload(scored, drifting)
        decisions: list[Decision] = []
        if self._overloaded:
            self._overloaded = 0
            decisions.append(telling.overload_over())
        for one in scored:
            decisions += self._drifts(one, now=now) if one.drifts else self._good(one)
        return decisions

    def _scored(self, closed: Mapping[str, Sketch]) -> list[Scored]:
        normal = self._normal()
        scored = []
        for name, samples in closed.items():
            engine, value = self._engines.get(name), samples.quantile(0.5)
            if engine is None or value is None or samples.total < self._settings.min_samples:
                continue
            if engine.standing is not Standing.IN_SERVICE:
                continue
            reference = self._reference(engine, normal)
            if reference is None and Hold.DRIFT not in engine.holds:
                self._of(name).baseline.append(value)
                continue
            # On probation, and neither it nor any other says what is normal: then so is this.
            reference = value if reference is None else reference
            one = Scored(
                engine=engine,
                value_s=value,
                samples=samples.total,
                reference_s=reference,
                drifts=value > self._settings.drift_band * reference,
            )
            scored.append(one)
        for one in scored:
            self._of(one.engine.id).last = one
        return scored

    def _reference(self, engine: Engine, normal: float | None) -> float | None:
        """What is normal for the engine, None where that is yet to be learnt."""
        baseline = self._of(engine.id).baseline
        if len(baseline) >= LEARNT_WINDOWS:
            return _median(baseline)
        return normal if Hold.DRIFT in engine.holds else None

    def _normal(self) -> float | None:
        """What is normal for the engines that are not on probation."""
        known = [
            _median(record.baseline)
            for name, record in self._known.items()
            if record.baseline and name in self._engines and Hold.DRIFT not in self._engines[name].holds
        ]
        return _median(known) if known else None

    def _overload(self, scored: list[Scored], drifting: int) -> list[Decision]:
        """The fleet is overloaded, not an engine."""
        self._overloaded += 1
        if self._overloaded % self._settings.evict_windows == 0:
            for one in scored:
                if Hold.DRIFT not in one.engine.holds:
                    baseline = self._of(one.engine.id).baseline
                    baseline.clear()
                    baseline.extend([one.value_s] * LEARNT_WINDOWS)
        return [telling.overload(drifting, len(scored))] if self._overloaded == 1 else []

    def _drifts(self, one: Scored, *, now: float) -> list[Decision]:
        record, engine = self._of(one.engine.id), one.engine
        record.drifting, record.good = record.drifting + 1, 0
        decisions: list[Decision] = []
        if record.drifting >= self._settings.probation_windows and Hold.DRIFT not in engine.holds:
            engine.place(Hold.DRIFT, f"{_took(one)}, {record.drifting} windows in a row", now=now)
            decisions.append(telling.hold_placed(engine, Hold.DRIFT))
        if record.drifting % self._settings.evict_windows == 0:
            why = f"{_took(one)}, {record.drifting} windows in a row"
            decisions += self._suspicions.look_into(engine, why, now=now)
        return decisions

    def _good(self, one: Scored) -> list[Decision]:
        record, engine = self._of(one.engine.id), one.engine
        record.drifting, record.good = 0, record.good + 1
        if Hold.DRIFT not in engine.holds:
            record.baseline.append(one.value_s)
            return []
        if record.good < self._settings.recovery_windows:
            return []
        engine.lift(Hold.DRIFT)
        why = f"{_took(one)}, {record.good} windows in a row"
        return [telling.hold_ended(engine.id, Hold.DRIFT, why)]

    # --- the engine comes back ----------------------------------------------------------------------------------------

    def admitted(self, engine: Engine, *, before: ProcessIdentity | None) -> list[Record]:
        """It was readmitted; `before` ran it. Another process than the one that was slow begins anew; the same, or one
        that nobody can tell apart, is on probation as before."""
        if before is None or engine.identity is None or same_process(before, engine.identity):
            known = self._of(engine.id)
            known.samples, known.good = Sketch(), 0
            return []
        self.forget(engine.id)
        if Hold.DRIFT not in engine.holds:
            return []
        engine.lift(Hold.DRIFT)
        return [telling.hold_ended(engine.id, Hold.DRIFT, "another process runs it")]

    # --- to be seen ---------------------------------------------------------------------------------------------------

    def view(self, engine: str) -> DriftView | None:
        """The newest scored window of an engine, with how many like it there were in a row."""
        record = self._known.get(engine)
        if record is None or record.last is None:
            return None
        return DriftView(
            step_s=record.last.value_s,
            usual_s=record.last.reference_s,
            samples=record.last.samples,
            drifting=record.drifting,
            good=record.good,
        )


def _took(one: Scored) -> str:
    return f"{one.value_s * 1000:.1f} ms a token where {one.reference_s * 1000:.1f} ms are usual"


def _median(values: Iterable[float]) -> float:
    """The middle one; of an even number the lower."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
