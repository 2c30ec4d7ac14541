"""Liveness sweeps: silence, process identity, and whether control itself is cut off (spec L, R8). Pure.

Decides: which engines missed a sweep, and when misses eject. It cannot see: other evidence; an answer that is not
silence goes back to the caller.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from narwhal.control.core.asking import Asker
from narwhal.control.core.decisions import Cause, Decision, Ejection
from narwhal.control.core.engine import Engine, HealthSeen, Standing
from narwhal.control.core.events import HealthAnswered, InferenceAnswered, LegSeen, ProcessIdentity
from narwhal.control.core.process import process_words, same_process
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.telling import silent
from narwhal.vocabulary import Outcome

# Spec L2: no HTTP answer. Everything else is an answer, or says nothing (LOCAL, spec L3).
SILENCE = frozenset(
    {
        Outcome.REFUSED,
        Outcome.UNREACHABLE,
        Outcome.RESET,
        Outcome.TLS_FAILED,
        Outcome.ANSWER_CUT,
        Outcome.CONNECT_TIMEOUT,
        Outcome.READ_TIMEOUT,
    }
)
HEALTH_KEPT = 5


@dataclass(kw_only=True, slots=True)
class Sweep:
    """One sweep under way."""

    asked: int
    answer_due: float
    heard: set[str]  # engines that proxies had successes from between the sweep before and this one
    waiting: dict[str, int] = field(default_factory=dict)  # engine → number of its probe
    silent: dict[str, str] = field(default_factory=dict)  # engine → what was seen


class Liveness:
    """One sweep after the other; a new one begins only when the one before is over."""

    def __init__(self, settings: CoreSettings, engines: Mapping[str, Engine], *, now: float) -> None:
        self._settings = settings
        self._engines = engines
        self._asker = Asker(settings, engines)
        self._due = now + self._period_s
        self._turn = 0
        self._sweep: Sweep | None = None
        self._heard: set[str] = set()  # engines that proxies had successes from since the last sweep began
        self.cut_off = False  # as the last sweep says; until the next, silence is control's own (spec L4)
        self._dark: dict[str, int] = {}  # by engine, the last probe that was asked for while control was cut off

    @property
    def _period_s(self) -> float:
        return self._settings.liveness_every * self._settings.monitor_interval_s

    def configure(self, settings: CoreSettings, *, now: float) -> None:
        """The fleet file changed."""
        longer = settings.liveness_every * settings.monitor_interval_s
        self._settings = self._asker.settings = settings
        self._due = min(self._due, now + longer) if longer else self._due

    def heard(self, engine: str) -> None:
        """A proxy reported a success."""
        self._heard.add(engine)

    def tick(self, *, now: float) -> list[Decision]:
        """End a sweep whose answers are lost; begin the one that is due."""
        decisions: list[Decision] = []
        if self._sweep is not None and (not self._sweep.waiting or now >= self._sweep.answer_due):
            decisions += self._end(self._sweep)
        if self.cut_off and self._sweep is None and not (self._settings.liveness_every and self._asked()):
            decisions += self._back("control does not know any more whether it is cut off: no sweep asks any engine")
        if self._sweep is None and self._settings.liveness_every and now >= self._due:
            decisions += self._begin(now=now)
        return decisions

    def _asked(self) -> list[Engine]:
        """Whom a sweep asks. One that is ready to stop may well be stopped: that is no news, and no failure."""
        return [e for e in self._engines.values() if e.answerable]

    def _begin(self, *, now: float) -> list[Decision]:
        self._due = now + self._period_s
        engines = self._asked()
        if not engines:
            return []
        turn = self._turn % len(engines)
        self._turn += 1
        decisions: list[Decision] = []
        # What proxies tell while a sweep waits for an engine that hangs speaks for the sweep after it, too.
        heard, self._heard = self._heard, set()
        sweep = Sweep(asked=len(engines), answer_due=now, heard=heard)
        for engine in engines[turn:] + engines[:turn]:
            effect, due = self._asker.health(engine, now=now, identity=True)
            sweep.waiting[engine.id] = effect.number
            # Its answer comes within the time-outs of three requests and of a wait for the pool, however many engines
            # there are: one that is lost keeps the sweeps from all others no longer.
            sweep.answer_due = max(sweep.answer_due, due + 2 * self._settings.health_timeout_s)
            decisions.append(effect)
        self._sweep = sweep
        return decisions

    def expects(self, event: HealthAnswered) -> bool:
        """Whether the open sweep waits for this answer."""
        return self._sweep is not None and self._sweep.waiting.get(event.engine) == event.number

    def answered(self, engine: Engine, event: HealthAnswered) -> list[Decision]:
        """One answer of the sweep. Only for an answer that `expects` accepts; what it says beside silence and identity
        is the caller's to judge."""
        sweep = self._sweep
        if sweep is None:
            return []
        del sweep.waiting[engine.id]
        decisions: list[Decision] = []
        if event.outcome in SILENCE:
            sweep.silent[engine.id] = event.detail or str(event.outcome)
        elif event.outcome is None and event.identity is not None:
            decisions += self._identified(engine, event.identity)
        if not sweep.waiting:
            decisions += self._end(sweep)
        return decisions

    def _identified(self, engine: Engine, identity: ProcessIdentity) -> list[Decision]:
        """The process that answers is the one that was accepted, or it is ejected (spec R8)."""
        known = engine.identity
        if known is None:
            engine.identity = identity
            engine.decide()
            return []
        if same_process(known, identity):
            return []
        reason = f"{process_words(identity)} answers, accepted was {process_words(known)}"
        return [Ejection(engine=engine.id, cause=Cause.PROCESS_CHANGED, reason=reason)]

    def _end(self, sweep: Sweep) -> list[Decision]:
        """Every answer is in, or lost: count the misses, unless it is control that hears nothing (spec L4)."""
        self._sweep = None
        heard = sweep.heard | self._heard
        missed = {e: why for e, why in sweep.silent.items() if self._in_service(e)}
        most = len(missed) >= 2 and len(missed) * 2 > sweep.asked
        excused = {e for e in missed if most and e in heard}
        decisions = self._told(excused, len(missed), sweep.asked)
        for engine_id, why in missed.items():
            if engine_id in excused:
                continue
            engine = self._engines[engine_id]
            engine.misses += 1
            engine.count()
            if engine.misses >= self._settings.liveness_misses:
                reason = f"{silent(engine.misses)}: {why}"
                decisions.append(Ejection(engine=engine_id, cause=Cause.LIVENESS, reason=reason))
        return decisions

    def _told(self, excused: set[str], silent: int, asked: int) -> list[Decision]:
        """Tell when control finds itself cut off, and when it is no longer: once each."""
        before, self.cut_off = self.cut_off, bool(excused)
        if self.cut_off and not before:
            message = f"control is cut off: {silent} of {asked} engines do not answer it, and proxies have successes "
            message += f"from {len(excused)} of these; the sweep says nothing about them"
            return [Record(kind=EventKind.CONTROL_CUT_OFF, message=message)]
        return self._back("control is no longer cut off from the engines") if before and not self.cut_off else []

    def _back(self, message: str) -> list[Decision]:
        """From now on silence speaks against engines again, but for what was asked in the dark and may be answered in
        the light."""
        self.cut_off = False
        self._dark = {engine.id: engine.numbers for engine in self._engines.values()}
        return [Record(kind=EventKind.CONTROL_BACK, message=message)]

    def believed(self, event: HealthAnswered | InferenceAnswered) -> HealthAnswered | InferenceAnswered:
        """A probe's answer; without its silence when control was cut off at any time since it was asked for."""
        in_the_dark = self.cut_off or event.number <= self._dark.get(event.engine, -1)
        return own_silence(event) if in_the_dark else event

    def _in_service(self, engine_id: str) -> bool:
        engine = self._engines.get(engine_id)
        return engine is not None and engine.standing is Standing.IN_SERVICE

    def forget(self, engine: str) -> None:
        """The engine is out, or gone: the open sweep does not wait for it."""
        self._dark.pop(engine, None)
        self._heard.discard(engine)
        if self._sweep is not None:
            self._sweep.heard.discard(engine)
            self._sweep.waiting.pop(engine, None)
            self._sweep.silent.pop(engine, None)


