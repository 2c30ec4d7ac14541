"""Several classes, relapses, operators, drift, takeovers: all that is told and asked (spec F3, F11, H4, H5, S7)."""

import pytest

from narwhal.control.core.effects import CaptureIdentity, Effect, ProbeHealth, ProbeInference
from narwhal.control.core.events import DrainCommand, InferenceAnswered, ProbeCommand, Reloaded, Woke
from narwhal.control.core.records import EventKind
from narwhal.reports import Run
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase, Stage, Verdict
from tests.core.rig import Rig, decode, leg, of, only, prefill
from tests.core.scene import FOUR, GOT, HELD, OK, TIMED_OUT, Scene, cut, story, timed_out

# --- relapses ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F11")
@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        (Outcome.STREAM_CUT, "stream"),
        (Outcome.HTTP_5XX, "inference_status"),
        (Outcome.HANDOFF_UNUSABLE, "kv_handoff"),
    ],
)
def test_an_engine_that_passes_probes_and_fails_real_work(outcome: Outcome, failure: str) -> None:
    scene = Scene(relapse_window_s=60.0)
    scene.pass_probe(scene.report("d", outcome, count=3))
    scene.now += 59.9
    scene.effects.clear()
    scene.report("d", outcome, count=3)
    why = f"{failure} again within 60 s of having been cleared"
    assert scene.story()[:2] == [
        f"engine d relapsed: {why}; kept to a trickle for 5 s",
        f"engine d: relapse hold for 5 s: {why}",
    ]
    assert scene.holds("d") == {Hold.RELAPSE, Hold.VERIFICATION}


@pytest.mark.rule("F11")
def test_time_outs_again_although_health_was_good_ask_for_an_inference_probe() -> None:
    scene = Scene()
    scene.answer_health(timed_out(scene))
    scene.effects.clear()
    step = scene.step(scene.report("d", Outcome.READ_TIMEOUT, count=3, detail="no header in 30 s"))
    why = "timeout again within 60 s of having been cleared"
    assert scene.story() == [
        f"engine d relapsed: {why}; kept to a trickle for 5 s",
        f"engine d: relapse hold for 5 s: {why}",
        f"engine d: verification hold: {TIMED_OUT}",
        "engine d: inference probe begins",
        "? p2→d for d",
    ]
    # A probe that passes clears the time-outs this time, and reaching them once more is a relapse again.
    scene.report("d", Outcome.HTTP_5XX)
    scene.works(step)
    assert (scene.streaks("d"), scene.holds("d")) == ({}, {Hold.RELAPSE})
    scene.effects.clear()
    scene.report("d", Outcome.READ_TIMEOUT, count=3)
    assert scene.story()[0] == f"engine d relapsed: {why}; kept to a trickle for 10 s"


@pytest.mark.rule("F4", "F7")
@pytest.mark.parametrize("outcome", [Outcome.READ_TIMEOUT, Outcome.STREAM_CUT])
def test_good_health_of_an_engine_on_hold_does_not_forget_the_producers_of_its_failures(outcome: Outcome) -> None:
    scene = Scene()
    scene.answer_health(timed_out(scene))
    step = scene.step(scene.report("d", outcome, count=3, producer="p2"))
    assert scene.holds("d") >= {Hold.VERIFICATION}
    scene.fleet._suspicions.healthy(scene.fleet._engines["d"])
    assert scene.engine("d").producers == ("p2",)
    scene.effects.clear()
    scene.works(step)
    assert scene.story()[-1] == "? p2→d for d"


@pytest.mark.rule("F11")
def test_connections_refused_again_after_readmission_are_a_relapse_too() -> None:
    scene = Scene()
    scene.report("d", Outcome.REFUSED, count=3)
    scene.readmit("d")
    scene.effects.clear()
    scene.report("d", Outcome.REFUSED, count=3)
    why = "connection again within 60 s of having been cleared"
    last = "3 connection failures in a row, the last: decode leg: refused, on edge/0"
    assert scene.story() == [
        f"engine d relapsed: {why}; kept to a trickle for 5 s",
        f"engine d: relapse hold for 5 s: {why}",
        f"engine d ejected (connection): {last}",
    ]


# --- several classes, and the threshold -------------------------------------------------------------------------------


