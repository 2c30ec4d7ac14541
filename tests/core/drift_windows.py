"""Drift without a fleet around it: engines, and windows in which they take so long for a token (spec H5)."""

from narwhal.control.core.decisions import Decision
from narwhal.control.core.drift import Drift
from narwhal.control.core.effects import ProbeInference
from narwhal.control.core.engine import Engine, joining
from narwhal.control.core.events import LegSeen
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.settings import CoreSettings, DriftSettings
from narwhal.control.core.suspicion import Suspicions
from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.vocabulary import Hold, Outcome, Phase
from tests.core.rig import PROCESS, decode, prefill

# What a sketch makes of 20, 36, 44 and 60 ms: the middle of the bucket that each falls into.
USUAL, WITHIN, ABOVE, SLOW = 0.02, 0.036, 0.044, 0.06
USUAL_WORDS, SLOW_WORDS = "19.4 ms a token where 19.4 ms are usual", "59.9 ms a token where 19.4 ms are usual"


class Windows:
    """Decode engines, three unless they are named, and a prefill engine; windows of 30 s."""

    def __init__(self, *decodes: str, **drift: float) -> None:
        specs = (prefill("p"), *(decode(name) for name in decodes or ("d1", "d2", "d3")))
        self.settings = DriftSettings(**drift)  # type: ignore[arg-type]
        core = CoreSettings(name="fleet", model="tiny", engines=specs, drift=self.settings)
        self.now = 1000.0
        self.engines: dict[str, Engine] = {}
        for spec in specs:
            engine = joining(spec, now=0.0)
            engine.admit(identity=PROCESS, ramp_s=0.0, now=0.0)
            self.engines[spec.id] = engine
        self.suspicions = Suspicions(core, self.engines)
        self.drift = Drift(self.settings, self.engines, self.suspicions, now=self.now)

    def measure(self, engine: str, step: float, count: int = 10, phase: Phase = Phase.DECODE) -> None:
        sketch = Sketch()
        sketch.add(step, count)
        measures = LegMeasures(engine=engine, phase=phase, incarnation=1, sketches={Measure.STEP: sketch}, waiting=0)
        self.drift.measured(measures)

    def probe(self, engine: str, step: float) -> None:
        """A probe has read a handoff on it, as quickly as this."""
        self.drift.probed(engine, LegSeen(outcome=Outcome.STREAM_COMPLETE, step_s=step, steps=15))

    def window(self, count: int = 10, /, **steps: float) -> list[Decision]:
        """One window, in which these took so long for each of `count` tokens; what is decided at its end."""
        for engine, step in steps.items():
            self.measure(engine, step, count)
        self.now += self.settings.window_s
        self.drift.rollover(now=self.now)
        return self.drift.tick(now=self.now)

    def usual(self, windows: int = 3, /, **other: float) -> list[Decision]:
        """The same for several windows, all engines as usual but for these."""
        steps = {"d1": USUAL, "d2": USUAL, "d3": USUAL} | other
        return [decision for _ in range(windows) for decision in self.window(**steps)]

    def drifting(self) -> set[str]:
        return {name for name, engine in self.engines.items() if Hold.DRIFT in engine.holds}


def told(decisions: list[Decision]) -> list[tuple[EventKind, str]]:
    return [(d.kind, d.message) for d in decisions if isinstance(d, Record)]


def probes(decisions: list[Decision]) -> list[str]:
    return [d.engine for d in decisions if isinstance(d, ProbeInference)]
