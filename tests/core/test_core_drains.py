"""Drains and maintenance: what settles them, what they wait for, what survives, and the way back (spec R4–R6)."""

import json
from dataclasses import replace

import pytest

from narwhal.control.core.effects import CaptureIdentity, ProbeHealth, RunCheck
from narwhal.control.core.events import (
    EjectCommand,
    ForgetCommand,
    ProxyAcked,
    ProxyLeft,
    ProxyLost,
    Refusal,
    Reloaded,
    Woke,
)
from narwhal.control.core.handoff import aged, from_document, to_document
from narwhal.control.core.records import EventKind, Record
from narwhal.vocabulary import Check, Hold, Outcome, Stage, Verdict
from tests.core.drain_rig import FLEET, NEWER, Ops, refusal
from tests.core.rig import EDGE, OTHER, PROCESS, decode, of, only, prefill

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
def test_a_reload_keeps_drains_also_of_an_engine_that_gets_another_address() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", "e")
    readdress(rig, "http://new")
    assert rig.holds("d") == {Hold.DRAIN, Hold.JOINING}
    assert rig.holds("e") == {Hold.DRAIN}
    assert of(rig.send(Woke()), RunCheck) == []
    rig.undrain("d")  # what answers there is the process that was drained, by another name
    assert rig.holds("d") == {Hold.DRAIN, Hold.JOINING}
    words = "not restarted: version 0.32.0 started at 1700000000.250 answers, which was drained at http://d"
    assert rig.check("d", Check.GENERATION) == (Verdict.FAIL, words)
    rig.processes["d"] = OTHER_MACHINES  # that it has run for longer is no matter
    rig.undrain("d")
    assert rig.holds("d") == set()
    rig.undrain("e")
    assert rig.holds("e") == {Hold.DRAIN}


def readdress(rig: Ops, url: str) -> None:
    moved = (prefill("p"), replace(decode("d"), url=url), decode("e"))
    rig.send(Reloaded(settings=rig.with_settings(engines=moved)))


OTHER_MACHINES = replace(PROCESS, started_at=PROCESS.started_at - 3600.0)


@pytest.mark.rule("R4", "R5")
def test_another_address_and_back_leaves_the_process_that_was_drained_out_until_it_was_restarted() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d")
    must = "it must be another process than that one at http://d"
    readdress(rig, "http://new")
    assert any(line.endswith(must) for line in rig.fleet.explain("d", now=rig.now).lines)
    readdress(rig, "http://d")
    assert any(line.endswith("it must have been restarted since") for line in rig.fleet.explain("d", now=rig.now).lines)
    for process in (PROCESS, OTHER_MACHINES):
        rig.processes["d"] = process
        rig.undrain("d")
        assert rig.holds("d") == {Hold.DRAIN, Hold.JOINING}
        assert "a process newer than the drained one" in rig.check("d", Check.GENERATION)[1]
    rig.processes["d"] = NEWER
    rig.undrain("d")
    assert rig.holds("d") == set()


@pytest.mark.rule("R4")
@pytest.mark.parametrize("whole", [False, True])
def test_one_that_moves_before_it_was_asked_who_it_is_was_drained_as_a_process_that_is_not_known(whole: bool) -> None:
    """Who answers at the other address is not the process that the operator took out."""
    rig = Ops(*FLEET, liveness_every=0)
    if whole:
        rig.hello(EDGE)
    rig.drain(*(("p", "d", "e") if whole else ("d",)))
    asked = of(rig.publish(), CaptureIdentity)
    readdress(rig, "http://new")
    for capture in asked:
        rig.answer_capture(capture)
    assert rig.engine("d").drain is not None
    rig.now += 1000.0  # past the deadline, at which maintenance takes out what runs
    assert "d" not in {c.engine for c in of([*rig.run_pass(), *rig.publish()], CaptureIdentity)}
    drain = rig.engine("d").drain
    assert drain is not None
    assert (drain.captured, drain.identity, drain.restart) == (True, None, True)
    if not whole:
        rig.undrain("d")
        assert "a process newer than the drain, whose process is unknown" in rig.check("d", Check.GENERATION)[1]
        rig.processes["d"] = NEWER
        rig.undrain("d")
        assert rig.holds("d") == set()


@pytest.mark.rule("S2", "R5")
def test_a_drain_that_goes_with_its_engine_is_named_and_again_when_the_engine_is_added_again() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d")
    rig.send(Reloaded(settings=rig.with_settings(engines=(prefill("p"), decode("e")))))
    rig.send(Reloaded(settings=rig.with_settings(engines=FLEET)))
    again = "engine d: added to the fleet again; the drain that it had when it was removed (disk) is forgotten"
    (gone,), (added,) = rig.records(EventKind.ENGINE_REMOVED), rig.records(EventKind.ENGINE_ADDED)
    assert gone.message == "engine d: removed from the fleet, and its drain (disk) is forgotten"
    assert added.message == again
    assert rig.fleet.explain("d", now=rig.now).history[0].message == again
    assert [(h.kind, h.reason) for h in rig.engine("d").holds] == [(Hold.JOINING, "added to the fleet again")]
    # Said once: the next time it had none.
    rig.send(Reloaded(settings=rig.with_settings(engines=(prefill("p"), decode("e")))))
    rig.send(Reloaded(settings=rig.with_settings(engines=FLEET)))
    assert rig.records(EventKind.ENGINE_ADDED)[-1].message == "engine d: added to the fleet"
