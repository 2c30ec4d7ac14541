"""When a standby asks the active to yield, and what an active answers (spec M8)."""

from dataclasses import replace

import pytest

from narwhal.control.core.standby import Heir, Holder, Misses, refusal

DEGRADED = "monitoring degraded: liveness RuntimeError"
ACTIVE = Holder(epoch=7, degraded=DEGRADED, since_yield_s=None, max_copy_age_s=30.0)
HEIR = Heir(holder="b", problem="", copy_epoch=7, copy_age_s=0.4, proven=True)


@pytest.mark.rule("M8")
def test_four_misses_in_a_row_are_asked_about_and_the_count_begins_anew() -> None:
    misses = Misses(takeover_after=4)
    assert [misses.heard(control_ready=False) for _ in range(9)] == [
        False, False, False, True, False, False, False, True, False,
    ]  # fmt: skip


@pytest.mark.rule("M8")
def test_one_good_answer_begins_the_count_anew() -> None:
    misses = Misses(takeover_after=4)
    answers = [False, False, False, True, False, False, False]
    assert not any(misses.heard(control_ready=ready) for ready in answers)
    assert misses.count == 3
    assert misses.heard(control_ready=False)


@pytest.mark.rule("M8")
def test_a_degraded_active_yields_to_a_standby_that_is_fit() -> None:
    assert refusal(ACTIVE, HEIR) == ""
    assert refusal(ACTIVE, replace(HEIR, copy_age_s=30.0)) == ""  # the bound itself is not too old


@pytest.mark.rule("M8")
@pytest.mark.parametrize(
    ("active", "heir", "words"),
    [
        (replace(ACTIVE, degraded=""), HEIR, "it is control-ready"),
        (replace(ACTIVE, since_yield_s=0.0), HEIR, "the lease was yielded 0 s ago, and is at most once in 60 s"),
        (
            replace(ACTIVE, since_yield_s=59.4),
            HEIR,
            "the lease was yielded 59 s ago, and is at most once in 60 s",
        ),
        (
            ACTIVE,
            replace(HEIR, problem="the handoff has another set of engines"),
            "b would not take over: the handoff has another set of engines",
        ),
        (ACTIVE, replace(HEIR, copy_epoch=0), "b has no copy of the state handoff"),
        (ACTIVE, replace(HEIR, copy_epoch=6), "b has the state handoff of epoch 6, not of 7"),
        (
            ACTIVE,
            replace(HEIR, copy_age_s=30.1),
            "b has a state handoff that is 30.1 s old, more than the 30 s of standby.max_handoff_age_s",
        ),
        (ACTIVE, replace(HEIR, proven=False), "b has not proven that it can write to the store"),
    ],
)
def test_everything_else_is_refused_with_the_reason(active: Holder, heir: Heir, words: str) -> None:
    assert refusal(active, heir) == words


@pytest.mark.rule("M8")
def test_a_minute_after_the_last_yield_the_next_may_come() -> None:
    assert refusal(replace(ACTIVE, since_yield_s=60.0), HEIR) == ""


def test_an_operator_may_have_a_healthy_active_yield_at_any_time_but_only_to_a_standby_that_is_fit() -> None:
    healthy = replace(ACTIVE, degraded="", since_yield_s=1.0)
    assert refusal(healthy, HEIR, by_operator=True) == ""
    for heir in (
        replace(HEIR, problem="x"),
        replace(HEIR, copy_epoch=6),
        replace(HEIR, copy_age_s=31.0),
        replace(HEIR, proven=False),
    ):
        assert refusal(healthy, heir, by_operator=True)
