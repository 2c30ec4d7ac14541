"""Drains step by step: what is told and asked, what is waited for in each state, and when it is looked at (R4–R6)."""

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from narwhal.control.core.effects import CaptureIdentity, Effect, RunCheck
from narwhal.control.core.events import (
    CommandRefusedError,
    DrainCommand,
    ProxyAcked,
    ProxyConnected,
    ProxyLost,
    Published,
    Refusal,
    Reloaded,
    UndrainCommand,
    Woke,
)
from narwhal.control.core.handoff import aged, from_document, to_document
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.view import DrainView, HoldView
from narwhal.vocabulary import Hold, Stage
from tests.core.drain_rig import FLEET, WALL, Ops, captured, not_ready, serving
from tests.core.rig import EDGE, OTHER, PROCESS, Rig, decode, of, only


def told(effects: Iterable[Effect]) -> list[tuple[EventKind, str, str]]:
    """Every record of these effects: kind, engine, words."""
    return [(r.kind, r.engine, r.message) for r in of(effects, Record)]


def drain_of(rig: Rig, engine: str) -> DrainView:
    drain = rig.engine(engine).drain
    assert drain is not None
    return drain


def closing() -> Ops:
    """A fleet whose maintenance is published and that waits for its proxy to come to rest."""
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.drain("p", "d", "e", restart=False)
    rig.publish()
    return rig


# --- one engine -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R4")
def test_what_is_told_and_asked_of_one_drain() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    before = rig.fleet.revision
    begun = rig.drain("d", "d", deadline_s=90.0)
    words = "engine d: drain (disk), to settle within 90 s; a newer process is asked for when it returns"
    assert told(begun) == [(EventKind.DRAIN_BEGUN, "d", words)]
    assert rig.fleet.revision > before
    assert rig.engine("d").holds == (HoldView(kind=Hold.DRAIN, reason="disk", age_s=0.0),)
    assert rig.fleet.next_due() is None  # nothing is to be done before it is published
    rig.now += 4.0
    capture = only(rig.publish(), CaptureIdentity)
    assert (capture.engine, capture.url, capture.incarnation, capture.timeout_s) == ("d", "http://d", 1, 5.0)
    assert rig.fleet.next_due() is None
    before = rig.fleet.revision
    known = "engine d: the process that is drained: version 0.32.0 started at 1700000000.250"
    assert told(rig.answer_capture(capture)) == [(EventKind.IDENTITY_CAPTURED, "d", known)]
    assert rig.fleet.revision > before
    assert drain_of(rig, "d") == DrainView(
        reason="disk",
        url="http://d",
        age_s=4.0,
        remaining_s=86.0,
        restart=True,
        whole=False,
        captured=True,
        identity=PROCESS,
        settled=False,
        overdue=False,
        waits_for=("proxy edge/0 to acknowledge placement 1.1 or a later one, it has none",),
    )
    before = rig.fleet.revision
    assert told(rig.ack()) == [(EventKind.DRAIN_SETTLED, "d", "engine d is ready to stop")]
    assert rig.fleet.revision > before
    assert told(rig.tick(Stage.DRAINS)) == []
    rig.hello(OTHER)  # who comes now gets a placement without it
    assert rig.waits("d") == ()


@pytest.mark.rule("R4")
def test_without_a_reason_and_without_a_restart_it_says_so() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    command = DrainCommand(engines=("d",), reason="", deadline_s=1.5, restart=False, wall=WALL)
    words = "engine d: drain (no reason given), to settle within 1.5 s; it may return as the process it is"
    assert told(rig.send(command)) == [(EventKind.DRAIN_BEGUN, "d", words)]
    assert [h.reason for h in rig.engine("d").holds] == ["no reason given"]
    unknown = rig.answer_capture(only(rig.publish(), CaptureIdentity), None)
    words = "engine d: the process that is drained: unknown, the engine does not say"
    assert told(unknown)[0] == (EventKind.IDENTITY_CAPTURED, "d", words)


