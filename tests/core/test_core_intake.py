"""Reports become evidence: run by run, what counts, what is set aside, what is kept of a failure (F1, F5, F7–F12)."""

from typing import Any

import pytest

from narwhal.control.core.effects import RunCheck
from narwhal.control.core.events import ProxyConnected
from narwhal.control.core.evidence import Seen
from narwhal.control.core.records import EventKind, Record
from narwhal.reports import LegFailure, Run
from narwhal.vocabulary import FailureClass, Outcome, Phase
from tests.core.rig import EDGE, OTHER, Rig, decode, of, prefill

C = FailureClass
P, D = Phase.PREFILL, Phase.DECODE


def fleet(**more: Any) -> Rig:
    return Rig(prefill("p"), prefill("q"), decode("d"), decode("e"), **{"liveness_every": 0, "eject_after": 99, **more})


def last(rig: Rig, engine: str, failure: FailureClass) -> Seen | None:
    return next(e.last for e in rig.engine(engine).evidence if e.failure is failure)


def failed(outcome: Outcome, *, phase: Phase = D, engine: str = "d", **told: Any) -> Run:
    failure = LegFailure(outcome=outcome, **told)
    return Run(engine=engine, phase=phase, incarnation=1, outcome=outcome, failure=failure)


@pytest.mark.rule("F2", "F7")
def test_a_failure_is_kept_as_the_proxy_told_it() -> None:
    rig = fleet()
    rig.now = 1234.5
    told = failed(
        Outcome.HTTP_5XX,
        producer="p",
        producer_incarnation=1,
        status=503,
        detail="out of blocks",
        request_id="r-17",
        elapsed_s=2.0,
    )
    rig.batch(told, proxy=OTHER)
    assert last(rig, "d", C.INFERENCE_STATUS) == Seen(
        outcome=Outcome.HTTP_5XX,
        phase=D,
        at=1234.5,
        proxy="other/0",
        status=503,
        detail="out of blocks",
        producer="p",
        request_id="r-17",
    )
    words = "decode leg: HTTP 503 (out of blocks), on other/0, handoff of p, request r-17"
    assert any(line.endswith(words) for line in rig.fleet.explain("d", now=rig.now).lines)


@pytest.mark.rule("F1")
def test_failures_that_are_told_without_details_count_each() -> None:
    rig = fleet()
    rig.batch(Run(engine="d", phase=P, incarnation=1, outcome=Outcome.RESET, count=4))
    assert rig.streaks("d") == {C.CONNECTION: 4}
    assert last(rig, "d", C.CONNECTION) == Seen(outcome=Outcome.RESET, phase=P, at=rig.now, proxy="edge/0")


@pytest.mark.rule("S6")
def test_outcomes_on_an_engine_that_is_not_of_the_fleet_do_not_end_a_report() -> None:
    rig = fleet()
    ghost = Run(engine="ghost", phase=D, incarnation=1, outcome=Outcome.STREAM_COMPLETE, count=3)
    good = Run(engine="d", phase=D, incarnation=1, outcome=Outcome.STREAM_COMPLETE, count=2)
    counted = rig.fleet.counters_revision
    rig.batch(ghost, good, good, failed(Outcome.RESET))
    assert rig.saved().unknown_outcomes == {Outcome.STREAM_COMPLETE: 3}
    assert rig.engine("d").outcomes == {Outcome.STREAM_COMPLETE: 4, Outcome.RESET: 1}
    assert rig.streaks("d") == {C.CONNECTION: 1}
    assert rig.fleet.counters_revision > counted


@pytest.mark.rule("F7")
@pytest.mark.parametrize(
    ("run", "remembered"),
    [
        (failed(Outcome.STREAM_CUT, producer="p", producer_incarnation=1), {"p": 1}),
        (failed(Outcome.READ_TIMEOUT, producer="p", producer_incarnation=1), {"p": 1}),
        (failed(Outcome.HTTP_5XX, producer="p", producer_incarnation=1), {"p": 1}),
        (failed(Outcome.REFUSED, producer="p", producer_incarnation=1), {}),
        (failed(Outcome.HTTP_429, producer="p", producer_incarnation=1), {}),
        (failed(Outcome.HANDOFF_UNUSABLE, producer="p", producer_incarnation=1), {}),
        (failed(Outcome.HTTP_5XX, phase=P, producer="p", producer_incarnation=1), {}),
        (failed(Outcome.STREAM_CUT, producer="p", producer_incarnation=0), {}),  # of a process that is gone
        (failed(Outcome.STREAM_CUT, producer="p", producer_incarnation=2), {}),
        (failed(Outcome.STREAM_CUT, producer="d", producer_incarnation=1), {}),  # it read its own
        (failed(Outcome.STREAM_CUT, producer="ghost", producer_incarnation=1), {}),
        (failed(Outcome.STREAM_CUT), {}),
        (Run(engine="d", phase=D, incarnation=1, outcome=Outcome.STREAM_CUT), {}),
    ],
)
def test_whose_handoff_is_remembered(run: Run, remembered: dict[str, int]) -> None:
    rig = fleet()
    rig.batch(run)
    assert rig.saved().engines["d"].producers == remembered
    assert len(rig.streaks("d")) == 1


