"""What several readers' failures have in common: the producer (spec F7)."""

from typing import Any

import pytest

from narwhal.control.core.effects import ProbeInference
from narwhal.control.core.records import EventKind
from narwhal.vocabulary import FailureClass, Hold, Outcome
from tests.core.rig import OTHER, Rig, decode, of, only, prefill

C = FailureClass


def three_and_three(**settings: Any) -> Rig:
    engines = [prefill(f"p{n}", pinned=True) for n in (1, 2, 3)] + [decode(f"d{n}", pinned=True) for n in (1, 2, 3)]
    return Rig(*engines, liveness_every=0, **settings)


@pytest.mark.rule("F7")
@pytest.mark.parametrize(
    "outcome", [Outcome.ERROR_EVENT, Outcome.FIRST_TOKEN_TIMEOUT, Outcome.HTTP_5XX, Outcome.READ_TIMEOUT]
)
def test_three_failed_reads_on_two_engines_put_the_producer_on_hold_and_no_reader(outcome: Outcome) -> None:
    rig = three_and_three()
    rig.report("d1", outcome, producer="p1")
    rig.report("d2", outcome, producer="p1", proxy=OTHER)
    assert rig.holds("p1") == set()
    step = only(rig.report("d1", outcome, producer="p1"), ProbeInference)
    assert (step.engine, step.producer.engine if step.producer else "") == ("p1", "p1")
    assert rig.holds("p1") == {Hold.VERIFICATION}
    assert rig.streaks("p1") == {C.KV_HANDOFF: 1}
    assert [r.message for r in rig.records(EventKind.PRODUCER_BLAMED)] == [
        "engine p1 is blamed as producer: 3 decode legs on d1 and d2 failed with its handoffs, and with no other's"
    ]
    # What was on its way when the hold came fails as well: on engines that are not to blame.
    rig.report("d1", outcome, producer="p1", count=4)
    rig.report("d3", outcome, producer="p1", count=4)
    assert rig.holds("d1") == rig.holds("d2") == rig.holds("d3") == set()
    step = only(rig.answer_step(step, Outcome.HANDOFF, Outcome.ERROR_EVENT), ProbeInference)
    rig.answer_step(step, Outcome.HANDOFF, Outcome.ERROR_EVENT)
    assert rig.holds("p1") == {Hold.EJECTED}
    rig.report("d2", outcome, producer="p1", count=4)
    assert rig.holds("d2") == set()


@pytest.mark.rule("F7", "F3")
def test_one_reader_alone_may_be_to_blame_itself() -> None:
    rig = three_and_three()
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=3)
    assert (rig.holds("d1"), rig.holds("p1")) == ({Hold.VERIFICATION}, set())


@pytest.mark.rule("F7", "F3")
def test_a_reader_that_fails_with_other_producers_too_speaks_against_none() -> None:
    rig = three_and_three()
    rig.report("d1", Outcome.ERROR_EVENT, producer="p2")
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1")
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1")
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1")
    assert rig.holds("p1") == set()
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1")
    assert (rig.holds("d1"), rig.holds("p1")) == ({Hold.VERIFICATION}, set())


@pytest.mark.rule("F7")
def test_a_reader_that_has_read_well_since_still_speaks_against_its_producer() -> None:
    rig = three_and_three()
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    rig.report("d1", Outcome.STREAM_COMPLETE)
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1")
    assert rig.holds("p1") == {Hold.VERIFICATION}


@pytest.mark.rule("F7")
def test_failures_half_a_minute_apart_have_nothing_in_common() -> None:
    rig = three_and_three()
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    rig.now += 30.0
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1")
    assert rig.holds("p1") == set()
    rig.now += 29.9
    rig.report("d3", Outcome.ERROR_EVENT, producer="p1", count=2)
    assert rig.holds("p1") == {Hold.VERIFICATION}


@pytest.mark.rule("F7")
def test_the_only_producer_is_what_everybody_has_in_common() -> None:
    """Then the readers' own probes decide, as ever (spec F6)."""
    rig = Rig(prefill("p1", pinned=True), decode("d1", pinned=True), decode("d2", pinned=True), liveness_every=0)
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1", count=3)
    assert (rig.holds("p1"), rig.holds("d2")) == (set(), {Hold.VERIFICATION})


@pytest.mark.rule("F7")
@pytest.mark.parametrize("outcome", [Outcome.STALLED, Outcome.STREAM_SILENT])
def test_streams_that_had_begun_had_read_their_handoff(outcome: Outcome) -> None:
    rig = three_and_three()
    for reader in ("d1", "d2", "d3"):
        rig.report(reader, outcome, producer="p1", count=2)
    assert rig.holds("p1") == set()
    assert rig.kinds().count(EventKind.PRODUCER_BLAMED) == 0


@pytest.mark.rule("F7", "F3")
def test_a_failure_of_another_kind_is_not_the_producers() -> None:
    """p1 is held; a stream that stalls on d1 after its first token is d1's own failure."""
    rig = three_and_three()
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1", count=2)
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    assert (rig.holds("p1"), rig.holds("d1")) == ({Hold.VERIFICATION}, set())
    rig.report("d1", Outcome.STREAM_SILENT, producer="p1")
    assert rig.holds("d1") == {Hold.VERIFICATION}


@pytest.mark.rule("F7")
def test_readers_are_looked_at_once_their_producer_has_passed() -> None:
    rig = three_and_three()
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1")
    probe = rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    assert (rig.holds("p1"), rig.holds("d1")) == ({Hold.VERIFICATION}, set())
    effects = rig.works(only(probe, ProbeInference))
    assert (rig.holds("p1"), rig.holds("d1"), rig.holds("d2")) == (set(), {Hold.VERIFICATION}, set())
    assert [step.engine for step in of(effects, ProbeInference)] == ["d1"]


@pytest.mark.rule("F7")
def test_a_passed_producer_is_not_blamed_again_for_the_same_failures() -> None:
    rig = three_and_three()
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1")
    rig.pass_probe(rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2))
    rig.report("d3", Outcome.ERROR_EVENT, producer="p1")
    assert rig.holds("p1") == set()


@pytest.mark.rule("F7")
def test_failures_with_a_process_that_is_gone_say_nothing_of_the_next() -> None:
    rig = three_and_three()
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    rig.report("p1", Outcome.REFUSED, count=3)
    rig.readmit("p1")
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1")
    assert rig.holds("p1") == set()
    assert rig.kinds().count(EventKind.PRODUCER_BLAMED) == 0


@pytest.mark.rule("F7")
def test_a_reader_that_was_ejected_speaks_no_more() -> None:
    rig = three_and_three()
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    rig.report("d1", Outcome.REFUSED, count=3)
    rig.report("d2", Outcome.ERROR_EVENT, producer="p1")
    assert rig.holds("p1") == set()
