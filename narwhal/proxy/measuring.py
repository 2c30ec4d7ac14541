"""What this worker's legs take: sketches that go out with the next report (role control and drift live on them).

Decides: what counts as a sample. It cannot see: targets, roles or baselines. A stream is sampled while it flows, or an
engine that has grown slow would be told of only once its long answers are over.
"""

from collections.abc import Callable, Iterable

from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.placement import EngineEntry
from narwhal.proxy.outcome import LegKind
from narwhal.proxy.stream import StreamRelay
from narwhal.proxy.vigil import Watched
from narwhal.proxy.witness import Leg
from narwhal.vocabulary import Phase

# A stream that flows gives one sample in this time, and one at its end for the rest.
SAMPLE_S = 5.0
# What has had no first token yet; of an answer that is not streamed nobody sees it.
_WAITS = frozenset({LegKind.PREFILL, LegKind.FIRST_TOKEN})


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
    """What was measured of one engine in one phase."""

    __slots__ = ("incarnation", "sketches")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.sketches: dict[Measure, Sketch] = {}

    def add(self, measure: Measure, value: float) -> None:
        sketch = self.sketches.get(measure)
        if sketch is None:
            sketch = self.sketches[measure] = Sketch()
        sketch.add(value)


class Measuring:
    """The measures of one worker since they were last taken. Instants are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.running: Callable[[], Iterable[Watched]] = _nobody  # the legs that run
        self._since = now
        # One incarnation of each engine and phase, the newest: so they stay few while nobody takes them.
        self._taken: dict[tuple[str, Phase], _Taken] = {}
        self._flows: set[Flow] = set()

    # --- from the legs ----------------------------------------------------------------------------------------------

    def prefilled(self, leg: Leg, now: float, *, wait_s: float | None, prompt_tokens: int) -> None:
        """A prefill leg gave its handoff. `wait_s`: from the request's arrival to its start, of a first attempt."""
        taken = self._of(leg.entry, Phase.PREFILL)
        if taken is None:
            return
        taken.add(Measure.FIRST, now - leg.started_at)
        if wait_s is not None:
            taken.add(Measure.WAIT, wait_s)
        if prompt_tokens:
            taken.add(Measure.PROMPT, prompt_tokens)

    def first_token(self, leg: Leg, stream: StreamRelay, now: float) -> Flow:
        """A decode stream begins to flow; `ended` is to be told of the flow."""
        taken = self._of(leg.entry, Phase.DECODE)
        if taken is not None:
            taken.add(Measure.FIRST, now - leg.started_at)
        flow = Flow(leg.entry, stream, now)
        self._flows.add(flow)
        return flow

    def ended(self, flow: Flow, now: float) -> None:
        """The stream flows no more, whatever ended it."""
        self._flows.discard(flow)
        self._sample(flow, now, ended=True)
        taken = self._of(flow.entry, Phase.DECODE)
        if taken is not None:
            taken.add(Measure.OUTPUT, flow.stream.events)

    def answered(self, leg: Leg, now: float, output_tokens: int) -> None:
        """A decode leg gave its whole answer at once: all that is seen of its tokens is how long they took together."""
        taken = self._of(leg.entry, Phase.DECODE)
        if taken is None or not output_tokens:
            return
        taken.add(Measure.OUTPUT, output_tokens)
        if output_tokens > 1:
            taken.add(Measure.STEP, (now - leg.started_at) / output_tokens)

    # --- for the report ---------------------------------------------------------------------------------------------

    def take(self, now: float) -> tuple[tuple[LegMeasures, ...], float]:
        """What was measured since it was last taken, and over how many seconds."""
        span_s, self._since = now - self._since, now
        for flow in self._flows:
            if now - flow.at >= SAMPLE_S:
                self._sample(flow, now)
        waiting = self._waiting()
        taken, self._taken = self._taken, {}
        measures = tuple(
            LegMeasures(
                engine=engine,
                phase=phase,
                incarnation=of.incarnation,
                sketches=of.sketches,
                waiting=waiting.pop((engine, phase, of.incarnation), 0),
            )
            for (engine, phase), of in taken.items()
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

    def _of(self, entry: EngineEntry, phase: Phase) -> _Taken | None:
        """Where this engine's measures go; None for those of an incarnation that is over."""
        taken = self._taken.get((entry.id, phase))
        if taken is None or taken.incarnation < entry.incarnation:
            taken = self._taken[entry.id, phase] = _Taken(entry.incarnation)
        return taken if taken.incarnation == entry.incarnation else None

    def _sample(self, flow: Flow, now: float, *, ended: bool = False) -> None:
        events, spent = flow.stream.events - flow.events, now - flow.at
        flow.at, flow.events = now, flow.stream.events
        slow, flow.slow = flow.slow, False
        # A stream that gives nothing is sampled too: its next event takes at least that long. At the end it is the
        # terminal marker that nothing came before.
        if slow or (ended and not events):
            return
        taken = self._of(flow.entry, Phase.DECODE)
        if taken is not None:
            taken.add(Measure.STEP, spent / max(1, events))
