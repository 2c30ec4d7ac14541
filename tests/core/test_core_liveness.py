"""Liveness sweeps and process identity (spec L1–L4, R8, R9)."""

from typing import Any

import pytest

from narwhal.control.core.effects import ProbeHealth, ProbeInference, RunCheck
from narwhal.control.core.events import ProcessIdentity, Reloaded
from narwhal.control.core.records import EventKind
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Stage, Verdict
from tests.core.drain_rig import Ops
from tests.core.rig import OTHER, Rig, decode, of, only, prefill

# Spec L2: no HTTP answer.
SILENT = [
    Outcome.REFUSED,
    Outcome.UNREACHABLE,
    Outcome.RESET,
    Outcome.TLS_FAILED,
    Outcome.CONNECT_TIMEOUT,
    Outcome.READ_TIMEOUT,
    Outcome.ANSWER_CUT,
]
FIRST = ProcessIdentity(version="0.32.0", started_at=1_700_000_000.25)


def sweep(rig: Rig) -> list[ProbeHealth]:
    """Passes until a sweep begins; its probes."""
    for _ in range(100):
        if found := [p for p in of(rig.run_pass(), ProbeHealth) if p.identity]:
            return found
    raise AssertionError("no sweep")


def answer(rig: Rig, probes: list[ProbeHealth], *silent: str, outcome: Outcome = Outcome.REFUSED) -> None:
    for probe in probes:
        rig.answer_health(probe, outcome if probe.engine in silent else None, identity=None)


def rig_of(**settings: Any) -> Rig:
    return Rig(prefill("p1"), prefill("p2"), prefill("p3"), decode("d1"), decode("d2"), decode("d3"), **settings)


@pytest.mark.rule("L1")
def test_every_engine_in_service_is_asked_at_every_interval_and_the_start_rotates() -> None:
    rig = Rig(prefill("p"), decode("d1"), decode("d2"), liveness_every=10)
    starts = []
    for number in range(1, 4):
        probes = sweep(rig)
        assert rig.now == 1000 + 10 * number
        assert {p.engine for p in probes} == {"p", "d1", "d2"}
        assert all(p.timeout_s == 5.0 and p.identity for p in probes)
        starts.append(probes[0].engine)
        answer(rig, probes)
    assert starts == ["p", "d1", "d2"]


@pytest.mark.rule("L1")
def test_neither_ejected_nor_joining_engines_are_asked_and_zero_turns_it_off() -> None:
    rig = Rig(prefill("p"), decode("d1"), decode("d2"), liveness_every=1)
    rig.report("d1", Outcome.REFUSED, count=3)
    assert {p.engine for p in sweep(rig)} == {"p", "d2"}
    rig = Rig(prefill("p"), decode("d"), joined=False, liveness_every=1)
    for _ in range(5):
        assert not of(rig.run_pass(), ProbeHealth)
    rig = Rig(prefill("p"), decode("d"), liveness_every=0)
    for _ in range(50):
        assert not of(rig.run_pass(), ProbeHealth)


@pytest.mark.rule("L2")
@pytest.mark.parametrize("outcome", SILENT)
def test_two_silent_sweeps_in_a_row_eject(outcome: Outcome) -> None:
    rig = rig_of(liveness_every=1)
    answer(rig, sweep(rig), "d1", outcome=outcome)
    assert rig.engine("d1").misses == 1
    assert rig.holds("d1") == set()
    answer(rig, sweep(rig), "d1", outcome=outcome)
    assert rig.holds("d1") == {Hold.EJECTED}
    (record,) = rig.records(EventKind.ENGINE_EJECTED)
    assert (record.engine, record.fields["cause"]) == ("d1", "liveness")


@pytest.mark.rule("L2")
@pytest.mark.parametrize("limit", [1, 3])
def test_the_number_of_misses_is_a_setting(limit: int) -> None:
    rig = rig_of(liveness_every=1, liveness_misses=limit)
    for _ in range(limit):
        assert rig.holds("d1") == set()
        answer(rig, sweep(rig), "d1")
    assert rig.holds("d1") == {Hold.EJECTED}


