"""The fleet as a whole: who is told what, which settings a reload reaches, what wakes it and what is to be stored."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from narwhal.control.core.effects import CaptureIdentity, Effect, ProbeHealth, ProbeInference, RunCheck
from narwhal.control.core.events import (
    DrainCommand,
    EjectCommand,
    PassEnded,
    ProbeCommand,
    ProxyConnected,
    ProxyLeft,
    ProxyLost,
    Reloaded,
    RoleCommand,
    StageFailure,
    Woke,
)
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.settings import RoleMode, RoleSettings
from narwhal.reports import RequestCounts
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Phase, Stage, Verdict
from tests.core.rig import EDGE, OTHER, Rig, decode, of, only, prefill


def fleet(**more: Any) -> Rig:
    return Rig(prefill("p"), decode("d"), decode("e"), **{"liveness_every": 0, **more})


def told(effects: Iterable[Effect]) -> list[tuple[EventKind, str, str]]:
    return [(r.kind, r.engine, r.message) for r in of(effects, Record)]


def hello(rig: Rig, boot: int = 1) -> tuple[Effect, ...]:
    return rig.send(ProxyConnected(proxy=replace(EDGE, boot=boot), address="x:1", pid=1, highest_epoch=0))


# --- another fleet file -----------------------------------------------------------------------------------------------


@pytest.mark.rule("S2", "R8")
@pytest.mark.case("B4")
def test_each_change_of_an_engine_is_told_removals_first_and_what_did_not_change_is_not() -> None:
    rig = fleet()
    engines = (replace(prefill("p"), max_inflight=7), replace(decode("d"), url="http://new"), decode("f"))
    changed = told(rig.send(Reloaded(settings=rig.with_settings(engines=engines))))
    assert [row for row in changed if row[0] is not EventKind.NOT_READY] == [
        (EventKind.ENGINE_REMOVED, "e", "engine e: removed from the fleet"),
        (EventKind.ENGINE_CHANGED, "p", "engine p: its entry in the fleet file changed"),
        (EventKind.ENGINE_CHANGED, "d", "engine d: its address changed from http://d"),
        (EventKind.ENGINE_ADDED, "f", "engine f: added to the fleet"),
    ]
    # Only what is another than before joins, and at once.
    assert rig.fleet.next_due() == rig.now
    assert [c.engine for c in of(rig.send(Woke()), RunCheck)] == ["d", "f"]
    assert told(rig.send(Reloaded(settings=rig.with_settings(engines=engines)))) == []


@pytest.mark.rule("S2")
@pytest.mark.case("B4")
def test_of_an_engine_that_has_left_its_outcomes_count_on_and_its_history_is_gone() -> None:
    rig = fleet()
    rig.report("e", Outcome.STREAM_COMPLETE, count=5)
    counters = rig.fleet.counters_revision
    rig.send(Reloaded(settings=rig.with_settings(engines=(prefill("p"), decode("d")))))
    assert rig.saved().unknown_outcomes == {Outcome.STREAM_COMPLETE: 5}
    assert rig.fleet.counters_revision > counters
    rig.send(Reloaded(settings=rig.with_settings(engines=(prefill("p"), decode("d"), decode("e")))))
    assert [h.message for h in rig.fleet.explain("e", now=rig.now).history] == ["engine e: added to the fleet"]


@pytest.mark.rule("R8")
def test_nothing_that_was_said_of_the_old_address_counts_for_the_new_one() -> None:
    rig = fleet()
    check = only(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck)
    rig.report("e", Outcome.HTTP_429, count=3)
    moved = (prefill("p"), replace(decode("d"), url="http://new"), decode("e"))
    rig.send(Reloaded(settings=rig.with_settings(engines=moved)))
    assert rig.answer_check(check, Verdict.FAIL) == ()
    assert rig.engine("d").suspicion == ""
    assert rig.engine("e").suspicion.startswith("health probe under way")  # another's goes on


def bad_pass(rig: Rig) -> bool:
    rig.send(PassEnded(failures=(StageFailure(stage=Stage.HEALTH, error_class="OSError", message="no"),)))
    return bool(rig.fleet.view(now=rig.now).closed)


def lost_proxy(rig: Rig) -> float | None:
    hello(rig)
    rig.send(ProxyLost(proxy=EDGE, reason="gone"))
    return rig.saved().proxies[0].counts_for_s


def ejected(rig: Rig) -> float | None:
    rig.send(EjectCommand(engine="d", reason=""))
    return rig.saved().engines["d"].gate_in_s


def stalled(rig: Rig) -> int:
    rig.report("d", Outcome.STALLED)
    return rig.streaks("d").get(FailureClass.STREAM, 0)


def captured(rig: Rig) -> float:
    rig.send(DrainCommand(engines=("d",), reason="", deadline_s=9.0, restart=True, wall=0.0))
    return only(rig.publish(), CaptureIdentity).timeout_s


def probed(rig: Rig) -> int:
    return only(rig.send(ProbeCommand(engine="d")), ProbeInference).tokens


def acted_upon(rig: Rig) -> str:
    rig.report("d", Outcome.HTTP_5XX)
    return next(line for line in rig.fleet.explain("d", now=rig.now).lines if line.startswith("evidence: 1"))[:64]


def model(rig: Rig) -> str:
    return rig.fleet.view(now=rig.now).model


def mode(rig: Rig) -> RoleMode:
    return rig.fleet.view(now=rig.now).roles.mode


REACHES: list[tuple[dict[str, Any], Callable[[Rig], Any], Any, Any]] = [
    ({"monitor_failure_limit": 1}, bad_pass, False, True),
    ({"placement_max_age_s": 50.0}, lost_proxy, 600.0, 50.0),
    ({"readmit_every": 20}, ejected, 10.0, 20.0),
    ({"stall_s": 0.0}, stalled, 1, 0),
    ({"health_timeout_s": 9.0}, captured, 5.0, 9.0),
    ({"probe_tokens": 4}, probed, 16, 4),
    (
        {"eject_after": 8},
        acted_upon,
        "evidence: 1 inference_status failure (acted upon at 3), the last",
        "evidence: 1 inference_status failure (acted upon at 8), the last",
    ),
    ({"model": "large"}, model, "tiny", "large"),
    ({"roles": RoleSettings(mode=RoleMode.AUTO)}, mode, RoleMode.ADVISORY, RoleMode.AUTO),
]


@pytest.mark.rule("S2")
@pytest.mark.parametrize(("more", "seen", "before", "then"), REACHES, ids=[next(iter(row[0])) for row in REACHES])
def test_a_reload_reaches_each_machine_at_once(
    more: dict[str, Any], seen: Callable[[Rig], Any], before: Any, then: Any
) -> None:
    assert seen(fleet()) == before
    rig = fleet()
    rig.send(Reloaded(settings=rig.with_settings(**more)))
    assert seen(rig) == then


# --- from one epoch to the next ---------------------------------------------------------------------------------------


def test_numbers_of_checks_begin_above_those_of_every_earlier_epoch() -> None:
    rig = fleet(joined=False)
    for epoch in (1, 7):
        core = Fleet(rig.settings, now=rig.now, epoch=epoch)
        numbers = [c.number for c in of(core.handle(Woke(), now=rig.now), RunCheck)]
        assert numbers == [(epoch << 32) + 1] * 3


@pytest.mark.rule("S1", "S7", "R3")
def test_a_successor_goes_on_with_gates_suspicions_and_totals() -> None:
    rig = fleet()
    rig.send(EjectCommand(engine="d", reason=""))
    rig.report("e", Outcome.HTTP_429, count=3)
    rig.batch(rig.run("ghost", Outcome.REFUSED), requests=RequestCounts(served=3))
    rig.now += 4.0
    after = fleet(saved=rig.saved(), now=50.0)
    assert after.saved() == rig.saved()
    assert (after.engine("d").gate_in_s, after.engine("p").gate_in_s) == (6.0, None)
    assert after.fleet.next_due() is None
    assert only(after.tick(Stage.HEALTH), ProbeHealth).engine == "e"
    joining = fleet(saved=fleet(joined=False).saved(), now=50.0)
    assert joining.fleet.next_due() == 50.0


# --- what is told -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("H4")
def test_a_hold_that_ends_by_itself_is_told_with_what_it_was_for() -> None:
    rig = fleet(failure_quarantine_s=20.0)
    rig.report("d", Outcome.HTTP_5XX)
    assert rig.fleet.next_due() == rig.now + 20.0
    rig.now += 20.0
    words = "engine d: quarantine hold over (its time is over; it was for: after a failure (inference_status))"
    assert told(rig.send(Woke())) == [(EventKind.HOLD_ENDED, "d", words)]
    assert rig.fleet.next_due() is None


@pytest.mark.rule("F4", "L2", "H4")
def test_health_at_the_gate_clears_what_health_clears_and_nothing_else_at_the_gate_does() -> None:
    rig = fleet(failure_quarantine_s=500.0)
    rig.report("d", Outcome.READ_TIMEOUT, count=2)
    rig.send(EjectCommand(engine="d", reason=""))
    for verdict, streaks in ((Verdict.FAIL, {FailureClass.TIMEOUT: 2}), (Verdict.PASS, {})):
        check = only(rig.send(ProbeCommand(engine="d")), RunCheck)
        answered = rig.answer_check(check, verdict)
        assert rig.streaks("d") == streaks
    words = "engine d: quarantine hold over (health 200)"
    assert told(answered) == [(EventKind.HOLD_ENDED, "d", words)]
    rig = fleet()
    rig.report("d", Outcome.READ_TIMEOUT, count=2)
    rig.answer_check(only(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck), Verdict.PASS)
    assert rig.streaks("d") == {FailureClass.TIMEOUT: 2}


@pytest.mark.rule("R4")
def test_who_may_be_stopped_is_suspected_no_longer() -> None:
    rig = fleet()
    rig.report("d", Outcome.STREAM_CUT, count=3)
    rig.send(DrainCommand(engines=("d",), reason="", deadline_s=9.0, restart=True, wall=0.0))
    settled = told(rig.answer_capture(only(rig.publish(), CaptureIdentity)))
    assert settled[-2:] == [
        (EventKind.DRAIN_SETTLED, "d", "engine d is ready to stop"),
        (EventKind.HOLD_ENDED, "d", "engine d: verification hold over (the engine is ready to stop)"),
    ]


@pytest.mark.rule("R8", "C1")
def test_admissions_and_moves_are_told() -> None:
    rig = fleet()
    assert (EventKind.ENGINE_JOINED, "d", "engine d joined as incarnation 1") in told(rig.effects)
    moved = told(rig.send(RoleCommand(engine="d", role=Phase.PREFILL)))
    assert moved[0][:2] == (EventKind.ROLE_MOVED, "d")
    rig.send(EjectCommand(engine="d", reason=""))
    check = only(rig.send(ProbeCommand(engine="d")), RunCheck)
    assert (EventKind.ENGINE_READMITTED, "d", "engine d is back as incarnation 2") in told(rig.pass_gate([check]))


# --- what wakes it, and what is to be stored --------------------------------------------------------------------------


def test_it_wakes_for_whatever_comes_first() -> None:
    rig = fleet(failure_quarantine_s=20.0)
    assert rig.fleet.next_due() is None
    rig.report("e", Outcome.HTTP_5XX)
    rig.send(DrainCommand(engines=("d",), reason="", deadline_s=9.0, restart=True, wall=0.0))
    rig.answer_capture(only(rig.publish(), CaptureIdentity), None, local=True)
    assert rig.fleet.next_due() == rig.now + 1.0  # asks again for the identity
    joining = (prefill("p"), decode("d"), decode("e"), decode("f"))
    rig.send(Reloaded(settings=rig.with_settings(engines=joining)))
    assert rig.fleet.next_due() == rig.now  # and f's gate


@pytest.mark.rule("S1")
def test_what_must_be_stored_at_once_and_what_the_next_pass_may_store() -> None:
    rig = fleet()

    def moved(event: Callable[[], object]) -> tuple[bool, bool]:
        decided, counted = rig.fleet.revision, rig.fleet.counters_revision
        event()
        return rig.fleet.revision > decided, rig.fleet.counters_revision > counted

    assert moved(lambda: rig.report("d", Outcome.STREAM_COMPLETE)) == (False, True)
    assert moved(lambda: rig.report("ghost", Outcome.STREAM_COMPLETE)) == (False, True)
    assert moved(lambda: hello(rig)) == (False, True)
    assert moved(lambda: rig.report("d", Outcome.STREAM_CUT, count=3))[0]
    assert moved(lambda: rig.send(Woke())) == (False, False)
    assert moved(lambda: rig.send(RoleCommand(engine="e", role=Phase.PREFILL)))[0]


@pytest.mark.rule("S6")
def test_a_cursor_stays_while_its_proxy_is_there_and_goes_an_hour_after_it() -> None:
    rig = fleet()

    def kept_s() -> list[float | None]:
        return [c.drop_in_s for c in rig.saved().cursors if c.id == EDGE.id]

    rig.report("d", Outcome.STREAM_COMPLETE)
    assert kept_s() == [3600.0]  # not connected
    hello(rig)
    assert kept_s() == [None]
    rig.report("d", Outcome.STREAM_COMPLETE)
    assert kept_s() == [None]
    rig.now += 5.0
    rig.send(ProxyLost(proxy=EDGE, reason="gone"))
    assert kept_s() == [3600.0]
    rig.now += 5.0
    assert kept_s() == [3595.0]
    hello(rig)
    hello(rig, boot=2)
    assert kept_s() == [3600.0]  # of the boot before
    rig.send(ProxyLeft(proxy=replace(EDGE, boot=2), reason="done"))
    assert rig.fleet.report_cursors() == {EDGE: 2}
    rig.now += 3600.0
    rig.tick(Stage.ROLLOVER)
    assert kept_s() == []


@pytest.mark.rule("F12")
def test_what_a_proxy_was_suspected_of_goes_with_it_or_with_its_time() -> None:
    rig = fleet()

    def suspect() -> str:
        (proxy,) = rig.fleet.view(now=rig.now).proxies
        return proxy.suspect

    hello(rig)
    rig.report("d", Outcome.LOCAL)
    rig.report("d", Outcome.LOCAL, proxy=OTHER)
    assert suspect() == "its legs fail by causes of its own"
    rig.send(ProxyLost(proxy=EDGE, reason="gone"))
    hello(rig)
    assert suspect() != ""
    rig.send(ProxyLeft(proxy=EDGE, reason="done"))
    hello(rig)
    assert suspect() == ""
    rig.report("d", Outcome.LOCAL)
    rig.now += 60.0
    trusted = told(rig.tick(Stage.ROLLOVER))
    assert (EventKind.PROXY_TRUSTED, "", "proxy edge/0 is suspect no longer") in trusted
    assert suspect() == ""


def test_the_history_of_an_engine_is_its_newest_fifty_records() -> None:
    rig = fleet()
    for number in range(60):
        rig.report("d", Outcome.WRONG_IDENTITY)
        rig.now += 100.0
        check = only(rig.tick(Stage.HEALTH), RunCheck)
        rig.pass_probe(rig.answer_check(check, Verdict.PASS, detail=f"seen {number}"))
        rig.now += 100.0
        rig.tick(Stage.HEALTH)
    kept = rig.fleet._history["d"]
    assert len(kept) == 50
    told = [words.rpartition("seen ")[2] for at, words in kept if "model check: pass" in words]
    assert told == [str(number) for number in range(60 - len(told), 60)]
    assert kept[-1] == (rig.now - 100.0, "engine d: inference probe: pass: e read its handoff; read a handoff of p")


@pytest.mark.parametrize("check", [Check.HEALTH, Check.MODEL])
def test_an_answer_that_nobody_waits_for_is_no_answer(check: Check) -> None:
    rig = fleet()
    asked = rig.report("d", Outcome.WRONG_IDENTITY)
    model_check = only(asked, RunCheck)
    assert rig.answer_check(replace(model_check, engine="x")) == ()
    assert rig.answer_check(replace(model_check, incarnation=0)) == ()
    assert rig.answer_check(replace(model_check, number=model_check.number + 1, check=check)) == ()
    assert rig.answer_check(model_check) != ()
    assert rig.holds("d") == set[Hold]()
