"""`narwhalctl role` and `roles`."""

import pytest

from narwhal._pb import fleet_pb2, placement_pb2
from tests.cli.conftest import Run
from tests.cli.fake_control import FakeControl
from tests.cli.fleets import roles, wounded
from tests.cli.test_looks import golden

MOVED = "engine prefill-1 now has the role decode (operator: asked for by an operator)"


@pytest.fixture(autouse=True)
def fleet(control: FakeControl) -> None:
    control.status = wounded()


def test_roles_says_what_is_decided_and_why(run: Run) -> None:
    ran = run("roles")
    assert (ran.code, ran.out, ran.err) == (0, golden("roles"), "")


def test_roles_wide_has_everything(run: Run) -> None:
    assert run("roles", "-o", "wide").out == golden("roles-wide")


def test_roles_says_why_nobody_changes(run: Run, control: FakeControl) -> None:
    control.status.roles.ClearField("proposal")
    control.status.roles.why_not = "prefill: load 0.31, wants an engine from 1.00"
    first = run("roles").out.splitlines()[0]
    assert first == "advisory: nobody changes: prefill: load 0.31, wants an engine from 1.00"


def test_in_auto_it_has_been_done(run: Run, control: FakeControl) -> None:
    control.status.roles.mode = "auto"
    assert run("roles").out.startswith("auto: prefill-1 now has the role decode (load: ")
    (line,) = [x for x in run("status").out.splitlines() if x.startswith("roles")]
    assert line == "roles     auto, load of prefill 0.31, decode 1.20: prefill-1 moved to decode"


def test_roles_json_has_every_fact_under_its_documented_key(run: Run) -> None:
    facts = run("roles", "-o", "json").json
    assert facts["fleet"] == "demo"
    assert [engine["id"] for engine in facts["engines"]] == ["prefill-0", "decode-0", "decode-1"]
    reason = roles().proposal.reason
    prefill, decode = facts["roles"].pop("roles")
    assert facts["roles"] == {
        "mode": "advisory",
        "proposal": {"engine": "prefill-1", "to": "decode", "cause": "load", "reason": reason},
        "why_not": "",
    }
    assert prefill == {
        "role": "prefill",
        "engines": 1,
        "floor": 1,
        "load": 0.31,
        "latency": 0.29,
        "first_s": 0.58,
        "step_s": None,
        "wait_s": 0.0004,
        "prompt_tokens": 812.3,
        "output_tokens": None,
        "queue_s": 0.62,
        "waiting": 3,
        "busy": 0.31,
        "above": 0,
        "gave_age_s": 44.0,
        "risks": [{"kind": "target missed", "count": 2, "age_s": 41.0, "blocks_s": 19.0}],
    }
    assert (decode["above"], decode["gave_age_s"], decode["risks"]) == (4, None, [])


def test_a_control_process_that_says_nothing_of_roles_is_shown_all_the_same(run: Run, control: FakeControl) -> None:
    control.status.ClearField("roles")
    assert "roles     not known" in run("status").out


@pytest.mark.rule("C1")
@pytest.mark.parametrize(
    ("word", "phase"), [("decode", placement_pb2.PHASE_DECODE), ("prefill", placement_pb2.PHASE_PREFILL)]
)
def test_role_asks_for_it_and_says_what_it_brought_about(
    run: Run, control: FakeControl, word: str, phase: placement_pb2.Phase
) -> None:
    control.told = [MOVED]
    ran = run("role", "prefill-1", word)
    assert (ran.code, ran.out, ran.err) == (0, f"{MOVED}\n", "")
    assert control.roles == [fleet_pb2.SetRoleRequest(engine_id="prefill-1", role=phase)]


def test_a_dry_run_of_a_role_says_that_nothing_was_changed(run: Run, control: FakeControl) -> None:
    control.told = [MOVED]
    ran = run("role", "prefill-1", "decode", "--dry-run")
    assert (ran.code, ran.out) == (0, f"nothing was changed; without --dry-run:\n{MOVED}\n")
    assert control.roles[0].dry_run


def test_role_takes_no_other_word(run: Run, control: FakeControl) -> None:
    ran = run("role", "prefill-1", "both")
    assert ran.code == 2
    assert control.roles == []


def test_role_json(run: Run, control: FakeControl) -> None:
    control.told = [MOVED]
    ran = run("role", "prefill-1", "decode", "-o", "json")
    assert ran.json == {"engine": "prefill-1", "dry_run": False, "told": [MOVED]}
