"""What is under way about an engine ends when something else is decided of it: drains, reloads, a stop (R4–R6, R8)."""

import json
from dataclasses import replace

import pytest

from narwhal.control.core.commands import probed, returned
from narwhal.control.core.effects import ProbeHealth, ProbeInference, RunCheck
from narwhal.control.core.events import ProbeCommand, Reloaded, UndrainCommand
from narwhal.control.core.handoff import aged, from_document, to_document
from narwhal.control.core.records import EventKind, Record
from narwhal.vocabulary import Hold, Outcome, Phase, Verdict
from tests.core.drain_rig import FLEET, Ops
from tests.core.rig import EDGE, OTHER, Rig, decode, of, prefill

ELSEWHERE = "http://elsewhere"


def ends(rig: Rig, engine: str, since: int) -> set[Verdict]:
    """What whoever waits for a probe has been told."""
    told = [r for r in of(rig.effects[since:], Record) if r.engine == engine]
    return {verdict for r in told if (verdict := probed(r)) is not None}


def comes_back(rig: Rig, engine: str, since: int) -> set[bool]:
    """What whoever waits for a return has been told."""
    told = [r for r in of(rig.effects[since:], Record) if r.engine == engine]
    return {back for r in told if (back := returned(r)) is not None}


def moved(rig: Rig, engine: str) -> None:
    """The fleet file names another address."""
    specs = tuple(replace(s, url=ELSEWHERE) if s.id == engine else s for s in rig.settings.engines)
    rig.settings = rig.with_settings(engines=specs)
    rig.send(Reloaded(settings=rig.settings))


# --- returns ----------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R5", "R6")
def test_a_return_that_maintenance_overtakes_has_failed_and_is_not_tried_again() -> None:
    """It came back into the fleet by itself, in the middle of the maintenance."""
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d", restart=False)
    began = len(rig.effects)
    rig.send(UndrainCommand(engines=("d",)))
    rig.drain("p", "d", "e")
    (told,) = rig.records(EventKind.UNDRAIN_FAILED)
    assert told.engine == "d"
    assert told.message == ("engine d stays drained: its check health: inconclusive: given up, as it is drained again")
    assert comes_back(rig, "d", began) == {False}
    for _ in range(40):
        rig.pass_gate(c for c in rig.run_pass() if isinstance(c, RunCheck))
    assert rig.holds("d") == {Hold.MAINTENANCE}
    assert rig.engine("d").incarnation == 1


@pytest.mark.rule("R5", "R8")
def test_a_return_ends_when_the_engine_is_another_under_its_id() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d")
    rig.send(UndrainCommand(engines=("d",)))
    began = len(rig.effects)
    moved(rig, "d")
    assert comes_back(rig, "d", began) == {False}
    assert rig.holds("d") == {Hold.DRAIN, Hold.JOINING}


# --- probes -----------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R4")
@pytest.mark.parametrize("out", [False, True])
def test_who_waits_for_a_probe_is_told_when_a_drain_gives_it_up(out: bool) -> None:
    rig = Ops(*FLEET, liveness_every=0)
    if out:
        rig.report("d", Outcome.REFUSED, count=3)
    began = len(rig.effects)
    rig.send(ProbeCommand(engine="d"))
    rig.settle("d")
    assert ends(rig, "d", began) == {Verdict.INCONCLUSIVE}


@pytest.mark.rule("R8", "S2")
@pytest.mark.parametrize("out", [False, True])
def test_who_waits_for_a_probe_is_told_when_the_engine_is_another_under_its_id(out: bool) -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"), liveness_every=0)
    if out:
        rig.report("d", Outcome.REFUSED, count=3)
    began = len(rig.effects)
    rig.send(ProbeCommand(engine="d"))
    moved(rig, "d")
    assert ends(rig, "d", began) == {Verdict.INCONCLUSIVE}


@pytest.mark.rule("S2")
def test_another_entry_for_the_same_engine_ends_no_probe() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"), liveness_every=0)
    began = len(rig.effects)
    rig.send(ProbeCommand(engine="d"))
    specs = (prefill("p"), replace(decode("d"), max_inflight=7), decode("e"))
    rig.send(Reloaded(settings=rig.with_settings(engines=specs)))
    assert ends(rig, "d", began) == set()