@pytest.mark.rule("R4")
def test_a_question_for_the_identity_is_asked_again_after_half_a_minute_or_where_it_could_not_be_a_pass() -> None:
    """Two requests, each with the shell's own bound of `engine.health_timeout_s` and ten seconds on top."""
    rig = Ops(*FLEET, liveness_every=0, health_timeout_s=5.0)
    rig.drain("d")
    first = only(rig.publish(), CaptureIdentity)
    rig.now += 29.5
    assert of(rig.tick(Stage.DRAINS), CaptureIdentity) == []
    rig.now += 0.5
    second = only(rig.tick(Stage.DRAINS), CaptureIdentity)
    assert second.number != first.number
    assert told(rig.answer_capture(second, None, local=True)) == []
    assert rig.fleet.next_due() == rig.now + 1.0
    assert drain_of(rig, "d").waits_for == ("its process identity to be read",)
    rig.now += 0.5
    assert of(rig.send(Woke()), CaptureIdentity) == []
    rig.now += 0.5
    assert of(rig.send(Woke()), CaptureIdentity) != []


@pytest.mark.rule("R4")
def test_the_first_placement_without_it_is_the_one_to_acknowledge() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.drain("d")
    # Sent before the drain, and published after it.
    rig.version += 1
    rig.send(Published(epoch=1, version=rig.version, serving=frozenset({"p", "d", "e"}), closed=""))
    assert rig.waits("d") == ("a placement without it to be published",)
    rig.out()
    rig.out()
    assert rig.version == 3
    rig.send(ProxyAcked(proxy=EDGE, epoch=1, version=1))
    assert rig.waits("d") == ("proxy edge/0 to acknowledge placement 1.2 or a later one, it has 1.1",)
    rig.send(ProxyAcked(proxy=EDGE, epoch=1, version=2))
    assert rig.settled("d")


@pytest.mark.rule("R4", "P7")
@pytest.mark.parametrize(
    ("max_age_s", "passed_s", "lost"),
    [
        (600.0, 0.0, "(lost, counts for 600 s more or until it is forgotten)"),
        (600.0, 599.4, "(lost, counts for 1 s more or until it is forgotten)"),
        (600.0, 601.0, "(lost, counts for 0 s more or until it is forgotten)"),
        (0.0, 601.0, "(lost, counts for ever or until it is forgotten)"),
    ],
)
def test_what_a_lost_proxy_is_waited_for(max_age_s: float, passed_s: float, lost: str) -> None:
    rig = Ops(*FLEET, liveness_every=0, placement_max_age_s=max_age_s)
    rig.hello(EDGE)
    rig.publish()
    rig.ack(unread={"d": 1}, d=2)
    rig.send(ProxyLost(proxy=EDGE, reason="gone"))
    rig.drain("d")
    rig.out()
    rig.now += passed_s
    assert rig.waits("d") == (
        f"proxy edge/0 {lost} to acknowledge placement 1.2 or a later one, it has 1.1",
        f"2 legs of proxy edge/0 {lost}",
        f"1 KV handoff of proxy edge/0 {lost} to be read",
    )


@pytest.mark.rule("R4")
def test_overdue_is_told_once_at_the_deadline_and_stored_and_not_of_one_that_is_ready() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    rig.drain("d", deadline_s=5.0)
    rig.drain("e", deadline_s=5.0)
    rig.out()
    rig.ack(d=1)
    assert rig.settled("e")
    rig.now += 4.75
    assert told(rig.tick(Stage.DRAINS)) == []
    before = rig.fleet.revision
    rig.now += 0.25
    words = "engine d: its drain is overdue, it stays out and waits for 1 leg of proxy edge/0"
    assert told(rig.tick(Stage.DRAINS)) == [(EventKind.DRAIN_OVERDUE, "d", words)]
    assert rig.fleet.revision > before
    assert told(rig.tick(Stage.DRAINS)) == []
    assert (drain_of(rig, "d").overdue, drain_of(rig, "e").overdue) == (True, False)


@pytest.mark.parametrize(
    ("drained", "command", "words"),
    [
        (("p", "d"), ("d", "p"), "already drained: d, p"),
        (("p", "d", "e"), ("d",), "already drained: d"),
        (("p", "d", "e"), ("p", "d", "e"), "already drained: p, d, e"),
    ],
)
def test_a_drain_of_what_is_drained_is_refused_by_name(
    drained: tuple[str, ...], command: tuple[str, ...], words: str
) -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.drain(*drained)
    with pytest.raises(CommandRefusedError) as refused:
        rig.drain(*command)
    assert (refused.value.refusal, str(refused.value)) == (Refusal.PRECONDITION, words)


