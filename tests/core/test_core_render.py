"""One engine as placement and as operators see it: every field (spec P1, H2, H4)."""

from dataclasses import replace

import pytest

from narwhal.control.core.coverage import Candidate
from narwhal.control.core.engine import Checked, Drain, Engine, HealthSeen, Held
from narwhal.control.core.events import CheckResult, ProcessIdentity
from narwhal.control.core.evidence import Evidence, Seen
from narwhal.control.core.render import engine_view, entry, released
from narwhal.control.core.settings import EngineSpec
from narwhal.control.core.view import (
    CheckView,
    DrainView,
    DriftView,
    EngineView,
    EvidenceView,
    HealthView,
    HoldView,
)
from narwhal.placement import EngineEntry
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Phase, Verdict

P, D = Phase.PREFILL, Phase.DECODE
NOW = 1000.0
PROCESS = ProcessIdentity(version="0.32.0", started_at=1_700_000_000.25)
OLDER = ProcessIdentity(version="0.31.0", started_at=1_600_000_000.5)
SPEC = EngineSpec(id="d", url="http://d", role=D, pinned=True, max_inflight=7, max_inflight_tokens=9000)
CUT = Seen(outcome=Outcome.STREAM_CUT, phase=D, at=NOW - 4.0, proxy="edge/0")
BUSY = Seen(outcome=Outcome.HTTP_429, phase=D, at=NOW - 5.0, status=429)
ENGINE = Engine(
    spec=SPEC,
    role=D,
    role_since=NOW - 70.0,
    incarnation=4,
    holds={
        Hold.VERIFICATION: Held(kind=Hold.VERIFICATION, reason="3 stream failures", since=NOW - 3.0),
        Hold.QUARANTINE: Held(kind=Hold.QUARANTINE, reason="after a failure", since=NOW - 2.0, due=NOW + 8.0),
        Hold.DRIFT: Held(kind=Hold.DRIFT, reason="over", since=NOW - 9.0, due=NOW),  # its time has come
    },
    identity=PROCESS,
    drain=Drain(
        reason="disk",
        url="http://before",
        since=NOW - 20.0,
        due=NOW + 40.0,
        wall=0.0,
        restart=True,
        whole=True,
        captured=True,
        identity=OLDER,
        overdue=True,
    ),
    settled_weight=0.4,
    evidence=Evidence(
        streaks={FailureClass.STREAM: 3, FailureClass.TIMEOUT: 1},
        producers={"p1": 1, "p2": 2},
        totals={FailureClass.STREAM: 5, FailureClass.OVERLOAD: 2},
        last={FailureClass.STREAM: CUT, FailureClass.OVERLOAD: BUSY},
    ),
    misses=1,
    outcomes={Outcome.STREAM_COMPLETE: 20},
    checks={
        Check.MODEL: Checked(result=CheckResult(verdict=Verdict.FAIL, detail="is not served"), at=NOW - 6.0),
        Check.HEALTH: Checked(result=CheckResult(verdict=Verdict.PASS, detail="200", latency_s=0.02), at=NOW - 7.0),
    },
    health=(
        HealthSeen(outcome=Outcome.HTTP_5XX, detail="GET /health answered 503", latency_s=0.3, at=NOW - 12.0),
        HealthSeen(outcome=None, detail="GET /health answered 200", latency_s=0.1, at=NOW - 11.0),
    ),
    gates={(Verdict.FAIL, "model"): 2},
)
DRIFT = DriftView(step_s=0.02, usual_s=0.01, samples=5, drifting=1, good=0)


def view(engine: Engine = ENGINE, phases: frozenset[Phase] = frozenset()) -> EngineView:
    return engine_view(
        engine,
        phases,
        inflight=6,
        suspicion="inference probe under way",
        gate_in_s=12.5,
        waits_for=("1 leg of proxy edge/0",),
        drift=DRIFT,
        stays="pinned",
        limit=3,
        now=NOW,
    )


