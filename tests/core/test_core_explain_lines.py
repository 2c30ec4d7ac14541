"""Every line of `explain`, from views made by hand: what an operator reads in each state (spec H, R, F, L)."""

from dataclasses import replace
from typing import Any

import pytest

from narwhal.control.core.events import ProcessIdentity
from narwhal.control.core.evidence import Seen
from narwhal.control.core.explain import explain
from narwhal.control.core.view import (
    CheckView,
    DrainView,
    DriftView,
    EngineView,
    EvidenceView,
    HealthView,
    HoldView,
    Told,
)
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Phase, Verdict

NOTHING = "evidence: none now"
SERVES = EngineView(
    id="d",
    url="http://d",
    role=Phase.DECODE,
    pinned=False,
    incarnation=2,
    phases=frozenset({Phase.DECODE}),
    weight=1.0,
)
PROCESS = ProcessIdentity(version="0.32.0", started_at=1_700_000_000.25)
DRAIN = DrainView(
    reason="disk",
    url=SERVES.url,
    age_s=10.0,
    remaining_s=90.0,
    restart=True,
    whole=False,
    captured=True,
    identity=PROCESS,
    settled=False,
    overdue=False,
    waits_for=("1 leg of proxy edge/0", "its process identity to be read"),
)
SEEN = Seen(outcome=Outcome.RESET, phase=Phase.DECODE, at=0.0)
STREAM = EvidenceView(failure=FailureClass.STREAM, streak=2, limit=3, last=SEEN, last_words="decode leg: reset")


def lines(closed: str = "", cut_off: bool = False, **fields: Any) -> tuple[str, ...]:
    view = replace(SERVES, **fields)
    return explain(view, (), closed=closed, cut_off=cut_off, now=1000.0).lines


def held(kind: Hold, *, age_s: float = 5.0, remaining_s: float | None = None, effective: bool = True) -> HoldView:
    return HoldView(kind=kind, reason="because", age_s=age_s, remaining_s=remaining_s, effective=effective)


OUT: dict[str, Any] = {"phases": frozenset()}


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, "engine d is eligible: serves decode (role decode, incarnation 2)"),
        (
            {"phases": frozenset(Phase), "pinned": True},
            "engine d is eligible: serves prefill and decode (role decode, pinned, incarnation 2)",
        ),
        (
            {"phases": frozenset({Phase.PREFILL}), "weight": 0.4},
            "engine d is eligible: serves prefill (role decode, incarnation 2, weight 0.4)",
        ),
        (
            {**OUT, "holds": (held(Hold.EJECTED), held(Hold.DRAIN), held(Hold.DRIFT))},
            "engine d is not eligible: ejected, drain hold, drift hold (role decode, incarnation 2)",
        ),
        (
            {**OUT, "holds": (held(Hold.JOINING), held(Hold.MAINTENANCE)), "incarnation": 0},
            "engine d is not eligible: joining, maintenance hold (role decode, incarnation 0)",
        ),
        (
            OUT,
            "engine d is not eligible yet: its admission is being stored (role decode, incarnation 2)",
        ),
        (
            {**OUT, "holds": (held(Hold.DRIFT, effective=False),)},
            "engine d is not eligible yet: its admission is being stored (role decode, incarnation 2)",
        ),
    ],
)
def test_the_first_line_is_the_answer(fields: dict[str, Any], first: str) -> None:
    assert lines(**fields)[0] == first


@pytest.mark.parametrize(
    ("hold", "line"),
    [
        (held(Hold.EJECTED), "ejected for 5.0 s: because"),
        (held(Hold.JOINING), "joining for 5.0 s: because"),
        (held(Hold.DRAIN), "drain hold for 5.0 s: because"),
        (held(Hold.VERIFICATION, age_s=119.9), "verification hold for 119.9 s: because"),
        (held(Hold.VERIFICATION, age_s=120.0), "verification hold for 2 min: because"),
        (held(Hold.QUARANTINE, remaining_s=7.25), "quarantine hold for 5.0 s, ends in 7.2 s: because"),
        (held(Hold.RELAPSE, remaining_s=-0.5), "relapse hold for 5.0 s, ends in 0.0 s: because"),
        (
            held(Hold.RELAPSE, remaining_s=0.75, effective=False),
            "relapse hold for 5.0 s, ends in 0.8 s, yields: no other engine can serve: because",
        ),
    ],
)
def test_a_hold_says_since_when_until_when_and_why(hold: HoldView, line: str) -> None:
    assert lines(**OUT, holds=(hold,))[1:] == (line, NOTHING)


@pytest.mark.rule("R4", "R5")
@pytest.mark.parametrize(
    ("drain", "told"),
    [
        (
            DRAIN,
            (
                "drain: to settle within 90.0 s, waits for 1 leg of proxy edge/0; its process identity to be read",
                "drained was version 0.32.0 started at 1700000000.250; to return, `narwhalctl undrain d`, "
                "it must have been restarted since",
            ),
        ),
        (
            replace(DRAIN, overdue=True, identity=None, waits_for=("3 legs of proxy edge/0",)),
            (
                "drain: overdue, waits for 3 legs of proxy edge/0",
                "drained was a process that is not known; to return, `narwhalctl undrain d`, "
                "it must have been restarted since",
            ),
        ),
        (
            replace(DRAIN, settled=True, restart=False, waits_for=()),
            ("ready to stop", "to return: `narwhalctl undrain d`"),
        ),
        (
            replace(DRAIN, remaining_s=600.0, captured=False, identity=None, waits_for=("x",)),
            ("drain: to settle within 10 min, waits for x", "to return: `narwhalctl undrain d`"),
        ),
    ],
)
def test_a_drain_says_what_it_waits_for_and_how_the_engine_returns(drain: DrainView, told: tuple[str, ...]) -> None:
    assert lines(**OUT, holds=(held(Hold.DRAIN),), drain=drain)[2:] == (*told, NOTHING)


