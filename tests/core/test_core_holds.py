"""Holds, last-engine protection, fallback, and what is published when (spec H1–H3, P1, P2, P4, R10, C11)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narwhal.control.core.coverage import Candidate, after, cover, uncovered
from narwhal.control.core.effects import ProbeInference
from narwhal.control.core.engine import Engine, IllegalTransitionError, Move, joining, ramp_from
from narwhal.control.core.events import Woke
from narwhal.control.core.publication import PlacementContent, publishable
from narwhal.control.core.records import EventKind
from narwhal.placement import EngineEntry
from narwhal.vocabulary import HARD_HOLDS, SOFT_HOLDS, Hold, Outcome, Phase
from tests.core.rig import Rig, decode, of, only, prefill

P, D = Phase.PREFILL, Phase.DECODE
BOTH = {P, D}
NONE: set[Phase] = set()


def at(name: str, role: Phase, *, pinned: bool = True, hard: bool = False, soft: float | None = None) -> Candidate:
    return Candidate(id=name, role=role, pinned=pinned, hard=hard, soft_since=soft)


def phases(*candidates: Candidate) -> dict[str, set[Phase]]:
    return {name: set(served) for name, served in cover(candidates).items()}


@pytest.mark.rule("H1")
def test_which_holds_are_hard() -> None:
    assert {Hold.JOINING, Hold.EJECTED, Hold.DRAIN, Hold.MAINTENANCE} == HARD_HOLDS
    assert {Hold.DRIFT, Hold.QUARANTINE, Hold.RELAPSE, Hold.VERIFICATION} == SOFT_HOLDS


@pytest.mark.rule("H1")
@pytest.mark.parametrize("kind", [Hold.DRAIN, Hold.MAINTENANCE])
def test_a_hard_hold_takes_the_engine_whoever_is_left(kind: Hold) -> None:
    engine = in_service()
    engine.place(kind, "asked for", now=5.0)
    assert engine.candidate(now=5.0).hard


@pytest.mark.rule("H1")
def test_an_engine_may_carry_several_holds_each_with_reason_start_and_deadline() -> None:
    engine = in_service()
    engine.place(Hold.DRIFT, "slow", now=5.0)
    engine.place(Hold.QUARANTINE, "failed", now=6.0, due=9.0)
    assert [(h.kind, h.reason, h.since, h.due) for h in engine.carried(now=8.0)] == [
        (Hold.DRIFT, "slow", 5.0, None),
        (Hold.QUARANTINE, "failed", 6.0, 9.0),
    ]
    assert [h.kind for h in engine.carried(now=9.0)] == [Hold.DRIFT]
    assert engine.candidate(now=8.0).soft_since == 5.0


# --- coverage -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("P4")
@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([at("p", P, pinned=False), at("d", D, pinned=False)], {"p": {P}, "d": {D}}),
        ([at("p", P, hard=True), at("d", D, pinned=False)], {"p": NONE, "d": BOTH}),
        ([at("p", P, hard=True), at("d", D, pinned=True)], {"p": NONE, "d": {D}}),
        ([at("p", P, hard=True), at("d", D, pinned=False, hard=True)], {"p": NONE, "d": NONE}),
        ([at("d1", D, pinned=False), at("d2", D, pinned=False)], {"d1": BOTH, "d2": BOTH}),
        ([at("d1", D, pinned=False), at("d2", D, pinned=True)], {"d1": BOTH, "d2": {D}}),
        # A suspect of the role does not keep an engine of the other role from taking its legs.
        ([at("p", P, soft=1.0), at("d", D, pinned=False)], {"p": NONE, "d": BOTH}),
    ],
)
def test_fallback(candidates: list[Candidate], expected: dict[str, set[Phase]]) -> None:
    assert phases(*candidates) == expected


@pytest.mark.rule("H2")
@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        # Held while another serves: out.
        ([at("d1", D, soft=1.0), at("d2", D)], {"d1": NONE, "d2": {D}}),
        # All held: the one held last keeps serving, and only that one.
        ([at("d1", D, soft=1.0), at("d2", D, soft=2.0)], {"d1": NONE, "d2": {D}}),
        ([at("d1", D, soft=2.0), at("d2", D, soft=1.0)], {"d1": {D}, "d2": NONE}),
        # Held at once: the lowest id.
        ([at("d2", D, soft=1.0), at("d1", D, soft=1.0)], {"d2": NONE, "d1": {D}}),
        # A hard hold empties the phase: the soft one yields.
        ([at("d1", D, soft=1.0), at("d2", D, hard=True)], {"d1": {D}, "d2": NONE}),
        # Hard is hard.
        ([at("d1", D, hard=True, soft=1.0), at("d2", D, hard=True)], {"d1": NONE, "d2": NONE}),
        # One for each phase.
        ([at("p", P, soft=1.0), at("d", D, soft=2.0)], {"p": {P}, "d": {D}}),
    ],
)
def test_last_engine_protection(candidates: list[Candidate], expected: dict[str, set[Phase]]) -> None:
    assert phases(*candidates) == expected


def test_uncovered_names_the_phases_that_nobody_serves() -> None:
    assert uncovered([at("p", P), at("d", D, hard=True)]) == (D,)
    assert uncovered([]) == (P, D)
    assert uncovered([at("d", D, pinned=False)]) == ()


candidates_strategy = st.lists(
    st.builds(
        Candidate,
        id=st.just(""),
        role=st.sampled_from(Phase),
        pinned=st.booleans(),
        hard=st.booleans(),
        soft_since=st.none() | st.integers(0, 3).map(float),
    ),
    min_size=1,
    max_size=5,
).map(lambda cs: [Candidate(id=f"e{i}", **_fields(c)) for i, c in enumerate(cs)])


def _fields(c: Candidate) -> dict[str, Any]:
    return {"role": c.role, "pinned": c.pinned, "hard": c.hard, "soft_since": c.soft_since}


def without(c: Candidate, **more: Any) -> Candidate:
    return Candidate(**{"id": c.id, **_fields(c), **more})


@pytest.mark.rule("H2", "H3", "P4")
@pytest.mark.case("C11")
@settings(max_examples=400, deadline=None)
@given(candidates_strategy)
def test_no_soft_hold_ever_empties_a_phase(candidates: list[Candidate]) -> None:
    """Fleets of one to five engines: what could be served is, and by exactly the right ones."""
    serving = cover(candidates)
    for phase in Phase:
        could = [c for c in candidates if not c.hard and (c.role is phase or not c.pinned)]
        does = [c for c in candidates if phase in serving[c.id]]
        assert bool(does) == bool(could)
        assert all(c in could for c in does)
        free = [c for c in could if c.soft_since is None]
        if free:
            assert all(c in free for c in does)
            own = [c for c in free if c.role is phase]
            assert does == (own or free)
        elif does:
            (kept,) = does
            assert all((c.soft_since, kept.id) <= (kept.soft_since, c.id) for c in does)
            assert kept.soft_since == max(c.soft_since or 0.0 for c in could)


@pytest.mark.rule("H4")
@settings(max_examples=400, deadline=None)
@given(candidates_strategy, st.sampled_from([None, 0.0, 2.0]))
def test_what_each_would_serve_by_itself_is_what_coverage_says_then(
    candidates: list[Candidate], soft_since: float | None
) -> None:
    changed = [without(c, soft_since=soft_since) for c in candidates]
    each = {one.id: cover(one if c.id == one.id else c for c in candidates)[one.id] for one in changed}
    assert after(candidates, changed) == each


@pytest.mark.rule("H2")
@settings(max_examples=200, deadline=None)
@given(candidates_strategy)
def test_protection_ends_when_another_is_eligible(candidates: list[Candidate]) -> None:
    freed = [without(c, soft_since=None) if i == 0 else c for i, c in enumerate(candidates)]
    serving = cover(freed)
    if not freed[0].hard:
        assert freed[0].role in serving[freed[0].id]
        assert all(freed[0].role not in serving[c.id] for c in freed[1:] if c.soft_since is not None)


# --- in the fleet ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("H2")
def test_the_last_decode_engine_serves_on_under_suspicion_and_yields_when_another_returns() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d1", pinned=True), decode("d2", pinned=True), liveness_every=0)
    rig.report("d2", Outcome.REFUSED, count=3)
    effects = rig.report("d1", Outcome.STREAM_CUT, count=3)
    assert rig.holds("d1") == {Hold.VERIFICATION}
    assert rig.engine("d1").phases == {D}
    assert [h.effective for h in rig.engine("d1").holds] == [False]
    assert rig.fleet.view(now=rig.now).not_ready == ""
    assert len(rig.records(EventKind.LAST_ENGINE_KEPT)) == 1
    rig.answer_step(only(effects, ProbeInference), Outcome.HTTP_429, None)
    rig.readmit("d2")
    assert rig.engine("d2").phases == {D}
    assert rig.engine("d1").phases == set()
    assert [h.effective for h in rig.engine("d1").holds] == [True]


@pytest.mark.rule("H3")
@pytest.mark.case("C9", "D1")
def test_a_confirmed_failure_takes_the_last_engine_and_recovery_goes_on() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), liveness_every=0)
    rig.report("p", Outcome.REFUSED, count=3)
    assert rig.fleet.view(now=rig.now).not_ready == "no eligible engines"
    assert rig.fleet.placement(now=rig.now).closed == ""
    assert rig.fleet.placement(now=rig.now).engines["d"].phases == {D}
    rig.report("d", Outcome.REFUSED, count=3)
    rig.readmit("p")  # the one is the other's only peer: they are tried with each other, and return together
    assert rig.holds("p") == rig.holds("d") == set()
    assert rig.fleet.view(now=rig.now).not_ready == ""


def test_placement_shows_engines_in_the_files_order_with_their_holds() -> None:
    rig = Rig(decode("b"), prefill("c"), decode("a"))
    rig.report("a", Outcome.REFUSED, count=3)
    content = rig.fleet.placement(now=rig.now)
    assert list(content.engines) == ["b", "c", "a"]
    assert content.engines["a"].holds == (Hold.EJECTED,)
    assert (content.engines["b"].url, content.engines["b"].incarnation) == ("http://b", 1)


def test_placement_is_the_same_object_while_nothing_changes() -> None:
    rig = Rig(prefill("p"), decode("d"))
    first = rig.fleet.placement(now=rig.now)
    rig.report("d", Outcome.STREAM_COMPLETE)
    rig.now += 100
    assert rig.fleet.placement(now=rig.now) is first


# --- what is published when -----------------------------------------------------------------------------------------


def content_of(*candidates: Candidate, incarnation: int = 2) -> PlacementContent:
    served = cover(candidates)
    entries = {
        c.id: EngineEntry(id=c.id, url="http://x", role=c.role, phases=served[c.id], incarnation=incarnation)
        for c in candidates
    }
    return PlacementContent(closed="", engines=entries, candidates=candidates)


def published(content: PlacementContent, stored: dict[str, int]) -> dict[str, set[Phase]]:
    return {name: set(e.phases) for name, e in publishable(content, stored).engines.items()}


@pytest.mark.rule("P2")
def test_an_engine_is_put_in_only_once_its_incarnation_is_stored() -> None:
    content = content_of(at("p", P), at("d1", D), at("d2", D))
    assert publishable(content, {"p": 2, "d1": 2, "d2": 2}) is content
    assert published(content, {"p": 2, "d1": 2, "d2": 1}) == {"p": {P}, "d1": {D}, "d2": NONE}
    assert published(content, {"p": 2, "d1": 2}) == {"p": {P}, "d1": {D}, "d2": NONE}
    assert published(content, {}) == {"p": NONE, "d1": NONE, "d2": NONE}


@pytest.mark.rule("P2", "H2")
def test_whoever_stood_in_goes_on_until_then() -> None:
    """d1 is suspect and the last; d2 returns: until that is stored, d1 serves on."""
    content = content_of(at("p", P), at("d1", D, soft=1.0), at("d2", D))
    assert published(content, {"p": 2, "d1": 2, "d2": 2}) == {"p": {P}, "d1": NONE, "d2": {D}}
    assert published(content, {"p": 2, "d1": 2, "d2": 1}) == {"p": {P}, "d1": {D}, "d2": NONE}
    fallback = content_of(at("p", P, pinned=False), at("d", D))
    assert published(fallback, {"p": 2, "d": 1}) == {"p": BOTH, "d": NONE}


@pytest.mark.rule("P2")
def test_one_that_was_never_admitted_waits_for_nothing() -> None:
    content = content_of(at("p", P, hard=True), at("d", D, hard=True), incarnation=0)
    assert publishable(content, {}) is content


@pytest.mark.rule("P2")
def test_taking_out_waits_for_nothing() -> None:
    rig = Rig(prefill("p"), decode("d1"), decode("d2"))
    stored = rig.fleet.incarnations()
    rig.report("d1", Outcome.REFUSED, count=3)
    assert published(rig.fleet.placement(now=rig.now), stored)["d1"] == NONE
    rig.readmit("d1")
    assert published(rig.fleet.placement(now=rig.now), stored)["d1"] == NONE
    assert {e.id: set(e.phases) for e in rig.fleet.view(now=rig.now, stored=stored).engines}["d1"] == NONE
    assert published(rig.fleet.placement(now=rig.now), rig.fleet.incarnations())["d1"] == {D}


def test_an_entry_in_quarantine_that_waits_promises_nothing_for_later() -> None:
    content = content_of(at("d1", D, soft=1.0), at("d2", D))
    quarantined = EngineEntry(
        id="d1",
        url="http://x",
        role=D,
        phases=frozenset(),
        incarnation=2,
        quarantine_due=9.0,
        phases_after_quarantine=frozenset({D}),
    )
    content = PlacementContent(closed="", engines={**content.engines, "d1": quarantined}, candidates=content.candidates)
    assert publishable(content, {"d1": 2, "d2": 1}).engines["d1"].phases_after_quarantine == {D}
    assert publishable(content, {"d1": 1, "d2": 2}).engines["d1"].phases_after_quarantine == NONE


# --- one record's transitions ---------------------------------------------------------------------------------------


def in_service() -> Engine:
    engine = joining(decode("d"), now=0.0)
    engine.admit(identity=None, ramp_s=0.0, now=0.0)
    return engine


def ejected() -> Engine:
    engine = in_service()
    engine.eject("broken", now=1.0)
    return engine


def snapshot(engine: Engine) -> tuple[object, ...]:
    revisions = engine.changes.decided, engine.changes.counted
    return (dict(engine.holds), engine.incarnation, revisions, engine.admitted_at, engine.ramp)


def do(engine: Engine, move: Move) -> None:
    match move:
        case Move.ADMIT:
            engine.admit(identity=None, ramp_s=0.0, now=2.0)
        case Move.EJECT:
            engine.eject("broken", now=2.0)
        case Move.REJOIN:
            engine.rejoin(decode("d"), "moved", now=2.0)


@pytest.mark.parametrize(
    ("standing", "legal"),
    [
        ("joining", {Move.ADMIT}),
        ("in service", {Move.EJECT, Move.REJOIN}),
        ("ejected", {Move.ADMIT, Move.REJOIN}),
    ],
)
@pytest.mark.parametrize("move", Move)
def test_an_illegal_move_raises_and_changes_nothing(standing: str, legal: set[Move], move: Move) -> None:
    engine = {"joining": joining(decode("d"), now=0.0), "in service": in_service(), "ejected": ejected()}[standing]
    assert engine.standing == standing
    before = snapshot(engine)
    if move in legal:
        do(engine, move)
        assert snapshot(engine) != before
        return
    with pytest.raises(IllegalTransitionError):
        do(engine, move)
    assert snapshot(engine) == before


def test_holds_that_are_a_standing_are_neither_placed_nor_lifted_and_deadlines_lie_ahead() -> None:
    engine = in_service()
    before = snapshot(engine)
    for kind, due in ((Hold.EJECTED, None), (Hold.JOINING, None), (Hold.QUARANTINE, 1.0)):
        with pytest.raises(IllegalTransitionError):
            engine.place(kind, "x", now=1.0, due=due)
    for kind in (Hold.EJECTED, Hold.DRIFT):
        with pytest.raises(IllegalTransitionError):
            engine.lift(kind)
    assert snapshot(engine) == before


def test_admission_is_a_new_incarnation_with_nothing_against_it() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0)
    rig.report("d", Outcome.HTTP_5XX, count=2)
    rig.report("d", Outcome.REFUSED, count=3)
    rig.readmit("d")
    assert rig.streaks("d") == {}
    assert rig.fleet.incarnations() == {"p": 1, "d": 2}
    rig.report("d", Outcome.REFUSED, count=3, incarnation=1)
    assert rig.streaks("d") == {}


# --- the ramp -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R10")
def test_a_readmitted_engine_takes_work_gradually() -> None:
    rig = Rig(prefill("p"), decode("d"), ramp_s=30.0)
    seen = []
    for _ in range(32):
        seen.append((rig.now - 1000, rig.fleet.placement(now=rig.now).engines["d"].weight))
        rig.now += 1
    assert seen[0] == (0, 0.1)
    assert dict(seen)[29] == 0.9
    assert dict(seen)[30] == 1.0
    weights = [w for _, w in seen]
    assert weights == sorted(weights)
    assert set(weights) == {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0}


@pytest.mark.rule("R10")
def test_each_step_of_the_ramp_wakes_the_loop_once() -> None:
    rig = Rig(prefill("p"), decode("d"), ramp_s=30.0, liveness_every=0)
    wakes = 0
    while (due := rig.fleet.next_due()) is not None:
        assert due > rig.now
        rig.now = due
        rig.send(Woke())
        wakes += 1
        assert wakes <= 9
    assert wakes == 9
    assert rig.engine("d").weight == 1.0


@pytest.mark.rule("R10", "P1")
def test_engines_that_return_one_after_the_other_rise_together() -> None:
    """Each step is a placement version to every proxy: 300 engines would make 90 of them a second."""
    instants = {at for back in range(300) for at, _ in ramp_from(1000.0 + back * 0.013, 30.0)}
    assert len(instants) <= 2 * (30 + 4 + 1)
    for start in (1000.0, 1000.2, 1234.567):
        steps = ramp_from(start, 30.0)
        assert steps[-1][1] == 1.0
        assert start + 30.0 <= steps[-1][0] <= start + 30.5


def test_no_ramp_when_it_is_off() -> None:
    assert ramp_from(0.0, 0.0) == ()
    rig = Rig(prefill("p"), decode("d"), ramp_s=0.0)
    assert rig.engine("d").weight == 1.0
    assert of(rig.effects, ProbeInference) == []
