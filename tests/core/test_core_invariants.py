"""The invariants one by one: the state that breaks each, in its words, beside the like of it that is right."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest

from narwhal.control.core.engine import Drain, Engine, Held, joining
from narwhal.control.core.events import EjectCommand, ProbeCommand, Woke
from narwhal.control.core.evidence import Action
from narwhal.control.core.invariants import SMALL, InvariantBrokenError, check
from narwhal.control.core.readmission import Gate, Return
from narwhal.control.core.suspect import Suspicion
from narwhal.vocabulary import Hold
from tests.core.rig import PROCESS, Rig, decode, prefill

GONE = "something is kept of an engine that has left the fleet"


class State:
    """What is kept of one engine, in service and with nothing against it until told otherwise."""

    def __init__(self, *, admitted: bool = True) -> None:
        self.engine = joining(decode("d"), now=0.0)
        self.gate: Gate | None = gate()
        self.suspicion: Suspicion | None = None
        if admitted:
            self.engine.admit(identity=PROCESS, ramp_s=0.0, now=0.0)
            self.gate = None

    def eject(self) -> None:
        self.engine.eject("broken", now=1.0)
        self.gate = gate()

    def drain(self, *holds: Hold, whole: bool = False, settled: bool = False, captured: bool = False) -> None:
        self.engine.drain = Drain(
            reason="disk",
            url="http://d",
            since=1.0,
            due=9.0,
            wall=0.0,
            whole=whole,
            settled=settled,
            captured=captured,
        )
        self.hold(*holds)

    def hold(self, *holds: Hold) -> None:
        for kind in holds:
            self.engine.holds[kind] = Held(kind=kind, reason="", since=1.0)

    def suspect(self, *, held: bool) -> None:
        self.suspicion = Suspicion(action=Action.INFERENCE_PROBE, reason="", held=held)

    def check(self) -> None:
        gates = {} if self.gate is None else {"d": self.gate}
        check({"d": self.engine}, gates, {} if self.suspicion is None else {"d": self.suspicion})


def gate(*, tried: bool = False, wanted: bool = False) -> Gate:
    back = Return(members={"d"}, whole=False) if wanted else None
    return Gate(due=5.0, interval_s=10.0, at=0 if tried else None, back=back)


def unadmitted(state: State) -> None:
    state.engine.incarnation = 0


def two_standings(state: State) -> None:
    state.hold(Hold.JOINING, Hold.EJECTED)
    state.gate = gate()


def gate_without_reason(state: State) -> None:
    state.gate = gate()


def no_gate(state: State) -> None:
    state.eject()
    state.gate = None


def gate_tried_under_a_drain(state: State) -> None:
    state.eject()
    state.drain(Hold.DRAIN)
    state.gate = gate(tried=True)


def drain_hold_without_a_drain(state: State) -> None:
    state.hold(Hold.DRAIN)


def maintenance_without_a_drain(state: State) -> None:
    state.hold(Hold.MAINTENANCE)


def drain_hold_of_maintenance(state: State) -> None:
    state.drain(Hold.DRAIN, whole=True)


def drained_and_not_held(state: State) -> None:
    state.drain()


def ready_and_not_out(state: State) -> None:
    state.drain(whole=True, settled=True, captured=True)


def ready_and_not_known(state: State) -> None:
    state.drain(Hold.DRAIN, settled=True)


def suspected_and_out(state: State) -> None:
    state.eject()
    state.suspect(held=False)


def held_without_a_suspicion(state: State) -> None:
    state.hold(Hold.VERIFICATION)


def held_and_the_suspicion_does_not_know(state: State) -> None:
    state.hold(Hold.VERIFICATION)
    state.suspect(held=False)


def suspicion_that_holds_nothing(state: State) -> None:
    state.suspect(held=True)


Spoil = Callable[[State], None]
BROKEN: list[tuple[Spoil, str]] = [
    (unadmitted, "d is in service and was never admitted"),
    (two_standings, "d is joining and ejected at once"),
    (gate_without_reason, "d is in service, and its gate says otherwise"),
    (no_gate, "d is ejected, and its gate says otherwise"),
    (gate_tried_under_a_drain, "d is drained and its gate is tried though nobody asked for it"),
    (drain_hold_without_a_drain, "d carries the hold of another drain than it has"),
    (maintenance_without_a_drain, "d carries the hold of another drain than it has"),
    (drain_hold_of_maintenance, "d carries the hold of another drain than it has"),
    (drained_and_not_held, "d is drained and not held"),
    (ready_and_not_out, "d is ready to stop before it was out and known"),
    (ready_and_not_known, "d is ready to stop before it was out and known"),
    (suspected_and_out, "d is ejected and suspected"),
    (held_without_a_suspicion, "d: verification hold without a suspicion, or the reverse"),
    (held_and_the_suspicion_does_not_know, "d: verification hold without a suspicion, or the reverse"),
    (suspicion_that_holds_nothing, "d: verification hold without a suspicion, or the reverse"),
]


@pytest.mark.parametrize(("spoil", "words"), BROKEN, ids=[spoil.__name__ for spoil, _ in BROKEN])
def test_each_state_that_no_history_leads_to(spoil: Spoil, words: str) -> None:
    state = State()
    state.check()
    spoil(state)
    with pytest.raises(InvariantBrokenError) as broken:
        state.check()
    assert str(broken.value) == words


def test_states_that_a_history_leads_to() -> None:
    State(admitted=False).check()
    ejected = State()
    ejected.eject()
    ejected.check()
    ejected.drain(Hold.DRAIN)
    ejected.check()
    ejected.gate = gate(tried=True, wanted=True)
    ejected.check()
    drained = State()
    drained.drain(Hold.DRAIN, settled=True, captured=True)
    drained.check()
    drained.gate = gate(tried=True, wanted=True)
    drained.check()
    closing = State()
    closing.drain(whole=True)
    closing.check()
    closing.hold(Hold.MAINTENANCE)
    closing.check()
    suspected = State()
    suspected.suspect(held=False)
    suspected.check()
    suspected.suspect(held=True)
    suspected.hold(Hold.VERIFICATION)
    suspected.check()


def sound(number: int) -> Engine:
    engine = joining(decode(f"d{number}"), now=0.0)
    engine.admit(identity=None, ramp_s=0.0, now=0.0)
    return engine


@pytest.mark.parametrize(("size", "seen"), [(SMALL, True), (SMALL + 1, False)])
def test_a_step_looks_at_what_it_is_about_and_in_a_small_fleet_at_everything(size: int, seen: bool) -> None:
    engines = {engine.id: engine for engine in map(sound, range(size))}
    engines["d3"].holds[Hold.VERIFICATION] = Held(kind=Hold.VERIFICATION, reason="", since=0.0)
    for about, whole, raises in ((["d1", "d2"], False, seen), (["d1", "d3"], False, True), ([], True, True)):
        broken: AbstractContextManager[Any] = nullcontext()
        if raises:
            broken = pytest.raises(InvariantBrokenError, match=r"^d3: verification hold")
        with broken:
            check(engines, {}, {}, about=about, whole=whole)
    with pytest.raises(InvariantBrokenError, match=r"^d3: verification hold"):
        check(engines, {}, {})


@pytest.mark.parametrize("size", [1, SMALL + 1])
@pytest.mark.parametrize("whole", [True, False])
def test_nothing_is_kept_of_an_engine_that_is_gone(size: int, whole: bool) -> None:
    engines = {engine.id: engine for engine in map(sound, range(size))}
    suspicion = Suspicion(action=Action.HEALTH_PROBE, reason="")
    check(engines, {}, {}, about=["x"], whole=whole)
    with pytest.raises(InvariantBrokenError, match=f"^{GONE}$"):
        check(engines, {"x": gate()}, {}, about=["x"], whole=whole)
    with pytest.raises(InvariantBrokenError, match=f"^{GONE}$"):
        check(engines, {}, {"x": suspicion}, about=["x"], whole=whole)


def test_a_state_that_no_history_leads_to_raises_at_the_next_step() -> None:
    for spoil in (Hold.VERIFICATION, Hold.JOINING, Hold.EJECTED):
        rig = Rig(prefill("p"), decode("d"))
        engine = rig.fleet._engines["d"]
        engine.holds[spoil] = Held(kind=spoil, reason="", since=0.0)
        with pytest.raises(InvariantBrokenError):
            rig.send(Woke())


def test_in_a_large_fleet_such_a_state_raises_when_the_step_is_about_it_or_at_the_next_pass() -> None:
    engines = [prefill("p"), *(decode(f"d{n}") for n in range(SMALL))]
    saved = Rig(*engines).saved()
    for about_it in (True, False):
        rig = Rig(*engines, saved=saved)
        spoilt = rig.fleet._engines["d7"]
        spoilt.holds[Hold.VERIFICATION] = Held(kind=Hold.VERIFICATION, reason="", since=0.0)
        rig.send(EjectCommand(engine="d8", reason=""))
        step = partial(rig.send, ProbeCommand(engine="d7")) if about_it else rig.run_pass
        with pytest.raises(InvariantBrokenError):
            step()
