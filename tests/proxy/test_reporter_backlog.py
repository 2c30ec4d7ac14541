"""What is merged, cut, repeated and forgotten, against a model of a control process that counts each batch once."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narwhal.proxy.backlog import RUNS_PER_BATCH, Backlog
from narwhal.reports import Batch, LegFailure, ProxyKey, RequestCounts, Run
from narwhal.vocabulary import Outcome, Phase, RequestResult

ME = ProxyKey(id="p", slot=0, boot=1)
GOOD = (Outcome.HANDOFF, Outcome.STREAM_COMPLETE, Outcome.ANSWER_COMPLETE, Outcome.CLIENT_ERROR)
NEUTRAL = (Outcome.CANCELLED, Outcome.LOCAL, Outcome.DEADLINE)
BAD = (Outcome.RESET, Outcome.STREAM_CUT, Outcome.HTTP_5XX, Outcome.STALLED)


def failed(engine: str, outcome: Outcome = Outcome.RESET, request: str = "r", incarnation: int = 1) -> Run:
    return Run(
        engine=engine,
        phase=Phase.DECODE,
        incarnation=incarnation,
        outcome=outcome,
        failure=LegFailure(outcome=outcome, producer="p1", producer_incarnation=1, request_id=request),
    )


def cut_all(backlog: Backlog) -> list[Run]:
    runs: list[Run] = []
    while (batch := backlog.cut()) is not None:
        runs.extend(batch.runs)
    return runs


@dataclass
class ModelControl:
    """Applies what follows its cursor, once, and acknowledges what it has stored."""

    applied: int = 0
    runs: list[Run] = field(default_factory=list)
    requests: RequestCounts = field(default_factory=RequestCounts)
    seen: dict[int, Batch] = field(default_factory=dict)

    def receive(self, batch: Batch) -> None:
        assert self.seen.setdefault(batch.sequence, batch) == batch, "a batch that was sent has changed"
        assert batch.sequence <= self.applied + 1, "a batch is missing"
        if batch.sequence == self.applied + 1:
            self.applied += 1
            self.runs.extend(batch.runs)
            self.requests = self.requests.plus(batch.requests)


def test_successes_merge_until_a_failure_of_the_same_engine_comes_between() -> None:
    backlog = Backlog(ME)
    for engine in ("a", "b", "a", "a"):
        backlog.merge(engine, Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
    backlog.failure(failed("a"))
    for engine in ("a", "b"):
        backlog.merge(engine, Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
    batch = backlog.cut()
    assert batch is not None
    assert [(r.engine, r.outcome, r.count) for r in batch.runs] == [
        ("a", Outcome.STREAM_COMPLETE, 3),
        ("b", Outcome.STREAM_COMPLETE, 2),
        ("a", Outcome.RESET, 1),
        ("a", Outcome.STREAM_COMPLETE, 1),
    ]
    assert backlog.unacknowledged == 7


def test_phases_incarnations_and_outcomes_are_runs_of_their_own() -> None:
    backlog = Backlog(ME)
    backlog.merge("a", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
    backlog.merge("a", Phase.DECODE, 2, Outcome.STREAM_COMPLETE)
    backlog.merge("a", Phase.PREFILL, 2, Outcome.HANDOFF)
    backlog.merge("a", Phase.DECODE, 2, Outcome.CANCELLED)
    assert [r.count for r in cut_all(backlog)] == [1, 1, 1, 1]


@pytest.mark.rule("S6")
def test_a_failure_is_told_in_full_with_its_producer() -> None:
    backlog = Backlog(ME)
    backlog.failure(failed("d1", request="req-9"))
    batch = backlog.cut()
    assert batch is not None
    assert batch.runs[0].failure is not None
    assert batch.runs[0].failure.producer == "p1"
    assert batch.runs[0].failure.request_id == "req-9"


def test_sequences_start_at_one_and_rise_by_one() -> None:
    backlog = Backlog(ME)
    for expected in (1, 2, 3):
        backlog.merge("a", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
        batch = backlog.cut()
        assert batch is not None
        assert (batch.sequence, batch.proxy) == (expected, ME)
    assert backlog.cut() is None


def test_a_batch_that_was_cut_is_repeated_as_it_was_whatever_comes_after() -> None:
    backlog = Backlog(ME)
    backlog.merge("a", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
    first = backlog.cut()
    backlog.merge("a", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
    assert backlog.sent == (first,)
    second = backlog.cut()
    backlog.acknowledge(1)
    assert backlog.sent == (second,)
    assert backlog.unacknowledged == 1


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    backlog = Backlog(ME)
    backlog.merge("a", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
    backlog.cut()
    with pytest.raises(ValueError, match="batch 2 of 1"):
        backlog.acknowledge(2)
    assert len(backlog.sent) == 1


def test_a_batch_stays_below_its_bound() -> None:
    backlog = Backlog(ME)
    for n in range(RUNS_PER_BATCH + 5):
        backlog.failure(failed("a", request=str(n)))
    first, second = backlog.cut(), backlog.cut()
    assert first is not None
    assert second is not None
    assert (len(first.runs), len(second.runs)) == (1000, 5)


@pytest.mark.rule("S6")
def test_a_million_successes_without_control_are_one_run_an_engine() -> None:
    backlog = Backlog(ME)
    for n in range(200_000):
        backlog.merge(f"e{n % 5}", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
    runs = cut_all(backlog)
    assert sorted((r.engine, r.count) for r in runs) == [(f"e{n}", 40_000) for n in range(5)]


@pytest.mark.rule("S6")
def test_failures_without_control_stay_bounded_exact_and_newest_in_order() -> None:
    backlog = Backlog(ME, kept=100)
    for n in range(10_000):
        backlog.failure(failed("a", request=str(n)))
        backlog.merge("a", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
        backlog.merge("calm", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
    runs = cut_all(backlog)
    assert len(runs) <= 103
    counts: Counter[tuple[str, Outcome]] = Counter()
    for run in runs:
        counts[run.engine, run.outcome] += run.count
    assert counts == {
        ("a", Outcome.RESET): 10_000,
        ("a", Outcome.STREAM_COMPLETE): 10_000,
        ("calm", Outcome.STREAM_COMPLETE): 10_000,
    }
    told = [int(r.failure.request_id) for r in runs if r.failure is not None]
    assert told == list(range(10_000 - len(told), 10_000))
    assert len(told) >= 25
    # What lost its order is nobody's evidence, and what still grew kept its place and incarnation.
    assert all(r.incarnation == 0 for r in runs if r.failure is None and r.engine == "a" and r.count > 1)
    assert [r.incarnation for r in runs if r.engine == "calm"] == [1]


@pytest.mark.rule("S6")
def test_folding_stays_cheap_and_bounded_with_more_kinds_than_are_kept() -> None:
    backlog = Backlog(ME, kept=100)
    for n in range(20_000):
        backlog.merge(f"e{n % 500}", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
        backlog.failure(failed(f"e{n % 500}", request=str(n)))
    runs = cut_all(backlog)
    assert sum(run.count for run in runs) == 40_000
    assert len(runs) <= 4 * 500 + 2 * 500


Step = tuple[str, str, Outcome]
NOTHING = Outcome.LOCAL
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("leg"), st.sampled_from("ab"), st.sampled_from(GOOD + NEUTRAL + BAD)),
        st.tuples(st.sampled_from(["request", "send", "lose", "ack", "reconnect"]), st.just(""), st.just(NOTHING)),
    ),
    max_size=200,
)


class Proxy:
    """A worker's backlog, the connection that it has or has not, and what really happened."""

    def __init__(self, kept: int) -> None:
        self.backlog = Backlog(ME, kept=kept)
        self.control = ModelControl()
        self.happened: list[tuple[str, Outcome]] = []
        self.served = 0
        self.connected = True

    def leg(self, engine: str, outcome: Outcome) -> None:
        self.happened.append((engine, outcome))
        if outcome in BAD:
            self.backlog.failure(failed(engine, outcome, str(len(self.happened))))
        else:
            self.backlog.merge(engine, Phase.DECODE, 1, outcome)

    def request(self, *_: object) -> None:
        self.served += 1
        self.backlog.request(RequestResult.SERVED, 1)

    def send(self, *_: object) -> None:
        """Nothing is cut while there is no connection."""
        if self.connected and (batch := self.backlog.cut()) is not None:
            self.control.receive(batch)

    def lose(self, *_: object) -> None:
        """The connection breaks under a batch, which never arrives."""
        if self.connected:
            self.backlog.cut()
        self.connected = False

    def ack(self, *_: object) -> None:
        if self.connected:
            self.backlog.acknowledge(self.control.applied)

    def reconnect(self, *_: object) -> None:
        """Everything that was sent is sent again, arrived or not."""
        self.connected = True
        for batch in self.backlog.sent:
            self.control.receive(batch)


