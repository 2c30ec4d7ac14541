"""The gate, question by question: what is asked, how long it waits, and what people read meanwhile (spec R1–R7)."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from narwhal.control.core.effects import CaptureIdentity, Effect, RunCheck, RunTransfer, Target
from narwhal.control.core.events import (
    DrainCommand,
    EjectCommand,
    ProbeCommand,
    ProcessIdentity,
    Reloaded,
    UndrainCommand,
    Woke,
)
from narwhal.control.core.records import EventKind
from narwhal.control.core.settings import EngineSpec
from narwhal.vocabulary import Check, Hold, Outcome, Phase, Stage, Verdict
from tests.core.rig import PROCESS, Rig, decode, of, only, prefill

NEWER = replace(PROCESS, started_at=PROCESS.started_at + 60)
OLD_WORDS = "version 0.32.0 started at 1700000000.250"
NEW_WORDS = "version 0.32.0 started at 1700000060.250"
PINNED = (prefill("p1", pinned=True), prefill("p2", pinned=True), decode("d1", pinned=True))


def lines(rig: Rig, engine: str) -> tuple[str, ...]:
    return rig.fleet.explain(engine, now=rig.now).lines


def gate_line(rig: Rig, engine: str) -> str:
    """What its gate is doing; empty for nothing."""
    return next(
        (line for line in lines(rig, engine) if line.startswith("its gate is being") or "has passed" in line), ""
    )


def check_line(rig: Rig, engine: str, check: Check) -> str:
    return next(line for line in lines(rig, engine) if line.startswith(f"check {check}: "))


def up_to(rig: Rig, check: Check, effects: Iterable[Effect]) -> list[Effect]:
    """Pass the checks before this one, of all that are asked; what is asked then."""
    waiting = list(effects)
    while any(isinstance(e, RunCheck) and e.check is not check for e in waiting):
        asked = waiting.pop(0)
        waiting += rig.answer_check(asked) if isinstance(asked, RunCheck) and asked.check is not check else [asked]
    return waiting


def drained(*engines: str, restart: bool = True, identity: ProcessIdentity | None = PROCESS, wall: float = 0.0) -> Rig:
    """These are ready to stop."""
    rig = Rig(*PINNED, liveness_every=0)
    rig.send(DrainCommand(engines=engines, reason="disk", deadline_s=300.0, restart=restart, wall=wall))
    for capture in of([*rig.publish(), *rig.publish()], CaptureIdentity):
        rig.answer_capture(capture, identity)
    return rig


@pytest.mark.rule("R1", "R7")
def test_each_check_is_asked_with_what_it_needs() -> None:
    url = "http://d:9/attestation"
    engine = EngineSpec(id="d", url="http://d", role=Phase.DECODE, attestation_url=url)
    rig = Rig(engine, joined=False, attested=True, health_timeout_s=4.0, first_token_timeout_s=6.0)
    effects, asked = rig.send(Woke()), []
    while found := of(effects, RunCheck):
        asked.append(only(found, RunCheck))
        effects = rig.answer_check(asked[-1])
    first = asked[0].number
    expected = [
        (Check.HEALTH, 4.0, ""),
        (Check.ATTESTATION, 4.0, url),
        (Check.MODEL, 4.0, ""),
        (Check.GENERATION, 6.0, ""),  # its one token may take as long as a first token
        (Check.FINAL_HEALTH, 4.0, ""),
    ]
    assert asked == [
        RunCheck(
            engine="d",
            url="http://d",
            incarnation=0,
            number=first + n,
            check=check,
            model="tiny",
            timeout_s=timeout_s,
            attestation_url=attestation_url,
        )
        for n, (check, timeout_s, attestation_url) in enumerate(expected)
    ]


@pytest.mark.rule("R7")
@pytest.mark.parametrize(("attested", "url"), [(False, "http://d:9/attestation"), (True, "")])
def test_without_a_contract_or_an_address_there_is_no_attestation_to_ask_for(attested: bool, url: str) -> None:
    engine = EngineSpec(id="d", url="http://d", role=Phase.DECODE, attestation_url=url)
    rig = Rig(engine, attested=attested)
    assert check_line(rig, "d", Check.ATTESTATION) == (
        "check attestation: not configured: no attestation is configured for this engine (0.0 s ago, took 0 ms)"
    )


@pytest.mark.rule("R1")
@pytest.mark.parametrize(
    ("check", "waits_s"),
    [
        # For each request that the check makes, its time-out and ten seconds beside.
        (Check.HEALTH, 3 * (4.0 + 10.0)),
        (Check.MODEL, 4.0 + 10.0),
        (Check.GENERATION, 3 * (6.0 + 10.0)),
        (Check.FINAL_HEALTH, 3 * (4.0 + 10.0)),
    ],
)
def test_an_answer_that_does_not_come_is_waited_for_as_long_as_its_requests_may_take(
    check: Check, waits_s: float
) -> None:
    rig = Rig(decode("d"), joined=False, health_timeout_s=4.0, first_token_timeout_s=6.0, readmit_every=1000)
    up_to(rig, check, rig.send(Woke()))
    assert gate_line(rig, "d") == f"its gate is being tried: check {check} under way"
    rig.now += waits_s - 0.1
    rig.tick(Stage.READMISSION)
    assert gate_line(rig, "d") != ""
    rig.now += 0.1
    rig.tick(Stage.READMISSION)
    assert gate_line(rig, "d") == ""
    assert rig.records(EventKind.ENGINE_CHECK_FAILED)[-1].message == (
        f"engine d is kept from joining: check {check}: inconclusive: no answer came back"
    )


@pytest.mark.rule("R1", "R2")
def test_what_a_gate_is_doing() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    assert gate_line(rig, "d1") == ""
    rig.send(EjectCommand(engine="d1", reason="x"))
    assert gate_line(rig, "d1") == ""
    effects: list[Effect] = list(rig.send(ProbeCommand(engine="d1")))
    assert gate_line(rig, "d1") == "its gate is being tried: check health under way"
    assert "its gate is tried next in 10.0 s" in lines(rig, "d1")
    effects = up_to(rig, Check.FINAL_HEALTH, effects)
    assert gate_line(rig, "d1") == ("its gate is being tried: check kv_transfer under way (transfers under way: p1→d1)")
    first = only(effects, RunTransfer)
    second = only(rig.answer_transfer(first), RunTransfer)
    assert gate_line(rig, "d1").endswith("check kv_transfer under way (transfers under way: p2→d1)")
    rig.now += 2.5
    last = only(rig.answer_transfer(second), RunCheck)
    assert gate_line(rig, "d1") == "its gate is being tried: check final_health under way"
    assert check_line(rig, "d1", Check.KV_TRANSFER) == (
        "check kv_transfer: pass: it read handoffs of p1, p2 (0.0 s ago, took 2500 ms)"
    )
    rig.answer_check(last)
    assert gate_line(rig, "d1") == ""
    assert lines(rig, "d1")[0] == "engine d1 is eligible: serves decode (role decode, pinned, incarnation 2)"
    assert not any("tried next" in line for line in lines(rig, "d1"))


@pytest.mark.rule("R2", "F8")
def test_a_transfer_is_asked_for_with_both_engines_and_two_tokens() -> None:
    rig = Rig(*PINNED, liveness_every=0, kv_first_pull_timeout_s=20.0)
    rig.send(EjectCommand(engine="d1", reason="x"))
    asked = up_to(rig, Check.FINAL_HEALTH, rig.send(ProbeCommand(engine="d1")))
    transfer = only(asked, RunTransfer)
    assert transfer == RunTransfer(
        engine="d1",
        incarnation=1,
        number=transfer.number,
        model="tiny",
        tokens=2,
        producer=Target(engine="p1", url="http://p1", incarnation=1),
        consumer=Target(engine="d1", url="http://d1", incarnation=1),
        silence_s=20.0,
    )
    # Each token, the prefill leg and the terminal marker may take the whole silence, and the shell 15 s more.
    rig.now += 4 * 20.0 + 14.9
    assert of(rig.tick(Stage.READMISSION), RunTransfer) == []
    rig.now += 0.1
    assert only(rig.tick(Stage.READMISSION), RunTransfer).producer.engine == "p1"  # once more


@pytest.mark.rule("R2")
def test_candidates_without_a_peer_wait_for_the_gates_that_are_open() -> None:
    rig = Rig(*PINNED, joined=False, liveness_every=0)
    asked = {c.engine: c for c in of(rig.send(Woke()), RunCheck)}
    rig.pass_gate(rig.answer_check(asked["p1"]))
    assert gate_line(rig, "p1") == (
        "its gate is being tried: check kv_transfer under way (no eligible peer: waiting for the gates of d1, p2)"
    )
    rig.answer_check(asked["d1"], Verdict.FAIL, detail="connection refused")
    assert gate_line(rig, "p1").endswith("(no eligible peer: waiting for the gates of p2)")
    rig.answer_check(asked["p2"], Verdict.FAIL, detail="connection refused")
    # Nobody is left to wait for: not tested, which is not passed.
    assert gate_line(rig, "p1") == "its gate is being tried: check final_health under way"
    assert check_line(rig, "p1", Check.KV_TRANSFER) == "check kv_transfer: not tested: no peer (0.0 s ago, took 0 ms)"


@pytest.mark.rule("R6")
def test_a_gate_that_has_passed_waits_for_the_rest_of_the_fleet() -> None:
    rig = drained("p1", "p2", "d1", restart=False)
    waiting = up_to(rig, Check.FINAL_HEALTH, rig.send(UndrainCommand(engines=("p1", "p2", "d1"))))
    while transfers := of(waiting, RunTransfer):
        waiting = [e for e in waiting if not isinstance(e, RunTransfer)]
        for transfer in transfers:
            waiting += rig.answer_transfer(transfer)
    last = {c.engine: c for c in of(waiting, RunCheck)}
    assert {c.check for c in last.values()} == {Check.FINAL_HEALTH}
    rig.answer_check(last["p1"])
    assert gate_line(rig, "p1") == "its gate has passed: waiting for d1, p2"
    rig.answer_check(last["p2"])
    assert gate_line(rig, "p1") == "its gate has passed: waiting for d1"
    rig.answer_check(last["d1"])
    assert [rig.holds(e) for e in ("p1", "p2", "d1")] == [set(), set(), set()]
    assert [dict(e.gates) for e in rig.engines()] == [{(Verdict.PASS, ""): 2}] * 3


@pytest.mark.rule("R6", "S2")
def test_one_that_leaves_the_fleet_under_a_return_is_named_to_those_that_stay_out() -> None:
    rig = drained("p1", "p2", "d1", restart=False)
    rig.send(UndrainCommand(engines=("p1", "p2", "d1")))
    rig.send(Reloaded(settings=rig.with_settings(engines=PINNED[:2])))
    words = "engine d1's check health: inconclusive: it is not the engine that was to come back any more"
    assert [(r.engine, r.message) for r in rig.records(EventKind.UNDRAIN_FAILED)] == [
        ("p1", f"engine p1 stays drained: {words}"),
        ("p2", f"engine p2 stays drained: {words}"),
    ]
    assert gate_line(rig, "p1") == gate_line(rig, "p2") == ""


# --- which process answers --------------------------------------------------------------------------------------------


def returning(rig: Rig, at: Check, identity: ProcessIdentity | None) -> str:
    """d1 is to come back; what its check `at` says when it is answered by this process."""
    waiting: list[Effect] = list(rig.send(UndrainCommand(engines=("d1",))))
    while waiting:
        asked = waiting.pop(0)
        if isinstance(asked, RunCheck) and asked.check is at:
            waiting += rig.answer_check(asked, identity=identity)
        else:
            waiting += rig.pass_one(asked)
    found = next(c for c in rig.engine("d1").checks if c.check is at)
    return f"{found.verdict}: {found.detail}"


@pytest.mark.rule("R1", "R4")
@pytest.mark.parametrize(
    ("captured", "at", "answers", "words"),
    [
        (PROCESS, Check.GENERATION, PROCESS, f"fail: not restarted: {OLD_WORDS} answers, a process newer than the "
         "drained one (1700000000.250) is asked for"),
        (None, Check.GENERATION, PROCESS, f"fail: not restarted: {OLD_WORDS} answers, a process newer than the drain, "
         "whose process is unknown, (1700000030.000) is asked for"),
        (PROCESS, Check.GENERATION, NEWER, "fail: the process changed while the gate was tried: "
         f"{NEW_WORDS} answers, it began with {OLD_WORDS}"),
        (PROCESS, Check.GENERATION, None, "fail: the engine does not say which process it is: GET /version and "
         "GET /metrics must"),
    ],
)  # fmt: skip
def test_the_process_that_answers_is_named(
    captured: ProcessIdentity | None, at: Check, answers: ProcessIdentity | None, words: str
) -> None:
    rig = drained("d1", identity=captured, wall=PROCESS.started_at + 29.75)
    assert returning(rig, at, answers) == words
    assert rig.holds("d1") == {Hold.DRAIN}


@pytest.mark.rule("R1")
def test_the_last_check_is_of_the_process_with_which_the_gate_began() -> None:
    rig = drained("d1", restart=False)
    assert returning(rig, Check.FINAL_HEALTH, NEWER) == (
        f"fail: the process changed while the gate was tried: {NEW_WORDS} answers, it began with {OLD_WORDS}"
    )
    # The next try begins with whoever answers then.
    rig.processes["d1"] = NEWER
    assert returning(rig, Check.FINAL_HEALTH, NEWER) == "pass: seen"
    assert rig.engine("d1").identity == NEWER


# --- when a gate is tried ---------------------------------------------------------------------------------------------


@pytest.mark.rule("R3")
def test_an_operator_has_a_gate_tried_at_once_and_hears_what_comes_of_it_even_if_it_is_no_news() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    rig.checks[Check.HEALTH] = Verdict.FAIL
    rig.send(EjectCommand(engine="d1", reason="x"))
    for number in (1, 2):
        rig.pass_gate(rig.send(ProbeCommand(engine="d1")))
        assert len(rig.records(EventKind.ENGINE_CHECK_FAILED)) == number
    rig.now += 10.0
    rig.pass_gate(rig.run_pass())
    assert len(rig.records(EventKind.ENGINE_CHECK_FAILED)) == 2
    assert rig.engine("d1").gates == {(Verdict.PASS, ""): 1, (Verdict.FAIL, "health"): 3}


@pytest.mark.rule("R4", "R5")
def test_a_drain_keeps_the_gate_shut_and_its_instant_is_not_shown() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    rig.report("d1", Outcome.REFUSED, count=3)
    assert rig.engine("d1").gate_in_s == 10.0
    rig.send(DrainCommand(engines=("d1",), reason="disk", deadline_s=300.0, restart=False, wall=0.0))
    assert rig.engine("d1").gate_in_s is None
    assert rig.saved().engines["d1"].gate_in_s == 10.0  # it is ejected still, and a takeover must know since when
    assert rig.saved().engines["p1"].gate_in_s is None


@pytest.mark.rule("R5")
def test_an_ejected_engine_whose_return_has_failed_stays_drained_and_is_not_tried_by_itself() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    rig.report("d1", Outcome.REFUSED, count=3)
    rig.send(DrainCommand(engines=("d1",), reason="disk", deadline_s=9000.0, restart=False, wall=0.0))
    rig.checks[Check.HEALTH] = Verdict.FAIL
    rig.pass_gate(rig.send(UndrainCommand(engines=("d1",))))
    assert rig.holds("d1") == {Hold.DRAIN, Hold.EJECTED}
    assert len(rig.records(EventKind.UNDRAIN_FAILED)) == 1
    for _ in range(30):
        assert of(rig.run_pass(), RunCheck) == []
    rig.checks[Check.HEALTH] = Verdict.PASS
    rig.pass_gate(rig.send(UndrainCommand(engines=("d1",))))
    assert rig.holds("d1") == set()


@pytest.mark.rule("R4")
def test_a_gate_that_a_drain_cancels_leaves_no_answer_to_wait_for() -> None:
    rig = Rig(*PINNED, liveness_every=0, readmit_every=1000)
    rig.send(EjectCommand(engine="d1", reason="x"))
    health = only(rig.send(ProbeCommand(engine="d1")), RunCheck)
    rig.send(DrainCommand(engines=("d1",), reason="disk", deadline_s=9000.0, restart=False, wall=0.0))
    assert gate_line(rig, "d1") == ""
    assert of(rig.answer_check(health), RunCheck) == []
    rig.now += 100.0
    assert rig.run_pass() == []
    assert rig.records(EventKind.ENGINE_CHECK_FAILED) == []


@pytest.mark.rule("R4")
def test_a_candidate_that_is_drained_under_its_transfers_is_tried_with_nobody_any_more() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    rig.send(EjectCommand(engine="d1", reason="x"))
    transfer = only(up_to(rig, Check.FINAL_HEALTH, rig.send(ProbeCommand(engine="d1"))), RunTransfer)
    rig.send(DrainCommand(engines=("d1",), reason="disk", deadline_s=9000.0, restart=False, wall=0.0))
    assert of(rig.answer_transfer(transfer), RunTransfer) == []
    for _ in range(30):
        assert of(rig.run_pass(), RunTransfer) == []
    assert gate_line(rig, "d1") == ""


@pytest.mark.rule("R2")
def test_a_peer_that_is_ejected_under_a_transfer_is_no_peer_any_more() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    rig.send(EjectCommand(engine="d1", reason="x"))
    transfer = only(up_to(rig, Check.FINAL_HEALTH, rig.send(ProbeCommand(engine="d1"))), RunTransfer)
    assert transfer.producer.engine == "p1"
    rig.send(EjectCommand(engine="p1", reason="x"))
    assert rig.answer_transfer(transfer, Outcome.REFUSED, None) == ()
    asked = only(rig.tick(Stage.READMISSION), RunTransfer)
    assert asked.producer.engine == "p2"
    rig.pass_gate([asked])
    assert rig.holds("d1") == set()


@pytest.mark.rule("R3", "R5")
def test_one_that_is_ejected_while_an_operator_has_it_tried_is_due_an_interval_later() -> None:
    rig = drained("d1", restart=False)
    rig.now += 1000.0
    rig.send(UndrainCommand(engines=("d1",)))
    rig.send(EjectCommand(engine="d1", reason="x"))
    assert gate_line(rig, "d1") == "its gate is being tried: check health under way"
    assert rig.saved().engines["d1"].gate_in_s == 10.0


@pytest.mark.rule("R2", "R3")
@pytest.mark.parametrize(("flaps", "called"), [(1, True), (2, False)])
def test_engines_that_keep_coming_and_going_are_not_called_to_be_peers(flaps: int, called: bool) -> None:
    """d1 comes to the transfer check without a peer; p1 is out too, and its own interval may have grown."""
    rig = Rig(prefill("p1", pinned=True), decode("d1", pinned=True), decode("d2", pinned=True), liveness_every=0)
    rig.now += 1000.0  # long since admitted
    rig.send(EjectCommand(engine="p1", reason="flaps"))
    for _ in range(flaps - 1):
        rig.readmit("p1")
        rig.send(EjectCommand(engine="p1", reason="flaps"))
    rig.send(EjectCommand(engine="d1", reason="x"))
    up_to(rig, Check.KV_TRANSFER, rig.send(ProbeCommand(engine="d1")))
    assert (gate_line(rig, "p1") != "") is called
