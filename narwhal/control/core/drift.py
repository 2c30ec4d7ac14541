"""Performance drift: an engine that has grown slow, against its own healthy baseline (spec H5). Pure.

Decides: when a window drifts, when probation begins and ends, when a probe is wanted. It cannot see: why an engine is
slow, nor what a probe comes to beyond its tokens' times. Baselines live in memory only: a takeover learns them anew,
and judges an engine that came to it on probation by its peers' until it has one of its own.

| the window of a scored engine | what follows |
|---|---|
| most scored peers drift, or the only one | nothing, peers being those that are not on probation |
| so it is, and most that serve are scored | fleet_slow; evict_windows of these in a row are the fleet's new normal |
| drifts | probation_windows in a row: probation; every evict_windows in a row: an inference probe |
| is good | recovery_windows in a row end probation; without probation it is part of the baseline |

An engine on probation has little to do or nothing, so what it takes then is compared with what it took under load. Slow
in spite of that is slow; but quick may be no more than idle: its work shows it once it is back. To keep it out for
longer then would be worse, since the load that it does not carry makes its peers drift in turn.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from narwhal.control.core import telling
from narwhal.control.core.decisions import Decision
from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.events import LegSeen, ProcessIdentity
from narwhal.control.core.pace import LEARNT_WINDOWS, Pace, Scored, median, window_of
from narwhal.control.core.process import same_process
from narwhal.control.core.records import Record
from narwhal.control.core.settings import DriftSettings
from narwhal.control.core.suspicion import Suspicions
from narwhal.control.core.view import DriftView
from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.vocabulary import Hold, Outcome, Phase

SAMPLED = "sampled on probation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turnout:
    """How many engines speak for the fleet in one window; those on probation do not."""

    drifting: int
    scored: int
    serving: int  # engines that decode

    @property
    def slow(self) -> bool:
        """Whether most that were scored drift: then it says nothing about any of them."""
        return self.drifting * 2 > self.scored

    @property
    def quorum(self) -> bool:
        """Whether so many were scored that the fleet can be spoken of."""
        return self.scored * 2 > self.serving


def _has_work(engine: Engine) -> bool:
    """Whether the engine may get work of its phase, soft holds aside: one that is being drained has less and less."""
    return engine.standing is Standing.IN_SERVICE and not engine.shut


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
        self._closed: dict[str, tuple[Sketch, Sketch]] | None = None  # a window that is yet to be judged
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
        """A probe's decode leg on `reader` came back; on probation without traffic it speaks for a whole window."""
        engine = self._engines.get(reader)
        if engine is None or Hold.DRIFT not in engine.holds or leg is None:
            return
        if leg.outcome is Outcome.STREAM_COMPLETE and leg.step_s > 0:
            self._of(reader).probed.add(leg.step_s, max(leg.steps, self._settings.min_samples))

    def _sample(self, *, now: float) -> list[Decision]:
        """Probe the engines on probation of which proxies have told too little when half of the window is over, each
        once a window."""
        if now < self._due - self._settings.window_s / 2:
            return []
        decisions: list[Decision] = []
        for engine in self._engines.values():
            if Hold.DRIFT not in engine.holds or not _has_work(engine):
                continue
            record, least = self._of(engine.id), self._settings.min_samples
            if not record.sampled and record.samples.total < least and record.probed.total < least:
                record.sampled = True
                decisions += self._suspicions.look_into(engine, SAMPLED, now=now)
        return decisions

    # --- windows ------------------------------------------------------------------------------------------------------

    def rollover(self, *, now: float) -> None:
        """Close the window when it is over."""
        if now < self._due:
            return
        self._due = now + self._settings.window_s
        self._closed = {name: (record.samples, record.probed) for name, record in self._known.items()}
        for record in self._known.values():
            record.samples, record.probed, record.sampled = Sketch(), Sketch(), False

    def tick(self, *, now: float) -> list[Decision]:
        """Judge the window that was closed last, once, and ask for the probes that are wanted."""
        closed, self._closed = self._closed, None
        decisions = self._judge(closed, now=now) if closed is not None else []
        return decisions + self._sample(now=now)

    def _judge(self, closed: Mapping[str, tuple[Sketch, Sketch]], *, now: float) -> list[Decision]:
        scored = self._scored(closed)
        turnout = self._turnout(scored)
        decisions: list[Decision] = []
        if turnout.slow and turnout.quorum:
            return self._overload(scored, turnout)
        if turnout.slow:
            scored = [one for one in scored if one.held]
        elif self._overloaded and turnout.quorum:
            self._overloaded = 0
            decisions.append(telling.overload_over(turnout.drifting, turnout.scored, turnout.serving))
        for one in scored:
            decisions += self._drifts(one, now=now) if one.drifts else self._good(one)
        return decisions

    def _turnout(self, scored: list[Scored]) -> Turnout:
        peers = {one.engine.id: one for one in scored if not one.held}
        serving = [e for e in self._engines.values() if e.role is Phase.DECODE or e.id in peers]
        return Turnout(
            drifting=sum(one.drifts for one in peers.values()),
            scored=len(peers),
            serving=sum(self._serves(e.id) for e in serving),
        )

    def _scored(self, closed: Mapping[str, tuple[Sketch, Sketch]]) -> list[Scored]:
        normal, learning = self._normal(), self._learning(closed)
        scored = []
        for name, (samples, probed) in closed.items():
            engine = self._engines.get(name)
            if engine is None or not _has_work(engine):
                continue
            held = Hold.DRIFT in engine.holds
            window = window_of(samples, probed, held=held, least=self._settings.min_samples)
            if window is None:
                continue
            reference = self._reference(engine, normal)
            if reference is None and not held:
                self._of(name).baseline.append(window.value_s)
                continue
            if reference is None and learning:
                continue  # in a few windows its peers will say what is normal
            # On probation, and neither it nor any other says what is normal: then so is this.
            reference = window.value_s if reference is None else reference
            drifts = window.value_s > self._settings.drift_band * reference
            scored.append(Scored(engine=engine, window=window, reference_s=reference, drifts=drifts))
        for one in scored:
            self._of(one.engine.id).last = one
        return scored

    def _reference(self, engine: Engine, normal: float | None) -> float | None:
        """What is normal for the engine, None where that is yet to be learnt."""
        known = self._of(engine.id)
        if len(known.baseline) >= LEARNT_WINDOWS:
            return median(known.baseline)
        # One that has been slow must not be what it is judged by as soon as it is back.
        return normal if Hold.DRIFT in engine.holds or known.unproven else None

    def _normal(self) -> float | None:
        """What is normal for the engines that are not on probation."""
        known = [
            median(record.baseline)
            for name, record in self._known.items()
            if len(record.baseline) >= LEARNT_WINDOWS and self._serves(name)
        ]
        return median(known) if known else None

    def _learning(self, closed: Mapping[str, tuple[Sketch, Sketch]]) -> bool:
        """Whether there are engines of which it is being learnt what is normal."""
        least = self._settings.min_samples
        return any(samples.total >= least and self._serves(name) for name, (samples, _) in closed.items())

    def _serves(self, name: str) -> bool:
        engine = self._engines.get(name)
        return engine is not None and _has_work(engine) and Hold.DRIFT not in engine.holds

    def _overload(self, scored: list[Scored], turnout: Turnout) -> list[Decision]:
        """The fleet is overloaded, not an engine. When it stays so, that is the new normal: of those that were not
        scored it is learnt anew, as what was normal for them was so under less load."""
        self._overloaded += 1
        counts = (turnout.drifting, turnout.scored, turnout.serving)
        decisions: list[Decision] = [telling.overload(*counts)] if self._overloaded == 1 else []
        if self._overloaded < self._settings.evict_windows:
            return decisions
        values = {one.engine.id: one.window.value_s for one in scored}
        for name, record in self._known.items():
            if name not in self._engines or Hold.DRIFT not in self._engines[name].holds:
                record.learn_anew([values[name]] * LEARNT_WINDOWS if name in values else ())
        decisions.append(telling.new_normal(*counts, windows=self._overloaded))
        self._overloaded = 0
        return decisions

    def _drifts(self, one: Scored, *, now: float) -> list[Decision]:
        record, engine = self._of(one.engine.id), one.engine
        record.drifting, record.good = record.drifting + 1, 0
        decisions: list[Decision] = []
        if record.drifting >= self._settings.probation_windows and not one.held:
            why = f"{one.words()}, {record.drifting} windows in a row"
            engine.place(Hold.DRIFT, why, now=now)
            decisions.append(telling.hold_placed(engine, Hold.DRIFT))
        if record.drifting % self._settings.evict_windows == 0:
            why = f"{one.words()}, {record.drifting} windows in a row"
            decisions += self._suspicions.look_into(engine, why, now=now)
        return decisions

    def _good(self, one: Scored) -> list[Decision]:
        record, engine = self._of(one.engine.id), one.engine
        record.drifting, record.good = 0, record.good + 1
        if not one.held:
            record.baseline.append(one.window.value_s)
            if record.unproven:
                record.unproven -= 1
            return []
        if record.good < self._settings.recovery_windows:
            return []
        record.unproven = self._settings.recovery_windows
        engine.lift(Hold.DRIFT)
        why = f"{one.words()}, {record.good} windows in a row"
        return [telling.hold_ended(engine.id, Hold.DRIFT, why)]

    # --- the engine comes back ----------------------------------------------------------------------------------------

    def admitted(self, engine: Engine, *, before: ProcessIdentity | None) -> list[Record]:
        """It was readmitted; `before` ran it. Another process than the one that was slow begins anew; the same, or one
        that nobody can tell apart, is on probation as before."""
        if before is None or engine.identity is None or same_process(before, engine.identity):
            known = self._of(engine.id)
            known.samples, known.probed, known.good = Sketch(), Sketch(), 0
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
            step_s=record.last.window.value_s,
            usual_s=record.last.reference_s,
            samples=record.last.window.samples,
            drifting=record.drifting,
            good=record.good,
        )
