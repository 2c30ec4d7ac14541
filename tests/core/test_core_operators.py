"""What operators are told and may ask: the words of failures, the gate's tries, commands and the end of a probe."""

import copy
from collections.abc import Mapping

import pytest

from narwhal.control.core.commands import probed
from narwhal.control.core.effects import ProbeInference, RunCheck
from narwhal.control.core.events import (
    CommandRefusedError,
    DrainCommand,
    EjectCommand,
    InferenceAnswered,
    PassEnded,
    ProbeCommand,
    Refusal,
    StageFailure,
)
from narwhal.control.core.evidence import Seen
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.telling import failure_words, in_a_row, silent
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Phase, Stage, Verdict
from tests.core.rig import Rig, decode, leg, of, only, prefill

# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("streaks", "words"),
    [
        ({FailureClass.CONNECTION: 3}, "3 connection failures in a row"),
        ({FailureClass.INFERENCE_STATUS: 1}, "1 inference_status failure"),
        ({FailureClass.STREAM: 3, FailureClass.KV_HANDOFF: 4}, "3 stream failures and 4 kv_handoff failures in a row"),
    ],
)
def test_streaks_read_as_sentences(streaks: Mapping[FailureClass, int], words: str) -> None:
    assert in_a_row(streaks) == words


@pytest.mark.parametrize(
    ("outcome", "status", "detail", "words"),
    [
        (Outcome.REFUSED, 0, "", "decode leg: refused"),
        (Outcome.REFUSED, 0, "connecting: nobody listens", "decode leg: refused (connecting: nobody listens)"),
        (Outcome.REFUSED, 0, "Connection refused", "decode leg: Connection refused"),
        (Outcome.STREAM_CUT, 200, "closed after 3 tokens", "decode leg: stream cut (closed after 3 tokens)"),
        (Outcome.HTTP_5XX, 503, "", "decode leg: HTTP 503"),
        (Outcome.HTTP_5XX, 503, "HTTP 503: busy", "decode leg: HTTP 503: busy"),
        (Outcome.HTTP_5XX, 500, "out of blocks", "decode leg: HTTP 500 (out of blocks)"),
        (Outcome.HTTP_5XX, 0, "", "decode leg: http 5xx"),
        (Outcome.HTTP_5XX, 0, "out of blocks", "decode leg: out of blocks"),
    ],
)
def test_a_failure_reads_as_what_was_seen(outcome: Outcome, status: int, detail: str, words: str) -> None:
    assert failure_words(Seen(outcome=outcome, phase=Phase.DECODE, at=0.0, status=status, detail=detail)) == words


def test_a_failure_names_who_saw_it_and_whose_handoff_it_was() -> None:
    seen = Seen(outcome=Outcome.RESET, phase=Phase.DECODE, at=0.0, proxy="edge/1", producer="p1", request_id="r-17")
    assert failure_words(seen) == "decode leg: reset, on edge/1, handoff of p1, request r-17"
    seen = Seen(outcome=Outcome.HTTP_5XX, phase=None, at=0.0, status=503, detail="GET /health answered 503")
    assert failure_words(seen) == "HTTP 503 (GET /health answered 503)"


def test_silence_is_counted_in_sweeps() -> None:
    assert [silent(1), silent(2)] == ["silent in 1 sweep", "silent in 2 sweeps in a row"]


# --- explanations -----------------------------------------------------------------------------------------------------


def test_an_engine_that_never_joined() -> None:
    rig = Rig(prefill("p"), decode("d"), joined=False)
    rig.now += 61
    lines = rig.fleet.explain("d", now=rig.now).lines
    assert lines[:2] == (
        "engine d is not eligible: joining (role decode, incarnation 0)",
        "joining for 61.0 s: never admitted",
    )


@pytest.mark.rule("P2")
def test_an_admission_that_is_not_stored_yet_is_explained_as_placement_has_it() -> None:
    rig = Rig(prefill("p"), decode("d"))
    waiting = rig.fleet.explain("d", now=rig.now, stored={"p": 1})
    assert (
        waiting.lines[0] == "engine d is not eligible yet: its admission is being stored (role decode, incarnation 1)"
    )
    assert not waiting.engine.phases
    assert rig.fleet.explain("d", now=rig.now, stored={"p": 1, "d": 1}).engine.phases == {Phase.DECODE}


