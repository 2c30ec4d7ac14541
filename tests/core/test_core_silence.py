"""Engines that give nothing: one silent leg is enough to be asked about (spec F10)."""

from typing import Any

import pytest

from narwhal.control.core.effects import ProbeInference
from narwhal.control.core.events import ProbeCommand, Woke
from narwhal.control.core.records import EventKind, Record
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase, Stage
from tests.core.rig import OTHER, Rig, decode, of, only, prefill

C = FailureClass


def two_and_two(**settings: Any) -> Rig:
    engines = (prefill("p1", pinned=True), prefill("p2", pinned=True))
    return Rig(*engines, decode("d1", pinned=True), decode("d2", pinned=True), liveness_every=0, **settings)


@pytest.mark.rule("F10")
@pytest.mark.parametrize(("engine", "phase"), [("p1", Phase.PREFILL), ("d1", Phase.DECODE)])
def test_one_silent_leg_counts_once_and_asks_for_a_probe_without_a_hold(engine: str, phase: Phase) -> None:
    rig = two_and_two()
    step = only(rig.report(engine, Outcome.STALLED, detail="nothing came for 30.2 s"), ProbeInference)
    suspect = step.producer if phase is Phase.PREFILL else step.consumer
    assert suspect is not None
    assert suspect.engine == engine
    assert (rig.holds(engine), rig.streaks(engine)) == (set(), {C.STREAM: 1})
    (begun,) = rig.records(EventKind.PROBE_STARTED)
    assert begun.message == (
        f"engine {engine}: inference probe begins ({phase} leg: stalled (nothing came for 30.2 s), on edge/0)"
    )
    rig.works(step)
    assert (rig.holds(engine), rig.streaks(engine)) == (set(), {})


@pytest.mark.rule("F10")
@pytest.mark.parametrize("engine", ["p1", "d1"])
def test_a_probe_that_has_no_answer_for_an_interval_brings_the_hold(engine: str) -> None:
    rig = two_and_two(monitor_interval_s=2.0)
    step = only(rig.report(engine, Outcome.STALLED), ProbeInference)
    asked_at = rig.now
    assert rig.fleet.next_due() == asked_at + 2.0
    rig.now += 1.99
    rig.send(Woke())
    assert rig.holds(engine) == set()
    rig.now = asked_at + 2.0
    placed = rig.send(Woke())
    assert rig.holds(engine) == {Hold.VERIFICATION}
    assert [r.message for r in placed if isinstance(r, Record) and r.kind is EventKind.HOLD_PLACED] == [
        f"engine {engine}: verification hold: 1 stream failure (stalled)"
    ]
    assert rig.fleet.next_due() is None
    rig.works(step)
    assert rig.holds(engine) == set()


@pytest.mark.rule("F10")
def test_a_monitor_pass_brings_the_hold_as_well() -> None:
    rig = two_and_two()
    rig.report("d1", Outcome.STALLED)
    rig.now += 1.0
    rig.tick(Stage.HEALTH)
    assert rig.holds("d1") == {Hold.VERIFICATION}


@pytest.mark.rule("F10", "F6")
def test_the_probe_of_a_silent_leg_ejects_like_any_other() -> None:
    rig = two_and_two()
    step = only(rig.report("p1", Outcome.STALLED), ProbeInference)
    rig.answer_step(step, Outcome.PREFILL_TIMEOUT, None)
    assert rig.holds("p1") == {Hold.EJECTED}
    (ejected,) = rig.records(EventKind.ENGINE_EJECTED)
    assert "1 stream failure (stalled), then" in ejected.message


