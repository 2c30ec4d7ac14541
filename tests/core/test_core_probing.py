"""Inference probes: which transfers are tried, and whom they convict (spec F6, F7, F8, V13)."""

from typing import Any

import pytest

from narwhal.control.core.effects import ProbeInference
from narwhal.control.core.events import Reloaded
from narwhal.control.core.probing import InferenceProbe, Step, StepSeen
from narwhal.control.core.records import EventKind
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase, Verdict
from tests.core.rig import Rig, decode, leg, of, only, prefill

# Spec F6: what a leg's end says of the engine that ran it.
PASSES = [Outcome.STREAM_COMPLETE]
FAILS = [
    Outcome.REFUSED,
    Outcome.UNREACHABLE,
    Outcome.RESET,
    Outcome.TLS_FAILED,
    Outcome.CONNECT_TIMEOUT,
    Outcome.READ_TIMEOUT,
    Outcome.FIRST_TOKEN_TIMEOUT,
    Outcome.STREAM_SILENT,
    Outcome.STREAM_CUT,
    Outcome.MARKER_WITHOUT_TOKEN,
    Outcome.ERROR_EVENT,
    Outcome.STREAM_MALFORMED,
    Outcome.HTTP_5XX,
    Outcome.CLIENT_ERROR,
    Outcome.WRONG_IDENTITY,
    Outcome.ANSWER_CUT,
]
INCONCLUSIVE = [Outcome.LOCAL, Outcome.HTTP_408, Outcome.HTTP_429]
TRANSFER_FAILS = [Outcome.ERROR_EVENT, Outcome.HTTP_5XX, Outcome.FIRST_TOKEN_TIMEOUT, Outcome.STREAM_CUT]


class Peers:
    """Healthy engines by phase."""

    def __init__(self, producers: str = "", consumers: str = "") -> None:
        self.by = {Phase.PREFILL: producers.split(), Phase.DECODE: consumers.split()}

    def __call__(self, phase: Phase) -> list[str]:
        return self.by[phase]


class Probe:
    """One probe, stepped by hand."""

    def __init__(self, *phases: Phase, peers: Peers, remembered: tuple[str, ...] = ()) -> None:
        self.machine = InferenceProbe("s", phases, remembered)
        self.peers = peers

    @property
    def step(self) -> tuple[str | None, str] | None:
        step = self.machine.next(self.peers)
        return None if step is None else (step.producer, step.consumer)

    def answer(self, produced: Outcome | None, consumed: Outcome | None) -> "Probe":
        assert self.machine.next(self.peers) is not None
        self.machine.answered(
            StepSeen(
                produced=None if produced is None else leg(produced),
                consumed=None if consumed is None else leg(consumed),
            )
        )
        return self

    @property
    def verdict(self) -> Verdict:
        assert self.step is None
        return self.machine.verdict


OK = Outcome.STREAM_COMPLETE
GOT = Outcome.HANDOFF
D, P = Phase.DECODE, Phase.PREFILL


# --- the decode leg -------------------------------------------------------------------------------------------------


@pytest.mark.rule("F6", "F8")
def test_a_decode_leg_reads_a_peers_handoff() -> None:
    probe = Probe(D, peers=Peers(producers="p1 p2"))
    assert probe.step == ("p1", "s")
    assert probe.answer(GOT, OK).verdict is Verdict.PASS


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", FAILS)
def test_a_decode_leg_fails_only_with_the_handoffs_of_two_producers(outcome: Outcome) -> None:
    probe = Probe(D, peers=Peers(producers="p1 p2 p3")).answer(GOT, outcome)
    assert probe.step == ("p2", "s")
    assert probe.answer(GOT, outcome).verdict is Verdict.FAIL
    passed = Probe(D, peers=Peers(producers="p1 p2 p3")).answer(GOT, outcome).answer(GOT, OK)
    assert passed.verdict is Verdict.PASS
    assert [p for p, _ in passed.machine.blamed()] == ["p1"]


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", FAILS)
def test_with_one_producer_a_completion_without_a_handoff_decides(outcome: Outcome) -> None:
    probe = Probe(D, peers=Peers(producers="p1")).answer(GOT, outcome)
    assert probe.step == (None, "s")
    assert probe.answer(None, OK).verdict is Verdict.PASS
    assert [p for p, _ in probe.machine.blamed()] == ["p1"]
    convicted = Probe(D, peers=Peers(producers="p1")).answer(GOT, outcome).answer(None, outcome)
    assert convicted.verdict is Verdict.FAIL
    assert convicted.machine.blamed() == []
    open_ = Probe(D, peers=Peers(producers="p1")).answer(GOT, outcome).answer(None, Outcome.LOCAL)
    assert open_.verdict is Verdict.INCONCLUSIVE


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", INCONCLUSIVE)
def test_a_decode_leg_that_says_nothing_is_inconclusive(outcome: Outcome) -> None:
    assert Probe(D, peers=Peers(producers="p1 p2")).answer(GOT, outcome).verdict is Verdict.INCONCLUSIVE


