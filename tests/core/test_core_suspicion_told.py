"""From evidence to a verdict, scene by scene: all that is told and asked, in order (spec F3, F6, F7, F11, H4)."""

from collections.abc import Iterable
from typing import Any

import pytest

from narwhal.control.core.events import (
    CaptureIdentity,
    DrainCommand,
    Effect,
    EjectCommand,
    EventKind,
    InferenceAnswered,
    LegSeen,
    ProbeCommand,
    ProbeHealth,
    ProbeInference,
    Record,
    Reloaded,
    Woke,
)
from narwhal.control.core.settings import EngineSpec
from narwhal.vocabulary import FailureClass, Hold, Outcome, Stage, Verdict
from tests.core.rig import Rig, decode, leg, only, prefill

FOUR = (
    prefill("p1", pinned=True),
    prefill("p2", pinned=True),
    decode("d", pinned=True),
    decode("e", pinned=True),
)
GOT, OK = Outcome.HANDOFF, Outcome.STREAM_COMPLETE


class Scene(Rig):
    """A fleet long in service; nothing but what a test does is told."""

    def __init__(self, *engines: EngineSpec, **settings: Any) -> None:
        super().__init__(*(engines or FOUR), liveness_every=0, **settings)
        self.now += 1000.0
        self.effects.clear()

    def story(self) -> list[str]:
        """What was told and asked since it was looked at last."""
        told, self.effects = self.effects, []
        return story(told)

    def doing(self, engine: str) -> str:
        return self.engine(engine).suspicion

    def answer(self, step: ProbeInference, produced: LegSeen | None, consumed: LegSeen | None) -> tuple[Effect, ...]:
        """The step comes back with all that was seen."""
        name = {"engine": step.engine, "incarnation": step.incarnation, "number": step.number}
        return self.send(InferenceAnswered(**name, produced=produced, consumed=consumed))  # type: ignore[arg-type]

    def health(self, effects: Iterable[Effect]) -> ProbeHealth:
        return only(effects, ProbeHealth)

    def step(self, effects: Iterable[Effect]) -> ProbeInference:
        return only(effects, ProbeInference)


def story(effects: Iterable[Effect]) -> list[str]:
    lines = []
    for effect in effects:
        match effect:
            case Record():
                lines.append(effect.message)
            case ProbeHealth():
                lines.append(f"? health of {effect.engine}")
            case ProbeInference():
                producer = "" if effect.producer is None else effect.producer.engine
                lines.append(f"? {producer}→{effect.consumer.engine} for {effect.engine}")
            case _:
                lines.append(f"? {type(effect).__name__} of {effect.engine}")
    return lines


# --- health probes ----------------------------------------------------------------------------------------------------

TIMED_OUT = "3 timeout failures in a row, the last: decode leg: read timeout (no header in 30 s), on edge/0"


def timed_out(scene: Scene) -> ProbeHealth:
    """Three time-outs of d, and what is told of them."""
    probe = scene.health(scene.report("d", Outcome.READ_TIMEOUT, count=3, detail="no header in 30 s"))
    assert scene.story() == [f"engine d: health probe begins ({TIMED_OUT})", "? health of d"]
    assert scene.doing("d") == "health probe under way: 3 timeout failures in a row (read timeout)"
    return probe


@pytest.mark.rule("F3", "F4")
def test_time_outs_of_an_engine_whose_health_is_good() -> None:
    scene = Scene()
    scene.answer_health(timed_out(scene))
    assert scene.story() == ["engine d: health probe: pass: health 200"]
    assert (scene.streaks("d"), scene.doing("d"), scene.holds("d")) == ({}, "", set())


@pytest.mark.rule("F3")
@pytest.mark.parametrize(
    ("detail", "words"), [("GET /health answered 503", "GET /health answered 503"), ("", "http_5xx")]
)
def test_time_outs_of_an_engine_whose_health_is_not(detail: str, words: str) -> None:
    scene = Scene()
    scene.answer_health(timed_out(scene), Outcome.HTTP_5XX, status=503, detail=detail)
    assert scene.story()[-2:] == [
        f"engine d: health probe: fail: {words}",
        f"engine d ejected (health probe): 3 timeout failures in a row (read timeout), then {words}",
    ]
    assert scene.doing("d") == ""


@pytest.mark.rule("F3")
def test_a_health_probe_that_could_not_be_made_or_was_lost_is_made_again_an_interval_later() -> None:
    scene = Scene()
    scene.answer_health(timed_out(scene), Outcome.LOCAL, detail="no control connection in 5 s")
    assert scene.story() == ["engine d: health probe: inconclusive: no control connection in 5 s"]
    assert scene.doing("d") == "health probe again in 1.0 s: 3 timeout failures in a row (read timeout)"
    again = ["engine d: health probe begins (again)", "? health of d"]
    scene.now += 0.9
    assert scene.tick(Stage.HEALTH) == ()
    scene.now += 0.1
    scene.tick(Stage.HEALTH)
    assert scene.story() == again
    scene.now += 5.0 + 15.0 - 0.1  # its time-out, and fifteen seconds for the shell
    assert scene.tick(Stage.HEALTH) == ()
    scene.now += 0.1
    scene.tick(Stage.HEALTH)
    assert scene.story() == ["engine d: health probe: inconclusive: no answer came back"]
    scene.now += 1.0
    scene.tick(Stage.HEALTH)
    assert scene.story() == again


