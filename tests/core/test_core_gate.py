"""The gate: joining and readmission by the checks that it has (spec R1, R3, R7, R8, C5, C8)."""

import pytest

from narwhal.control.core.effects import RunCheck, RunTransfer
from narwhal.control.core.engine import Move
from narwhal.control.core.events import DrainCommand, EjectCommand, Reloaded, UndrainCommand, Woke
from narwhal.control.core.readmission import GATE
from narwhal.control.core.records import EventKind
from narwhal.control.core.settings import EngineSpec
from narwhal.vocabulary import Check, Hold, Outcome, Phase, Verdict
from tests.core.rig import Rig, decode, of, only, prefill


def checks(rig: Rig, engine: str) -> list[tuple[Check, Verdict]]:
    return [(c.check, c.verdict) for c in rig.engine(engine).checks]


def wait_for_gate(rig: Rig) -> RunCheck:
    """Passes until a gate opens; its first check."""
    for _ in range(1000):
        if found := of(rig.run_pass(), RunCheck):
            return found[0]
    raise AssertionError("no gate was tried")


@pytest.mark.rule("R1")
def test_the_order_of_the_gate() -> None:
    assert [check for check, _ in GATE] == [
        "health",
        "attestation",
        "model",
        "generation",
        "kv_transfer",
        "final_health",
    ]


@pytest.mark.rule("R8")
def test_joining_is_tried_at_once_and_not_before_the_loop_asks() -> None:
    rig = Rig(prefill("p"), decode("d"), joined=False)
    assert rig.holds("d") == {Hold.JOINING}
    assert rig.fleet.incarnations() == {"p": 0, "d": 0}
    assert rig.fleet.next_due() == rig.now
    asked = of(rig.send(Woke()), RunCheck)
    assert [(c.engine, c.check, c.url, c.timeout_s) for c in asked] == [
        ("p", Check.HEALTH, "http://p", 5.0),
        ("d", Check.HEALTH, "http://d", 5.0),
    ]
    assert rig.fleet.next_due() is None
    assert of(rig.send(Woke()), RunCheck) == []


@pytest.mark.rule("R1", "R7", "R8")
def test_checks_run_in_order_and_what_was_not_made_is_not_called_passed() -> None:
    rig = Rig(decode("d"), joined=False)
    effects, asked = rig.send(Woke()), []
    while checks_asked := of(effects, RunCheck):
        asked.append(only(checks_asked, RunCheck))
        assert rig.holds("d") == {Hold.JOINING}
        effects = rig.answer_check(asked[-1])
    assert [c.check for c in asked] == ["health", "model", "generation", "final_health"]
    assert (asked[1].url, asked[1].model) == ("http://d", "tiny")
    assert rig.holds("d") == set()
    assert rig.fleet.incarnations() == {"d": 1}
    assert checks(rig, "d") == [
        ("health", Verdict.PASS),
        ("attestation", Verdict.NOT_CONFIGURED),
        ("model", Verdict.PASS),
        ("generation", Verdict.PASS),
        ("kv_transfer", Verdict.NOT_TESTED),
        ("final_health", Verdict.PASS),
    ]
    assert EventKind.ENGINE_JOINED in rig.kinds()


@pytest.mark.rule("R7")
@pytest.mark.parametrize(("verdict", "held"), [(Verdict.PASS, set()), (Verdict.FAIL, {Hold.JOINING})])
def test_an_attestation_that_is_configured_is_asked_for_and_decides(verdict: Verdict, held: set[Hold]) -> None:
    attested = EngineSpec(id="d", url="http://d", role=Phase.DECODE, attestation_url="http://d:9/attestation")
    rig = Rig(attested, attested=True, joined=False)
    asked = only(rig.answer_check(only(rig.send(Woke()), RunCheck)), RunCheck)
    assert (asked.check, asked.attestation_url, asked.url) == ("attestation", "http://d:9/attestation", "http://d")
    rig.pass_gate(rig.answer_check(asked, verdict))
    assert rig.holds("d") == held
    assert dict(checks(rig, "d"))[Check.ATTESTATION] is verdict


@pytest.mark.rule("R1", "R8")
@pytest.mark.parametrize("check", [Check.HEALTH, Check.MODEL, Check.GENERATION, Check.FINAL_HEALTH])
@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INCONCLUSIVE])
def test_the_gate_stops_at_the_first_check_that_does_not_pass(check: Check, verdict: Verdict) -> None:
    rig = Rig(prefill("p"), decode("d"), joined=False)
    rig.checks[check] = verdict
    rig.let_in()
    assert rig.holds("d") == {Hold.JOINING}
    assert checks(rig, "d")[-1] == (check, verdict)
    assert rig.fleet.incarnations() == {"p": 0, "d": 0}


@pytest.mark.rule("R3", "R8")
def test_joining_is_tried_again_at_every_interval() -> None:
    rig = Rig(decode("d"), joined=False, readmit_every=7)
    rig.checks[Check.HEALTH] = Verdict.FAIL
    rig.let_in()
    for number in range(1, 4):
        rig.answer_check(wait_for_gate(rig))
        assert rig.now == 1000 + 7 * number
    rig.checks[Check.HEALTH] = Verdict.PASS
    rig.readmit("d")
    assert rig.now == 1000 + 28
    assert rig.holds("d") == set()


