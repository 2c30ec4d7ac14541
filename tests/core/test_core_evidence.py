"""Outcomes → classes → streaks (spec F1, F2, F4, F5, F9)."""

import pytest

from narwhal.control.core.effects import ProbeHealth
from narwhal.control.core.events import HealthAnswered
from narwhal.control.core.records import Record
from narwhal.vocabulary import FailureClass, Outcome, Phase, Stage
from tests.core.rig import EDGE, OTHER, Rig, decode, of, only, prefill

C = FailureClass

# Spec F2, row by row.
CLASSES = [
    (Outcome.REFUSED, C.CONNECTION),
    (Outcome.UNREACHABLE, C.CONNECTION),
    (Outcome.RESET, C.CONNECTION),
    (Outcome.TLS_FAILED, C.CONNECTION),
    (Outcome.ANSWER_CUT, C.CONNECTION),
    (Outcome.CONNECT_TIMEOUT, C.TIMEOUT),
    (Outcome.PREFILL_TIMEOUT, C.TIMEOUT),
    (Outcome.READ_TIMEOUT, C.TIMEOUT),
    (Outcome.FIRST_TOKEN_TIMEOUT, C.STREAM),
    (Outcome.STREAM_SILENT, C.STREAM),
    (Outcome.STREAM_CUT, C.STREAM),
    (Outcome.MARKER_WITHOUT_TOKEN, C.STREAM),
    (Outcome.ERROR_EVENT, C.STREAM),
    (Outcome.STREAM_MALFORMED, C.STREAM),
    (Outcome.STALLED, C.STREAM),  # spec F10
    (Outcome.HTTP_408, C.OVERLOAD),
    (Outcome.HTTP_429, C.OVERLOAD),
    (Outcome.HTTP_5XX, C.INFERENCE_STATUS),
    (Outcome.HANDOFF_UNUSABLE, C.KV_HANDOFF),
]
# Spec F4, row by row; the health row is a test of its own.
CLEARINGS = [
    (Outcome.CLIENT_ERROR, {C.CONNECTION, C.INFERENCE_STATUS}),
    (Outcome.WRONG_IDENTITY, {C.CONNECTION, C.INFERENCE_STATUS}),
    (Outcome.HANDOFF, {C.CONNECTION, C.INFERENCE_STATUS, C.KV_HANDOFF}),
    (Outcome.STREAM_COMPLETE, {C.CONNECTION, C.INFERENCE_STATUS, C.STREAM}),
    (Outcome.ANSWER_COMPLETE, {C.CONNECTION, C.INFERENCE_STATUS}),
]
# Spec F5, as far as outcomes tell.
NEITHER = [Outcome.CANCELLED, Outcome.LOCAL, Outcome.DEADLINE]


def one_of_each(rig: Rig, engine: str = "d") -> None:
    """One failure of every class on the engine."""
    for outcome in (
        Outcome.REFUSED,
        Outcome.READ_TIMEOUT,
        Outcome.STREAM_CUT,
        Outcome.HTTP_429,
        Outcome.HTTP_5XX,
        Outcome.HANDOFF_UNUSABLE,
    ):
        rig.report(engine, outcome)
    assert rig.streaks(engine) == dict.fromkeys(C, 1)


@pytest.mark.rule("F1", "F2")
@pytest.mark.parametrize(("outcome", "expected"), CLASSES)
def test_a_failure_counts_in_its_own_class_only(outcome: Outcome, expected: FailureClass) -> None:
    rig = Rig(prefill("p"), decode("d"))
    rig.report("d", outcome)
    assert rig.streaks("d") == {expected: 1}
    rig.report("d", outcome)
    assert rig.streaks("d") == {expected: 2}
    assert rig.streaks("p") == {}


def test_every_outcome_is_in_one_of_the_tables() -> None:
    failures = {o for o, _ in CLASSES}
    successes = {o for o, _ in CLEARINGS}
    assert failures | successes | set(NEITHER) == set(Outcome)
    assert len(CLASSES) + len(CLEARINGS) + len(NEITHER) == len(Outcome)


@pytest.mark.rule("F1", "F4")
@pytest.mark.parametrize(("outcome", "cleared"), CLEARINGS)
def test_a_success_clears_its_classes_and_no_other(outcome: Outcome, cleared: set[FailureClass]) -> None:
    rig = Rig(prefill("p"), decode("d"))
    one_of_each(rig)
    rig.report("d", outcome)
    assert rig.streaks("d") == dict.fromkeys(set(C) - cleared, 1)


@pytest.mark.rule("F4")
def test_health_200_clears_connection_timeout_and_overload() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=1)
    one_of_each(rig)
    for probe in of(rig.run_pass(), ProbeHealth):
        rig.answer_health(probe)
    assert rig.streaks("d") == {C.STREAM: 1, C.INFERENCE_STATUS: 1, C.KV_HANDOFF: 1}


@pytest.mark.rule("F5")
@pytest.mark.parametrize("outcome", NEITHER)
def test_neither_for_nor_against(outcome: Outcome) -> None:
    rig = Rig(prefill("p"), decode("d"))
    one_of_each(rig)
    rig.report("d", outcome, count=50)
    assert rig.streaks("d") == dict.fromkeys(C, 1)
    assert rig.engine("d").outcomes[outcome] == 50