# --- ready to stop ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("R4", "F3")
@pytest.mark.parametrize("outcome", [Outcome.STREAM_CUT, Outcome.READ_TIMEOUT, Outcome.REFUSED, Outcome.STALLED])
def test_of_one_that_is_ready_to_stop_nothing_is_asked_and_it_is_not_called_dead(outcome: Outcome) -> None:
    """A proxy that was cut off tells of its failures now; the engine is stopped by then."""
    rig = Ops(*FLEET, liveness_every=0)
    rig.settle("d")
    began = len(rig.effects)
    rig.report("d", outcome, count=3)
    for _ in range(15):
        rig.run_pass()
    asked = [e for e in rig.effects[began:] if isinstance(e, ProbeHealth | ProbeInference)]
    assert asked == []
    assert rig.holds("d") == {Hold.DRAIN}
    assert rig.records(EventKind.ENGINE_EJECTED) == []


@pytest.mark.rule("R4", "S7")
def test_a_takeover_asks_nothing_of_one_that_is_ready_to_stop() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    rig.report("d", Outcome.READ_TIMEOUT, count=3)
    rig.settle("d")
    document = json.loads(json.dumps(to_document(rig.saved(), wall=5000.0, epoch=1, holder="a")))
    after = Ops(*FLEET, saved=aged(from_document(document), wall=5010.0), liveness_every=0)
    assert after.engine("d").suspicion == ""
    for _ in range(5):
        assert not [e for e in after.run_pass() if isinstance(e, ProbeHealth | ProbeInference)]


@pytest.mark.rule("R4", "F7")
def test_a_producer_that_is_ready_to_stop_is_not_read_from_to_find_out_about_it() -> None:
    rig = Ops(prefill("p1"), prefill("p2"), decode("d"), decode("e"), liveness_every=0)
    for _ in range(3):
        rig.report("d", Outcome.STREAM_CUT, producer="p1")
    asked = of(rig.effects, ProbeInference)[-1:]
    rig.settle("p1")
    began = len(rig.effects)
    rig.pass_probe(asked)
    producers = [e.producer.engine for e in of(rig.effects[began:], ProbeInference) if e.producer is not None]
    assert "p1" not in producers
    assert rig.engine("d").suspicion == ""


@pytest.mark.rule("R4", "R9")
def test_the_model_of_one_that_is_ready_to_stop_is_not_checked_any_more() -> None:
    rig = Ops(*FLEET, liveness_every=0)
    (check,) = of(rig.report("d", Outcome.WRONG_IDENTITY, phase=Phase.DECODE), RunCheck)
    rig.settle("d")
    assert rig.answer_check(check, Verdict.FAIL) == ()
    rig.report("d", Outcome.WRONG_IDENTITY, phase=Phase.DECODE, proxy=EDGE)
    for _ in range(30):
        assert of(rig.run_pass(), RunCheck) == []
    assert rig.holds("d") == {Hold.DRAIN}


# --- of which fleet a proxy is the fault ------------------------------------------------------------------------------


@pytest.mark.rule("F12", "R4")
def test_a_proxy_that_fails_on_all_that_serve_is_the_fault_though_as_many_engines_are_drained() -> None:
    """Those get no legs, so no proxy can fail on them: counted among all, they had both others ejected by its word."""
    rig = Ops(prefill("p"), decode("d"), decode("x"), decode("y"), liveness_every=0)
    rig.settle("x", "y")
    rig.report("p", Outcome.HANDOFF, proxy=OTHER)
    rig.report("d", Outcome.STREAM_COMPLETE, proxy=OTHER)
    for _ in range(3):
        rig.report("p", Outcome.REFUSED)
        rig.report("d", Outcome.REFUSED)
    assert rig.records(EventKind.ENGINE_EJECTED) == []
    (told,) = rig.records(EventKind.PROXY_SUSPECT)
    assert told.message == "proxy edge/0 is suspect itself: its legs fail on 2 of 2 engines that serve other proxies"


@pytest.mark.rule("R4", "L2")
def test_a_sweep_that_is_open_does_not_wait_for_one_that_has_become_ready_to_stop() -> None:
    rig = Ops(*FLEET, liveness_every=1, liveness_misses=1)
    probes = {probe.engine: probe for probe in of(rig.run_pass(), ProbeHealth)}
    rig.settle("d")
    assert rig.answer_health(probes["d"], Outcome.REFUSED) == ()
    for engine in ("p", "e"):
        rig.answer_health(probes[engine])
    assert rig.holds("d") == {Hold.DRAIN}
