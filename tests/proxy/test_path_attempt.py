"""The machine of one request, the seats and the queue: pure, `now` is a literal."""

from collections.abc import Callable

import pytest

from narwhal.proxy.admission import Admission, RetryBudget, Waiting
from narwhal.proxy.attempt import (
    Attempt,
    Backoff,
    Fail,
    Fault,
    IllegalTransition,
    LegEnd,
    Pass,
    Policy,
    StartLeg,
    State,
)
from narwhal.vocabulary import Outcome, Phase

ONE = Policy(max_attempts=1, handoff_max_age_s=25.0)
THREE = ONE._replace(max_attempts=3)


def attempt(policy: Policy = ONE, credits: float = 10.0, due: float = 600.0) -> Attempt:
    return Attempt(policy, RetryBudget(credits), due)


def in_decode(machine: Attempt, producer: str = "p1") -> Attempt:
    machine.begin()
    machine.prefilled(producer, 1.0)
    machine.dispatched()
    return machine


def test_the_straight_way() -> None:
    machine = attempt()
    assert machine.begin() == StartLeg(Phase.PREFILL, 1, frozenset(), False)
    assert machine.prefilled("p1", 1.0) == StartLeg(Phase.DECODE, 1, frozenset({"p1"}), False)
    machine.dispatched()
    assert machine.answered() == Pass()
    assert machine.state is State.DONE


# (outcome, what the client is told), typed from the table of errors
TOLD = [
    (Outcome.REFUSED, Fault.UPSTREAM),
    (Outcome.UNREACHABLE, Fault.UPSTREAM),
    (Outcome.RESET, Fault.UPSTREAM),
    (Outcome.TLS_FAILED, Fault.UPSTREAM),
    (Outcome.ANSWER_CUT, Fault.UPSTREAM),
    (Outcome.HTTP_5XX, Fault.UPSTREAM),
    (Outcome.HANDOFF_UNUSABLE, Fault.UPSTREAM),
    (Outcome.STREAM_CUT, Fault.UPSTREAM),
    (Outcome.MARKER_WITHOUT_TOKEN, Fault.UPSTREAM),
    (Outcome.ERROR_EVENT, Fault.UPSTREAM),
    (Outcome.STREAM_MALFORMED, Fault.UPSTREAM),
    (Outcome.CONNECT_TIMEOUT, Fault.UPSTREAM_TIMEOUT),
    (Outcome.PREFILL_TIMEOUT, Fault.UPSTREAM_TIMEOUT),
    (Outcome.READ_TIMEOUT, Fault.UPSTREAM_TIMEOUT),
    (Outcome.FIRST_TOKEN_TIMEOUT, Fault.UPSTREAM_TIMEOUT),
    (Outcome.STREAM_SILENT, Fault.UPSTREAM_TIMEOUT),
    (Outcome.HTTP_408, Fault.UPSTREAM_TIMEOUT),
    (Outcome.HTTP_429, Fault.ENGINE_BUSY),
    (Outcome.WRONG_IDENTITY, Fault.ENGINE_IDENTITY),
    (Outcome.DEADLINE, Fault.DEADLINE),
]


@pytest.mark.rule("V2")
@pytest.mark.parametrize(("outcome", "fault"), TOLD)
def test_one_attempt_and_what_the_client_is_told(outcome: Outcome, fault: Fault) -> None:
    machine = attempt()
    machine.begin()
    step = machine.leg_failed("p1", LegEnd(outcome, 500, "7"), output=False, now=1.0, wait_s=0.1)
    assert step == Fail(fault, Phase.PREFILL, "7")
    assert machine.state is State.DONE


@pytest.mark.rule("V4", "V5")
@pytest.mark.case("A1")
def test_case_A1_a_retry_has_its_own_prefill_and_avoids_those_that_failed() -> None:
    machine = in_decode(attempt(THREE))
    step = machine.leg_failed("d1", LegEnd(Outcome.HTTP_5XX, 500), output=False, now=10.0, wait_s=0.1)
    assert step == Backoff(10.0 + 0.1)
    assert machine.resume() == StartLeg(Phase.PREFILL, 2, frozenset({"d1", "p1"}), False)
    with pytest.raises(IllegalTransition):
        machine.dispatched()  # the first handoff is gone for good
    assert machine.prefilled("p2", 11.0) == StartLeg(Phase.DECODE, 2, frozenset({"d1", "p1", "p2"}), False)


