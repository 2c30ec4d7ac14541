"""A fleet under test: drives the core as its loop would, remembers the effects, and answers what it asks for."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from narwhal.control.core.effects import CaptureIdentity, Effect, ProbeHealth, ProbeInference, RunCheck, RunTransfer
from narwhal.control.core.events import (
    CheckAnswered,
    CheckResult,
    HealthAnswered,
    IdentityCaptured,
    InferenceAnswered,
    Input,
    LegSeen,
    ProcessIdentity,
    Published,
    Reported,
    TransferAnswered,
    Woke,
)
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import SavedFleet
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.settings import CoreSettings, EngineSpec
from narwhal.control.core.view import EngineView
from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.reports import Batch, LegFailure, ProxyKey, RequestCounts, Run
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Phase, Stage, Verdict

T = TypeVar("T")
EDGE = ProxyKey(id="edge", slot=0, boot=1)
OTHER = ProxyKey(id="other", slot=0, boot=1)
SUCCESSES = {Outcome.HANDOFF, Outcome.STREAM_COMPLETE, Outcome.ANSWER_COMPLETE, Outcome.CLIENT_ERROR}
PROCESS = ProcessIdentity(version="0.32.0", started_at=1_700_000_000.25)  # of every engine, unless told otherwise
# Checks whose answer names the process.
NAMED = {Check.HEALTH, Check.GENERATION, Check.FINAL_HEALTH}
NEUTRAL = {Outcome.CANCELLED, Outcome.LOCAL, Outcome.DEADLINE}


def prefill(name: str, *, pinned: bool = False) -> EngineSpec:
    return EngineSpec(id=name, url=f"http://{name}", role=Phase.PREFILL, pinned=pinned)


def decode(name: str, *, pinned: bool = False) -> EngineSpec:
    return EngineSpec(id=name, url=f"http://{name}", role=Phase.DECODE, pinned=pinned)


def leg(outcome: Outcome, detail: str = "", status: int = 0) -> LegSeen:
    return LegSeen(outcome=outcome, detail=detail, status=status)


def failure(outcome: Outcome, producer: str = "", incarnation: int = 1, **more: Any) -> LegFailure:
    fields = {"outcome": outcome, "producer": producer, "producer_incarnation": incarnation if producer else 0, **more}
    return LegFailure(**fields)


class Rig:
    """Keeps the time in `now`; every call happens then."""

    def __init__(
        self,
        *engines: EngineSpec,
        joined: bool = True,
        saved: SavedFleet | None = None,
        now: float = 1000.0,
        **settings: Any,
    ) -> None:
        fields = {"name": "fleet", "model": "tiny", "engines": engines, "ramp_s": 0.0, **settings}
        self.settings = CoreSettings(**fields)
        self.now = now
        self.fleet = Fleet(self.settings, now=now, saved=saved)
        self.effects: list[Effect] = []
        self.checks = dict.fromkeys(Check, Verdict.PASS)
        self.processes: dict[str, ProcessIdentity] = {}  # that answer at the gate
        self.version = 0
        self._sequences: dict[ProxyKey, int] = {}
        if joined and saved is None:
            self.let_in()

    # --- the loop's part ------------------------------------------------------------------------------------------

    def send(self, event: Input) -> tuple[Effect, ...]:
        effects = self.fleet.handle(event, now=self.now)
        self.effects += effects
        return effects

    def tick(self, stage: Stage) -> tuple[Effect, ...]:
        effects = self.fleet.tick(stage, now=self.now)
        self.effects += effects
        return effects

    def run_pass(self) -> list[Effect]:
        """One monitor pass, an interval later."""
        self.now += self.settings.monitor_interval_s
        due = self.fleet.next_due()
        effects: list[Effect] = []
        if due is not None and self.now >= due:
            effects += self.send(Woke())
        for stage in Stage:
            effects += self.tick(stage)
        return effects

    def run_until(self, done: Callable[[], bool], passes: int = 400) -> None:
        for _ in range(passes):
            if done():
                return
            self.run_pass()
        raise AssertionError(f"not so after {passes} passes")

    def let_in(self) -> None:
        """Every engine at its gate is tried, and passes as `checks` says."""
        self.pass_gate(self.send(Woke()))

    def pass_gate(self, effects: Iterable[Effect]) -> list[Effect]:
        """Answer every check and transfer of gates until nothing more is asked; returns all effects of the answers."""
        waiting, seen = list(effects), list[Effect]()
        while waiting:
            seen += (more := self.pass_one(waiting.pop(0)))
            waiting += more
        return seen

    def pass_one(self, asked: Effect, verdict: Verdict | None = None) -> tuple[Effect, ...]:
        """Answer one check, as `checks` says unless told otherwise, or one transfer."""
        if isinstance(asked, RunCheck):
            return self.answer_check(asked, verdict)
        return self.answer_transfer(asked) if isinstance(asked, RunTransfer) else ()

    def publish(self) -> tuple[Effect, ...]:
        """What is decided goes out to the proxies."""
        content = self.fleet.placement(now=self.now)
        self.version += 1
        serving = frozenset(e.id for e in content.engines.values() if e.phases or e.phases_after_quarantine)
        return self.send(Published(epoch=1, version=self.version, serving=serving, closed=content.closed))

    def readmit(self, engine: str) -> None:
        """Let passes go by until the engine's gate is tried; it passes as `checks` says."""
        for _ in range(400):
            effects = self.run_pass()
            if any(c.engine == engine for c in of(effects, RunCheck)):
                self.pass_gate(effects)
                return
        raise AssertionError(f"the gate of {engine} was not tried")

    def saved(self) -> SavedFleet:
        return self.fleet.save(now=self.now)

    # --- what proxies say -----------------------------------------------------------------------------------------

    def report(
        self, engine: str, outcome: Outcome, *, proxy: ProxyKey = EDGE, count: int = 1, **more: Any
    ) -> tuple[Effect, ...]:
        """`count` equal outcomes, each told by itself if it is a failure."""
        singles = outcome not in SUCCESSES | NEUTRAL
        runs = [self.run(engine, outcome, **more)] * count if singles else []
        runs = runs or [self.run(engine, outcome, count=count, **more)]
        return self.batch(*runs, proxy=proxy)

    def run(
        self,
        engine: str,
        outcome: Outcome,
        *,
        phase: Phase | None = None,
        incarnation: int | None = None,
        producer: str = "",
        count: int = 1,
        detail: str = "",
        engine_silent: bool = False,
    ) -> Run:
        known = self.fleet.incarnations()
        told = None
        if outcome not in SUCCESSES | NEUTRAL:
            told = failure(outcome, producer, known.get(producer, 1), detail=detail, engine_silent=engine_silent)
        view = next((e for e in self.engines() if e.id == engine), None)
        return Run(
            engine=engine,
            phase=phase or (view.role if view is not None else Phase.DECODE),
            incarnation=known.get(engine, 1) if incarnation is None else incarnation,
            outcome=outcome,
            count=count,
            failure=told,
        )

    def batch(
        self,
        *runs: Run,
        proxy: ProxyKey = EDGE,
        sequence: int | None = None,
        requests: RequestCounts | None = None,
        measures: tuple[LegMeasures, ...] = (),
    ) -> tuple[Effect, ...]:
        number = self._sequences.get(proxy, 0) + 1 if sequence is None else sequence
        self._sequences[proxy] = max(number, self._sequences.get(proxy, 0))
        batch = Batch(
            proxy=proxy,
            sequence=number,
            runs=runs,
            requests=requests or RequestCounts(),
            measures=measures,
            measured_s=1.0,
        )
        return self.send(Reported(batch=batch))

    def measure(
        self,
        engine: str,
        *,
        first: float = 0.0,
        step: float = 0.0,
        count: int = 20,
        waiting: int = 0,
        phase: Phase | None = None,
        proxy: ProxyKey = EDGE,
    ) -> tuple[Effect, ...]:
        """A proxy has measured `count` equal legs."""
        sketches = {}
        for measure, value in ((Measure.FIRST, first), (Measure.STEP, step)):
            if value:
                sketches[measure] = Sketch()
                sketches[measure].add(value, count)
        measures = LegMeasures(
            engine=engine,
            phase=phase or self.engine(engine).role,
            incarnation=self.fleet.incarnations()[engine],
            sketches=sketches,
            waiting=waiting,
        )
        return self.batch(proxy=proxy, measures=(measures,))

    # --- what the shell answers -----------------------------------------------------------------------------------

    def answer_check(self, check: RunCheck, verdict: Verdict | None = None, **more: Any) -> tuple[Effect, ...]:
        fields = {"verdict": verdict or self.checks[check.check], "detail": "seen", **more}
        if check.check in NAMED and fields["verdict"] is Verdict.PASS:
            fields.setdefault("identity", self.processes.get(check.engine, PROCESS))
        return self.send(
            CheckAnswered(
                engine=check.engine,
                incarnation=check.incarnation,
                number=check.number,
                check=check.check,
                result=CheckResult(**fields),
            )
        )

    def answer_health(
        self,
        probe: ProbeHealth,
        outcome: Outcome | None = None,
        *,
        status: int = 0,
        identity: ProcessIdentity | None = None,
        detail: str = "",
        latency_s: float = 0.0,
    ) -> tuple[Effect, ...]:
        return self.send(
            HealthAnswered(
                engine=probe.engine,
                incarnation=probe.incarnation,
                number=probe.number,
                outcome=outcome,
                status=status,
                identity=identity,
                detail=detail,
                latency_s=latency_s,
            )
        )

    def answer_step(
        self,
        probe: ProbeInference,
        produced: Outcome | None = None,
        consumed: Outcome | None = None,
        *,
        step_s: float = 0.0,
    ) -> tuple[Effect, ...]:
        read = None if consumed is None else replace(leg(consumed), step_s=step_s, steps=15 if step_s else 0)
        return self.send(
            InferenceAnswered(
                engine=probe.engine,
                incarnation=probe.incarnation,
                number=probe.number,
                produced=None if produced is None else leg(produced),
                consumed=read,
            )
        )

    def answer_transfer(
        self,
        transfer: RunTransfer,
        produced: Outcome | None = Outcome.HANDOFF,
        consumed: Outcome | None = Outcome.STREAM_COMPLETE,
    ) -> tuple[Effect, ...]:
        return self.send(
            TransferAnswered(
                engine=transfer.engine,
                incarnation=transfer.incarnation,
                number=transfer.number,
                produced=None if produced is None else leg(produced),
                consumed=None if consumed is None else leg(consumed),
            )
        )

    def answer_capture(
        self, capture: CaptureIdentity, identity: ProcessIdentity | None = PROCESS, *, local: bool = False
    ) -> tuple[Effect, ...]:
        return self.send(
            IdentityCaptured(
                engine=capture.engine,
                incarnation=capture.incarnation,
                number=capture.number,
                identity=identity,
                local=local,
            )
        )

    def works(self, probe: ProbeInference, *, step_s: float = 0.0) -> tuple[Effect, ...]:
        """The step comes back as it does from healthy engines."""
        produced = None if probe.producer is None else Outcome.HANDOFF
        return self.answer_step(probe, produced, Outcome.STREAM_COMPLETE, step_s=step_s)

    def pass_probe(self, effects: Iterable[Effect], *, step_s: float = 0.0) -> list[Effect]:
        """Answer every step of a probe with success until it is over; returns the effects of the last."""
        last = list(effects)
        while asked := of(last, ProbeInference):
            last = [x for step in asked for x in self.works(step, step_s=step_s)]
        return last

    # --- what is to be seen ---------------------------------------------------------------------------------------

    def engines(self) -> tuple[EngineView, ...]:
        return self.fleet.view(now=self.now).engines

    def engine(self, name: str) -> EngineView:
        return next(e for e in self.engines() if e.id == name)

    def holds(self, name: str) -> set[Hold]:
        return {h.kind for h in self.engine(name).holds}

    def streaks(self, name: str) -> dict[FailureClass, int]:
        return dict(self.engine(name).streaks)

    def kinds(self) -> list[EventKind]:
        return [e.kind for e in self.effects if isinstance(e, Record)]

    def records(self, kind: EventKind) -> list[Record]:
        return [e for e in self.effects if isinstance(e, Record) and e.kind is kind]

    def with_settings(self, **more: Any) -> CoreSettings:
        return replace(self.settings, **more)


def of(effects: Iterable[Effect], kind: type[T]) -> list[T]:
    """The effects of one kind."""
    return [e for e in effects if isinstance(e, kind)]


def only(effects: Iterable[Effect], kind: type[T]) -> T:
    """The one effect of a kind."""
    (found,) = of(effects, kind)
    return found