@pytest.mark.rule("L2")
def test_a_healthy_answer_from_whichever_stage_resets_the_misses() -> None:
    rig = rig_of(liveness_every=1)
    for _ in range(5):
        answer(rig, sweep(rig), "d1")
        assert rig.engine("d1").misses == 1
        rig.answer_health(only(rig.report("d1", Outcome.HTTP_429, count=3), ProbeHealth))
        assert rig.engine("d1").misses == 0
    answer(rig, sweep(rig), "d1")
    answer(rig, sweep(rig))
    assert rig.engine("d1").misses == 0


@pytest.mark.rule("L2")
@pytest.mark.case("C8")
@pytest.mark.parametrize("outcome", [Outcome.HTTP_5XX, Outcome.CLIENT_ERROR, Outcome.HTTP_429])
def test_an_answer_other_than_200_is_no_miss(outcome: Outcome) -> None:
    rig = rig_of(liveness_every=1, eject_after=99)
    for _ in range(5):
        for probe in sweep(rig):
            other = probe.engine == "d1"
            rig.answer_health(probe, outcome if other else None, detail="GET /health answered 404" if other else "")
    assert rig.engine("d1").misses == 0
    assert rig.holds("d1") == set()
    # One line for the change of state, not one for each probe; the words are the shell's.
    told = [r for r in rig.records(EventKind.HEALTH_CHANGED) if r.engine == "d1"]
    assert [r.message for r in told] == ["engine d1: GET /health answered 404"]
    assert any("GET /health answered 404" in line for line in rig.fleet.explain("d1", now=rig.now).lines)


@pytest.mark.rule("L3")
def test_a_probe_without_a_connection_is_neither_a_miss_nor_a_success() -> None:
    rig = rig_of(liveness_every=1)
    answer(rig, sweep(rig), "d1")
    for _ in range(5):
        answer(rig, sweep(rig), "d1", outcome=Outcome.LOCAL)
    assert rig.engine("d1").misses == 1
    answer(rig, sweep(rig), "d1")
    assert rig.holds("d1") == {Hold.EJECTED}


@pytest.mark.rule("L3")
def test_an_answer_that_never_comes_is_inconclusive_and_the_next_sweep_begins() -> None:
    rig = rig_of(liveness_every=1)
    probes = sweep(rig)
    for probe in probes:
        if probe.engine != "d1":
            rig.answer_health(probe)
    began = rig.now
    assert sweep(rig)
    assert rig.now > began + 20
    assert rig.engine("d1").misses == 0
    rig.answer_health(next(p for p in probes if p.engine == "d1"), Outcome.REFUSED)
    assert rig.engine("d1").misses == 0


def test_a_lost_answer_holds_up_a_large_fleet_no_longer_than_a_small_one() -> None:
    rig = Rig(prefill("p"), *(decode(f"d{n}") for n in range(24)), liveness_every=1)
    lost, *others = sweep(rig)
    answer(rig, others)
    began = rig.now
    assert {p.engine for p in sweep(rig)} == {lost.engine, *(p.engine for p in others)}
    assert rig.now <= began + 31.0


@pytest.mark.rule("L1", "L3")
def test_an_engine_that_is_ejected_meanwhile_does_not_hold_up_the_sweep() -> None:
    rig = rig_of(liveness_every=1)
    probes = sweep(rig)
    answer(rig, [p for p in probes if p.engine != "d1"], "d2")
    rig.report("d1", Outcome.REFUSED, count=3)
    rig.run_pass()
    assert rig.engine("d2").misses == 1


# --- control is cut off ---------------------------------------------------------------------------------------------


def proxies_succeed(rig: Rig, *engines: str) -> None:
    for engine in engines:
        rig.report(engine, Outcome.HANDOFF if engine.startswith("p") else Outcome.STREAM_COMPLETE, proxy=OTHER)