@pytest.mark.rule("F4")
def test_a_health_200_from_elsewhere_ends_what_waits_to_be_asked() -> None:
    scene = Scene()
    scene.answer_health(timed_out(scene), Outcome.LOCAL)
    scene.send(EjectCommand(engine="e", reason="x"))
    assert scene.doing("d") != ""
    scene.fleet._suspicions.healthy(scene.fleet._engines["d"])
    assert scene.doing("d") == ""


# --- inference probes -------------------------------------------------------------------------------------------------

HELD = "engine d: verification hold: 3 stream failures in a row, the last: decode leg: stream cut, on edge/0"


def cut(scene: Scene, producer: str = "") -> ProbeInference:
    """Three streams of d are cut; nothing was remembered, so p1 or p2 is the first to produce."""
    return scene.step(scene.report("d", Outcome.STREAM_CUT, count=3, producer=producer))


@pytest.mark.rule("F3", "F6", "H4")
def test_an_engine_that_works_after_all() -> None:
    scene = Scene(failure_quarantine_s=50.0)
    step = cut(scene)
    quarantine = "engine d: quarantine hold for 50 s: after a failure (stream)"
    assert scene.story() == [quarantine, HELD, "engine d: inference probe begins", "? p1→d for d"]
    assert scene.doing("d") == "inference probe under way"  # why is said by the hold
    assert scene.works(step) is not None
    assert scene.story() == [
        "engine d: inference probe: pass: read a handoff of p1",
        "engine d: verification hold over (inference probe passed)",
        "engine d: quarantine hold over (inference probe passed)",
    ]
    assert (scene.streaks("d"), scene.doing("d"), scene.holds("d")) == ({}, "", set())


@pytest.mark.rule("F6")
def test_an_engine_that_does_not() -> None:
    scene = Scene()
    step = scene.step(scene.answer_step(cut(scene), GOT, Outcome.STREAM_CUT))
    scene.answer_step(step, GOT, Outcome.FIRST_TOKEN_TIMEOUT)
    why = "it cannot read handoffs of p1 and p2 (stream cut; first token timeout)"
    assert scene.story()[4:] == [
        f"engine d: inference probe: fail: {why}",
        f"engine d ejected (inference probe): 3 stream failures in a row (stream cut), then {why}",
    ]


@pytest.mark.rule("F6")
def test_a_probe_that_says_nothing_leaves_the_hold_and_is_made_again_after_the_readmission_interval() -> None:
    scene = Scene(readmit_every=10)
    scene.answer_step(cut(scene), GOT, Outcome.HTTP_429)
    assert scene.story()[3:] == ["engine d: inference probe: inconclusive: http 429"]
    assert (scene.doing("d"), scene.holds("d")) == ("inference probe again in 10.0 s", {Hold.VERIFICATION})
    scene.now += 9.9
    assert scene.tick(Stage.HEALTH) == ()
    scene.now += 0.1
    step = scene.step(scene.tick(Stage.HEALTH))
    assert scene.story() == ["engine d: inference probe begins (again)", "? p2→d for d"]  # peers take turns
    # Each of 16 tokens, the prefill leg and the marker may take the whole silence, and the shell fifteen seconds.
    assert step.silence_s == 20.0
    scene.now += 18 * 20.0 + 15.0 - 0.1
    assert scene.tick(Stage.HEALTH) == ()
    scene.now += 0.1
    scene.tick(Stage.HEALTH)
    assert scene.story() == ["engine d: inference probe: inconclusive: no answer came back"]
    assert scene.holds("d") == {Hold.VERIFICATION}


@pytest.mark.rule("F6")
def test_who_waited_for_a_peer_that_is_ejected_is_tried_again_at_the_next_pass() -> None:
    scene = Scene(prefill("p1", pinned=True), decode("d", pinned=True), decode("e", pinned=True))
    scene.answer_step(cut(scene), Outcome.HTTP_5XX, None)
    assert scene.doing("d") == "inference probe again in 10.0 s"
    scene.send(EjectCommand(engine="e", reason="x"))
    assert scene.doing("d") == "inference probe again in 10.0 s"
    scene.send(EjectCommand(engine="p1", reason="x"))
    assert scene.doing("d") == "inference probe again in 0.0 s"
    scene.effects.clear()
    scene.tick(Stage.HEALTH)
    assert scene.story() == ["engine d: inference probe begins (again)", "? →d for d"]


# --- producers --------------------------------------------------------------------------------------------------------

BLAMED = "d works with another producer and not with it"


