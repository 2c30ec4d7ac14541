"""Is it the engine we think it is? The `model` check of one that answers 401, 403 or 404 (spec R9). Pure.

Decides: when the check is asked for, and that its failure ejects. It cannot see: what the engine's other legs say, nor
what it answers to a prompt: when it lists the right model, a probe finds that out (`suspicion`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from narwhal.control.core import telling
from narwhal.control.core.decisions import Cause, Decision, Ejection
from narwhal.control.core.effects import RunCheck
from narwhal.control.core.engine import Checked, Engine
from narwhal.control.core.events import CheckAnswered
from narwhal.control.core.readmission import ANSWER_MARGIN_S
from narwhal.control.core.settings import CoreSettings
from narwhal.vocabulary import Check, Verdict

FAILS = frozenset({Verdict.FAIL})  # every other verdict leaves the engine where it is
AGAIN = frozenset({Verdict.INCONCLUSIVE})


@dataclass(kw_only=True, slots=True)
class Doubt:
    """One engine whose model is being checked, or was a moment ago."""

    number: int = 0
    answer_due: float | None = None  # while an answer is waited for
    again_due: float | None = None  # after an inconclusive one
    quiet_until: float | None = None  # after a passed one: more of the same outcomes ask for nothing new


class ModelChecks:
    """The doubts about engines in service."""

    def __init__(self, settings: CoreSettings, engines: Mapping[str, Engine]) -> None:
        self._settings = settings
        self._engines = engines
        self._doubts: dict[str, Doubt] = {}

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed."""
        self._settings = settings

    def doubted(self, engine: Engine, *, now: float) -> list[Decision]:
        """A leg got 401, 403, or 404 for the configured model."""
        doubt = self._doubts.get(engine.id)
        if doubt is not None and (doubt.quiet_until is None or now < doubt.quiet_until):
            return []
        self._doubts[engine.id] = Doubt()
        return self._ask(engine, self._doubts[engine.id], now=now)

    def _ask(self, engine: Engine, doubt: Doubt, *, now: float) -> list[Decision]:
        timeout = self._settings.health_timeout_s
        doubt.number, doubt.again_due = engine.next_number(), None
        doubt.answer_due = now + timeout + ANSWER_MARGIN_S
        check = RunCheck(
            engine=engine.id,
            url=engine.spec.url,
            incarnation=engine.incarnation,
            number=doubt.number,
            check=Check.MODEL,
            model=self._settings.model,
            timeout_s=timeout,
        )
        return [telling.probe_started(engine.id, "model check", "an answer as of another engine"), check]

    def tick(self, *, now: float) -> list[Decision]:
        """Ask again where nothing was learnt."""
        decisions: list[Decision] = []
        for engine_id, doubt in list(self._doubts.items()):
            if doubt.quiet_until is not None and now >= doubt.quiet_until:
                del self._doubts[engine_id]
                continue
            lost = doubt.answer_due is not None and now >= doubt.answer_due
            if lost or (doubt.again_due is not None and now >= doubt.again_due):
                decisions += self._ask(self._engines[engine_id], doubt, now=now)
        return decisions

    def expects(self, event: CheckAnswered) -> bool:
        """Whether this is an answer that is waited for."""
        doubt = self._doubts.get(event.engine)
        return doubt is not None and doubt.answer_due is not None and doubt.number == event.number

    def answered(self, engine: Engine, event: CheckAnswered, *, now: float) -> list[Decision]:
        """The check came back. Only for an answer that `expects` accepts."""
        doubt = self._doubts[engine.id]
        result = event.result
        engine.checks[event.check] = Checked(result=result, at=now)
        doubt.answer_due = None
        decisions: list[Decision] = [telling.probe_ended(engine.id, "model check", result.verdict, result.detail)]
        if result.verdict in FAILS:
            decisions.append(Ejection(engine=engine.id, cause=Cause.MODEL, reason=result.detail))
        elif result.verdict in AGAIN:
            doubt.again_due = now + self._settings.readmit_interval_s
        else:
            doubt.quiet_until = now + self._settings.readmit_interval_s
        return decisions

    def forget(self, engine: str) -> None:
        """The engine is out, or gone."""
        self._doubts.pop(engine, None)