@pytest.mark.rule("F10")
def test_each_step_has_an_interval_of_its_own() -> None:
    rig = Rig(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"), liveness_every=0)
    first = only(rig.report("d1", Outcome.STALLED), ProbeInference)
    rig.now += 0.9
    second = only(rig.works(first), ProbeInference)
    rig.now += 0.9
    rig.send(Woke())
    assert rig.holds("d1") == set()
    rig.works(second)
    rig.now += 5
    rig.send(Woke())
    assert (rig.holds("d1"), rig.fleet.next_due()) == (set(), None)


@pytest.mark.rule("F10", "F3")
def test_the_third_silent_leg_brings_the_hold_while_the_probe_of_the_first_is_open() -> None:
    rig = two_and_two()
    step = only(rig.report("d1", Outcome.STALLED), ProbeInference)
    rig.report("d1", Outcome.STALLED)
    assert rig.holds("d1") == set()
    assert not of(rig.report("d1", Outcome.STALLED), ProbeInference)  # one at a time
    assert rig.holds("d1") == {Hold.VERIFICATION}
    rig.works(step)
    assert (rig.holds("d1"), rig.streaks("d1")) == (set(), {})


@pytest.mark.rule("F3")
def test_failures_bring_the_hold_while_an_operators_probe_is_open() -> None:
    rig = two_and_two()
    step = only(rig.send(ProbeCommand(engine="d1")), ProbeInference)
    rig.report("d1", Outcome.STREAM_CUT, count=3)
    assert rig.holds("d1") == {Hold.VERIFICATION}
    rig.now += 1.0
    rig.works(step)
    assert rig.holds("d1") == set()


@pytest.mark.rule("F10")
def test_an_operators_probe_that_is_slow_brings_no_hold() -> None:
    rig = two_and_two()
    rig.send(ProbeCommand(engine="d1"))
    assert rig.fleet.next_due() is None
    rig.now += 5.0
    rig.tick(Stage.HEALTH)
    assert rig.holds("d1") == set()


@pytest.mark.rule("F10")
def test_a_leg_that_is_contradicted_asks_for_nothing() -> None:
    rig = two_and_two(stall_s=3.0)
    rig.report("d1", Outcome.STREAM_COMPLETE, proxy=OTHER)
    assert not of(rig.report("d1", Outcome.STALLED), ProbeInference)


@pytest.mark.rule("F10", "S1")
def test_whoever_takes_over_asks_again() -> None:
    """The leg was told of, and is told of no more."""
    before = two_and_two()
    before.report("p1", Outcome.STALLED)
    rig = Rig(*before.settings.engines, saved=before.saved(), liveness_every=0)
    step = only(rig.tick(Stage.HEALTH), ProbeInference)
    assert step.producer is not None
    assert step.producer.engine == "p1"
    rig.now += 1.0
    rig.send(Woke())
    assert rig.holds("p1") == {Hold.VERIFICATION}


# --- streams that ended in silence -----------------------------------------------------------------------------------


@pytest.mark.rule("F10")
@pytest.mark.parametrize(
    ("outcome", "words"),
    [(Outcome.FIRST_TOKEN_TIMEOUT, "first token timeout"), (Outcome.STREAM_SILENT, "stream silent")],
)
def test_a_stream_that_ended_in_silence_of_the_whole_engine_asks_for_a_probe(outcome: Outcome, words: str) -> None:
    rig = two_and_two()
    assert not of(rig.report("d1", outcome), ProbeInference)  # others had something of it
    step = only(rig.report("d1", outcome, engine_silent=True), ProbeInference)
    assert rig.holds("d1") == set()
    rig.now += 1.0
    rig.send(Woke())
    assert rig.holds("d1") == {Hold.VERIFICATION}
    (placed,) = rig.records(EventKind.HOLD_PLACED)
    assert placed.message == f"engine d1: verification hold: 2 stream failures in a row ({words})"
    rig.works(step)
    assert rig.holds("d1") == set()


@pytest.mark.rule("F10")
def test_what_another_proxy_had_of_the_engine_contradicts_its_silence() -> None:
    rig = two_and_two(stall_s=3.0)
    rig.report("d1", Outcome.STREAM_COMPLETE, proxy=OTHER)
    rig.now += 1.9
    assert not of(rig.report("d1", Outcome.FIRST_TOKEN_TIMEOUT, engine_silent=True), ProbeInference)
    assert rig.streaks("d1") == {C.STREAM: 1}  # a failure all the same


@pytest.mark.rule("F10")
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.HTTP_5XX, Outcome.READ_TIMEOUT])
def test_only_streams_end_in_silence_whatever_a_proxy_says(outcome: Outcome) -> None:
    rig = two_and_two()
    assert not of(rig.report("d1", outcome, engine_silent=True), ProbeInference)
