"""One engine's record: what each transition leaves behind, and what an illegal one says (spec H1, H4, R8, R10, F1)."""

from collections.abc import Callable

import pytest

from narwhal.control.core.coverage import Candidate, after, uncovered
from narwhal.control.core.engine import (
    Checked,
    Drain,
    Engine,
    Held,
    IllegalTransitionError,
    Move,
    Standing,
    joining,
    ramp_from,
)
from narwhal.control.core.events import CheckResult, ProcessIdentity
from narwhal.control.core.evidence import Evidence, Seen
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Phase, Verdict
from tests.core.rig import PROCESS, decode, prefill

C = FailureClass
SEEN = Seen(outcome=Outcome.REFUSED, phase=Phase.DECODE, at=1.0)
STALL = Seen(outcome=Outcome.STALLED, phase=Phase.DECODE, at=2.0)
EVERY_OTHER = (Hold.DRAIN, Hold.MAINTENANCE, Hold.DRIFT, Hold.QUARANTINE, Hold.RELAPSE, Hold.VERIFICATION)


def admitted(*, pinned: bool = False, ramp_s: float = 0.0) -> Engine:
    engine = joining(decode("d", pinned=pinned), now=0.0)
    engine.admit(identity=PROCESS, ramp_s=ramp_s, now=0.0)
    return engine


def laden(standing: Standing = Standing.IN_SERVICE) -> Engine:
    """With every hold that it may carry, a drain, evidence, misses, checks and a ramp that has begun."""
    engine = joining(decode("d"), now=0.0) if standing is Standing.JOINING else admitted(ramp_s=30.0)
    if standing is Standing.EJECTED:
        engine.eject("broken", now=4.0)
    for kind in EVERY_OTHER:
        engine.place(kind, f"{kind} it is", now=5.0)
    engine.drain = Drain(reason="disk", url="http://d", since=5.0, due=90.0, wall=0.0)
    engine.evidence.add(C.STREAM, STALL, 2)
    engine.evidence.blame("p", 1)
    engine.evidence.timeout_is_stream = True
    engine.misses = 1
    engine.checks[Check.HEALTH] = Checked(result=CheckResult(verdict=Verdict.PASS, detail="200"), at=1.0)
    return engine


def nothing_against(engine: Engine) -> bool:
    evidence = engine.evidence
    found = (evidence.streaks, evidence.producers, evidence.stalls, evidence.timeout_is_stream, engine.misses)
    return found == ({}, {}, 0, False, 0)


# --- what is legal ----------------------------------------------------------------------------------------------------

ILLEGAL: list[tuple[Callable[[], Engine], Callable[[Engine], None], str]] = [
    (
        lambda: joining(decode("d"), now=0.0),
        lambda e: e.eject("x", now=1.0),
        "d is joining: cannot eject",
    ),
    (
        lambda: joining(decode("d"), now=0.0),
        lambda e: e.rejoin(decode("d"), "x", now=1.0),
        "d is joining: cannot rejoin",
    ),
    (
        admitted,
        lambda e: e.admit(identity=None, ramp_s=0.0, now=1.0),
        "d is in service: cannot admit",
    ),
    (lambda: laden(Standing.EJECTED), lambda e: e.eject("x", now=9.0), "d is ejected: cannot eject"),
    (admitted, lambda e: e.assume(Phase.DECODE, now=1.0), "d is already decode"),
    (lambda: admitted(pinned=True), lambda e: e.assume(Phase.PREFILL, now=1.0), "d is pinned to decode"),
    (admitted, lambda e: e.place(Hold.EJECTED, "x", now=1.0), "d: ejected is a standing, not a hold to place"),
    (admitted, lambda e: e.place(Hold.JOINING, "x", now=1.0), "d: joining is a standing, not a hold to place"),
    (
        admitted,
        lambda e: e.place(Hold.QUARANTINE, "x", now=1.0, due=1.0),
        "d: quarantine would end before it began",
    ),
    (lambda: laden(Standing.EJECTED), lambda e: e.lift(Hold.EJECTED), "d: ejected is a standing, not a hold to lift"),
    (admitted, lambda e: e.lift(Hold.DRIFT), "d carries no drift hold"),
]