@pytest.mark.rule("R5", "S7")
def test_after_a_takeover_only_an_identity_that_was_not_read_is_asked_for() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d")
    rig.drain("e")
    saved = aged(
        from_document(json.loads(json.dumps(to_document(rig.saved(), wall=1.0, epoch=1, holder="a")))), wall=1.0
    )
    after = Ops(*FLEET, saved=saved, now=5.0, liveness_every=0)
    assert after.fleet.next_due() is None
    assert [c.engine for c in of(after.publish(), CaptureIdentity)] == ["e"]
    assert after.fleet.next_due() is None


# --- the whole fleet --------------------------------------------------------------------------------------------------


@pytest.mark.rule("R6")
def test_what_is_told_of_maintenance_from_beginning_to_end() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.hello(EDGE)
    begun = told(rig.drain("e", "p", "d", "e", deadline_s=60.0, restart=False))
    words = "maintenance of the whole fleet (disk), to settle within 60 s; it may return as the process it is"
    assert begun == [
        *((EventKind.DRAIN_BEGUN, engine, f"engine {engine}: {words}") for engine in "epd"),
        (EventKind.NOT_READY, "", "not ready: maintenance"),
    ]
    assert rig.fleet.next_due() is None
    rig.publish()
    rig.ack()
    rig.now += 2.0
    out = told(rig.send(Woke()))
    assert out == [(EventKind.HOLD_PLACED, engine, f"engine {engine}: maintenance hold: disk") for engine in "pde"]
    captures = of(rig.publish(), CaptureIdentity)
    assert [c.engine for c in captures] == ["p", "d", "e"]
    captured(rig, captures)
    assert told(rig.ack()) == [
        (EventKind.DRAIN_SETTLED, engine, f"engine {engine} is ready to stop") for engine in "pde"
    ]


@pytest.mark.rule("R6")
def test_what_maintenance_waits_for_while_it_closes() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rest = "the fleet to come to rest, admission closed"
    rig.hello(EDGE, OTHER)
    rig.publish()
    for proxy in (EDGE, OTHER):
        rig.ack(proxy, p=1, d=1)
    rig.send(ProxyLost(proxy=OTHER, reason="gone"))
    rig.drain("p", "d", "e")
    lost = " (lost, counts for 600 s more or until it is forgotten)"
    acknowledge = ("proxy edge/0 to acknowledge that", f"proxy other/0 to acknowledge that{lost}")
    assert rig.waits("d") == (rest, *acknowledge)
    rig.publish()
    assert rig.waits("d") == (rest, *acknowledge)
    rig.ack(p=1, d=2)
    assert rig.waits("d") == (rest, "3 legs of proxy edge/0", acknowledge[1])
    rig.ack(d=1)
    assert rig.waits("d")[1] == "1 leg of proxy edge/0"
    rig.ack()
    assert rig.waits("d") == (rest, acknowledge[1])
    rig.send(ProxyConnected(proxy=OTHER, address="x:1", pid=1, highest_epoch=0))
    rig.ack(OTHER, e=1)
    rig.send(ProxyLost(proxy=OTHER, reason="gone"))
    assert rig.waits("d") == (rest, f"1 leg of proxy other/0{lost}")


@pytest.mark.rule("R6")
def test_rest_is_two_seconds_without_anything_under_way_after_everybody_knows() -> None:
    rig = closing()
    assert rig.fleet.next_due() is None
    rig.ack(unread={"p": 1})
    assert rig.fleet.next_due() is None
    rig.ack()
    began = rig.now
    rig.now += 0.5
    rig.ack()  # says the same again: at rest since then
    assert rig.fleet.next_due() == began + 2.0
    rig.now = began + 1.75
    rig.send(Woke())
    assert serving(rig) == {"p", "d", "e"}
    rig.now = began + 2.0
    rig.send(Woke())
    assert serving(rig) == set()
    assert rig.fleet.next_due() is None


@pytest.mark.rule("R6")
def test_where_no_proxy_is_known_nobody_has_to_come_to_rest_and_a_proxy_that_comes_must_know_first() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.drain("p", "d", "e")
    rig.hello(EDGE)
    rig.publish()
    assert serving(rig) == {"p", "d", "e"}
    alone = Ops(*FLEET, liveness_every=0)
    alone.drain("p", "d", "e")
    assert serving(alone) == {"p", "d", "e"}  # requests that it cannot see: closed first
    alone.publish()
    assert serving(alone) == set()