@pytest.mark.rule("R3", "R8")
@pytest.mark.parametrize(("before", "after"), [(50, 5), (5, 50)])
def test_another_interval_holds_from_the_next_try_on(before: int, after: int) -> None:
    rig = Rig(decode("d"), joined=False, readmit_every=before)
    rig.checks[Check.HEALTH] = Verdict.FAIL
    rig.let_in()
    rig.send(Reloaded(settings=rig.with_settings(readmit_every=after)))
    for at in (before, before + after, before + 2 * after):
        rig.answer_check(wait_for_gate(rig))
        assert rig.now == 1000 + at


@pytest.mark.case("C5", "C8")
def test_a_lasting_failure_is_told_once_and_never_as_an_ejection() -> None:
    rig = Rig(decode("d"), joined=False)
    rig.answer_check(only(rig.send(Woke()), RunCheck), Verdict.FAIL, detail="connection refused")
    for _ in range(5):
        rig.answer_check(wait_for_gate(rig), Verdict.FAIL, detail="connection refused")
    assert len(rig.records(EventKind.ENGINE_CHECK_FAILED)) == 1
    rig.answer_check(wait_for_gate(rig), Verdict.FAIL, detail="GET /health answered 404")
    assert len(rig.records(EventKind.ENGINE_CHECK_FAILED)) == 2
    assert EventKind.ENGINE_EJECTED not in rig.kinds()


def test_an_answer_to_an_older_question_or_another_check_is_dropped() -> None:
    rig = Rig(decode("d"), joined=False)
    health = only(rig.send(Woke()), RunCheck)
    rig.answer_check(health, Verdict.FAIL)
    again = wait_for_gate(rig)
    assert rig.answer_check(health) == ()
    before = rig.saved()
    model = RunCheck(engine="d", url="", incarnation=0, number=again.number, check=Check.MODEL)
    assert rig.answer_check(model) == ()
    assert rig.saved() == before
    assert only(rig.answer_check(again), RunCheck).check is Check.MODEL


def test_a_check_whose_answer_never_comes_is_given_up() -> None:
    rig = Rig(decode("d"), joined=False)
    first = only(rig.send(Woke()), RunCheck)
    second = wait_for_gate(rig)
    assert second.number != first.number
    assert rig.now >= 1015
    assert rig.answer_check(first) == ()


@pytest.mark.rule("R3")
def test_an_ejected_engine_comes_back_by_itself_after_an_interval() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0)
    rig.now += 100
    rig.report("d", Outcome.REFUSED, count=3)
    out_at = rig.now
    assert rig.engine("d").gate_in_s == 10
    rig.readmit("d")
    assert rig.now == out_at + 10
    assert rig.holds("d") == set()
    assert EventKind.ENGINE_READMITTED in rig.kinds()


@pytest.mark.rule("R3")
def test_the_interval_doubles_with_each_ejection_soon_after_a_return() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0, readmit_every=10, relapse_window_s=60.0)
    rig.now += 1000
    waited = []
    for _ in range(8):
        rig.send(EjectCommand(engine="d", reason="flaps"))
        waited.append(rig.engine("d").gate_in_s)
        rig.readmit("d")
        rig.now += 59.9
    assert waited == [10, 20, 40, 80, 160, 300, 300, 300]
    rig.now += 0.1
    rig.send(EjectCommand(engine="d", reason="once more"))
    assert rig.engine("d").gate_in_s == 10


@pytest.mark.rule("R3")
def test_a_failed_gate_is_tried_again_at_the_same_interval() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0)
    rig.now += 1000
    rig.report("d", Outcome.REFUSED, count=3)
    out_at = rig.now
    rig.checks[Check.HEALTH] = Verdict.FAIL
    for number in range(1, 4):
        rig.answer_check(wait_for_gate(rig))
        assert rig.now == out_at + 10 * number


@pytest.mark.rule("R3")
def test_a_drained_engine_does_not_go_through_the_gate_by_itself() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0)
    rig.report("d", Outcome.REFUSED, count=3)
    rig.send(DrainCommand(engines=("d",), reason="disk", deadline_s=300.0, restart=False, wall=0.0))
    for _ in range(30):
        assert not of(rig.run_pass(), RunCheck)
    assert rig.holds("d") == {Hold.DRAIN, Hold.EJECTED}
    rig.pass_gate(rig.send(UndrainCommand(engines=("d",))))
    assert rig.holds("d") == set()
    assert rig.fleet._engines["d"].may(Move.EJECT)


@pytest.mark.rule("R1")
def test_the_time_that_transfers_took_is_kept_and_shown() -> None:
    """A first transfer may take seconds, and an operator wants to know."""
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), joined=False)
    effects = list(rig.send(Woke()))
    while not (transfers := of(effects, RunTransfer)):
        effects = [e for check in of(effects, RunCheck) for e in rig.answer_check(check)]
    rig.now += 8.0
    rig.answer_transfer(only(transfers, RunTransfer))
    took = {name: {c.check: c.latency_s for c in rig.engine(name).checks}[Check.KV_TRANSFER] for name in ("p", "d")}
    assert took == {"p": 8.0, "d": 8.0}