@pytest.mark.rule("S6", "F9")
@settings(max_examples=150, deadline=None)
@given(steps=STEPS, kept=st.sampled_from([4, 9, 4096]))
def test_totals_are_exact_and_each_engines_order_is_kept(steps: list[Step], kept: int) -> None:
    proxy = Proxy(kept)
    for kind, engine, outcome in steps:
        getattr(proxy, kind)(engine, outcome)
        told = sum(r.count for r in proxy.control.runs)
        assert proxy.backlog.unacknowledged >= len(proxy.happened) - told
    proxy.reconnect()
    while proxy.backlog.waiting:
        proxy.send()
    proxy.ack()

    assert proxy.backlog.unacknowledged == 0
    assert proxy.control.requests == RequestCounts(served=proxy.served, retried=proxy.served)
    counted: Counter[tuple[str, Outcome]] = Counter()
    for run in proxy.control.runs:
        counted[run.engine, run.outcome] += run.count
    assert counted == Counter(proxy.happened)
    for engine in "ab":
        in_order = between_failures([r for r in proxy.control.runs if r.engine == engine and r.incarnation])
        story = between_failures_of(proxy.happened, engine)
        if kept == 4096:
            assert in_order == story
        # Two failures that control sees in a row had no success between them, and whatever came between is seen there.
        seen = [r for r in proxy.control.runs if r.engine == engine and r.incarnation]
        assert between_each(seen) == between_each(numbered(proxy.happened, engine), only=set(numbers(seen)))