@pytest.mark.rule("V5")
def test_no_handoff_is_sent_twice() -> None:
    machine = in_decode(attempt(THREE))
    with pytest.raises(IllegalTransition):
        machine.dispatched()
    assert machine.state is State.DECODE, "a refused transition changes nothing"


RETRIED = [outcome for outcome, _ in TOLD if outcome is not Outcome.DEADLINE]


@pytest.mark.rule("V4")
@pytest.mark.parametrize("outcome", [outcome for outcome, _ in TOLD])
def test_which_failures_are_tried_again(outcome: Outcome) -> None:
    machine = in_decode(attempt(THREE))
    step = machine.leg_failed("d1", LegEnd(outcome), output=False, now=1.0, wait_s=0.1)
    assert isinstance(step, Backoff) == (outcome in RETRIED)


@pytest.mark.rule("V4")
@pytest.mark.parametrize(
    ("status", "again"), [(500, True), (501, False), (502, True), (503, True), (504, True), (507, False)]
)
def test_of_the_5xx_only_four_are_tried_again(status: int, again: bool) -> None:
    machine = in_decode(attempt(THREE))
    step = machine.leg_failed("d1", LegEnd(Outcome.HTTP_5XX, status), output=False, now=1.0, wait_s=0.1)
    assert isinstance(step, Backoff) == again


@pytest.mark.rule("V4", "V8")
def test_nothing_is_tried_again_after_output() -> None:
    machine = in_decode(attempt(THREE))
    step = machine.leg_failed("d1", LegEnd(Outcome.STREAM_CUT), output=True, now=1.0, wait_s=0.1)
    assert step == Fail(Fault.UPSTREAM, Phase.DECODE)


@pytest.mark.rule("V3")
def test_attempts_backoff_deadline_and_budget_end_retrying() -> None:
    machine = attempt(THREE)
    machine.begin()
    for now, wait_s in ((1.0, 0.1), (2.0, 0.3)):
        step = machine.leg_failed("p1", LegEnd(Outcome.REFUSED), output=False, now=now, wait_s=wait_s)
        assert step == Backoff(now + wait_s)
        machine.resume()
    end = machine.leg_failed("p1", LegEnd(Outcome.REFUSED), output=False, now=3.0, wait_s=0.1)
    assert end == Fail(Fault.UPSTREAM, Phase.PREFILL)
    assert machine.retries == 2

    late = attempt(THREE, due=5.0)
    late.begin()
    assert isinstance(late.leg_failed("p1", LegEnd(Outcome.REFUSED), output=False, now=4.95, wait_s=0.1), Fail)

    budget = RetryBudget(1.0)
    for expected in (Backoff, Fail):
        poor = Attempt(THREE, budget, 600.0)
        poor.begin()
        assert isinstance(poor.leg_failed("p1", LegEnd(Outcome.REFUSED), output=False, now=1.0, wait_s=0.1), expected)
    assert budget.denied == 1
    budget.replenish(0.1, 10.0)
    assert budget.credits == pytest.approx(0.1)


@pytest.mark.rule("V9")
def test_an_idle_connection_that_was_closed_under_a_decode_leg_costs_no_attempt() -> None:
    machine = in_decode(attempt())
    closed = LegEnd(Outcome.RESET, idle_closed=True)
    step = machine.leg_failed("d1", closed, output=False, now=1.0, wait_s=0.1)
    assert step == StartLeg(Phase.PREFILL, 2, frozenset(), False), "a fresh prefill, avoiding nobody"
    assert machine.prefilled("p1", 2.0).fresh, "its decode leg takes a fresh connection"
    machine.dispatched()
    assert machine.retries == 0
    # Only once, and it did not use up the one attempt of the policy before.
    assert isinstance(machine.leg_failed("d1", closed, output=False, now=3.0, wait_s=0.1), Fail)


@pytest.mark.rule("V9", "V3")
def test_the_extra_attempt_leaves_the_policys_own_in_place() -> None:
    machine = in_decode(attempt(THREE._replace(max_attempts=2)))
    machine.leg_failed("d1", LegEnd(Outcome.RESET, idle_closed=True), output=False, now=1.0, wait_s=0.1)
    machine.prefilled("p1", 2.0)
    machine.dispatched()
    assert isinstance(machine.leg_failed("d1", LegEnd(Outcome.REFUSED), output=False, now=3.0, wait_s=0.1), Backoff)


