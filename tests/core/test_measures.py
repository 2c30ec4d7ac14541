"""Sketches: one scale for seconds and tokens, close enough to decide by, the same in whatever order they add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal import wire
from narwhal._pb import outcome_pb2
from narwhal.measures import LegMeasures, Measure, Sketch, together
from narwhal.reports import Batch, ProxyKey
from narwhal.vocabulary import Phase

KEY = ProxyKey(id="p", slot=0, boot=5)
VALUES = st.floats(0.0001, 100_000.0)


def sketch(*values: float) -> Sketch:
    made = Sketch()
    for value in values:
        made.add(value)
    return made


@given(st.lists(VALUES, min_size=1, max_size=40), st.sampled_from((0.0, 0.25, 0.5, 0.9, 1.0)))
def test_a_quantile_is_within_five_percent_of_the_exact_one(values: list[float], share: float) -> None:
    rank = max(1, -(-int(share * len(values) * 100) // 100))
    exact = sorted(values)[min(rank, len(values)) - 1]
    found = sketch(*values).quantile(share)
    assert found is not None
    assert exact / 1.05 <= found <= exact * 1.05


def test_nothing_counted_has_no_quantile() -> None:
    assert Sketch().quantile(0.5) is None


@given(st.lists(st.lists(VALUES, max_size=10), max_size=6))
def test_sketches_add_up_to_what_one_would_have_counted(parts: list[list[float]]) -> None:
    whole = sketch(*[value for part in parts for value in part])
    assert together(map(sketch_of, parts)) == whole == together(map(sketch_of, reversed(parts)))


def sketch_of(values: list[float]) -> Sketch:
    return sketch(*values)


def test_a_sketch_is_bounded_whatever_it_counts() -> None:
    made = Sketch()
    for n in range(-400, 400):
        for m in range(1, 10):
            made.add(m * 10.0 ** (n / 20))
    made.add(0.0)
    made.add(-1.0)
    assert len(made.counts) <= 38 * 8 + 1
    assert made.total == 7202


def test_measures_come_back_as_they_went() -> None:
    measures = (
        LegMeasures(
            engine="d1",
            phase=Phase.DECODE,
            incarnation=3,
            sketches={m: sketch(0.01, 0.5, 700.0) for m in Measure},
            waiting=7,
        ),
        LegMeasures(engine="p1", phase=Phase.PREFILL, incarnation=1),
    )
    batch = Batch(proxy=KEY, sequence=4, measures=measures, measured_s=1.25)
    data = wire.batch_to_wire(batch).SerializeToString()
    assert wire.batch_from_wire(outcome_pb2.ReportBatch.FromString(data)) == batch


def test_a_second_of_a_busy_engine_is_small_on_the_wire() -> None:
    made = {m: sketch(*[0.01 + n / 2500 for n in range(500)]) for m in Measure}
    measures = LegMeasures(engine="decode-1", phase=Phase.DECODE, incarnation=3, sketches=made)
    batch = Batch(proxy=KEY, sequence=4, measures=(measures,), measured_s=1.0)
    assert len(wire.batch_to_wire(batch).SerializeToString()) < 1000


@pytest.mark.parametrize(
    ("measures", "says"),
    [
        ({"phase": 0}, "unknown phase 0"),
        ({"step_s": {"buckets": [1, 2], "counts": [1]}}, "step_s and their counts do not fit"),
        ({"first_s": {"buckets": [1, 1], "counts": [1, 2]}}, "first_s and their counts do not fit"),
        ({"wait_s": {"buckets": [1], "counts": [0]}}, "counts less than one"),
        ({"prompt_tokens": {"buckets": [193], "counts": [1]}}, "outside the scale"),
        ({"output_tokens": {"buckets": [-113], "counts": [1]}}, "outside the scale"),
    ],
)
def test_measures_that_make_no_sense_are_refused(measures: dict[str, object], says: str) -> None:
    good = {"engine_id": "e", "phase": 1, "incarnation": 1}
    message = outcome_pb2.ReportBatch(sequence=1, measures=[outcome_pb2.LegMeasures(**{**good, **measures})])  # type: ignore[arg-type]
    message.proxy.id, message.proxy.boot = "p", 5
    with pytest.raises(wire.WireError, match=says):
        wire.batch_from_wire(message)


@pytest.mark.parametrize("span", [-1.0, float("nan"), float("inf")])
def test_a_span_that_makes_no_sense_is_refused(span: float) -> None:
    message = wire.batch_to_wire(Batch(proxy=KEY, sequence=1))
    message.measured_s = span
    with pytest.raises(wire.WireError, match="measuring cannot take"):
        wire.batch_from_wire(message)