@pytest.mark.rule("M5")
def test_closed_admission_is_part_of_the_answer() -> None:
    rig = Rig(prefill("p"), decode("d"), monitor_failure_limit=1)
    rig.send(PassEnded(failures=(StageFailure(stage=Stage.HEALTH, error_class="TimeoutError", message="late"),)))
    lines = rig.fleet.explain("d", now=rig.now).lines
    assert lines[0].startswith("engine d is eligible")
    assert lines[1] == "no engine gets new work: monitoring degraded: health TimeoutError"


@pytest.mark.rule("S1")
def test_a_streak_that_a_takeover_handed_on_is_shown_without_what_was_seen() -> None:
    rig = Rig(prefill("p"), decode("d"))
    rig.report("d", Outcome.STREAM_CUT, count=2)
    after = Rig(prefill("p"), decode("d"), saved=rig.saved())
    explanation = after.fleet.explain("d", now=after.now)
    assert "evidence: 2 stream failures in a row (acted upon at 3)" in explanation.lines
    (known,) = explanation.engine.evidence
    assert (known.streak, known.total, known.last) == (2, 0, None)


def test_history_is_told_newest_first_in_the_words_of_the_events() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    rig.now += 5
    rig.send(EjectCommand(engine="d", reason="smells of smoke"))
    rig.now += 2
    assert [(h.age_s, h.message) for h in rig.fleet.explain("d", now=rig.now).history] == [
        (2.0, "engine d ejected (operator): smells of smoke"),
        (7.0, "engine d joined as incarnation 1"),
    ]


# --- the gate's tries -------------------------------------------------------------------------------------------------


def tries(rig: Rig, engine: str) -> dict[tuple[str, str], int]:
    return {(str(v), c): n for (v, c), n in rig.engine(engine).gates.items()}


@pytest.mark.rule("R1")
def test_tries_of_the_gate_are_counted_by_the_check_that_decided() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    assert tries(rig, "d") == {("pass", ""): 1}
    rig.send(EjectCommand(engine="d", reason=""))
    rig.checks[Check.MODEL] = Verdict.FAIL
    for _ in range(2):
        rig.readmit("d")
    assert tries(rig, "d") == {("pass", ""): 1, ("fail", "model"): 2}
    rig.checks[Check.MODEL] = Verdict.PASS
    rig.readmit("d")
    assert tries(rig, "d") == {("pass", ""): 2, ("fail", "model"): 2}


@pytest.mark.rule("R9")
def test_a_model_check_of_an_engine_in_service_is_no_try_of_its_gate() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    check = only(rig.report("d", Outcome.WRONG_IDENTITY), RunCheck)
    rig.answer_check(check, Verdict.FAIL)
    assert rig.holds("d") == {Hold.EJECTED}
    assert tries(rig, "d") == {("pass", ""): 1}


def test_a_gate_that_is_being_tried_says_so() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    rig.send(EjectCommand(engine="d", reason=""))
    rig.send(ProbeCommand(engine="d"))
    assert "its gate is being tried: check health under way" in rig.fleet.explain("d", now=rig.now).lines


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R5")
@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize(("engines", "hold"), [(("d",), Hold.DRAIN), (("p", "d", "e"), Hold.MAINTENANCE)])
def test_a_gate_that_is_held_shut_cannot_be_tried_by_a_probe(engines: tuple[str, ...], hold: Hold, out: bool) -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    if out:
        rig.send(EjectCommand(engine="d", reason=""))
    rig.send(DrainCommand(engines=engines, reason="disk", deadline_s=60.0, restart=True, wall=0.0))
    rig.publish()  # without a proxy nobody has to come to rest
    with pytest.raises(CommandRefusedError, match=f"engine d is held out: {hold}") as refused:
        rig.send(ProbeCommand(engine="d"))
    assert refused.value.refusal is Refusal.PRECONDITION


def test_who_asks_is_told_of_a_failure_that_is_no_news() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    rig.send(EjectCommand(engine="d", reason=""))
    rig.checks[Check.HEALTH] = Verdict.FAIL
    rig.readmit("d")
    rig.readmit("d")
    assert len(rig.records(EventKind.ENGINE_CHECK_FAILED)) == 1
    told = rig.answer_check(only(rig.send(ProbeCommand(engine="d")), RunCheck))
    assert [r.kind for r in of(told, Record)] == [EventKind.ENGINE_CHECK_FAILED]


