"""Probes of suspects, scene by scene: all that is told and asked, in order (spec F3, F6, F7, V13)."""

import pytest

from narwhal.control.core.events import (
    EjectCommand,
    LegSeen,
    ProbeCommand,
)
from narwhal.vocabulary import FailureClass, Hold, Outcome, Stage
from tests.core.rig import decode, leg, prefill
from tests.core.scene import FOUR, GOT, HELD, OK, Scene, cut, timed_out

# --- health probes ----------------------------------------------------------------------------------------------------


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
    assert step.silence_s == 5.0
    scene.now += 18 * 5.0 + 15.0 - 0.1
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
    times = {"first_token_timeout_s": 6.0, "health_timeout_s": 5.0, "kv_first_pull_timeout_s": 20.0}
    scene = Scene(saved=Scene(**times).saved(), **times)  # after a takeover: no gate of this process has seen any
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
    assert asked == {"p1": 6.0, "p2": 6.0}  # its gate has seen it work


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


@pytest.mark.rule("F7")
def test_a_producer_that_is_being_found_out_about_already_is_passed_over_for_the_next() -> None:
    scene = Scene(*FOUR, prefill("p3", pinned=True))
    health = scene.health(scene.report("p3", Outcome.PREFILL_TIMEOUT, count=3))
    scene.report("d", Outcome.STREAM_CUT, count=2, producer="p1")
    step = scene.step(scene.report("d", Outcome.STREAM_CUT, producer="p3"))
    assert step.producer is not None
    assert step.producer.engine == "p2"  # neither remembered nor doubted
    scene.effects.clear()
    scene.works(step)
    assert scene.story()[-1] == "? p1→d for d"
    assert scene.doing("p3") == "health probe under way: 3 timeout failures in a row (prefill timeout)"
    scene.answer_health(health)
    assert scene.doing("p3") == ""


@pytest.mark.rule("F6")
def test_one_that_is_being_found_out_about_is_no_peer_even_without_a_hold() -> None:
    scene = Scene()
    scene.report("p1", Outcome.PREFILL_TIMEOUT, count=3)
    assert scene.holds("p1") == set()
    for _ in range(3):  # peers take turns
        step = cut(scene)
        assert step.producer is not None
        assert step.producer.engine == "p2"
        scene.works(step)
        scene.now += 1000.0