@pytest.mark.rule("V6")
def test_a_handoff_ages_from_the_prefills_answer() -> None:
    machine = attempt()
    machine.begin()
    machine.prefilled("p1", 100.0)
    assert machine.may_dispatch(124.9)
    assert not machine.may_dispatch(125.0)
    assert machine.expired(125.0, 0.5) == Fail(Fault.UPSTREAM_TIMEOUT, Phase.DECODE)
    again = attempt(THREE)
    again.begin()
    again.prefilled("p1", 100.0)
    assert isinstance(again.expired(125.0, 0.5), Backoff)
    assert again.resume().avoid == frozenset(), "nobody is to blame"


@pytest.mark.rule("V4", "F7")
def test_once_the_handoff_is_loaded_its_producer_has_no_part_in_a_failure() -> None:
    machine = attempt(THREE)
    machine.begin()
    machine.prefilled("p1", 1.0)
    with pytest.raises(IllegalTransition):
        machine.loaded()
    machine.dispatched()
    machine.loaded()
    with pytest.raises(IllegalTransition):
        machine.dispatched()
    assert isinstance(machine.leg_failed("d1", LegEnd(Outcome.RESET), output=False, now=2.0, wait_s=0.1), Backoff)
    assert machine.resume().avoid == frozenset({"d1"})


def test_what_the_machine_does_not_allow_changes_nothing() -> None:
    machine = attempt()
    for wrong in (machine.dispatched, machine.resume, lambda: machine.prefilled("p1", 1.0)):
        with pytest.raises(IllegalTransition):
            wrong()
        assert machine.state is State.NEW
    machine.begin()
    machine.cancelled()
    with pytest.raises(IllegalTransition):
        machine.leg_failed("p1", LegEnd(Outcome.REFUSED), output=False, now=1.0, wait_s=0.1)
    machine.cancelled()
    assert machine.state is State.DONE


def reached(state: State) -> Attempt:
    machine = attempt(THREE)
    if state is State.DONE:
        machine.cancelled()
    elif state is not State.NEW:
        machine.begin()
    if state in (State.HELD, State.DECODE):
        machine.prefilled("p1", 1.0)
    if state is State.DECODE:
        machine.dispatched()
    if state is State.BACKOFF:
        refused(machine)
    assert machine.state is state
    return machine


def refused(machine: Attempt, *, now: float = 1.0, wait_s: float = 0.1) -> Backoff | Fail | StartLeg | Pass:
    return machine.leg_failed("p1", LegEnd(Outcome.REFUSED), output=False, now=now, wait_s=wait_s)


ILLEGAL: list[tuple[State, Callable[[Attempt], object], str]] = [
    (State.NEW, Attempt.dispatched, "new → decode"),
    (State.NEW, lambda m: m.expired(1.0, 0.1), "no handoff is held in state new"),
    (State.NEW, Attempt.resume, "nothing to resume in state new"),
    (State.NEW, refused, "no leg runs in state new"),
    (State.PREFILL, Attempt.dispatched, "prefill → decode"),
    (State.PREFILL, lambda m: m.expired(1.0, 0.1), "no handoff is held in state prefill"),
    (State.PREFILL, Attempt.resume, "nothing to resume in state prefill"),
    (State.HELD, lambda m: m.prefilled("p2", 2.0), "held → held"),
    (State.DECODE, lambda m: m.prefilled("p2", 2.0), "decode → held"),
    (State.DECODE, Attempt.dispatched, "decode → decode"),
    (State.DECODE, lambda m: m.expired(1.0, 0.1), "no handoff is held in state decode"),
    (State.BACKOFF, lambda m: m.prefilled("p2", 2.0), "backoff → held"),
    (State.BACKOFF, refused, "no leg runs in state backoff"),
    (State.DONE, Attempt.begin, "done → prefill"),
    (State.DONE, Attempt.answered, "done → done"),
    (State.DONE, lambda m: m.unplaced(Fault.NO_ENGINES), "done → done"),
]


@pytest.mark.parametrize(("state", "do", "words"), ILLEGAL, ids=range(len(ILLEGAL)))
def test_what_is_not_allowed_says_in_which_state(state: State, do: Callable[[Attempt], object], words: str) -> None:
    machine = reached(state)
    with pytest.raises(IllegalTransition) as illegal:
        do(machine)
    assert (str(illegal.value), machine.state) == (words, state)


@pytest.mark.parametrize("state", State)
def test_each_state_is_of_a_phase_and_in_each_the_client_may_leave(state: State) -> None:
    machine = reached(state)
    assert machine.phase is (Phase.DECODE if state in (State.HELD, State.DECODE) else Phase.PREFILL)
    machine.cancelled()
    assert machine.state is State.DONE


