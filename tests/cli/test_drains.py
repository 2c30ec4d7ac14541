"""drain, undrain and `proxies forget`: what they ask, print and exit with."""

import signal
from collections.abc import Callable

import grpc
import pytest

from narwhal._pb import fleet_pb2
from tests.cli import fleets
from tests.cli.conftest import Run, Running
from tests.cli.fake_control import FakeControl

BEGUN = "engine decode-1: drain (new driver), to settle within 300 s; a newer process is asked for when it returns"
READY = "engine decode-1 is ready to stop"
TRIED = "engine decode-1 is to return: its gate is tried"
BACK = "engine decode-1 is back as incarnation 3"
WAITS = fleet_pb2.DrainProgress(told=[BEGUN], engines=[fleets.drained(settled=False)])
SETTLED = fleet_pb2.DrainProgress(told=[READY], engines=[fleets.drained(settled=True)])
LATE = fleet_pb2.DrainProgress(engines=[fleets.drained(settled=False, overdue=True)])


@pytest.fixture(autouse=True)
def fleet(control: FakeControl) -> None:
    control.status = fleets.wounded()
    control.proxies = fleets.proxies()


# --- drain ------------------------------------------------------------------------------------------------------------


def test_drain_returns_when_it_is_stored(run: Run, control: FakeControl) -> None:
    control.progress = [WAITS]
    ran = run("drain", "decode-1", "decode-1", "--reason", "new driver", "--deadline", "60", "--no-restart")
    assert (ran.code, ran.out, ran.err) == (0, f"{BEGUN}\n", "")
    (asked,) = control.drains
    assert list(asked.engine_ids) == ["decode-1"]
    assert (asked.all, asked.deadline_s, asked.reason, asked.no_restart) == (False, 60, "new driver", True)
    assert (asked.wait, asked.dry_run) == (False, False)


def test_drain_all(run: Run, control: FakeControl) -> None:
    control.progress = [WAITS]
    assert run("drain", "--all").code == 0
    (asked,) = control.drains
    assert (asked.all, list(asked.engine_ids), asked.deadline_s, asked.no_restart) == (True, [], 300, False)


@pytest.mark.case("H1")
def test_drain_waits_until_it_is_ready_to_stop_and_shows_how_it_goes(run: Run, control: FakeControl) -> None:
    control.progress = [WAITS, SETTLED]
    ran = run("drain", "decode-1", "--wait")
    assert (ran.code, ran.out) == (0, f"{BEGUN}\n{READY}\n")
    assert ran.err == (
        f"narwhalctl: {BEGUN}\nnarwhalctl: waits for decode-1: 2 legs of proxy edge/0\nnarwhalctl: {READY}\n"
    )
    assert control.drains[0].wait


@pytest.mark.rule("R4")
def test_a_wait_that_runs_out_is_a_no_that_says_what_is_waited_for(run: Run, control: FakeControl) -> None:
    control.progress = [WAITS, LATE]
    ran = run("drain", "decode-1", "--wait", "--deadline", "9")
    assert (ran.code, ran.out) == (1, f"{BEGUN}\n")
    words = "narwhalctl: not ready to stop within 9 s: decode-1 waits for 2 legs of proxy edge/0\n"
    assert ran.err.endswith(words)


def test_drain_json(run: Run, control: FakeControl) -> None:
    control.progress = [WAITS]
    assert run("drain", "decode-1", "-o", "json").json == {
        "engines": ["decode-1"],
        "dry_run": False,
        "told": [BEGUN],
        "settled": [],
        "waits_for": {"decode-1": ["2 legs of proxy edge/0"]},
    }


def test_a_dry_run_of_a_drain(run: Run, control: FakeControl) -> None:
    control.progress = [fleet_pb2.DrainProgress(told=[BEGUN])]
    ran = run("drain", "decode-1", "--wait", "--dry-run")
    assert (ran.code, ran.out, ran.err) == (0, f"nothing was changed; without --dry-run:\n{BEGUN}\n", "")
    assert control.drains[0].dry_run