@pytest.mark.rule("L4")
@pytest.mark.case("C13")
def test_a_control_that_reaches_nobody_ejects_nobody_whom_proxies_reach() -> None:
    rig = rig_of(liveness_every=10)
    everybody = ("p1", "p2", "p3", "d1", "d2", "d3")
    for _ in range(5):
        probes = sweep(rig)
        proxies_succeed(rig, *everybody)
        answer(rig, probes, *everybody)
    assert all(rig.holds(e) == set() and rig.engine(e).misses == 0 for e in everybody)
    assert rig.kinds().count(EventKind.CONTROL_CUT_OFF) == 1
    words = "control is cut off from the engines: that this one does not answer it says nothing"
    assert words in rig.fleet.explain("d1", now=rig.now).lines
    answer(rig, sweep(rig))
    assert rig.kinds().count(EventKind.CONTROL_BACK) == 1
    assert words not in rig.fleet.explain("d1", now=rig.now).lines


@pytest.mark.rule("L4")
@pytest.mark.case("C13")
@pytest.mark.parametrize("outcome", [Outcome.HTTP_429, Outcome.READ_TIMEOUT, Outcome.STREAM_CUT])
def test_a_control_that_is_cut_off_convicts_nobody_by_its_own_probes(outcome: Outcome) -> None:
    rig = rig_of(liveness_every=10)
    everybody = ("p1", "p2", "p3", "d1", "d2", "d3")
    probes = sweep(rig)
    proxies_succeed(rig, *everybody)
    answer(rig, probes, *everybody)
    for effect in rig.report("d1", outcome, count=3):
        if isinstance(effect, ProbeHealth):
            rig.answer_health(effect, Outcome.CONNECT_TIMEOUT)
        elif isinstance(effect, ProbeInference):
            rig.answer_step(effect, None, Outcome.CONNECT_TIMEOUT)
    assert Hold.EJECTED not in rig.holds("d1")
    answer(rig, sweep(rig))  # back: from now on silence is the engine's
    probe = only(rig.report("d2", Outcome.HTTP_429, count=3), ProbeHealth)
    rig.answer_health(probe, Outcome.CONNECT_TIMEOUT)
    assert rig.holds("d2") == {Hold.EJECTED}


@pytest.mark.rule("L4")
@pytest.mark.case("C13")
@pytest.mark.parametrize("outcome", [Outcome.HTTP_429, Outcome.READ_TIMEOUT, Outcome.STREAM_CUT])
def test_what_was_asked_while_cut_off_convicts_nobody_when_it_is_answered_later(outcome: Outcome) -> None:
    rig = rig_of(liveness_every=10)
    everybody = ("p1", "p2", "p3", "d1", "d2", "d3")
    probes = sweep(rig)
    proxies_succeed(rig, *everybody)
    answer(rig, probes, *everybody)
    asked = rig.report("d1", outcome, count=3)
    answer(rig, sweep(rig))  # back
    assert rig.kinds()[-1] is EventKind.CONTROL_BACK
    for effect in asked:
        if isinstance(effect, ProbeHealth):
            rig.answer_health(effect, Outcome.CONNECT_TIMEOUT)
        elif isinstance(effect, ProbeInference):
            rig.answer_step(effect, None, Outcome.CONNECT_TIMEOUT)
    assert Hold.EJECTED not in rig.holds("d1")


@pytest.mark.rule("L4")
def test_a_fleet_that_is_dead_for_proxies_too_is_dead() -> None:
    rig = rig_of(liveness_every=10)
    everybody = ("p1", "p2", "p3", "d1", "d2", "d3")
    proxies_succeed(rig, *everybody)
    answer(rig, sweep(rig), *everybody)  # successes of the interval before excuse one sweep
    for _ in range(2):
        answer(rig, sweep(rig), *everybody)
    assert all(rig.holds(e) == {Hold.EJECTED} for e in everybody)


@pytest.mark.rule("L4")
def test_only_those_that_proxies_had_successes_from_are_excused() -> None:
    rig = rig_of(liveness_every=10)
    for _ in range(2):
        probes = sweep(rig)
        proxies_succeed(rig, "p1", "p2", "p3", "d2")
        answer(rig, probes, "p1", "p2", "p3", "d1")
    assert rig.holds("d1") == {Hold.EJECTED}
    assert all(rig.holds(e) == set() for e in ("p1", "p2", "p3"))


