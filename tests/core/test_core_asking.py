"""What probes ask, of whom and for how long (spec F6, V13, R2), and the model check of a doubted engine (R9)."""

import pytest

from narwhal.control.core.asking import Asker
from narwhal.control.core.effects import Effect, ProbeHealth, ProbeInference, RunCheck, RunTransfer, Target
from narwhal.control.core.engine import Engine, joining
from narwhal.control.core.events import Reloaded
from narwhal.control.core.probing import Step
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.settings import CoreSettings, EngineSpec
from narwhal.vocabulary import Check, Hold, Outcome, Phase, Stage, Verdict
from tests.core.rig import Rig, decode, of, only, prefill

P, D = Phase.PREFILL, Phase.DECODE
SPECS = (prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
# Time-outs that no two of are alike, so that each shows where it goes.
SETTINGS = CoreSettings(
    name="fleet",
    model="tiny",
    engines=SPECS,
    probe_tokens=16,
    health_timeout_s=4.0,
    first_token_timeout_s=6.0,
    kv_first_pull_timeout_s=20.0,
)


def in_service(spec: EngineSpec) -> Engine:
    engine = joining(spec, now=0.0)
    engine.admit(identity=None, ramp_s=0.0, now=0.0)
    engine.numbers = 40
    return engine


def asker(*specs: EngineSpec) -> tuple[Asker, dict[str, Engine]]:
    engines = {spec.id: in_service(spec) for spec in specs or SPECS}
    return Asker(SETTINGS, engines), engines


def target(engine: str, incarnation: int = 1) -> Target:
    return Target(engine=engine, url=f"http://{engine}", incarnation=incarnation)


@pytest.mark.rule("L2")
@pytest.mark.parametrize("identity", [False, True])
def test_a_question_for_health(identity: bool) -> None:
    ask, engines = asker()
    effect = ProbeHealth(engine="d1", url="http://d1", incarnation=1, number=41, timeout_s=4.0, identity=identity)
    # Its own time-out, and fifteen seconds for whatever the shell adds; then the answer is lost.
    asked = ask.health(engines["d1"], now=100.0, identity=identity)
    assert asked == (effect, 119.0)
    assert ask.health(engines["d1"], now=100.0)[0].number == 42
    assert ask.health(engines["d1"], now=100.0)[0].identity is False


@pytest.mark.rule("F6", "V13")
def test_a_step_of_a_probe_has_the_time_of_a_first_transfer_until_the_two_have_met() -> None:
    ask, engines = asker()

    def asked(producer: str | None) -> tuple[ProbeInference, float]:
        return ask.step(engines["d1"], Step(producer=producer, consumer="d2"), now=100.0)

    first = ProbeInference(
        engine="d1",
        incarnation=1,
        number=41,
        model="tiny",
        tokens=16,
        producer=target("p1"),
        consumer=target("d2"),
        silence_s=20.0,
    )
    assert asked("p1") == (first, 100.0 + 20.0 * 18 + 15.0)
    ask.met("p1", "d2")
    known, lost_at = asked("p1")
    assert (known.silence_s, lost_at) == (6.0, 100.0 + 6.0 * 18 + 15.0)
    # The other direction, and every other pair, have not.
    assert asked("p2")[0].silence_s == 20.0
    alone, _ = asked(None)
    assert (alone.producer, alone.consumer, alone.silence_s) == (None, target("d2"), 6.0)
    engines["d2"].incarnation = 2
    again, _ = asked("p1")
    assert (again.silence_s, again.consumer) == (20.0, target("d2", 2))
    ask.met("p1", "d2")
    ask.met("p2", "d2")
    ask.met("p1", "nobody")
    ask.met("nobody", "d2")
    ask.forget("p1")
    assert (asked("p1")[0].silence_s, asked("p2")[0].silence_s) == (20.0, 6.0)
    ask.forget("d2")
    assert asked("p2")[0].silence_s == 20.0


@pytest.mark.rule("F6")
def test_a_probe_waits_no_shorter_than_health_does() -> None:
    ask, engines = asker()
    ask.settings = CoreSettings(name="f", model="m", engines=SPECS, health_timeout_s=30.0)
    assert ask.step(engines["d1"], Step(producer="p1", consumer="d1"), now=0.0)[0].silence_s == 30.0
    assert ask.transfer(engines["d1"], "p1", "d1", now=0.0)[0].silence_s == 30.0
    ask.settings = CoreSettings(name="f", model="m", engines=SPECS, first_token_timeout_s=40.0)
    assert ask.transfer(engines["d1"], "p1", "d1", now=0.0)[0].silence_s == 40.0


@pytest.mark.rule("R2", "V13")
def test_a_transfer_of_a_gate_streams_two_tokens_and_may_be_the_first_of_its_pair() -> None:
    ask, engines = asker()
    ask.met("p1", "d1")
    effect = RunTransfer(
        engine="d1",
        incarnation=1,
        number=41,
        model="tiny",
        tokens=2,
        producer=target("p1"),
        consumer=target("d1"),
        silence_s=20.0,
    )
    assert ask.transfer(engines["d1"], "p1", "d1", now=100.0) == (effect, 100.0 + 20.0 * 4 + 15.0)


@pytest.mark.rule("F6", "F7")
def test_peers_are_free_able_and_not_doubted_those_of_the_role_first_taking_turns() -> None:
    specs = (decode("d1"), prefill("p1"), prefill("p2"), decode("d2"), decode("d3", pinned=True), decode("d4"))
    ask, engines = asker(*specs)
    engines["d4"].place(Hold.DRIFT, "slow", now=1.0)

    def peers(phase: Phase, turn: int, doubted: str = "") -> list[str]:
        engines["d1"].numbers = turn
        return ask.peers(engines["d1"], phase, lambda e: e.id == doubted, now=5.0)

    assert [peers(P, turn) for turn in range(3)] == [["p1", "p2", "d2"], ["p2", "p1", "d2"], ["p1", "p2", "d2"]]
    assert [peers(D, turn) for turn in range(4)] == [
        ["d2", "d3", "p1", "p2"],
        ["d2", "d3", "p2", "p1"],
        ["d2", "d3", "p1", "p2"],
        ["d3", "d2", "p1", "p2"],
    ]
    assert peers(P, 0, doubted="p1") == ["p2", "d2"]
    for engine in ("p1", "p2", "d2", "d3"):
        engines[engine].place(Hold.DRAIN, "disk", now=2.0)
    assert peers(P, 1) == []


# --- is it the engine that we think it is? ----------------------------------------------------------------------------


def doubted(rig: Rig) -> tuple[Effect, ...]:
    return rig.report("d", Outcome.WRONG_IDENTITY)


def told(effects: tuple[Effect, ...]) -> list[tuple[EventKind, str]]:
    return [(r.kind, r.message) for r in of(effects, Record)]


@pytest.mark.rule("R9")
def test_a_doubt_asks_for_the_model_once_and_says_why() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0, health_timeout_s=4.0)
    asked = doubted(rig)
    words = "engine d: model check begins (an answer as of another engine)"
    assert told(asked) == [(EventKind.PROBE_STARTED, words)]
    check = only(asked, RunCheck)
    assert check == RunCheck(
        engine="d", url="http://d", incarnation=1, number=check.number, check=Check.MODEL, model="tiny", timeout_s=4.0
    )
    assert told(doubted(rig)) == []
    passed = rig.answer_check(check, Verdict.PASS, detail="tiny is served")
    assert told(passed) == [
        (EventKind.PROBE_ENDED, "engine d: model check: pass: tiny is served"),
        (
            EventKind.PROBE_STARTED,
            "engine d: inference probe begins (lists the model, and answered a leg as another engine would)",
        ),
    ]
    rig.now += 3.0
    assert "check model: pass: tiny is served (3.0 s ago, took 0 ms)" in rig.fleet.explain("d", now=rig.now).lines
    assert rig.answer_check(check, Verdict.FAIL) == ()  # nobody waits for it any more