@pytest.mark.rule("F6", "F8")
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.CONNECT_TIMEOUT])
def test_a_suspect_that_cannot_be_reached_fails_before_a_handoff_is_made(outcome: Outcome) -> None:
    assert Probe(D, peers=Peers(producers="p1 p2")).answer(None, outcome).verdict is Verdict.FAIL
    assert Probe(D, peers=Peers(producers="p1 p2")).answer(None, Outcome.LOCAL).verdict is Verdict.INCONCLUSIVE


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", [*FAILS, Outcome.HANDOFF_UNUSABLE, *INCONCLUSIVE])
def test_a_producer_that_fails_itself_is_passed_over(outcome: Outcome) -> None:
    probe = Probe(D, peers=Peers(producers="p1 p2")).answer(outcome, None)
    assert probe.step == ("p2", "s")
    assert probe.answer(outcome, None).verdict is Verdict.INCONCLUSIVE
    assert probe.machine.failed_peers == {"p1", "p2"}


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", [*PASSES, *FAILS, *INCONCLUSIVE])
def test_without_any_peer_a_completion_without_a_handoff_is_the_probe(outcome: Outcome) -> None:
    expected = {
        **dict.fromkeys(PASSES, Verdict.PASS),
        **dict.fromkeys(FAILS, Verdict.FAIL),
        **dict.fromkeys(INCONCLUSIVE, Verdict.INCONCLUSIVE),
    }[outcome]
    probe = Probe(D, peers=Peers())
    assert probe.step == (None, "s")
    assert probe.answer(None, outcome).verdict is expected


@pytest.mark.rule("F7")
def test_another_producer_than_the_remembered_goes_first() -> None:
    assert Probe(D, peers=Peers(producers="p1 p2"), remembered=("p1",)).step == ("p2", "s")
    assert Probe(D, peers=Peers(producers="p1"), remembered=("p1",)).step == ("p1", "s")


@pytest.mark.rule("F7")
def test_the_remembered_producers_are_checked_next_unless_spoken_about() -> None:
    peers = Peers(producers="p1 p2 p3")
    assert Probe(D, peers=peers, remembered=("p1", "p3")).answer(GOT, OK).machine.to_check() == ["p3", "p1"]
    failed = Probe(D, peers=peers, remembered=("p1",)).answer(GOT, Outcome.HTTP_5XX).answer(GOT, Outcome.HTTP_5XX)
    assert failed.machine.to_check() == []
    only_one = Probe(D, peers=Peers(producers="p1"), remembered=("p1",)).answer(GOT, OK)
    assert only_one.machine.to_check() == []


@pytest.mark.rule("F7")
def test_a_remembered_producer_that_gives_no_handoff_is_blamed() -> None:
    probe = Probe(D, peers=Peers(producers="p1"), remembered=("p1",)).answer(Outcome.REFUSED, None)
    assert probe.verdict is Verdict.INCONCLUSIVE
    assert [p for p, _ in probe.machine.blamed()] == ["p1"]
    stranger = Probe(D, peers=Peers(producers="p1")).answer(Outcome.REFUSED, None)
    assert stranger.machine.blamed() == []