VIEW = EngineView(
    id="d",
    url="http://d",
    role=D,
    pinned=True,
    incarnation=4,
    phases=frozenset(),
    weight=0.4,
    holds=(
        HoldView(kind=Hold.QUARANTINE, reason="after a failure", age_s=2.0, remaining_s=8.0, effective=True),
        HoldView(kind=Hold.VERIFICATION, reason="3 stream failures", age_s=3.0, remaining_s=None, effective=True),
    ),
    checks=(  # in the order of the gate
        CheckView(check=Check.HEALTH, verdict=Verdict.PASS, detail="200", age_s=7.0, latency_s=0.02),
        CheckView(check=Check.MODEL, verdict=Verdict.FAIL, detail="is not served", age_s=6.0, latency_s=0.0),
    ),
    streaks={FailureClass.STREAM: 3, FailureClass.TIMEOUT: 1},
    outcomes={Outcome.STREAM_COMPLETE: 20},
    identity=PROCESS,
    inflight=6,
    evidence=(
        # A takeover handed on this streak only.
        EvidenceView(failure=FailureClass.TIMEOUT, streak=1, limit=3),
        EvidenceView(
            failure=FailureClass.STREAM,
            streak=3,
            limit=3,
            total=5,
            last=CUT,
            last_words="decode leg: stream cut, on edge/0",
            last_age_s=4.0,
        ),
        # Cleared since.
        EvidenceView(
            failure=FailureClass.OVERLOAD,
            streak=0,
            limit=3,
            total=2,
            last=BUSY,
            last_words="decode leg: HTTP 429",
            last_age_s=5.0,
        ),
    ),
    producers=("p2", "p1"),
    health=(
        HealthView(outcome=None, detail="GET /health answered 200", latency_s=0.1, age_s=11.0),
        HealthView(outcome=Outcome.HTTP_5XX, detail="GET /health answered 503", latency_s=0.3, age_s=12.0),
    ),
    gates={(Verdict.FAIL, "model"): 2},
    misses=1,
    suspicion="inference probe under way",
    gate_in_s=12.5,
    drain=DrainView(
        reason="disk",
        url="http://before",
        age_s=20.0,
        remaining_s=40.0,
        restart=True,
        whole=True,
        captured=True,
        identity=OLDER,
        settled=False,
        overdue=True,
        waits_for=("1 leg of proxy edge/0",),
    ),
    drift=DRIFT,
    role_age_s=70.0,
    stays="pinned",
)


def test_everything_that_operators_see_of_an_engine() -> None:
    assert view() == VIEW
    assert not view().eligible


def test_an_engine_of_which_there_is_little_to_see() -> None:
    little = view(Engine(spec=SPEC, role=D), frozenset({D}))
    assert (little.drain, little.role_age_s, little.holds, little.checks) == (None, None, (), ())
    assert (little.evidence, little.producers, little.health) == ((), (), ())
    assert little.eligible


@pytest.mark.rule("H2")
def test_soft_holds_yield_on_an_engine_that_serves_nevertheless_and_hard_ones_never_do() -> None:
    both = {
        Hold.DRAIN: Held(kind=Hold.DRAIN, reason="disk", since=NOW),
        Hold.DRIFT: Held(kind=Hold.DRIFT, reason="slow", since=NOW),
    }
    engine = replace(ENGINE, holds=both)
    assert [h.effective for h in view(engine, frozenset({D})).holds] == [True, False]
    assert [h.effective for h in view(engine).holds] == [True, True]


@pytest.mark.rule("R4")
def test_a_drain_that_has_settled_is_not_overdue_and_a_deadline_that_has_passed_leaves_nothing() -> None:
    assert ENGINE.drain is not None
    settled = view(replace(ENGINE, drain=replace(ENGINE.drain, settled=True, due=NOW - 5.0))).drain
    assert settled is not None
    assert (settled.settled, settled.overdue, settled.remaining_s) == (True, False, 0.0)


ENTRY = EngineEntry(
    id="d",
    url="http://d",
    role=D,
    phases=frozenset({P}),
    incarnation=4,
    weight=0.4,
    pinned=True,
    holds=(Hold.QUARANTINE, Hold.VERIFICATION),
    quarantine_due=NOW + 8.0,
    phases_after_quarantine=frozenset({D}),
    max_inflight=7,
    max_inflight_tokens=9000,
)


@pytest.mark.rule("P1", "H4")
def test_everything_that_placement_says_of_an_engine() -> None:
    assert entry(ENGINE, frozenset({P}), frozenset({D}), now=NOW) == ENTRY
    held = {Hold.DRIFT: Held(kind=Hold.DRIFT, reason="slow", since=NOW - 1.0, due=NOW + 5.0)}
    assert entry(replace(ENGINE, holds=held), frozenset({P}), frozenset(), now=NOW) == replace(
        ENTRY, holds=(Hold.DRIFT,), quarantine_due=None, phases_after_quarantine=frozenset()
    )


@pytest.mark.rule("H4")
def test_what_an_engine_is_once_its_quarantine_ends() -> None:
    # The verification hold stays.
    assert released(ENGINE, now=NOW) == Candidate(id="d", role=D, pinned=True, hard=False, soft_since=NOW - 3.0)
    only = {Hold.QUARANTINE: ENGINE.holds[Hold.QUARANTINE]}
    assert released(replace(ENGINE, holds=only), now=NOW) == Candidate(id="d", role=D, pinned=True)
    assert released(replace(ENGINE, holds=only), now=NOW + 8.0) is None
    assert released(replace(ENGINE, holds={}), now=NOW) is None
