"""The words of every kind of event, whole: what the log, `narwhalctl events` and `explain` show people."""

from collections.abc import Callable

import pytest

from narwhal.control.core import telling
from narwhal.control.core.decisions import Cause, Ejection, MoveCause, RoleMove
from narwhal.control.core.engine import Drain, Engine, joining
from narwhal.control.core.events import CheckResult, ProcessIdentity
from narwhal.control.core.evidence import Seen
from narwhal.control.core.records import EventKind, Record
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Phase, RiskKind, Verdict
from tests.core.rig import decode

PROCESS = ProcessIdentity(version="0.32.0", started_at=1_700_000_000.25)
FAILED = CheckResult(verdict=Verdict.FAIL, detail="GET /health answered 503")
MOVE = RoleMove(engine="d", to=Phase.PREFILL, cause=MoveCause.LOAD, reason="load of prefill 1.20")
KIND = EventKind
SERVING = Engine(spec=decode("d"), role=Phase.DECODE, incarnation=3)
NEW = joining(decode("d"), now=0.0)


def held(due: float | None) -> Engine:
    engine = Engine(spec=decode("d"), role=Phase.DECODE, incarnation=3)
    engine.place(Hold.RELAPSE, "stream again", now=100.0, due=due)
    return engine


def drain(*, restart: bool = True, whole: bool = False, identity: ProcessIdentity | None = None) -> Drain:
    return Drain(
        reason="new release",
        url="http://d",
        since=0.0,
        due=300.0,
        wall=0.0,
        restart=restart,
        whole=whole,
        identity=identity,
    )


def of_d(kind: EventKind, message: str, **fields: str) -> Record:
    return Record(kind=kind, message=message, engine="d", fields=fields)