@pytest.mark.parametrize(
    ("kind", "fields", "verdict"),
    [
        (EventKind.PROBE_ENDED, {"probe": "inference probe", "result": "pass"}, Verdict.PASS),
        (EventKind.PROBE_ENDED, {"probe": "inference probe", "result": "inconclusive"}, Verdict.INCONCLUSIVE),
        (EventKind.PROBE_ENDED, {"probe": "model check", "result": "fail"}, None),
        (EventKind.PROBE_ENDED, {"probe": "health probe", "result": "pass"}, None),
        (EventKind.ENGINE_CHECK_FAILED, {"check": "health", "result": "fail"}, Verdict.FAIL),
        (EventKind.ENGINE_CHECK_FAILED, {"check": "health", "result": "inconclusive"}, Verdict.INCONCLUSIVE),
        (EventKind.ENGINE_JOINED, {}, Verdict.PASS),
        (EventKind.ENGINE_READMITTED, {}, Verdict.PASS),
        (EventKind.ENGINE_EJECTED, {"cause": "connection"}, Verdict.FAIL),
        (EventKind.ENGINE_REMOVED, {}, Verdict.INCONCLUSIVE),
        (EventKind.PROBE_STARTED, {"probe": "inference probe"}, None),
        (EventKind.HOLD_PLACED, {"hold": "verification"}, None),
        (EventKind.ENGINE_CHANGED, {}, None),
        (EventKind.ENGINE_CHANGED, {"url": "http://elsewhere"}, Verdict.INCONCLUSIVE),
        (EventKind.DRAIN_BEGUN, {}, Verdict.INCONCLUSIVE),
    ],
)
def test_what_ends_a_probe(kind: EventKind, fields: Mapping[str, str], verdict: Verdict | None) -> None:
    assert probed(Record(kind=kind, message="", engine="d", fields=fields)) is verdict


@pytest.mark.parametrize("command", [EjectCommand(engine="d", reason=""), ProbeCommand(engine="d")])
def test_a_copy_of_the_fleet_does_what_the_fleet_does_and_leaves_it_alone(
    command: EjectCommand | ProbeCommand,
) -> None:
    """What a dry run is made of."""
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    rig.report("d", Outcome.STREAM_CUT, count=2, producer="p")
    before = rig.saved()
    rehearsed = copy.deepcopy(rig.fleet).handle(command, now=rig.now)
    assert rig.saved() == before
    assert rehearsed == rig.send(command)
    assert of(rehearsed, Record)


# --- an operator reads each thing once --------------------------------------------------------------------------------

SEEN = "no KV came"


def test_no_line_of_an_ejection_says_anything_twice_and_only_the_hold_tells_the_whole_failure() -> None:
    rig = Rig(prefill("p1"), prefill("p2"), decode("d"), decode("e"))
    effects = rig.report("d", Outcome.ERROR_EVENT, count=3, producer="p1", detail=SEEN)
    while steps := [e for e in effects if isinstance(e, ProbeInference)]:
        step = steps[0]
        bad = step.consumer.engine == "d"
        consumed = leg(Outcome.ERROR_EVENT, f"decode: {SEEN}") if bad else leg(Outcome.STREAM_COMPLETE)
        produced = None if step.producer is None else leg(Outcome.HANDOFF)
        effects = rig.send(
            InferenceAnswered(
                engine=step.engine,
                incarnation=step.incarnation,
                number=step.number,
                produced=produced,
                consumed=consumed,
            )
        )
    ejected = rig.records(EventKind.ENGINE_EJECTED)[0].message
    head, told = ejected.split(", then ")
    assert head == "engine d ejected (inference probe): 3 stream failures in a row (error event)"
    peers = told.removeprefix("it cannot read handoffs of ").removesuffix(f" (decode: {SEEN})").split(" and ")
    assert len(set(peers)) == 2
    assert set(peers) < {"p1", "p2", "e"}
    lines = rig.fleet.explain("d", now=rig.now).lines
    assert lines[1] == f"ejected for 0.0 s: {ejected.partition('): ')[2]}"
    assert all(line.count(SEEN) <= 1 for line in lines)
    whole = f"decode leg: error event ({SEEN}), on edge/0, handoff of p1"
    assert [line.partition(": ")[0] for line in lines if whole in line] == ["evidence", "0.0 s ago"]


def test_what_an_ejection_is_for_follows_its_cause_unless_it_speaks_of_it() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    rig.send(EjectCommand(engine="d", reason="smells of smoke"))
    rig.report("e", Outcome.REFUSED, count=3)
    reasons = {e.id: e.holds[0].reason for e in rig.engines() if e.holds}
    assert reasons == {"d": "operator: smells of smoke", "e": "3 connection failures in a row (refused)"}