@pytest.mark.parametrize(("make", "do", "words"), ILLEGAL, ids=[words for _, _, words in ILLEGAL])
def test_an_illegal_transition_says_so_and_changes_nothing(
    make: Callable[[], Engine], do: Callable[[Engine], None], words: str
) -> None:
    engine, before = make(), make()
    with pytest.raises(IllegalTransitionError) as refused:
        do(engine)
    assert str(refused.value) == words
    assert engine == before


def test_one_that_a_drain_keeps_out_may_be_admitted_whatever_its_standing() -> None:
    for standing in Standing:
        engine = laden(standing)
        assert engine.shut
        assert engine.may(Move.ADMIT)
    assert not admitted().may(Move.ADMIT)


# --- what each leaves behind ------------------------------------------------------------------------------------------


@pytest.mark.rule("R8")
def test_one_that_was_never_admitted() -> None:
    engine = joining(prefill("p"), now=7.0)
    assert engine.holds == {Hold.JOINING: Held(kind=Hold.JOINING, reason="never admitted", since=7.0)}
    assert (engine.standing, engine.role, engine.incarnation) == (Standing.JOINING, Phase.PREFILL, 0)


@pytest.mark.rule("F1", "R1", "R5", "R10")
@pytest.mark.parametrize("standing", Standing)
def test_admission_ends_its_standing_every_drain_and_every_suspicion(standing: Standing) -> None:
    engine = laden(standing)
    newer = ProcessIdentity(version="0.33.0", started_at=1_800_000_000.0)
    before, decided, counted = engine.incarnation, engine.changes.decided, engine.changes.counted
    engine.admit(identity=newer, ramp_s=30.0, now=100.0)
    assert engine.standing is Standing.IN_SERVICE
    assert set(engine.holds) == {Hold.DRIFT, Hold.QUARANTINE, Hold.RELAPSE}
    assert (engine.incarnation, engine.identity, engine.admitted_at) == (before + 1, newer, 100.0)
    assert (engine.drain, engine.weight(now=100.0), engine.ramp) == (None, 0.1, ramp_from(100.0, 30.0))
    assert nothing_against(engine)
    assert (engine.changes.decided, engine.changes.counted) == (decided + 1, counted + 1)
    engine.eject("again", now=101.0)
    engine.admit(identity=newer, ramp_s=0.0, now=102.0)
    assert (engine.weight(now=102.0), engine.ramp) == (1.0, ())


@pytest.mark.rule("F3", "R3")
def test_ejection_ends_the_suspicion_and_the_ramp_and_keeps_what_was_seen() -> None:
    engine = laden()
    decided = engine.changes.decided
    engine.eject("broken", now=9.0)
    assert engine.holds.keys() == {Hold.EJECTED, *EVERY_OTHER} - {Hold.VERIFICATION}
    assert engine.holds[Hold.EJECTED] == Held(kind=Hold.EJECTED, reason="broken", since=9.0)
    assert (engine.ramp, engine.weight(now=9.0), engine.incarnation) == ((), 1.0, 1)
    assert (engine.evidence.streaks, engine.misses, engine.drain is None) == ({C.STREAM: 2}, 1, False)
    assert engine.changes.decided == decided + 1


@pytest.mark.rule("R8", "S2")
@pytest.mark.parametrize("standing", [Standing.IN_SERVICE, Standing.EJECTED])
def test_another_engine_under_an_old_id_keeps_its_drain_and_its_counters_only(standing: Standing) -> None:
    engine = laden(standing)
    decided = engine.changes.decided
    engine.rejoin(prefill("d"), "its address changed", now=9.0)
    assert engine.standing is Standing.JOINING
    assert set(engine.holds) == {Hold.JOINING, Hold.DRAIN, Hold.MAINTENANCE}
    assert engine.holds[Hold.JOINING] == Held(kind=Hold.JOINING, reason="its address changed", since=9.0)
    assert (engine.spec, engine.role, engine.identity) == (prefill("d"), Phase.PREFILL, None)
    assert (engine.incarnation, engine.checks, engine.ramp, engine.weight(now=9.0)) == (1, {}, (), 1.0)
    assert nothing_against(engine)
    assert engine.changes.decided == decided + 1