EVENTS: list[tuple[Callable[[], Record], Record]] = [
    (
        lambda: telling.hold_placed(held(105.0), Hold.RELAPSE),
        of_d(KIND.HOLD_PLACED, "engine d: relapse hold for 5 s: stream again", hold="relapse"),
    ),
    (
        lambda: telling.hold_placed(held(None), Hold.RELAPSE, "all that was seen"),
        of_d(KIND.HOLD_PLACED, "engine d: relapse hold: all that was seen", hold="relapse"),
    ),
    (
        lambda: telling.hold_ended("d", Hold.QUARANTINE, "health 200"),
        of_d(KIND.HOLD_ENDED, "engine d: quarantine hold over (health 200)", hold="quarantine"),
    ),
    (
        lambda: telling.ejected(Ejection(engine="d", cause=Cause.LIVENESS, reason="silent in 2 sweeps in a row")),
        of_d(KIND.ENGINE_EJECTED, "engine d ejected (liveness): silent in 2 sweeps in a row", cause="liveness"),
    ),
    (
        lambda: telling.ejected(
            Ejection(engine="d", cause=Cause.CONNECTION, reason="3 failures", told="3 failures, in full")
        ),
        of_d(KIND.ENGINE_EJECTED, "engine d ejected (connection): 3 failures, in full", cause="connection"),
    ),
    (
        lambda: telling.admitted(SERVING, first=True),
        of_d(KIND.ENGINE_JOINED, "engine d joined as incarnation 3", incarnation="3", result="pass"),
    ),
    (
        lambda: telling.admitted(SERVING, first=False),
        of_d(KIND.ENGINE_READMITTED, "engine d is back as incarnation 3", incarnation="3", result="pass"),
    ),
    (
        lambda: telling.check_failed(NEW, Check.HEALTH, FAILED),
        of_d(
            KIND.ENGINE_CHECK_FAILED,
            "engine d is kept from joining: check health: fail: GET /health answered 503",
            check="health",
            result="fail",
        ),
    ),
    (
        lambda: telling.check_failed(SERVING, Check.MODEL, FAILED),
        of_d(
            KIND.ENGINE_CHECK_FAILED,
            "engine d is kept from coming back: check model: fail: GET /health answered 503",
            check="model",
            result="fail",
        ),
    ),
    (
        lambda: telling.drain_begun("d", drain(), 300.0),
        of_d(
            KIND.DRAIN_BEGUN,
            "engine d: drain (new release), to settle within 300 s; a newer process is asked for when it returns",
        ),
    ),
    (
        lambda: telling.drain_begun("d", drain(restart=False, whole=True), 60.0),
        of_d(
            KIND.DRAIN_BEGUN,
            "engine d: maintenance of the whole fleet (new release), to settle within 60 s; "
            "it may return as the process it is",
        ),
    ),
    (lambda: telling.drain_changed("d", "stays drained"), of_d(KIND.DRAIN_CHANGED, "engine d: stays drained")),
    (
        lambda: telling.identity_captured("d", drain(identity=PROCESS)),
        of_d(
            KIND.IDENTITY_CAPTURED,
            "engine d: the process that is drained: version 0.32.0 started at 1700000000.250",
        ),
    ),
    (
        lambda: telling.identity_captured("d", drain()),
        of_d(KIND.IDENTITY_CAPTURED, "engine d: the process that is drained: unknown, the engine does not say"),
    ),
    (lambda: telling.drain_settled("d"), of_d(KIND.DRAIN_SETTLED, "engine d is ready to stop")),
    (
        lambda: telling.drain_overdue("d", ("1 leg of proxy edge/0", "its process identity to be read")),
        of_d(
            KIND.DRAIN_OVERDUE,
            "engine d: its drain is overdue, it stays out and waits for 1 leg of proxy edge/0; "
            "its process identity to be read",
        ),
    ),
    (lambda: telling.undrain_begun("d"), of_d(KIND.UNDRAIN_BEGUN, "engine d is to return: its gate is tried")),
    (
        lambda: telling.undrain_failed("d", "d", Check.HEALTH, FAILED),
        of_d(
            KIND.UNDRAIN_FAILED,
            "engine d stays drained: its check health: fail: GET /health answered 503",
            failed="d",
            check="health",
            result="fail",
            detail="GET /health answered 503",
        ),
    ),
    (
        lambda: telling.undrain_failed("d", "p", Check.MODEL, FAILED),
        of_d(
            KIND.UNDRAIN_FAILED,
            "engine d stays drained: engine p's check model: fail: GET /health answered 503",
            failed="p",
            check="model",
            result="fail",
            detail="GET /health answered 503",
        ),
    ),
    (
        lambda: telling.probe_started("d", "health probe", "3 timeout failures in a row"),
        of_d(
            KIND.PROBE_STARTED,
            "engine d: health probe begins (3 timeout failures in a row)",
            probe="health probe",
        ),
    ),
    (
        lambda: telling.probe_started("d", "inference probe", ""),
        of_d(KIND.PROBE_STARTED, "engine d: inference probe begins", probe="inference probe"),
    ),
    (
        lambda: telling.gate_asked("d"),
        of_d(KIND.PROBE_STARTED, "engine d: its gate is tried now (asked for by an operator)", probe="gate"),
    ),
    (
        lambda: telling.probe_ended("d", "inference probe", Verdict.PASS, "read a handoff of p"),
        of_d(
            KIND.PROBE_ENDED,
            "engine d: inference probe: pass: read a handoff of p",
            probe="inference probe",
            result="pass",
        ),
    ),
    (
        lambda: telling.relapsed("d", FailureClass.STREAM, "stream again within 60 s of having been cleared", 5.0),
        of_d(
            KIND.RELAPSED,
            "engine d relapsed: stream again within 60 s of having been cleared; kept to a trickle for 5 s",
            **{"class": "stream"},
        ),
    ),
    (
        lambda: telling.blamed("d", "e works and cannot read its handoff"),
        of_d(KIND.PRODUCER_BLAMED, "engine d is blamed as producer: e works and cannot read its handoff"),
    ),
    (
        lambda: telling.overload(3, 4, 4),
        Record(
            kind=KIND.FLEET_SLOW,
            message="3 of 4 decode engines that serve take longer than usual for a token: the fleet is overloaded, "
            "none of them is put on probation",
        ),
    ),
    (
        lambda: telling.overload_over(1, 3, 4),
        Record(
            kind=KIND.FLEET_USUAL,
            message="no more than 1 of 3 decode engines that were measured, of 4 that serve, take longer than usual: "
            "engines are judged one by one again",
        ),
    ),
    (
        lambda: telling.new_normal(3, 4, 4, windows=5),
        Record(
            kind=KIND.FLEET_USUAL,
            message="3 of 4 decode engines that serve take longer than usual for a token, 5 windows in a row: from now "
            "on that is what is usual",
        ),
    ),
    (
        lambda: telling.role_moved(MOVE),
        of_d(
            KIND.ROLE_MOVED,
            "engine d now has the role prefill (load: load of prefill 1.20)",
            to="prefill",
            cause="load",
        ),
    ),
    (
        lambda: telling.role_proposed(MOVE),
        of_d(
            KIND.ROLE_PROPOSED,
            "engine d should have the role prefill (load: load of prefill 1.20); nothing was changed",
            to="prefill",
            cause="load",
        ),
    ),
    (
        lambda: telling.role_risk(Phase.DECODE, RiskKind.TARGET_MISSED, 12.34, 60.0),
        Record(
            kind=KIND.ROLE_RISK,
            message="decode: target missed, 12.3 s after it gave up an engine; it gives up no more for 60 s",
            fields={"role": "decode", "risk": "target missed"},
        ),
    ),
    (
        lambda: telling.kept("d", "prefill and decode"),
        of_d(
            KIND.LAST_ENGINE_KEPT,
            "engine d serves prefill and decode in spite of its holds: no other engine can",
        ),
    ),
]


