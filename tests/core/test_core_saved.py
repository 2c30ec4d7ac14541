"""Saved state by itself: what a value refuses, how it ages, how it is compared with a fleet (spec S1, S2, K5)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from narwhal.control.core.events import ProcessIdentity
from narwhal.control.core.handoff import (
    Comparison,
    Handoff,
    HandoffError,
    Resume,
    SavedCursor,
    SavedDrain,
    SavedEngine,
    SavedFleet,
    SavedHold,
    SavedLease,
    SavedProxy,
    SavedRelapses,
    SavedRisk,
    SavedRoles,
    aged,
    compare,
    from_document,
    to_document,
)
from narwhal.reports import RequestCounts
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase, RiskKind

PROCESS = ProcessIdentity(version="0.32.0", started_at=1_700_000_000.25)
DRAIN = SavedDrain(
    reason="disk",
    url="http://d",
    age_s=10.0,
    remaining_s=50.0,
    wall=1_700_000_100.0,
    restart=True,
    whole=False,
    captured=True,
    identity=PROCESS,
    settled=True,
    overdue=True,
)
HELD = SavedHold(kind=Hold.DRAIN, reason="disk", age_s=10.0, remaining_s=None)
QUARANTINE = SavedHold(kind=Hold.QUARANTINE, reason="1 stream failure", age_s=4.0, remaining_s=30.0)
RELAPSES = SavedRelapses(
    ejected_for=(FailureClass.STREAM,),
    watched_s={FailureClass.STREAM: 20.0, FailureClass.TIMEOUT: 2.0},
    level=2,
    forget_in_s=60.0,
    held_for_s=8.0,
)
ENGINE = SavedEngine(
    url="http://d",
    role=Phase.DECODE,
    role_age_s=100.0,
    incarnation=3,
    holds=(HELD, QUARANTINE),
    identity=PROCESS,
    drain=DRAIN,
    admitted_age_s=200.0,
    gate_in_s=7.0,
    backoff_s=20.0,
    streaks={FailureClass.STREAM: 2},
    stalls=1,
    timeout_is_stream=True,
    producers={"p": 1},
    relapses=RELAPSES,
    misses=1,
    outcomes={Outcome.STREAM_COMPLETE: 9},
)
FRESH = replace(
    ENGINE,
    url="http://p",
    role=Phase.PREFILL,
    role_age_s=None,
    incarnation=0,
    holds=(SavedHold(kind=Hold.JOINING, reason="never admitted", age_s=1.0, remaining_s=None),),
    identity=None,
    drain=None,
    admitted_age_s=None,
    gate_in_s=None,
    relapses=SavedRelapses(),
)
EDGE = SavedProxy(id="edge", slot=0, boot=1, connected=True, counts_for_s=None)
LOST = SavedProxy(id="lost", slot=1, boot=2, connected=False, counts_for_s=90.0)
STATE = SavedFleet(
    fleet="fleet",
    model="tiny",
    engine_set=("p", "d"),
    engines={"p": FRESH, "d": ENGINE},
    requests=RequestCounts(served=5, failed=4, rejected=3, cancelled=2, retried=1),
    unknown_outcomes={Outcome.REFUSED: 1},
    proxies=(EDGE, LOST),
    cursors=(
        SavedCursor(id="edge", slot=0, boot=1, sequence=12, drop_in_s=None),
        SavedCursor(id="lost", slot=1, boot=2, sequence=3, drop_in_s=3000.0),
    ),
    roles=SavedRoles(
        gave_age_s={Phase.DECODE: 11.0},
        risks=(SavedRisk(role=Phase.DECODE, kind=RiskKind.TARGET_MISSED, age_s=5.0, count=2),),
    ),
)
LEASE = SavedLease(epoch=7, holder="control-a")
CURSOR, RISK = STATE.cursors[1], STATE.roles.risks[0]


# --- what is no state -------------------------------------------------------------------------------------------------


# Every time and count of a state, as (value, fields): 0 is one, anything below is none.
TIMES: list[tuple[Any, tuple[str, ...]]] = [
    (QUARANTINE, ("age_s", "remaining_s")),
    (RELAPSES, ("forget_in_s", "held_for_s")),
    (DRAIN, ("age_s", "remaining_s")),
    (ENGINE, ("role_age_s", "admitted_age_s", "gate_in_s", "backoff_s")),
    (LOST, ("counts_for_s",)),
    (CURSOR, ("drop_in_s",)),
    (RISK, ("age_s",)),
]
COUNTS: list[tuple[Any, tuple[str, ...]]] = [
    (RELAPSES, ("level",)),
    (ENGINE, ("stalls", "misses")),
    (LOST, ("slot", "boot")),
    (CURSOR, ("slot", "boot", "sequence")),
    (RISK, ("count",)),
    (LEASE, ("epoch",)),
]
NEGATIVE = [
    (value, field, number)
    for table, number in ((TIMES, -0.25), (COUNTS, -1))
    for value, fields in table
    for field in fields
]


@pytest.mark.case("K5")
@pytest.mark.parametrize(("value", "field", "number"), NEGATIVE, ids=lambda x: x if isinstance(x, str) else "")
def test_no_time_and_no_count_is_below_zero(value: Any, field: str, number: float) -> None:
    assert getattr(replace(value, **{field: 0}), field) == 0
    with pytest.raises(ValueError, match=f"^{field} must not be negative, got {number}$"):
        replace(value, **{field: number})


@pytest.mark.case("K5")
@pytest.mark.parametrize("field", ["served", "failed", "rejected", "cancelled", "retried"])
def test_no_total_of_requests_is_below_zero(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must not be negative, got -1$"):
        replace(STATE, requests=replace(STATE.requests, **{field: -1}))


MAPS: list[tuple[Any, str, Mapping[Any, float]]] = [
    (RELAPSES, "watched_s", {FailureClass.STREAM: 1.0, FailureClass.TIMEOUT: -0.25}),
    (ENGINE, "outcomes", {Outcome.STREAM_COMPLETE: 1, Outcome.REFUSED: -1}),
    (ENGINE, "producers", {"p": 1, "q": -1}),
    (STATE, "unknown_outcomes", {Outcome.REFUSED: -1}),
    (STATE.roles, "gave_age_s", {Phase.DECODE: -0.25}),
]


@pytest.mark.case("K5")
@pytest.mark.parametrize(("value", "field", "broken"), MAPS, ids=[field for _, field, _ in MAPS])
def test_no_count_of_a_table_is_below_zero(value: Any, field: str, broken: Mapping[Any, float]) -> None:
    zero = dict.fromkeys(broken, 0)
    assert getattr(replace(value, **{field: zero}), field) == zero
    with pytest.raises(ValueError, match=f"^{field} must not be negative$"):
        replace(value, **{field: broken})


@pytest.mark.case("K5")
@pytest.mark.parametrize(
    ("value", "change", "words"),
    [
        (DRAIN, {"captured": False}, "names a process identity that was not captured"),
        (ENGINE, {"streaks": {FailureClass.STREAM: 0}}, "streaks must be at least 1"),
        (ENGINE, {"holds": (HELD, QUARANTINE, HELD)}, "a hold is listed twice"),
        (
            ENGINE,
            {"holds": (HELD, replace(HELD, kind=Hold.JOINING), replace(HELD, kind=Hold.EJECTED))},
            "cannot be joining and ejected at once",
        ),
        (ENGINE, {"drain": None}, "is held by a drain that is not described"),
        (
            ENGINE,
            {"drain": None, "holds": (replace(HELD, kind=Hold.MAINTENANCE),)},
            "is held by a drain that is not described",
        ),
        (ENGINE, {"holds": (QUARANTINE,)}, "is drained, so it must carry the drain hold"),
        (ENGINE, {"incarnation": 0}, "was never admitted, so it must be joining"),
        (ENGINE, {"incarnation": -1}, "incarnation must not be negative, got -1"),
        (STATE.roles, {"risks": (RISK, replace(RISK, count=9))}, "a risk is listed twice"),
        (STATE, {"engine_set": ("p",)}, "engine_set does not list exactly the engines"),
        (STATE, {"engine_set": ("p", "d", "e")}, "engine_set does not list exactly the engines"),
        (STATE, {"engine_set": ("p", "d", "d")}, "engine_set does not list exactly the engines"),
    ],
)
def test_what_contradicts_itself_is_refused(value: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        replace(value, **change)
    assert str(refused.value) == words


@pytest.mark.rule("S1")
def test_what_does_not_contradict_itself_is_taken() -> None:
    assert replace(DRAIN, captured=False, identity=None).identity is None
    assert replace(ENGINE, streaks={FailureClass.STREAM: 1}).streaks == {FailureClass.STREAM: 1}
    # Maintenance of the fleet that has not taken this engine out yet, and that which has.
    whole = replace(DRAIN, whole=True, settled=False)
    assert replace(ENGINE, drain=whole, holds=()).drain == whole
    assert replace(ENGINE, drain=whole, holds=(replace(HELD, kind=Hold.MAINTENANCE),)).drain == whole
    # One that was drained before it ever joined.
    joining = replace(HELD, kind=Hold.JOINING)
    assert replace(ENGINE, incarnation=0, holds=(joining, HELD)).incarnation == 0
    # Two kinds of risk of one role, one kind of both.
    others = (RISK, replace(RISK, kind=RiskKind.FIRST_TOKEN_LATE), replace(RISK, role=Phase.PREFILL))
    assert replace(STATE.roles, risks=others).risks == others


# --- the document -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("S1")
def test_a_document_says_what_it_is_when_it_was_written_and_under_which_lease() -> None:
    document = to_document(STATE, wall=5000.0, epoch=7, holder="control-a")
    assert list(document)[:5] == ["schema", "schema_version", "written_at", "lease", "fleet"]
    assert document["lease"] == {"epoch": 7, "holder": "control-a"}
    assert document["engines"]["d"]["holds"][1] == {
        "kind": "quarantine",
        "reason": "1 stream failure",
        "age_s": 4.0,
        "remaining_s": 30.0,
    }
    assert from_document(document) == Handoff(state=STATE, written_at=5000.0, lease=LEASE)


@pytest.mark.case("K5")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": None}, "unknown schema None, this release reads 'narwhal.handoff'"),
        ({"schema_version": 2}, "unknown schema_version 2, this release reads 1"),
        ({"schema_version": True}, "unknown schema_version True, this release reads 1"),
        ({"written_at": "then"}, "written_at: must be a number, got str"),
        ({"lease": {"epoch": -1, "holder": "a"}}, "lease: epoch must not be negative, got -1"),
        ({"fleet": 3}, "fleet: must be a string, got int"),
        ({"more": 1}, "unknown field more"),
    ],
)
def test_a_document_that_is_refused_says_why(change: dict[str, Any], words: str) -> None:
    document = {**to_document(STATE, wall=5000.0, epoch=7, holder="control-a"), **change}
    with pytest.raises(HandoffError) as refused:
        from_document(document)
    assert str(refused.value) == words


def test_what_is_no_object_says_what_it_is() -> None:
    with pytest.raises(HandoffError) as refused:
        from_document(["narwhal.handoff"])
    assert str(refused.value) == "must be an object, got list"
    with pytest.raises(HandoffError) as refused:
        from_document({})
    assert str(refused.value) == "unknown schema None, this release reads 'narwhal.handoff'"


# --- time passes ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("S1", "S7")
def test_in_three_seconds_ages_grow_and_what_remains_shrinks_and_nothing_else_changes() -> None:
    later = aged(Handoff(state=STATE, written_at=5000.0, lease=LEASE), wall=5003.0)
    engine = replace(
        ENGINE,
        holds=(replace(HELD, age_s=13.0), replace(QUARANTINE, age_s=7.0, remaining_s=27.0)),
        role_age_s=103.0,
        admitted_age_s=203.0,
        gate_in_s=4.0,
        drain=replace(DRAIN, age_s=13.0, remaining_s=47.0),
        relapses=SavedRelapses(
            ejected_for=(FailureClass.STREAM,),
            watched_s={FailureClass.STREAM: 17.0, FailureClass.TIMEOUT: 0.0},
            level=2,
            forget_in_s=57.0,
            held_for_s=5.0,
        ),
    )
    fresh = replace(FRESH, holds=(replace(FRESH.holds[0], age_s=4.0),))
    assert later == replace(
        STATE,
        engines={"p": fresh, "d": engine},
        proxies=(EDGE, replace(LOST, counts_for_s=87.0)),
        cursors=(STATE.cursors[0], replace(CURSOR, drop_in_s=2997.0)),
        roles=SavedRoles(gave_age_s={Phase.DECODE: 14.0}, risks=(replace(RISK, age_s=8.0),)),
    )


@pytest.mark.rule("S1")
def test_in_a_day_nothing_remains_and_nothing_is_below_zero() -> None:
    later = aged(Handoff(state=STATE, written_at=5000.0, lease=LEASE), wall=5000.0 + 86400.0)
    engine = later.engines["d"]
    assert engine.drain is not None
    assert [h.remaining_s for h in engine.holds] == [None, 0.0]
    assert (engine.gate_in_s, engine.drain.remaining_s) == (0.0, 0.0)
    assert engine.relapses == replace(
        RELAPSES, watched_s=dict.fromkeys(RELAPSES.watched_s, 0.0), forget_in_s=0.0, held_for_s=0.0
    )
    assert [p.counts_for_s for p in later.proxies] == [None, 0.0]
    assert [c.drop_in_s for c in later.cursors] == [None, 0.0]


# --- may it be applied? -----------------------------------------------------------------------------------------------


@pytest.mark.rule("S2")
@pytest.mark.parametrize(
    ("fleet", "engines", "found"),
    [
        ("fleet", ["d", "p"], Comparison(resume=Resume.APPLY, message="the handoff matches the fleet")),
        (
            "tuna",
            ["p", "d"],
            Comparison(resume=Resume.REFUSE, message="the handoff is of fleet 'fleet', not of 'tuna'"),
        ),
        (
            "fleet",
            ["p", "d", "f", "e"],
            Comparison(
                resume=Resume.FRESH,
                message="the handoff has another set of engines (added: e, f; drains forgotten: d)",
                forgotten_drains=("d",),
            ),
        ),
        (
            "fleet",
            [],
            Comparison(
                resume=Resume.FRESH,
                message="the handoff has another set of engines (removed: d, p; drains forgotten: d)",
                forgotten_drains=("d",),
            ),
        ),
    ],
)
def test_a_saved_state_beside_the_fleet_file(fleet: str, engines: list[str], found: Comparison) -> None:
    assert compare(STATE, fleet=fleet, model="tiny", engines=engines) == found


@pytest.mark.rule("S2", "R8")
def test_engines_that_were_found_to_serve_another_model_have_to_be_asked_anew() -> None:
    assert compare(STATE, fleet="fleet", model="large", engines=["p", "d"]) == Comparison(
        resume=Resume.FRESH,
        message="the handoff is of model 'tiny', not of 'large' (drains forgotten: d)",
        forgotten_drains=("d",),
    )
    undrained = replace(STATE, engines={"p": FRESH, "d": replace(ENGINE, drain=None, holds=(QUARANTINE,))})
    assert compare(undrained, fleet="fleet", model="large", engines=["p", "d"]) == Comparison(
        resume=Resume.FRESH, message="the handoff is of model 'tiny', not of 'large'"
    )
    both = compare(undrained, fleet="fleet", model="large", engines=["p", "d", "e"])
    assert both.message == "the handoff is of model 'tiny', not of 'large' (added: e)"


@pytest.mark.rule("S2")
def test_where_no_drain_is_forgotten_none_is_named() -> None:
    undrained = replace(STATE, engines={"p": FRESH, "d": replace(ENGINE, drain=None, holds=(QUARANTINE,))})
    assert compare(undrained, fleet="fleet", model="tiny", engines=["p", "d", "e"]) == Comparison(
        resume=Resume.FRESH, message="the handoff has another set of engines (added: e)"
    )
