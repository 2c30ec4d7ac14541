"""A fleet in accelerated time: model engines with narwhal-sim's times, one model proxy, the real core.

What is real: the core of control with its monitor passes, the choice of engines, what a proxy measures and how it
reports. What is modelled: an engine computes prompts one after the other, each as long as narwhal-sim says; it decodes
its streams together, a step taking narwhal-sim's time per token times (1 + streams / KNEE), and a prompt that it
computes meanwhile takes longer by the same factor. KV goes over in no time. A role change is for new placements only.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from narwhal.control.core.effects import CaptureIdentity, Effect, ProbeHealth, ProbeInference, RunCheck
from narwhal.control.core.events import (
    Answer,
    CheckAnswered,
    CheckResult,
    HealthAnswered,
    IdentityCaptured,
    InferenceAnswered,
    LegSeen,
    PassEnded,
    ProcessIdentity,
    ProxyAcked,
    ProxyConnected,
    Reported,
    TransferAnswered,
    Woke,
)
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.records import Record
from narwhal.control.core.settings import CoreSettings, EngineSpec, RoleSettings
from narwhal.placement import EngineEntry, Placement
from narwhal.proxy.backlog import Backlog
from narwhal.proxy.measuring import Flow, Measuring
from narwhal.proxy.outcome import LegKind
from narwhal.proxy.witness import Leg
from narwhal.reports import ProxyKey
from narwhal.sim.openai_stream import Timing
from narwhal.sim.options import EngineOptions
from narwhal.vocabulary import Outcome, Phase, RequestResult, Stage, Verdict

KNEE = 16  # streams that double the time per token
SEATS = 512  # requests that a proxy worker serves at once (serving.max_connections)
DRAIN_S = 60.0  # after the last arrival
PROXY = ProxyKey(id="edge", slot=0, boot=1)
PROCESS = ProcessIdentity(version="1", started_at=1.0)
TIMES = EngineOptions(prefill_base_ms=10.0, prefill_ms_per_token=0.1, tpot_ms=20.0, jitter=0.1)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """One stretch of time with one mix of requests: exponential gaps, lengths spread around their means."""

    seconds: float
    rate: float  # requests a second
    prompt: int  # tokens, the mean
    answer: int  # tokens, the mean


@dataclass(slots=True)
class Request:
    """One client request."""

    phase: int  # which stretch it arrived in
    arrived_at: float
    prompt: int
    answer: int
    first_at: float = 0.0
    began_at: float = 0.0  # of the leg that runs
    ends_at_token: float = 0.0
    stream: "Stream | None" = None
    flow: Flow | None = None


@dataclass(slots=True, eq=False)
class Running:
    """A leg as `Measuring` looks at those that run, and a stream as it counts its events."""

    leg: Leg
    kind: LegKind

    @property
    def connection(self) -> "Running":
        """Where the kind of what it waits for is kept."""
        return self


class Stream:
    """The events of a stream, as far as the engine has come."""

    __slots__ = ("_began", "_engine", "ended")

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._began = engine.token
        self.ended = 0

    @property
    def events(self) -> int:
        """The first token's, and one for every step since."""
        return self.ended or 1 + int(self._engine.token - self._began)


class Engine:
    """One model engine."""

    def __init__(self, name: str, world: "World", number: int) -> None:
        self.name = name
        self._world = world
        self._timing = Timing(replace(TIMES, seed=number), number, 1.0)
        self.queue: deque[Request] = deque()
        self.busy: Request | None = None
        self.streams: list[tuple[float, int, Request]] = []  # by the token that they end at
        self.token = 0.0  # steps since the beginning, each one token for every stream
        self._at = 0.0
        self._turn = 0
        self.legs = 0

    @property
    def _slowed(self) -> float:
        return 1.0 + len(self.streams) / KNEE

    def advance(self, now: float) -> None:
        """Let the streams come as far as they are at `now`."""
        if self.streams:
            self.token += (now - self._at) / (TIMES.tpot_ms / 1000 * self._slowed)
        self._at = now

    def prefill(self, request: Request, now: float) -> None:
        """A prompt comes in."""
        self.legs += 1
        self.queue.append(request)
        if self.busy is None:
            self._next(now)

    def _next(self, now: float) -> None:
        self.busy = self.queue.popleft() if self.queue else None
        if self.busy is not None:
            self._world.after(self._timing.prefill_s(self.busy.prompt) * self._slowed, self._computed)

    def _computed(self, now: float) -> None:
        request = self.busy
        assert request is not None
        self.legs -= 1
        self._next(now)
        self._world.prefilled(request, self, now)

    def decode(self, request: Request, now: float) -> None:
        """A handoff comes in; its first token takes a step."""
        self.legs += 1
        self._world.after(self._timing.step_s() * self._slowed, self._first, request)

    def _first(self, now: float, request: Request) -> None:
        self.advance(now)
        self._world.streams(request, self, now)
        self._turn += 1
        heapq.heappush(self.streams, (self.token + request.answer - 1, self._turn, request))
        self._arm(now)

    def _arm(self, now: float) -> None:
        """Look again when the next stream ends, if nothing changes until then."""
        if self.streams:
            left = max(0.0, self.streams[0][0] - self.token) * TIMES.tpot_ms / 1000 * self._slowed
            self._world.after(left + 1e-6, self._look)

    def _look(self, now: float) -> None:
        self.advance(now)
        ended = False
        while self.streams and self.streams[0][0] <= self.token + 1e-6:
            _, _, request = heapq.heappop(self.streams)
            self.legs -= 1
            ended = True
            self._world.finished(request, self, now)
        if ended:
            self._arm(now)


