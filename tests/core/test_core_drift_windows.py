"""Drift window by window, without a fleet around it: what is judged, by what, when, and in which words (spec H5)."""

from collections.abc import Mapping

import pytest

from narwhal.control.core.events import LegSeen, ProcessIdentity
from narwhal.control.core.records import EventKind
from narwhal.control.core.settings import DriftSettings
from narwhal.control.core.view import DriftView
from narwhal.measures import LegMeasures
from narwhal.vocabulary import Hold, Outcome, Phase
from tests.core.drift_windows import ABOVE, SLOW, SLOW_WORDS, USUAL, USUAL_WORDS, WITHIN, Windows, probes, told
from tests.core.rig import PROCESS

NEWER = ProcessIdentity(version=PROCESS.version, started_at=PROCESS.started_at + 60.0)

# --- one engine -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("H5")
def test_from_the_first_slow_window_to_probation_a_probe_and_back() -> None:
    fleet = Windows()
    fleet.usual(3)
    assert told(fleet.usual(2, d1=SLOW)) == []
    placed = fleet.usual(1, d1=SLOW)
    assert told(placed) == [(EventKind.HOLD_PLACED, f"engine d1: drift hold: {SLOW_WORDS}, 3 windows in a row")]
    held = fleet.engines["d1"].holds[Hold.DRIFT]
    assert (held.reason, held.since, held.due) == (f"{SLOW_WORDS}, 3 windows in a row", fleet.now, None)
    assert fleet.usual(1, d1=SLOW) == []
    fifth = fleet.usual(1, d1=SLOW)
    words = f"engine d1: inference probe begins ({SLOW_WORDS}, 5 windows in a row)"
    assert (told(fifth), probes(fifth)) == ([(EventKind.PROBE_STARTED, words)], ["d1"])
    assert fleet.usual(2) == []
    over = f"engine d1: drift hold over ({USUAL_WORDS}, 3 windows in a row)"
    assert told(fleet.usual(1)) == [(EventKind.HOLD_ENDED, over)]
    assert fleet.drifting() == set()


@pytest.mark.rule("H5")
def test_a_probe_is_asked_for_at_every_fifth_slow_window_in_a_row() -> None:
    fleet = Windows()
    fleet.usual(3)
    asked = []
    for number in range(1, 11):
        if found := probes(fleet.usual(1, d1=SLOW)):
            fleet.suspicions.known.clear()  # its probe has ended
            asked.append((number, found))
    assert asked == [(5, ["d1"]), (10, ["d1"])]


@pytest.mark.rule("H5")
@pytest.mark.parametrize(("step", "drifts"), [(WITHIN, False), (ABOVE, True)])
def test_a_window_drifts_above_twice_what_is_usual(step: float, drifts: bool) -> None:
    fleet = Windows(probation_windows=1)
    fleet.usual(3)
    fleet.usual(1, d1=step)
    assert (fleet.drifting() == {"d1"}) is drifts
    view = fleet.drift.view("d1")
    assert view is not None
    assert (view.drifting, view.good) == (int(drifts), 1 - int(drifts))


@pytest.mark.rule("H5")
def test_what_is_shown_of_the_newest_window_that_was_judged() -> None:
    fleet = Windows()
    fleet.usual(3)
    assert fleet.drift.view("d1") is None  # learnt from, and not judged
    fleet.usual(2, d1=SLOW)
    view = fleet.drift.view("d1")
    assert view is not None
    assert view == DriftView(step_s=view.step_s, usual_s=view.usual_s, samples=10, drifting=2, good=0)
    assert [view.step_s, view.usual_s] == pytest.approx([SLOW, USUAL], rel=0.05)
    fleet.window(2, d1=SLOW, d2=USUAL, d3=USUAL)  # too few to be judged: the row goes on later
    assert fleet.drift.view("d1") == view
    fleet.usual(1)
    view = fleet.drift.view("d1")
    assert view is not None
    assert (view.drifting, view.good) == (0, 1)
    assert fleet.drift.view("nobody") is None


