"""Drains and maintenance: what settles them, what they wait for, what survives, and the way back (spec R4–R6)."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from narwhal.control.core.effects import CaptureIdentity, Effect, ProbeHealth, ProbeInference, RunCheck, RunTransfer
from narwhal.control.core.events import (
    CommandRefusedError,
    DrainCommand,
    EjectCommand,
    ForgetCommand,
    ProcessIdentity,
    ProxyAcked,
    ProxyConnected,
    ProxyLeft,
    ProxyLost,
    Refusal,
    Reloaded,
    UndrainCommand,
    Woke,
)
from narwhal.control.core.handoff import aged, from_document, to_document
from narwhal.control.core.records import EventKind, Record
from narwhal.reports import ProxyKey
from narwhal.vocabulary import Check, Hold, Outcome, Stage, Verdict
from tests.core.rig import EDGE, OTHER, PROCESS, Rig, decode, of, only, prefill

NEWER = ProcessIdentity(version=PROCESS.version, started_at=PROCESS.started_at + 60)
WALL = PROCESS.started_at + 30  # of the commands: after the process that runs, before the one that comes
FLEET = (prefill("p"), decode("d"), decode("e"))


class Ops(Rig):
    """A fleet with its proxies and its operator."""

    def drain(self, *engines: str, deadline_s: float = 300.0, restart: bool = True) -> tuple[Effect, ...]:
        command = DrainCommand(engines=engines, reason="disk", deadline_s=deadline_s, restart=restart, wall=WALL)
        return self.send(command)

    def undrain(self, *engines: str) -> list[Effect]:
        effects = self.send(UndrainCommand(engines=engines))
        return [*effects, *self.pass_gate(effects)]

    def hello(self, *proxies: ProxyKey) -> None:
        for proxy in proxies:
            self.send(ProxyConnected(proxy=proxy, address="x:1", pid=1, highest_epoch=0))

    def ack(self, proxy: ProxyKey = EDGE, *, unread: dict[str, int] | None = None, **legs: int) -> tuple[Effect, ...]:
        """It applies the newest placement, and has these legs."""
        return self.send(ProxyAcked(proxy=proxy, epoch=1, version=self.version, resident=legs, unread=unread or {}))

    def out(self, identity: ProcessIdentity | None = PROCESS) -> None:
        """What is decided is published, and who was asked for an identity gives it."""
        for capture in of(self.publish(), CaptureIdentity):
            self.answer_capture(capture, identity)

    def settle(self, *engines: str, restart: bool = True, identity: ProcessIdentity | None = PROCESS) -> None:
        self.drain(*engines, restart=restart)
        self.out(identity)
        for engine in engines:
            assert self.settled(engine)

    def settled(self, engine: str) -> bool:
        drain = self.engine(engine).drain
        return drain is not None and drain.settled

    def waits(self, engine: str) -> tuple[str, ...]:
        drain = self.engine(engine).drain
        assert drain is not None
        return drain.waits_for

    def check(self, engine: str, check: Check) -> tuple[Verdict, str]:
        found = next(c for c in self.engine(engine).checks if c.check is check)
        return found.verdict, found.detail


def refusal(rig: Ops, command: Any) -> tuple[Refusal, str]:
    before, effects = rig.saved(), len(rig.effects)
    with pytest.raises(CommandRefusedError) as refused:
        rig.send(command)
    assert rig.saved() == before
    assert len(rig.effects) == effects
    return refused.value.refusal, str(refused.value)


# --- settling ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R4")
@pytest.mark.case("H1")
def test_each_thing_that_a_drain_waits_for() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.publish()
    rig.ack(d=1)
    rig.drain("d")
    assert rig.holds("d") == {Hold.DRAIN}
    assert rig.waits("d") == ("a placement without it to be published",)
    capture = only(rig.publish(), CaptureIdentity)
    assert rig.waits("d") == (
        "proxy edge/0 to acknowledge placement 1.2 or a later one, it has 1.1",
        "1 leg of proxy edge/0",
        "its process identity to be read",
    )
    rig.ack(d=1, unread={"d": 2})
    assert rig.waits("d") == (
        "1 leg of proxy edge/0",
        "2 KV handoffs of proxy edge/0 to be read",
        "its process identity to be read",
    )
    rig.ack(unread={"d": 2})
    assert rig.waits("d") == ("2 KV handoffs of proxy edge/0 to be read", "its process identity to be read")
    rig.ack()
    assert rig.waits("d") == ("its process identity to be read",)
    assert not rig.settled("d")
    told = rig.answer_capture(capture)
    assert [r.kind for r in of(told, Record)] == [EventKind.IDENTITY_CAPTURED, EventKind.DRAIN_SETTLED]
    assert rig.settled("d")
    assert rig.waits("d") == ()
    assert "ready to stop" in rig.fleet.explain("d", now=rig.now).lines


@pytest.mark.rule("R4")
def test_the_identity_is_asked_for_once_the_engine_is_out() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    assert of(rig.drain("d"), CaptureIdentity) == []
    capture = only(rig.publish(), CaptureIdentity)
    assert (capture.engine, capture.url) == ("d", "http://d")
    assert of(rig.publish(), CaptureIdentity) == []


@pytest.mark.rule("R4")
def test_an_engine_that_does_not_answer_is_recorded_as_unknown_and_cannot_keep_the_drain_open() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", identity=None)
    drain = rig.engine("d").drain
    assert drain is not None
    assert (drain.captured, drain.identity) == (True, None)


def test_a_question_that_could_not_be_asked_or_was_lost_is_asked_again() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.drain("d")
    first = only(rig.publish(), CaptureIdentity)
    rig.answer_capture(first, None, local=True)
    assert not rig.settled("d")
    rig.now += 1.0
    assert rig.fleet.next_due() == rig.now
    second = only(rig.send(Woke()), CaptureIdentity)
    rig.now += 1000
    third = only(rig.tick(Stage.DRAINS), CaptureIdentity)
    assert rig.answer_capture(second) == ()
    rig.answer_capture(third)
    assert rig.settled("d")


@pytest.mark.rule("R4")
@pytest.mark.case("H3")
def test_case_H3_every_connected_proxy_must_have_acknowledged() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE, OTHER)
    rig.drain("d")
    rig.out()
    rig.ack(EDGE)
    rig.now += 2.0
    rig.run_pass()
    assert rig.waits("d") == ("proxy other/0 to acknowledge placement 1.1 or a later one, it has none",)
    rig.ack(OTHER)
    assert rig.settled("d")


@pytest.mark.rule("R4")
def test_an_acknowledgement_of_an_older_placement_is_not_one() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.publish()
    rig.drain("d")
    rig.out()
    rig.send(ProxyAcked(proxy=EDGE, epoch=1, version=rig.version - 1))
    assert not rig.settled("d")
    rig.publish()
    rig.ack()  # a later one does too
    assert rig.settled("d")


@pytest.mark.rule("R4", "P6", "P7")
@pytest.mark.case("H3")
@pytest.mark.parametrize("end", ["bound", "forgotten", "goodbye", "newer boot", "back"])
def test_case_H3_a_lost_proxy_counts_until_it_has_stopped_for_certain(end: str) -> None:
    rig = Ops(*FLEET, liveness_every=0, placement_max_age_s=600.0)
    rig.hello(EDGE)
    rig.send(ProxyLost(proxy=EDGE, reason="gone"))
    rig.drain("d", deadline_s=1e6)
    rig.out()
    rig.now += 598.0
    rig.run_pass()
    assert not rig.settled("d")
    (words,) = rig.waits("d")
    assert "proxy edge/0 (lost, counts for 1 s more or until it is forgotten)" in words
    match end:
        case "bound":
            rig.run_pass()
            rig.run_pass()
        case "forgotten":
            rig.send(ForgetCommand(id="edge"))
        case "goodbye":
            rig.send(ProxyLeft(proxy=EDGE, reason="done"))
        case "newer boot":
            rig.hello(replace(EDGE, boot=2))
            rig.ack(replace(EDGE, boot=2))
        case "back":
            rig.hello(EDGE)
            rig.ack(EDGE)
    assert rig.settled("d")


@pytest.mark.rule("R4")
def test_a_lost_proxy_that_had_applied_the_placement_and_had_no_leg_is_not_waited_for() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE, OTHER)
    rig.drain("d")
    rig.out()
    rig.ack(EDGE)
    rig.send(ProxyLost(proxy=EDGE, reason="gone"))
    rig.ack(OTHER)
    assert rig.settled("d")


@pytest.mark.rule("R4")
def test_at_the_deadline_it_stays_out_is_overdue_with_what_it_waits_for_and_settles_later() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.drain("d", deadline_s=5.0)
    rig.out()
    rig.ack(d=3)
    for _ in range(10):
        rig.run_pass()
    (told,) = rig.records(EventKind.DRAIN_OVERDUE)
    assert told.message == "engine d: its drain is overdue, it stays out and waits for 3 legs of proxy edge/0"
    drain = rig.engine("d").drain
    assert drain is not None
    assert (drain.overdue, rig.holds("d"), rig.engine("d").phases) == (True, {Hold.DRAIN}, frozenset())
    rig.ack()
    assert rig.settled("d")
    assert rig.engine("d").drain != drain


def test_forgetting_is_for_those_that_are_lost() -> None:
    rig = Ops(*FLEET)
    rig.hello(EDGE)
    assert refusal(rig, ForgetCommand(id="edge"))[0] is Refusal.PRECONDITION
    assert refusal(rig, ForgetCommand(id="nobody")) == (Refusal.NOT_FOUND, "no proxy nobody is known")
    rig.send(ProxyLost(proxy=EDGE, reason="gone"))
    assert refusal(rig, ForgetCommand(id="edge", slot=1)) == (Refusal.NOT_FOUND, "no proxy edge/1 is known")
    rig.send(ForgetCommand(id="edge", slot=0))
    assert rig.fleet.view(now=rig.now).proxies == ()


# --- what a drain is not touched by -----------------------------------------------------------------------------------


@pytest.mark.rule("R5")
def test_a_drain_survives_healthy_answers_evidence_and_time() -> None:
    rig = Ops(*FLEET, liveness_every=1)
    rig.hello(EDGE)
    rig.drain("d")
    rig.out()
    for _ in range(20):
        for probe in of(rig.run_pass(), ProbeHealth):
            rig.answer_health(probe, identity=PROCESS)
    assert rig.holds("d") == {Hold.DRAIN}
    rig.report("d", Outcome.REFUSED, count=3)  # a failure while residents run is one
    assert rig.holds("d") == {Hold.DRAIN, Hold.EJECTED}
    for _ in range(40):
        assert not [c for c in of(rig.run_pass(), RunCheck) if c.engine == "d"]
    assert rig.holds("d") == {Hold.DRAIN, Hold.EJECTED}


@pytest.mark.rule("R4", "L1")
def test_one_that_is_ready_to_stop_may_be_stopped_without_being_called_dead() -> None:
    rig = Ops(*FLEET, liveness_every=1)
    rig.settle("d")
    for _ in range(10):
        for probe in of(rig.run_pass(), ProbeHealth):
            assert probe.engine != "d"
            rig.answer_health(probe, identity=PROCESS)
    assert EventKind.ENGINE_EJECTED not in rig.kinds()


@pytest.mark.rule("R4")
def test_a_drain_cancels_an_open_gate() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.send(EjectCommand(engine="d", reason="x"))
    checks: list[RunCheck] = []
    while not checks:
        checks = of(rig.run_pass(), RunCheck)
    rig.drain("d")
    assert rig.answer_check(checks[0]) == ()
    assert rig.fleet.explain("d", now=rig.now).engine.gate_in_s is None
    assert rig.holds("d") == {Hold.DRAIN, Hold.EJECTED}


def test_a_suspicion_of_an_engine_that_is_ready_to_stop_is_over() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.report("d", Outcome.STREAM_CUT, count=3)
    assert Hold.VERIFICATION in rig.holds("d")
    rig.settle("d")
    assert rig.holds("d") == {Hold.DRAIN}
    assert rig.engine("d").suspicion == ""


@pytest.mark.rule("R5", "S1", "S7")
@pytest.mark.parametrize("settled", [True, False])
def test_a_takeover_knows_everything_of_a_drain(settled: bool) -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.drain("d", deadline_s=100.0)
    rig.out()
    if settled:
        rig.ack()
    document = json.loads(json.dumps(to_document(rig.saved(), wall=5000.0, epoch=1, holder="a")))
    saved = aged(from_document(document), wall=5010.0)
    after = Ops(*FLEET, saved=saved, now=77.0, liveness_every=0)
    drain = after.engine("d").drain
    assert drain is not None
    assert (drain.reason, drain.remaining_s, drain.restart, drain.identity) == ("disk", 90.0, True, PROCESS)
    assert (drain.settled, drain.captured, after.holds("d")) == (settled, True, {Hold.DRAIN})
    if not settled:
        # The proxy that was connected counts until it says hello, or its bound has passed; it must acknowledge anew.
        after.publish()
        assert any("proxy edge/0 (lost" in words for words in after.waits("d"))
        after.hello(EDGE)
        after.ack()
        assert after.settled("d")


@pytest.mark.rule("R5", "S2")
def test_a_reload_keeps_drains_and_another_address_is_another_process_by_itself() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", "e")
    moved = (prefill("p"), replace(decode("d"), url="http://new"), decode("e"))
    rig.send(Reloaded(settings=rig.with_settings(engines=moved)))
    assert rig.holds("d") == {Hold.DRAIN, Hold.JOINING}
    assert rig.holds("e") == {Hold.DRAIN}
    assert of(rig.send(Woke()), RunCheck) == []
    rig.undrain("d")
    assert rig.holds("d") == set()
    rig.undrain("e")
    assert rig.holds("e") == {Hold.DRAIN}


# --- the way back -----------------------------------------------------------------------------------------------------


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


@pytest.mark.rule("R1")
@pytest.mark.parametrize("at", [Check.GENERATION, Check.FINAL_HEALTH])
def test_a_process_that_changes_while_the_gate_is_tried_fails_it(at: Check) -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", restart=False)
    waiting: list[Effect] = list(rig.send(UndrainCommand(engines=("d",))))
    while waiting:
        asked = waiting.pop(0)
        if isinstance(asked, RunCheck) and asked.check is at:
            waiting += rig.answer_check(asked, identity=NEWER)
        else:
            waiting += rig.pass_one(asked)
    assert rig.holds("d") == {Hold.DRAIN}
    verdict, words = rig.check("d", at)
    assert verdict is Verdict.FAIL
    assert words.startswith("the process changed while the gate was tried: ")


@pytest.mark.rule("R1")
@pytest.mark.parametrize("at", [Check.GENERATION, Check.FINAL_HEALTH])
def test_an_engine_that_does_not_say_which_process_it_is_does_not_pass(at: Check) -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", restart=False)
    waiting: list[Effect] = list(rig.send(UndrainCommand(engines=("d",))))
    while waiting:
        asked = waiting.pop(0)
        if isinstance(asked, RunCheck) and asked.check is at:
            waiting += rig.answer_check(asked, identity=None)
        else:
            waiting += rig.pass_one(asked)
    assert rig.holds("d") == {Hold.DRAIN}
    assert rig.check("d", at)[0] is Verdict.FAIL


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
    rig.settle("d", restart=False)
    effects = rig.send(UndrainCommand(engines=("d",)))
    asked = of(rig.report("d", Outcome.STREAM_CUT, count=3), ProbeInference)  # a proxy that was cut off tells it now
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


# --- the whole fleet --------------------------------------------------------------------------------------------------


def serving(rig: Ops) -> set[str]:
    return {e.id for e in rig.fleet.placement(now=rig.now).engines.values() if e.phases}


def not_ready(rig: Ops) -> str:
    return rig.fleet.view(now=rig.now).not_ready


def captured(rig: Ops, effects: Iterable[Effect]) -> None:
    for capture in of(effects, CaptureIdentity):
        rig.answer_capture(capture)


@pytest.mark.rule("R6", "M9")
def test_maintenance_withdraws_ready_first_and_takes_engines_out_when_nothing_runs() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.publish()
    rig.ack(p=1)
    rig.drain("e", "p", "d")
    assert (not_ready(rig), rig.fleet.placement(now=rig.now).closed) == ("maintenance", "maintenance")
    assert serving(rig) == {"p", "d", "e"}  # for the decode legs of what has been admitted
    rig.publish()
    rig.now += 60.0
    rig.run_pass()
    assert rig.waits("d") == (
        "the fleet to come to rest, admission closed",
        "proxy edge/0 to acknowledge that",
    )
    rig.ack(p=1)
    rig.ack(d=1)  # its decode leg found an engine
    rig.run_pass()
    assert serving(rig) == {"p", "d", "e"}
    rig.ack()
    quiet_at = rig.fleet.next_due()
    assert quiet_at == rig.now + 2.0
    rig.now += 1.0
    rig.ack(unread={"p": 1})  # it was only between two legs
    rig.now += 5.0
    rig.send(Woke())
    assert serving(rig) == {"p", "d", "e"}
    rig.ack()
    rig.now += 2.0
    rig.send(Woke())
    assert serving(rig) == set()
    assert {kind for e in "pde" for kind in rig.holds(e)} == {Hold.MAINTENANCE}
    captured(rig, rig.publish())
    assert not rig.settled("d")
    rig.ack()
    assert all(rig.settled(e) for e in "pde")
    assert not_ready(rig) == "maintenance"


@pytest.mark.rule("R4", "R6")
def test_at_the_deadline_maintenance_takes_the_engines_out_and_residents_run_on() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.drain("p", "d", "e", deadline_s=10.0)
    rig.publish()
    rig.ack(d=1)
    rig.now += 8.75
    rig.run_pass()
    assert serving(rig) == {"p", "d", "e"}
    rig.now += 0.25
    rig.send(Woke())
    assert serving(rig) == set()
    captured(rig, rig.publish())
    rig.ack(d=1)
    assert rig.settled("p")
    assert not rig.settled("d")


def in_maintenance(*, restart: bool = False, **settings: Any) -> Ops:
    rig = Ops(*FLEET, liveness_every=0, **settings)
    rig.drain("p", "d", "e", restart=restart)
    captured(rig, [*rig.publish(), *rig.publish()])
    assert all(rig.settled(e) for e in "pde")
    return rig


@pytest.mark.rule("R2", "R6")
def test_a_fleet_returns_as_a_whole_in_one_step() -> None:
    rig = in_maintenance()
    effects: list[Effect] = list(rig.send(UndrainCommand(engines=("p", "d", "e"))))
    while effects:
        held = {e for e in "pde" if rig.holds(e)}
        assert held in (set("pde"), set())
        effects += rig.pass_one(effects.pop(0))
    assert serving(rig) == {"p", "d", "e"}
    assert not_ready(rig) == ""


@pytest.mark.rule("R6")
@pytest.mark.parametrize("check", [Check.HEALTH, Check.GENERATION, Check.FINAL_HEALTH])
def test_all_or_none(check: Check) -> None:
    rig = in_maintenance()
    waiting: list[Effect] = list(rig.send(UndrainCommand(engines=("p", "d", "e"))))
    while waiting:
        asked = waiting.pop(0)
        failing = isinstance(asked, RunCheck) and (asked.engine, asked.check) == ("d", check)
        waiting += rig.pass_one(asked, Verdict.FAIL if failing else None)
    assert {e for e in "pde" if Hold.MAINTENANCE in rig.holds(e)} == set("pde")
    assert not_ready(rig) == "maintenance"
    told = {r.engine: r.message for r in rig.records(EventKind.UNDRAIN_FAILED)}
    assert told["d"] == f"engine d stays drained: its check {check}: fail: seen"
    assert told["p"] == f"engine p stays drained: engine d's check {check}: fail: seen"
    rig.undrain("p", "d", "e")
    assert not_ready(rig) == ""


@pytest.mark.rule("R2", "R6")
def test_none_when_no_transfer_works_and_several_fail_at_once() -> None:
    rig = in_maintenance()
    waiting: list[Effect] = list(rig.send(UndrainCommand(engines=("p", "d", "e"))))
    while waiting:
        asked = waiting.pop(0)
        if isinstance(asked, RunTransfer):
            waiting += rig.answer_transfer(asked, consumed=Outcome.ERROR_EVENT)
        else:
            waiting += rig.pass_one(asked)
    assert {e for e in "pde" if Hold.MAINTENANCE in rig.holds(e)} == set("pde")
    assert [r.engine for r in rig.records(EventKind.UNDRAIN_FAILED)] == ["d", "e", "p"]
    rig.undrain("p", "d", "e")
    assert not_ready(rig) == ""


@pytest.mark.rule("R6")
def test_those_that_are_left_out_stay_drained_and_the_fleet_is_open() -> None:
    rig = in_maintenance()
    rig.undrain("p", "d")
    assert serving(rig) == {"p", "d"}
    assert rig.holds("e") == {Hold.DRAIN}
    assert rig.settled("e")
    assert not_ready(rig) == ""
    rig.undrain("e")
    assert serving(rig) == {"p", "d", "e"}


@pytest.mark.rule("R6")
def test_maintenance_takes_in_what_was_drained_before_and_asks_of_it_what_that_drain_did() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", restart=True)
    rig.drain("p", "d", "e", restart=False)
    captured(rig, [*rig.publish(), *rig.publish()])
    assert rig.holds("d") == {Hold.MAINTENANCE}
    rig.undrain("p", "d", "e")
    assert serving(rig) == set()  # d was to be restarted
    rig.processes["d"] = NEWER
    rig.undrain("p", "d", "e")
    assert serving(rig) == {"p", "d", "e"}


@pytest.mark.rule("R6")
def test_drains_that_come_to_every_engine_one_after_the_other_are_not_maintenance() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("p")
    rig.settle("d")
    rig.settle("e")
    assert not_ready(rig) == "no eligible engines"
    assert rig.fleet.placement(now=rig.now).closed == ""


@pytest.mark.rule("R6")
def test_a_change_of_mind_before_the_engines_are_out() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.drain("p", "d", "e", restart=False)
    rig.publish()
    rig.ack(p=1)
    rig.undrain("p", "d", "e")
    assert serving(rig) == {"p", "d", "e"}
    assert not_ready(rig) == ""
    assert all(rig.engine(e).drain is None for e in "pde")


@pytest.mark.rule("R6", "S2")
def test_an_engine_that_is_added_to_a_fleet_in_maintenance_is_out_too() -> None:
    rig = in_maintenance()
    rig.send(Reloaded(settings=rig.with_settings(engines=(*FLEET, decode("f")))))
    assert not_ready(rig) == "maintenance"
    assert rig.holds("f") == {Hold.JOINING, Hold.MAINTENANCE}
    rig.undrain("p", "d", "e", "f")
    assert serving(rig) == {"p", "d", "e", "f"}


@pytest.mark.rule("R5", "R6", "S7")
@pytest.mark.parametrize("out", [True, False])
def test_maintenance_survives_a_takeover(out: bool) -> None:
    rig = in_maintenance(restart=True) if out else Ops(*FLEET, liveness_every=0)
    if not out:
        rig.hello(EDGE)
        rig.publish()
        rig.ack(p=1)
        rig.drain("p", "d", "e")
    document = json.loads(json.dumps(to_document(rig.saved(), wall=1.0, epoch=1, holder="a")))
    after = Ops(*FLEET, saved=aged(from_document(document), wall=1.0), now=5.0, liveness_every=0)
    assert not_ready(after) == "maintenance"
    assert serving(after) == (set() if out else {"p", "d", "e"})
    if not out:
        after.publish()
        after.hello(EDGE)
        after.ack()
        after.now += 2.0
        after.send(Woke())
        captured(after, after.publish())
        after.ack()
    assert all(after.settled(e) for e in "pde")


@pytest.mark.rule("R6")
def test_an_engine_that_leaves_the_fleet_under_a_return_ends_it_for_the_others() -> None:
    rig = in_maintenance()
    effects = rig.send(UndrainCommand(engines=("p", "d", "e")))
    rig.send(Reloaded(settings=rig.with_settings(engines=(prefill("p"), decode("d")))))
    rig.pass_gate(effects)
    assert {r.engine for r in rig.records(EventKind.UNDRAIN_FAILED)} == {"p", "d"}
    assert not_ready(rig) == "maintenance"
    rig.undrain("p", "d")
    assert serving(rig) == {"p", "d"}
