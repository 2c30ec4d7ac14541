"""Who is to blame, and how soon it is found out: recounted here from the reports, with the tables of the specification
typed anew, and compared with what is truly wrong with an engine.

Stated bounds, in seconds, are the constants below.
"""

from collections import Counter
from typing import TYPE_CHECKING

from narwhal.control.core.decisions import Cause
from narwhal.control.core.events import CheckAnswered, HealthAnswered, InferenceAnswered, Input, Reported
from narwhal.control.core.evidence import Action
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.settings import CoreSettings
from narwhal.reports import ProxyKey, Run
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Verdict
from tests.simulation.engines import Trouble
from tests.simulation.world import Invariant, Violation

if TYPE_CHECKING:
    from tests.simulation.engines import Engine
    from tests.simulation.invariants import Watch
    from tests.simulation.term import Term

# Evidence of what was wrong may be told, and probes of it may end, this long after it was put right: a silent prefill
# (30), a first pull (20), a probe of it with several peers.
LINGER_S = 90.0
# A healthy engine that others' faults have put on a verification hold is off it after this long: probes with silent
# peers, one after the other, each for as long as a first transfer may take.
HELD_S = 90.0

# A check of an engine's model and a probe of it, among peers that answer, take this long at the most.
AS_ANOTHER_S = 5.0

F = FailureClass
FAILS: dict[Outcome, FailureClass] = {
    Outcome.REFUSED: F.CONNECTION,
    Outcome.UNREACHABLE: F.CONNECTION,
    Outcome.RESET: F.CONNECTION,
    Outcome.ANSWER_CUT: F.CONNECTION,
    Outcome.CONNECT_TIMEOUT: F.TIMEOUT,
    Outcome.PREFILL_TIMEOUT: F.TIMEOUT,
    Outcome.READ_TIMEOUT: F.TIMEOUT,
    Outcome.FIRST_TOKEN_TIMEOUT: F.STREAM,
    Outcome.STREAM_SILENT: F.STREAM,
    Outcome.STREAM_CUT: F.STREAM,
    Outcome.MARKER_WITHOUT_TOKEN: F.STREAM,
    Outcome.ERROR_EVENT: F.STREAM,
    Outcome.HTTP_429: F.OVERLOAD,
    Outcome.HTTP_5XX: F.INFERENCE_STATUS,
    Outcome.HANDOFF_UNUSABLE: F.KV_HANDOFF,
}
CLEARS: dict[Outcome, set[FailureClass]] = {
    Outcome.HANDOFF: {F.CONNECTION, F.INFERENCE_STATUS, F.KV_HANDOFF},
    Outcome.STREAM_COMPLETE: {F.CONNECTION, F.INFERENCE_STATUS, F.STREAM},
    Outcome.ANSWER_COMPLETE: {F.CONNECTION, F.INFERENCE_STATUS},
    Outcome.WRONG_IDENTITY: {F.CONNECTION, F.INFERENCE_STATUS},
}
EJECTS = {F.CONNECTION}
BY_HEALTH = {F.CONNECTION, F.TIMEOUT, F.OVERLOAD}
VERIFIED = {F.STREAM, F.INFERENCE_STATUS, F.KV_HANDOFF}
OUT = {Hold.EJECTED, Hold.VERIFICATION, Hold.JOINING}
READ = {Outcome.STALLED, Outcome.STREAM_SILENT}  # failures of a stream that had read its handoff


