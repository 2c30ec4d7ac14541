"""The probe of each suspicion, step by step: what is asked next, and which answer is waited for (spec F6). Pure.

Decides: whom the next step of a probe is made with. It cannot see: why an engine is suspected, nor what answers lead to
to (`suspicion`).
"""

from collections.abc import Mapping

from narwhal.control.core.asking import Asker
from narwhal.control.core.effects import ProbeHealth, ProbeInference
from narwhal.control.core.engine import Engine
from narwhal.control.core.events import HealthAnswered, InferenceAnswered
from narwhal.control.core.evidence import Action
from narwhal.control.core.probing import InferenceProbe, Step, StepSeen
from narwhal.control.core.suspect import Suspicion
from narwhal.vocabulary import Phase


class Inquiry:
    """Of all suspicions. `known`: these, by engine."""

    def __init__(self, asker: Asker, engines: Mapping[str, Engine], known: Mapping[str, Suspicion]) -> None:
        self._asker = asker
        self._engines = engines
        self._known = known

    def begin(self, engine: Engine, suspicion: Suspicion, *, now: float) -> list[ProbeHealth | ProbeInference]:
        """Begin its probe anew. Empty when nothing is to be asked: the probe has its verdict."""
        suspicion.due, suspicion.blocked_by = None, frozenset()
        if suspicion.action is Action.HEALTH_PROBE:
            effect, suspicion.answer_due = self._asker.health(engine, now=now)
            suspicion.number = effect.number
            return [effect]
        phases = [phase for phase in Phase if engine.able(phase)]
        suspicion.probe = InferenceProbe(engine.id, phases, list(self.remembered(engine)))
        return self.go_on(engine, suspicion, suspicion.probe, now=now)

    def go_on(
        self, engine: Engine, suspicion: Suspicion, probe: InferenceProbe, *, now: float
    ) -> list[ProbeHealth | ProbeInference]:
        """The next step of an inference probe; empty when it has its verdict."""
        step = probe.next(lambda phase: self._asker.peers(engine, phase, self._doubted, now=now))
        while step is not None and step.consumer not in self._engines:
            # The one reader that could have told who failed has left the fleet: nobody can.
            probe.answered(StepSeen(produced=None, consumed=None))
            step = probe.next(lambda phase: self._asker.peers(engine, phase, self._doubted, now=now))
        return [] if step is None else [self.ask(engine, suspicion, step, now=now)]

    def ask(self, engine: Engine, suspicion: Suspicion, step: Step, *, now: float) -> ProbeInference:
        """Ask for one step on the engine's account."""
        effect, suspicion.answer_due = self._asker.step(engine, step, now=now)
        suspicion.number, suspicion.asked_at = effect.number, now
        return effect

    def remembered(self, engine: Engine) -> dict[str, int]:
        """The producers of its failed decode legs that still are what they were, newest last."""
        return {
            producer: incarnation
            for producer, incarnation in engine.evidence.producers.items()
            if producer in self._engines and self._engines[producer].incarnation == incarnation
        }

    def _doubted(self, engine: Engine) -> bool:
        suspicion = self._known.get(engine.id)
        return suspicion is not None and not suspicion.checking

    def expects(self, event: HealthAnswered | InferenceAnswered) -> bool:
        """Whether this is the answer that the engine's open probe waits for."""
        suspicion = self._known.get(event.engine)
        if suspicion is None or not suspicion.open or suspicion.number != event.number:
            return False
        return isinstance(event, HealthAnswered) == (suspicion.action is Action.HEALTH_PROBE)

    def reader(self, engine: str) -> str:
        """Who decodes in the open step of this engine's inference probe."""
        suspicion = self._known[engine]
        step = suspicion.probe.step if suspicion.probe is not None and not suspicion.checking else None
        return engine if step is None else step.consumer