@pytest.mark.rule("R5")
def test_a_wait_goes_on_at_another_control_process(control: FakeControl, start: Callable[..., Running]) -> None:
    """The process that the drain was told dies; another leads, and the drain with it."""
    control.progress = [WAITS]
    control.lasting.set()
    with FakeControl() as heir:
        heir.standby_of = control.address
        running = start("drain", "decode-1", "--wait", "--control", f"{control.address},{heir.address}")
        assert running.next("err") == f"narwhalctl: {BEGUN}"
        assert running.next("err") == "narwhalctl: waits for decode-1: 2 legs of proxy edge/0"
        heir.status = fleets.wounded()
        heir.status.engines[2].CopyFrom(fleets.drained(settled=True))
        heir.standby_of = None
        control.stop()
        assert running.next() == BEGUN
        assert running.next() == READY
        assert running.process.wait(60) == 0
        assert not heir.drains


@pytest.mark.rule("R4")
def test_one_may_wait_again_for_a_drain_that_was_begun_before(
    control: FakeControl, start: Callable[..., Running], run: Run
) -> None:
    """After ctrl-C, say. What was asked for then stands; that its deadline has passed does not end the waiting."""
    control.command_error, control.told = grpc.StatusCode.FAILED_PRECONDITION, ["already drained: decode-1"]
    refused = run("drain", "decode-1", "--wait")  # of an engine that is not drained a refusal is one
    assert (refused.code, refused.err) == (1, "narwhalctl: already drained: decode-1\n")
    control.status.engines[2].CopyFrom(fleets.drained(settled=False, overdue=True))
    running = start("drain", "decode-1", "--wait", "--control", control.address)
    again = "narwhalctl: drained already: that drain goes on as it was asked for, and is waited for"
    assert running.next("err") == again
    assert running.next("err") == f"narwhalctl: following {control.address}"
    assert running.next("err") == "narwhalctl: waits for decode-1: 2 legs of proxy edge/0"
    control.status.engines[2].CopyFrom(fleets.drained(settled=True))
    assert running.next() == READY
    assert running.process.wait(60) == 0
    control.status.engines[2].CopyFrom(fleets.drained(settled=False, overdue=True))
    late = run("drain", "decode-1", "--wait", "--deadline", "0.01")
    words = "narwhalctl: not ready to stop within 0.01 s: decode-1 waits for 2 legs of proxy edge/0\n"
    assert (late.code, late.err.endswith(words)) == (1, True)
    assert run("drain", "decode-1").code == 1  # without --wait there is nothing to do


def test_ctrl_c_ends_the_wait(control: FakeControl, start: Callable[..., Running]) -> None:
    control.progress = [WAITS]
    control.lasting.set()
    running = start("drain", "decode-1", "--wait", "--control", control.address)
    running.next("err")
    assert running.end(signal.SIGINT) == 130


# --- undrain ----------------------------------------------------------------------------------------------------------


def test_undrain_says_how_it_ended(run: Run, control: FakeControl) -> None:
    trying = fleet_pb2.UndrainProgress(
        told=[TRIED], engines=[fleets.drained(settled=True)], waits_for=["decode-1: check health under way"]
    )
    control.progress = [trying, fleet_pb2.UndrainProgress(told=[BACK], engines=[fleets.drained(settled=True)])]
    ran = run("undrain", "decode-1", "--wait")
    assert (ran.code, ran.out) == (0, f"{TRIED}\n{BACK}\n")
    assert ran.err == "narwhalctl: waits for decode-1: check health under way\n"
    (asked,) = control.undrains
    assert (list(asked.engine_ids), asked.all, asked.wait) == (["decode-1"], False, True)


@pytest.mark.rule("R5", "R6")
def test_a_failed_check_is_a_no_with_what_was_seen_of_every_engine(run: Run, control: FakeControl) -> None:
    control.failed_gates = {
        "decode-1": ("kv_transfer", "engine decode-1 stays drained: its check kv_transfer: fail: prefill-0→decode-1"),
        "prefill-0": ("kv_transfer", "engine prefill-0 stays drained: engine decode-1's check kv_transfer: fail"),
    }
    ran = run("undrain", "--all", "--except", "decode-0")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "".join(f"narwhalctl: {words}\n" for _, words in control.failed_gates.values())
    (asked,) = control.undrains
    assert (asked.all, list(asked.except_ids)) == (True, ["decode-0"])


