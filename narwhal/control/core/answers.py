"""What the shell answers: whoever waits for exactly this answer takes it, others learn from it. Pure.

Decides: which machine an answer goes to. It cannot see: what is decided there, nor how an engine was asked. An answer
that nobody waits for, or of another incarnation, changes nothing.
"""

from collections.abc import Iterator, Mapping

from narwhal.control.core.decisions import Decision
from narwhal.control.core.drain import Drains
from narwhal.control.core.drift import Drift
from narwhal.control.core.engine import Engine
from narwhal.control.core.events import (
    Answer,
    CheckAnswered,
    HealthAnswered,
    IdentityCaptured,
    InferenceAnswered,
    TransferAnswered,
)
from narwhal.control.core.evidence import CLASS_OF, Seen
from narwhal.control.core.identity import ModelChecks
from narwhal.control.core.liveness import SILENCE, Liveness, note_health
from narwhal.control.core.readmission import Readmission
from narwhal.control.core.suspicion import Suspicions
from narwhal.vocabulary import Check, Verdict

AS_ANOTHER = "lists the model, and answered a leg as another engine would"


class Answers:
    """Takes the answers to checks, probes, transfers and questions for identities."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        suspicions: Suspicions,
        readmission: Readmission,
        liveness: Liveness,
        models: ModelChecks,
        drains: Drains,
        drift: Drift,
    ) -> None:
        self._engines = engines
        self._suspicions = suspicions
        self._readmission = readmission
        self._liveness = liveness
        self._models = models
        self._drains = drains
        self._drift = drift

    def take(self, event: Answer, *, now: float) -> Iterator[list[Decision]]:
        """Yields what is decided, so that the caller carries it out before the answer is made more of."""
        engine = self._engines.get(event.engine)
        if engine is None or event.incarnation != engine.incarnation:
            return
        match event:
            case CheckAnswered():
                yield self._checked(engine, event, now)
            case HealthAnswered() if self._suspicions.expects(event):
                yield self._probed(engine, event, now)
            case HealthAnswered() if self._liveness.expects(event):
                yield self._swept(engine, event, now)
                # An engine that is out by now is not counted by the sweep.
                if self._liveness.expects(event):
                    yield self._liveness.answered(engine, event)
            case InferenceAnswered() if self._suspicions.expects(event):
                yield self._probed(engine, event, now)
            case TransferAnswered() if self._readmission.expects(event):
                yield self._readmission.transferred(event, now=now)
            case IdentityCaptured() if self._drains.expects(event):
                yield self._drains.captured(engine, event, now=now)

    def _probed(self, engine: Engine, event: HealthAnswered | InferenceAnswered, now: float) -> list[Decision]:
        """The open probe of a suspicion came back."""
        believed = self._liveness.believed(event)
        if isinstance(believed, HealthAnswered):
            return [
                *note_health(engine, believed, now=now),
                *self._suspicions.health_answered(engine, believed, now=now),
            ]
        self._drift.probed(self._suspicions.reader(engine.id), believed.consumed)
        return self._suspicions.inference_answered(engine, believed, now=now)

    def _checked(self, engine: Engine, event: CheckAnswered, now: float) -> list[Decision]:
        if self._models.expects(event):
            decisions = self._models.answered(engine, event, now=now)
            if event.result.verdict is Verdict.PASS and engine.answerable:
                # It lists the model, and refused it to a leg: whether it does so to everybody, a prompt tells (R9).
                decisions += self._suspicions.look_into(engine, AS_ANOTHER, now=now)
            return decisions
        if not self._readmission.expects(event):
            return []
        decisions = self._readmission.answered(engine, event, now=now)
        if event.check is Check.HEALTH and event.result.verdict is Verdict.PASS:
            decisions = [*self._suspicions.healthy(engine), *decisions]
        return decisions

    def _swept(self, engine: Engine, event: HealthAnswered, now: float) -> list[Decision]:
        """What an answer to a liveness sweep says beyond that there is one."""
        decisions = note_health(engine, event, now=now)
        if event.outcome is None:
            decisions += self._suspicions.healthy(engine)
        elif event.outcome not in SILENCE and event.outcome in CLASS_OF:
            # An answer other than 200 is not silence (spec L2).
            seen = Seen(outcome=event.outcome, phase=None, at=now, status=event.status, detail=event.detail)
            decisions += self._suspicions.failed(engine, CLASS_OF[event.outcome], seen, now=now)
        return decisions
