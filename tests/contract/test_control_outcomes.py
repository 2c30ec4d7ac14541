"""Reports over real gRPC: what is acknowledged is stored, and counts once."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from narwhal._pb import fleet_pb2, outcome_pb2, placement_pb2
from narwhal.control import loop
from narwhal.control.core.publication import PlacementContent, publishable
from narwhal.reports import RequestCounts
from narwhal.vocabulary import Outcome
from tests.contract.control_kit import Control, Engines, batch, control, drain, identity, soon, until
from tests.contract.model_store import Medium


@pytest_asyncio.fixture
async def process(served: Engines, medium: Medium) -> AsyncIterator[Control]:
    async with control(served, medium=medium) as made:
        await until(lambda: made.serving() == {"p0", "d0"})
        yield made


async def acknowledged(call: Any) -> int:
    """The next acknowledgement."""
    ack = await soon(call.read())
    assert isinstance(ack, outcome_pb2.ReportAck), ack
    return ack.sequence


async def acknowledged_up_to(call: Any, sequence: int) -> None:
    while await acknowledged(call) < sequence:
        pass


def totals(process: Control) -> RequestCounts:
    loop = process.leader.loop
    assert loop is not None
    return loop.view().totals


def stored(medium: Medium) -> dict[str, Any]:
    assert medium.document is not None
    document: dict[str, Any] = json.loads(medium.document)
    return document


@pytest.mark.rule("S6")
async def test_a_report_is_acknowledged_only_once_a_handoff_with_it_is_stored(process: Control, medium: Medium) -> None:
    medium.gate = asyncio.Event()
    call = process.outcomes.ReportOutcomes()
    await soon(call.write(batch(1, served=3)))
    await until(lambda: totals(process).served == 3)
    reading = asyncio.ensure_future(call.read())
    saves = medium.saves
    done, _ = await asyncio.wait([reading], timeout=0.3)
    assert not done, "acknowledged though nothing was stored"
    assert medium.saves == saves
    medium.gate.set()
    assert await soon(reading) == outcome_pb2.ReportAck(sequence=1)
    document = stored(medium)
    assert document["requests"]["served"] == 3
    assert [(c["id"], c["boot"], c["sequence"]) for c in document["cursors"]] == [("proxy", 1, 1)]
    assert document["engines"]["d0"]["outcomes"] == {"answer_complete": 3}
    call.cancel()


@pytest.mark.rule("S6")
async def test_a_write_that_fails_acknowledges_nothing(process: Control, medium: Medium) -> None:
    call = process.outcomes.ReportOutcomes()
    medium.failing = "no space left on device"
    await soon(call.write(batch(1)))
    reading = asyncio.ensure_future(call.read())
    await until(lambda: process.leader.writes["failed"] >= 3)
    assert not reading.done()
    medium.failing = ""
    assert await soon(reading) == outcome_pb2.ReportAck(sequence=1)
    call.cancel()


@pytest.mark.rule("F9", "S6")
async def test_a_report_counts_once_however_often_it_arrives(process: Control) -> None:
    for _ in range(3):
        call = process.outcomes.ReportOutcomes()
        for sequence in (1, 2, 3):
            await soon(call.write(batch(sequence, served=sequence)))
        await acknowledged_up_to(call, 3)
        call.cancel()
    assert totals(process).served == 6
    loop = process.leader.loop
    assert loop is not None
    assert {e.id: dict(e.outcomes) for e in loop.view().engines} == {
        "p0": {Outcome.HANDOFF: 6},
        "d0": {Outcome.ANSWER_COMPLETE: 6},
    }


@pytest.mark.rule("S6")
async def test_another_boot_and_another_slot_have_sequences_of_their_own(process: Control) -> None:
    for who in (identity(), identity(boot=2), identity(slot=1), identity("other")):
        call = process.outcomes.ReportOutcomes()
        await soon(call.write(batch(1, who)))
        await acknowledged_up_to(call, 1)
        call.cancel()
    assert totals(process).served == 4


@pytest.mark.rule("S6")
async def test_totals_are_exact_across_the_death_of_control(served: Engines, medium: Medium) -> None:
    """Killed after it stored and before it acknowledged, or before it stored: the proxy sends again, it counts once."""
    async with control(served, medium=medium) as first:
        await until(lambda: first.serving() == {"p0", "d0"})
        call = first.outcomes.ReportOutcomes()
        await soon(call.write(batch(1, served=10)))
        await acknowledged_up_to(call, 1)
        await soon(call.write(batch(2, served=5)))
        await acknowledged_up_to(call, 2)
        medium.gate = asyncio.Event()  # from here on nothing is stored: as if it had been killed
        await soon(call.write(batch(3, served=7)))
        await until(lambda: totals(first).served == 22)
        kept, medium.document = medium.document, None
        call.cancel()
        medium.expire()
        medium.gate = None
    medium.document = kept
    async with control(served, medium=medium, resume=True) as second:
        await until(lambda: second.serving() == {"p0", "d0"})
        assert totals(second).served == 15
        call = second.outcomes.ReportOutcomes()
        for sequence, count in ((2, 5), (3, 7)):  # it had not heard of the acknowledgement of 2
            await soon(call.write(batch(sequence, served=count)))
        await acknowledged_up_to(call, 3)
        assert totals(second).served == 22
        call.cancel()


async def test_a_gap_in_one_stream_makes_the_proxy_send_again(process: Control) -> None:
    call = process.outcomes.ReportOutcomes()
    await soon(call.write(batch(5)))  # what a control process sees first that lost its cursors
    await soon(call.write(batch(7)))
    acks = await drain(call)
    assert acks[-1].sequence == 5
    assert await soon(call.code()) is grpc.StatusCode.ABORTED
    assert "report 7 came after 5" in (await call.details() or "")
    assert totals(process).served == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([b"\xff\xff\xff"], "not a message of this stream"),
        ([batch(0).SerializeToString()], "needs a sequence"),
        ([batch(1, identity("")).SerializeToString()], "needs an id and a boot"),
        ([batch(1).SerializeToString(), batch(2, identity("other")).SerializeToString()], "the stream is of proxy/0"),
        (
            [
                outcome_pb2.ReportBatch(
                    proxy=identity(), sequence=1, runs=[outcome_pb2.OutcomeRun(engine_id="p0", count=1)]
                ).SerializeToString()
            ],
            "unknown outcome 0",
        ),
    ],
)
async def test_a_report_that_makes_no_sense_is_an_invalid_argument_and_nothing_more(
    messages: list[bytes], words: str, process: Control
) -> None:
    call: Any = process.channel.stream_stream("/narwhal.v1.OutcomeService/ReportOutcomes")()
    for data in messages:
        await soon(call.write(data))
    await drain(call)
    assert await soon(call.code()) is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (await call.details() or "")
    good = process.outcomes.ReportOutcomes()
    await soon(good.write(batch(1, identity("good"))))
    await acknowledged_up_to(good, 1)
    good.cancel()


async def test_reports_of_an_engine_that_is_gone_keep_the_totals_exact(process: Control, medium: Medium) -> None:
    report = batch(1)
    report.runs[0].engine_id = "removed"
    call = process.outcomes.ReportOutcomes()
    await soon(call.write(report))
    await acknowledged_up_to(call, 1)
    assert stored(medium)["unknown_outcomes"] == {"handoff": 1}
    call.cancel()


async def test_closing_the_stream_is_answered_after_the_last_acknowledgement(process: Control) -> None:
    call = process.outcomes.ReportOutcomes()
    for sequence in range(1, 6):
        await soon(call.write(batch(sequence)))
    await soon(call.done_writing())
    assert (await drain(call))[-1].sequence == 5
    assert await soon(call.code()) is grpc.StatusCode.OK


async def test_a_standby_takes_no_reports_and_names_the_active(served: Engines, medium: Medium) -> None:
    async with (
        control(served, medium=medium) as active,
        control(served, medium=medium, holder="b") as standby,
    ):
        await until(lambda: standby.told() == ["control_standby"])
        call = standby.outcomes.ReportOutcomes()
        await drain(call)
        assert await soon(call.code()) is grpc.StatusCode.FAILED_PRECONDITION
        trailers = dict(await call.trailing_metadata() or ())
        details = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        assert details.details[0].Unpack(info)
        assert info.reason == "NOT_ACTIVE"
        assert dict(info.metadata) == {"active": active.address, "holder": "a"}
        for ask in (
            standby.fleet.GetStatus(fleet_pb2.GetStatusRequest()),
            standby.fleet.ListProxies(fleet_pb2.ListProxiesRequest()),
            standby.fleet.GetHandoff(fleet_pb2.GetHandoffRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await soon(ask)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_fenced_control_takes_no_report(process: Control) -> None:
    call = process.outcomes.ReportOutcomes()
    await soon(call.write(batch(1)))
    await acknowledged_up_to(call, 1)
    lease = process.leader.lease
    assert lease is not None
    lease.valid_until = process.clock.boottime()
    await soon(call.write(batch(2)))
    assert await drain(call) == []
    assert await soon(call.code()) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.rule("S6")
async def test_a_failure_travels_in_full_and_in_its_place(process: Control) -> None:
    def run(outcome: outcome_pb2.LegOutcome, count: int = 1) -> outcome_pb2.OutcomeRun:
        return outcome_pb2.OutcomeRun(
            engine_id="d0", phase=placement_pb2.PHASE_DECODE, incarnation=1, outcome=outcome, count=count
        )

    failed = run(outcome_pb2.LEG_OUTCOME_STREAM_CUT)
    failed.failure.CopyFrom(
        outcome_pb2.LegFailure(producer_id="p0", producer_incarnation=1, detail="cut after 3 tokens")
    )
    complete = outcome_pb2.LEG_OUTCOME_STREAM_COMPLETE
    report = outcome_pb2.ReportBatch(proxy=identity(), sequence=1, runs=[run(complete, 4), failed])
    call = process.outcomes.ReportOutcomes()
    await soon(call.write(report))
    await acknowledged_up_to(call, 1)
    loop = process.leader.loop
    assert loop is not None
    engine = next(e for e in loop.view().engines if e.id == "d0")
    assert dict(engine.outcomes) == {Outcome.STREAM_COMPLETE: 4, Outcome.STREAM_CUT: 1}
    assert dict(engine.streaks) == {"stream": 1}, "the failure came after the successes"
    call.cancel()


@pytest.mark.rule("P1")
async def test_reports_do_not_have_placement_worked_out_anew(process: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come by the hundred a second, and few of them decide anything."""
    worked_out = 0

    def counted(content: PlacementContent, stored: Mapping[str, int]) -> PlacementContent:
        nonlocal worked_out
        worked_out += 1
        return publishable(content, stored)

    writes, passes = process.leader.writes, process.leader.passes
    monkeypatch.setattr(loop, "publishable", counted)
    call = process.outcomes.ReportOutcomes()
    before = writes["ok"]
    for sequence in range(1, 201):
        await soon(call.write(batch(sequence, served=1)))
        await until(lambda sequence=sequence: totals(process).served == sequence)  # type: ignore[misc]
    assert process.leader.passes > passes
    assert worked_out <= writes["ok"] - before + 1, "once for each handoff that was stored"
    await acknowledged_up_to(call, 200)
    call.cancel()