@pytest.mark.rule("F3")
def test_classes_that_reach_the_threshold_while_a_probe_runs_are_acted_upon_by_it_or_after_it() -> None:
    scene = Scene()
    health = timed_out(scene)
    scene.report("d", Outcome.HTTP_5XX, count=2)
    assert scene.story() == []
    scene.report("d", Outcome.HTTP_5XX)
    assert scene.story() == []  # one probe at a time
    scene.answer_health(health)
    last = "the last: decode leg: http 5xx, on edge/0"
    assert scene.story() == [
        "engine d: health probe: pass: health 200",
        f"engine d: verification hold: 3 inference_status failures in a row, {last}",
        "engine d: inference probe begins",
        "? p2→d for d",
    ]


@pytest.mark.rule("F3")
def test_what_waits_for_health_gives_way_to_what_asks_for_inference() -> None:
    scene = Scene()
    scene.answer_health(timed_out(scene), Outcome.LOCAL)
    scene.effects.clear()
    scene.report("d", Outcome.STREAM_CUT, count=3)
    assert scene.story() == [HELD, "engine d: inference probe begins", "? p2→d for d"]
    assert scene.doing("d") == "inference probe under way"


@pytest.mark.rule("F3")
def test_classes_that_ask_for_the_same_are_told_together() -> None:
    scene = Scene()
    health = timed_out(scene)
    scene.report("d", Outcome.STREAM_CUT, count=4)
    scene.report("d", Outcome.HTTP_5XX, count=3)
    scene.answer_health(health)
    told = "4 stream failures and 3 inference_status failures in a row"
    assert scene.story()[1] == f"engine d: verification hold: {told}, the last: decode leg: stream cut, on edge/0"
    assert scene.engine("d").holds[0].reason == f"{told} (stream cut)"


@pytest.mark.rule("F1", "F3")
@pytest.mark.parametrize(("counts", "streak", "asked"), [((2,), 2, 0), ((4,), 4, 1), ((2, 5), 7, 1), ((3, 3), 6, 1)])
def test_equal_failures_that_are_told_as_one_run_count_each(counts: tuple[int, ...], streak: int, asked: int) -> None:
    scene = Scene()
    probes = []
    for count in counts:
        run = Run(engine="d", phase=Phase.DECODE, incarnation=1, outcome=Outcome.HTTP_5XX, count=count)
        probes += of(scene.batch(run), ProbeInference)
    assert scene.streaks("d") == {FailureClass.INFERENCE_STATUS: streak}
    assert len(probes) == asked
    assert scene.engine("d").outcomes == {Outcome.HTTP_5XX: streak}


# --- an operator ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F6")
@pytest.mark.parametrize(
    ("consumed", "end"),
    [
        (OK, ["engine d: inference probe: pass: read a handoff of p1"]),
        (
            Outcome.REFUSED,
            [
                "engine d: inference probe: fail: refused",
                "engine d ejected (inference probe): asked for by an operator, then refused",
            ],
        ),
        (Outcome.LOCAL, ["engine d: inference probe: inconclusive: local"]),
    ],
)
def test_a_probe_that_an_operator_asks_for(consumed: Outcome, end: list[str]) -> None:
    scene = Scene()
    step = scene.step(scene.send(ProbeCommand(engine="d")))
    assert scene.doing("d") == "inference probe under way: asked for by an operator"
    assert scene.holds("d") == set()
    scene.answer_step(step, GOT if consumed is OK else None, consumed)
    assert scene.story() == ["engine d: inference probe begins (asked for by an operator)", "? p1→d for d", *end]
    assert scene.doing("d") == ""


@pytest.mark.rule("F6")
def test_an_operators_probe_whose_answer_is_lost_is_over() -> None:
    scene = Scene()
    scene.send(ProbeCommand(engine="d"))
    scene.effects.clear()
    scene.now += 1000.0
    scene.tick(Stage.HEALTH)
    assert scene.story() == ["engine d: inference probe: inconclusive: no answer came back"]
    assert (scene.doing("d"), scene.holds("d")) == ("", set())


@pytest.mark.case("B4")
def test_of_an_engine_that_has_left_no_transfer_is_remembered() -> None:
    scene = Scene()
    everybody = {("p1", "d"), ("p1", "e"), ("p2", "d"), ("p2", "e")}
    assert set(scene.fleet._suspicions._asker._met) == everybody  # at the gate
    scene.send(Reloaded(settings=scene.with_settings(engines=FOUR[1:])))
    assert set(scene.fleet._suspicions._asker._met) == {("p2", "d"), ("p2", "e")}