@pytest.mark.rule("H5")
def test_nobody_is_judged_before_three_windows_are_learnt_nor_by_less_than_min_samples() -> None:
    fleet = Windows(probation_windows=1)
    fleet.usual(2)
    fleet.usual(1, d1=SLOW)
    assert fleet.drifting() == set()
    fleet = Windows(probation_windows=1, min_samples=4)
    fleet.usual(3)
    fleet.window(3, d1=SLOW, d2=USUAL, d3=USUAL)
    assert fleet.drifting() == set()
    fleet.window(4, d1=SLOW, d2=USUAL, d3=USUAL)
    assert fleet.drifting() == {"d1"}


@pytest.mark.rule("H5")
def test_the_baseline_is_the_lower_median_of_the_newest_ten_good_windows() -> None:
    fleet = Windows(probation_windows=99)
    fleet.usual(3)
    fleet.usual(5, d1=0.03)
    view = fleet.drift.view("d1")
    assert view is not None
    assert view.usual_s == pytest.approx(0.03, rel=0.05)  # of the seven before it four are
    fleet = Windows(probation_windows=99)
    fleet.usual(2)
    fleet.usual(3, d1=0.03)
    view = fleet.drift.view("d1")
    assert view is not None
    assert view.usual_s == pytest.approx(USUAL, rel=0.05)  # two of each
    fleet.usual(10, d1=0.03)
    assert list(fleet.drift._known["d1"].baseline) == [pytest.approx(0.03, rel=0.05)] * 10


@pytest.mark.rule("H5")
def test_only_decode_steps_of_an_engine_that_is_not_ramping_up_count() -> None:
    fleet = Windows(probation_windows=1)
    fleet.usual(3)
    fleet.measure("d1", SLOW, 99, Phase.PREFILL)
    fleet.engines["d2"].ramp = ((fleet.now + 1000.0, 1.0),)
    fleet.measure("d2", SLOW, 99)
    nothing = LegMeasures(engine="d1", phase=Phase.DECODE, incarnation=1, sketches={}, waiting=3)
    fleet.drift.measured(nothing)
    fleet.usual(1)
    assert fleet.drifting() == set()
    samples: Mapping[str, int] = {name: pace.samples.total for name, pace in fleet.drift._known.items()}
    assert set(samples.values()) == {0}


# --- most engines -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("H5")
def test_when_most_are_slow_it_is_told_once_nothing_is_concluded_and_then_it_is_over() -> None:
    fleet = Windows(probation_windows=1)
    fleet.usual(3)
    words = "2 of 3 decode engines that serve take longer than usual for a token: the fleet is overloaded, none of "
    slow = {"d1": SLOW, "d2": SLOW}
    assert told(fleet.usual(1, **slow)) == [(EventKind.FLEET_SLOW, words + "them is put on probation")]
    assert told(fleet.usual(2, **slow)) == []
    over = "no more than 0 of 3 decode engines that serve take longer than usual for a token: engines are judged one "
    assert told(fleet.usual(1)) == [(EventKind.FLEET_USUAL, over + "by one again")]
    assert told(fleet.usual(1)) == []
    assert told(fleet.usual(1, **slow)) == [(EventKind.FLEET_SLOW, words + "them is put on probation")]
    assert fleet.drifting() == set()


