"""Performance drift: rows and numbers typed from spec H5."""

import pytest

from narwhal.control.core.effects import Effect, ProbeInference
from narwhal.control.core.events import ProcessIdentity, Reloaded, RoleCommand
from narwhal.control.core.handoff import SavedFleet, aged, from_document, to_document
from narwhal.control.core.records import EventKind
from narwhal.control.core.settings import DriftSettings
from narwhal.vocabulary import Hold, Outcome, Phase
from tests.core.rig import Rig, decode, of, prefill

WINDOW_S = 30
USUAL = 0.02
SLOW = 0.06  # three times as long


class Fleet(Rig):
    """Engines whose decode latency a proxy tells every second."""

    def window(self, answer: bool = True, probe_s: float = 0.0, /, **steps: float) -> list[Effect]:
        """One window, in which these engines take so long for a token; those left out have no traffic. Probes are
        answered well, at the pace `probe_s`."""
        effects: list[Effect] = []
        for _ in range(WINDOW_S):
            for engine, step in steps.items():
                self.measure(engine, step=step, count=1, phase=Phase.DECODE)
            effects += (more := self.run_pass())
            if answer:
                self.pass_probe(of(more, ProbeInference), step_s=probe_s)
        return effects

    def windows(self, count: int, answer: bool = True, probe_s: float = 0.0, /, **steps: float) -> list[Effect]:
        return [effect for _ in range(count) for effect in self.window(answer, probe_s, **steps)]

    def settle(self) -> None:
        """The verdicts of the window that has just been closed."""
        self.run_pass()
        self.now -= 1.0


def fleet(decodes: int = 3, **drift: float) -> Fleet:
    return Fleet(
        prefill("p1"),
        *(decode(f"d{n + 1}") for n in range(decodes)),
        liveness_every=0,
        drift=DriftSettings(**drift),  # type: ignore[arg-type]
    )


def successor(rig: Fleet, saved: SavedFleet) -> Fleet:
    """Who takes over, with the same proxy."""
    after = Fleet(*rig.settings.engines, saved=saved, liveness_every=0)
    after._sequences.update(rig._sequences)
    return after


def usual(rig: Fleet, count: int = 4, **other: float) -> list[Effect]:
    steps = {e.id: USUAL for e in rig.engines() if e.role is Phase.DECODE} | other
    return rig.windows(count, **steps)


def on_probation(rig: Fleet) -> set[str]:
    return {e.id for e in rig.engines() if Hold.DRIFT in rig.holds(e.id)}


@pytest.mark.rule("H5")
def test_three_windows_above_twice_the_baseline_are_probation_and_two_are_not() -> None:
    rig = fleet()
    usual(rig)
    usual(rig, 2, d1=SLOW)
    rig.settle()
    assert on_probation(rig) == set()
    usual(rig, 1, d1=SLOW)
    rig.settle()
    assert on_probation(rig) == {"d1"}
    assert rig.engine("d1").phases == frozenset()


@pytest.mark.rule("H5")
def test_a_window_within_the_band_begins_the_row_anew() -> None:
    rig = fleet()
    usual(rig)
    usual(rig, 2, d1=SLOW)
    usual(rig, 1)
    usual(rig, 2, d1=SLOW)
    rig.settle()
    assert on_probation(rig) == set()


@pytest.mark.rule("H5")
@pytest.mark.parametrize(("factor", "held"), [(1.8, False), (2.3, True)])
def test_the_band_is_twice_the_baseline(factor: float, held: bool) -> None:
    rig = fleet()
    usual(rig)
    usual(rig, 3, d1=USUAL * factor)
    rig.settle()
    assert (on_probation(rig) == {"d1"}) is held


@pytest.mark.rule("H5")
def test_a_window_of_fewer_than_three_samples_is_not_judged() -> None:
    rig = fleet()
    usual(rig)
    for _ in range(4):
        for _ in range(2):
            rig.measure("d1", step=SLOW, count=1)
        rig.window(d2=USUAL, d3=USUAL)
    rig.settle()
    assert on_probation(rig) == set()
    for _ in range(3):
        for _ in range(3):
            rig.measure("d1", step=SLOW, count=1)
        rig.window(d2=USUAL, d3=USUAL)
    rig.settle()
    assert on_probation(rig) == {"d1"}


@pytest.mark.rule("H5")
def test_three_good_windows_end_probation() -> None:
    rig = fleet(2)
    usual(rig)
    usual(rig, 3, d1=SLOW)
    rig.windows(2, True, USUAL, d2=USUAL)
    rig.settle()
    assert on_probation(rig) == {"d1"}
    rig.window(True, USUAL, d2=USUAL)
    rig.settle()
    assert on_probation(rig) == set()
    assert rig.engine("d1").phases == {Phase.DECODE}


