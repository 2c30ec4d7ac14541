"""What follows when a class reaches the threshold (spec F3, F6, H2–H4), and an operator's commands."""

from typing import Any

import pytest

from narwhal.control.core.effects import ProbeHealth, ProbeInference, RunCheck
from narwhal.control.core.events import CommandRefusedError, EjectCommand, ProbeCommand, Refusal
from narwhal.control.core.records import EventKind
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase, Stage
from tests.core.rig import Rig, decode, of, only, prefill

C = FailureClass
NOTHING: frozenset[Phase] = frozenset()


def rig_of(**settings: Any) -> Rig:
    """Two pinned engines of each phase, so that a suspect has peers and one leg to prove."""
    engines = (prefill("p1", pinned=True), prefill("p2", pinned=True))
    return Rig(*engines, decode("d1", pinned=True), decode("d2", pinned=True), **settings)


# Spec F3: what three failures of a class bring.
EJECTS = [Outcome.REFUSED]
ASKS_HEALTH = [Outcome.READ_TIMEOUT, Outcome.CONNECT_TIMEOUT, Outcome.HTTP_429, Outcome.HTTP_408]
ASKS_INFERENCE = [Outcome.STREAM_CUT, Outcome.FIRST_TOKEN_TIMEOUT, Outcome.HTTP_5XX, Outcome.HANDOFF_UNUSABLE]


@pytest.mark.rule("F3")
@pytest.mark.parametrize("outcome", EJECTS)
def test_connection_ejects(outcome: Outcome) -> None:
    rig = rig_of()
    rig.report("d1", outcome, count=2)
    assert rig.engine("d1").phases == {Phase.DECODE}
    effects = rig.report("d1", outcome)
    assert rig.holds("d1") == {Hold.EJECTED}
    assert rig.engine("d1").phases == NOTHING
    assert not of(effects, ProbeHealth)
    assert not of(effects, ProbeInference)
    (record,) = rig.records(EventKind.ENGINE_EJECTED)
    assert record.fields["cause"] == "connection"


@pytest.mark.rule("F3")
@pytest.mark.parametrize("outcome", ASKS_HEALTH)
def test_timeout_and_overload_ask_for_health_and_hold_nothing(outcome: Outcome) -> None:
    rig = rig_of()
    rig.report("d1", outcome, count=2)
    assert not of(rig.effects, ProbeHealth)
    probe = only(rig.report("d1", outcome), ProbeHealth)
    assert (probe.engine, probe.url, probe.incarnation, probe.timeout_s) == ("d1", "http://d1", 1, 5.0)
    assert rig.holds("d1") == set()
    rig.answer_health(probe)
    assert rig.streaks("d1") == {}
    assert rig.engine("d1").phases == {Phase.DECODE}


@pytest.mark.rule("F3")
@pytest.mark.parametrize("outcome", ASKS_HEALTH)
@pytest.mark.parametrize(
    "answer",
    [Outcome.REFUSED, Outcome.READ_TIMEOUT, Outcome.HTTP_5XX, Outcome.HTTP_429, Outcome.CLIENT_ERROR, Outcome.RESET],
)
def test_anything_else_than_health_200_ejects(outcome: Outcome, answer: Outcome) -> None:
    rig = rig_of()
    probe = only(rig.report("d1", outcome, count=3), ProbeHealth)
    rig.answer_health(probe, answer, detail="GET /health answered 404")
    assert rig.holds("d1") == {Hold.EJECTED}
    (record,) = rig.records(EventKind.ENGINE_EJECTED)
    assert record.fields["cause"] == "health probe"
    assert "GET /health answered 404" in record.message


@pytest.mark.rule("F3")
@pytest.mark.parametrize("outcome", ASKS_HEALTH)
def test_an_inconclusive_health_probe_is_tried_again(outcome: Outcome) -> None:
    rig = rig_of()
    probe = only(rig.report("d1", outcome, count=3), ProbeHealth)
    rig.answer_health(probe, Outcome.LOCAL)
    assert rig.holds("d1") == set()
    assert not of(rig.tick(Stage.HEALTH), ProbeHealth)
    again = only(rig.run_pass(), ProbeHealth)
    assert again.number != probe.number
    rig.answer_health(probe, Outcome.REFUSED)  # the first one's late answer
    assert rig.holds("d1") == set()
    rig.answer_health(again)
    assert rig.streaks("d1") == {}


