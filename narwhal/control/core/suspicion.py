"""From evidence to a verdict: holds, probes, blame (spec F3, F6, F7).

Decides: when an engine is suspected, which probe finds out, and what its answer leads to. It cannot see: which reports
count as evidence, how a probe is made (`inquiry`, step by step), or what an ejection brings about. Pure.
"""

from collections.abc import Iterable, Mapping

from narwhal.control.core import telling
from narwhal.control.core.asking import Asker
from narwhal.control.core.decisions import Cause, Decision, Ejection
from narwhal.control.core.effects import ProbeHealth, ProbeInference
from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.events import HealthAnswered, InferenceAnswered
from narwhal.control.core.evidence import CLEARED_BY_HEALTH, CLEARED_BY_INFERENCE, URGENCY, Action, Seen
from narwhal.control.core.inquiry import Inquiry
from narwhal.control.core.liveness import SILENCE
from narwhal.control.core.probing import InferenceProbe, Step, StepSeen, verdict_of, words
from narwhal.control.core.readers import FailedReads
from narwhal.control.core.records import Record
from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.suspect import Suspicion
from narwhal.control.core.thresholds import Thresholds
from narwhal.vocabulary import FailureClass, Hold, Outcome, Verdict

ASKED_FOR = "asked for by an operator"
BLAMED = "blamed as producer"


