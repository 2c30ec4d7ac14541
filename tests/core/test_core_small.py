"""Small machines of the core by themselves: processes, relapses, counts, the survey, what is told in sum."""

from typing import Any

import pytest

from narwhal.control.core.changes import Changes
from narwhal.control.core.coverage import Candidate
from narwhal.control.core.engine import Engine
from narwhal.control.core.events import DrainCommand, PassEnded, ProcessIdentity, StageFailure
from narwhal.control.core.process import process_words, same_process, started_after
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.relapse import Relapses
from narwhal.control.core.roster import Roster
from narwhal.control.core.settings import CoreSettings, EngineSpec
from narwhal.control.core.survey import Survey
from narwhal.control.core.tallies import Cursor, Tallies
from narwhal.reports import Batch, ProxyKey, RequestCounts, Run
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase, Stage
from tests.core.rig import Rig, decode, prefill

P, D = Phase.PREFILL, Phase.DECODE
C = FailureClass
PROCESS = ProcessIdentity(version="0.32.0", started_at=1000.0)
EDGE, OTHER = (ProxyKey(id=name, slot=0, boot=1) for name in ("edge", "other"))


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R1", "R8")
@pytest.mark.parametrize(
    ("version", "started_at", "same"),
    [
        ("0.32.0", 1000.0, True),
        ("0.32.0", 1000.5, True),  # two readings of one start differ by rounding
        ("0.32.0", 999.5, True),
        ("0.32.0", 1000.51, False),
        ("0.32.0", 999.49, False),
        ("0.33.0", 1000.0, False),
    ],
)
def test_the_same_process(version: str, started_at: float, same: bool) -> None:
    assert same_process(PROCESS, ProcessIdentity(version=version, started_at=started_at)) is same


@pytest.mark.rule("R4")
def test_a_newer_process_started_later_by_more_than_two_readings_differ() -> None:
    assert [started_after(PROCESS, at) for at in (999.4, 999.5, 1000.0, 1001.0)] == [True, False, False, False]
    assert process_words(PROCESS) == "version 0.32.0 started at 1000.000"


# --- relapses ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F11")
def test_a_class_is_watched_for_a_window_from_when_the_engine_can_work_again() -> None:
    relapses = Relapses()
    assert not relapses.is_relapse(C.STREAM, now=0.0)
    relapses.watch([C.STREAM, C.TIMEOUT], now=100.0, window_s=60.0)
    assert [relapses.is_relapse(C.STREAM, now=now) for now in (100.0, 159.9, 160.0)] == [True, True, False]
    assert relapses.is_relapse(C.TIMEOUT, now=159.9)
    assert not relapses.is_relapse(C.OVERLOAD, now=100.0)
    assert relapses.begin(now=110.0, window_s=60.0) == 115.0
    relapses.watch([C.OVERLOAD], now=111.0, window_s=60.0)
    assert [relapses.is_relapse(C.OVERLOAD, now=now) for now in (174.9, 175.0)] == [True, False]
    relapses.watch([C.OVERLOAD], now=300.0, window_s=60.0)  # the hold has long been over
    assert [relapses.is_relapse(C.OVERLOAD, now=now) for now in (359.9, 360.0)] == [True, False]


@pytest.mark.rule("F11")
def test_holds_double_to_five_minutes_and_are_forgotten_after_a_window_without_one() -> None:
    relapses = Relapses()
    now, spans = 0.0, []
    for _ in range(20):
        spans.append(relapses.begin(now=now, window_s=60.0) - now)
        now += spans[-1] + 59.5
    assert spans == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, *[300.0] * 14]
    assert relapses.level == 16
    assert relapses.begin(now=now + 0.5, window_s=60.0) == now + 0.5 + 5.0
    assert (relapses.level, relapses.forget_due) == (1, now + 0.5 + 65.0)


# --- counts -----------------------------------------------------------------------------------------------------------


def batch(sequence: int, proxy: ProxyKey = EDGE, **counts: int) -> Batch:
    return Batch(proxy=proxy, sequence=sequence, requests=RequestCounts(**counts))


