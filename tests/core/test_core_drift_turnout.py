"""Who speaks for the fleet, and what a probe of an idle engine is worth: drift window by window (spec H5)."""

import pytest

from narwhal.control.core.decisions import Decision
from narwhal.control.core.engine import Drain
from narwhal.control.core.events import LegSeen
from narwhal.control.core.records import EventKind
from narwhal.vocabulary import Hold, Outcome
from tests.core.drift_windows import SLOW, USUAL, Windows, probes, told

FIVE = ("d1", "d2", "d3", "d4", "d5")
IDLE = 0.032  # of an engine three times as slow as usual, without other work: within twice what is usual under load


def all_of(engines: tuple[str, ...], step: float) -> dict[str, float]:
    return dict.fromkeys(engines, step)


def kinds(decisions: list[Decision]) -> list[EventKind]:
    return [kind for kind, _ in told(decisions)]


def learnt() -> Windows:
    fleet = Windows(*FIVE, probation_windows=1)
    for _ in range(3):
        fleet.window(**all_of(FIVE, USUAL))
    return fleet


def drain(fleet: Windows, engine: str) -> None:
    fleet.engines[engine].place(Hold.DRAIN, "new version", now=fleet.now)
    fleet.engines[engine].drain = Drain(
        reason="new version", url="http://e", since=fleet.now, due=fleet.now + 60.0, wall=0.0
    )


# --- most of the fleet ------------------------------------------------------------------------------------------------


@pytest.mark.rule("H5")
@pytest.mark.parametrize("measured", [1, 2])
def test_few_slow_engines_of_many_say_nothing_of_the_fleet_nor_of_themselves(measured: int) -> None:
    fleet = learnt()
    for _ in range(6):  # more than make a new normal
        assert fleet.window(**all_of(FIVE[:measured], SLOW)) == []
    assert fleet.drifting() == set()
    # What was usual is so still: with their peers measured they are found.
    assert kinds(fleet.window(**all_of(FIVE, USUAL) | {"d1": SLOW})) == [EventKind.HOLD_PLACED]


@pytest.mark.rule("H5")
def test_most_of_those_that_serve_speak_for_the_fleet_and_it_is_said_how_many_they_were() -> None:
    fleet = learnt()
    ((kind, words),) = told(fleet.window(d1=SLOW, d2=SLOW, d3=USUAL))
    assert kind is EventKind.FLEET_SLOW
    assert words == (
        "2 of 3 decode engines that were measured, of 5 that serve, take longer than usual: the fleet is overloaded, "
        "none of them is put on probation"
    )
    assert fleet.drifting() == set()


@pytest.mark.rule("H5")
def test_overload_is_over_when_most_of_those_that_serve_say_so_and_not_when_nobody_does() -> None:
    fleet = learnt()
    assert kinds(fleet.window(**all_of(FIVE, SLOW))) == [EventKind.FLEET_SLOW]
    assert fleet.window() == []  # no traffic at all
    assert fleet.window(d1=USUAL, d2=USUAL) == []
    assert fleet.window(**all_of(FIVE, SLOW)) == []  # it was told
    ((kind, words),) = told(fleet.window(d1=USUAL, d2=USUAL, d3=USUAL))
    assert (kind, words) == (
        EventKind.FLEET_USUAL,
        "no more than 0 of 3 decode engines that were measured, of 5 that serve, take longer than usual: engines are "
        "judged one by one again",
    )


@pytest.mark.rule("H5")
def test_windows_in_which_too_few_are_measured_are_no_part_of_a_new_normal() -> None:
    fleet = learnt()
    for _ in range(4):
        fleet.window(**all_of(FIVE, SLOW))
        assert fleet.window(d1=SLOW) == []
    ((kind, words),) = told(fleet.window(**all_of(FIVE, SLOW)))
    assert (kind, words) == (
        EventKind.FLEET_USUAL,
        "5 of 5 decode engines that serve take longer than usual for a token, 5 windows in a row: from now on that is "
        "what is usual",
    )


@pytest.mark.rule("H5")
def test_after_a_new_normal_it_is_learnt_anew_of_those_that_were_not_measured() -> None:
    """They would be as slow as all others, and be blamed for it by what was usual under less load."""
    fleet = learnt()
    for _ in range(5):
        fleet.window(**all_of(FIVE[:3], SLOW))
    for _ in range(4):
        assert fleet.window(**all_of(FIVE, SLOW)) == []
    assert fleet.drifting() == set()
    view = fleet.drift.view("d5")
    assert view is not None
    assert view.usual_s == pytest.approx(SLOW, rel=0.05)