def test_a_dry_run_of_a_return(run: Run, control: FakeControl) -> None:
    control.progress = [fleet_pb2.UndrainProgress(told=[TRIED])]
    ran = run("undrain", "decode-1", "--dry-run", "-o", "json")
    assert (ran.code, ran.json) == (0, {"engines": ["decode-1"], "dry_run": True, "told": [TRIED]})


# --- forget -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "id_", "slot"), [("edge", "edge", None), ("edge/1", "edge", 1), ("a/b", "a/b", None)]
)
def test_forget(run: Run, control: FakeControl, named: str, id_: str, slot: int | None) -> None:
    control.told = ["proxy edge/1 is forgotten (an operator says that it is gone)"]
    ran = run("proxies", "forget", named)
    assert (ran.code, ran.out) == (0, f"{control.told[0]}\n")
    (asked,) = control.forgotten
    assert (asked.id, asked.slot if asked.HasField("slot") else None) == (id_, slot)


# --- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("drain", "x"), ("undrain", "x"), ("proxies", "forget", "x")])
def test_a_refusal_is_a_no_in_the_words_of_control(run: Run, control: FakeControl, words: tuple[str, ...]) -> None:
    control.command_error, control.told = grpc.StatusCode.NOT_FOUND, ["no engine x in this fleet"]
    ran = run(*words)
    assert (ran.code, ran.out, ran.err) == (1, "", "narwhalctl: no engine x in this fleet\n")


@pytest.mark.parametrize("words", [("drain", "x"), ("undrain", "x"), ("proxies", "forget", "x")])
def test_what_was_not_done_is_asked_of_who_leads(run: Run, control: FakeControl, words: tuple[str, ...]) -> None:
    control.leads_no_more = 1
    control.progress = [WAITS] if words[0] == "drain" else []
    assert run(*words).code == 0
    assert len(control.drains) + len(control.undrains) + len(control.forgotten) == 2


@pytest.mark.parametrize("words", [("drain", "x"), ("undrain", "x"), ("proxies", "forget", "x")])
def test_what_may_have_been_done_is_not_asked_again(run: Run, control: FakeControl, words: tuple[str, ...]) -> None:
    control.command_error, control.told = grpc.StatusCode.UNAVAILABLE, ["leads no more"]
    ran = run(*words)
    assert (ran.code, ran.out) == (3, "")
    assert "it may have been done all the same" in ran.err
    assert len(control.drains) + len(control.undrains) + len(control.forgotten) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("drain",), ("drain", "x", "--all"), ("drain", "x", "--deadline", "0"), ("drain", "x", "--deadline", "nan"),
        ("undrain",), ("undrain", "x", "--all"), ("undrain", "x", "--except", "y"), ("proxies", "forget"),
    ],
)  # fmt: skip
def test_usage(run: Run, control: FakeControl, words: tuple[str, ...]) -> None:
    assert run(*words).code == 2
    assert not control.drains + control.undrains


# --- how it looks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "state"),
    [
        (fleets.drained(settled=False), "3m55s to its deadline, waits for 2 legs of proxy edge/0"),
        (fleets.drained(settled=False, overdue=True), "drain overdue, waits for 2 legs of proxy edge/0"),
        (fleets.drained(settled=True), "ready to stop"),
    ],
)
def test_status_shows_how_far_a_drain_is(
    run: Run, control: FakeControl, engine: fleet_pb2.EngineStatus, state: str
) -> None:
    control.status.engines[2].CopyFrom(engine)
    out = run("status").out
    assert f"drain 1m05s: new driver; {state}\n" in out
    brief = {"3m55s": "not ready to stop", "drain": "overdue", "ready": "ready to stop"}[state.split(maxsplit=1)[0]]
    assert f"decode-1 (drain, {brief})" in out.splitlines()[0]


def test_wide_has_every_fact_of_a_drain(run: Run, control: FakeControl) -> None:
    control.status.engines[2].CopyFrom(fleets.drained(settled=True))
    out = run("engines", "-o", "wide").out
    assert "decode-1  0.32.0   2026-09-21T14:13:20.250Z\n" in out
    row = (
        "decode-1  drain  1m05s  3m55s        ready to stop  restarted  0.32.0   2026-09-21T14:13:20.250Z  new driver\n"
    )
    assert row in out
    drain = run("engines", "-o", "json").json["engines"][2]["drain"]
    assert drain["process"] == {"version": "0.32.0", "started_at": 1_790_000_000.25}