class Recount:
    """The streaks of one term, from the reports themselves."""

    def __init__(self, term: "Term") -> None:
        self.term = term
        self.streaks: dict[str, Counter[FailureClass]] = {e: Counter() for e in term.control.engines}
        # The producers that the failures of each streak could not read from; empty for one that had read, or was to.
        self.producers: dict[tuple[str, FailureClass], set[str]] = {}
        self.success_at: dict[str, float] = {}  # when a proxy told of a success
        # When answers as of another engine were told of, by proxies that are believed: the first, the newest.
        self.as_another: dict[str, tuple[float, float]] = {}
        self.open: set[tuple[str, int]] = set()  # probes under way: on whose account, and number
        self._before: dict[ProxyKey, int] = {}
        self._doubted = False  # the proxy that speaks is taken for the fault itself (spec F12)

    def forget(self, engine: str, classes: set[FailureClass] | None = None) -> None:
        """These streaks of the engine are over."""
        for failure in list(self.streaks[engine]) if classes is None else classes:
            self._end(engine, failure)

    def _end(self, engine: str, failure: FailureClass) -> None:
        self.streaks[engine].pop(failure, None)
        self.producers.pop((engine, failure), None)

    def _count(self, run: Run, failed: FailureClass) -> None:
        self.streaks[run.engine][failed] += run.count
        told = run.failure
        read = told is None or not told.producer or run.outcome in READ
        self.producers.setdefault((run.engine, failed), set()).add("" if read or told is None else told.producer)

    def handling(self, event: Input) -> None:
        """The core is about to hear of it."""
        if isinstance(event, Reported):
            self._before = dict(self.term.fleet.report_cursors())
            self._doubted = any(run.failure for run in event.batch.runs) and self._suspect(event.batch.proxy)

    def _suspect(self, proxy: ProxyKey) -> bool:
        view = self.term.fleet.view(now=self.term.control.now())
        return any(p.key == proxy and p.suspect for p in view.proxies)

    def _ready_to_stop(self) -> set[str]:
        """Engines that may be stopped at any moment: what a proxy tells of them late says nothing (spec R4)."""
        view = self.term.fleet.view(now=self.term.control.now())
        return {e.id for e in view.engines if e.drain is not None and e.drain.settled}

    def handled(self, event: Input) -> None:
        """The core has heard of it: what it must have done by now."""
        if isinstance(event, (HealthAnswered, InferenceAnswered)):
            self.open.discard((event.engine, event.number))
        if isinstance(event, HealthAnswered) and event.outcome is None:
            self.forget(event.engine, BY_HEALTH)
        if isinstance(event, CheckAnswered) and event.check is Check.HEALTH and event.result.verdict is Verdict.PASS:
            self.forget(event.engine, BY_HEALTH)  # from whichever stage (spec F4)
        if not isinstance(event, Reported) or event.batch.sequence <= self._before.get(event.batch.proxy, 0):
            return
        incarnations, limit = self.term.fleet.incarnations(), self.term.control.plan.core.eject_after
        failures = [run for run in event.batch.runs if run.outcome in FAILS]
        doubted = self._doubted or (bool(failures) and self._suspect(event.batch.proxy))
        told = self._ready_to_stop() if failures else set()
        failures = [run for run in failures if run.engine not in told]
        for run in event.batch.runs:
            if run.incarnation != incarnations[run.engine] or run.engine in told:
                continue
            if run.outcome in CLEARS:
                self.success_at[run.engine] = self.term.control.world.now
            if run.outcome is Outcome.WRONG_IDENTITY and not self._suspect(event.batch.proxy):
                now = self.term.control.world.now
                self.as_another[run.engine] = (self.as_another.get(run.engine, (now, now))[0], now)
            for failure in CLEARS.get(run.outcome, ()):
                self._end(run.engine, failure)
            failed = FAILS.get(run.outcome)
            if failed is not None and not (doubted and failed in (F.CONNECTION, F.TIMEOUT)):
                self._count(run, failed)
        reached = {(r.engine, FAILS[r.outcome]) for r in failures}
        reached = {(engine, failed) for engine, failed in reached if self.streaks[engine][failed] >= limit}
        if reached:
            self._must_have_acted(reached)

    def _must_have_acted(self, reached: set[tuple[str, FailureClass]]) -> None:
        """On these engines, for failures of these classes (spec F3)."""
        view = self.term.fleet.view(now=self.term.control.now())
        holds = {e.id: {h.kind for h in e.holds} for e in view.engines}
        for engine, failed in reached:
            if failed in VERIFIED and any(engine == on for on, _ in self.open):
                continue  # counted, and nothing new begins while a probe runs on its account (spec F3)
            producers = self.producers.get((engine, failed), {""})
            if failed in VERIFIED and all(OUT & holds.get(p, set()) for p in producers):
                continue  # whoever it could not read from has the hold, or is out (spec F7)
            wanted = {Hold.EJECTED} if failed in EJECTS else {Hold.EJECTED, Hold.VERIFICATION}
            if failed in EJECTS | VERIFIED and not wanted & holds[engine]:
                raise Violation(
                    Invariant.DETECTION, f"{engine}: {self.streaks[engine][failed]} x {failed} in a row and no hold"
                )