# --- the prefill leg ------------------------------------------------------------------------------------------------


@pytest.mark.rule("F6", "F8")
def test_a_prefill_leg_is_read_by_a_peer() -> None:
    probe = Probe(P, peers=Peers(consumers="d1 d2"))
    assert probe.step == ("s", "d1")
    assert probe.answer(GOT, OK).verdict is Verdict.PASS


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", [*FAILS, Outcome.HANDOFF_UNUSABLE, Outcome.PREFILL_TIMEOUT])
def test_a_prefill_leg_that_fails_itself_convicts(outcome: Outcome) -> None:
    assert Probe(P, peers=Peers(consumers="d1 d2")).answer(outcome, None).verdict is Verdict.FAIL


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", INCONCLUSIVE)
def test_a_prefill_leg_that_says_nothing_is_inconclusive(outcome: Outcome) -> None:
    assert Probe(P, peers=Peers(consumers="d1 d2")).answer(outcome, None).verdict is Verdict.INCONCLUSIVE


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", TRANSFER_FAILS)
def test_a_handoff_that_two_peers_cannot_read_convicts(outcome: Outcome) -> None:
    probe = Probe(P, peers=Peers(consumers="d1 d2")).answer(GOT, outcome)
    assert probe.step == ("s", "d2")
    assert probe.answer(GOT, outcome).verdict is Verdict.FAIL
    assert Probe(P, peers=Peers(consumers="d1 d2")).answer(GOT, outcome).answer(GOT, OK).verdict is Verdict.PASS


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", TRANSFER_FAILS)
def test_with_one_reader_a_completion_on_it_tells_who_failed(outcome: Outcome) -> None:
    probe = Probe(P, peers=Peers(consumers="d1")).answer(GOT, outcome)
    assert probe.step == (None, "d1")
    assert probe.answer(None, OK).verdict is Verdict.FAIL
    theirs = Probe(P, peers=Peers(consumers="d1")).answer(GOT, outcome).answer(None, Outcome.STREAM_CUT)
    assert theirs.verdict is Verdict.INCONCLUSIVE


@pytest.mark.rule("F6")
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.RESET, Outcome.CONNECT_TIMEOUT, Outcome.LOCAL])
@pytest.mark.parametrize("produced", [GOT, None])
def test_a_reader_that_cannot_be_reached_says_nothing_of_the_suspect(
    outcome: Outcome, produced: Outcome | None
) -> None:
    probe = Probe(P, peers=Peers(consumers="d1 d2")).answer(produced, outcome)
    assert probe.step == ("s", "d2")
    assert probe.answer(GOT, OK).verdict is Verdict.PASS
    assert Probe(P, peers=Peers(consumers="d1")).answer(produced, outcome).verdict is Verdict.INCONCLUSIVE


# --- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.rule("F6")
def test_an_unpinned_engine_proves_both_legs() -> None:
    probe = Probe(P, D, peers=Peers(producers="p1", consumers="d1"))
    assert probe.step == ("s", "d1")
    probe.answer(GOT, OK)
    assert probe.step == ("p1", "s")
    assert probe.answer(GOT, OK).verdict is Verdict.PASS


@pytest.mark.rule("F6")
def test_one_failed_leg_is_enough_and_one_inconclusive_leg_waits_for_the_other() -> None:
    peers = Peers(producers="p1 p2", consumers="d1")
    assert Probe(P, D, peers=peers).answer(Outcome.HTTP_5XX, None).verdict is Verdict.FAIL
    probe = Probe(P, D, peers=peers).answer(Outcome.HTTP_429, None).answer(GOT, OK)
    assert probe.verdict is Verdict.INCONCLUSIVE
    probe = Probe(P, D, peers=peers).answer(Outcome.HTTP_429, None)
    assert probe.answer(GOT, Outcome.HTTP_5XX).answer(GOT, Outcome.HTTP_5XX).verdict is Verdict.FAIL


