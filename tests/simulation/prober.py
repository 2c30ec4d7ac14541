"""What control asks engines: checks, health, inference, through its own few connections. The answers go back as events,
sometimes late, twice or never."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from narwhal.control.core.effects import CaptureIdentity, ProbeHealth, ProbeInference, RunCheck, RunTransfer, Target
from narwhal.control.core.events import (
    Answer,
    CheckAnswered,
    CheckResult,
    HealthAnswered,
    IdentityCaptured,
    InferenceAnswered,
    LegSeen,
    ProcessIdentity,
    TransferAnswered,
)
from narwhal.vocabulary import Check, Outcome, Phase, Verdict
from tests.simulation.engines import Ask, Engine, Seen, Shape, Wire
from tests.simulation.ledger import Handoff
from tests.simulation.paces import demand, pace_s

if TYPE_CHECKING:
    from tests.simulation.control import Control

Asked = RunCheck | ProbeHealth | ProbeInference | RunTransfer | CaptureIdentity
ASKS = {Check.MODEL: Ask.MODEL, Check.GENERATION: Ask.ANSWER}
NAMED = frozenset({Check.HEALTH, Check.GENERATION, Check.FINAL_HEALTH})  # checks that say which process answered
SHAPE = Shape(prefill_s=0.05, first_s=0.05, chunks=4, gap_s=0.2)
NOT_CONNECTED = frozenset({Outcome.REFUSED, Outcome.UNREACHABLE, Outcome.CONNECT_TIMEOUT, Outcome.RESET})
SEEN = {
    Seen.REFUSED: Outcome.REFUSED,
    Seen.UNREACHABLE: Outcome.UNREACHABLE,
    Seen.RESET: Outcome.RESET,
    Seen.UNUSABLE: Outcome.HANDOFF_UNUSABLE,
    Seen.ERROR: Outcome.ERROR_EVENT,
    Seen.CLOSED: Outcome.STREAM_CUT,
}
STATUSES = {404: Outcome.WRONG_IDENTITY, 408: Outcome.HTTP_408, 429: Outcome.HTTP_429}


class Exchange:
    """One request of control to an engine, ended by an answer or by silence."""

    def __init__(
        self,
        control: "Control",
        engine: Engine,
        ask: Ask,
        *,
        silence_s: float,
        ended: Callable[[LegSeen, object], None],
        handoff: Handoff | None = None,
    ) -> None:
        self.control = control
        self.ask = ask
        self.silence_s = silence_s
        self.ended = ended
        self.over = False
        self.tokens = 0
        self.began_at = self.heard_at = self.first_at = control.now()
        self.wire: Wire = engine.request(control, ask, self._hear, shape=SHAPE, handoff=handoff)
        control.after(min(silence_s, control.plan.connect_timeout_s), self._watch)

    def _watch(self) -> None:
        if self.over:
            return
        now = self.control.now()
        if not self.wire.connected and now >= self.began_at + self.control.plan.connect_timeout_s - 1e-6:
            self._end(Outcome.CONNECT_TIMEOUT)
        elif now >= self.heard_at + self.silence_s - 1e-6:
            if not self.wire.connected:
                self._end(Outcome.CONNECT_TIMEOUT)
            elif self.ask is Ask.STREAM:
                self._end(Outcome.STREAM_SILENT if self.tokens else Outcome.FIRST_TOKEN_TIMEOUT)
            else:
                self._end(Outcome.PREFILL_TIMEOUT if self.ask is Ask.PREFILL else Outcome.READ_TIMEOUT)
        else:
            self.control.after(self.heard_at + self.silence_s - now, self._watch)

    def _hear(self, seen: Seen, value: object) -> None:
        if self.over:
            return
        self.heard_at = self.control.now()
        if seen is Seen.TOKEN:
            self.tokens += 1
            self.first_at = self.heard_at if self.tokens == 1 else self.first_at
        elif seen is Seen.MARKER:
            self._end(Outcome.STREAM_COMPLETE if self.tokens else Outcome.MARKER_WITHOUT_TOKEN)
        elif seen is Seen.ANSWER:
            self._end(Outcome.HANDOFF if self.ask is Ask.PREFILL else Outcome.ANSWER_COMPLETE, value)
        elif seen is Seen.STATUS:
            status = value if isinstance(value, int) else 500
            client = Outcome.CLIENT_ERROR if 400 <= status < 500 else Outcome.HTTP_5XX
            self._end(STATUSES.get(status, client), status=status)
        else:
            self._end(SEEN[seen] if self.ask is Ask.STREAM or seen is not Seen.CLOSED else Outcome.ANSWER_CUT)

    def _end(self, outcome: Outcome, value: object = None, status: int = 0) -> None:
        self.over = True
        self.wire.close()
        elapsed_s = self.control.now() - self.began_at
        steps = max(0, self.tokens - 1)
        took = pace_s((self.heard_at - self.first_at) / steps, SHAPE.gap_s) if steps else None
        step_s = (took or 0.0) * demand(self.control.plan, Phase.DECODE, self.control.world.now)
        seen = LegSeen(
            outcome=outcome, status=status, detail=str(outcome), elapsed_s=elapsed_s, step_s=step_s, steps=steps
        )
        self.ended(seen, value)


class Prober:
    """The control pool of one control process, for one term."""

    def __init__(self, control: "Control", fleet: dict[str, Engine], post: Callable[[Answer], None]) -> None:
        self.control = control
        self.fleet = fleet
        self.post = post
        self.running: dict[int, tuple[str, str]] = {}  # → engine, kind
        self.over = False
        self._seats = control.plan.control_connections
        self._queue: deque[tuple[Asked, float]] = deque()
        self._numbers = 0

    def start(self, asked: Asked) -> None:
        """Begin as soon as a connection is free."""
        self._queue.append((asked, self.control.now() + self.control.plan.pool_timeout_s))
        self.control.after(self.control.plan.pool_timeout_s, self._late)
        self._next()

    def _late(self) -> None:
        while self._queue and self._queue[0][1] <= self.control.now() + 1e-6:
            self._answer(_unasked(self._queue.popleft()[0]))

    def _next(self) -> None:
        while self._queue and len(self.running) < self._seats and not self.over:
            self._begin(self._queue.popleft()[0])

    def _begin(self, asked: Asked) -> None:
        number = self._numbers = self._numbers + 1
        kind = "inference" if isinstance(asked, ProbeInference) else "health"
        self.running[number] = (asked.engine, f"check {asked.check}" if isinstance(asked, RunCheck) else kind)
        self.control.watch.probing(self)

        def done(answer: Answer) -> None:
            del self.running[number]
            self._answer(answer)
            self._next()

        if isinstance(asked, ProbeInference | RunTransfer):
            Transfer(self.control, self.fleet, asked, done)
        elif isinstance(asked, ProbeHealth):
            self._ask(asked, Ask.HEALTH, asked.timeout_s, self._health(asked, done))
        elif isinstance(asked, CaptureIdentity):
            self._ask(asked, Ask.HEALTH, asked.timeout_s, self._capture(asked, done))
        else:
            self._ask(asked, ASKS.get(asked.check, Ask.HEALTH), asked.timeout_s, self._check(asked, done))

    def _ask(self, asked: Asked, ask: Ask, timeout_s: float, ended: Callable[[LegSeen, object], None]) -> None:
        Exchange(self.control, self.fleet[asked.engine], ask, silence_s=timeout_s, ended=ended)

    def _answer(self, answer: Answer) -> None:
        """Hand it over. It may take its time, come twice, or get lost with whatever carried it."""
        world = self.control.world
        draw = world.rng.random() if self.control.answers_in_trouble else 1.0
        if draw < 0.05:
            self.control.say(f"an answer about {answer.engine} is lost")
            self.control.watch.blame.unanswered(self.control.plan.core, answer)
            return
        self.control.after(20.0 * world.rng.random() if draw < 0.1 else 0.0, self._post, answer)
        if draw > 0.95 and self.control.answers_in_trouble:
            self.control.after(world.rng.random() * 5.0, self._post, answer)

    def _post(self, answer: Answer) -> None:
        if not self.over:
            self.post(answer)

    def _identity(self, engine: Engine) -> ProcessIdentity:
        return ProcessIdentity(version="1", started_at=engine.started_at)

    def _health(self, asked: ProbeHealth, done: Callable[[Answer], None]) -> Callable[[LegSeen, object], None]:
        def ended(seen: LegSeen, _value: object) -> None:
            ok = seen.outcome is Outcome.ANSWER_COMPLETE
            identity = self._identity(self.fleet[asked.engine]) if ok and asked.identity else None
            done(
                HealthAnswered(
                    engine=asked.engine,
                    incarnation=asked.incarnation,
                    number=asked.number,
                    outcome=None if ok else seen.outcome,
                    status=seen.status,
                    detail=seen.detail,
                    latency_s=seen.elapsed_s,
                    identity=identity,
                )
            )

        return ended

    def _check(self, asked: RunCheck, done: Callable[[Answer], None]) -> Callable[[LegSeen, object], None]:
        def ended(seen: LegSeen, _value: object) -> None:
            ok = seen.outcome is Outcome.ANSWER_COMPLETE
            verdict = Verdict.PASS if ok else Verdict.FAIL
            identity = self._identity(self.fleet[asked.engine]) if ok and asked.check in NAMED else None
            result = CheckResult(verdict=verdict, detail=seen.detail, latency_s=seen.elapsed_s, identity=identity)
            done(_checked(asked, result))

        return ended

    def _capture(self, asked: CaptureIdentity, done: Callable[[Answer], None]) -> Callable[[LegSeen, object], None]:
        def ended(seen: LegSeen, _value: object) -> None:
            ok = seen.outcome is Outcome.ANSWER_COMPLETE
            done(_captured(asked, self._identity(self.fleet[asked.engine]) if ok else None))

        return ended


def _captured(asked: CaptureIdentity, identity: ProcessIdentity | None, *, local: bool = False) -> IdentityCaptured:
    return IdentityCaptured(
        engine=asked.engine, incarnation=asked.incarnation, number=asked.number, identity=identity, local=local
    )


def _checked(asked: RunCheck, result: CheckResult) -> CheckAnswered:
    return CheckAnswered(
        engine=asked.engine, incarnation=asked.incarnation, number=asked.number, check=asked.check, result=result
    )


def _unasked(asked: Asked) -> Answer:
    """No control connection in time: nothing was learnt."""
    local = LegSeen(outcome=Outcome.LOCAL, detail="no control connection")
    if isinstance(asked, RunCheck):
        return _checked(asked, CheckResult(verdict=Verdict.INCONCLUSIVE, detail=local.detail))
    if isinstance(asked, ProbeHealth):
        return HealthAnswered(
            engine=asked.engine, incarnation=asked.incarnation, number=asked.number, outcome=Outcome.LOCAL
        )
    if isinstance(asked, CaptureIdentity):
        return _captured(asked, None, local=True)
    return _ended(asked, None, local)


def _ended(asked: ProbeInference | RunTransfer, produced: LegSeen | None, consumed: LegSeen | None) -> Answer:
    kind = InferenceAnswered if isinstance(asked, ProbeInference) else TransferAnswered
    return kind(
        engine=asked.engine,
        incarnation=asked.incarnation,
        number=asked.number,
        produced=produced,
        consumed=consumed,
    )


class Transfer:
    """One step of an inference probe: a prefill leg whose handoff a decode leg reads, or a completion without one."""

    def __init__(
        self,
        control: "Control",
        fleet: dict[str, Engine],
        asked: ProbeInference | RunTransfer,
        done: Callable[[Answer], None],
    ) -> None:
        self.control = control
        self.fleet = fleet
        self.asked = asked
        self.done = done
        self.produced: LegSeen | None = None
        if asked.producer is None:
            self._consume(None)
        else:
            # The consumer's connection first: one that cannot be reached must not leave KV behind.
            self._ask(asked.consumer, Ask.CONNECT, self._reached)

    def _ask(
        self,
        target: Target,
        ask: Ask,
        ended: Callable[[LegSeen, object], None],
        handoff: Handoff | None = None,
    ) -> None:
        Exchange(
            self.control,
            self.fleet[target.engine],
            ask,
            silence_s=self.asked.silence_s,
            ended=ended,
            handoff=handoff,
        )

    def _reached(self, seen: LegSeen, _value: object) -> None:
        producer = self.asked.producer
        if seen.outcome in NOT_CONNECTED or producer is None:
            self._answer(seen)
        else:
            self._ask(producer, Ask.PREFILL, self._produced)

    def _produced(self, seen: LegSeen, value: object) -> None:
        self.produced = seen
        if isinstance(value, Handoff):
            value.heard = True
            self._consume(value)
        else:
            self._answer(None)

    def _consume(self, handoff: Handoff | None) -> None:
        self._ask(self.asked.consumer, Ask.STREAM, self._consumed, handoff)

    def _consumed(self, seen: LegSeen, _value: object) -> None:
        self._answer(seen)

    def _answer(self, consumed: LegSeen | None) -> None:
        self.done(_ended(self.asked, self.produced, consumed))