@pytest.mark.rule("R9")
def test_after_a_passed_check_the_same_answers_ask_for_nothing_for_an_interval() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0, readmit_every=10)
    rig.answer_check(only(doubted(rig), RunCheck), Verdict.PASS)
    rig.now += 9.75
    assert rig.tick(Stage.HEALTH) == ()
    assert doubted(rig) == ()
    rig.now += 0.25
    assert only(doubted(rig), RunCheck)


@pytest.mark.rule("R9")
def test_an_inconclusive_check_is_repeated_after_an_interval_and_a_lost_one_when_it_is_lost() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"), liveness_every=0, readmit_every=10, health_timeout_s=4.0)
    first = only(doubted(rig), RunCheck)
    ended = rig.answer_check(first, Verdict.INCONCLUSIVE, detail="no connection")
    assert told(ended) == [(EventKind.PROBE_ENDED, "engine d: model check: inconclusive: no connection")]
    rig.now += 9.75
    assert rig.tick(Stage.HEALTH) == ()
    rig.now += 0.25
    second = only(rig.tick(Stage.HEALTH), RunCheck)
    assert second.number > first.number
    assert rig.tick(Stage.HEALTH) == ()
    rig.now += 4.0 + 10.0 - 0.25
    assert rig.tick(Stage.HEALTH) == ()
    rig.now += 0.25
    third = only(rig.tick(Stage.HEALTH), RunCheck)
    assert rig.answer_check(second, Verdict.FAIL) == ()
    failed = rig.answer_check(third, Verdict.FAIL, detail="serves llama")
    assert told(failed)[:2] == [
        (EventKind.PROBE_ENDED, "engine d: model check: fail: serves llama"),
        (EventKind.ENGINE_EJECTED, "engine d ejected (model): serves llama"),
    ]
    assert [h.reason for h in rig.engine("d").holds] == ["model: serves llama"]


@pytest.mark.rule("R9")
def test_a_doubt_ends_with_the_incarnation_and_another_engine_has_its_own() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"), liveness_every=0)
    old = only(doubted(rig), RunCheck)
    assert only(rig.report("e", Outcome.WRONG_IDENTITY), RunCheck).engine == "e"
    rig.report("d", Outcome.REFUSED, count=3)
    rig.readmit("d")
    assert rig.answer_check(old, Verdict.FAIL) == ()
    assert only(doubted(rig), RunCheck).incarnation == 2


@pytest.mark.rule("R9", "S2")
def test_a_reload_of_the_time_out_reaches_the_next_check() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0)
    rig.send(Reloaded(settings=rig.with_settings(health_timeout_s=9.0, model="large", readmit_every=20)))
    check = only(doubted(rig), RunCheck)
    assert (check.timeout_s, check.model) == (9.0, "large")
    rig.answer_check(check, Verdict.PASS)
    rig.now += 19.75
    assert doubted(rig) == ()
    rig.now += 0.25
    assert doubted(rig) != ()
