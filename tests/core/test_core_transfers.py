"""The gate's transfers: with whom, both directions, one retry, who is to blame, cohorts (spec R2, B1, B3)."""

import time
from collections.abc import Callable, Iterable

import pytest

from narwhal.control.core.effects import Effect, RunCheck, RunTransfer
from narwhal.control.core.events import EjectCommand, LegSeen, Reloaded, Woke
from narwhal.control.core.records import EventKind
from narwhal.control.core.settings import EngineSpec
from narwhal.control.core.transfers import Fault, judged
from narwhal.vocabulary import Check, Hold, Outcome, Stage, Verdict
from tests.core.rig import Rig, decode, leg, of, prefill

WORKS = (Outcome.HANDOFF, Outcome.STREAM_COMPLETE)
REFUSED_BY_PEER = (Outcome.HANDOFF, Outcome.HTTP_5XX)  # both work, and no KV goes over
Pair = tuple[str, str]
Ends = tuple[Outcome | None, Outcome | None]


def pair_of(transfer: RunTransfer) -> Pair:
    return transfer.producer.engine, transfer.consumer.engine


def answer_all(
    rig: Rig, effects: Iterable[Effect], ends: Callable[[Pair], Ends] = lambda _: WORKS, dead: Iterable[str] = ()
) -> list[Pair]:
    """Answer every check and transfer that follows; returns the transfers in the order they were asked for."""
    waiting, seen = list(effects), []
    while waiting:
        asked = waiting.pop(0)
        if isinstance(asked, RunCheck):
            waiting += rig.answer_check(asked, Verdict.FAIL if asked.engine in dead else None)
        elif isinstance(asked, RunTransfer):
            seen.append(pair_of(asked))
            waiting += rig.answer_transfer(asked, *ends(pair_of(asked)))
    return seen


def out(rig: Rig, *engines: str) -> None:
    for engine in engines:
        rig.send(EjectCommand(engine=engine, reason="x"))


def tried(rig: Rig, *engines: str, ends: Callable[[Pair], Ends] = lambda _: WORKS) -> list[Pair]:
    """The gates of these come due at once, and everything else that is due is asked too."""
    for _ in range(400):
        effects = rig.run_pass()
        asked = {c.engine for c in of(effects, RunCheck)}
        if asked:
            assert asked == set(engines)
            return answer_all(rig, effects, ends)
    raise AssertionError("no gate was tried")


def transfer_check(rig: Rig, engine: str) -> tuple[Verdict, str]:
    check = next(c for c in rig.engine(engine).checks if c.check is Check.KV_TRANSFER)
    return check.verdict, check.detail