@pytest.mark.rule("F5")
def test_an_outcome_of_another_incarnation_is_no_evidence_but_counts() -> None:
    rig = Rig(prefill("p"), decode("d"))
    rig.report("d", Outcome.REFUSED, count=5, incarnation=0)
    rig.report("d", Outcome.REFUSED, count=5, incarnation=2)
    assert rig.streaks("d") == {}
    assert rig.engine("d").outcomes[Outcome.REFUSED] == 10
    one_of_each(rig)
    rig.report("d", Outcome.STREAM_COMPLETE, incarnation=0)
    assert rig.streaks("d") == dict.fromkeys(C, 1)


@pytest.mark.rule("F5")
@pytest.mark.case("C5")
def test_an_engine_that_is_joining_gathers_no_evidence() -> None:
    rig = Rig(prefill("p"), decode("d"), joined=False)
    rig.report("d", Outcome.REFUSED, count=5, incarnation=0)
    assert rig.streaks("d") == {}
    assert rig.engine("d").outcomes == {Outcome.REFUSED: 5}


@pytest.mark.rule("F9")
def test_the_order_within_a_batch_decides() -> None:
    rig = Rig(prefill("p"), decode("d"))
    bad, good = rig.run("d", Outcome.HTTP_5XX), rig.run("d", Outcome.STREAM_COMPLETE, count=7)
    rig.batch(bad, bad, good, bad)
    assert rig.streaks("d") == {C.INFERENCE_STATUS: 1}
    rig.batch(bad, good)
    assert rig.streaks("d") == {}


@pytest.mark.rule("F9")
def test_what_was_decided_on_one_run_holds_for_the_next() -> None:
    """Three refusals eject; what the batch says after them is of an engine that is out."""
    rig = Rig(prefill("p"), decode("d"))
    rig.batch(*[rig.run("d", Outcome.REFUSED)] * 7)
    assert rig.streaks("d") == {C.CONNECTION: 3}
    assert len([k for k in rig.kinds() if k == "engine_ejected"]) == 1


@pytest.mark.rule("F9", "S6")
def test_a_report_is_applied_once_however_often_it_arrives() -> None:
    rig = Rig(prefill("p"), decode("d"))
    run = rig.run("d", Outcome.HTTP_5XX)
    for _ in range(5):
        rig.batch(run, sequence=1)
    assert rig.streaks("d") == {C.INFERENCE_STATUS: 1}
    rig.batch(run, sequence=2)
    rig.batch(run, sequence=1)
    rig.batch(run, sequence=1, proxy=OTHER)
    assert rig.streaks("d") == {C.INFERENCE_STATUS: 3}
    assert rig.engine("d").outcomes == {Outcome.HTTP_5XX: 3}


@pytest.mark.case("D4")
def test_a_thousand_bad_requests_are_nobodys_fault() -> None:
    rig = Rig(prefill("p"), decode("d"))
    for _ in range(1000):
        rig.report("p", Outcome.CLIENT_ERROR)
    assert rig.streaks("p") == {}
    assert rig.engine("p").phases == {Phase.PREFILL}


@pytest.mark.rule("L2")
@pytest.mark.parametrize(
    ("outcome", "streaks"),
    [
        (Outcome.HTTP_5XX, {C.INFERENCE_STATUS: 1}),
        (Outcome.HTTP_429, {C.OVERLOAD: 1}),
        (Outcome.HTTP_408, {C.OVERLOAD: 1}),
        (Outcome.CLIENT_ERROR, {}),
        (Outcome.LOCAL, {}),
        (Outcome.REFUSED, {}),  # silence: a miss, and no evidence
        (Outcome.READ_TIMEOUT, {}),
    ],
)
def test_what_a_sweep_sees_beside_silence_is_evidence(outcome: Outcome, streaks: dict[FailureClass, int]) -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=1)
    for probe in of(rig.run_pass(), ProbeHealth):
        rig.answer_health(probe, outcome if probe.engine == "d" else None)
    assert rig.streaks("d") == streaks


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    rig = Rig(prefill("p"), decode("d"))
    one_of_each(rig)
    before = rig.saved()
    for incarnation, number in ((1, 0), (1, 1), (0, 1), (7, 7)):
        for engine in ("d", "nobody"):
            event = HealthAnswered(engine=engine, incarnation=incarnation, number=number, outcome=None)
            assert rig.send(event) == ()
    assert rig.saved() == before


def test_the_last_failure_is_kept_as_the_proxy_saw_it() -> None:
    rig = Rig(prefill("p"), decode("d"), eject_after=1)
    effects = rig.report("d", Outcome.STREAM_CUT, producer="p", detail="closed after 3 tokens", proxy=EDGE)
    (held,) = [r for r in of(effects, Record) if r.kind == "hold_placed"]
    assert "decode leg: stream cut (closed after 3 tokens), on edge/0, handoff of p" in held.message


def test_stage_ticks_without_anything_due_do_nothing() -> None:
    rig = Rig(prefill("p"), decode("d"))
    before = rig.saved()
    for stage in Stage:
        assert rig.tick(stage) == ()
    assert rig.saved() == before


def test_only_finds_one() -> None:
    """The rig's own check: it refuses two where one is meant."""
    rig = Rig(prefill("p"), decode("d"), joined=False)
    with pytest.raises(ValueError):
        only(rig.effects, ProbeHealth)