class Blame:
    """What is truly wrong, and what control concludes."""

    def __init__(self, watch: "Watch") -> None:
        self.watch = watch
        self.excused_until: dict[str, float] = {}  # engine → by faults between others that nobody can tell from its
        self._held: dict[str, float] = {}  # verification holds of this term → since
        self._sweep_stalled_until = 0.0
        self._unanswered: dict[str, float] = {}  # engines of whose probe an answer was lost → until control gives it up
        self._detect_from: dict[str, float] = {}

    def excuse(self, engine: str, for_s: float) -> None:
        """Nobody could tell for this long that it is not the engine."""
        self.excused_until[engine] = max(self.excused_until.get(engine, 0.0), self.watch.world.now + for_s)

    def healthy(self, engine: "Engine") -> bool:
        """Whether nothing has been wrong with it for so long that nothing may be held against it."""
        now = self.watch.world.now
        if engine.sick or now < engine.sick_at + LINGER_S:
            return False
        return now >= self.excused_until.get(engine.name, 0.0)

    def recorded(self, term: "Term", record: Record) -> None:
        """Control says something."""
        recount = self.watch.recounts[term]
        if record.kind in (EventKind.ENGINE_EJECTED, EventKind.ENGINE_READMITTED, EventKind.ENGINE_JOINED):
            recount.forget(record.engine)
            self._held.pop(record.engine, None)
        engine = self.watch.engines.get(record.engine)
        if engine is None:
            return
        if record.kind is EventKind.ENGINE_EJECTED and self.healthy(engine) and not self._unknowable(term, record):
            raise Violation(Invariant.BLAME, f"{record.message}, and nothing is wrong with it")
        if record.kind is EventKind.PROBE_ENDED and record.fields.get("result") == Verdict.PASS:
            inference = Action.INFERENCE_PROBE in record.fields.values()
            recount.forget(engine.name, VERIFIED | {F.TIMEOUT} if inference else BY_HEALTH)
        if record.fields.get("hold") == Hold.VERIFICATION:
            if record.kind is EventKind.HOLD_PLACED:
                self._held.setdefault(engine.name, self.watch.world.now)
            elif record.kind is EventKind.HOLD_ENDED:
                self._held.pop(engine.name, None)

    def _unknowable(self, term: "Term", record: Record) -> bool:
        """Whether control heard nothing of the engine from anybody: it cannot know that it is itself cut off when
        it asks one engine only, or when no proxy had a success since the sweep before (spec L4)."""
        cause = record.fields.get("cause")
        if cause == Cause.OPERATOR:
            return True
        if cause == Cause.INFERENCE_PROBE and self._flickers(record.engine):
            return True
        if cause != Cause.LIVENESS or not self.watch.control_in_trouble(LINGER_S):
            return False
        core = term.control.plan.core
        since = self.watch.recounts[term].success_at.get(record.engine, -LINGER_S)
        heard = self.watch.world.now - since < 0.9 * core.liveness_every * core.monitor_interval_s
        return len(term.control.engines) - len(self.watch.out) < 2 or not heard

    def _flickers(self, engine: str) -> bool:
        """Whether another engine fails some legs and not others: one that works when it is asked and fails when it
        reads a handoff looks like the producer's fault."""
        now = self.watch.world.now
        return any(now < e.flickered_at + LINGER_S for e in self.watch.engines.values() if e.name != engine)

    def term_began(self) -> None:
        """Another term: holds that it resumed are judged from now on."""
        now = self.watch.world.now
        self._held = dict.fromkeys(self._held, now)
        self._detect_from = {}

    def unanswered(self, core: CoreSettings, answer: object) -> None:
        """An answer was lost. Control waits for as long as such a probe may take at the most: a silence for each token,
        for the prefill leg and for the terminal marker, and a margin."""
        self._sweep_stalled_until = self.watch.world.now + 3 * core.health_timeout_s + 15.0
        if isinstance(answer, InferenceAnswered):
            silence_s = max(core.first_token_timeout_s, core.kv_first_pull_timeout_s, core.health_timeout_s)
            due = self.watch.world.now + silence_s * (core.probe_tokens + 2) + 15.0
            self._unanswered[answer.engine] = max(due, self._unanswered.get(answer.engine, 0.0))

    def ticked(self, term: "Term") -> None:
        """Looked at with every stage of a pass."""
        now = self.watch.world.now
        for name, since in self._held.items():
            engine = self.watch.engines[name]
            if (
                now > max(since, self._unanswered.get(name, 0.0)) + HELD_S
                and self.healthy(engine)
                and not self.watch.control_in_trouble(HELD_S)
            ):
                raise Violation(
                    Invariant.BLAME, f"{name} is on a verification hold for {now - since:.0f} s, and nothing is wrong"
                )
        self._silent(term, now)
        self._as_another(term, now)

    def _silent(self, term: "Term", now: float) -> None:
        """An engine that answers nobody is out of placement in time, without any traffic (spec L2)."""
        core = term.control.plan.core
        period_s = core.liveness_every * core.monitor_interval_s
        # Gone just after a sweep; one sweep more where most miss and had successes a moment before (spec L4).
        bound_s = (core.liveness_misses + 2) * period_s + core.health_timeout_s + 3.0
        placement = term.control.publisher.placement
        for name, engine in self.watch.engines.items():
            gone = Trouble.DOWN in engine.troubles or Trouble.HANG in engine.troubles
            in_trouble = self.watch.control_in_trouble(0.0) or term.control.answers_in_trouble
            if not gone or in_trouble or now < self._sweep_stalled_until:
                self._detect_from[name] = now
                continue
            since = self._detect_from.setdefault(name, now)
            if now <= since + bound_s or placement is None:
                continue
            entry = placement.engines[name]
            if entry.phases:
                raise Violation(
                    Invariant.DETECTION, f"{name} answers nobody for {now - since:.0f} s and is in placement"
                )

    def _as_another(self, term: "Term", now: float) -> None:
        """An engine that answers every leg as another would is out once control was told and has asked it (R9), at the
        latest when the same has not been looked into for an interval of the gate."""
        recount, placement = self.watch.recounts.get(term), term.control.publisher.placement
        if recount is None:
            return  # of a term that is over
        told = recount.as_another
        bound_s = term.control.plan.core.readmit_interval_s + AS_ANOTHER_S
        unsure = self.watch.control_in_trouble(0.0) or term.control.answers_in_trouble
        for name, engine in self.watch.engines.items():
            # A probe may have to wait for a peer that is in trouble itself.
            peers = [e for e in self.watch.engines.values() if e is not engine]
            others = any(e.troubles.keys() - {Trouble.NOT_FOUND} for e in peers)
            if Trouble.NOT_FOUND not in engine.troubles or unsure or others:
                told.pop(name, None)
            first, newest = told.get(name, (now, now))
            since = max(first, self._unanswered.get(name, 0.0))
            if placement is not None and placement.engines[name].phases and newest > since + bound_s:
                raise Violation(
                    Invariant.DETECTION, f"{name} answers as another for {now - since:.0f} s and is in placement"
                )