def own_silence(event: HealthAnswered | InferenceAnswered) -> HealthAnswered | InferenceAnswered:
    """An answer to a control that is cut off: silence says nothing about the engine then."""
    if isinstance(event, HealthAnswered):
        return replace(event, outcome=Outcome.LOCAL) if event.outcome in SILENCE else event
    return replace(event, produced=_own(event.produced), consumed=_own(event.consumed))


def _own(leg: LegSeen | None) -> LegSeen | None:
    return replace(leg, outcome=Outcome.LOCAL) if leg is not None and leg.outcome in SILENCE else leg


def note_health(engine: Engine, event: HealthAnswered, *, now: float) -> list[Decision]:
    """Keep an answer to a health probe for people, and tell when it says something else than the one before."""
    if event.outcome is Outcome.LOCAL:
        return []
    before = engine.health[-1] if engine.health else None
    detail = event.detail or str(event.outcome or "health 200")
    seen = HealthSeen(outcome=event.outcome, detail=detail, latency_s=event.latency_s, at=now)
    engine.health = (*engine.health[1 - HEALTH_KEPT :], seen)
    if (before.outcome if before is not None else None) is event.outcome:
        return []
    fields = {"result": str(event.outcome or "ok")}
    message = f"engine {engine.id}: {detail}"
    return [Record(kind=EventKind.HEALTH_CHANGED, message=message, engine=engine.id, fields=fields)]
