"""The outcome reporter against a control service that says what the test tells it to, over real gRPC."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import structlog

from narwhal.clock import RealClock
from narwhal.measures import LegMeasures
from narwhal.proxy import reporter as reporter_module
from narwhal.proxy.backlog import Backlog
from narwhal.proxy.link import Introduction
from narwhal.proxy.measuring import Measuring
from narwhal.proxy.reporter import OutcomeReporter
from narwhal.proxy.seams import Inflight
from narwhal.proxy.view import PlacementView
from narwhal.reports import Batch, LegFailure, ProxyKey, Run
from narwhal.vocabulary import Outcome, Phase, RequestResult
from tests.proxy.fake_control import FakeControl, dial, placement, until

ME = ProxyKey(id="proxy-a", slot=0, boot=7)


def failure(engine: str, request: str = "r") -> Run:
    outcome = Outcome.RESET
    details = LegFailure(outcome=outcome, producer="p1", producer_incarnation=3, request_id=request)
    return Run(engine=engine, phase=Phase.DECODE, incarnation=1, outcome=outcome, failure=details)


def success(reporter: OutcomeReporter, engine: str = "d1") -> None:
    reporter.success(engine, Phase.DECODE, 1, Outcome.STREAM_COMPLETE)


def leading(epoch: int = 1) -> FakeControl:
    return FakeControl(lambda stream: stream.send(placement(epoch, 1)))


@contextlib.asynccontextmanager
async def reporting(*addresses: str) -> AsyncIterator[OutcomeReporter]:
    """A reporter over a placement view, both running for as long as the block."""
    view = PlacementView(
        addresses=addresses,
        dial=dial,
        introduction=Introduction(proxy=ME, fleet="", address="", pid=1),
        inflight=Inflight(),
        clock=RealClock(),
        rng=random.Random(1),
    )
    clock = RealClock()
    measuring = Measuring(clock.monotonic())
    reporter = OutcomeReporter(Backlog(ME), measuring, wait_lead=view.wait_lead, clock=clock, rng=random.Random(2))
    tasks = [asyncio.create_task(view.run()), asyncio.create_task(reporter.run())]
    try:
        yield reporter
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results), results


def totals(batches: list[Batch]) -> Counter[tuple[str, Outcome]]:
    """What a control that counts each sequence once has counted."""
    counted: Counter[tuple[str, Outcome]] = Counter()
    for batch in {b.sequence: b for b in batches}.values():
        for run in batch.runs:
            counted[run.engine, run.outcome] += run.count
    return counted


def test_successes_are_told_every_second() -> None:
    assert reporter_module.SUCCESSES_EVERY_S == 1.0


@pytest.mark.rule("S6")
async def test_a_failure_is_sent_at_once_and_what_came_before_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "SUCCESSES_EVERY_S", 3600.0)
    async with leading() as control, reporting(control.address) as reporter:
        await until(lambda: control.report_streams)
        success(reporter)
        success(reporter)
        reporter.failure(failure("d1"))
        await until(lambda: control.batches)
        assert [(r.outcome, r.count) for r in control.batches[0].runs] == [
            (Outcome.STREAM_COMPLETE, 2),
            (Outcome.RESET, 1),
        ]
        assert control.batches[0].runs[1].failure == failure("d1").failure
        assert (control.batches[0].proxy, control.batches[0].sequence) == (ME, 1)
        await until(lambda: reporter.unacknowledged == 0)


@pytest.mark.rule("S6")
async def test_successes_and_requests_are_sent_without_any_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "SUCCESSES_EVERY_S", 0.05)
    async with leading() as control, reporting(control.address) as reporter:
        for _ in range(50):
            success(reporter)
            reporter.request(RequestResult.SERVED, 2)
        await until(lambda: sum(b.requests.served for b in control.batches) == 50)
        assert totals(control.batches) == {("d1", Outcome.STREAM_COMPLETE): 50}
        assert sum(b.requests.retried for b in control.batches) == 100
        assert len(control.batches) <= 3


@pytest.mark.rule("S6")
async def test_what_is_not_acknowledged_is_repeated_unchanged_after_a_reconnect() -> None:
    async with leading() as control, reporting(control.address) as reporter:
        control.acknowledging = False
        reporter.failure(failure("d1", "one"))
        await until(lambda: len(control.batches) == 1)
        reporter.failure(failure("d2", "two"))
        await until(lambda: len(control.batches) == 2)
        assert reporter.unacknowledged == 2
        first = list(control.batches)
        await control.stop()
        reporter.failure(failure("d3", "three"))
        control.acknowledging = True
        await control.start()
        await until(lambda: reporter.unacknowledged == 0)
        again = control.report_streams[-1]
        assert again[:2] == first
        assert [b.sequence for b in again] == [1, 2, 3]


@pytest.mark.rule("S6")
async def test_reports_go_to_the_new_active_after_a_takeover() -> None:
    async with leading(1) as old, FakeControl() as new, reporting(old.address, new.address) as reporter:
        old.acknowledging = False
        reporter.failure(failure("d1"))
        await until(lambda: old.batches and new.streams)
        new.newest.send(placement(2, 1))
        await until(lambda: new.batches)
        assert new.batches == old.batches
        await until(lambda: reporter.unacknowledged == 0)


@pytest.mark.rule("S6", "P7")
async def test_control_is_away_for_ten_thousand_requests_and_hears_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading() as control, reporting(control.address) as reporter:
        await until(lambda: control.report_streams)
        await control.stop()
        for n in range(10_000):
            success(reporter, f"d{n % 3}")
            if n % 100 == 99:
                reporter.failure(failure("d1", str(n)))
        assert reporter.unacknowledged == 10_100
        await control.start()
        await until(lambda: reporter.unacknowledged == 0)
        counted = totals(control.batches)
        assert sum(n for (_, outcome), n in counted.items() if outcome is Outcome.STREAM_COMPLETE) == 10_000
        assert counted["d1", Outcome.RESET] == 100
        told = [r.failure.request_id for b in control.batches for r in b.runs if r.failure is not None]
        assert told == [str(n) for n in range(99, 10_000, 100)]


@pytest.mark.case("J1")
@pytest.mark.rule("S6")
async def test_the_stream_breaks_at_every_batch_and_totals_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "backoff_s", lambda _failures, _rng: 0.0)
    async with leading() as control, reporting(control.address) as reporter:
        control.cut_after = 2
        for n in range(20):
            success(reporter)
            reporter.failure(failure("d1", str(n)))
            await until(lambda n=n: len({b.sequence for b in control.batches}) > n)  # type: ignore[misc]
        control.cut_after = 0
        await until(lambda: reporter.unacknowledged == 0)
        assert totals(control.batches) == {("d1", Outcome.STREAM_COMPLETE): 20, ("d1", Outcome.RESET): 20}
        by_sequence: dict[int, Batch] = {}
        for batch in control.batches:
            assert by_sequence.setdefault(batch.sequence, batch) == batch


@pytest.mark.rule("S6")
async def test_when_acknowledgements_stop_the_rest_merges_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "WINDOW", 4)
    async with leading() as control, reporting(control.address) as reporter:
        control.acknowledging = False
        for n in range(50):
            reporter.failure(failure("d1", str(n)))
            await until(lambda: not reporter.backlog.waiting or len(reporter.backlog.sent) == 4)
        assert len(reporter.backlog.sent) == 4
        assert max(b.sequence for b in control.batches) <= 4
        control.acknowledging = True
        await control.stop()
        await control.start()
        await until(lambda: reporter.unacknowledged == 0)
        assert totals(control.batches) == {("d1", Outcome.RESET): 50}


@pytest.mark.rule("S6")
async def test_the_end_sends_the_rest_and_waits_until_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "SUCCESSES_EVERY_S", 3600.0)
    async with leading() as control, reporting(control.address) as reporter:
        await until(lambda: control.report_streams)
        success(reporter)
        reporter.request(RequestResult.SERVED, 0)
        await reporter.close()
        assert totals(control.batches) == {("d1", Outcome.STREAM_COMPLETE): 1}
        assert reporter.unacknowledged == 0


async def test_the_end_does_not_wait_for_ever_for_a_control_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "SILENCE_S", 0.05)
    async with reporting("127.0.0.1:1") as reporter:
        success(reporter)
        async with asyncio.timeout(30):
            await reporter.close()
        assert reporter.unacknowledged == 1


@pytest.mark.rule("S6")
@pytest.mark.parametrize(
    ("legs", "requests", "said"),
    [(0, 0, []), (2, 1, [(2, 1)]), (2, 0, [(2, 0)]), (0, 1, [(0, 1)])],
)
async def test_the_end_tells_of_outcomes_that_are_lost_and_of_none_that_are_not(
    legs: int, requests: int, said: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "SILENCE_S", 0.2)
    async with reporting("127.0.0.1:1") as reporter:
        for _ in range(legs):
            success(reporter)
        for _ in range(requests):
            reporter.request(RequestResult.REJECTED, 0)
        # What legs took goes out with nothing else, and is not acknowledged either.
        measures = LegMeasures(engine="d1", phase=Phase.DECODE, incarnation=1, sketches={})
        assert reporter.backlog.cut((measures,), 1.0) is not None
        with structlog.testing.capture_logs() as logs:
            await reporter.close()
    lost = [e for e in logs if e["event"] == "outcomes not reported"]
    assert [(e["outcomes"], e["requests"]) for e in lost] == said


async def test_the_end_waits_for_nothing_when_there_is_nothing_to_tell() -> None:
    async with reporting("127.0.0.1:1") as reporter:
        await reporter.close()


async def test_a_stream_that_control_ends_for_idleness_is_opened_again() -> None:
    async with leading() as control, reporting(control.address) as reporter:
        await until(lambda: control.report_streams)
        control.ending.set()
        await until(lambda: len(control.report_streams) == 2)
        reporter.failure(failure("d1"))
        await until(lambda: reporter.unacknowledged == 0)