@pytest.mark.rule("H5")
def test_probation_without_traffic_is_sampled_by_one_probe_a_window() -> None:
    rig = fleet(2)
    usual(rig)
    usual(rig, 3, d1=SLOW)
    for _ in range(3):
        asked = of(rig.window(True, SLOW, d2=USUAL), ProbeInference)
        # Both directions of an engine that is not pinned: each is one step of the one probe.
        assert {p.engine for p in asked} == {"d1"}
    assert on_probation(rig) == {"d1"}
    began = [r.message for r in rig.records(EventKind.PROBE_STARTED)]
    assert len(began) == len(rig.records(EventKind.PROBE_ENDED)) == 3
    # After the fifth window in a row a probe is due anyhow, and tells as much.
    assert ["sampled on probation" in message for message in began] == [True, True, False]


@pytest.mark.rule("H5")
def test_probation_with_traffic_is_not_probed() -> None:
    rig = fleet(2)
    usual(rig)
    usual(rig, 4, d1=SLOW)  # it is on its way out: proxies tell of it still
    assert on_probation(rig) == {"d1"}
    assert not rig.records(EventKind.PROBE_STARTED)


@pytest.mark.rule("H5")
def test_a_probe_that_says_nothing_is_not_asked_for_again_in_its_window() -> None:
    rig = fleet(2)
    usual(rig)
    usual(rig, 3, d1=SLOW)
    for _ in range(WINDOW_S):
        rig.measure("d2", step=USUAL, count=1)
        effects = rig.run_pass()
        while asked := of(effects, ProbeInference):
            effects = [x for probe in asked for x in rig.answer_step(probe, Outcome.HTTP_429)]
    assert len(rig.records(EventKind.PROBE_ENDED)) == len(rig.records(EventKind.PROBE_STARTED)) == 1


@pytest.mark.rule("C1", "H5")
def test_what_was_normal_before_a_change_of_role_says_nothing() -> None:
    rig = fleet(3)
    usual(rig)
    rig.send(RoleCommand(engine="d1", role=Phase.PREFILL))
    rig.send(RoleCommand(engine="d1", role=Phase.DECODE))
    usual(rig, 4, d1=SLOW)
    rig.settle()
    assert on_probation(rig) == set()


@pytest.mark.rule("H5")
def test_five_windows_ask_for_an_inference_probe_and_one_that_fails_ejects() -> None:
    rig = fleet(2)
    usual(rig)
    usual(rig, 4, d1=SLOW)
    rig.settle()
    assert not rig.records(EventKind.PROBE_STARTED)
    rig.window(False, d1=SLOW, d2=USUAL)
    (probe,) = of(rig.run_pass(), ProbeInference)
    assert probe.engine == "d1"
    rig.answer_step(probe, Outcome.HTTP_5XX)
    assert rig.engine("d1").phases == frozenset()
    assert Hold.EJECTED in rig.holds("d1")


@pytest.mark.rule("H5", "L4")
def test_silence_to_a_probe_that_no_failure_asked_for_is_asked_about_once_more() -> None:
    """Control may have been cut off since: the sweep between the two tells."""
    rig = fleet(2)
    usual(rig)
    usual(rig, 4, d1=SLOW)
    rig.window(False, d1=SLOW, d2=USUAL)
    (probe,) = of(rig.run_pass(), ProbeInference)
    rig.answer_step(probe, Outcome.UNREACHABLE)
    assert Hold.EJECTED not in rig.holds("d1")
    assert Hold.VERIFICATION in rig.holds("d1")
    asked = [probe for _ in range(11) for probe in of(rig.run_pass(), ProbeInference)]
    (again,) = asked
    assert again.engine == "d1"
    rig.answer_step(again, Outcome.UNREACHABLE)
    assert Hold.EJECTED in rig.holds("d1")


@pytest.mark.rule("H5")
def test_a_probe_that_passes_does_not_end_probation() -> None:
    rig = fleet(2)
    usual(rig)
    usual(rig, 6, d1=SLOW)
    assert rig.records(EventKind.PROBE_ENDED)
    assert on_probation(rig) == {"d1"}


@pytest.mark.rule("H5")
@pytest.mark.parametrize("slow", [2, 3])
def test_when_most_engines_drift_nothing_is_concluded(slow: int) -> None:
    rig = fleet(3)
    usual(rig)
    rig.windows(4, **{f"d{n + 1}": SLOW if n < slow else USUAL for n in range(3)})
    rig.settle()
    assert on_probation(rig) == set()
    assert len(rig.records(EventKind.FLEET_SLOW)) == 1
    usual(rig, 1)
    rig.settle()
    assert len(rig.records(EventKind.FLEET_USUAL)) == 1


@pytest.mark.rule("H5")
def test_of_a_lone_engine_nothing_is_said() -> None:
    """Nobody tells whether it has grown slow or has more to do than before."""
    rig = fleet(1)
    usual(rig)
    usual(rig, 4, d1=SLOW)
    assert on_probation(rig) == set()