@pytest.mark.rule("C1")
def test_a_role_is_taken_at_an_instant() -> None:
    engine = admitted()
    engine.assume(Phase.PREFILL, now=3.0)
    assert (engine.role, engine.role_since, engine.spec.role) == (Phase.PREFILL, 3.0, Phase.DECODE)


@pytest.mark.rule("H1", "H4")
def test_a_hold_that_is_placed_again_keeps_its_start_unless_it_is_over() -> None:
    engine = admitted()
    engine.place(Hold.QUARANTINE, "first", now=1.0, due=5.0)
    engine.place(Hold.QUARANTINE, "second", now=4.0, due=8.0)
    assert engine.holds[Hold.QUARANTINE] == Held(kind=Hold.QUARANTINE, reason="second", since=1.0, due=8.0)
    engine.place(Hold.QUARANTINE, "third", now=8.0, due=9.0)
    assert engine.holds[Hold.QUARANTINE] == Held(kind=Hold.QUARANTINE, reason="third", since=8.0, due=9.0)
    engine.lift(Hold.QUARANTINE)
    assert engine.holds == {}
    engine.place(Hold.DRIFT, "slow", now=9.0)
    assert engine.holds[Hold.DRIFT].due is None


@pytest.mark.rule("H4", "R10")
def test_what_ends_by_itself_ends_at_its_instant() -> None:
    engine = admitted(ramp_s=30.0)
    first, second = (at for at, _ in engine.ramp[:2])
    engine.place(Hold.QUARANTINE, "failed", now=1.0, due=first)
    engine.place(Hold.DRIFT, "slow", now=1.0)
    assert sorted(engine.due())[:3] == [first, first, second]
    decided = engine.changes.decided
    engine.changes.unseen.clear()
    assert engine.expire(now=first - 0.25) == []
    assert (engine.changes.decided, list(engine.changes.unseen)) == (decided, ["d"])
    over = engine.holds[Hold.QUARANTINE]
    assert engine.expire(now=first) == [over]
    assert (set(engine.holds), engine.changes.decided) == ({Hold.DRIFT}, decided + 1)
    assert (engine.settled_weight, engine.ramp[0][0]) == (0.2, second)
    assert engine.expire(now=first + 100) == []
    assert (engine.weight(now=first + 100), engine.ramp, list(engine.due())) == (1.0, (), [])


@pytest.mark.rule("R10")
def test_the_ramp_is_nine_steps_of_a_tenth_on_half_seconds_and_never_early() -> None:
    instants = [1003.5, 1007.0, 1010.0, 1013.5, 1017.0, 1020.0, 1023.5, 1027.0, 1030.0]
    assert ramp_from(1000.0, 30.0) == tuple((at, (step + 2) / 10) for step, at in enumerate(instants))
    assert ramp_from(1000.0, 0.0) == ()
    engine = admitted()
    engine.ramp, engine.settled_weight = ramp_from(1000.0, 30.0), 0.1
    weights = [engine.weight(now=at) for at in (1000.0, 1003.25, 1003.5, 1029.75, 1030.0)]
    assert weights == [0.1, 0.1, 0.2, 0.9, 1.0]


