"""The simulation of demand in small: what the whole one (scripts/bench/demand.py) promises must be within its reach."""

from dataclasses import replace

import pytest

from narwhal.control.core.settings import RoleMode, RoleSettings
from scripts.bench.demand import LONG_ANSWERS, LONG_PROMPTS, TPOT_S, TTFT_S, reversals, share
from scripts.bench.demand_fleet import Demand, Result, World

LONG = replace(LONG_PROMPTS, seconds=150.0)
SHORT = replace(LONG_ANSWERS, seconds=150.0)


def run(*demands: Demand, prefills: int, mode: RoleMode) -> Result:
    roles = RoleSettings(mode=mode, ttft_s=TTFT_S, tpot_s=TPOT_S)
    return World(seed=1, prefills=prefills, engines=6, demands=list(demands), roles=roles).run()


def test_every_request_is_counted_and_an_idle_fleet_serves_all_of_them_in_time() -> None:
    result = run(replace(LONG, rate=0.5), prefills=3, mode=RoleMode.OFF)
    assert result.requests[0] > 50
    assert result.good == result.requests
    assert result.moves == []


def test_a_split_that_does_not_fit_the_demand_fails_most_of_it() -> None:
    assert share(run(LONG, prefills=2, mode=RoleMode.OFF)) < 0.3
    assert share(run(SHORT, prefills=4, mode=RoleMode.OFF)) < 0.3


@pytest.mark.rule("C1", "C3")
def test_roles_follow_the_demand_and_nothing_is_undone_at_once() -> None:
    result = run(LONG, SHORT, prefills=3, mode=RoleMode.AUTO)
    assert share(result) > 0.7
    counts = [count for at, count in result.splits if at < 150.0]
    assert counts[-1] >= 4
    assert result.splits[-1][1] <= 2
    assert reversals(result) == 0


@pytest.mark.rule("C1")
def test_advice_moves_nobody() -> None:
    result = run(LONG, SHORT, prefills=3, mode=RoleMode.ADVISORY)
    assert (result.moves, [count for _, count in result.splits]) == ([], [3])
