"""The table of faults: every row can be asked for in both ways, does something, and says what."""

import ast
from pathlib import Path

import pytest

from narwhal.sim import faults
from narwhal.sim.faults import FaultSet, Hook
from narwhal.sim.misbehave import STREAM_EDITS
from narwhal.sim.records import RequestPhase

SIM = Path(faults.__file__).parent


@pytest.mark.parametrize("name", list(faults.ROWS))
def test_every_row_is_acted_on_somewhere(name: str) -> None:
    acting = ("misbehave.py", "engine.py", "transfer.py")
    words = {
        node.value
        for file in acting
        for node in ast.walk(ast.parse((SIM / file).read_text()))
        if isinstance(node, ast.Constant)
    }
    # These act by their hook alone: whatever else takes hold there is named.
    by_hook = {"status", "health-status", "bad-handoff", "reset-on-accept", "serve-fails"}
    by_hook |= {"first-transfer-fails", "transfer-fails"}
    assert name in words or name in by_hook


def test_every_stream_row_has_its_edit_and_the_reverse() -> None:
    assert {row.name for row in faults.TABLE if Hook.STREAM in row.hooks} == set(STREAM_EDITS)


@pytest.mark.parametrize(
    ("text", "mode", "params", "left", "for_s"),
    [
        ("hang", "hang", {}, None, None),
        ("stall=5", "stall", {"after": 5, "seconds": 0.0}, None, None),
        ("stall=5,seconds=1.5,count=2", "stall", {"after": 5, "seconds": 1.5}, 2, None),
        ("status=429,retry_after=7,for_s=3", "status",
         {"status": 429, "retry_after": "7", "everything": False, "message": ""}, None, 3.0),
        ("error-event=2,done=false", "error-event", {"after": 2, "code": 500, "done": False}, None, None),
    ],
)  # fmt: skip
def test_faults_as_text(text: str, mode: str, params: dict[str, object], left: int | None, for_s: float | None) -> None:
    fault = faults.parse(text)
    assert (fault.row.name, fault.params, fault.left, fault.for_s) == (mode, params, left, for_s)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nothing", "no fault is named 'nothing'"),
        ("hang=3", "takes no value"),
        ("stall=three", "after: must be a number"),
        ("stall=3,speed=1", "speed: fault stall has no such parameter"),
        ("stall=3,count=0", "count: must be at least 1"),
        ("stall=3,phase=lunch", "phase: must be one of"),
        ("cut=3,how=loud", "how: must be one of clean, reset"),
        ("bad-handoff=fine", "variant: must be one of"),
        ("stall=3,count", "expected key=value"),
        ("error-event,done=perhaps", "done: must be true or false"),
    ],
)
def test_bad_faults_are_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        faults.parse(text)


def test_a_counted_fault_is_used_up() -> None:
    active = FaultSet()
    active.add(faults.make("hang", {"count": 2}))
    taken = [len(active.take(Hook.ANSWER, RequestPhase.DECODE)) for _ in range(4)]
    assert taken == [1, 1, 0, 0]


def test_a_fault_of_one_phase_leaves_others_alone() -> None:
    active = FaultSet()
    active.add(faults.make("hang", {"phase": "prefill"}))
    assert [bool(active.take(Hook.ANSWER, phase)) for phase in (RequestPhase.DECODE, RequestPhase.PREFILL)] == [
        False,
        True,
    ]
    assert not active.take(Hook.ANSWER, RequestPhase.HEALTH)


def test_generation_faults_leave_health_alone_and_the_reverse() -> None:
    active = FaultSet()
    active.add(faults.make("status", {"status": 503}))
    assert not active.take(Hook.ANSWER, RequestPhase.HEALTH)
    active.add(faults.make("health-status", {"status": 404}))
    assert [fault.row.name for fault in active.take(Hook.ANSWER, RequestPhase.HEALTH)] == ["health-status"]
    active.add(faults.make("status", {"status": 401, "everything": True}))
    assert {fault.params["status"] for fault in active.take(Hook.ANSWER, RequestPhase.HEALTH)} == {404, 401}


def test_the_same_fault_again_replaces_the_first_unless_it_names_another_peer() -> None:
    active = FaultSet()
    active.add(faults.make("stall", {"after": 1}))
    active.add(faults.make("stall", {"after": 2}))
    assert [fault.params["after"] for fault in active.active] == [2]
    active.add(faults.make("transfer-fails", {"peer": "a"}))
    active.add(faults.make("transfer-fails", {"peer": "b"}))
    assert [bool(active.take(Hook.PULL, peer=peer)) for peer in "abc"] == [True, True, False]


def test_a_first_transfer_fault_strikes_each_peer_once() -> None:
    active = FaultSet()
    active.add(faults.make("first-transfer-fails", {}))
    assert [len(active.take(Hook.PULL, peer=peer)) for peer in ("a", "a", "b", "b")] == [1, 0, 1, 0]


def test_the_listing_has_every_row_with_its_parameters() -> None:
    text, table = faults.lines(), faults.lines("markdown")
    assert [line.split()[0] for line in text] == list(faults.ROWS)
    assert [line.split("`")[1] for line in table[2:]] == list(faults.ROWS)
    assert "after=3" in next(line for line in text if line.startswith("stall"))