@pytest.mark.rule("H5")
def test_five_windows_of_overload_are_the_new_normal_of_all_that_are_not_on_probation() -> None:
    fleet = Windows(probation_windows=1)
    fleet.usual(3)
    fleet.usual(1, d3=SLOW)
    assert fleet.drifting() == {"d3"}
    assert told(fleet.usual(4, d1=SLOW, d2=SLOW, d3=SLOW)) != []
    assert fleet.drift._known["d1"].baseline[-1] < 0.03
    words = "2 of 2 decode engines that serve take longer than usual for a token, 5 windows in a row: from now on that "
    assert told(fleet.usual(1, d1=SLOW, d2=SLOW, d3=SLOW)) == [(EventKind.FLEET_USUAL, words + "is what is usual")]
    assert [round(fleet.drift._known[name].baseline[0], 2) for name in ("d1", "d2", "d3")] == [0.06, 0.06, 0.02]
    assert len(fleet.drift._known["d1"].baseline) == 3
    # By that, one that is as slow as all have become is as usual, and one that is slower is found.
    assert [kind for kind, _ in told(fleet.usual(1, d1=SLOW, d2=3 * SLOW, d3=USUAL))] == [EventKind.HOLD_PLACED]
    assert fleet.drifting() == {"d2", "d3"}


# --- probation --------------------------------------------------------------------------------------------------------


def on_probation(**drift: float) -> Windows:
    fleet = Windows(probation_windows=1, **drift)
    fleet.usual(3)
    fleet.usual(1, d1=SLOW)
    assert fleet.drifting() == {"d1"}
    return fleet


@pytest.mark.rule("H5")
def test_one_on_probation_is_sampled_once_when_half_of_its_window_has_told_too_little() -> None:
    fleet = on_probation()
    began = fleet.now
    fleet.measure("d1", USUAL, 2)
    assert fleet.drift.tick(now=began + 14.75) == []
    asked = fleet.drift.tick(now=began + 15.0)
    words = "engine d1: inference probe begins (sampled on probation)"
    assert (told(asked), probes(asked)) == ([(EventKind.PROBE_STARTED, words)], ["d1"])
    fleet.suspicions.known.clear()
    assert fleet.drift.tick(now=began + 20.0) == []
    fleet.window(d2=USUAL, d3=USUAL)
    assert probes(fleet.drift.tick(now=fleet.now + 15.0)) == ["d1"]


@pytest.mark.rule("H5")
def test_one_that_proxies_tell_enough_of_or_that_is_out_is_not_sampled() -> None:
    fleet = on_probation()
    fleet.measure("d1", USUAL, 3)
    assert fleet.drift.tick(now=fleet.now + 29.0) == []
    fleet.window(d2=USUAL, d3=USUAL)
    fleet.engines["d1"].eject("broken", now=fleet.now)
    assert fleet.drift.tick(now=fleet.now + 29.0) == []
    for engine in ("d2", "d3"):
        fleet.engines[engine].place(Hold.DRIFT, "slow", now=fleet.now)
    assert probes(fleet.drift.tick(now=fleet.now + 29.0)) == ["d2", "d3"]


@pytest.mark.rule("H5")
@pytest.mark.parametrize(
    ("seen", "counted"),
    [
        (LegSeen(outcome=Outcome.STREAM_COMPLETE, step_s=USUAL, steps=15), 15),
        (LegSeen(outcome=Outcome.STREAM_COMPLETE, step_s=USUAL, steps=1), 3),
        (LegSeen(outcome=Outcome.STREAM_COMPLETE, step_s=0.0, steps=15), 0),
        (LegSeen(outcome=Outcome.STREAM_CUT, step_s=USUAL, steps=15), 0),
        (None, 0),
    ],
)
def test_what_a_probes_decode_leg_tells_of_one_on_probation(seen: LegSeen | None, counted: int) -> None:
    fleet = on_probation()
    for engine in ("d1", "d2", "nobody"):
        fleet.drift.probed(engine, seen)
    assert fleet.drift._of("d1").probed.total == counted
    assert fleet.drift._of("d2").probed.total == 0
    assert fleet.drift._of("d1").samples.total == 0
    assert "nobody" not in fleet.drift._known