@pytest.mark.rule("H2", "H4")
def test_what_coverage_is_told() -> None:
    engine = admitted(pinned=True)
    free = Candidate(id="d", role=Phase.DECODE, pinned=True)
    assert (engine.candidate(now=1.0), engine.free(now=1.0)) == (free, True)
    engine.place(Hold.DRIFT, "slow", now=3.0)
    engine.place(Hold.QUARANTINE, "failed", now=2.0, due=9.0)
    held = Candidate(id="d", role=Phase.DECODE, pinned=True, soft_since=2.0)
    assert (engine.candidate(now=4.0), engine.free(now=4.0)) == (held, False)
    assert engine.candidate(now=4.0, without=(Hold.QUARANTINE,)).soft_since == 3.0
    assert engine.candidate(now=9.0).soft_since == 3.0
    engine.place(Hold.DRAIN, "disk", now=5.0)
    assert engine.candidate(now=5.0).hard
    assert not engine.candidate(now=5.0, without=(Hold.DRAIN,)).hard


def test_numbers_rise_and_tries_of_the_gate_are_counted() -> None:
    engine = admitted()
    assert [engine.next_number() for _ in range(3)] == [1, 2, 3]
    for verdict, check in ((Verdict.FAIL, "model"), (Verdict.FAIL, "model"), (Verdict.PASS, "")):
        engine.gate_ended(verdict, check)
    assert engine.gates == {(Verdict.FAIL, "model"): 2, (Verdict.PASS, ""): 1}


def test_ready_to_stop_is_a_drain_that_has_settled() -> None:
    engine = admitted()
    assert not engine.ready_to_stop
    engine.drain = Drain(reason="disk", url="http://d", since=0.0, due=9.0, wall=0.0)
    assert not engine.ready_to_stop
    engine.drain.settled = True
    assert engine.ready_to_stop


# --- coverage ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("H3", "M9")
def test_who_serves_nothing_is_named_by_phase_and_what_each_alone_would_serve() -> None:
    gone = Candidate(id="p", role=Phase.PREFILL, hard=True)
    held = Candidate(id="d", role=Phase.DECODE, pinned=True, soft_since=1.0)
    assert uncovered([gone, held]) == (Phase.PREFILL,)
    assert uncovered([]) == (Phase.PREFILL, Phase.DECODE)
    back = Candidate(id="p", role=Phase.PREFILL)
    assert after([gone, held], [back, held]) == {"p": {Phase.PREFILL, Phase.DECODE}, "d": {Phase.DECODE}}


# --- evidence ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F1", "F10")
def test_failures_add_up_by_class_and_the_newest_is_kept() -> None:
    evidence = Evidence()
    evidence.add(C.STREAM, SEEN, 1)
    evidence.add(C.STREAM, STALL, 2)
    evidence.add(C.OVERLOAD, SEEN, 3)
    assert evidence.streaks == evidence.totals == {C.STREAM: 3, C.OVERLOAD: 3}
    assert (evidence.stalls, evidence.last) == (2, {C.STREAM: STALL, C.OVERLOAD: SEEN})
    assert evidence.clear(frozenset({C.STREAM}))
    assert (evidence.streaks, evidence.totals[C.STREAM], evidence.stalls) == ({C.OVERLOAD: 3}, 3, 0)
    assert not evidence.clear(frozenset({C.STREAM}))
    assert evidence.last[C.STREAM] is STALL


@pytest.mark.rule("F7", "F11")
def test_what_is_kept_beside_the_streaks_ends_with_the_classes_that_it_is_of() -> None:
    evidence = Evidence()
    for failure in (C.TIMEOUT, C.STREAM, C.INFERENCE_STATUS, C.CONNECTION):
        evidence.add(failure, STALL, 1)
    evidence.timeout_is_stream = True
    for producer in ("p1", "p2", "p1"):
        evidence.blame(producer, 1)
    assert list(evidence.producers) == ["p2", "p1"]  # newest last
    evidence.clear(frozenset({C.CONNECTION}))
    assert (evidence.stalls, evidence.timeout_is_stream) == (4, True)
    evidence.clear(frozenset({C.TIMEOUT}))
    assert (evidence.timeout_is_stream, list(evidence.producers)) == (False, ["p2", "p1"])
    evidence.clear(frozenset({C.STREAM, C.INFERENCE_STATUS}), held=True)
    assert (evidence.stalls, list(evidence.producers)) == (0, ["p2", "p1"])
    evidence.clear(frozenset())
    assert evidence.producers == {}