@pytest.mark.rule("F3", "F6")
def test_an_operators_probe_of_a_suspect_is_its_next_try() -> None:
    scene = Scene()
    scene.answer_step(cut(scene), GOT, Outcome.HTTP_429)
    scene.effects.clear()
    step = scene.step(scene.send(ProbeCommand(engine="d")))
    scene.works(step)
    assert scene.story() == [
        "engine d: inference probe begins (asked for by an operator)",
        "? p2→d for d",
        "engine d: inference probe: pass: read a handoff of p2",
        "engine d: verification hold over (inference probe passed)",
    ]


@pytest.mark.rule("F3")
def test_an_operators_probe_of_one_that_waits_for_health_keeps_what_was_found_against_it() -> None:
    scene = Scene()
    scene.answer_health(timed_out(scene), Outcome.LOCAL)
    scene.effects.clear()
    step = scene.step(scene.send(ProbeCommand(engine="d")))
    scene.works(step)
    # Inference clears no time-outs: health is asked for them after all.
    assert scene.story() == [
        "engine d: inference probe begins (asked for by an operator)",
        "? p2→d for d",
        "engine d: inference probe: pass: read a handoff of p2",
        f"engine d: health probe begins ({TIMED_OUT})",
        "? health of d",
    ]


# --- a look that no failure asked for ---------------------------------------------------------------------------------

SLOW = "5 slow windows in a row"


def look_into(scene: Scene, engine: str = "d") -> list[str]:
    """Drift asks for an inference probe; what is told and asked."""
    record = scene.fleet._engines[engine]
    return story(e for e in scene.fleet._suspicions.look_into(record, SLOW, now=scene.now) if isinstance(e, Effect))


@pytest.mark.rule("H5", "F3")
def test_drift_asks_for_a_probe_unless_one_is_under_way_or_comes_by_itself() -> None:
    scene = Scene()
    assert look_into(scene) == [f"engine d: inference probe begins ({SLOW})", "? p1→d for d"]
    assert scene.doing("d") == f"inference probe under way: {SLOW}"
    assert look_into(scene) == []
    scene = Scene()
    step = cut(scene)
    assert look_into(scene) == []
    scene.answer_step(step, GOT, Outcome.HTTP_429)  # held, and tried again by itself
    assert look_into(scene) == []
    scene = Scene()
    scene.answer_health(timed_out(scene), Outcome.LOCAL)  # waits for health, which says nothing of its work
    assert look_into(scene) == [f"engine d: inference probe begins ({SLOW})", "? p2→d for d"]


@pytest.mark.rule("H5", "F6", "L4")
@pytest.mark.parametrize(
    ("outcome", "ejected"), [(Outcome.REFUSED, False), (Outcome.HTTP_5XX, True), (Outcome.CLIENT_ERROR, True)]
)
def test_silence_to_such_a_probe_is_asked_about_once_more(outcome: Outcome, ejected: bool) -> None:
    """Nothing spoke against the engine: it may be control that has just been cut off."""
    scene = Scene()
    look_into(scene)
    number = scene.fleet._suspicions.known["d"].number
    failed = {"engine": "d", "incarnation": 1, "number": number}
    scene.send(InferenceAnswered(**failed, produced=None, consumed=leg(outcome, "seen")))  # type: ignore[arg-type]
    fail = "engine d: inference probe: fail: seen"
    if ejected:
        assert scene.story() == [fail, f"engine d ejected (inference probe): {SLOW}, then seen"]
        return
    assert scene.story() == [fail, f"engine d: verification hold: {SLOW}, then seen"]
    assert scene.doing("d") == "inference probe again in 10.0 s"
    scene.now += 10.0
    step = scene.step(scene.tick(Stage.HEALTH))
    scene.effects.clear()
    scene.answer(step, None, leg(outcome, "seen"))
    assert scene.story() == [fail, f"engine d ejected (inference probe): {SLOW}, then seen, then seen"]


@pytest.mark.rule("F3", "F6")
def test_silence_to_such_a_probe_of_an_engine_with_failures_ejects() -> None:
    scene = Scene()
    scene.answer_health(timed_out(scene), Outcome.LOCAL)
    look_into(scene)
    number = scene.fleet._suspicions.known["d"].number
    refused = leg(Outcome.REFUSED, "connection refused")
    scene.send(InferenceAnswered(engine="d", incarnation=1, number=number, produced=None, consumed=refused))
    assert scene.holds("d") == {Hold.EJECTED}


