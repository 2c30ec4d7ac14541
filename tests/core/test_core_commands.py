"""Commands of operators: each refusal in its words, what is done at once, and which event ends what was asked for."""

from collections.abc import Iterable
from typing import Any

import pytest

from narwhal.control.core.commands import returned
from narwhal.control.core.effects import Effect, ProbeInference, RunCheck
from narwhal.control.core.events import (
    Command,
    CommandRefusedError,
    DrainCommand,
    EjectCommand,
    ProbeCommand,
    Refusal,
    RoleCommand,
    UndrainCommand,
)
from narwhal.control.core.records import EventKind, Record
from narwhal.vocabulary import Check, Hold, Outcome, Phase, Verdict
from tests.core.rig import Rig, decode, of, only, prefill


def fleet(**more: Any) -> Rig:
    return Rig(prefill("p"), decode("d"), decode("e"), liveness_every=0, **more)


def drain(*engines: str) -> DrainCommand:
    return DrainCommand(engines=engines, reason="disk", deadline_s=60.0, restart=False, wall=0.0)


def told(effects: Iterable[Effect]) -> list[tuple[EventKind, str]]:
    return [(r.kind, r.message) for r in of(effects, Record)]


def refusal(rig: Rig, command: Command) -> tuple[Refusal, str]:
    """Why it is refused; nothing was changed by it."""
    before, effects = rig.saved(), len(rig.effects)
    with pytest.raises(CommandRefusedError) as refused:
        rig.send(command)
    assert (rig.saved(), len(rig.effects)) == (before, effects)
    return refused.value.refusal, str(refused.value)


@pytest.mark.parametrize(
    "command",
    [
        EjectCommand(engine="x", reason=""),
        ProbeCommand(engine="x"),
        RoleCommand(engine="x", role=Phase.DECODE),
        drain("d", "x"),
        UndrainCommand(engines=("x",)),
    ],
)
def test_an_engine_that_is_not_of_the_fleet(command: Command) -> None:
    assert refusal(fleet(), command) == (Refusal.NOT_FOUND, "no engine x in this fleet")
    with pytest.raises(CommandRefusedError) as refused:
        fleet().fleet.explain("x", now=0.0)
    assert (refused.value.refusal, str(refused.value)) == (Refusal.NOT_FOUND, "no engine x in this fleet")


def test_only_what_is_in_service_is_ejected_and_without_a_reason_it_says_so() -> None:
    rig = fleet()
    ejected = rig.send(EjectCommand(engine="d", reason=""))
    assert told(ejected) == [(EventKind.ENGINE_EJECTED, "engine d ejected (operator): no reason given")]
    assert [h.reason for h in rig.engine("d").holds] == ["operator: no reason given"]
    again = EjectCommand(engine="d", reason="again")
    assert refusal(rig, again) == (Refusal.PRECONDITION, "engine d is ejected")
    assert refusal(fleet(joined=False), again) == (Refusal.PRECONDITION, "engine d is joining")


def test_a_probe_of_an_engine_in_service_begins_at_once_and_one_at_a_time() -> None:
    rig = fleet()
    begun = rig.send(ProbeCommand(engine="d"))
    words = "engine d: inference probe begins (asked for by an operator)"
    assert told(begun) == [(EventKind.PROBE_STARTED, words)]
    step = only(begun, ProbeInference)
    assert refusal(rig, ProbeCommand(engine="d")) == (Refusal.PRECONDITION, "a probe of engine d is under way")
    rig.pass_probe([step])
    assert only(rig.send(ProbeCommand(engine="d")), ProbeInference).number > step.number


def test_a_suspicion_that_waits_to_be_tried_again_is_probed_at_once() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), liveness_every=0)
    rig.answer_step(only(rig.report("d", Outcome.STREAM_CUT, count=3), ProbeInference), Outcome.HTTP_429)
    assert "inference probe again in 10.0 s" in " ".join(rig.fleet.explain("d", now=rig.now).lines)
    assert of(rig.send(ProbeCommand(engine="d")), ProbeInference)