@pytest.mark.rule("F7")
@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ((leg(GOT), leg(Outcome.ERROR_EVENT, "error event: code 500")), "error event: code 500"),
        ((leg(Outcome.REFUSED, "connection refused"), None), "connection refused"),
    ],
)
def test_a_producer_with_which_its_reader_does_not_work_is_blamed(
    ends: tuple[LegSeen | None, LegSeen | None], why: str
) -> None:
    scene = Scene()
    step = scene.step(scene.works(cut(scene, producer="p1")))
    assert scene.story()[2:] == [
        "? p2→d for d",
        "engine d: inference probe: pass: read a handoff of p2",
        "engine d: verification hold over (inference probe passed)",
        "? p1→d for d",
    ]
    assert scene.doing("d") == "reading from p1, a producer of its failures"
    produced, consumed = ends
    effects = scene.answer(step, produced, consumed)
    assert scene.story() == [
        f"engine p1 is blamed as producer: {BLAMED} ({why})",
        "engine p1: verification hold: blamed as producer",
        "engine p1: inference probe begins",
        "? p1→d for p1",
    ]
    assert (scene.streaks("p1"), scene.doing("d")) == ({FailureClass.KV_HANDOFF: 1}, "")
    assert scene.engine("p1").holds[0].reason == f"{BLAMED} ({why})"
    scene.answer_step(scene.step(effects), Outcome.HTTP_5XX, None)
    assert scene.story() == [
        "engine p1: inference probe: fail: http 5xx",
        f"engine p1 ejected (inference probe): {BLAMED} ({why}), then http 5xx",
    ]


@pytest.mark.rule("F7")
@pytest.mark.parametrize(
    ("produced", "consumed"),
    [
        (GOT, OK),
        (Outcome.HTTP_429, None),
        (GOT, Outcome.HTTP_429),
        (None, Outcome.REFUSED),  # not begun: that is no word about the producer
        (None, None),
    ],
)
def test_a_producer_is_not_blamed_for_anything_else(produced: Outcome | None, consumed: Outcome | None) -> None:
    scene = Scene()
    step = scene.step(scene.works(cut(scene, producer="p1")))
    scene.effects.clear()
    scene.answer_step(step, produced, consumed)
    assert (scene.story(), scene.doing("d"), scene.streaks("p1")) == ([], "", {})


@pytest.mark.rule("F7")
def test_a_question_about_a_producer_whose_answer_is_lost_is_not_asked_again() -> None:
    scene = Scene()
    step = scene.step(scene.works(cut(scene, producer="p1")))
    scene.effects.clear()
    scene.now += 1000.0
    scene.tick(Stage.HEALTH)
    assert (scene.story(), scene.doing("d")) == ([], "")
    assert scene.answer_step(step, GOT, Outcome.ERROR_EVENT) == ()


@pytest.mark.rule("F7", "V13")
def test_engines_that_a_probe_saw_exchange_kv_need_no_second_handshake() -> None:
    scene = Scene(first_token_timeout_s=6.0, health_timeout_s=5.0, kv_first_pull_timeout_s=20.0)
    first = cut(scene, producer="p1")
    second = scene.step(scene.works(first))
    scene.works(second)
    assert [first.silence_s, second.silence_s] == [20.0, 20.0]
    for _ in range(2):
        scene.now += 1000.0
        step = scene.step(scene.send(ProbeCommand(engine="d")))
        assert step.silence_s == 6.0
        scene.works(step)
    # Another incarnation is another process.
    scene.send(EjectCommand(engine="p1", reason="x"))
    scene.readmit("p1")
    asked = {}
    for _ in range(2):
        step = scene.step(scene.send(ProbeCommand(engine="d")))
        assert step.producer is not None
        asked[step.producer.engine] = step.silence_s
        scene.works(step)
    assert asked == {"p1": 20.0, "p2": 6.0}


@pytest.mark.rule("F7")
def test_a_producer_that_is_waited_for_by_a_health_probe_is_asked_for_more() -> None:
    scene = Scene()
    health = scene.health(scene.report("p1", Outcome.PREFILL_TIMEOUT, count=3))
    scene.answer_health(health, Outcome.LOCAL)
    scene.effects.clear()
    assert scene.fleet._suspicions.blame("p1", 1, "d works and cannot read its handoff", now=scene.now)
    assert scene.doing("p1") == "inference probe under way"
    assert scene.holds("p1") == {Hold.VERIFICATION}
    # Being asked already, it is not asked twice; nor is one of another incarnation, out of service or unknown.
    blame = scene.fleet._suspicions.blame
    assert blame("p1", 1, "again", now=scene.now) == []
    assert blame("p2", 2, "another incarnation", now=scene.now) == []
    assert blame("x", 1, "unknown", now=scene.now) == []
    scene.send(EjectCommand(engine="p2", reason="x"))
    assert blame("p2", 1, "out", now=scene.now) == []


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
    scene.works(step)
    assert (scene.streaks("d"), scene.holds("d")) == ({}, {Hold.RELAPSE})
    scene.effects.clear()
    scene.report("d", Outcome.READ_TIMEOUT, count=3)
    assert scene.story()[0] == f"engine d relapsed: {why}; kept to a trickle for 10 s"


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
    assert after.engine("e").suspicion == "health probe again in 0.0 s: taken over"
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
    assert told.message == "engine e ejected (health probe): taken over, then connection refused"
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