@pytest.mark.rule("F10")
@pytest.mark.parametrize(
    ("settings", "phase", "other_s", "counts"),
    [
        ({}, D, None, True),
        ({}, D, 1.0, False),  # another proxy had something of it
        ({}, D, 3.0, True),
        ({}, P, 15.0, False),
        ({}, P, 20.0, True),
        ({"stall_s": 0.0}, D, None, False),
        ({"stall_s": 0.0}, P, None, True),
        ({"silent_leg_s": 0.0}, P, None, False),
        ({"silent_leg_s": 0.0}, D, None, True),
    ],
)
def test_missing_progress_counts_unless_another_proxy_had_some_or_it_is_turned_off(
    settings: dict[str, float], phase: Phase, other_s: float | None, counts: bool
) -> None:
    rig = fleet(**settings)
    if other_s is not None:
        rig.report("d", Outcome.STREAM_COMPLETE, proxy=OTHER)
        rig.now += other_s
    rig.batch(failed(Outcome.STALLED, phase=phase))
    assert rig.streaks("d") == ({C.STREAM: 1} if counts else {})
    assert rig.saved().engines["d"].stalls == int(counts)


@pytest.mark.rule("F5", "F12")
def test_a_proxys_own_causes_are_shown_whatever_the_engine_is() -> None:
    rig = fleet(joined=False)
    rig.send(ProxyConnected(proxy=EDGE, address="x:1", pid=1, highest_epoch=0))
    told = rig.batch(Run(engine="d", phase=D, incarnation=0, outcome=Outcome.LOCAL, count=2))
    words = "proxy edge/0 is suspect itself: its legs fail by causes of its own"
    assert [(r.kind, r.proxy, r.message) for r in of(told, Record)] == [(EventKind.PROXY_SUSPECT, "edge/0", words)]
    assert rig.streaks("d") == {}


@pytest.mark.rule("F12")
def test_failures_of_a_proxy_that_is_itself_the_fault_are_told_once_and_set_aside() -> None:
    rig = fleet()
    for engine in ("p", "q", "d", "e"):
        rig.report(engine, Outcome.HANDOFF, proxy=OTHER)
    for engine in ("p", "q"):
        rig.report(engine, Outcome.REFUSED)
    told = rig.report("d", Outcome.REFUSED)
    words = "proxy edge/0 is suspect itself: its legs fail on 3 of 4 engines that serve other proxies"
    assert [r.message for r in of(told, Record)] == [words]
    assert of(rig.report("e", Outcome.READ_TIMEOUT), Record) == []
    assert [rig.streaks(engine) for engine in ("p", "q", "d", "e")] == [{C.CONNECTION: 1}, {C.CONNECTION: 1}, {}, {}]
    rig.report("d", Outcome.STREAM_CUT)
    assert rig.streaks("d") == {C.STREAM: 1}


@pytest.mark.rule("F4", "R9")
def test_an_answer_as_of_another_engine_clears_what_a_4xx_does_and_asks() -> None:
    rig = fleet()
    rig.report("d", Outcome.RESET)
    rig.report("d", Outcome.STREAM_CUT)
    assert [c.engine for c in of(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck)] == ["d"]
    assert rig.streaks("d") == {C.STREAM: 1}
    assert of(rig.report("e", Outcome.CLIENT_ERROR), RunCheck) == []


@pytest.mark.rule("F9")
def test_what_one_run_decides_is_told_before_what_the_next_one_does() -> None:
    rig = fleet(eject_after=1)
    told = rig.batch(failed(Outcome.REFUSED), failed(Outcome.REFUSED, engine="e"), failed(Outcome.STREAM_CUT))
    ejected = [(r.engine, r.kind) for r in of(told, Record) if r.engine]
    assert ejected == [("d", EventKind.ENGINE_EJECTED), ("e", EventKind.ENGINE_EJECTED)]
    assert rig.streaks("d") == {C.CONNECTION: 1}


@pytest.mark.rule("F12", "R9")
def test_a_proxy_whose_credential_every_engine_refuses_is_the_fault_itself() -> None:
    rig = fleet(eject_after=3)
    for engine in ("p", "q", "d", "e"):
        rig.report(engine, Outcome.HANDOFF, proxy=OTHER)
    asked = [
        check.engine for e in ("p", "q", "d", "e") for check in of(rig.report(e, Outcome.WRONG_IDENTITY), RunCheck)
    ]
    assert asked == ["p", "q"]  # with the third it is the proxy that is the fault
    words = "proxy edge/0 is suspect itself: its legs fail on 3 of 4 engines that serve other proxies"
    assert [r.message for r in rig.records(EventKind.PROXY_SUSPECT)] == [words]
    assert [rig.holds(engine) for engine in ("p", "q", "d", "e")] == [set()] * 4
    assert rig.streaks("d") == rig.streaks("e") == {}


@pytest.mark.rule("R9")
def test_an_answer_as_of_another_engine_asks_for_the_model_once() -> None:
    rig = fleet()
    told = rig.report("d", Outcome.WRONG_IDENTITY)
    assert [r.message for r in of(told, Record)] == ["engine d: model check begins (an answer as of another engine)"]
    assert len(of(told, RunCheck)) == 1
