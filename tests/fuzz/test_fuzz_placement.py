"""Placement from a hostile or broken control process: refused with a reason, or one that a proxy can choose by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal import wire
from narwhal._pb import placement_pb2
from narwhal.placement import Placement
from narwhal.proxy.held import Held, Refused
from narwhal.vocabulary import Phase
from narwhal.wire import WireError
from tests.fuzz.messages import fuzz, messages

NOW = 1000.0
DRAWS = st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)


def serves(held: Held, draws: tuple[float, float]) -> None:
    """A placement that was applied is one that legs can be placed by, now and when every quarantine is over."""
    placement = held.placement
    assert placement is not None
    for now in (NOW, NOW + 1e9):
        for phase in Phase:
            able = {e.id for e in placement.candidates(phase, now=now)}
            chosen = placement.choose(phase, now=now, load={}, draws=draws)
            assert (chosen is None) == (not able)
            assert chosen is None or chosen.id in able
    held.not_ready(now=NOW, max_age_s=600.0)


@pytest.mark.rule("P5", "P6")
@pytest.mark.case("D9")
@fuzz
@given(st.lists(messages(placement_pb2.Snapshot), min_size=1, max_size=3), DRAWS)
def test_any_snapshot_is_refused_or_one_to_serve_by(
    snapshots: list[placement_pb2.Snapshot], draws: tuple[float, float]
) -> None:
    held = Held()
    for message in snapshots:
        before = held.placement
        try:
            held.offer(wire.snapshot_from_wire(message, now=NOW), now=NOW)
        except (WireError, Refused):
            assert held.placement is before
        else:
            serves(held, draws)


@pytest.mark.rule("P5", "P6")
@pytest.mark.case("D9")
@fuzz
@given(messages(placement_pb2.Snapshot), st.lists(messages(placement_pb2.Change), min_size=1, max_size=3))
def test_any_change_is_refused_or_one_to_serve_by(
    snapshot: placement_pb2.Snapshot, changes: list[placement_pb2.Change]
) -> None:
    held = Held()
    try:
        held.offer(wire.snapshot_from_wire(snapshot, now=NOW), now=NOW)
    except (WireError, Refused):
        held.offer(Placement(epoch=max(1, held.highest_epoch), version=1, closed="maintenance"), now=NOW)
    for message in changes:
        before = held.placement
        assert before is not None
        message.epoch, message.base_version = before.order
        try:
            held.offer(wire.apply_change(before, message, now=NOW), now=NOW)
        except (WireError, Refused):
            assert held.placement is before
        else:
            serves(held, (0.5, 0.5))