@pytest.mark.rule("F6")
def test_alone_one_completion_speaks_for_both_legs() -> None:
    assert Probe(P, D, peers=Peers()).answer(None, OK).verdict is Verdict.PASS
    assert Probe(P, D, peers=Peers()).answer(None, Outcome.HTTP_5XX).verdict is Verdict.FAIL
    assert Probe(P, D, peers=Peers()).answer(None, Outcome.LOCAL).verdict is Verdict.INCONCLUSIVE


def test_answering_what_was_not_asked_raises() -> None:
    probe = InferenceProbe("s", (D,), ())
    with pytest.raises(ValueError):
        probe.answered(StepSeen(produced=None, consumed=None))


def test_a_long_row_of_dead_peers_ends() -> None:
    probe = Probe(D, peers=Peers(producers=" ".join(f"p{i}" for i in range(50))))
    for _ in range(3):
        probe.answer(Outcome.REFUSED, None)
    assert probe.verdict is Verdict.INCONCLUSIVE


def test_the_step_of_a_probe_is_a_value() -> None:
    assert InferenceProbe("s", (D,), ()).next(Peers(producers="p1")) == Step(producer="p1", consumer="s")


# --- in the fleet ---------------------------------------------------------------------------------------------------


def two_and_two(**settings: Any) -> Rig:
    engines = (prefill("p1", pinned=True), prefill("p2", pinned=True))
    return Rig(*engines, decode("d1", pinned=True), decode("d2", pinned=True), liveness_every=0, **settings)


@pytest.mark.rule("F7")
def test_a_dead_producer_ejects_no_engine_that_reads_from_it() -> None:
    rig = two_and_two()
    probes = []
    for engine in ("d1", "d2"):
        for _ in range(3):
            probes += of(rig.report(engine, Outcome.ERROR_EVENT, producer="p1"), ProbeInference)
    blamed = []
    while probes:
        step = probes.pop(0)
        if step.producer is not None and step.producer.engine == "p1":
            blamed.append(step)
            probes += of(rig.answer_step(step, Outcome.REFUSED, None), ProbeInference)
        else:
            probes += of(rig.works(step), ProbeInference)
    assert rig.holds("d1") == rig.holds("d2") == set()
    assert rig.holds("p1") == {Hold.EJECTED}
    assert rig.holds("p2") == set()
    assert [step.engine for step in blamed] == ["p1"]  # which two could not read from
    assert [r.message for r in rig.records(EventKind.PRODUCER_BLAMED)] == [
        "engine p1 is blamed as producer: 4 decode legs on d1 and d2 failed with its handoffs, and with no other's"
    ]


@pytest.mark.rule("F7")
def test_a_producer_whose_transfer_fails_gets_the_hold_and_the_evidence() -> None:
    rig = two_and_two()
    step = only(rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=3), ProbeInference)
    assert step.producer is not None
    assert step.producer.engine == "p2"
    step = only(rig.works(step), ProbeInference)
    assert rig.holds("d1") == set()  # cleared before its producers are looked at
    assert step.producer is not None
    assert (step.engine, step.producer.engine, step.consumer.engine) == ("d1", "p1", "d1")
    step = only(rig.answer_step(step, Outcome.HANDOFF, Outcome.HTTP_5XX), ProbeInference)
    assert rig.holds("p1") == {Hold.VERIFICATION}
    assert rig.streaks("p1") == {FailureClass.KV_HANDOFF: 1}
    assert rig.records(EventKind.PRODUCER_BLAMED)[0].engine == "p1"
    assert step.producer is not None
    assert (step.engine, step.producer.engine) == ("p1", "p1")
    rig.works(step)
    assert rig.holds("p1") == set()
    assert rig.streaks("p1") == {}


