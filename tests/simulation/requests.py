"""One client request on a proxy: the attempt machine's steps performed on model engines, as the relay performs them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from narwhal.measures import Measure
from narwhal.placement import EngineEntry
from narwhal.proxy.attempt import Attempt, Backoff, Fail, Fault, LegEnd, Pass, StartLeg, State, Step
from narwhal.proxy.outcome import NEUTRALS, OUTCOMES, LegKind, of_status
from narwhal.proxy.outcome import Seen as Shape
from narwhal.reports import LegFailure, Run
from narwhal.vocabulary import Outcome, Phase, RequestResult
from tests.simulation.engines import Ask, Seen, Wire
from tests.simulation.engines import Shape as Timing
from tests.simulation.ledger import Handoff
from tests.simulation.paces import pace_s
from tests.simulation.world import Invariant, Timer, Violation

if TYPE_CHECKING:
    from tests.simulation.proxies import Proxy

ENDED_IN_SILENCE = {Outcome.FIRST_TOKEN_TIMEOUT, Outcome.STREAM_SILENT}
EXPIRED = LegEnd(Outcome.LOCAL, detail="the KV handoff is too old")
SIMPLE = {
    Seen.REFUSED: Outcome.REFUSED,
    Seen.UNREACHABLE: Outcome.UNREACHABLE,
    Seen.RESET: Outcome.RESET,
    Seen.UNUSABLE: Outcome.HANDOFF_UNUSABLE,
    Seen.ERROR: Outcome.ERROR_EVENT,
}


class Leg:
    """One leg: its connection, its limits, what came of it."""

    def __init__(self, request: "Request", entry: EngineEntry, phase: Phase, kind: LegKind) -> None:
        self.request = request
        self.entry = entry
        self.phase = phase
        self.kind = kind
        self.began_at = self.heard_at = request.proxy.now()
        self.tokens = 0
        self.first_at = self.began_at  # its first token
        self.over = False
        self.stall_told = False
        self.wire: Wire | None = None
        self.quiet_s = 0.0  # the limit that runs now, from `limit_from`
        self.limit_from = self.began_at
        self.timer: Timer | None = None

    def start(self, ask: Ask, handoff: Handoff | None, limit_s: float) -> None:
        """Connect and ask."""
        proxy = self.request.proxy
        self.quiet_s = limit_s
        engine = proxy.fleet[self.entry.id]
        self.wire = engine.request(proxy, ask, self._hear, shape=self.request.timing, handoff=handoff)
        self._arm()

    def close(self) -> None:
        """It ends, whoever ended it."""
        self.over = True
        if self.wire is not None:
            self.wire.close()
        if self.timer is not None:
            self.timer.off = True

    # --- time -----------------------------------------------------------------------------------------------------

    def _dues(self) -> list[float]:
        proxy = self.request.proxy
        dues = [self.limit_from + self.quiet_s, self.request.due]
        if self.wire is not None and not self.wire.connected:
            dues.append(self.began_at + proxy.plan.connect_timeout_s)
        stall_s = self._stall_s()
        if stall_s and not self.stall_told:
            dues.append(max(self.heard_at, proxy.heard.get(self.entry.id, 0.0)) + stall_s)
        return dues

    def _stall_s(self) -> float:
        core = self.request.proxy.plan.core
        if self.kind is LegKind.STREAM:
            return core.stall_s
        return 0.0 if self.kind is LegKind.FIRST_TOKEN else core.silent_leg_s

    def _arm(self) -> None:
        proxy = self.request.proxy
        self.timer = proxy.after(max(0.001, min(self._dues()) - proxy.now()), self._watch)

    def _watch(self) -> None:
        if self.over:
            return
        proxy, request, now = self.request.proxy, self.request, self.request.proxy.now()
        connected = self.wire is not None and self.wire.connected
        if now >= request.due:
            self._end(LegEnd(Outcome.DEADLINE, detail="the request's deadline"))
        elif not connected and now >= self.began_at + proxy.plan.connect_timeout_s:
            self._end(LegEnd(Outcome.CONNECT_TIMEOUT, detail="no connection in time"))
        elif now >= self.limit_from + self.quiet_s:
            self._end(LegEnd(OUTCOMES[Shape.LATE][self.kind], detail=f"nothing for {self.quiet_s:g} s"))
        else:
            stall_s = self._stall_s()
            quiet_since = max(self.heard_at, proxy.heard.get(self.entry.id, 0.0))
            if connected and stall_s and not self.stall_told and now >= quiet_since + stall_s:
                self.stall_told = True
                request.tell_failure(self, LegEnd(Outcome.STALLED, detail=f"no progress for {stall_s:g} s"))
            self._arm()

    # --- what the engine says -------------------------------------------------------------------------------------

    def _hear(self, seen: Seen, value: object) -> None:
        if self.over:
            return
        proxy = self.request.proxy
        self.heard_at = self.limit_from = proxy.now()
        if seen not in (Seen.REFUSED, Seen.UNREACHABLE, Seen.RESET, Seen.CLOSED):
            proxy.heard[self.entry.id] = self.heard_at
        if seen is Seen.TOKEN:
            self.tokens += 1
            if self.kind is LegKind.FIRST_TOKEN:
                self.first_at = proxy.now()
                self.kind = LegKind.STREAM
                self.quiet_s = proxy.plan.read_timeout_s
                self.request.output = True
                self.request.read()
                self._rearm()
        elif seen is Seen.MARKER:
            done = Outcome.STREAM_COMPLETE if self.tokens else Outcome.MARKER_WITHOUT_TOKEN
            self._end(LegEnd(done))
        elif seen is Seen.ANSWER:
            self.close()
            self.request.leg_answered(self, value)
        elif seen is Seen.STATUS:
            status = value if isinstance(value, int) else 500
            self._end(LegEnd(of_status(status), status, detail=f"HTTP {status}"))
        elif seen is Seen.CLOSED:
            self._end(LegEnd(OUTCOMES[Shape.CLOSED_DURING][self.kind], detail="closed inside the response"))
        else:
            self._end(LegEnd(SIMPLE[seen], detail=str(seen)))

    def _rearm(self) -> None:
        if self.timer is not None:
            self.timer.off = True
        self._arm()

    def _end(self, end: LegEnd) -> None:
        self.close()
        self.request.leg_ended(self, end)


class Request:
    """One client request, from its seat to its one end."""

    def __init__(self, proxy: "Proxy", number: str, *, stream: bool, timing: Timing, idle_closed: bool) -> None:
        self.proxy = proxy
        self.number = number
        self.stream = stream
        self.timing = timing
        self.idle_closed = idle_closed  # the connection to reuse has been closed by the engine, once (spec V9)
        self.due = proxy.now() + proxy.plan.request_timeout_s
        self.attempt: Attempt = proxy.machine(proxy.plan.policy, proxy.budget, self.due)
        self.output = False  # the client has got bytes of an answer
        self.handoff: Handoff | None = None
        self.producer: EngineEntry | None = None
        self.leg: Leg | None = None
        self.unread = ""  # the producer whose handoff has not been read yet
        self.ends = 0
        self.done: Callable[[RequestResult], None] = lambda _: None

    def begin(self) -> None:
        """It has its seat."""
        self._perform(self.attempt.begin())

    def cancel(self) -> None:
        """The client goes away."""
        if self.ends:
            return
        leg, self.leg = self.leg, None
        if leg is not None:
            leg.close()
            self.proxy.leg_over(leg)
            self.proxy.tell(leg.entry, leg.phase, Outcome.CANCELLED)
        self.attempt.cancelled()
        self._finish(RequestResult.CANCELLED)

    def _finish(self, result: RequestResult) -> None:
        self.ends += 1
        if self.ends > 1:
            raise Violation(Invariant.REQUEST_ENDS_ONCE, f"request {self.number} ended {self.ends} times, now {result}")
        if self.leg is not None:
            raise Violation(Invariant.REQUEST_ENDS_ONCE, f"request {self.number} ended while a leg runs")
        self.read()
        self.proxy.tell_request(result, self.attempt.retries)
        self.done(result)

    def _perform(self, step: Step) -> None:
        if self.ends:
            raise Violation(Invariant.REQUEST_ENDS_ONCE, f"request {self.number} goes on after its end: {step}")
        match step:
            case StartLeg():
                if self.output:
                    raise Violation(Invariant.NO_RETRY_AFTER_OUTPUT, f"request {self.number} starts a leg after output")
                if step.phase is Phase.PREFILL:
                    self._prefill(step)
                else:
                    self._decode(step)
            case Backoff():
                if self.output:
                    raise Violation(Invariant.NO_RETRY_AFTER_OUTPUT, f"request {self.number} is retried after output")
                self.handoff = None
                self.read()
                self.proxy.after(step.until - self.proxy.now(), self._resume)
            case Fail():
                self.proxy.say(f"{self.number} fails: {step.fault}")
                self._finish(RequestResult.FAILED)
            case Pass():
                self._finish(RequestResult.SERVED)

    def _resume(self) -> None:
        if not self.ends:
            self._perform(self.attempt.resume())

    # --- legs -----------------------------------------------------------------------------------------------------

    def _prefill(self, step: StartLeg) -> None:
        entry = self.proxy.choose(step)
        if isinstance(entry, Fault):
            self._perform(self.attempt.unplaced(entry))
            return
        self.producer = None
        leg = self._start(entry, Phase.PREFILL, LegKind.PREFILL)
        if self.proxy.out_of_descriptors:
            leg.close()
            self.proxy.after(0.0, self.leg_ended, leg, LegEnd(Outcome.LOCAL, detail="no descriptor"))
            return
        leg.start(Ask.PREFILL, None, self.proxy.plan.prefill_timeout_s)

    def _decode(self, step: StartLeg) -> None:
        proxy = self.proxy
        entry = proxy.choose(step)
        if isinstance(entry, Fault):
            self._perform(self.attempt.unplaced(entry))
            return
        handoff, producer = self.handoff, self.producer
        if handoff is None or producer is None:
            raise Violation(Invariant.HANDOFF_USED_ONCE, f"request {self.number} decodes without a handoff of its own")
        leg = self._start(entry, Phase.DECODE, LegKind.FIRST_TOKEN if self.stream else LegKind.ANSWER)
        if proxy.out_of_descriptors:
            leg.close()
            proxy.after(0.0, self.leg_ended, leg, LegEnd(Outcome.LOCAL, detail="no descriptor"))
            return
        if not self.attempt.may_dispatch(proxy.now()):
            leg.close()
            self._leg_off(leg)
            self._perform(self.attempt.expired(proxy.now(), self._wait_s()))
            return
        self.attempt.dispatched()
        self.handoff = None
        core = proxy.plan.core
        first = proxy.first_pull(producer, entry)
        if self.idle_closed:
            self.idle_closed = False
            leg.close()
            proxy.after(0.001, self.leg_ended, leg, LegEnd(Outcome.RESET, idle_closed=True))
            return
        limit_s = proxy.plan.read_timeout_s
        if self.stream:
            limit_s = core.kv_first_pull_timeout_s if first else core.first_token_timeout_s
        leg.start(Ask.STREAM if self.stream else Ask.ANSWER, handoff, limit_s)

    def _start(self, entry: EngineEntry, phase: Phase, kind: LegKind) -> Leg:
        self.leg = leg = Leg(self, entry, phase, kind)
        self.proxy.leg_begun(leg)
        return leg

    def _leg_off(self, leg: Leg) -> None:
        if self.leg is leg:
            self.leg = None
            self.proxy.leg_over(leg)

    def leg_answered(self, leg: Leg, value: object) -> None:
        """A whole 200 answer."""
        self._leg_off(leg)
        proxy = self.proxy
        if leg.phase is Phase.PREFILL and isinstance(value, Handoff):
            proxy.tell(leg.entry, leg.phase, Outcome.HANDOFF)
            took = pace_s(proxy.now() - leg.began_at, self.timing.prefill_s)
            proxy.measure(leg.entry, leg.phase, Measure.FIRST, took)
            self.handoff, self.producer, self.unread = value, leg.entry, leg.entry.id
            proxy.unread[self.unread] += 1
            self._perform(self.attempt.prefilled(leg.entry.id, proxy.now()))
            return
        self._pulled(leg)
        proxy.tell(leg.entry, leg.phase, Outcome.ANSWER_COMPLETE)
        self.output = True
        self._perform(self.attempt.answered())

    def read(self) -> None:
        """The handoff has been read, or will not be: its producer may go (spec R4)."""
        if self.unread:
            self.proxy.unread[self.unread] -= 1
            self.unread = ""

    def _pulled(self, leg: Leg) -> None:
        self.read()
        if leg.phase is Phase.DECODE and self.producer is not None:
            self.proxy.saw_pull(self.producer, leg.entry)

    def leg_ended(self, leg: Leg, end: LegEnd) -> None:
        """The leg is over without a whole answer, or its stream is complete."""
        if self.ends or self.leg is not leg:
            return
        self._leg_off(leg)
        proxy = self.proxy
        if leg.phase is Phase.DECODE and not end.idle_closed and end.outcome is not Outcome.LOCAL:
            self._pulled(leg)
        if end.outcome is Outcome.STREAM_COMPLETE:
            proxy.tell(leg.entry, leg.phase, end.outcome)
            if leg.tokens > 1:
                took = pace_s((leg.heard_at - leg.first_at) / (leg.tokens - 1), self.timing.gap_s)
                proxy.measure(leg.entry, leg.phase, Measure.STEP, took)
            self._perform(self.attempt.answered())
            return
        step = self.attempt.leg_failed(leg.entry.id, end, output=self.output, now=proxy.now(), wait_s=self._wait_s())
        if end.idle_closed and isinstance(step, StartLeg):
            self._perform(step)
            return
        if end.outcome in NEUTRALS:
            proxy.tell(leg.entry, leg.phase, end.outcome)
        else:
            self.tell_failure(leg, end)
        self._perform(step)

    def _wait_s(self) -> float:
        """How long to wait before another attempt."""
        return min(1.0, 0.1 * 2.0**self.attempt.retries) * (0.5 + 0.5 * self.proxy.world.rng.random())

    def tell_failure(self, leg: Leg, end: LegEnd) -> None:
        """Report what was seen, with the producer of what the leg read."""
        proxy = self.proxy
        producer = self.producer if leg.phase is Phase.DECODE else None
        failure = LegFailure(
            outcome=end.outcome,
            producer=producer.id if producer else "",
            producer_incarnation=producer.incarnation if producer else 0,
            status=end.status,
            detail=end.detail,
            request_id=self.number,
            elapsed_s=proxy.now() - leg.began_at,
            engine_silent=end.outcome in ENDED_IN_SILENCE
            and 0 < proxy.plan.core.stall_s <= proxy.now() - proxy.heard.get(leg.entry.id, 0.0),
        )
        proxy.say(f"{self.number} {leg.phase} on {leg.entry.id}: {end.outcome} {end.status or ''}")
        proxy.tell_failure(
            Run(
                engine=leg.entry.id,
                phase=leg.phase,
                incarnation=leg.entry.incarnation,
                outcome=end.outcome,
                failure=failure,
            )
        )

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.attempt.state is not State.DONE