def between_failures(runs: list[Run]) -> list[object]:
    """An engine's story: what lies between two failures as counts, each failure as itself."""
    story: list[object] = [Counter[Outcome]()]
    for run in runs:
        if run.outcome in BAD:
            story += [run.outcome, Counter[Outcome]()]
        else:
            story[-1][run.outcome] += run.count  # type: ignore[index]
    return story


def numbers(runs: list[Run]) -> list[int]:
    """The failures among them, by when they happened."""
    return [int(run.failure.request_id) for run in runs if run.failure is not None]


def numbered(happened: list[tuple[str, Outcome]], engine: str) -> list[Run]:
    """What happened on one engine as runs of one."""
    return [
        failed(e, o, str(n)) if o in BAD else Run(engine=e, phase=Phase.DECODE, incarnation=1, outcome=o)
        for n, (e, o) in enumerate(happened, 1)
        if e == engine
    ]


def between_each(runs: list[Run], only: set[int] | None = None) -> list[tuple[int, set[Outcome]]]:
    """Each failure (of `only`, if given) and the kinds of harmless outcomes since the one before it."""
    story: list[tuple[int, set[Outcome]]] = []
    since: set[Outcome] = set()
    for run in runs:
        if run.failure is None:
            since.add(run.outcome)
        elif only is None or int(run.failure.request_id) in only:
            story.append((int(run.failure.request_id), since))
            since = set()
    return story


def between_failures_of(happened: list[tuple[str, Outcome]], engine: str) -> list[object]:
    runs = [Run(engine=e, phase=Phase.DECODE, incarnation=1, outcome=o) for e, o in happened if e == engine]
    return between_failures(runs)
