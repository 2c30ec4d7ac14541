"""Consolidation risk: a role that gave up an engine is short of it (spec C4)."""

from typing import Any

import pytest

from narwhal.control.core.handoff import aged, from_document, to_document
from narwhal.control.core.records import EventKind
from narwhal.vocabulary import Outcome, Phase, RiskKind, Stage
from tests.core.role_rig import SIX, D, Fleet, P


def given_up(**roles: Any) -> Fleet:
    """Prefill has given up an engine. Moves back, and a cooldown, do not come into it."""
    rig = Fleet(*SIX, cooldown_s=0.0, **roles)
    rig.order("p1", D)
    return rig


@pytest.mark.rule("C4")
def test_a_role_that_misses_its_target_after_giving_up_an_engine_gives_up_no_more() -> None:
    rig = given_up()
    rig.loaded(1.1, 0.1, passes=3)
    (told,) = rig.records(EventKind.ROLE_RISK)
    assert told.fields == {"role": "prefill", "risk": "target missed"}
    (risk,) = rig.role(P).risks
    assert (risk.kind, risk.count) == (RiskKind.TARGET_MISSED, 2)
    rig.loaded(0.1, 3.0, passes=10)
    assert len(rig.moves()) == 1
    assert "prefill gives none up for" in rig.why_not()
    began = rig.now
    while len(rig.moves()) == 1:
        rig.loaded(0.1, 3.0)
        assert rig.now < began + 70
    assert rig.moves()[1][1] == D


@pytest.mark.rule("C4")
@pytest.mark.parametrize(
    ("left", "engine", "phase", "outcome"),
    [
        (P, "p2", P, Outcome.PREFILL_TIMEOUT),
        (D, "d2", D, Outcome.FIRST_TOKEN_TIMEOUT),
    ],
)
def test_a_first_token_that_comes_too_late_is_a_risk(left: Phase, engine: str, phase: Phase, outcome: Outcome) -> None:
    rig = Fleet(*SIX)
    rig.order("p1" if left is P else "d1", left.other)
    rig.report(engine, outcome, phase=phase)
    rig.report(engine, outcome, phase=phase)
    (risk,) = rig.role(left).risks
    assert (risk.kind, risk.count) == (RiskKind.FIRST_TOKEN_LATE, 2)
    assert rig.role(left.other).risks == ()


@pytest.mark.rule("C4")
def test_other_failures_are_no_risk_and_nothing_is_without_a_move() -> None:
    rig = given_up()
    rig.report("p2", Outcome.HTTP_5XX, phase=P)
    rig.report("p2", Outcome.FIRST_TOKEN_TIMEOUT, phase=P)
    assert rig.role(P).risks == ()
    other = Fleet(*SIX)
    other.report("p2", Outcome.PREFILL_TIMEOUT, phase=P)
    other.loaded(1.5, 0.7, passes=5)
    assert other.role(P).risks == ()


@pytest.mark.rule("C4")
def test_a_queue_alone_is_a_load_and_no_missed_target() -> None:
    rig = given_up()
    for _ in range(4):
        rig.measure("p2", first=0.2, count=5, waiting=60)
        rig.run_pass()
    assert rig.role(P).load.load > 1.0
    assert rig.role(P).risks == ()


@pytest.mark.rule("C4")
def test_after_sixty_seconds_a_missed_target_says_nothing_about_the_move() -> None:
    rig = given_up()
    rig.loaded(0.7, 0.7, passes=59)
    rig.loaded(1.2, 0.7, passes=5)
    assert rig.role(P).risks == ()


@pytest.mark.rule("C4")
def test_a_risk_blocks_the_repair_of_a_floor_too() -> None:
    rig = given_up()
    rig.loaded(1.1, 0.1, passes=3)
    for engine in ("d1", "d2", "d3", "p1"):
        rig.report(engine, Outcome.REFUSED, count=3)
    rig.tick(Stage.CONTROLLER)
    assert len(rig.moves()) == 1


@pytest.mark.rule("C4", "S1")
def test_a_risk_survives_a_takeover_with_its_age() -> None:
    rig = given_up()
    rig.loaded(1.1, 0.1, passes=3)
    rig.loaded(0.6, 0.6, passes=7)
    (before,) = rig.role(P).risks
    document = to_document(rig.saved(), wall=50.0, epoch=1, holder="a")
    saved = aged(from_document(document), wall=70.0)
    after = Fleet(*SIX, saved=saved, cooldown_s=0.0)
    after._sequences.update(rig._sequences)
    (risk,) = after.role(P).risks
    assert (risk.kind, risk.count) == (RiskKind.TARGET_MISSED, before.count)
    assert risk.age_s == pytest.approx(before.age_s + 20.0)
    assert after.role(P).gave_age_s == pytest.approx(10.0 + 20.0)
    assert after.roles()["p1"] is D
    assert after.engine("p1").role_age_s == pytest.approx(30.0)
    after.loaded(0.1, 3.0, passes=6)
    assert after.moves() == []
    began = after.now
    while not after.moves():
        after.loaded(0.1, 3.0)
        assert after.now < began + 60
    assert after.now - began == pytest.approx(60.0 - 20.0 - before.age_s - 6.0, abs=2.0)
