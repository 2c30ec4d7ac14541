"""What this worker's legs take: sketches that go out with the next report (role control and drift live on them).

Decides: what counts as a sample. It cannot see: targets, roles or baselines. A stream is sampled while it flows, or an
engine that has grown slow would be told of only once its long answers are over.
"""

from collections.abc import Callable, Iterable

from narwhal.measures import LegMeasures, Measure, Sketch, bucket
from narwhal.placement import EngineEntry
from narwhal.proxy.outcome import LegKind
from narwhal.proxy.stream import StreamRelay
from narwhal.proxy.vigil import Watched
from narwhal.proxy.witness import Leg
from narwhal.vocabulary import Phase

# A stream that flows gives one sample in this time, and one at its end for the rest.
SAMPLE_S = 5.0
# What has had no first token yet; of an answer that is not streamed nobody sees it.
_WAITS = frozenset({LegKind.PREFILL, LegKind.LOAD, LegKind.FIRST_TOKEN})


def _nobody() -> Iterable[Watched]:
    return ()


class Flow:
    """A decode stream after its first token, as far as it has been sampled."""

    __slots__ = ("at", "entry", "events", "slow", "stream")

    def __init__(self, entry: EngineEntry, stream: StreamRelay, now: float) -> None:
        self.entry = entry
        self.stream = stream
        self.at = now
        self.events = 1  # the first token's
        self.slow = False  # the client did not read: how long anything took is not the engine's doing


class _Taken:
    """What was measured of one engine in one phase: counts by bucket. Plain, since every request comes by here."""

    __slots__ = ("first", "incarnation", "output", "prompt", "step", "wait")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.first: dict[int, int] = {}
        self.step: dict[int, int] = {}
        self.wait: dict[int, int] = {}
        self.prompt: dict[int, int] = {}
        self.output: dict[int, int] = {}

    def sketches(self) -> dict[Measure, Sketch]:
        return {measure: Sketch(counts) for measure in Measure if (counts := getattr(self, measure.value))}


def _count(into: dict[int, int], value: float) -> None:
    number = bucket(value)
    into[number] = into.get(number, 0) + 1


class Measuring:
    """The measures of one worker since they were last taken. Instants are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.running: Callable[[], Iterable[Watched]] = _nobody  # the legs that run
        self._since = now
        # By engine, of one incarnation, the newest: so they stay few while nobody takes them.
        self._prefills: dict[str, _Taken] = {}
        self._decodes: dict[str, _Taken] = {}
        self._flows: set[Flow] = set()

    # --- from the legs ----------------------------------------------------------------------------------------------

    def prefilled(self, leg: Leg, now: float, *, wait_s: float | None, prompt_tokens: int) -> None:
        """A prefill leg gave its handoff. `wait_s`: from the request's arrival to its start, of a first attempt."""
        taken = _of(self._prefills, leg.entry)
        if taken is None:
            return
        _count(taken.first, now - leg.started_at)
        if wait_s is not None:
            _count(taken.wait, wait_s)
        if prompt_tokens:
            _count(taken.prompt, prompt_tokens)

    def first_token(self, leg: Leg, stream: StreamRelay, now: float) -> Flow:
        """A decode stream begins to flow; `ended` is to be told of the flow."""
        taken = _of(self._decodes, leg.entry)
        if taken is not None:
            _count(taken.first, now - leg.started_at)
        flow = Flow(leg.entry, stream, now)
        self._flows.add(flow)
        return flow

    def ended(self, flow: Flow, now: float) -> None:
        """The stream flows no more, whatever ended it."""
        self._flows.discard(flow)
        self._sample(flow, now, ended=True)
        taken = _of(self._decodes, flow.entry)
        if taken is not None:
            _count(taken.output, flow.stream.events)

    def answered(self, leg: Leg, now: float, output_tokens: int) -> None:
        """A decode leg gave its whole answer at once: all that is seen of its tokens is how long they took together."""
        taken = _of(self._decodes, leg.entry)
        if taken is None or not output_tokens:
            return
        _count(taken.output, output_tokens)
        if output_tokens > 1:
            _count(taken.step, (now - leg.started_at) / output_tokens)

    # --- for the report ---------------------------------------------------------------------------------------------

    def take(self, now: float) -> tuple[tuple[LegMeasures, ...], float]:
        """What was measured since it was last taken, and over how many seconds."""
        span_s, self._since = now - self._since, now
        for flow in self._flows:
            if now - flow.at >= SAMPLE_S:
                self._sample(flow, now)
        waiting = self._waiting()
        taken = [(Phase.PREFILL, self._prefills), (Phase.DECODE, self._decodes)]
        self._prefills, self._decodes = {}, {}
        measures = tuple(
            LegMeasures(
                engine=engine,
                phase=phase,
                incarnation=of.incarnation,
                sketches=of.sketches(),
                waiting=waiting.pop((engine, phase, of.incarnation), 0),
            )
            for phase, engines in taken
            for engine, of in engines.items()
        )
        return measures + tuple(
            LegMeasures(engine=engine, phase=phase, incarnation=incarnation, waiting=legs)
            for (engine, phase, incarnation), legs in waiting.items()
        ), span_s

    def _waiting(self) -> dict[tuple[str, Phase, int], int]:
        waiting: dict[tuple[str, Phase, int], int] = {}
        for watched in self.running():
            if watched.connection.kind in _WAITS:
                entry = watched.leg.entry
                key = (entry.id, watched.leg.phase, entry.incarnation)
                waiting[key] = waiting.get(key, 0) + 1
        return waiting

    # --- within -----------------------------------------------------------------------------------------------------

    def _sample(self, flow: Flow, now: float, *, ended: bool = False) -> None:
        events, spent = flow.stream.events - flow.events, now - flow.at
        flow.at, flow.events = now, flow.stream.events
        slow, flow.slow = flow.slow, False
        # A stream that gives nothing is sampled too: its next event takes at least that long. At the end it is the
        # terminal marker that nothing came before.
        if slow or (ended and not events):
            return
        taken = _of(self._decodes, flow.entry)
        if taken is not None:
            _count(taken.step, spent / max(1, events))


def _of(taken: dict[str, _Taken], entry: EngineEntry) -> _Taken | None:
    """Where this engine's measures go; None for those of an incarnation that is over."""
    known = taken.get(entry.id)
    if known is None or known.incarnation < entry.incarnation:
        known = taken[entry.id] = _Taken(entry.incarnation)
    return known if known.incarnation == entry.incarnation else None