@pytest.mark.parametrize(("state", "phase"), [(State.PREFILL, Phase.PREFILL), (State.HELD, Phase.DECODE)])
def test_a_leg_that_nobody_can_take_ends_the_request_in_its_phase(state: State, phase: Phase) -> None:
    assert reached(state).unplaced(Fault.SATURATED) == Fail(Fault.SATURATED, phase)


@pytest.mark.rule("V4")
def test_an_engine_that_failed_in_passing_is_avoided_from_then_on() -> None:
    machine = attempt(THREE)
    assert machine.avoid(machine.begin(), "p9") == StartLeg(Phase.PREFILL, 1, frozenset({"p9"}), False)
    step = machine.prefilled("p1", 1.0)
    assert step.avoid == {"p1", "p9"}
    assert machine.avoid(step, "d9").avoid == {"p1", "p9", "d9"}
    machine.expired(30.0, 0.1)
    assert machine.resume().avoid == {"p9", "d9"}


@pytest.mark.rule("V3")
def test_a_backoff_must_end_before_the_deadline_and_one_that_does_not_costs_no_credit() -> None:
    for wait_s, credits in ((0.5, 10.0), (0.25, 9.0)):
        budget = RetryBudget(10.0)
        machine = Attempt(THREE, budget, 5.0)
        machine.begin()
        again = refused(machine, now=4.5, wait_s=wait_s)
        assert again == (Backoff(4.75) if wait_s < 0.5 else Fail(Fault.UPSTREAM, Phase.PREFILL))
        assert (budget.credits, budget.denied) == (credits, 0)


@pytest.mark.rule("V9")
def test_an_idle_connection_that_was_closed_under_a_prefill_leg_is_a_failure_like_any_other() -> None:
    machine = attempt()
    machine.begin()
    closed = LegEnd(Outcome.RESET, idle_closed=True)
    step = machine.leg_failed("p1", closed, output=False, now=1.0, wait_s=0.1)
    assert step == Fail(Fault.UPSTREAM, Phase.PREFILL)


@pytest.mark.rule("V4", "V6")
def test_a_handoff_that_expires_is_a_retry_as_long_as_attempts_are_left() -> None:
    machine = attempt(THREE)
    machine.begin()
    for retries in (1, 2):
        machine.prefilled("p1", 10.0)
        assert machine.expired(40.0, 0.25) == Backoff(40.25)
        assert machine.retries == retries
        assert machine.resume().attempt == retries + 1
    machine.prefilled("p1", 50.0)
    assert machine.expired(80.0, 0.25) == Fail(Fault.UPSTREAM_TIMEOUT, Phase.DECODE)
    assert (machine.number, machine.retries) == (3, 2)


# --- seats and queue ---


@pytest.mark.rule("V1", "V2")
def test_seats_are_bounded_and_without_a_queue_the_excess_is_turned_away() -> None:
    admission = Admission()
    assert [admission.enter(2) for _ in range(3)] == [True, True, False]
    assert admission.queue(0, 5.0) is None
    assert admission.leave(2) == []
    assert admission.enter(2)
    assert admission.taken == 2


@pytest.mark.rule("V3")
def test_the_queue_is_first_come_first_served() -> None:
    admission = Admission()
    assert admission.enter(1)
    first, second = admission.queue(2, 5.0), admission.queue(2, 3.0)
    assert first is not None
    assert second is not None
    assert admission.queue(2, 9.0) is None
    assert not admission.enter(5), "nobody overtakes the queue"
    assert admission.expire(2.9) == []
    assert admission.expire(3.0) == [second]
    assert second.state is Waiting.LATE
    assert admission.leave(1) == [first]
    assert (first.state, admission.taken) == (Waiting.SEATED, 1)


@pytest.mark.rule("V3", "M5")
def test_who_leaves_the_queue_or_finds_it_closed_holds_no_seat() -> None:
    admission = Admission()
    assert admission.enter(1)
    left, waits = admission.queue(9, 5.0), admission.queue(9, 5.0)
    assert left is not None
    assert waits is not None
    admission.forget(left)
    assert admission.close() == [waits]
    assert admission.leave(1) == []
    assert (admission.taken, admission.waiting) == (0, 0)
    with pytest.raises(ValueError, match="nobody had"):
        admission.leave(1)


@pytest.mark.rule("V3")
def test_more_seats_seat_more_than_one() -> None:
    admission = Admission()
    assert admission.enter(1)
    tickets = [admission.queue(9, 5.0) for _ in range(3)]
    assert admission.leave(2) == tickets[:2]
    assert admission.taken == 2