@dataclass
class Result:
    """What a run came to."""

    requests: list[int]  # by stretch
    good: list[int]  # within both targets
    moves: list[tuple[float, str, str]] = field(default_factory=list)  # when, who, to
    splits: list[tuple[float, int]] = field(default_factory=list)  # when, prefill engines from then on
    loads: list[tuple[float, float, float]] = field(default_factory=list)  # when, of prefill, of decode


class World:
    """One run: a split to begin with, a list of stretches, role control in some mode."""

    def __init__(
        self,
        *,
        seed: int,
        prefills: int,
        engines: int,
        demands: list[Demand],
        roles: RoleSettings,
    ) -> None:
        specs = tuple(
            EngineSpec(id=f"e{n}", url=f"http://e{n}", role=Phase.PREFILL if n < prefills else Phase.DECODE)
            for n in range(engines)
        )
        core = CoreSettings(name="demand", model="m", engines=specs, ramp_s=0.0, liveness_every=0, roles=roles)
        self.core, self.demands = core, demands
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Request, ...]]] = []
        self._count = 0
        self._arrivals = random.Random(f"arrivals {seed}")
        self._draws = random.Random(f"draws {seed}")
        self.engines = {spec.id: Engine(spec.id, self, n) for n, spec in enumerate(specs)}
        self.measuring = Measuring(0.0)
        self.backlog = Backlog(PROXY)
        self._running: dict[int, Running] = {}
        self.measuring.running = self._running.values  # type: ignore[assignment]
        self.inflight = 0
        self.result = Result(requests=[0] * len(demands), good=[0] * len(demands))
        self._placed: dict[int, EngineEntry] = {}
        self.fleet = Fleet(core, now=0.0)
        self._perform(self.fleet.handle(Woke(), now=0.0))
        hello = ProxyConnected(proxy=PROXY, address="", pid=1, highest_epoch=0)
        self._perform(self.fleet.handle(hello, now=0.0))
        self._placement = Placement(epoch=1, version=1)
        self._publish()

    # --- the heap -----------------------------------------------------------------------------------------------------

    def after(self, delay: float, call: Callable[..., None], *args: Request) -> None:
        """Call in `delay` seconds."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, call, args))

    def run(self) -> Result:
        """Until the last stretch is over, and a while longer for what is under way then."""
        ends = [sum(d.seconds for d in self.demands[: n + 1]) for n in range(len(self.demands))]
        begins = [0.0, *ends]
        for n in range(len(self.demands)):
            self.after(begins[n] + 1e-3, self._arrive_in(n, ends[n]))
        self.after(0.5, self._second)
        while self._heap and self._heap[0][0] < ends[-1] + DRAIN_S:
            self.now, _, call, args = heapq.heappop(self._heap)
            call(self.now, *args)
        return self.result

    # --- requests -----------------------------------------------------------------------------------------------------

    def _arrive_in(self, phase: int, until: float) -> Callable[..., None]:
        demand, rng = self.demands[phase], self._arrivals

        def arrive(now: float) -> None:
            gap = rng.expovariate(demand.rate)
            prompt = max(1, int(rng.gauss(demand.prompt, demand.prompt / 4)))
            answer = max(2, int(rng.gauss(demand.answer, demand.answer / 4)))
            self._begin(Request(phase, now, prompt, answer), now)
            if now + gap < until:
                self.after(gap, arrive)

        return arrive

    def _begin(self, request: Request, now: float) -> None:
        self.result.requests[request.phase] += 1
        entry = self._choose(Phase.PREFILL, now)
        if self.inflight >= SEATS or entry is None:
            self.backlog.request(RequestResult.REJECTED, 0)
            return
        self.inflight += 1
        request.began_at = now
        self._leg(request, entry, Phase.PREFILL, LegKind.PREFILL, now)
        self.engines[entry.id].prefill(request, now)

    def _choose(self, phase: Phase, now: float) -> EngineEntry | None:
        load = {name: engine.legs for name, engine in self.engines.items()}
        draw = self._draws.random
        return self._placement.choose(phase, now=now, load=load, draws=(draw(), draw()))

    def _leg(self, request: Request, entry: EngineEntry, phase: Phase, kind: LegKind, now: float) -> None:
        self._placed[id(request)] = entry
        self._running[id(request)] = Running(Leg(entry, phase, kind, now), kind)

    def prefilled(self, request: Request, engine: Engine, now: float) -> None:
        """A prompt is computed: on to a decode engine."""
        running = self._running[id(request)]
        self.measuring.prefilled(running.leg, now, wait_s=0.0, prompt_tokens=request.prompt)
        self.backlog.merge(engine.name, Phase.PREFILL, 1, Outcome.HANDOFF)
        entry = self._choose(Phase.DECODE, now)
        assert entry is not None
        self._leg(request, entry, Phase.DECODE, LegKind.FIRST_TOKEN, now)
        self.engines[entry.id].decode(request, now)

    def streams(self, request: Request, engine: Engine, now: float) -> None:
        """The first token."""
        request.first_at = now
        running = self._running[id(request)]
        running.kind = LegKind.STREAM
        request.stream = Stream(engine)
        request.flow = self.measuring.first_token(running.leg, request.stream, now)  # type: ignore[arg-type]

    def finished(self, request: Request, engine: Engine, now: float) -> None:
        """The last token: was it within both targets?"""
        assert request.flow is not None
        assert request.stream is not None
        request.stream.ended = request.answer
        self.measuring.ended(request.flow, now)
        self.backlog.merge(engine.name, Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
        self.backlog.request(RequestResult.SERVED, 0)
        del self._running[id(request)], self._placed[id(request)]
        self.inflight -= 1
        targets = self.core.roles
        ttft_s, tpot_s = request.first_at - request.arrived_at, (now - request.first_at) / (request.answer - 1)
        self.result.good[request.phase] += ttft_s <= targets.ttft_s and tpot_s <= targets.tpot_s

    # --- control, once a second ---------------------------------------------------------------------------------------

    def _second(self, now: float) -> None:
        for engine in self.engines.values():
            engine.advance(now)
        batch = self.backlog.cut(*self.measuring.take(now))
        if batch is not None:
            self._perform(self.fleet.handle(Reported(batch=batch), now=now))
            self.backlog.acknowledge(batch.sequence)
        legs = {name: engine.legs for name, engine in self.engines.items()}
        acked = ProxyAcked(proxy=PROXY, epoch=1, version=self._placement.version, resident=legs)
        self._perform(self.fleet.handle(acked, now=now))
        for stage in Stage:
            self._perform(self.fleet.tick(stage, now=now))
        self._perform(self.fleet.handle(PassEnded(), now=now))
        self._publish()
        prefill, decode = self.fleet.view(now=now).roles.roles
        self.result.loads.append((now, prefill.load.load, decode.load.load))
        self.after(1.0, self._second)

    def _publish(self) -> None:
        content = self.fleet.placement(now=self.now)
        if content.engines is not self._placement.engines:
            version = self._placement.version + 1
            self._placement = Placement(epoch=1, version=version, closed=content.closed, engines=content.engines)
            count = sum(e.role is Phase.PREFILL for e in content.engines.values())
            if not self.result.splits or self.result.splits[-1][1] != count:
                self.result.splits.append((self.now, count))

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Record):
                if effect.kind == "role_moved":
                    self.result.moves.append((self.now, effect.engine, effect.fields["to"]))
                continue
            self._perform(self.fleet.handle(_well(effect), now=self.now))


def _well(effect: Effect) -> Answer:
    """The answer of an engine in good order."""
    worked = LegSeen(outcome=Outcome.HANDOFF), LegSeen(outcome=Outcome.STREAM_COMPLETE)
    asked = {"engine": effect.engine, "incarnation": effect.incarnation, "number": effect.number}  # type: ignore[union-attr]
    match effect:
        case RunCheck():
            result = CheckResult(verdict=Verdict.PASS, detail="well", identity=PROCESS)
            return CheckAnswered(**asked, check=effect.check, result=result)  # type: ignore[arg-type]
        case ProbeHealth():
            return HealthAnswered(**asked, outcome=None, status=200, identity=PROCESS)  # type: ignore[arg-type]
        case ProbeInference():
            return InferenceAnswered(**asked, produced=worked[0], consumed=worked[1])  # type: ignore[arg-type]
        case CaptureIdentity():
            return IdentityCaptured(**asked, identity=PROCESS)  # type: ignore[arg-type]
        case _:
            return TransferAnswered(**asked, produced=worked[0], consumed=worked[1])  # type: ignore[arg-type]
