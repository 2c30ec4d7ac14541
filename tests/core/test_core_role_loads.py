"""How loaded a role is (spec C3)."""

import pytest

from narwhal.control.core.settings import RoleMode
from narwhal.vocabulary import Outcome
from tests.core.rig import OTHER
from tests.core.role_rig import FOUR, D, Fleet, P


@pytest.mark.rule("C3")
def test_a_load_is_the_latency_of_nine_legs_in_ten_over_the_target() -> None:
    rig = Fleet(*FOUR, mode=RoleMode.OFF)
    for _ in range(6):
        rig.measure("p1", first=0.5, count=89)
        rig.measure("p1", first=1.5, count=11)
        rig.measure("d1", step=0.02, count=89)
        rig.measure("d2", step=0.06, count=11)
        rig.run_pass()
    assert rig.role(P).load.load == pytest.approx(0.75, rel=0.05)
    assert rig.role(D).load.load == pytest.approx(0.6, rel=0.05)


@pytest.mark.rule("C3")
def test_decode_is_loaded_by_its_first_tokens_too() -> None:
    rig = Fleet(*FOUR, mode=RoleMode.OFF)
    for _ in range(6):
        rig.measure("d1", step=0.01, first=1.5)
        rig.run_pass()
    assert rig.role(D).load.load == pytest.approx(0.75, rel=0.05)


@pytest.mark.rule("C3")
def test_a_queue_is_a_load_before_its_legs_have_ended() -> None:
    """Ten legs a second come to an end, and forty wait: the last of them in four seconds, twice the target."""
    rig = Fleet(*FOUR, mode=RoleMode.OFF)
    for _ in range(6):
        rig.measure("p1", first=0.2, count=5, waiting=15)
        rig.measure("p2", first=0.2, count=5, waiting=25, proxy=OTHER)
        rig.run_pass()
    load = rig.role(P).load
    assert [load.load, load.queue_s, load.waiting] == pytest.approx([2.0, 4.0, 40])
    assert load.latency == pytest.approx(0.1, rel=0.05)


@pytest.mark.rule("C3")
def test_an_engine_that_is_held_does_not_speak_for_its_role() -> None:
    rig = Fleet(*FOUR, mode=RoleMode.OFF)
    for _ in range(6):
        rig.measure("d1", step=0.02)
        rig.measure("d2", step=0.5)
        rig.run_pass()
    assert rig.role(D).load.load == pytest.approx(5.0, rel=0.05)
    rig.report("d2", Outcome.STREAM_CUT, count=3)
    for _ in range(6):
        rig.measure("d1", step=0.02)
        rig.measure("d2", step=0.5)
        rig.run_pass()
    assert rig.role(D).load.load == pytest.approx(0.2, rel=0.05)


def test_without_traffic_there_is_no_load() -> None:
    rig = Fleet(*FOUR)
    rig.run_pass()
    assert [r.load.load for r in rig.control().roles] == [0.0, 0.0]