class Suspicions:
    """The suspicions of all engines in service, at most one probe each."""

    def __init__(self, settings: CoreSettings, engines: Mapping[str, Engine]) -> None:
        self._settings = settings
        self._engines = engines
        self._asker = Asker(settings, engines)
        self._reads = FailedReads()
        self.known: dict[str, Suspicion] = {}
        self._inquiry = Inquiry(self._asker, engines, self.known)
        self._thresholds = Thresholds(settings, engines, self.known)

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed. Open probes go on as they were asked."""
        self._settings = self._asker.settings = self._thresholds.settings = settings

    # --- evidence comes in --------------------------------------------------------------------------------------------

    def failed(
        self, engine: Engine, failure: FailureClass, seen: Seen, *, count: int = 1, now: float
    ) -> list[Decision]:
        """`count` failures of one class that count against an engine in service."""
        before = engine.evidence.streaks.get(failure, 0)
        engine.evidence.add(failure, seen, count)
        engine.count()
        decisions = self._thresholds.quarantine(engine, failure, now=now)
        if before < self._settings.eject_after <= before + count:
            decisions += self._thresholds.reached(engine, failure, now=now)
        return decisions + self._reconsider(engine, now=now)

    def _reconsider(self, engine: Engine, *, now: float) -> list[Decision]:
        """Do what the classes at the threshold ask for, unless it is being done."""
        asked = self._thresholds.asked(engine)
        if not asked or not engine.answerable:
            return []
        action = next(a for a in URGENCY if a in asked.values())
        classes = [c for c, a in asked.items() if a is action]
        streaks = {c: engine.evidence.streaks[c] for c in classes}
        last = engine.evidence.last.get(classes[0])
        reason = told = telling.streak_words(streaks, last)
        if last is not None:
            told = f"{telling.in_a_row(streaks)}, the last: {telling.failure_words(last)}"
        if action is Action.EJECT:
            return [Ejection(engine=engine.id, cause=Cause.CONNECTION, reason=reason, told=told)]
        suspicion = self.known.get(engine.id)
        if suspicion is None:
            return self._suspect(engine, action, reason, set(asked), told=told, now=now)
        suspicion.classes |= asked.keys()
        if suspicion.unheld and action is Action.INFERENCE_PROBE:
            # What is open will do; the engine takes no new work meanwhile (spec F3).
            return self._hold(engine, suspicion, reason, told=told, now=now)
        if suspicion.open or suspicion.action in (action, Action.INFERENCE_PROBE):
            return []
        return self._suspect(engine, action, reason, suspicion.classes, told=told, now=now)

    def _hold(self, engine: Engine, suspicion: Suspicion, reason: str, *, told: str = "", now: float) -> list[Decision]:
        """The verification hold. `told`: as in `telling.hold_placed`."""
        suspicion.held, suspicion.unfounded, suspicion.reason = True, False, reason
        engine.place(Hold.VERIFICATION, reason, now=now)
        return [telling.hold_placed(engine, Hold.VERIFICATION, told)]

    def _suspect(
        self, engine: Engine, action: Action, reason: str, classes: set[FailureClass], *, told: str, now: float
    ) -> list[Decision]:
        """`reason` stays; `told` is what the event says of it, with everything that was seen."""
        suspicion = Suspicion(action=action, reason=reason, classes=classes, due=now)
        self.known[engine.id] = suspicion
        decisions: list[Decision] = []
        if action is Action.INFERENCE_PROBE:
            decisions += self._hold(engine, suspicion, reason, told=told, now=now)
            told = ""
        return decisions + self._try(engine, suspicion, told=told, now=now)

    def stalled(self, engine: Engine, seen: Seen, *, now: float) -> list[Decision]:
        """A leg, and with it every other of the engine, has had nothing for its silence limit (spec F10).

        It counts as one failure. The third of them may never come, since new work avoids an engine whose legs do not
        end (spec P3): so one is enough for an inference probe. The hold comes when a step of it has had no answer for a
        monitor interval, or with the threshold.
        """
        if not engine.answerable or self._asked(engine):
            return []
        streak = {FailureClass.STREAM: engine.evidence.streaks[FailureClass.STREAM]}
        reason = telling.streak_words(streak, seen)
        decisions = self.ask(engine, why=reason, told=telling.failure_words(seen), now=now)
        self.known[engine.id].silent = True
        return decisions

    def misread(self, reader: Engine, producer: Engine, *, count: int, now: float) -> list[Decision]:
        """`count` decode legs of `reader` failed with handoffs of `producer`; maybe those of others did, too."""
        self._reads.failed(producer.id, reader.id, count=count, now=now)
        reason = self._reads.common(producer, self._engines, self._settings.eject_after, now=now)
        return self.blame(producer.id, producer.incarnation, reason, now=now) if reason else []

    def blame(self, producer: str, incarnation: int, reason: str, *, now: float) -> list[Decision]:
        """A producer whose handoff a working engine could not read: hold, evidence, a probe of its own (spec F7)."""
        engine = self._engines.get(producer)
        if engine is None or engine.incarnation != incarnation or not engine.answerable:
            return []
        suspicion = self.known.get(producer)
        if suspicion is not None and (suspicion.held or suspicion.open):
            return []
        decisions: list[Decision] = [telling.blamed(producer, reason)]
        seen = Seen(outcome=Outcome.HANDOFF_UNUSABLE, phase=None, at=now, detail=reason)
        decisions += self.failed(engine, FailureClass.KV_HANDOFF, seen, now=now)
        suspicion = self.known.get(producer)
        if suspicion is None or not suspicion.held:
            classes = suspicion.classes if suspicion is not None else set()
            decisions += self._suspect(engine, Action.INFERENCE_PROBE, reason, classes, told=BLAMED, now=now)
        return decisions

    # --- probes go out ------------------------------------------------------------------------------------------------

    def tick(self, *, now: float) -> list[Decision]:
        """Open the probes that are due; give up on answers that never came."""
        decisions = self.wake(now=now)
        for engine_id, suspicion in list(self.known.items()):
            engine = self._engines[engine_id]
            if suspicion.open and now >= suspicion.answer_due:
                decisions += self._lost(engine, suspicion, now=now)
            elif suspicion.due is not None and now >= suspicion.due:
                decisions += self._try(engine, suspicion, told="again", now=now)
        return decisions

    def next_due(self) -> float | None:
        """When `wake` is wanted."""
        return min((due for s in self.known.values() if (due := self._hold_due(s)) is not None), default=None)

    def _hold_due(self, suspicion: Suspicion) -> float | None:
        """When an engine that is silent to its legs has been silent to a probe for long enough."""
        if not suspicion.silent or not suspicion.unheld:
            return None
        return suspicion.asked_at + self._settings.monitor_interval_s

    def wake(self, *, now: float) -> list[Decision]:
        """Hold the engines whose probes are not answered either (spec F10)."""
        decisions: list[Decision] = []
        for engine_id, suspicion in self.known.items():
            due = self._hold_due(suspicion)
            if due is not None and now >= due:
                decisions += self._hold(self._engines[engine_id], suspicion, suspicion.reason, now=now)
        return decisions

    def _asked(self, engine: Engine) -> bool:
        """Whether a probe of it is under way, or comes by itself."""
        suspicion = self.known.get(engine.id)
        return suspicion is not None and (suspicion.open or suspicion.held)

    def ask(self, engine: Engine, *, why: str = ASKED_FOR, told: str = "", now: float) -> list[Decision]:
        """An operator wants an inference probe now, or `why` says who else; `told`: the event says this instead. Only
        while none is open."""
        suspicion = self.known.get(engine.id)
        if suspicion is None or suspicion.action is not Action.INFERENCE_PROBE:
            classes = suspicion.classes if suspicion is not None else set()
            suspicion = Suspicion(action=Action.INFERENCE_PROBE, reason=why, classes=classes)
            self.known[engine.id] = suspicion
        return self._try(engine, suspicion, told=told or why, now=now)

    def look_into(self, engine: Engine, why: str, *, now: float) -> list[Decision]:
        """An inference probe would tell more about an engine in service. Nothing when one is under way, or comes by
        itself."""
        if self._asked(engine):
            return []
        decisions = self.ask(engine, why=why, now=now)
        self.known[engine.id].unfounded = True
        return decisions

    def _try(self, engine: Engine, suspicion: Suspicion, *, told: str, now: float) -> list[Decision]:
        started = telling.probe_started(engine.id, suspicion.action, told)
        asked = self._inquiry.begin(engine, suspicion, now=now)
        return [started, *self._or_conclude(asked, engine, suspicion, now=now)]

    def _or_conclude(
        self, asked: list[ProbeHealth | ProbeInference], engine: Engine, suspicion: Suspicion, *, now: float
    ) -> list[Decision]:
        """What is asked next; when nothing is, the probe has its verdict."""
        if suspicion.probe is None or asked:
            return [*asked]
        return self._concluded(engine, suspicion, suspicion.probe, now=now)

    # --- answers come in ----------------------------------------------------------------------------------------------

    def expects(self, event: HealthAnswered | InferenceAnswered) -> bool:
        """Whether this is the answer that the engine's open probe waits for."""
        return self._inquiry.expects(event)

    def reader(self, engine: str) -> str:
        """Who decodes in the open step of this engine's inference probe."""
        return self._inquiry.reader(engine)

    def health_answered(self, engine: Engine, event: HealthAnswered, *, now: float) -> list[Decision]:
        """The health probe came back (spec F3). Only for an answer that `expects` accepts."""
        suspicion = self.known[engine.id]
        detail = event.detail or str(event.outcome or "health 200")
        if event.outcome is Outcome.LOCAL:
            return self._health_again(engine, suspicion, detail, now=now)
        if event.outcome is not None:
            ended = telling.probe_ended(engine.id, suspicion.action, Verdict.FAIL, detail)
            reason = f"{suspicion.reason}, then {detail}"
            return [ended, Ejection(engine=engine.id, cause=Cause.HEALTH_PROBE, reason=reason)]
        del self.known[engine.id]
        window = self._settings.relapse_window_s
        engine.relapses.watch(suspicion.classes & CLEARED_BY_HEALTH, now=now, window_s=window)
        ended = telling.probe_ended(engine.id, suspicion.action, Verdict.PASS, detail)
        return [ended, *self.healthy(engine), *self._reconsider(engine, now=now)]

    def _health_again(self, engine: Engine, suspicion: Suspicion, detail: str, *, now: float) -> list[Decision]:
        suspicion.due = now + self._settings.monitor_interval_s
        ended = telling.probe_ended(engine.id, suspicion.action, Verdict.INCONCLUSIVE, detail)
        return [ended, *self._reconsider(engine, now=now)]

    def healthy(self, engine: Engine) -> list[Decision]:
        """A health 200, from whichever stage (spec F4, L2, H4)."""
        held = Hold.VERIFICATION in engine.holds
        changed = engine.evidence.clear(CLEARED_BY_HEALTH, held=held) or engine.misses > 0
        engine.misses = 0
        if changed:
            engine.count()
        waiting = self.known.get(engine.id)
        if waiting is not None and waiting.action is Action.HEALTH_PROBE and not waiting.open:
            del self.known[engine.id]
        return [*self._lift(engine, Hold.QUARANTINE, "health 200")]

    def inference_answered(self, engine: Engine, event: InferenceAnswered, *, now: float) -> list[Decision]:
        """A step of the inference probe came back. Only for an answer that `expects` accepts."""
        suspicion = self.known[engine.id]
        seen = StepSeen(produced=event.produced, consumed=event.consumed)
        if suspicion.checking:
            return self._checked(engine, suspicion, seen, now=now)
        probe = suspicion.probe
        if probe is None or probe.step is None:
            raise ValueError(f"{engine.id}: no step is open")
        if probe.step.producer is not None and verdict_of(seen.consumed) is Verdict.PASS:
            self._asker.met(probe.step.producer, probe.step.consumer)
        probe.answered(seen)
        asked = self._inquiry.go_on(engine, suspicion, probe, now=now)
        return self._or_conclude(asked, engine, suspicion, now=now)

    def _concluded(self, engine: Engine, suspicion: Suspicion, probe: InferenceProbe, *, now: float) -> list[Decision]:
        """Every leg has been tried (spec F6)."""
        decisions: list[Decision] = [telling.probe_ended(engine.id, suspicion.action, probe.verdict, probe.detail)]
        blamed = [(p, self._engines[p].incarnation, why) for p, why in probe.blamed() if p in self._engines]
        if probe.verdict is Verdict.FAIL and suspicion.unfounded and not suspicion.classes and _silent(probe.last):
            # Nothing spoke against it before: it may as well be control that has just been cut off from engines, which
            # a sweep will have told (spec L4) when it is asked again.
            decisions += self._hold(engine, suspicion, f"{suspicion.reason}, then {probe.detail}", now=now)
            decisions += self._again(engine, suspicion, now=now)
        elif probe.verdict is Verdict.FAIL:
            reason = f"{suspicion.reason}, then {probe.detail}"
            decisions.append(Ejection(engine=engine.id, cause=Cause.INFERENCE_PROBE, reason=reason))
        elif probe.verdict is Verdict.PASS:
            remembered = self._inquiry.remembered(engine)
            suspicion.to_check = {p: remembered[p] for p in probe.to_check() if p in remembered}
            decisions += self._cleared(engine, suspicion, now=now)
        else:
            suspicion.blocked_by = probe.failed_peers
            decisions += self._again(engine, suspicion, now=now)
        for producer, incarnation, why in blamed:
            decisions += self.blame(producer, incarnation, why, now=now)
        return decisions

    def _cleared(self, engine: Engine, suspicion: Suspicion, *, now: float) -> list[Decision]:
        """All legs passed: nothing is held against it; next, the producers that it remembers."""
        classes = CLEARED_BY_INFERENCE
        if engine.evidence.timeout_is_stream:
            classes |= {FailureClass.TIMEOUT}
        engine.relapses.watch(suspicion.classes & classes, now=now, window_s=self._settings.relapse_window_s)
        engine.evidence.clear(classes)
        engine.evidence.forget_producers()
        engine.count()
        suspicion.held, suspicion.classes = False, set()
        decisions: list[Decision] = []
        for kind in (Hold.VERIFICATION, Hold.QUARANTINE):
            decisions += self._lift(engine, kind, "inference probe passed")
        for other in self._engines.values():
            # Who waited for this engine to be the one to blame.
            if engine.id in other.evidence.producers:
                decisions += self._reconsider(other, now=now)
        return decisions + self._check_next(engine, suspicion, now=now)

    def _check_next(self, engine: Engine, suspicion: Suspicion, *, now: float) -> list[Decision]:
        """Probe the next remembered producer, its handoff read by this engine (spec F7)."""
        suspicion.checking = ""
        while suspicion.to_check:
            producer = next(iter(suspicion.to_check))
            incarnation = suspicion.to_check.pop(producer)
            other = self._engines.get(producer)
            if other is None or other.incarnation != incarnation or producer in self.known:
                continue
            if other.answerable:
                suspicion.checking = producer
                step = Step(producer=producer, consumer=engine.id)
                return [self._inquiry.ask(engine, suspicion, step, now=now)]
        del self.known[engine.id]
        return self._reconsider(engine, now=now)

    def _checked(self, engine: Engine, suspicion: Suspicion, seen: StepSeen, *, now: float) -> list[Decision]:
        """A remembered producer's transfer came back. One that was not begun says nothing of the producer."""
        producer = suspicion.checking
        other = self._engines.get(producer)
        produced, consumed = verdict_of(seen.produced), verdict_of(seen.consumed)
        decisions: list[Decision] = []
        if produced is Verdict.PASS and consumed is Verdict.PASS:
            self._asker.met(producer, engine.id)
        elif seen.produced is not None and other is not None and Verdict.FAIL in (produced, consumed):
            why = words(seen.produced if produced is Verdict.FAIL else seen.consumed)
            reason = f"{engine.id} works with another producer and not with it ({why})"
            decisions += self.blame(producer, other.incarnation, reason, now=now)
        return decisions + self._check_next(engine, suspicion, now=now)

    def _again(self, engine: Engine, suspicion: Suspicion, *, now: float) -> list[Decision]:
        """Inconclusive: the hold stays and the monitor tries again; a probe that only an operator wanted ends."""
        if suspicion.held:
            suspicion.due, suspicion.probe = now + self._settings.readmit_interval_s, None
            return []
        del self.known[engine.id]
        return self._reconsider(engine, now=now)

    def _lost(self, engine: Engine, suspicion: Suspicion, *, now: float) -> list[Decision]:
        """An answer that never came says nothing."""
        if suspicion.checking:
            return self._check_next(engine, suspicion, now=now)
        if suspicion.action is Action.HEALTH_PROBE:
            return self._health_again(engine, suspicion, "no answer came back", now=now)
        ended = telling.probe_ended(engine.id, suspicion.action, Verdict.INCONCLUSIVE, "no answer came back")
        return [ended, *self._again(engine, suspicion, now=now)]

    def _lift(self, engine: Engine, kind: Hold, why: str) -> list[Record]:
        if kind not in engine.holds:
            return []
        engine.lift(kind)
        return [telling.hold_ended(engine.id, kind, why)]

    # --- the engine comes and goes ------------------------------------------------------------------------------------

    def ejected(self, engine: Engine, *, now: float) -> None:
        """The engine is out."""
        # Kept apart from the streaks: a health 200 at the gate ends some of these before the engine is back.
        engine.relapses.ejected_for = frozenset(self._thresholds.of(engine))
        self._out(engine.id, now=now)

    def removed(self, engine: str, *, now: float) -> None:
        """The engine has left the fleet, or is another under the same id."""
        self._out(engine, now=now)
        self._asker.forget(engine)

    def dismissed(self, engine: Engine, *, now: float) -> list[Record]:
        """The engine may be stopped from now on: what is open about it will find out nothing."""
        self._out(engine.id, now=now)
        return self._lift(engine, Hold.VERIFICATION, "the engine is ready to stop")

    def _out(self, engine: str, *, now: float) -> None:
        """Nothing is open about it any more, and who only waited for it is tried again at once."""
        self.known.pop(engine, None)
        self._reads.forget(engine)
        for other in self.known.values():
            if engine in other.blocked_by and other.due is not None:
                other.due = min(other.due, now)

    def readmitted(self, engine: Engine, *, now: float) -> None:
        """Admitted again: reaching these classes again soon is a relapse (spec F11). A drained engine may have been
        suspected while it was tried: that was of an incarnation which is over."""
        self._out(engine.id, now=now)
        window = self._settings.relapse_window_s
        engine.relapses.watch(engine.relapses.ejected_for, now=now, window_s=window)
        engine.relapses.ejected_for = frozenset()

    def met(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Transfers that worked at the gate, by producer and consumer, between engines that are in service now: their
        processes have shaken hands (spec V13)."""
        for pair in pairs:
            if all(name in self._engines and self._engines[name].standing is Standing.IN_SERVICE for name in pair):
                self._asker.met(*pair)

    def restore(self, engine: Engine, *, now: float) -> None:
        """An engine in service of a saved handoff: go on where it was, at the next pass."""
        if not engine.answerable:
            return
        held = engine.holds.get(Hold.VERIFICATION)
        asked = self._thresholds.of(engine)
        silent = engine.evidence.stalls > 0
        if held is not None:
            action, reason = Action.INFERENCE_PROBE, held.reason
        elif silent:
            action, reason = Action.INFERENCE_PROBE, telling.in_a_row({FailureClass.STREAM: engine.evidence.stalls})
        elif Action.HEALTH_PROBE in asked.values():
            streaks = {c: engine.evidence.streaks[c] for c, action in asked.items() if action is Action.HEALTH_PROBE}
            action, reason = Action.HEALTH_PROBE, telling.in_a_row(streaks)
        else:
            return
        self.known[engine.id] = Suspicion(
            action=action, reason=reason, classes=set(asked), silent=silent, held=held is not None, due=now
        )


def _silent(seen: StepSeen | None) -> bool:
    """Whether an engine gave no answer in a step."""
    legs = () if seen is None else (seen.produced, seen.consumed)
    return any(leg is not None and leg.outcome in SILENCE for leg in legs)