@pytest.mark.rule("H5")
def test_one_on_probation_does_not_speak_for_the_fleet() -> None:
    fleet = Windows(probation_windows=1)
    fleet.usual(3)
    assert kinds(fleet.usual(1, d1=SLOW)) == [EventKind.HOLD_PLACED]
    # With it most would be slow, and d2 would be none the worse for it.
    assert kinds(fleet.window(d1=SLOW, d2=SLOW, d3=USUAL)) == [EventKind.HOLD_PLACED]
    assert fleet.drifting() == {"d1", "d2"}
    # Nor is a slow engine on probation that is measured alone an overloaded fleet.
    assert told(fleet.window(d1=SLOW)) == []
    view = fleet.drift.view("d1")
    assert view is not None
    assert view.drifting == 3


@pytest.mark.rule("H5")
def test_of_the_only_one_that_serves_nobody_can_tell() -> None:
    fleet = Windows("d1", "d2", probation_windows=1)
    fleet.engines["d2"].place(Hold.DRIFT, "slow", now=0.0)
    for _ in range(3):
        fleet.window(d1=USUAL)
    ((kind, words),) = told(fleet.window(d1=SLOW))
    assert kind is EventKind.FLEET_SLOW
    assert words == (
        "the only decode engine that serves takes longer than usual for a token: it may be slow or overloaded, "
        "without a peer to compare it with it is not put on probation"
    )


@pytest.mark.rule("H5", "R4")
def test_one_that_is_being_drained_is_not_judged_counted_nor_probed() -> None:
    """Its work runs out; and who is told that it may be stopped must not be asked anything more."""
    fleet = learnt()
    drain(fleet, "d1")
    assert fleet.window(d1=SLOW, d2=USUAL, d3=USUAL) == []
    ((_, words),) = told(fleet.window(d1=USUAL, d2=SLOW, d3=SLOW, d4=SLOW))
    assert words.startswith("3 of 3 decode engines that were measured, of 4 that serve,")
    fleet.engines["d1"].place(Hold.DRIFT, "slow", now=fleet.now)
    assert fleet.drift.tick(now=fleet.now + 29.0) == []


# --- after a takeover -------------------------------------------------------------------------------------------------


@pytest.mark.rule("H5", "S1")
def test_while_a_successor_learns_what_is_normal_nobody_on_probation_is_judged() -> None:
    """Neither by one window of one peer, nor by itself."""
    fleet = Windows(*FIVE)
    fleet.engines["d1"].place(Hold.DRIFT, "slow", now=0.0)
    for _ in range(3):
        assert fleet.window(d1=SLOW, d2=USUAL, d3=USUAL) == []
        assert fleet.drift.view("d1") is None
    for number in range(1, 5):
        assert told(fleet.window(d1=SLOW, d2=USUAL, d3=USUAL)) == []
        view = fleet.drift.view("d1")
        assert view is not None
        assert view.drifting == number
        assert view.usual_s == pytest.approx(USUAL, rel=0.05)
    assert fleet.drifting() == {"d1"}


@pytest.mark.rule("H5", "S1")
def test_one_whose_probation_a_successor_ends_is_judged_by_its_peers_until_it_has_a_normal_of_its_own() -> None:
    """Else a slow one that was let go would be what is normal for itself."""
    fleet = Windows(*FIVE)
    fleet.engines["d1"].place(Hold.DRIFT, "slow", now=0.0)
    peers = all_of(FIVE[1:], USUAL)
    for _ in range(3):
        fleet.window(**peers)
    for _ in range(3):
        fleet.probe("d1", IDLE)
        fleet.window(**peers)
    assert fleet.drifting() == set()
    for _ in range(3):
        fleet.window(d1=SLOW, **peers)
    assert fleet.drifting() == {"d1"}


# --- probes -----------------------------------------------------------------------------------------------------------


def excused(fleet: Windows, good: int) -> list[Decision]:
    """A slow engine on probation, in as many windows as it takes: its probes are quick, since it has no other work."""
    for _ in range(good - 1):
        fleet.probe("d1", IDLE)
        assert fleet.window(d2=USUAL, d3=USUAL) == []
        assert fleet.drifting() == {"d1"}
    fleet.probe("d1", IDLE)
    return fleet.window(d2=USUAL, d3=USUAL)


