"""The way back from a drain: its gate, commands that cannot be done, what comes of a failure (spec R4, R5)."""

from dataclasses import replace
from typing import Any

import pytest

from narwhal.control.core.effects import Effect, ProbeInference, RunCheck
from narwhal.control.core.events import DrainCommand, ProcessIdentity, Refusal, UndrainCommand
from narwhal.control.core.records import EventKind
from narwhal.vocabulary import Check, Hold, Outcome, Verdict
from tests.core.drain_rig import FLEET, NEWER, WALL, Ops, refusal
from tests.core.rig import EDGE, PROCESS, of


@pytest.mark.rule("R1", "R4")
@pytest.mark.parametrize(
    ("recorded", "answers", "restart", "passes"),
    [
        (PROCESS, PROCESS, True, False),
        (PROCESS, replace(PROCESS, started_at=PROCESS.started_at + 0.3), True, False),  # rounding
        (PROCESS, replace(PROCESS, started_at=PROCESS.started_at - 60), True, False),
        (PROCESS, replace(PROCESS, version="0.33.0"), True, False),  # not newer by its start
        (PROCESS, NEWER, True, True),
        (PROCESS, PROCESS, False, True),
        # Unknown: newer than the drain itself.
        (None, PROCESS, True, False),
        (None, replace(PROCESS, started_at=WALL), True, False),
        (None, NEWER, True, True),
        (None, PROCESS, False, True),
    ],
)
def test_planned_maintenance_asks_for_a_newer_start(
    recorded: ProcessIdentity | None, answers: ProcessIdentity, restart: bool, passes: bool
) -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", restart=restart, identity=recorded)
    rig.processes["d"] = answers
    rig.undrain("d")
    assert rig.holds("d") == (set() if passes else {Hold.DRAIN})
    verdict, words = rig.check("d", Check.GENERATION)
    assert verdict is (Verdict.PASS if passes else Verdict.FAIL)
    if passes:
        assert rig.fleet.incarnations()["d"] == 2
        assert rig.engine("d").drain is None
    else:
        assert words.startswith("not restarted: ")


def tried(at: Check, identity: ProcessIdentity | None) -> tuple[Verdict, str]:
    """The check `at` of a gate, in which the engine says to be this process; it stays out."""
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", restart=False)
    waiting: list[Effect] = list(rig.send(UndrainCommand(engines=("d",))))
    while waiting:
        asked = waiting.pop(0)
        if isinstance(asked, RunCheck) and asked.check is at:
            waiting += rig.answer_check(asked, identity=identity)
        else:
            waiting += rig.pass_one(asked)
    assert rig.holds("d") == {Hold.DRAIN}
    return rig.check("d", at)


@pytest.mark.rule("R1")
@pytest.mark.parametrize("at", [Check.GENERATION, Check.FINAL_HEALTH])
def test_a_process_that_changes_while_the_gate_is_tried_fails_it(at: Check) -> None:
    verdict, words = tried(at, NEWER)
    assert verdict is Verdict.FAIL
    assert words.startswith("the process changed while the gate was tried: ")


@pytest.mark.rule("R1")
@pytest.mark.parametrize("at", [Check.GENERATION, Check.FINAL_HEALTH])
def test_an_engine_that_does_not_say_which_process_it_is_does_not_pass(at: Check) -> None:
    assert tried(at, None)[0] is Verdict.FAIL


@pytest.mark.rule("R5")
@pytest.mark.parametrize("check", [Check.HEALTH, Check.MODEL, Check.GENERATION, Check.FINAL_HEALTH])
def test_a_failed_gate_leaves_the_drain_in_place_and_says_which_check_and_why(check: Check) -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", restart=False)
    for number in (1, 2):  # told each time: somebody asked
        rig.checks[check] = Verdict.FAIL
        rig.undrain("d")
        rig.checks[check] = Verdict.PASS
        told = rig.records(EventKind.UNDRAIN_FAILED)
        assert len(told) == number
        assert told[-1].message == f"engine d stays drained: its check {check}: fail: seen"
        assert dict(told[-1].fields) == {"failed": "d", "check": check, "result": "fail", "detail": "seen"}
        assert rig.holds("d") == {Hold.DRAIN}
        assert rig.settled("d")
    for _ in range(30):
        assert of(rig.run_pass(), RunCheck) == []  # not tried again by itself
    rig.undrain("d")
    assert rig.holds("d") == set()


@pytest.mark.rule("R5")
def test_several_drained_engines_return_each_by_itself() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", "e")
    rig.processes["d"] = NEWER
    rig.undrain("d", "e")
    assert rig.holds("d") == set()
    assert rig.holds("e") == {Hold.DRAIN}
    assert [r.engine for r in rig.records(EventKind.UNDRAIN_FAILED)] == ["e"]


def test_a_drained_engine_that_is_ejected_while_it_is_tried_comes_back_when_it_passes() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.drain("d", restart=False)
    rig.out()
    rig.ack(d=3)
    effects = rig.send(UndrainCommand(engines=("d",)))
    rig.report("d", Outcome.REFUSED, count=3)
    assert rig.holds("d") == {Hold.DRAIN, Hold.EJECTED}
    rig.pass_gate(effects)
    assert rig.holds("d") == set()


@pytest.mark.rule("R5", "F3")
def test_a_drained_engine_that_is_suspected_while_it_is_tried_returns_without_the_suspicion() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.drain("d", restart=False)
    rig.out()
    rig.ack(d=3)
    effects = rig.send(UndrainCommand(engines=("d",)))
    asked = of(rig.report("d", Outcome.STREAM_CUT, count=3), ProbeInference)
    assert rig.holds("d") == {Hold.DRAIN, Hold.VERIFICATION}
    rig.pass_gate(effects)
    assert rig.holds("d") == set()
    assert rig.engine("d").suspicion == ""
    for probe in asked:  # it asked about an incarnation that is over
        rig.answer_step(probe, produced=Outcome.HANDOFF, consumed=Outcome.REFUSED)
    assert rig.holds("d") == set()


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (UndrainCommand(engines=("x",)), (Refusal.NOT_FOUND, "no engine x in this fleet")),
        (UndrainCommand(engines=("p",)), (Refusal.PRECONDITION, "engine p is not drained")),
        (UndrainCommand(engines=("d", "p")), (Refusal.PRECONDITION, "engine p is not drained")),
        (
            DrainCommand(engines=("x",), reason="", deadline_s=1.0, restart=True, wall=0.0),
            (Refusal.NOT_FOUND, "no engine x in this fleet"),
        ),
        (
            DrainCommand(engines=("p", "d"), reason="", deadline_s=1.0, restart=True, wall=0.0),
            (Refusal.PRECONDITION, "already drained: d"),
        ),
    ],
)
def test_a_command_that_cannot_be_done_changes_nothing(command: Any, refused: tuple[Refusal, str]) -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d")
    assert refusal(rig, command) == refused


def test_one_that_is_on_its_way_back_is_not_asked_for_twice() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d")
    rig.send(UndrainCommand(engines=("d",)))
    assert refusal(rig, UndrainCommand(engines=("d",)))[0] is Refusal.PRECONDITION


def test_a_gate_whose_answer_is_lost_fails_the_return() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d")
    rig.send(UndrainCommand(engines=("d",)))
    rig.now += 1000
    rig.run_pass()
    (told,) = rig.records(EventKind.UNDRAIN_FAILED)
    assert "inconclusive: no answer came back" in told.message
