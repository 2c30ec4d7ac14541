"""protobuf ⇄ values: nothing is lost, nonsense is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal import wire
from narwhal._pb import outcome_pb2, placement_pb2
from narwhal.placement import EngineEntry, Placement
from narwhal.reports import Batch, LegFailure, ProxyKey, RequestCounts, Run
from narwhal.vocabulary import Hold, Outcome, Phase

KEY = ProxyKey(id="proxy-a", slot=1, boot=1_700_000_000_000_000)
NAMES = st.sampled_from(["e1", "e2", "e3", "e4"])
PHASE_SETS = st.frozensets(st.sampled_from(Phase))
COUNTS = st.integers(0, 2**40)

entries = st.builds(
    EngineEntry,
    id=NAMES,
    url=st.just("http://127.0.0.1:8100"),
    role=st.sampled_from(Phase),
    phases=PHASE_SETS,
    incarnation=st.integers(0, 2**40),
    weight=st.floats(0.01, 1.0),
    pinned=st.booleans(),
    holds=st.lists(st.sampled_from(Hold), unique=True).map(tuple),
    quarantine_due=st.none() | st.integers(100, 400).map(float),
    phases_after_quarantine=PHASE_SETS,
    max_inflight=st.integers(0, 1000),
    max_inflight_tokens=st.integers(0, 10**6),
)
fleets = st.lists(entries, unique_by=lambda e: e.id).map(lambda found: {e.id: e for e in found})
failures = st.builds(
    LegFailure,
    outcome=st.just(Outcome.HTTP_5XX),
    producer=st.sampled_from(["", "e1"]),
    producer_incarnation=st.integers(0, 9),
    status=st.just(500),
    detail=st.text(max_size=40),
    request_id=st.text(max_size=10),
    elapsed_s=st.floats(0, 600),
    engine_silent=st.booleans(),
)
runs = st.builds(
    Run,
    engine=NAMES,
    phase=st.sampled_from(Phase),
    incarnation=st.integers(0, 9),
    outcome=st.sampled_from(Outcome),
    count=st.integers(1, 2**40),
) | st.builds(
    lambda failure, engine: Run(
        engine=engine, phase=Phase.DECODE, incarnation=2, outcome=failure.outcome, failure=failure
    ),
    failures,
    NAMES,
)


@given(fleets, st.integers(1, 99), st.integers(1, 99), st.sampled_from(["", "maintenance"]))
def test_a_snapshot_comes_back_as_it_went(fleet: dict[str, EngineEntry], epoch: int, version: int, closed: str) -> None:
    placement = Placement(epoch=epoch, version=version, closed=closed, engines=fleet)
    data = wire.snapshot_to_wire(placement, now=100.0).SerializeToString()
    back = wire.snapshot_from_wire(placement_pb2.Snapshot.FromString(data), now=100.0)
    assert back.same_content(placement)
    assert back.order == placement.order


def test_quarantine_travels_as_remaining_time() -> None:
    entry = EngineEntry(
        id="e1", url="http://e", role=Phase.DECODE, phases=frozenset(), incarnation=1, quarantine_due=112.5
    )
    message = wire.engine_to_wire(entry, now=100.0)
    assert message.quarantine_remaining_s == 12.5
    assert wire.engine_from_wire(message, now=5000.0).quarantine_due == 5012.5


@given(fleets, fleets)
def test_a_change_leads_from_one_placement_to_the_next(
    before: dict[str, EngineEntry], after: dict[str, EngineEntry]
) -> None:
    base = Placement(epoch=3, version=7, engines=before)
    target = Placement(epoch=3, version=8, closed="maintenance", engines=after)
    change = placement_pb2.Change.FromString(wire.change_to_wire(base, target, now=0.0).SerializeToString())
    assert wire.apply_change(base, change, now=0.0).same_content(target)


@pytest.mark.rule("P1")
@pytest.mark.parametrize(("epoch", "version"), [(3, 6), (2, 7), (4, 7)])
def test_a_change_on_another_base_is_refused(epoch: int, version: int) -> None:
    change = placement_pb2.Change(epoch=3, base_version=7, version=8)
    with pytest.raises(wire.WireError, match=rf"based on 3\.7, placement held is {epoch}\.{version}"):
        wire.apply_change(Placement(epoch=epoch, version=version), change, now=0.0)
    with pytest.raises(wire.WireError, match="placement held is none"):
        wire.apply_change(None, change, now=0.0)


@pytest.mark.case("D9")
@pytest.mark.parametrize(
    ("engines", "says"),
    [
        ([{"id": "", "url": "http://e"}], "needs an id"),
        ([{"id": "e"}], "needs an id and a url"),
        ([{"id": "e", "url": "http://e", "weight": 0.0}], "weight"),
        ([{"id": "e", "url": "http://e", "weight": float("nan")}], "weight"),
        ([{"id": "e", "url": "http://e", "role": 9}], "unknown phase 9"),
        ([{"id": "e", "url": "http://e", "phases": [0]}], "unknown phase 0"),
        ([{"id": "e", "url": "http://e"}, {"id": "e", "url": "http://f"}], "listed twice"),
    ],
)
def test_a_strange_placement_is_refused_whole(engines: list[dict[str, object]], says: str) -> None:
    filled = [{"role": 1, "weight": 1.0, "incarnation": 1, **e} for e in engines]
    message = placement_pb2.Snapshot(epoch=1, version=1, engines=[placement_pb2.EnginePlacement(**e) for e in filled])  # type: ignore[arg-type]
    with pytest.raises(wire.WireError, match=says):
        wire.snapshot_from_wire(message, now=0.0)


def test_an_unknown_hold_is_passed_over() -> None:
    message = placement_pb2.EnginePlacement(
        id="e", url="http://e", role=placement_pb2.PHASE_DECODE, weight=1.0, holds=["drain", "from the future"]
    )
    assert wire.engine_from_wire(message, now=0.0).holds == (Hold.DRAIN,)


@pytest.mark.rule("S6")
@given(st.lists(runs, max_size=8).map(tuple), st.integers(1, 2**50), st.builds(RequestCounts, served=COUNTS))
def test_a_report_comes_back_as_it_went(found: tuple[Run, ...], sequence: int, counts: RequestCounts) -> None:
    batch = Batch(proxy=KEY, sequence=sequence, runs=found, requests=counts)
    data = wire.batch_to_wire(batch).SerializeToString()
    assert wire.batch_from_wire(outcome_pb2.ReportBatch.FromString(data)) == batch


CUT: dict[str, object] = {"engine_id": "e", "phase": 1, "outcome": 22, "count": 1}


def test_a_refusal_is_bounded_however_long_the_names_are_that_it_quotes() -> None:
    held = Placement(epoch=1, version=1, closed="maintenance")
    change = placement_pb2.Change(epoch=1, base_version=1, version=2, removed=["x" * 50_000])
    with pytest.raises(wire.WireError, match="change removes unknown engine x") as refused:
        wire.apply_change(held, change, now=0.0)
    assert len(str(refused.value)) == 1000


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"sequence": 0}, "sequence"),
        ({"proxy": {"id": "x" * 257, "boot": 1}}, "at most 256"),
        ({"proxy": {}}, "id and a boot"),
        ({"runs": [{"engine_id": "e", "phase": 1, "outcome": 0, "count": 1}]}, "unknown outcome 0"),
        ({"runs": [{"engine_id": "e", "phase": 1, "outcome": 99, "count": 1}]}, "unknown outcome 99"),
        ({"runs": [{"engine_id": "e", "phase": 0, "outcome": 1, "count": 1}]}, "unknown phase 0"),
        ({"runs": [{"engine_id": "e", "phase": 1, "outcome": 1, "count": 0}]}, "at least one"),
        ({"runs": [{"engine_id": "e", "phase": 1, "outcome": 22, "count": 2, "failure": {}}]}, "run of one"),
        # A journal that held one could not be replayed.
        *(
            ({"runs": [{**CUT, "failure": {"elapsed_s": took}}]}, f"a leg cannot take {took}")
            for took in (float("nan"), float("inf"), -1.0)
        ),
    ],
)
def test_a_report_that_makes_no_sense_is_refused(message: dict[str, object], says: str) -> None:
    good = {"proxy": {"id": "p", "slot": 0, "boot": 5}, "sequence": 1}
    with pytest.raises(wire.WireError, match=says):
        wire.batch_from_wire(outcome_pb2.ReportBatch(**{**good, **message}))  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_its_number(outcome: Outcome) -> None:
    run = Run(engine="e", phase=Phase.DECODE, incarnation=1, outcome=outcome)
    batch = Batch(proxy=KEY, sequence=1, runs=(run,))
    assert wire.batch_from_wire(wire.batch_to_wire(batch)).runs == (run,)