@pytest.mark.rule("L4")
def test_successes_told_while_a_sweep_waits_for_one_that_hangs_speak_for_the_next_sweep_too() -> None:
    rig = rig_of(liveness_every=10)
    everybody = ("p1", "p2", "p3", "d1", "d2", "d3")
    for told in (True, False):
        probes = sweep(rig)
        answer(rig, [p for p in probes if p.engine != "d3"], *everybody)
        if told:
            proxies_succeed(rig, "p1", "p2", "p3", "d1", "d2")  # before the last answer is in
        answer(rig, [p for p in probes if p.engine == "d3"], "d3", outcome=Outcome.READ_TIMEOUT)
    assert all(rig.engine(e).misses == 0 for e in ("p1", "p2", "p3", "d1", "d2"))
    assert rig.holds("d3") == {Hold.EJECTED}


@pytest.mark.rule("L4")
@pytest.mark.parametrize(("silent", "excused"), [(("d1", "d2", "d3"), False), (("p1", "d1", "d2", "d3"), True)])
def test_half_is_not_more_than_half(silent: tuple[str, ...], excused: bool) -> None:
    rig = rig_of(liveness_every=10)
    for _ in range(2):
        probes = sweep(rig)
        proxies_succeed(rig, *silent)
        answer(rig, probes, *silent)
    assert all((rig.holds(e) == set()) is excused for e in silent)


@pytest.mark.rule("L4")
def test_one_engine_alone_is_never_a_majority() -> None:
    rig = Rig(decode("d"), liveness_every=10)
    for _ in range(2):
        probes = sweep(rig)
        proxies_succeed(rig, "d")
        answer(rig, probes, "d")
    assert rig.holds("d") == {Hold.EJECTED}


# --- which process answers ------------------------------------------------------------------------------------------


@pytest.mark.rule("R8")
@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (FIRST, None),
        (ProcessIdentity(version="0.32.0", started_at=1_700_000_000.3), None),  # rounding
        (ProcessIdentity(version="0.32.0", started_at=1_700_000_060.0), "process changed"),
        (ProcessIdentity(version="0.33.0", started_at=1_700_000_000.25), "process changed"),
        (None, None),
    ],
)
def test_another_process_than_the_accepted_one_is_ejected(seen: ProcessIdentity | None, cause: str | None) -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=1)
    for identity in (FIRST, seen, FIRST if cause is None else None):
        for probe in sweep(rig):
            rig.answer_health(probe, identity=identity if probe.engine == "d" else None)
    causes = [r.fields["cause"] for r in rig.records(EventKind.ENGINE_EJECTED)]
    assert causes == ([cause] if cause else [])
    assert rig.engine("d").identity == FIRST


@pytest.mark.rule("R8")
def test_the_identity_that_the_gate_saw_is_the_accepted_one() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=1)
    assert rig.engine("d").identity == FIRST
    rig.processes["d"] = ProcessIdentity(version="0.32.0", started_at=1_800_000_000.0)
    for probe in sweep(rig):
        rig.answer_health(probe, identity=rig.processes.get(probe.engine, FIRST))
    assert rig.holds("d") == {Hold.EJECTED}
    assert rig.holds("p") == set()
    rig.readmit("d")
    for probe in sweep(rig):
        rig.answer_health(probe, identity=rig.processes.get(probe.engine, FIRST))
    assert rig.holds("d") == set()


@pytest.mark.rule("R9")
@pytest.mark.case("G4")
def test_an_answer_as_of_another_engine_asks_for_the_model_and_its_failure_ejects() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0)
    check = only(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck)
    assert (check.engine, check.check, check.model) == ("d", Check.MODEL, "tiny")
    assert not of(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck)  # one at a time
    assert rig.streaks("d") == {}
    rig.answer_check(check, Verdict.FAIL, detail="serves llama, not tiny")
    (record,) = rig.records(EventKind.ENGINE_EJECTED)
    assert record.fields["cause"] == "model"
    assert "serves llama, not tiny" in record.message