@pytest.mark.rule("F7")
@pytest.mark.parametrize(
    ("outcome", "remembered"),
    [
        (Outcome.ERROR_EVENT, ["p1"]),
        (Outcome.HTTP_5XX, ["p1"]),
        (Outcome.READ_TIMEOUT, ["p1"]),
        (Outcome.REFUSED, []),  # it never came to read
        (Outcome.HTTP_429, []),
    ],
)
def test_a_failed_decode_leg_remembers_its_producer(outcome: Outcome, remembered: list[str]) -> None:
    rig = two_and_two()
    rig.report("d1", outcome, producer="p1")
    assert list(rig.saved().engines["d1"].producers) == remembered
    rig.report("d2", outcome, producer="d2")  # its own: no other engine to blame
    rig.report("p1", outcome, producer="p2")  # no decode leg
    rig.report("d2", outcome, producer="ghost")
    assert all(not rig.saved().engines[e].producers for e in ("d2", "p1", "p2"))


@pytest.mark.rule("F7")
def test_producers_are_forgotten_with_the_failures() -> None:
    rig = two_and_two()
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1")
    rig.report("d1", Outcome.STREAM_COMPLETE)
    assert rig.saved().engines["d1"].producers == {}


@pytest.mark.rule("F7")
def test_what_a_held_engine_still_reads_well_does_not_forget_the_producer_of_its_failures() -> None:
    """Requests that were under way when it was held end well, with the handoffs of another producer."""
    rig = two_and_two()
    step = only(rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=3), ProbeInference)
    rig.report("d1", Outcome.STREAM_COMPLETE, count=5)
    assert rig.streaks("d1") == {}
    assert list(rig.saved().engines["d1"].producers) == ["p1"]
    step = only(rig.works(step), ProbeInference)
    assert step.producer is not None
    assert step.producer.engine == "p1"
    rig.answer_step(step, Outcome.HANDOFF, Outcome.ERROR_EVENT)
    assert rig.holds("p1") == {Hold.VERIFICATION}
    assert rig.saved().engines["d1"].producers == {}


@pytest.mark.rule("F7")
def test_a_remembered_producer_that_works_is_left_alone() -> None:
    rig = two_and_two()
    rig.pass_probe(rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=3))
    assert rig.holds("p1") == set()
    assert rig.streaks("p1") == {}
    assert EventKind.PRODUCER_BLAMED not in rig.kinds()


@pytest.mark.rule("F7")
def test_a_producer_that_has_been_readmitted_since_is_not_remembered() -> None:
    rig = two_and_two()
    rig.report("d1", Outcome.ERROR_EVENT, producer="p1", count=2)
    rig.report("p1", Outcome.REFUSED, count=3)
    rig.readmit("p1")
    assert rig.fleet.incarnations()["p1"] == 2
    effects = rig.report("d1", Outcome.ERROR_EVENT, producer="p2")
    asked = []
    while steps := of(effects, ProbeInference):
        asked += [s.producer.engine for s in steps if s.producer is not None]
        effects = rig.works(steps[0])
    assert asked == ["p1", "p2"]  # p1 as the other producer, p2 as the remembered one


@pytest.mark.rule("F6", "F7")
def test_the_only_producer_is_suspected_when_its_reader_works() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), liveness_every=0)
    step = only(rig.report("d", Outcome.ERROR_EVENT, producer="p", count=3), ProbeInference)
    step = only(rig.answer_step(step, Outcome.HANDOFF, Outcome.ERROR_EVENT), ProbeInference)
    assert step.producer is None
    step = only(rig.works(step), ProbeInference)
    assert rig.holds("d") == set()
    assert rig.holds("p") == {Hold.VERIFICATION}
    assert step.producer is not None
    assert (step.producer.engine, step.consumer.engine) == ("p", "d")
    step = only(rig.answer_step(step, Outcome.HANDOFF, Outcome.ERROR_EVENT), ProbeInference)
    rig.works(step)
    assert rig.holds("p") == {Hold.EJECTED}
    assert rig.holds("d") == set()


@pytest.mark.rule("F6")
def test_who_waits_for_a_peer_that_is_ejected_is_tried_again_at_the_next_pass() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d1", pinned=True), decode("d2", pinned=True), liveness_every=0)
    step = only(rig.report("d1", Outcome.FIRST_TOKEN_TIMEOUT, count=3), ProbeInference)
    rig.answer_step(step, Outcome.PREFILL_TIMEOUT, None)
    assert rig.holds("d1") == {Hold.VERIFICATION}
    assert not of(rig.run_pass(), ProbeInference)
    rig.report("p", Outcome.REFUSED, count=3)
    step = only(rig.run_pass(), ProbeInference)
    assert (step.producer, step.consumer.engine) == (None, "d1")
    rig.works(step)
    assert rig.holds("d1") == set()