def test_a_probe_of_an_engine_that_is_out_tries_its_gate_and_no_other() -> None:
    rig = fleet()
    for engine in ("d", "e"):
        rig.send(EjectCommand(engine=engine, reason=""))
    rig.now += 1000.0  # both are long due, at the next pass
    asked = rig.send(ProbeCommand(engine="d"))
    words = "engine d: its gate is tried now (asked for by an operator)"
    assert told(asked) == [(EventKind.PROBE_STARTED, words)]
    assert [(c.engine, c.check) for c in of(asked, RunCheck)] == [("d", Check.HEALTH)]
    words = "the gate of engine d is being tried already"
    assert refusal(rig, ProbeCommand(engine="d")) == (Refusal.PRECONDITION, words)


@pytest.mark.rule("R5")
@pytest.mark.parametrize(
    ("engines", "words"),
    [(("d",), "engine d is held out: drain"), (("p", "d", "e"), "engine d is held out: maintenance")],
)
def test_what_a_drain_holds_out_is_not_probed(engines: tuple[str, ...], words: str) -> None:
    rig = fleet()
    rig.send(drain(*engines))
    rig.publish()
    assert refusal(rig, ProbeCommand(engine="d")) == (Refusal.PRECONDITION, words)


@pytest.mark.rule("R5")
def test_an_undrain_names_each_engine_once_and_is_told() -> None:
    rig = fleet()
    rig.send(drain("d"))
    assert refusal(rig, UndrainCommand(engines=("d", "e"))) == (Refusal.PRECONDITION, "engine e is not drained")
    back = rig.send(UndrainCommand(engines=("d", "d")))
    assert told(back) == [(EventKind.UNDRAIN_BEGUN, "engine d is to return: its gate is tried")]
    assert [c.engine for c in of(back, RunCheck)] == ["d"]
    words = "engine d is on its way back already: its gate is being tried"
    assert refusal(rig, UndrainCommand(engines=("d",))) == (Refusal.PRECONDITION, words)
    assert told(rig.pass_gate(back))[-1] == (EventKind.ENGINE_READMITTED, "engine d is back as incarnation 2")


@pytest.mark.rule("R6")
def test_a_fleet_that_is_to_return_before_maintenance_has_taken_it_out_is_out_from_now_on() -> None:
    rig = fleet()
    rig.send(drain("p", "d", "e"))  # nothing is published yet, so it closes
    rig.now += 7.0
    rig.send(UndrainCommand(engines=("d",)))
    assert [(h.kind, h.reason, h.age_s) for h in rig.engine("d").holds] == [(Hold.MAINTENANCE, "disk", 0.0)]
    assert rig.holds("e") == set()


@pytest.mark.parametrize(
    ("kind", "back"),
    [
        (EventKind.ENGINE_JOINED, True),
        (EventKind.ENGINE_READMITTED, True),
        (EventKind.UNDRAIN_FAILED, False),
        (EventKind.ENGINE_REMOVED, False),
        (EventKind.ENGINE_CHECK_FAILED, None),
        (EventKind.ENGINE_EJECTED, None),
        (EventKind.UNDRAIN_BEGUN, None),
        (EventKind.DRAIN_CHANGED, None),
    ],
)
def test_what_ends_an_undrain(kind: EventKind, back: bool | None) -> None:
    assert returned(Record(kind=kind, message="", engine="d")) is back


def test_a_model_check_does_not_end_the_probe_that_was_asked_for() -> None:
    rig = fleet()
    step = only(rig.send(ProbeCommand(engine="d")), ProbeInference)
    check = only(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck)
    rig.answer_check(check, Verdict.PASS)
    rig.pass_probe([step])
    ended = [r.fields["probe"] for r in rig.records(EventKind.PROBE_ENDED)]
    assert ended == ["model check", "inference probe"]