@pytest.mark.rule("F6", "R9")
@pytest.mark.case("G4")
def test_an_engine_that_lists_the_model_and_answers_as_another_is_out_by_the_probe_that_meets_the_same() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), decode("e", pinned=True), liveness_every=0)
    probe = only(
        rig.answer_check(only(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck), Verdict.PASS), ProbeInference
    )
    assert rig.holds("d") == set()  # one answer is no reason to keep work from it
    alone = only(rig.answer_step(probe, Outcome.HANDOFF, Outcome.WRONG_IDENTITY), ProbeInference)
    assert alone.producer is None  # there is one producer only: does it work at all?
    rig.answer_step(alone, None, Outcome.WRONG_IDENTITY)
    assert rig.holds("d") == {Hold.EJECTED}
    (record,) = rig.records(EventKind.ENGINE_EJECTED)
    assert record.fields["cause"] == "inference probe"
    assert "lists the model, and answered a leg as another engine would, then " in record.message
    assert (rig.holds("p"), rig.holds("e")) == (set(), set())


@pytest.mark.rule("R9")
def test_one_that_answers_so_to_what_the_probe_does_not_ask_stays_and_is_looked_at_again() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"), liveness_every=0, readmit_every=10)
    for _ in range(3):
        check = only(rig.report("d", Outcome.WRONG_IDENTITY, count=5), RunCheck)
        probe = rig.answer_check(check, Verdict.PASS)
        assert of(probe, ProbeInference)
        assert of(rig.report("d", Outcome.WRONG_IDENTITY, count=5), ProbeInference) == []  # one at a time
        rig.pass_probe(probe)
        assert rig.holds("d") == set()
        assert rig.streaks("d") == {}
        rig.now += 10
        rig.tick(Stage.HEALTH)


@pytest.mark.rule("R4", "R9")
def test_an_engine_that_was_drained_meanwhile_is_not_looked_at() -> None:
    rig = Ops(prefill("p"), decode("d"), decode("e"), liveness_every=0)
    check = only(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck)
    rig.settle("d")
    assert of(rig.answer_check(check, Verdict.PASS), ProbeInference) == []


@pytest.mark.rule("R9")
def test_a_passed_model_check_leaves_it_and_an_inconclusive_one_is_repeated() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0, readmit_every=10)
    rig.pass_probe(rig.answer_check(only(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck), Verdict.PASS))
    assert rig.holds("d") == set()
    assert not of(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck)
    rig.now += 10
    rig.answer_check(only(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck), Verdict.INCONCLUSIVE)
    assert rig.holds("d") == set()
    assert not of(rig.run_pass(), RunCheck)
    rig.now += 10
    rig.answer_check(only(rig.run_pass(), RunCheck), Verdict.FAIL)
    assert rig.holds("d") == {Hold.EJECTED}


@pytest.mark.case("C3")
def test_the_health_latencies_that_were_measured_are_shown() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=1)
    for latency in (0.004, 8.0):
        for probe in sweep(rig):
            rig.answer_health(probe, latency_s=latency, detail="GET /health answered 200")
    (line,) = [line for line in rig.fleet.explain("d", now=rig.now).lines if line.startswith("health")]
    assert "GET /health answered 200 after 8000 ms" in line
    assert "after 4 ms" in line


def test_sweeps_keep_counting_streaks_that_pass_the_threshold() -> None:
    """A health path that answers 503 in sweeps is evidence like any other: at the third the engine is verified."""
    rig = Rig(prefill("p"), decode("d1"), decode("d2"), liveness_every=1)
    for _ in range(3):
        for probe in sweep(rig):
            rig.answer_health(probe, Outcome.HTTP_5XX if probe.engine == "d1" else None, status=503)
    assert rig.streaks("d1") == {FailureClass.INFERENCE_STATUS: 3}
    assert rig.holds("d1") == {Hold.VERIFICATION}


def test_a_reload_to_shorter_sweeps_takes_effect_at_once() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=500)
    rig.send(Reloaded(settings=rig.with_settings(liveness_every=2)))
    began = rig.now
    sweep(rig)
    assert rig.now == began + 2
    assert rig.tick(Stage.LIVENESS) == ()