@pytest.mark.rule("S6")
def test_a_report_counts_once_and_its_cursor_waits_for_its_proxy() -> None:
    tallies = Tallies()
    assert tallies.accept(batch(3, served=2, failed=1), connected=True, now=100.0)
    assert tallies.cursors == {EDGE: Cursor(sequence=3)}
    assert tallies.changed == 1
    assert not tallies.accept(batch(3, served=2), connected=True, now=100.0)
    assert not tallies.accept(batch(2, served=2), connected=False, now=100.0)
    assert (tallies.requests, tallies.changed) == (RequestCounts(served=2, failed=1), 1)
    assert tallies.accept(batch(4, served=5), connected=False, now=100.0)
    assert tallies.cursors == {EDGE: Cursor(sequence=4, drop_due=3700.0)}
    assert (tallies.requests, tallies.changed) == (RequestCounts(served=7, failed=1), 2)


@pytest.mark.rule("S6")
def test_a_cursor_goes_an_hour_after_its_proxy_went() -> None:
    tallies = Tallies()
    tallies.accept(batch(3), connected=True, now=100.0)
    tallies.accept(batch(9, OTHER), connected=True, now=100.0)
    tallies.came(EDGE)  # no news
    tallies.went(ProxyKey(id="who", slot=0, boot=1), now=100.0)
    assert tallies.changed == 2
    tallies.went(EDGE, now=200.0)
    assert (tallies.cursors[EDGE], tallies.changed) == (Cursor(sequence=3, drop_due=3800.0), 3)
    tallies.came(EDGE)
    assert (tallies.cursors[EDGE], tallies.changed) == (Cursor(sequence=3), 4)
    tallies.went(EDGE, now=300.0)
    tallies.drop_old(now=3899.9)
    assert (set(tallies.cursors), tallies.changed) == ({EDGE, OTHER}, 5)
    tallies.drop_old(now=3900.0)
    assert (set(tallies.cursors), tallies.changed) == ({OTHER}, 6)


@pytest.mark.rule("S1")
def test_outcomes_of_engines_that_the_fleet_does_not_have_are_counted_together() -> None:
    tallies = Tallies()
    for count in (2, 3):
        tallies.count_unknown(Run(engine="x", phase=D, incarnation=1, outcome=Outcome.STREAM_COMPLETE, count=count))
    assert tallies.unknown == {Outcome.STREAM_COMPLETE: 5}
    tallies.count_gone({Outcome.STREAM_COMPLETE: 10, Outcome.REFUSED: 1})
    assert tallies.unknown == {Outcome.STREAM_COMPLETE: 15, Outcome.REFUSED: 1}
    assert tallies.changed == 1


# --- what is looked at anew -------------------------------------------------------------------------------------------


def settings(*engines: EngineSpec) -> CoreSettings:
    return CoreSettings(name="fleet", model="tiny", engines=engines)


def surveyed(ramp_s: float = 0.0) -> tuple[Roster, Survey, dict[str, Engine]]:
    """p and d, in service since 10."""
    roster = Roster(numbers=0)
    roster.load(settings(prefill("p"), decode("d")), {}, now=0.0)
    for engine in roster.engines.values():
        engine.admit(identity=None, ramp_s=ramp_s, now=10.0)
    return roster, Survey(roster), roster.engines


def test_candidates_are_the_same_tuple_until_an_engine_or_time_changes_something() -> None:
    _, survey, engines = surveyed()
    first = survey.candidates(10.0)
    assert first == (Candidate(id="p", role=P), Candidate(id="d", role=D))
    assert survey.candidates(11.0) is first
    assert survey.boundary is None
    assert survey.due(1e9) == []
    engines["d"].place(Hold.QUARANTINE, "after a failure", now=20.0, due=30.0)
    second = survey.candidates(20.0)
    assert second == (Candidate(id="p", role=P), Candidate(id="d", role=D, soft_since=20.0))
    assert survey.boundary == 30.0
    assert [survey.due(now) for now in (29.9, 30.0)] == [[], ["d"]]
    assert survey.candidates(29.9) is second
    # Its deadline ends the hold, whoever looks; the record lets go of it when it is told to.
    assert survey.candidates(30.0) == first
    engines["d"].expire(now=30.0)
    survey.candidates(30.0)
    assert survey.due(1e9) == []


def test_phases_follow_the_candidates_and_are_computed_once() -> None:
    _, survey, engines = surveyed()
    phases = survey.phases(10.0)
    assert phases == {"p": {P}, "d": {D}}
    assert survey.phases(11.0) is phases
    engines["d"].eject("dead", now=12.0)
    assert survey.phases(12.0) == {"p": {P, D}, "d": set()}


