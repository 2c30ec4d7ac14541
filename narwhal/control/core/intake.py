"""Reports become evidence: each run once, in order, and only what speaks about the engine as it is now (spec F1–F5, F9,
F10, F12, R9).

Decides: which outcomes count for or against an engine. It cannot see: what follows from them. Pure.
"""

from collections.abc import Iterator, Mapping

from narwhal.control.core.decisions import Decision
from narwhal.control.core.drift import Drift
from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.evidence import CLASS_OF, CLEARS, HAD_READ, REMEMBERS, Seen
from narwhal.control.core.identity import ModelChecks
from narwhal.control.core.liveness import Liveness
from narwhal.control.core.records import Record
from narwhal.control.core.roles import Roles
from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.signals import Signals
from narwhal.control.core.suspicion import Suspicions
from narwhal.control.core.tallies import Tallies
from narwhal.control.core.witnesses import AT_FAULT, Witnesses
from narwhal.reports import Batch, ProxyKey, Run
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase


class Intake:
    """Takes batches of runs."""

    def __init__(
        self,
        settings: CoreSettings,
        engines: Mapping[str, Engine],
        *,
        tallies: Tallies,
        witnesses: Witnesses,
        suspicions: Suspicions,
        liveness: Liveness,
        models: ModelChecks,
        signals: Signals,
        drift: Drift,
        roles: Roles,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._tallies = tallies
        self._witnesses = witnesses
        self._suspicions = suspicions
        self._liveness = liveness
        self._models = models
        self._signals = signals
        self._drift = drift
        self._roles = roles

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed."""
        self._settings = settings

    def take(self, batch: Batch, *, connected: bool, now: float) -> Iterator[list[Decision]]:
        """Apply a batch, unless it was applied before. Yields after each run, so that the caller carries out what was
        decided before the next one is judged."""
        if not self._tallies.accept(batch, connected=connected, now=now):
            return
        for measures in self._signals.take(batch, now=now):
            self._drift.measured(measures)
        for run in batch.runs:
            engine = self._engines.get(run.engine)
            if engine is None:
                self._tallies.count_unknown(run)
                continue
            engine.outcomes[run.outcome] = engine.outcomes.get(run.outcome, 0) + run.count
            engine.count()
            yield self._judge(batch.proxy, run, engine, now=now)

    def _judge(self, proxy: ProxyKey, run: Run, engine: Engine, *, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        if run.outcome is Outcome.LOCAL:
            decisions += self._witnesses.own_cause(proxy, now=now)
        if run.incarnation != engine.incarnation or not engine.answerable:
            return decisions
        if run.outcome in CLEARS:
            decisions += self._success(proxy, run, engine, now=now)
        elif run.outcome in CLASS_OF:
            decisions += self._failure(proxy, run, engine, CLASS_OF[run.outcome], now=now)
        return decisions

    def _success(self, proxy: ProxyKey, run: Run, engine: Engine, *, now: float) -> list[Decision]:
        engine.evidence.clear(CLEARS[run.outcome], held=Hold.VERIFICATION in engine.holds)
        self._liveness.heard(engine.id)
        if run.outcome is not Outcome.WRONG_IDENTITY:
            return [*self._witnesses.success(proxy, engine.id, now=now)]
        # A proxy that every engine answers so has the wrong credential itself.
        at_fault, told = self._at_fault(proxy, engine, now=now)
        return [*told, *([] if at_fault else self._models.doubted(engine, now=now))]

    def _at_fault(self, proxy: ProxyKey, engine: Engine, *, now: float) -> tuple[bool, list[Record]]:
        # Nobody has legs on those that are drained: counted too, a proxy could fail on all others and not be the fault.
        in_service = [e.id for e in self._engines.values() if e.standing is Standing.IN_SERVICE and not e.shut]
        return self._witnesses.at_fault(proxy, engine.id, in_service=in_service, now=now)

    def _failure(
        self, proxy: ProxyKey, run: Run, engine: Engine, failure: FailureClass, *, now: float
    ) -> list[Decision]:
        decisions: list[Decision] = []
        if run.outcome is Outcome.STALLED and self._contradicted(proxy, run, now=now):
            return decisions
        if failure in AT_FAULT:
            at_fault, told = self._at_fault(proxy, engine, now=now)
            decisions += told
            if at_fault:
                return decisions
        decisions += self._roles.timed_out(run, now=now)
        if failure in REMEMBERS:
            decisions += self._read(run, engine, now=now)
        seen = _seen(proxy, run, now)
        decisions += self._suspicions.failed(engine, failure, seen, count=run.count, now=now)
        if failure is FailureClass.STREAM and (run.outcome is Outcome.STALLED or self._silent(proxy, run, now=now)):
            decisions += self._suspicions.stalled(engine, seen, now=now)
        return decisions

    def _silent(self, proxy: ProxyKey, run: Run, *, now: float) -> bool:
        """Whether the stream ended because nothing came, nor to any other leg of its engine (spec F10)."""
        told = run.failure
        return told is not None and told.engine_silent and not self._contradicted(proxy, run, now=now)

    def _contradicted(self, proxy: ProxyKey, run: Run, *, now: float) -> bool:
        limit = self._settings.stall_s if run.phase is Phase.DECODE else self._settings.silent_leg_s
        return not limit or self._witnesses.contradicts_stall(proxy, run.engine, limit_s=limit, now=now)

    def _read(self, run: Run, engine: Engine, *, now: float) -> list[Decision]:
        """Remember the producer of a failed decode leg, if it still is the process that produced (spec F7)."""
        producer = self._producer(run, engine)
        if producer is not None:
            engine.evidence.blame(producer.id, producer.incarnation)
            if run.outcome not in HAD_READ:
                return self._suspicions.misread(engine, producer, count=run.count, now=now)
        engine.evidence.own = True
        return []

    def _producer(self, run: Run, engine: Engine) -> Engine | None:
        told = run.failure
        producer = self._engines.get(told.producer) if told is not None and run.phase is Phase.DECODE else None
        if told is None or producer is None or producer is engine or producer.incarnation != told.producer_incarnation:
            return None
        return producer


def _seen(proxy: ProxyKey, run: Run, now: float) -> Seen:
    told = run.failure
    if told is None:
        return Seen(outcome=run.outcome, phase=run.phase, at=now, proxy=str(proxy))
    return Seen(
        outcome=run.outcome,
        phase=run.phase,
        at=now,
        proxy=str(proxy),
        status=told.status,
        detail=told.detail,
        producer=told.producer,
        request_id=told.request_id,
    )