@pytest.mark.rule("F3", "F6")
@pytest.mark.parametrize("outcome", ASKS_INFERENCE)
def test_stream_status_and_handoff_hold_at_once_and_ask_for_inference(outcome: Outcome) -> None:
    rig = rig_of()
    rig.report("d1", outcome, count=2)
    revision = rig.fleet.revision
    probe = only(rig.report("d1", outcome), ProbeInference)
    assert rig.holds("d1") == {Hold.VERIFICATION}
    assert rig.fleet.placement(now=rig.now).engines["d1"].phases == NOTHING
    assert rig.fleet.revision > revision
    assert (probe.engine, probe.incarnation, probe.model, probe.tokens) == ("d1", 1, "tiny", 16)
    assert probe.producer is not None
    assert probe.producer.url in ("http://p1", "http://p2")
    assert (probe.consumer.engine, probe.consumer.url) == ("d1", "http://d1")


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", ASKS_INFERENCE)
def test_a_passed_probe_clears_the_hold_and_its_classes_only(outcome: Outcome) -> None:
    rig = rig_of(failure_quarantine_s=100.0)
    rig.report("d1", Outcome.HTTP_429)
    rig.report("d1", Outcome.READ_TIMEOUT)
    effects = rig.report("d1", outcome, count=3)
    assert rig.holds("d1") == {Hold.VERIFICATION, Hold.QUARANTINE}
    rig.pass_probe(effects)
    assert rig.holds("d1") == set()
    assert rig.streaks("d1") == {C.OVERLOAD: 1, C.TIMEOUT: 1}
    assert rig.engine("d1").phases == {Phase.DECODE}


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", ASKS_INFERENCE)
def test_a_failed_leg_ejects(outcome: Outcome) -> None:
    rig = rig_of()
    first = only(rig.report("d1", outcome, count=3), ProbeInference)
    second = only(rig.answer_step(first, Outcome.HANDOFF, Outcome.ERROR_EVENT), ProbeInference)
    assert rig.holds("d1") == {Hold.VERIFICATION}
    rig.answer_step(second, Outcome.HANDOFF, Outcome.ERROR_EVENT)
    assert rig.holds("d1") == {Hold.EJECTED}
    (record,) = rig.records(EventKind.ENGINE_EJECTED)
    assert record.fields["cause"] == "inference probe"


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", ASKS_INFERENCE)
def test_an_inconclusive_probe_keeps_the_hold_and_is_tried_again(outcome: Outcome) -> None:
    rig = rig_of(readmit_every=10, liveness_every=0)
    probe = only(rig.report("d1", outcome, count=3), ProbeInference)
    asked_at = rig.now
    rig.answer_step(probe, Outcome.HANDOFF, Outcome.LOCAL)
    assert rig.holds("d1") == {Hold.VERIFICATION}
    rig.report("d1", Outcome.STREAM_COMPLETE)  # real work that went well does not lift it
    assert rig.holds("d1") == {Hold.VERIFICATION}
    effects = rig.run_pass()
    while not of(effects, ProbeInference):
        effects = rig.run_pass()
    assert rig.now == asked_at + 10
    rig.pass_probe(effects)
    assert rig.holds("d1") == set()


@pytest.mark.rule("F3")
def test_one_probe_at_a_time_and_the_rest_is_counted() -> None:
    rig = rig_of()
    probe = only(rig.report("d1", Outcome.STREAM_CUT, count=3), ProbeInference)
    for outcome in (Outcome.STREAM_CUT, Outcome.HTTP_5XX, Outcome.READ_TIMEOUT, Outcome.HTTP_429):
        effects = rig.report("d1", outcome, count=5)
        assert not of(effects, ProbeInference)
        assert not of(effects, ProbeHealth)
    assert rig.streaks("d1") == {C.STREAM: 8, C.INFERENCE_STATUS: 5, C.TIMEOUT: 5, C.OVERLOAD: 5}
    # What the passed probe does not answer is asked next.
    assert only(rig.works(probe), ProbeHealth).engine == "d1"
    assert rig.holds("d1") == set()