@pytest.mark.rule("F1", "F4", "F7", "L2")
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"evidence": (replace(STREAM, last_age_s=4.0),)},
            ("evidence: 2 stream failures in a row (acted upon at 3), the last 4.0 s ago: decode leg: reset",),
        ),
        (
            {"evidence": (EvidenceView(failure=FailureClass.KV_HANDOFF, streak=1, limit=3),)},
            ("evidence: 1 kv_handoff failure (acted upon at 3)",),
        ),
        (
            {"evidence": (replace(STREAM, streak=0, last_age_s=300.0),)},
            ("cleared since: stream failure 5 min ago: decode leg: reset", NOTHING),
        ),
        (
            {"evidence": (STREAM, replace(STREAM, failure=FailureClass.OVERLOAD, streak=0))},
            (
                "evidence: 2 stream failures in a row (acted upon at 3), the last 0.0 s ago: decode leg: reset",
                "cleared since: overload failure 0.0 s ago: decode leg: reset",
            ),
        ),
        ({"producers": ("p2", "p1")}, ("its failed decode legs read from: p2, p1", NOTHING)),
        ({"misses": 1}, ("liveness: silent in 1 sweep",)),
        ({"misses": 3}, ("liveness: silent in 3 sweeps in a row",)),
    ],
)
def test_what_counts_against_it(fields: dict[str, Any], told: tuple[str, ...]) -> None:
    assert lines(**fields)[1:] == told


DRIFT = DriftView(step_s=0.0612, usual_s=0.02, samples=30, drifting=3, good=0)
HEALTHY = HealthView(outcome=None, detail="GET /health answered 200", latency_s=0.0042, age_s=3.0)


@pytest.mark.rule("H5", "R1", "R3", "L4")
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"drift": DRIFT},
            ("decode latency: 61.2 ms a token in the last window where 20.0 ms are usual; 3 slow windows in a row",),
        ),
        (
            {"drift": replace(DRIFT, step_s=0.019, drifting=0, good=2)},
            ("decode latency: 19.0 ms a token in the last window where 20.0 ms are usual; 2 good windows in a row",),
        ),
        (
            {"health": (HEALTHY, replace(HEALTHY, detail="refused", latency_s=8.0, age_s=130.0))},
            ("health, newest first: GET /health answered 200 after 4 ms, 3.0 s ago; refused after 8000 ms, 2 min ago",),
        ),
        (
            {"cut_off": True},
            ("control is cut off from the engines: that this one does not answer it says nothing",),
        ),
        (
            {
                "checks": (
                    CheckView(check=Check.HEALTH, verdict=Verdict.PASS, detail="200", age_s=9.0, latency_s=0.0123),
                    CheckView(check=Check.MODEL, verdict=Verdict.FAIL, detail="serves llama", age_s=8.5, latency_s=1),
                )
            },
            (
                "check health: pass: 200 (9.0 s ago, took 12 ms)",
                "check model: fail: serves llama (8.5 s ago, took 1000 ms)",
            ),
        ),
    ],
)
def test_what_was_measured(fields: dict[str, Any], told: tuple[str, ...]) -> None:
    assert lines(**fields)[1:] == (NOTHING, *told)


@pytest.mark.rule("C1", "M5")
def test_closed_admission_and_a_changed_role_follow_the_answer_and_what_is_found_out_the_holds() -> None:
    assert lines(closed="maintenance", role_age_s=4.0)[1:3] == (
        "no engine gets new work: maintenance",
        "changed its role to decode 4.0 s ago",
    )
    stays = "moved lately: it stays for 26 s more"
    assert lines(role_age_s=4.0, stays=stays)[1] == f"changed its role to decode 4.0 s ago; {stays}"
    found = lines(**OUT, holds=(held(Hold.EJECTED),), suspicion="inference probe under way", gate_in_s=6.25)
    assert found[1:] == (
        "ejected for 5.0 s: because",
        "inference probe under way",
        "its gate is tried next in 6.2 s",
        NOTHING,
    )


def test_the_order_is_that_of_importance() -> None:
    told = lines(
        closed="maintenance",
        cut_off=True,
        role_age_s=1.0,
        holds=(held(Hold.DRIFT, effective=False),),
        drain=DRAIN,
        suspicion="suspected",
        evidence=(STREAM,),
        drift=DRIFT,
        health=(HEALTHY,),
        checks=(CheckView(check=Check.HEALTH, verdict=Verdict.PASS, detail="200", age_s=9.0, latency_s=0.0),),
    )
    starts = "engine|no engine|changed|drift hold|drain|drained|suspected|evidence|decode latency|control|health|check"
    assert len(told) == len(starts.split("|"))
    for line, start in zip(told, starts.split("|"), strict=True):
        assert line.startswith(start)


def test_the_newest_twenty_things_that_were_told_end_it_newest_first() -> None:
    history = [(float(second), f"thing {second}") for second in range(975, 1000)]
    explanation = explain(SERVES, history, closed="", cut_off=False, now=1000.0)
    assert explanation.engine is SERVES
    assert explanation.history == tuple(
        Told(age_s=1000.0 - second, message=f"thing {second}") for second in range(999, 979, -1)
    )
    assert explanation.lines[1:4] == (NOTHING, "1.0 s ago: thing 999", "2.0 s ago: thing 998")
    assert explanation.lines[-1] == "20.0 s ago: thing 980"
    assert len(explanation.lines) == 22
