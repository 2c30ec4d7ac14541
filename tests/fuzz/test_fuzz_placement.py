"""Placement from a hostile or broken control process: refused with a reason, or one that a proxy can choose by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal import wire
from narwhal._pb import placement_pb2
from narwhal.proxy.held import Held
from tests.fuzz.messages import fuzz, messages
from tests.fuzz.peers import NOW, change, offered

DRAWS = st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)


@pytest.mark.rule("P5", "P6")
@pytest.mark.case("D9")
@fuzz
@given(st.lists(messages(placement_pb2.Snapshot), min_size=1, max_size=3), DRAWS)
def test_any_snapshot_is_refused_or_one_to_serve_by(
    snapshots: list[placement_pb2.Snapshot], draws: tuple[float, float]
) -> None:
    held = Held()
    for message in snapshots:
        offered(held, lambda message=message: wire.snapshot_from_wire(message, now=NOW), draws)  # type: ignore[misc]


@pytest.mark.rule("P5", "P6")
@pytest.mark.case("D9")
@fuzz
@given(messages(placement_pb2.Snapshot), st.lists(messages(placement_pb2.Change), min_size=1, max_size=3))
def test_any_change_is_refused_or_one_to_serve_by(
    snapshot: placement_pb2.Snapshot, changes: list[placement_pb2.Change]
) -> None:
    held = Held()
    offered(held, lambda: wire.snapshot_from_wire(snapshot, now=NOW))
    for message in changes:
        change(held, message.SerializeToString())
