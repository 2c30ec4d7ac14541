"""Relapse (spec F11), forward progress (spec F10), and proxies that are themselves the fault (spec F12)."""

from typing import Any

import pytest

from narwhal.control.core.effects import ProbeHealth, ProbeInference
from narwhal.control.core.events import ProxyConnected
from narwhal.control.core.records import EventKind
from narwhal.control.core.relapse import Relapses
from narwhal.reports import ProxyKey
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase
from tests.core.rig import EDGE, OTHER, Rig, decode, of, only, prefill

C = FailureClass
THIRD = ProxyKey(id="third", slot=0, boot=1)


def rig_of(**settings: Any) -> Rig:
    engines = [prefill("p1"), prefill("p2"), decode("d1"), decode("d2")]
    return Rig(*engines, liveness_every=0, **settings)


def fail_and_pass(rig: Rig, outcome: Outcome = Outcome.STREAM_CUT) -> None:
    rig.pass_probe(rig.report("d1", outcome, count=3))


# --- F11 ------------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F11")
def test_the_same_class_again_soon_after_a_passed_probe_is_a_relapse() -> None:
    rig = rig_of()
    fail_and_pass(rig)
    assert rig.holds("d1") == set()
    rig.now += 59.9
    effects = rig.report("d1", Outcome.STREAM_CUT, count=3)
    assert rig.holds("d1") == {Hold.VERIFICATION, Hold.RELAPSE}
    rig.pass_probe(effects)
    assert rig.holds("d1") == {Hold.RELAPSE}  # no probe clears it
    assert rig.fleet.placement(now=rig.now).engines["d1"].phases == set()
    rig.now += 4.9
    assert rig.holds("d1") == {Hold.RELAPSE}
    rig.now += 0.1
    assert rig.holds("d1") == set()
    assert rig.fleet.placement(now=rig.now).engines["d1"].phases == {Phase.DECODE}


@pytest.mark.rule("F11")
def test_another_class_or_a_window_later_is_none() -> None:
    rig = rig_of()
    fail_and_pass(rig)
    rig.report("d1", Outcome.HTTP_5XX, count=3)
    assert rig.holds("d1") == {Hold.VERIFICATION}
    rig = rig_of()
    fail_and_pass(rig)
    rig.now += 60
    rig.report("d1", Outcome.STREAM_CUT, count=3)
    assert rig.holds("d1") == {Hold.VERIFICATION}


@pytest.mark.rule("F11")
def test_the_hold_doubles_up_to_five_minutes_and_is_forgotten() -> None:
    rig = rig_of()
    spans = []
    for _ in range(9):
        fail_and_pass(rig)
        held = [h for h in rig.engine("d1").holds if h.kind is Hold.RELAPSE]
        spans += [h.remaining_s for h in held]
        rig.now += (held[0].remaining_s or 0.0) + 1 if held else 1
    assert spans == [5, 10, 20, 40, 80, 160, 300, 300]
    rig.now += 60  # a window without one
    fail_and_pass(rig)
    assert Hold.RELAPSE not in rig.holds("d1")
    fail_and_pass(rig)
    assert [h.remaining_s for h in rig.engine("d1").holds] == [5]


@pytest.mark.rule("F11")
def test_readmission_counts_like_a_passed_probe() -> None:
    rig = rig_of()
    rig.report("d1", Outcome.REFUSED, count=3)
    rig.readmit("d1")
    assert rig.holds("d1") == set()
    rig.report("d1", Outcome.REFUSED, count=3)
    assert rig.holds("d1") == {Hold.EJECTED, Hold.RELAPSE}


@pytest.mark.rule("F11")
def test_a_relapse_of_timeout_is_treated_as_stream() -> None:
    rig = rig_of()
    rig.answer_health(only(rig.report("d1", Outcome.READ_TIMEOUT, count=3), ProbeHealth))
    effects = rig.report("d1", Outcome.READ_TIMEOUT, count=3)
    assert not of(effects, ProbeHealth)
    assert rig.holds("d1") == {Hold.VERIFICATION, Hold.RELAPSE}
    rig.pass_probe(effects)
    assert rig.holds("d1") == {Hold.RELAPSE}
    assert rig.streaks("d1") == {}


@pytest.mark.rule("F11")
def test_a_relapse_of_overload_still_asks_for_health() -> None:
    rig = rig_of()
    rig.answer_health(only(rig.report("d1", Outcome.HTTP_429, count=3), ProbeHealth))
    assert of(rig.report("d1", Outcome.HTTP_429, count=3), ProbeHealth)
    assert rig.holds("d1") == {Hold.RELAPSE}


@pytest.mark.rule("F11", "H2")
def test_the_relapse_hold_spares_the_last_engine() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), liveness_every=0)
    for _ in range(2):
        rig.pass_probe(rig.report("d", Outcome.STREAM_CUT, count=3))
    assert rig.holds("d") == {Hold.RELAPSE}
    assert rig.engine("d").phases == {Phase.DECODE}