@pytest.mark.rule("H5")
def test_one_that_is_quick_only_when_idle_comes_back_and_is_found_out_again_each_time() -> None:
    fleet = Windows()
    fleet.usual(3)
    fleet.usual(3, d1=SLOW)
    for _ in range(4):
        assert fleet.drifting() == {"d1"}
        ((_, over),) = told(excused(fleet, 3))
        assert over.endswith("ms a token in a probe where 19.4 ms are usual, 3 windows in a row)")
        assert fleet.drifting() == set()
        assert fleet.usual(2, d1=SLOW) == []
        ((_, placed),) = told(fleet.usual(1, d1=SLOW))
        assert placed.endswith("3 windows in a row")


@pytest.mark.rule("H5")
def test_probes_and_work_are_not_one_sample() -> None:
    """Fifteen tokens of a probe would outvote the ten that its clients waited for."""
    fleet = Windows(probation_windows=1, recovery_windows=1)
    fleet.usual(3)
    fleet.usual(1, d1=SLOW)
    fleet.probe("d1", USUAL)
    fleet.usual(1, d1=SLOW)
    assert fleet.drifting() == {"d1"}
    fleet.probe("d1", SLOW)
    fleet.usual(1)
    assert fleet.drifting() == set()
    # Of one that is back only its work counts.
    fleet.drift._of("d1").probed.add(SLOW, 15)
    fleet.window(d2=USUAL, d3=USUAL)
    assert fleet.drifting() == set()


@pytest.mark.rule("H5")
def test_a_probe_of_its_own_spares_it_the_sample() -> None:
    fleet = Windows(probation_windows=1)
    fleet.usual(3)
    fleet.usual(1, d1=SLOW)
    fleet.drift.probed("d1", LegSeen(outcome=Outcome.STREAM_COMPLETE, step_s=SLOW, steps=15))
    assert probes(fleet.drift.tick(now=fleet.now + 15.0)) == []


# --- the edges of these rules -----------------------------------------------------------------------------------------


@pytest.mark.rule("H5")
def test_half_of_those_that_serve_do_not_speak_for_the_fleet() -> None:
    fleet = Windows(*FIVE[:4], probation_windows=1)
    for _ in range(3):
        fleet.window(**all_of(FIVE[:4], USUAL))
    assert fleet.window(d1=SLOW, d2=SLOW) == []
    assert kinds(fleet.window(d1=SLOW, d2=SLOW, d3=USUAL)) == [EventKind.FLEET_SLOW]


@pytest.mark.rule("H5")
def test_one_on_probation_is_judged_while_too_few_others_are_measured_to_speak_for_the_fleet() -> None:
    fleet = learnt()
    fleet.window(**all_of(FIVE, USUAL) | {"d1": SLOW})
    assert fleet.drifting() == {"d1"}
    for _ in range(3):
        fleet.window(d1=USUAL, d2=SLOW)
    assert fleet.drifting() == set()


@pytest.mark.rule("H5", "P4")
def test_engines_of_the_other_role_that_decode_are_counted_among_those_that_serve() -> None:
    fleet = Windows("d1", probation_windows=1)
    for _ in range(3):
        fleet.window(d1=USUAL, p=USUAL)
    ((_, words),) = told(fleet.window(d1=SLOW, p=SLOW))
    assert words.startswith("2 of 2 decode engines that serve take longer")


@pytest.mark.rule("H5", "R1")
def test_a_probe_from_before_an_ejection_says_nothing_of_the_engine_that_is_back() -> None:
    fleet = Windows(probation_windows=1, recovery_windows=1)
    fleet.usual(3)
    fleet.usual(1, d1=SLOW)
    fleet.probe("d1", USUAL)
    fleet.drift.admitted(fleet.engines["d1"], before=fleet.engines["d1"].identity)
    fleet.window(d2=USUAL, d3=USUAL)
    assert fleet.drifting() == {"d1"}


@pytest.mark.rule("H5")
def test_windows_that_were_slow_by_the_old_normal_are_not_in_a_row_with_those_by_the_new_one() -> None:
    fleet = Windows()
    fleet.usual(3)
    fleet.usual(2, d1=SLOW)
    fleet.usual(5, d1=SLOW, d2=SLOW, d3=SLOW)
    fleet.window(d1=3 * SLOW, d2=SLOW, d3=SLOW)
    assert fleet.drifting() == set()
    view = fleet.drift.view("d1")
    assert view is not None
    assert view.drifting == 1
