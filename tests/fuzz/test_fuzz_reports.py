"""Reports, acknowledgements and greetings of a hostile or broken proxy: refused, or counted; the control plane goes on.

What was taken must be storable: a document that cannot be written, or read again, would degrade the control plane for
good.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal._pb import outcome_pb2, placement_pb2
from tests.fuzz.messages import fuzz, messages
from tests.fuzz.peers import greeting, reported, rig, take


@pytest.mark.rule("S6")
@fuzz
@given(st.lists(messages(outcome_pb2.ReportBatch), min_size=1, max_size=5))
def test_any_report_is_refused_or_counted(reports: list[outcome_pb2.ReportBatch]) -> None:
    take(rig(), [reported(each.SerializeToString()) for each in reports])


@pytest.mark.rule("S6")
def test_counts_that_no_fleet_ever_reaches_are_refused_and_the_state_stays_storable() -> None:
    fleet = rig()
    most = outcome_pb2.RequestCounts(served=2**64 - 1)
    run = outcome_pb2.OutcomeRun(
        engine_id="d1",
        phase=placement_pb2.PHASE_DECODE,
        incarnation=1,
        outcome=outcome_pb2.LEG_OUTCOME_STREAM_COMPLETE,
        count=2**64 - 1,
    )
    proxy = placement_pb2.ProxyIdentity(id="edge", boot=1)
    batches = [outcome_pb2.ReportBatch(proxy=proxy, sequence=n, requests=most, runs=[run]) for n in (1, 2)]
    take(fleet, [reported(each.SerializeToString()) for each in batches])


@pytest.mark.rule("P6")
@fuzz
@given(st.lists(messages(placement_pb2.ProxyMessage), min_size=1, max_size=6))
def test_anything_on_the_placement_stream_is_refused_or_taken(said: list[placement_pb2.ProxyMessage]) -> None:
    take(rig(), [greeting(each.SerializeToString()) for each in said])