@pytest.mark.rule("F7", "F11")
def test_failures_that_a_producer_under_suspicion_explains_are_no_relapse() -> None:
    """Who passed with another producer goes on failing with the bad one until that is out, and has not relapsed."""
    rig = rig_of()
    effects = rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=3)
    steps = of(effects, ProbeInference)
    while steps[0].producer is None or (steps[0].producer.engine, steps[0].consumer.engine) != ("p1", "d1"):
        steps = of(rig.works(steps[0]), ProbeInference)
    assert rig.holds("d1") == set()  # p1 is being asked about, read by d1
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=3)
    assert rig.holds("d1") == set()
    effects = rig.answer_step(steps[0], Outcome.HANDOFF, Outcome.ERROR_EVENT)
    assert (rig.holds("p1"), rig.holds("d1")) == ({Hold.VERIFICATION}, set())
    assert rig.streaks("d1") == {C.STREAM: 3}
    # Once p1 has turned out not to be to blame, d1 is looked at after all.
    rig.pass_probe(effects)
    held = [(r.engine, r.fields["hold"]) for r in rig.records(EventKind.HOLD_PLACED)]
    assert held == [("d1", "verification"), ("p1", "verification"), ("d1", "verification")]


@pytest.mark.rule("F11")
def test_failures_with_a_producer_that_nobody_doubts_are_a_relapse() -> None:
    rig = rig_of()
    rig.pass_probe(rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=3))
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    rig.report("p2", Outcome.REFUSED, count=3)  # that p2 is out explains nothing
    rig.report("d1", Outcome.ERROR_EVENT, producer="p2")
    assert Hold.RELAPSE in rig.holds("d1")


def test_relapse_windows_begin_when_the_engine_works_again() -> None:
    memory = Relapses()
    memory.watch([C.STREAM], now=0.0, window_s=60.0)
    assert memory.is_relapse(C.STREAM, now=59.0)
    assert not memory.is_relapse(C.STREAM, now=60.0)
    assert not memory.is_relapse(C.OVERLOAD, now=1.0)
    assert memory.begin(now=10.0, window_s=60.0) == 15.0
    memory.watch([C.STREAM], now=11.0, window_s=60.0)
    assert memory.is_relapse(C.STREAM, now=74.9)
    assert not memory.is_relapse(C.STREAM, now=75.0)


# --- F10 ------------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F10")
def test_three_silent_streams_bring_the_verification_hold() -> None:
    rig = rig_of()
    effects = rig.report("d1", Outcome.STALLED, count=3)
    assert rig.streaks("d1") == {C.STREAM: 3}
    assert rig.holds("d1") == {Hold.VERIFICATION}
    assert of(effects, ProbeInference)


@pytest.mark.rule("F10")
def test_a_suspicion_of_missing_progress_is_no_relapse() -> None:
    rig = rig_of()
    for _ in range(3):
        fail_and_pass(rig, Outcome.STALLED)
        assert rig.holds("d1") == set()
        rig.now += 1
    fail_and_pass(rig)
    assert rig.holds("d1") == {Hold.RELAPSE}


@pytest.mark.rule("F10")
def test_a_stall_is_set_aside_while_another_proxy_gets_something() -> None:
    rig = rig_of(stall_s=3.0)
    rig.report("d1", Outcome.STREAM_COMPLETE, proxy=OTHER)
    rig.now += 1.9  # its report may be a second old: so it may be silent for 2.9 s
    rig.report("d1", Outcome.STALLED, proxy=EDGE)
    assert rig.streaks("d1") == {}
    rig.now += 0.1
    rig.report("d1", Outcome.STALLED, proxy=EDGE)
    assert rig.streaks("d1") == {C.STREAM: 1}


@pytest.mark.rule("F10")
def test_a_proxys_own_successes_do_not_speak_against_its_stalls() -> None:
    rig = rig_of()
    rig.report("d1", Outcome.STREAM_COMPLETE, proxy=EDGE)
    rig.report("d1", Outcome.STALLED, proxy=EDGE)
    assert rig.streaks("d1") == {C.STREAM: 1}


@pytest.mark.rule("F10")
def test_a_silent_prefill_waits_longer_to_be_believed() -> None:
    rig = rig_of(stall_s=3.0, silent_leg_s=30.0)
    rig.report("p1", Outcome.HANDOFF, proxy=OTHER)
    rig.now += 28.9
    rig.report("p1", Outcome.STALLED)
    assert rig.streaks("p1") == {}
    rig.now += 0.1
    rig.report("p1", Outcome.STALLED)
    assert rig.streaks("p1") == {C.STREAM: 1}


