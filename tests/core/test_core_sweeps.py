"""Sweeps in full: what is asked and when, what is told of silence, health and a control that is cut off (L, R8)."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from narwhal.control.core.effects import Effect, ProbeHealth
from narwhal.control.core.events import (
    EjectCommand,
    HealthAnswered,
    InferenceAnswered,
    LegSeen,
    ProcessIdentity,
    Reloaded,
)
from narwhal.control.core.handoff import aged, from_document, to_document
from narwhal.control.core.liveness import own_silence
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.view import HealthView
from narwhal.vocabulary import Hold, Outcome, Stage
from tests.core.rig import OTHER, PROCESS, Rig, decode, leg, of, only, prefill

ALL = ("p", "d", "e")


def fleet(**more: Any) -> Rig:
    return Rig(prefill("p"), decode("d"), decode("e"), liveness_every=10, **more)


def sweep(rig: Rig) -> dict[str, ProbeHealth]:
    """The sweep that is due at the next interval of the passes."""
    rig.now += rig.settings.liveness_every * rig.settings.monitor_interval_s
    asked = of(rig.tick(Stage.LIVENESS), ProbeHealth)
    assert asked
    return {probe.engine: probe for probe in asked}


def answer(rig: Rig, probes: dict[str, ProbeHealth], *silent: str, detail: str = "") -> list[Effect]:
    """These are silent, all others well."""
    effects: list[Effect] = []
    for name, probe in probes.items():
        outcome = Outcome.REFUSED if name in silent else None
        effects += rig.answer_health(probe, outcome, detail=detail if outcome else "", identity=PROCESS)
    return effects


def told(effects: Iterable[Effect], *kinds: EventKind) -> list[tuple[str, str]]:
    return [(r.engine, r.message) for r in of(effects, Record) if not kinds or r.kind in kinds]


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.rule("L1")
def test_a_sweep_asks_every_engine_for_health_and_process_at_its_interval_and_not_before() -> None:
    rig = fleet()
    rig.now += 9.75
    assert rig.tick(Stage.LIVENESS) == ()
    rig.now += 0.25
    probes = {p.engine: p for p in of(rig.tick(Stage.LIVENESS), ProbeHealth)}
    number = probes["d"].number
    assert probes["d"] == ProbeHealth(
        engine="d", url="http://d", incarnation=1, number=number, timeout_s=5.0, identity=True
    )
    assert list(probes) == ["p", "d", "e"]
    answer(rig, probes)
    rig.now += 9.75
    assert rig.tick(Stage.LIVENESS) == ()
    rig.now += 0.25
    assert [p.engine for p in of(rig.tick(Stage.LIVENESS), ProbeHealth)] == ["d", "e", "p"]


@pytest.mark.rule("L1", "L3")
def test_no_sweep_begins_while_one_waits_and_one_is_over_half_a_minute_after_it_began() -> None:
    """Three requests of five seconds, and fifteen for whatever the shell adds."""
    rig = fleet(liveness_misses=1)
    probes = sweep(rig)
    answer(rig, {"p": probes["p"], "d": probes["d"]}, "d")
    rig.now += 29.75
    assert rig.tick(Stage.LIVENESS) == ()
    rig.now += 0.25
    effects = rig.tick(Stage.LIVENESS)
    assert told(effects, EventKind.ENGINE_EJECTED) == [("d", "engine d ejected (liveness): silent in 1 sweep: refused")]
    assert {p.engine for p in of(effects, ProbeHealth)} >= {"e", "p"}  # the next one has begun
    assert (rig.holds("d"), rig.engine("e").misses) == ({Hold.EJECTED}, 0)


@pytest.mark.rule("L1", "S2")
@pytest.mark.parametrize(
    ("every", "passed_s", "waits_s"), [(4, 2.0, 4.0), (4, 9.0, 1.0), (60, 9.0, 1.0), (0, 9.0, None)]
)
def test_a_reload_moves_the_next_sweep_nearer_and_never_away(
    every: int, passed_s: float, waits_s: float | None
) -> None:
    rig = fleet()
    rig.now += passed_s
    rig.send(Reloaded(settings=rig.with_settings(liveness_every=every)))
    if waits_s is None:
        rig.now += 1000.0
        assert rig.tick(Stage.LIVENESS) == ()
        return
    rig.now += waits_s - 0.25
    assert rig.tick(Stage.LIVENESS) == ()
    rig.now += 0.25
    assert of(rig.tick(Stage.LIVENESS), ProbeHealth)


@pytest.mark.rule("L1", "S2")
def test_sweeps_that_are_turned_off_and_on_again_go_on_at_their_instant() -> None:
    rig = fleet()
    usual = rig.settings
    rig.now += 2.0
    rig.send(Reloaded(settings=rig.with_settings(liveness_every=0)))
    rig.now += 1.0
    rig.send(Reloaded(settings=usual))
    rig.now += 6.75
    assert rig.tick(Stage.LIVENESS) == ()
    rig.now += 0.25
    assert of(rig.tick(Stage.LIVENESS), ProbeHealth)


@pytest.mark.rule("L1")
def test_a_reload_changes_what_a_sweep_asks() -> None:
    rig = fleet()
    rig.send(Reloaded(settings=rig.with_settings(health_timeout_s=9.0, liveness_misses=1)))
    probes = sweep(rig)
    assert probes["d"].timeout_s == 9.0
    answer(rig, probes, "d")
    assert rig.holds("d") == {Hold.EJECTED}


# --- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.rule("L2")
@pytest.mark.parametrize(
    ("detail", "seen"), [("GET /health: connection refused", "GET /health: connection refused"), ("", "refused")]
)
def test_the_second_silence_in_a_row_ejects_and_says_what_was_seen(detail: str, seen: str) -> None:
    rig = fleet()
    counted = rig.fleet.counters_revision
    first = answer(rig, sweep(rig), "d", detail=detail)
    assert told(first) == [("d", f"engine d: {seen}")]
    assert rig.fleet.counters_revision > counted
    assert "liveness: silent in 1 sweep" in rig.fleet.explain("d", now=rig.now).lines
    words = f"silent in 2 sweeps in a row: {seen}"
    second = answer(rig, sweep(rig), "d", detail=detail)
    assert told(second, EventKind.ENGINE_EJECTED) == [("d", f"engine d ejected (liveness): {words}")]
    assert [h.reason for h in rig.engine("d").holds] == [words]


@pytest.mark.rule("L2", "L1")
def test_an_engine_that_is_taken_out_while_its_sweep_is_open_is_not_counted_by_it() -> None:
    rig = fleet(liveness_misses=1)
    probes = sweep(rig)
    answer(rig, {"d": probes["d"]}, "d")
    rig.report("d", Outcome.RESET, count=3)
    answer(rig, {"p": probes["p"], "e": probes["e"]}, "e")
    assert [r.fields["cause"] for r in rig.records(EventKind.ENGINE_EJECTED)] == ["connection", "liveness"]
    assert rig.engine("d").misses == 0


# --- control is cut off -----------------------------------------------------------------------------------------------


@pytest.mark.rule("L4")
@pytest.mark.case("C13")
def test_a_control_that_is_cut_off_says_of_how_many_and_when_it_is_over() -> None:
    rig = fleet()
    probes = sweep(rig)
    rig.report("p", Outcome.HANDOFF, proxy=OTHER)
    effects = answer(rig, probes, *ALL)
    words = "control is cut off: 3 of 3 engines do not answer it, and proxies have successes from 1 of these; "
    assert told(effects, EventKind.CONTROL_CUT_OFF) == [("", words + "the sweep says nothing about them")]
    assert {name: rig.engine(name).misses for name in ALL} == {"p": 0, "d": 1, "e": 1}
    probes = sweep(rig)
    rig.report("p", Outcome.HANDOFF, proxy=OTHER)
    assert told(answer(rig, probes, "p", "d"), EventKind.CONTROL_CUT_OFF, EventKind.CONTROL_BACK) == []
    effects = answer(rig, sweep(rig))
    back = "control is no longer cut off from the engines"
    assert told(effects, EventKind.CONTROL_BACK) == [("", back)]
    assert told(answer(rig, sweep(rig)), EventKind.CONTROL_BACK) == []


@pytest.mark.rule("L4")
@pytest.mark.case("C13")
def test_what_is_asked_while_the_sweep_is_open_that_ends_the_dark_was_asked_in_the_dark() -> None:
    rig = fleet()
    probes = sweep(rig)
    for engine, outcome in (("p", Outcome.HANDOFF), ("d", Outcome.STREAM_COMPLETE), ("e", Outcome.STREAM_COMPLETE)):
        rig.report(engine, outcome, proxy=OTHER)
    answer(rig, probes, *ALL)
    probes = sweep(rig)
    asked = only(rig.report("d", Outcome.HTTP_429, count=3), ProbeHealth)
    answer(rig, probes)
    assert rig.kinds()[-1] is EventKind.CONTROL_BACK
    rig.answer_health(asked, Outcome.CONNECT_TIMEOUT)
    assert rig.holds("d") == set()
    rig.now += 1.0
    light = only(rig.tick(Stage.HEALTH), ProbeHealth)
    rig.answer_health(light, Outcome.CONNECT_TIMEOUT)
    assert rig.holds("d") == {Hold.EJECTED}


@pytest.mark.rule("L4")
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.READ_TIMEOUT, Outcome.ANSWER_CUT])
def test_to_a_control_that_is_cut_off_silence_is_its_own_cause_and_every_answer_an_answer(outcome: Outcome) -> None:
    health = HealthAnswered(engine="d", incarnation=1, number=7, outcome=outcome, detail="x", latency_s=2.0)
    assert own_silence(health) == replace(health, outcome=Outcome.LOCAL)
    for heard in (None, Outcome.HTTP_5XX, Outcome.CLIENT_ERROR):
        assert own_silence(replace(health, outcome=heard)) == replace(health, outcome=heard)
    silent, local = leg(outcome, "x"), leg(Outcome.LOCAL, "x")
    cases: list[tuple[LegSeen | None, LegSeen | None, LegSeen | None, LegSeen | None]] = [
        (silent, None, local, None),
        (None, silent, None, local),
        (leg(Outcome.HANDOFF), silent, leg(Outcome.HANDOFF), local),
        (silent, leg(Outcome.STREAM_CUT), local, leg(Outcome.STREAM_CUT)),
    ]
    for produced, consumed, own_produced, own_consumed in cases:
        event = InferenceAnswered(engine="d", incarnation=1, number=7, produced=produced, consumed=consumed)
        assert own_silence(event) == replace(event, produced=own_produced, consumed=own_consumed)


# --- which process answers --------------------------------------------------------------------------------------------


@pytest.mark.rule("R8")
def test_another_process_is_named_beside_the_accepted_one() -> None:
    rig = fleet()
    probes = sweep(rig)
    other = ProcessIdentity(version="0.33.0", started_at=1_700_000_060.0)
    effects = rig.answer_health(probes["d"], identity=other)
    words = "version 0.33.0 started at 1700000060.000 answers, accepted was version 0.32.0 started at 1700000000.250"
    ejected = f"engine d ejected (process changed): {words}"
    effects += tuple(answer(rig, {"p": probes["p"], "e": probes["e"]}))
    assert told(effects, EventKind.ENGINE_EJECTED) == [("d", ejected)]
    assert [h.reason for h in rig.engine("d").holds] == [f"process changed: {words}"]


@pytest.mark.rule("R8", "S1")
def test_a_process_that_was_not_known_is_accepted_by_the_first_sweep_and_stored() -> None:
    before = fleet().saved()
    engines = {name: replace(saved, identity=None) for name, saved in before.engines.items()}
    document = json.loads(json.dumps(to_document(replace(before, engines=engines), wall=1.0, epoch=1, holder="a")))
    rig = fleet(saved=aged(from_document(document), wall=1.0), now=5.0)
    probes = sweep(rig)
    revision = rig.fleet.revision
    rig.answer_health(probes["d"], identity=PROCESS)
    assert (rig.engine("d").identity, rig.engine("e").identity) == (PROCESS, None)
    assert rig.fleet.revision == revision + 1
    rig.answer_health(probes["e"], Outcome.HTTP_5XX, identity=PROCESS)  # not from an engine that is not well
    assert rig.engine("e").identity is None


# --- what health said -------------------------------------------------------------------------------------------------


@pytest.mark.case("C8")
def test_each_change_of_health_is_told_once_in_the_words_of_the_probe() -> None:
    rig = fleet(eject_after=99, liveness_misses=99)
    answers: list[tuple[Outcome | None, str, list[tuple[str, str, str]]]] = [
        (None, "GET /health answered 200", []),
        (
            Outcome.CLIENT_ERROR,
            "GET /health answered 404",
            [("d", "engine d: GET /health answered 404", "client_error")],
        ),
        (Outcome.CLIENT_ERROR, "GET /health answered 404", []),
        (Outcome.LOCAL, "no control connection", []),
        (Outcome.READ_TIMEOUT, "", [("d", "engine d: read_timeout", "read_timeout")]),
        (None, "", [("d", "engine d: health 200", "ok")]),
        (None, "GET /health answered 200", []),
    ]
    for number, (outcome, detail, words) in enumerate(answers):
        probes = sweep(rig)
        effects = rig.answer_health(probes.pop("d"), outcome, detail=detail, latency_s=number / 10)
        changes = [r for r in of(effects, Record) if r.kind is EventKind.HEALTH_CHANGED]
        assert [(r.engine, r.message, r.fields["result"]) for r in changes] == words
        answer(rig, probes)
    # The newest five, newest first; what could not be asked is none of them.
    assert [(h.detail, h.latency_s) for h in rig.engine("d").health] == [
        ("GET /health answered 200", 0.6),
        ("health 200", 0.5),
        ("read_timeout", 0.4),
        ("GET /health answered 404", 0.2),
        ("GET /health answered 404", 0.1),
    ]
    assert rig.engine("d").health[2] == HealthView(
        outcome=Outcome.READ_TIMEOUT, detail="read_timeout", latency_s=0.4, age_s=20.0
    )


@pytest.mark.rule("L2", "F2")
def test_an_answer_other_than_200_is_evidence_as_the_sweep_saw_it() -> None:
    rig = fleet()
    probes = sweep(rig)
    rig.answer_health(probes["d"], Outcome.HTTP_5XX, status=503, detail="GET /health answered 503")
    rig.now += 2.0
    row = "evidence: 1 inference_status failure (acted upon at 3), the last 2.0 s ago: "
    assert f"{row}HTTP 503 (GET /health answered 503)" in rig.fleet.explain("d", now=rig.now).lines
    (known,) = rig.engine("d").evidence
    assert known.last is not None
    assert (known.last.phase, known.last.status, known.last.proxy) == (None, 503, "")


@pytest.mark.rule("L4")
@pytest.mark.parametrize("end", ["turned off", "nobody left"])
def test_a_control_whose_sweeps_end_does_not_believe_for_good_that_it_is_cut_off(end: str) -> None:
    """Silence to its probes would be its own cause until somebody is swept again, and explanations would say so."""
    rig = fleet(placement_max_age_s=0.0)
    for _ in range(2):
        rig.report("d", Outcome.STREAM_COMPLETE)
        answer(rig, sweep(rig), *ALL)
    assert EventKind.CONTROL_BACK not in rig.kinds()
    if end == "turned off":
        rig.send(Reloaded(settings=rig.with_settings(liveness_every=0)))
        rig.now += 1.0
        rig.tick(Stage.LIVENESS)
    else:
        for engine in ALL:
            if Hold.EJECTED not in rig.holds(engine):
                rig.send(EjectCommand(engine=engine, reason="x"))
        rig.now += 10.0
        assert of(rig.tick(Stage.LIVENESS), ProbeHealth) == []
    assert rig.kinds().count(EventKind.CONTROL_BACK) == 1
    assert not any("cut off" in line for line in rig.fleet.explain("d", now=rig.now).lines[:3])


@pytest.mark.rule("L4", "S2")
def test_a_sweep_that_is_open_when_sweeps_are_turned_off_still_tells_whether_control_is_cut_off() -> None:
    rig = fleet()
    for engine in ALL:
        rig.report(engine, Outcome.STREAM_COMPLETE)
    answer(rig, sweep(rig), *ALL)
    probes = sweep(rig)
    rig.send(Reloaded(settings=rig.with_settings(liveness_every=0)))
    rig.now += 1.0
    assert told(rig.tick(Stage.LIVENESS), EventKind.CONTROL_BACK) == []
    (over,) = told(answer(rig, probes), EventKind.CONTROL_BACK)
    assert over == ("", "control is no longer cut off from the engines")