@pytest.mark.parametrize(("told", "expected"), EVENTS, ids=[record.message for _, record in EVENTS])
def test_what_is_told_is_a_whole_sentence_about_the_engine_with_its_labels(
    told: Callable[[], Record], expected: Record
) -> None:
    assert told() == expected


@pytest.mark.parametrize(
    ("streaks", "words"),
    [
        ({FailureClass.STREAM: 3}, "3 stream failures in a row"),
        ({FailureClass.TIMEOUT: 1}, "1 timeout failure"),
        ({FailureClass.TIMEOUT: 1, FailureClass.OVERLOAD: 1}, "1 timeout failure and 1 overload failure"),
        (
            {FailureClass.STREAM: 3, FailureClass.KV_HANDOFF: 1},
            "3 stream failures and 1 kv_handoff failure in a row",
        ),
    ],
)
def test_streaks(streaks: dict[FailureClass, int], words: str) -> None:
    assert telling.in_a_row(streaks) == words
    assert telling.streak_words(streaks, None) == words
    cut = Seen(outcome=Outcome.STREAM_CUT, phase=Phase.DECODE, at=0.0, detail="closed after 3 tokens")
    assert telling.streak_words(streaks, cut) == f"{words} (stream cut)"


def test_silent_sweeps() -> None:
    assert [telling.silent(n) for n in (1, 2)] == ["silent in 1 sweep", "silent in 2 sweeps in a row"]


def seen(outcome: Outcome, phase: Phase | None = Phase.DECODE, *, status: int = 0, detail: str = "") -> Seen:
    return Seen(outcome=outcome, phase=phase, at=0.0, status=status, detail=detail)


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        # The outcome where there is nothing better, the detail where it says the same and more.
        (seen(Outcome.STREAM_CUT), "stream cut", "decode leg: stream cut"),
        (seen(Outcome.STREAM_CUT, detail="3 tokens"), "stream cut", "decode leg: stream cut (3 tokens)"),
        (seen(Outcome.STREAM_CUT, detail="Stream cut at 3"), "stream cut", "decode leg: Stream cut at 3"),
        # A status is known by its number, in every class that is one.
        (seen(Outcome.HTTP_5XX, status=503), "HTTP 503", "decode leg: HTTP 503"),
        (seen(Outcome.HTTP_408, status=408), "HTTP 408", "decode leg: HTTP 408"),
        (seen(Outcome.HTTP_429, status=429), "HTTP 429", "decode leg: HTTP 429"),
        (seen(Outcome.CLIENT_ERROR, None, status=404), "HTTP 404", "HTTP 404"),
        (seen(Outcome.WRONG_IDENTITY, status=401), "HTTP 401", "decode leg: HTTP 401"),
        (
            seen(Outcome.HTTP_5XX, status=500, detail="out of memory"),
            "HTTP 500",
            "decode leg: HTTP 500 (out of memory)",
        ),
        (seen(Outcome.HTTP_5XX, status=503, detail="answered HTTP 503"), "HTTP 503", "decode leg: answered HTTP 503"),
        # Where only the detail has the number, it is not said twice.
        (seen(Outcome.HTTP_5XX, detail="answered 500"), "http 5xx", "decode leg: answered 500"),
        # A status beside an outcome that is none says nothing about the failure.
        (seen(Outcome.STREAM_SILENT, status=200), "stream silent", "decode leg: stream silent"),
        (seen(Outcome.REFUSED, Phase.PREFILL), "refused", "prefill leg: refused"),
    ],
)
def test_one_failure(failure: Seen, kind: str, words: str) -> None:
    assert telling.kind_words(failure) == kind
    assert telling.failure_words(failure) == words


def test_a_failure_names_who_saw_it_whose_handoff_it_read_and_its_request() -> None:
    failure = Seen(
        outcome=Outcome.STREAM_CUT,
        phase=Phase.DECODE,
        at=0.0,
        proxy="edge-1/0",
        detail="closed after 3 tokens",
        producer="p1",
        request_id="r-17",
    )
    assert telling.failure_words(failure) == (
        "decode leg: stream cut (closed after 3 tokens), on edge-1/0, handoff of p1, request r-17"
    )


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause.CONNECTION, "why"),
        (Cause.HEALTH_PROBE, "why"),
        (Cause.INFERENCE_PROBE, "why"),
        (Cause.LIVENESS, "why"),
        (Cause.PROCESS_CHANGED, "process changed: why"),
        (Cause.MODEL, "model: why"),
        (Cause.OPERATOR, "operator: why"),
    ],
)
def test_the_reason_of_an_ejection_names_a_cause_that_it_does_not_speak_of(cause: Cause, words: str) -> None:
    assert telling.ejected_for(Ejection(engine="d", cause=cause, reason="why", told="all of it")) == words