@pytest.mark.rule("R6")
def test_a_change_of_mind_while_it_closes_leaves_nothing_to_wake_up_for() -> None:
    rig = closing()
    rig.ack()
    assert rig.fleet.next_due() == rig.now + 2.0
    rig.now += 1.0
    back = rig.send(UndrainCommand(engines=("p", "d", "e")))
    assert [h.age_s for e in rig.engines() for h in e.holds] == [0.0] * 3  # out, so that they come in by the gate
    rig.pass_gate(back)
    assert not_ready(rig) == ""
    rig.now += 1.0
    rig.send(Woke())
    assert rig.fleet.next_due() is None


@pytest.mark.rule("R6")
def test_the_rest_before_a_change_of_mind_does_not_count_for_the_next_maintenance() -> None:
    rig = closing()
    rig.ack()
    rig.now += 1.5
    rig.undrain("p", "d", "e")
    rig.drain("p", "d", "e")
    assert rig.fleet.next_due() == rig.now + 2.0


@pytest.mark.rule("R6")
def test_one_that_is_left_out_before_maintenance_had_taken_it_out_is_drained_like_any_other() -> None:
    rig = closing()
    rig.ack(p=1)
    rig.undrain("p", "d")
    assert serving(rig) == {"p", "d"}
    assert rig.holds("e") == {Hold.DRAIN}
    words = "engine e: stays drained, the fleet's maintenance is over"
    assert [(r.engine, r.message) for r in rig.records(EventKind.DRAIN_CHANGED)] == [("e", words)]
    assert drain_of(rig, "e").whole is False
    captured(rig, rig.publish())
    rig.ack()
    assert rig.settled("e")


@pytest.mark.rule("R6", "S2")
def test_an_engine_that_is_added_to_a_fleet_in_maintenance_has_the_same_drain() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.drain("p", "d", "e", deadline_s=100.0)
    captured(rig, [*rig.publish(), *rig.publish()])
    rig.now += 10.0
    added = rig.send(Reloaded(settings=rig.with_settings(engines=(*FLEET, decode("f")))))
    words = "engine f: the fleet is in maintenance, so it is out too"
    assert (EventKind.DRAIN_CHANGED, "f", words) in told(added)
    assert [(h.kind, h.reason) for h in rig.engine("f").holds] == [
        (Hold.JOINING, "never admitted"),
        (Hold.MAINTENANCE, "disk"),
    ]
    drain = drain_of(rig, "f")
    # It was not there when the others were drained: there is no process that it could be newer than.
    assert (drain.reason, drain.remaining_s, drain.restart, drain.whole, drain.captured, drain.identity) == (
        "disk",
        90.0,
        False,
        True,
        True,
        None,
    )
    others = rig.saved().engines["p"].drain
    assert others is not None
    alike = replace(others, url="http://f", age_s=0.0, restart=False, identity=None, settled=False)
    assert rig.saved().engines["f"].drain == alike
    assert of(rig.publish(), CaptureIdentity) == []
    assert rig.settled("f")


@pytest.mark.rule("R6")
def test_maintenance_of_a_fleet_of_which_one_is_drained_takes_that_one_in_at_once() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d")
    rig.now += 5.0
    begun = rig.drain("p", "d", "e")
    assert [r.engine for r in of(begun, Record) if r.kind is EventKind.DRAIN_BEGUN] == ["p", "e"]
    assert rig.engine("d").holds == (HoldView(kind=Hold.MAINTENANCE, reason="disk", age_s=0.0),)
    assert (drain_of(rig, "d").whole, drain_of(rig, "d").settled, drain_of(rig, "d").age_s) == (True, True, 5.0)


@pytest.mark.rule("R4", "R6")
def test_a_drain_cancels_the_gate_that_is_being_tried_of_every_engine_that_it_names() -> None:
    rig = Ops(*FLEET, joined=False)
    checks: list[Effect] = [c for c in rig.send(Woke()) if isinstance(c, RunCheck)]
    assert len(checks) == 3
    rig.drain("d", "e")
    assert [c.engine for c in checks if isinstance(c, RunCheck) and rig.answer_check(c)] == ["p"]