@pytest.mark.rule("H5")
def test_one_that_comes_back_as_the_same_process_has_its_good_windows_before_it_and_another_begins_anew() -> None:
    fleet = on_probation()
    fleet.usual(2)
    fleet.measure("d1", SLOW)
    engine = fleet.engines["d1"]
    for before in (PROCESS, None):  # the same, or one that nobody can tell apart
        assert fleet.drift.admitted(engine, before=before) == []
        pace = fleet.drift._known["d1"]
        assert (pace.good, pace.samples.total, fleet.drifting()) == (0, 0, {"d1"})
    engine.identity = None
    assert fleet.drift.admitted(engine, before=PROCESS) == []
    engine.identity = NEWER
    records = fleet.drift.admitted(engine, before=PROCESS)
    assert [(r.kind, r.message) for r in records] == [
        (EventKind.HOLD_ENDED, "engine d1: drift hold over (another process runs it)")
    ]
    assert (fleet.drifting(), fleet.drift.view("d1")) == (set(), None)
    assert fleet.drift.admitted(engine, before=PROCESS) == []


@pytest.mark.rule("H5", "S1")
def test_a_successor_judges_one_on_probation_by_its_peers_and_lets_it_go_where_there_are_none() -> None:
    fleet = Windows()
    fleet.engines["d1"].place(Hold.DRIFT, "slow", now=0.0)
    for _ in range(3):
        fleet.window(d2=USUAL, d3=USUAL)
    fleet.usual(2, d1=SLOW)
    view = fleet.drift.view("d1")
    assert view is not None
    assert view.usual_s == pytest.approx(USUAL, rel=0.05)
    assert view.drifting == 2
    alone = Windows()
    alone.engines["d1"].place(Hold.DRIFT, "slow", now=0.0)
    assert alone.window(d1=SLOW) == alone.window(d1=SLOW) == []
    (over,) = told(alone.window(d1=SLOW))
    assert over[1] == "engine d1: drift hold over (59.9 ms a token where 59.9 ms are usual, 3 windows in a row)"


# --- windows ----------------------------------------------------------------------------------------------------------


def test_a_window_is_closed_at_its_end_and_judged_once() -> None:
    fleet = Windows(probation_windows=1)
    fleet.usual(3)
    for engine in ("d1", "d2", "d3"):
        fleet.measure(engine, SLOW if engine == "d1" else USUAL)
    fleet.drift.rollover(now=fleet.now + 29.75)
    assert fleet.drift.tick(now=fleet.now + 29.75) == []
    fleet.drift.rollover(now=fleet.now + 30.0)
    assert len(fleet.drift.tick(now=fleet.now + 30.0)) == 1
    assert fleet.drift.tick(now=fleet.now + 30.0) == []


def test_shorter_windows_begin_at_once_and_longer_ones_with_the_next() -> None:
    for window_s, end_s in ((10.0, 10.0), (300.0, 30.0)):
        fleet = Windows(probation_windows=1)
        fleet.usual(3)
        fleet.drift.configure(DriftSettings(window_s=window_s, probation_windows=1), now=fleet.now)
        for engine in ("d1", "d2", "d3"):
            fleet.measure(engine, SLOW if engine == "d1" else USUAL)
        for at, drifting in ((fleet.now + end_s - 0.25, set()), (fleet.now + end_s, {"d1"})):
            fleet.drift.rollover(now=at)
            fleet.drift.tick(now=at)
            assert fleet.drifting() == drifting


def test_one_that_left_or_became_another_between_the_end_of_its_window_and_the_judgement_is_not_judged() -> None:
    fleet = Windows(probation_windows=1)
    fleet.usual(3)
    for end in ("forgotten", "ejected", "gone"):
        for engine in ("d1", "d2", "d3"):
            fleet.measure(engine, SLOW if engine == "d1" else USUAL)
        fleet.now += 30.0
        fleet.drift.rollover(now=fleet.now)
        if end == "forgotten":
            fleet.drift.forget("d1")
        elif end == "ejected":
            fleet.engines["d1"].eject("broken", now=fleet.now)
        else:
            del fleet.engines["d1"]
        assert fleet.drift.tick(now=fleet.now) == []
        if end == "forgotten":
            fleet.usual(3)