# --- quarantine, and what comes to nothing ----------------------------------------------------------------------------


@pytest.mark.rule("H4")
def test_each_failure_begins_the_quarantine_anew_and_is_told_once() -> None:
    scene = Scene(failure_quarantine_s=50.0)
    scene.report("d", Outcome.HTTP_5XX)
    scene.now += 5.0
    scene.report("d", Outcome.REFUSED)
    (held,) = scene.engine("d").holds
    assert (held.reason, held.age_s, held.remaining_s) == ("after a failure (connection)", 5.0, 50.0)
    scene.now += 50.0
    scene.send(Woke())
    assert scene.story() == [
        "engine d: quarantine hold for 50 s: after a failure (inference_status)",
        "engine d: quarantine hold over (its time is over; it was for: after a failure (connection))",
    ]


@pytest.mark.rule("R4")
def test_of_an_engine_that_is_ready_to_stop_nothing_is_found_out_any_more() -> None:
    scene = Scene()
    step = cut(scene)
    scene.send(DrainCommand(engines=("d",), reason="disk", deadline_s=60.0, restart=True, wall=0.0))
    capture = only(scene.publish(), CaptureIdentity)
    scene.effects.clear()
    scene.answer_capture(capture)
    assert scene.story()[1:] == [
        "engine d is ready to stop",
        "engine d: verification hold over (the engine is ready to stop)",
    ]
    assert scene.doing("d") == ""
    assert scene.works(step) == ()


def test_a_reader_that_leaves_the_fleet_leaves_the_question_open() -> None:
    scene = Scene(prefill("p1", pinned=True), prefill("p2", pinned=True), decode("d", pinned=True))
    step = scene.step(scene.report("p1", Outcome.HANDOFF_UNUSABLE, count=3))
    again = scene.step(scene.answer_step(step, GOT, Outcome.ERROR_EVENT))
    assert again.producer is None  # its only reader is asked whether it works at all
    scene.effects.clear()
    scene.send(Reloaded(settings=scene.with_settings(engines=FOUR[:2])))
    scene.now += 1000.0
    scene.tick(Stage.HEALTH)
    assert "engine p1: inference probe: inconclusive: no answer came back" in scene.story()
    assert scene.holds("p1") == {Hold.VERIFICATION}


@pytest.mark.rule("S7", "F3")
def test_a_takeover_goes_on_where_it_was_at_the_next_pass() -> None:
    scene = Scene()
    cut(scene)
    scene.report("e", Outcome.READ_TIMEOUT, count=3)
    after = Rig(*FOUR, saved=scene.saved(), liveness_every=0)
    assert after.engine("d").suspicion == "inference probe again in 0.0 s"
    assert after.engine("e").suspicion == "health probe again in 0.0 s: 3 timeout failures in a row"
    after.now += 1.0
    asked = after.tick(Stage.HEALTH)
    assert story(asked)[:4] == [
        "engine d: inference probe begins (again)",
        "? p1→d for d",
        "engine e: health probe begins (again)",
        "? health of e",
    ]
    after.answer_health(only(asked, ProbeHealth), Outcome.REFUSED, detail="connection refused")
    (told,) = after.records(EventKind.ENGINE_EJECTED)
    assert told.message == "engine e ejected (health probe): 3 timeout failures in a row, then connection refused"
    ended = [r.fields for r in after.records(EventKind.PROBE_ENDED)]
    assert ended == [{"probe": "health probe", "result": Verdict.FAIL}]


@pytest.mark.rule("S7", "F11")
def test_what_a_probe_clears_after_a_takeover_is_remembered_as_before_it() -> None:
    scene = Scene()
    cut(scene)
    scene.report("e", Outcome.READ_TIMEOUT, count=3)
    after = Rig(*FOUR, saved=scene.saved(), liveness_every=0)
    after._sequences.update(scene._sequences)  # the proxies go on counting
    asked = after.tick(Stage.HEALTH)
    after.answer_health(only(asked, ProbeHealth))
    after.works(only(asked, ProbeInference))
    assert after.holds("d") == after.holds("e") == set()
    for engine, outcome in (("d", Outcome.STREAM_CUT), ("e", Outcome.READ_TIMEOUT)):
        after.report(engine, outcome, count=3)
    assert [r.engine for r in after.records(EventKind.RELAPSED)] == ["d", "e"]