@pytest.mark.rule("F10")
@pytest.mark.parametrize(
    ("settings", "streaks"),
    [({"stall_s": 0.0}, ({}, {C.STREAM: 1})), ({"silent_leg_s": 0.0}, ({C.STREAM: 1}, {}))],
)
def test_zero_turns_either_off(settings: dict[str, float], streaks: tuple[dict[C, int], dict[C, int]]) -> None:
    rig = rig_of(**settings)
    rig.report("d1", Outcome.STALLED)
    rig.report("p1", Outcome.STALLED)
    assert (rig.streaks("d1"), rig.streaks("p1")) == streaks


# --- F12 ------------------------------------------------------------------------------------------------------------


def others_succeed(rig: Rig, *, proxy: ProxyKey = OTHER) -> None:
    for engine, outcome in (("p1", Outcome.HANDOFF), ("p2", Outcome.HANDOFF)):
        rig.report(engine, outcome, proxy=proxy)
    for engine in ("d1", "d2"):
        rig.report(engine, Outcome.STREAM_COMPLETE, proxy=proxy)


@pytest.mark.rule("F12")
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.UNREACHABLE, Outcome.CONNECT_TIMEOUT])
def test_a_proxy_that_fails_on_most_engines_alone_is_set_aside(outcome: Outcome) -> None:
    rig = rig_of()
    for _ in range(10):
        others_succeed(rig)
        for engine in ("p1", "p2", "d1", "d2"):
            rig.report(engine, outcome, proxy=EDGE)
        rig.now += 0.5
    assert all(not rig.holds(e) for e in ("p1", "p2", "d1", "d2"))
    assert not of(rig.effects, ProbeHealth)
    (record,) = rig.records(EventKind.PROXY_SUSPECT)
    assert record.proxy == "edge/0"


@pytest.mark.rule("F12")
def test_it_is_shown_and_trusted_again_once_its_legs_work() -> None:
    rig = rig_of()
    rig.send(ProxyConnected(proxy=EDGE, address="a:1", pid=1, highest_epoch=0))
    others_succeed(rig)
    for engine in ("p1", "p2", "d1", "d2"):
        rig.report(engine, Outcome.REFUSED)
    (view,) = rig.fleet.view(now=rig.now).proxies
    assert "3 of 4 engines" in view.suspect
    others_succeed(rig, proxy=EDGE)
    (view,) = rig.fleet.view(now=rig.now).proxies
    assert view.suspect == ""
    assert rig.kinds().count(EventKind.PROXY_TRUSTED) == 1
    rig.report("d1", Outcome.REFUSED, count=3)
    assert rig.holds("d1") == {Hold.EJECTED}


@pytest.mark.rule("F12")
def test_streams_and_statuses_of_a_suspect_proxy_count() -> None:
    rig = rig_of()
    others_succeed(rig)
    for engine in ("p1", "p2", "d1", "d2"):
        rig.report(engine, Outcome.REFUSED)
    rig.report("d1", Outcome.HTTP_5XX)
    assert rig.streaks("d1").get(C.INFERENCE_STATUS) == 1


@pytest.mark.rule("F12")
def test_one_dead_engine_is_not_the_proxys_fault() -> None:
    rig = rig_of()
    others_succeed(rig)
    rig.report("d1", Outcome.REFUSED, count=3)
    assert rig.holds("d1") == {Hold.EJECTED}
    assert EventKind.PROXY_SUSPECT not in rig.kinds()


@pytest.mark.rule("F12")
def test_when_everybody_fails_it_is_the_engines() -> None:
    """A fleet that dies: successes of a moment ago excuse it for two seconds, not longer."""
    rig = rig_of()
    others_succeed(rig)
    others_succeed(rig, proxy=EDGE)
    for _ in range(8):
        rig.now += 0.5
        for proxy in (EDGE, OTHER, THIRD):
            for engine in ("p1", "p2", "d1", "d2"):
                rig.report(engine, Outcome.REFUSED, proxy=proxy)
    assert all(rig.holds(e) == {Hold.EJECTED} for e in ("p1", "p2", "d1", "d2"))


@pytest.mark.rule("F12")
def test_a_proxy_alone_in_the_fleet_is_believed() -> None:
    rig = rig_of()
    others_succeed(rig, proxy=EDGE)
    for engine in ("p1", "p2", "d1", "d2"):
        rig.report(engine, Outcome.REFUSED, count=3)
    assert all(rig.holds(e) == {Hold.EJECTED} for e in ("p1", "p2", "d1", "d2"))


@pytest.mark.rule("F5", "F12")
@pytest.mark.case("C14")
def test_a_proxy_without_descriptors_is_shown_as_the_fault() -> None:
    rig = rig_of()
    for engine in ("p1", "p2", "d1", "d2"):
        rig.report(engine, Outcome.LOCAL, count=20)
    assert all(rig.streaks(e) == {} for e in ("p1", "p2", "d1", "d2"))
    (record,) = rig.records(EventKind.PROXY_SUSPECT)
    assert "causes of its own" in record.message
    rig.run_until(lambda: EventKind.PROXY_TRUSTED in rig.kinds())
    assert rig.now >= 1060