@pytest.mark.rule("F3")
def test_a_refused_connection_ejects_even_while_a_probe_runs() -> None:
    rig = rig_of()
    probe = only(rig.report("d1", Outcome.STREAM_CUT, count=3), ProbeInference)
    rig.report("d1", Outcome.REFUSED, count=3)
    assert rig.holds("d1") == {Hold.EJECTED}
    assert rig.works(probe) == ()
    assert rig.holds("d1") == {Hold.EJECTED}


@pytest.mark.rule("F3")
def test_a_class_that_holds_goes_before_one_that_waits_for_health() -> None:
    """Health is not to be had; then streams break: the hold comes without waiting for the next health probe."""
    rig = rig_of()
    health = only(rig.report("d1", Outcome.READ_TIMEOUT, count=3), ProbeHealth)
    rig.answer_health(health, Outcome.LOCAL)
    assert of(rig.report("d1", Outcome.STREAM_CUT, count=3), ProbeInference)
    assert rig.holds("d1") == {Hold.VERIFICATION}


def test_a_threshold_reached_while_health_was_asked_is_acted_upon_after() -> None:
    rig = rig_of()
    health = only(rig.report("d1", Outcome.READ_TIMEOUT, count=3), ProbeHealth)
    assert not of(rig.report("d1", Outcome.STREAM_CUT, count=3), ProbeInference)
    assert of(rig.answer_health(health), ProbeInference)
    assert rig.holds("d1") == {Hold.VERIFICATION}


@pytest.mark.case("C4")
def test_an_answer_that_never_comes_leaves_one_probe_at_most() -> None:
    rig = rig_of(liveness_every=0)
    first = only(rig.report("d1", Outcome.STREAM_CUT, count=3), ProbeInference)
    bound = first.silence_s * (first.tokens + 2) + 15
    began = rig.now
    asked = [first]
    while len(asked) < 4:
        found = of(rig.run_pass(), ProbeInference)
        assert len(found) <= 1
        if found:
            assert rig.now - began >= bound + 10  # given up, then the interval of retries
            began = rig.now
            asked += found
    assert rig.works(first) == ()
    assert rig.holds("d1") == {Hold.VERIFICATION}
    rig.pass_probe(asked[-1:])
    assert rig.holds("d1") == set()


@pytest.mark.rule("F3")
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_threshold_is_a_setting(limit: int) -> None:
    rig = rig_of(eject_after=limit)
    rig.report("d1", Outcome.REFUSED, count=limit - 1) if limit > 1 else None
    assert rig.holds("d1") == set()
    rig.report("d1", Outcome.REFUSED)
    assert rig.holds("d1") == {Hold.EJECTED}


# --- quarantine -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("H4")
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.READ_TIMEOUT, Outcome.STREAM_CUT, Outcome.HTTP_5XX])
def test_each_counted_failure_quarantines(outcome: Outcome) -> None:
    rig = rig_of(failure_quarantine_s=20.0)
    rig.report("d1", outcome)
    assert rig.holds("d1") == {Hold.QUARANTINE}
    entry = rig.fleet.placement(now=rig.now).engines["d1"]
    assert entry.phases == NOTHING
    assert entry.phases_after_quarantine == {Phase.DECODE}
    assert entry.quarantine_due == rig.now + 20
    rig.now += 15
    rig.report("d1", outcome)
    assert rig.fleet.placement(now=rig.now).engines["d1"].quarantine_due == rig.now + 20


@pytest.mark.rule("H4")
def test_overload_does_not_quarantine_and_neither_does_the_default() -> None:
    rig = rig_of(failure_quarantine_s=20.0)
    rig.report("d1", Outcome.HTTP_429)
    assert rig.holds("d1") == set()
    rig = rig_of()
    rig.report("d1", Outcome.HTTP_5XX)
    assert rig.holds("d1") == set()