def test_who_was_looked_at_since_it_was_asked_last() -> None:
    _, survey, engines = surveyed()
    survey.candidates(10.0)
    assert list(survey.fresh()) == ["p", "d"]
    assert list(survey.fresh()) == []
    engines["d"].place(Hold.DRIFT, "slow", now=11.0)
    survey.candidates(11.0)
    engines["p"].place(Hold.DRIFT, "slow", now=12.0)
    survey.candidates(12.0)
    assert list(survey.fresh()) == ["d", "p"]


def test_after_a_reload_all_are_looked_at_and_nothing_of_those_that_are_gone_is_kept() -> None:
    roster, survey, engines = surveyed()
    engines["p"].place(Hold.QUARANTINE, "after a failure", now=10.0, due=30.0)
    survey.candidates(10.0)
    survey.fresh()
    roster.reload(settings(decode("e"), decode("d")), now=11.0)
    assert survey.candidates(11.0) == (Candidate(id="e", role=D, hard=True), Candidate(id="d", role=D))
    assert (list(survey.fresh()), survey.boundary) == (["e", "d"], None)
    assert roster.changes == Changes(
        decided=roster.changes.decided,
        counted=roster.changes.counted,
        unseen={},
        unchecked=roster.changes.unchecked,
        anew=False,
    )


def test_the_boundary_is_the_first_of_all_that_ends_by_itself() -> None:
    _, survey, engines = surveyed(ramp_s=9.0)
    survey.candidates(10.0)
    assert survey.boundary == 11.0  # the first step of the ramp
    engines["d"].place(Hold.QUARANTINE, "after a failure", now=10.0, due=10.5)
    survey.candidates(10.0)
    assert survey.boundary == 10.5
    assert [survey.due(now) for now in (10.5, 11.0)] == [["d"], ["p", "d"]]


# --- what is told in sum ----------------------------------------------------------------------------------------------


def sums(rig: Rig) -> list[tuple[EventKind, str, str]]:
    kinds = (EventKind.READY, EventKind.NOT_READY, EventKind.LAST_ENGINE_KEPT)
    return [(e.kind, e.engine, e.message) for e in rig.effects if isinstance(e, Record) and e.kind in kinds]


def pinned(**more: Any) -> Rig:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), liveness_every=0, **more)
    rig.effects.clear()
    return rig


@pytest.mark.rule("M9", "H3")
def test_whether_the_fleet_is_ready_is_told_when_it_changes() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0)
    assert sums(rig) == [
        (EventKind.NOT_READY, "", "not ready: no eligible engines"),
        (EventKind.READY, "", "ready"),
    ]
    rig = pinned(monitor_failure_limit=1)
    rig.report("d", Outcome.REFUSED, count=3)
    rig.run_pass()
    assert sums(rig) == [(EventKind.NOT_READY, "", "not ready: no eligible engines")]
    failure = StageFailure(stage=Stage.LIVENESS, error_class="OSError", message="no")
    rig.send(PassEnded(failures=(failure,)))
    assert sums(rig)[1:] == [(EventKind.NOT_READY, "", "not ready: monitoring degraded: liveness OSError")]
    rig.send(PassEnded())
    rig.readmit("d")
    assert sums(rig)[2:] == [
        (EventKind.NOT_READY, "", "not ready: no eligible engines"),
        (EventKind.READY, "", "ready"),
    ]
    rig.send(DrainCommand(engines=("p", "d"), reason="", deadline_s=60.0, restart=True, wall=0.0))
    assert sums(rig)[4:] == [(EventKind.NOT_READY, "", "not ready: maintenance")]


@pytest.mark.rule("H2")
def test_who_serves_in_spite_of_its_holds_is_told_of_each_time_it_begins() -> None:
    rig = pinned(failure_quarantine_s=5.0)
    kept = (EventKind.LAST_ENGINE_KEPT, "d", "engine d serves decode in spite of its holds: no other engine can")
    rig.report("d", Outcome.HTTP_5XX)
    rig.report("d", Outcome.HTTP_5XX)  # held for longer, which is nothing else
    rig.run_pass()
    assert sums(rig) == [kept]
    rig.now += 60.0
    rig.run_pass()
    rig.report("d", Outcome.HTTP_5XX)
    assert sums(rig) == [kept, kept]


@pytest.mark.rule("H2", "P4")
def test_the_last_engine_of_both_phases_is_told_of_with_both() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0, failure_quarantine_s=5.0)
    rig.report("p", Outcome.REFUSED, count=3)
    rig.effects.clear()
    rig.report("d", Outcome.HTTP_5XX)
    words = "engine d serves prefill and decode in spite of its holds: no other engine can"
    assert sums(rig) == [(EventKind.LAST_ENGINE_KEPT, "d", words)]