@pytest.mark.rule("H5")
def test_half_of_the_engines_are_not_most() -> None:
    rig = fleet(2)
    usual(rig)
    usual(rig, 3, d2=SLOW)
    rig.settle()
    assert on_probation(rig) == {"d2"}


def test_a_fleet_that_stays_slow_has_a_new_normal_by_which_one_engine_is_found() -> None:
    rig = fleet(3)
    usual(rig)
    rig.windows(6, d1=SLOW, d2=SLOW, d3=SLOW)
    rig.windows(3, d1=SLOW, d2=SLOW, d3=3 * SLOW)
    rig.settle()
    assert on_probation(rig) == {"d3"}


@pytest.mark.rule("H2", "H5")
def test_the_last_engines_of_a_phase_are_not_taken() -> None:
    rig = Fleet(prefill("p1", pinned=True), decode("d1"), decode("d2"), liveness_every=0)
    usual(rig)
    usual(rig, 3, d1=SLOW)
    assert rig.engine("d2").phases == {Phase.DECODE}
    usual(rig, 3, d1=USUAL, d2=SLOW)
    rig.settle()
    assert {e.id for e in rig.engines() if Phase.DECODE in e.phases}


@pytest.mark.rule("H5", "S1")
def test_probation_survives_a_takeover_and_the_baselines_of_others_judge_it() -> None:
    rig = fleet(2)
    usual(rig)
    usual(rig, 3, d1=SLOW)
    rig.settle()
    document = to_document(rig.saved(), wall=50.0, epoch=1, holder="a")
    saved = aged(from_document(document), wall=70.0)
    after = successor(rig, saved)
    assert on_probation(after) == {"d1"}
    (held,) = after.engine("d1").holds
    assert held.age_s == pytest.approx(20.0, abs=0.1)
    after.windows(4, True, SLOW, d2=USUAL)
    after.settle()
    assert on_probation(after) == {"d1"}
    after.windows(3, True, USUAL, d2=USUAL)
    after.settle()
    assert on_probation(after) == set()


@pytest.mark.rule("H5")
def test_where_nobody_says_what_is_normal_probation_ends_after_a_takeover() -> None:
    rig = fleet(2)
    usual(rig)
    usual(rig, 3, d1=SLOW)
    rig.settle()
    after = successor(rig, rig.saved())
    assert on_probation(after) == {"d1"}
    after.windows(3, True, SLOW)
    after.settle()
    assert on_probation(after) == set()


@pytest.mark.rule("H5")
def test_another_process_begins_anew_and_the_same_one_does_not() -> None:
    for restarted in (False, True):
        rig = fleet(2)
        usual(rig)
        usual(rig, 3, d1=SLOW)
        rig.settle()
        rig.report("d1", Outcome.REFUSED, count=3)
        assert rig.holds("d1") == {Hold.DRIFT, Hold.EJECTED}
        if restarted:
            rig.processes["d1"] = ProcessIdentity(version="0.32.0", started_at=1_700_001_000.0)
        rig.readmit("d1")
        assert (on_probation(rig) == {"d1"}) is not restarted


def test_an_engine_that_ramps_up_is_not_judged_nor_its_pace_remembered() -> None:
    rig = Fleet(prefill("p1"), decode("d1"), decode("d2"), liveness_every=0, ramp_s=60.0)
    rig.windows(2, d1=USUAL / 3, d2=USUAL / 3)  # little work, so every token is quick
    usual(rig, 4)
    rig.settle()
    assert on_probation(rig) == set()
    view = rig.engine("d1").drift
    assert view is not None
    assert view.usual_s == pytest.approx(USUAL, rel=0.05)


def test_a_reload_takes_other_numbers() -> None:
    rig = fleet()
    usual(rig)
    rig.send(Reloaded(settings=rig.with_settings(drift=DriftSettings(probation_windows=1))))
    usual(rig, 1, d1=SLOW)
    rig.settle()
    assert on_probation(rig) == {"d1"}


def test_explain_says_how_an_engine_is_judged() -> None:
    rig = fleet()
    usual(rig)
    usual(rig, 3, d1=SLOW)
    rig.settle()
    lines = rig.fleet.explain("d1", now=rig.now).lines
    (line,) = [x for x in lines if x.startswith("decode latency")]
    assert "ms a token in the last window where" in line
    assert line.endswith("3 slow windows in a row")


@pytest.mark.rule("H5")
def test_one_odd_window_at_first_is_not_what_is_normal_ever_after() -> None:
    """Tokens that lay in a buffer and came at once: an engine was on probation for good."""
    rig = fleet()
    usual(rig, 1, d1=USUAL / 100)
    usual(rig, 12)
    rig.settle()
    assert on_probation(rig) == set()