FOUR = (prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
PINNED = tuple(EngineSpec(id=e.id, url=e.url, role=e.role, pinned=True) for e in FOUR)


# --- with whom --------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R2")
@pytest.mark.parametrize(
    ("engines", "candidate", "pairs"),
    [
        # One that may prefill produces for a peer that decodes, one that may decode consumes from a peer that prefills.
        (PINNED, "p1", {("p1", "d1"), ("p1", "d2")}),
        (PINNED, "d1", {("p1", "d1"), ("p2", "d1")}),
        # An unpinned one does both.
        (FOUR, "p1", {("p1", "d1"), ("p1", "d2"), ("p2", "p1")}),
        (FOUR, "d1", {("d1", "d2"), ("p1", "d1"), ("p2", "d1")}),
        # A role that nobody has is stood in for.
        ((prefill("p1"), decode("d1")), "d1", {("p1", "d1"), ("d1", "p1")}),
        ((prefill("p1", pinned=True), decode("d1")), "d1", {("p1", "d1")}),
    ],
)
def test_a_candidate_is_tried_with_every_eligible_peer_in_every_direction_its_role_permits(
    engines: tuple[EngineSpec, ...], candidate: str, pairs: set[Pair]
) -> None:
    rig = Rig(*engines, liveness_every=0)
    out(rig, candidate)
    seen = tried(rig, candidate)
    assert len(seen) == len(pairs)
    assert set(seen) == pairs
    assert rig.holds(candidate) == set()
    assert transfer_check(rig, candidate)[0] is Verdict.PASS


@pytest.mark.rule("R2")
def test_one_that_is_held_is_no_peer() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    rig.report("p2", Outcome.HTTP_5XX, count=3)  # suspect
    out(rig, "d1")
    assert tried(rig, "d1") == [("p1", "d1")]


@pytest.mark.rule("R2", "V13")
def test_the_budget_is_that_of_a_first_transfer_whatever_was_seen_before() -> None:
    rig = Rig(*PINNED, liveness_every=0, kv_first_pull_timeout_s=20.0, first_token_timeout_s=5.0)
    out(rig, "d1")
    transfers: list[RunTransfer] = []
    for _ in range(20):
        waiting: list[Effect] = list(rig.run_pass())
        while waiting:
            asked = waiting.pop(0)
            if isinstance(asked, RunCheck):
                waiting += rig.answer_check(asked)
            elif isinstance(asked, RunTransfer):
                transfers.append(asked)
                waiting += rig.answer_transfer(asked)
        if transfers:
            break
    assert [t.silence_s for t in transfers] == [20.0, 20.0]
    # No engine is in two transfers at once.
    assert all(t.consumer.engine == "d1" for t in transfers)


# --- a failure --------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R2")
@pytest.mark.case("B3")
def test_case_B3_a_first_failure_of_each_pair_is_tried_once_more() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    out(rig, "d1")
    failed: set[Pair] = set()

    def first_fails(pair: Pair) -> Ends:
        if pair in failed:
            return WORKS
        failed.add(pair)
        return REFUSED_BY_PEER

    seen = tried(rig, "d1", ends=first_fails)
    assert sorted(seen) == [("p1", "d1")] * 2 + [("p2", "d1")] * 2
    assert rig.holds("d1") == set()


@pytest.mark.rule("R1", "R2")
@pytest.mark.case("B1")
def test_case_B1_one_pair_that_fails_twice_keeps_it_out_and_is_named() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    out(rig, "d1")

    def p1_is_a_stranger(pair: Pair) -> Ends:
        return REFUSED_BY_PEER if pair == ("p1", "d1") else WORKS

    seen = tried(rig, "d1", ends=p1_is_a_stranger)
    assert seen.count(("p1", "d1")) == 2
    assert rig.holds("d1") == {Hold.EJECTED}
    verdict, words = transfer_check(rig, "d1")
    assert verdict is Verdict.FAIL
    assert "p1→d1: http 5xx" in words
    assert "restart p1" in words
    assert "p2" not in words
    assert any("p1→d1" in line for line in rig.fleet.explain("d1", now=rig.now).lines)
    # Traffic flows on other pairs meanwhile, and nobody else is blamed for it.
    assert rig.engine("p1").eligible
    assert rig.engine("d2").eligible
    rig.readmit("d1")
    assert rig.holds("d1") == set()


@pytest.mark.rule("R2")
def test_a_restarted_producer_that_every_old_peer_refuses_stays_out_and_names_them_all() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    out(rig, "p1")
    tried(rig, "p1", ends=lambda _: REFUSED_BY_PEER)
    assert rig.holds("p1") == {Hold.EJECTED}
    _, words = transfer_check(rig, "p1")
    assert "p1→d1" in words
    assert "p1→d2" in words
    assert "restart d1, d2" in words


@pytest.mark.rule("R2")
@pytest.mark.parametrize(
    ("produced", "consumed", "fault"),
    [
        (Outcome.HANDOFF, Outcome.STREAM_COMPLETE, Fault.NONE),
        (Outcome.HANDOFF, Outcome.ERROR_EVENT, Fault.PAIR),
        (Outcome.HANDOFF, Outcome.HTTP_5XX, Fault.PAIR),
        (Outcome.HANDOFF, Outcome.FIRST_TOKEN_TIMEOUT, Fault.PAIR),
        (Outcome.HANDOFF, Outcome.STREAM_CUT, Fault.PAIR),
        (Outcome.HANDOFF, Outcome.REFUSED, Fault.CONSUMER),
        (Outcome.HANDOFF, Outcome.HTTP_429, Fault.UNKNOWN),
        (Outcome.HANDOFF, Outcome.LOCAL, Fault.UNKNOWN),
        (Outcome.HANDOFF, None, Fault.UNKNOWN),
        (Outcome.HTTP_5XX, None, Fault.PRODUCER),
        (Outcome.HANDOFF_UNUSABLE, None, Fault.PRODUCER),
        (Outcome.HTTP_429, None, Fault.UNKNOWN),
        (None, Outcome.REFUSED, Fault.CONSUMER),
        (None, Outcome.LOCAL, Fault.UNKNOWN),
        (None, None, Fault.UNKNOWN),
    ],
)
def test_whose_failure_it_is(produced: Outcome | None, consumed: Outcome | None, fault: Fault) -> None:
    def seen(outcome: Outcome | None) -> LegSeen | None:
        return None if outcome is None else leg(outcome)

    assert judged(seen(produced), seen(consumed)).fault is fault


@pytest.mark.rule("R2")
def test_a_peer_that_failed_itself_does_not_keep_the_candidate_out_while_another_speaks_for_it() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    out(rig, "d1")

    def p1_is_sick(pair: Pair) -> Ends:
        return (Outcome.HTTP_5XX, None) if pair[0] == "p1" else WORKS

    tried(rig, "d1", ends=p1_is_sick)
    assert rig.holds("d1") == set()
    out(rig, "d2")

    def both_are_sick(_pair: Pair) -> Ends:
        return Outcome.HTTP_5XX, None

    tried(rig, "d2", ends=both_are_sick)
    assert rig.holds("d2") == {Hold.EJECTED}
    assert transfer_check(rig, "d2")[0] is Verdict.INCONCLUSIVE


@pytest.mark.rule("R2")
def test_a_candidate_that_produces_nothing_fails_itself() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    out(rig, "p1")
    tried(rig, "p1", ends=lambda _: (Outcome.HTTP_5XX, None))
    assert transfer_check(rig, "p1") == (Verdict.FAIL, "p1→d1: http 5xx; p1→d2: http 5xx")


def test_an_answer_that_never_comes_says_nothing() -> None:
    rig = Rig(prefill("p1", pinned=True), decode("d1", pinned=True), decode("d2", pinned=True), liveness_every=0)
    out(rig, "d1")
    waiting: list[Effect] = []
    while not of(waiting, RunTransfer):
        waiting += rig.run_pass()
        waiting = [x for e in waiting for x in (rig.answer_check(e) if isinstance(e, RunCheck) else [e])]
    (lost,) = of(waiting, RunTransfer)
    rig.now += 1000
    (again,) = of(rig.run_pass(), RunTransfer)
    assert rig.answer_transfer(lost) == ()  # too late
    rig.now += 1000
    rig.run_pass()
    assert transfer_check(rig, "d1") == (Verdict.INCONCLUSIVE, "p1→d1: no answer came back")
    assert again.number != lost.number


# --- nobody eligible --------------------------------------------------------------------------------------------------


@pytest.mark.rule("R2")
def test_where_no_peer_exists_the_check_is_not_tested_and_never_passed() -> None:
    rig = Rig(decode("d1"))
    assert transfer_check(rig, "d1") == (Verdict.NOT_TESTED, "no peer")
    assert rig.holds("d1") == set()


@pytest.mark.rule("R2", "R8")
def test_a_whole_fleet_that_starts_is_tried_with_each_other_and_joins_together() -> None:
    rig = Rig(*PINNED, joined=False, liveness_every=0)
    seen = answer_all(rig, rig.send(Woke()))
    assert sorted(seen) == [("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2")]
    assert [e.id for e in rig.engines() if e.holds] == []
    assert {transfer_check(rig, e.id)[0] for e in PINNED} == {Verdict.PASS}


@pytest.mark.rule("R2")
@pytest.mark.case("C9")
@pytest.mark.parametrize("bad", ["p1", "d2"])
def test_one_bad_candidate_does_not_keep_the_others_out(bad: str) -> None:
    rig = Rig(*PINNED, joined=False, liveness_every=0)
    answer_all(rig, rig.send(Woke()), lambda pair: REFUSED_BY_PEER if bad in pair else WORKS)
    assert {e.id for e in rig.engines() if e.holds} == {bad}
    assert transfer_check(rig, bad)[0] is Verdict.FAIL


@pytest.mark.rule("R2")
def test_two_that_cannot_work_with_each_other_both_stay_out() -> None:
    rig = Rig(prefill("p1", pinned=True), decode("d1", pinned=True), joined=False, liveness_every=0)
    answer_all(rig, rig.send(Woke()), lambda _: REFUSED_BY_PEER)
    assert {e.id for e in rig.engines() if e.holds} == {"p1", "d1"}


@pytest.mark.rule("R2", "R3")
@pytest.mark.case("C9")
def test_a_whole_fleet_dead_and_back_returns_together_whoever_is_due_first() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    rig.now += 1000  # long since admitted
    for engine in ("p1", "p2", "d1", "d2"):
        out(rig, engine)
        rig.now += 2.0  # so that their gates are due apart
    rig.now += 2.5
    effects = rig.run_pass()
    asked = {c.engine for c in of(effects, RunCheck)}
    assert asked == {"p1"}
    seen = answer_all(rig, effects)
    assert sorted(seen) == [("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2")]
    assert [e.id for e in rig.engines() if e.holds] == []


@pytest.mark.rule("R2")
def test_a_dead_engine_is_waited_for_no_longer_than_its_own_gate_takes() -> None:
    rig = Rig(*PINNED, joined=False, liveness_every=0)
    effects: list[Effect] = []
    for check in of(rig.send(Woke()), RunCheck):
        if check.engine != "d2":  # hangs: nobody answers for it
            answer_all(rig, rig.answer_check(check))
    assert {e.id for e in rig.engines() if e.holds} == {"p1", "p2", "d1", "d2"}
    assert "waiting for the gates of d2" in " ".join(rig.fleet.explain("p1", now=rig.now).lines)
    rig.now += 1000
    effects += rig.tick(Stage.READMISSION)
    answer_all(rig, [e for e in effects if getattr(e, "engine", "") != "d2"])
    assert {e.id for e in rig.engines() if e.holds} == {"d2"}


@pytest.mark.rule("R2")
def test_one_that_came_in_untested_is_on_trial_with_the_next() -> None:
    """The first engine of a fleet comes in alone; if it cannot transfer, that is not the others' failure for good."""
    rig = Rig(*PINNED, joined=False, liveness_every=0)
    assert answer_all(rig, rig.send(Woke()), dead=("p1", "p2", "d2")) == []
    assert transfer_check(rig, "d1") == (Verdict.NOT_TESTED, "no peer")
    assert rig.holds("d1") == set()
    tried(rig, "p1", "p2", "d2", ends=lambda pair: REFUSED_BY_PEER if "d1" in pair else WORKS)
    assert {e.id for e in rig.engines() if e.holds} == set()
    assert transfer_check(rig, "d1") == (Verdict.NOT_TESTED, "no peer")
    assert transfer_check(rig, "p1")[0] is Verdict.PASS


@pytest.mark.rule("R2")
def test_one_that_came_in_untested_is_proven_by_those_that_come_later() -> None:
    rig = Rig(prefill("p1", pinned=True), decode("d1", pinned=True), joined=False, liveness_every=0)
    answer_all(rig, rig.send(Woke()), dead=("p1",))
    assert transfer_check(rig, "d1")[0] is Verdict.NOT_TESTED
    tried(rig, "p1")
    assert transfer_check(rig, "d1") == (Verdict.PASS, "as a peer of those that came later")
    found = next(c for c in rig.engine("d1").checks if c.check is Check.KV_TRANSFER)
    assert found.age_s == 0.0


def test_engines_that_leave_the_fleet_or_are_ejected_under_a_trial_are_tried_no_more() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    out(rig, "d1")
    waiting: list[Effect] = []
    while not of(waiting, RunTransfer):
        waiting += rig.run_pass()
        waiting = [x for e in waiting for x in (rig.answer_check(e) if isinstance(e, RunCheck) else [e])]
    (open_one,) = of(waiting, RunTransfer)
    peer = open_one.producer.engine
    rest = tuple(e for e in PINNED if e.id != peer)
    rig.send(Reloaded(settings=rig.with_settings(engines=rest)))
    assert rig.answer_transfer(open_one) == ()
    seen = answer_all(rig, rig.run_pass())
    assert [pair[0] for pair in seen] == [e.id for e in rest if e.role.value == "prefill"]
    assert rig.holds("d1") == set()
    assert EventKind.ENGINE_READMITTED in rig.kinds()


# --- many engines -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("R2")
def test_in_a_large_fleet_each_engine_is_tried_with_eight_peers_in_each_direction() -> None:
    engines = [prefill(f"p{n}") if n % 2 else decode(f"d{n}") for n in range(120)]
    rig = Rig(*engines, joined=False)
    began = time.process_time()
    seen = answer_all(rig, rig.send(Woke()))
    took_s = time.process_time() - began
    assert len(seen) == len(set(seen))
    for engine in engines:
        assert sum(pair[0] == engine.id for pair in seen) >= 8
        assert sum(pair[1] == engine.id for pair in seen) >= 8
    # A prefill engine and a decode engine mean each other; among themselves those of one role are tried both ways.
    assert len(seen) == 120 * 12
    assert all(rig.holds(engine.id) == set() for engine in engines)
    assert took_s < 10, "it took 44 s with all pairs of which every answer went through all, and takes less than one"


@pytest.mark.rule("R2")
def test_peers_in_a_large_fleet_are_others_for_each_candidate_and_the_same_at_each_try() -> None:
    producers, readers = ([f"{kind}{n}" for n in range(20)] for kind in "pd")
    rig = Rig(
        *(prefill(name, pinned=True) for name in producers),
        *(decode(name, pinned=True) for name in readers),
        liveness_every=0,
    )
    out(rig, *readers[:10])
    first = tried(rig, *readers[:10])
    asked = [sum(pair[0] == name for pair in first) for name in producers]
    assert sum(asked) == 10 * 8
    assert max(asked) <= 8
    rig.now += 1000  # no relapse, no longer wait
    out(rig, *readers[:10])
    assert sorted(tried(rig, *readers[:10])) == sorted(first)


@pytest.mark.rule("R2")
def test_of_many_pairs_that_failed_a_few_are_named() -> None:
    rig = Rig(prefill("p", pinned=True), *(decode(f"d{n}", pinned=True) for n in range(12)), joined=False)
    answer_all(rig, rig.send(Woke()), ends=lambda _: REFUSED_BY_PEER)
    verdict, words = transfer_check(rig, "p")
    assert verdict is Verdict.FAIL
    assert words.count("→") == 8
    assert words.count("and 4 more") == 2
