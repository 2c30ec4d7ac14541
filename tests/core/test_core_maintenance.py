"""Maintenance: the whole fleet goes out, and comes back all or none (spec R6)."""

import json
from typing import Any

import pytest

from narwhal.control.core.effects import Effect, RunCheck, RunTransfer
from narwhal.control.core.events import Reloaded, UndrainCommand, Woke
from narwhal.control.core.handoff import aged, from_document, to_document
from narwhal.control.core.records import EventKind
from narwhal.vocabulary import Check, Hold, Outcome, Verdict
from tests.core.drain_rig import FLEET, NEWER, Ops, captured, not_ready, serving
from tests.core.rig import EDGE, decode, prefill


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