@pytest.mark.rule("F6")
def test_a_reader_that_leaves_the_fleet_leaves_the_question_open() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), prefill("q", pinned=True), liveness_every=0)
    step = only(rig.report("p", Outcome.HANDOFF_UNUSABLE, count=3), ProbeInference)
    assert step.consumer.engine == "d"
    rig.send(Reloaded(settings=rig.with_settings(engines=(prefill("p", pinned=True), prefill("q", pinned=True)))))
    assert not of(rig.answer_step(step, Outcome.HANDOFF, Outcome.ERROR_EVENT), ProbeInference)
    assert rig.holds("p") == {Hold.VERIFICATION}


@pytest.mark.rule("F6")
def test_peers_are_healthy_and_of_the_right_role() -> None:
    rig = Rig(*[prefill(f"p{i}", pinned=True) for i in range(4)], decode("d", pinned=True), decode("u"))
    rig.report("p0", Outcome.STREAM_CUT, count=3)  # held
    rig.report("p1", Outcome.REFUSED, count=3)  # ejected
    step = only(rig.report("d", Outcome.STREAM_CUT, count=3), ProbeInference)
    assert step.producer is not None
    assert step.producer.engine in ("p2", "p3")
    step = only(rig.answer_step(step, Outcome.HTTP_429, None), ProbeInference)
    assert step.producer is not None
    assert step.producer.engine in ("p2", "p3")
    step = only(rig.answer_step(step, Outcome.HTTP_429, None), ProbeInference)
    assert step.producer is not None
    assert step.producer.engine == "u"  # of the other role, not pinned: last


@pytest.mark.rule("V13")
def test_the_first_transfer_between_two_engines_has_more_time() -> None:
    before = two_and_two(kv_first_pull_timeout_s=20.0, first_token_timeout_s=5.0, health_timeout_s=2.0)
    settings = before.settings
    rig = Rig(
        *settings.engines,
        saved=before.saved(),
        liveness_every=0,
        kv_first_pull_timeout_s=20.0,
        first_token_timeout_s=5.0,
        health_timeout_s=2.0,
    )  # another process: it has seen no transfer yet
    seen = []
    for _ in range(6):
        effects = rig.report("d1", Outcome.STREAM_CUT, count=3)
        while steps := of(effects, ProbeInference):
            producer = steps[0].producer
            seen.append((producer.engine if producer is not None else None, steps[0].silence_s))
            effects = rig.works(steps[0])
        rig.now += 1000
    assert sorted(s for s in seen if s[1] == 20.0) == [("p1", 20.0), ("p2", 20.0)]
    assert len([s for s in seen if s[1] == 5.0]) == 4


@pytest.mark.rule("V13", "R2")
def test_engines_that_the_gate_saw_exchange_kv_have_shaken_hands() -> None:
    rig = two_and_two(kv_first_pull_timeout_s=20.0, first_token_timeout_s=5.0)
    for engine in ("d1", "d2"):
        step = only(rig.report(engine, Outcome.STREAM_CUT, count=3), ProbeInference)
        assert (step.consumer.engine, step.silence_s) == (engine, 5.0)


@pytest.mark.rule("F6")
@pytest.mark.parametrize(("first_token", "health", "budget"), [(5.0, 2.0, 5.0), (5.0, 9.0, 9.0)])
def test_the_budget_is_the_larger_of_the_two(first_token: float, health: float, budget: float) -> None:
    rig = Rig(decode("d"), first_token_timeout_s=first_token, health_timeout_s=health)
    step = only(rig.report("d", Outcome.STREAM_CUT, count=3), ProbeInference)
    assert (step.producer, step.silence_s) == (None, budget)