@pytest.mark.rule("H4")
def test_the_deadline_ends_the_quarantine_without_a_message() -> None:
    rig = rig_of(failure_quarantine_s=20.0)
    rig.report("d1", Outcome.HTTP_5XX)
    due = rig.now + 20
    assert rig.fleet.next_due() == due
    rig.now = due - 0.001
    assert rig.fleet.placement(now=rig.now).engines["d1"].phases == NOTHING
    rig.now = due
    assert rig.fleet.placement(now=rig.now).engines["d1"].phases == {Phase.DECODE}
    assert rig.fleet.placement(now=rig.now).engines["d1"].quarantine_due is None
    assert rig.holds("d1") == set()


@pytest.mark.rule("H4")
def test_health_200_ends_the_quarantine_at_once() -> None:
    rig = rig_of(failure_quarantine_s=100.0, liveness_every=1)
    rig.report("d1", Outcome.HTTP_5XX)
    for probe in of(rig.run_pass(), ProbeHealth):
        rig.answer_health(probe)
    assert rig.holds("d1") == set()


@pytest.mark.rule("H2", "H4")
def test_in_quarantine_and_under_suspicion_nothing_is_served_afterwards_either() -> None:
    rig = rig_of(failure_quarantine_s=20.0)
    rig.report("d1", Outcome.STREAM_CUT, count=3)
    entry = rig.fleet.placement(now=rig.now).engines["d1"]
    assert entry.phases_after_quarantine == NOTHING
    assert entry.quarantine_due is not None


# --- operators ------------------------------------------------------------------------------------------------------


def test_an_operator_ejects() -> None:
    rig = rig_of()
    rig.send(EjectCommand(engine="d1", reason="smells of smoke"))
    assert rig.holds("d1") == {Hold.EJECTED}
    (record,) = rig.records(EventKind.ENGINE_EJECTED)
    assert (record.fields["cause"], record.message) == (
        "operator",
        "engine d1 ejected (operator): smells of smoke",
    )


@pytest.mark.parametrize("command", [EjectCommand(engine="x", reason=""), ProbeCommand(engine="x")])
def test_a_command_for_an_unknown_engine_is_refused(command: EjectCommand | ProbeCommand) -> None:
    rig = rig_of()
    before = rig.saved()
    with pytest.raises(CommandRefusedError) as refused:
        rig.send(command)
    assert refused.value.refusal is Refusal.NOT_FOUND
    assert rig.saved() == before


def test_what_is_out_cannot_be_ejected() -> None:
    rig = rig_of()
    rig.send(EjectCommand(engine="d1", reason=""))
    before = rig.saved()
    with pytest.raises(CommandRefusedError) as refused:
        rig.send(EjectCommand(engine="d1", reason=""))
    assert refused.value.refusal is Refusal.PRECONDITION
    assert rig.saved() == before


def test_an_operators_probe_holds_nothing_and_a_failed_leg_still_ejects() -> None:
    rig = rig_of()
    probe = only(rig.send(ProbeCommand(engine="d1")), ProbeInference)
    assert rig.holds("d1") == set()
    with pytest.raises(CommandRefusedError):
        rig.send(ProbeCommand(engine="d1"))
    rig.works(probe)
    assert rig.engine("d1").phases == {Phase.DECODE}
    probe = only(rig.send(ProbeCommand(engine="d1")), ProbeInference)
    rig.answer_step(probe, None, Outcome.REFUSED)
    assert rig.holds("d1") == {Hold.EJECTED}


def test_an_operators_inconclusive_probe_is_not_repeated() -> None:
    rig = rig_of(liveness_every=0)
    probe = only(rig.send(ProbeCommand(engine="d1")), ProbeInference)
    rig.answer_step(probe, Outcome.HANDOFF, Outcome.HTTP_429)
    assert rig.holds("d1") == set()
    for _ in range(30):
        assert not of(rig.run_pass(), ProbeInference)


def test_an_operators_probe_of_an_engine_that_is_out_tries_its_gate_now() -> None:
    rig = rig_of()
    rig.send(EjectCommand(engine="d1", reason=""))
    assert only(rig.send(ProbeCommand(engine="d1")), RunCheck).engine == "d1"
    with pytest.raises(CommandRefusedError):
        rig.send(ProbeCommand(engine="d1"))
