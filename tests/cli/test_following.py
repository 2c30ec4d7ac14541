"""`-f` and `events`: what is printed while things change, processes end and others take over."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from narwhal._pb import fleet_pb2, placement_pb2
from narwhal.cli import model
from narwhal.cli.commands.events import Journal
from tests.cli import fleets
from tests.cli.conftest import WAIT_S, Run, Running
from tests.cli.fake_control import FakeControl

Start = Callable[..., Running]
AT = 1_790_000_000.25  # 2026-09-21T14:13:20.250Z


def event(sequence: int, kind: str, message: str, *, engine: str = "", **fields: str) -> fleet_pb2.Event:
    return fleet_pb2.Event(sequence=sequence, at=AT, kind=kind, message=message, engine_id=engine, fields=fields)


def seen(sequence: int, at: float = AT) -> model.Event:
    return model.Event(sequence=sequence, at=at, kind="ready", message="", engine="", proxy="")


@pytest.fixture(autouse=True)
def fleet(control: FakeControl) -> None:
    control.status = fleets.wounded()
    control.tell(event(1, "engine_joined", "engine decode-0 joins", engine="decode-0"))
    control.tell(
        event(2, "engine_ejected", "engine decode-0 is ejected: refused", engine="decode-0", cause="connection")
    )
    control.tell(event(3, "ready", "ready"))


def test_events_are_one_line_each(run: Run) -> None:
    assert run("events").out == (
        "2026-09-21T14:13:20.250Z  #1     engine_joined         engine decode-0 joins\n"
        "2026-09-21T14:13:20.250Z  #2     engine_ejected        engine decode-0 is ejected: refused\n"
        "2026-09-21T14:13:20.250Z  #3     ready                 ready\n"
    )


def test_events_wide_adds_the_fields(run: Run) -> None:
    line = run("events", "-o", "wide").out.splitlines()[1]
    assert line.endswith("engine decode-0 is ejected: refused  engine=decode-0  cause=connection")


def test_events_json_is_an_object_a_line(run: Run) -> None:
    lines = run("events", "-o", "json").out.splitlines()
    assert json.loads(lines[1]) == {
        "time": "2026-09-21T14:13:20.250Z",
        "sequence": 2,
        "at": AT,
        "kind": "engine_ejected",
        "message": "engine decode-0 is ejected: refused",
        "engine": "decode-0",
        "proxy": "",
        "fields": {"cause": "connection"},
    }
    assert len(lines) == 3


def test_events_of_one_engine(run: Run) -> None:
    ran = run("events", "--engine", "decode-0")
    assert [line.split()[1] for line in ran.out.splitlines()] == ["#1", "#2"]
    assert ran.err == ""


def test_an_engine_that_the_fleet_does_not_have_is_pointed_out(run: Run) -> None:
    ran = run("events", "--engine", "decode-7")
    assert (ran.code, ran.out) == (0, "")
    assert ran.err == ("narwhalctl: fleet demo has no engine decode-7 now; it has prefill-0, decode-0, decode-1\n")


def test_events_since_a_sequence(run: Run) -> None:
    assert [line.split()[1] for line in run("events", "--since-seq", "2").out.splitlines()] == ["#3"]


def test_events_since_a_sequence_that_was_not_reached_are_all_that_there_are_and_it_says_so(run: Run) -> None:
    """Numbers begin anew with each control process: nothing that happened since is withheld."""
    ran = run("events", "--since-seq", "99")
    assert [line.split()[1] for line in ran.out.splitlines()] == ["#1", "#2", "#3"]
    words = "the process that leads has numbered no event 99 yet, as after a restart: all that it keeps follow"
    assert ran.err == f"narwhalctl: {words}\n"
    assert run("events", "--since-seq", "3").err == ""


def test_events_that_are_not_kept_any_more_are_counted(run: Run, control: FakeControl) -> None:
    control.tell(event(10, "ready", "ready"))
    ran = run("events")
    assert ran.err == "narwhalctl: 6 events before #10 are not kept any more\n"
    assert len(ran.out.splitlines()) == 4


def test_following_events_goes_on_after_a_takeover(control: FakeControl, start: Start) -> None:
    with FakeControl() as next_active:
        next_active.status = fleets.wounded()
        next_active.status.epoch = 4
        next_active.standby_of = control.address
        running = start("events", "-f", "--control", f"{control.address},{next_active.address}")
        assert [running.next().split()[1] for _ in range(3)] == ["#1", "#2", "#3"]
        control.tell(event(4, "not_ready", "not ready: no eligible engines"))
        assert running.next().endswith("not ready: no eligible engines")
        # The other process counts from 1 anew.
        next_active.tell(event(1, "control_active", "active under epoch 4"))
        next_active.standby_of = None
        control.stop()
        assert running.next().endswith("active under epoch 4")
        next_active.tell(event(2, "ready", "ready again"))
        assert running.next().endswith("ready again")
        notices = [running.next("err"), running.next("err")]
        assert notices[0].startswith(f"narwhalctl: {control.address}: ")
        assert notices[-1] == f"narwhalctl: following {next_active.address}, epoch 4"
        assert running.end(signal.SIGINT) == 130
    assert running.rest("out") == []
    assert next_active.asked_after == [0]


def test_following_notices_a_process_that_leads_no_more(control: FakeControl, start: Start) -> None:
    """Its stream stays open: only asking tells."""
    with FakeControl() as next_active:
        next_active.status = fleets.wounded()
        next_active.status.epoch = 4
        next_active.standby_of = control.address
        running = start("events", "-f", "--since-seq", "2", "--control", control.address)
        assert running.next().split()[1] == "#3"
        next_active.tell(event(1, "control_active", "active under epoch 4"))
        next_active.standby_of = None
        control.standby_of = next_active.address
        assert running.next().endswith("active under epoch 4")
        assert running.end(signal.SIGINT) == 130


def test_journal_shows_a_process_that_leads_again_only_once() -> None:
    journal = Journal(0)
    assert journal.resume(3) == 0
    assert [journal.take(seen(n)) for n in (1, 2)] == [(True, 0), (True, 0)]
    assert journal.resume(3) == 2
    # Fenced and active again: same process, same numbers, a new epoch.
    assert journal.resume(5) == 0
    assert [journal.take(seen(n)) for n in (1, 2, 3)] == [(False, 0), (False, 0), (True, 0)]
    # Another process: same numbers, other events.
    assert journal.resume(6) == 0
    assert journal.take(seen(1, at=AT + 60)) == (True, 0)


def test_journal_counts_gaps_but_not_the_unseen_past() -> None:
    journal = Journal(0)
    journal.resume(1)
    assert journal.take(seen(500)) == (True, 0)
    assert journal.take(seen(503)) == (True, 2)
    since = Journal(100)
    assert since.resume(1) == 100
    assert since.take(seen(104)) == (True, 3)


def test_journal_forgets_what_no_process_keeps() -> None:
    journal = Journal(0)
    journal.resume(1)
    for n in range(1, 5000):
        journal.take(seen(n))
    assert len(journal._shown) == 4096


def change(
    version: int, *engines: placement_pb2.EnginePlacement, closed: str = "", removed: tuple[str, ...] = ()
) -> placement_pb2.Change:
    return placement_pb2.Change(
        epoch=3, base_version=version - 1, version=version, closed=closed, engines=engines, removed=removed
    )


def publish_history(control: FakeControl) -> None:
    control.publish(snapshot=fleets.snapshot())
    control.publish(heartbeat={"epoch": 3, "version": 17})
    control.publish(change=change(18, fleets.placed("prefill-0", fleets.PREFILL, holds=("ejected",))))
    control.publish(change=change(19, closed="maintenance"))
    control.publish(change=change(20, fleets.placed("new", fleets.DECODE, fleets.DECODE), removed=("decode-0",)))


def test_following_placement_prints_what_changed_and_nothing_else(control: FakeControl, start: Start) -> None:
    publish_history(control)
    running = start("placement", "-f", "--control", control.address)
    assert running.next() == "placement 3.17: admission is open"
    table = [running.next().split()[0] for _ in range(3)]
    assert table == ["ENGINE", "prefill-0", "decode-0"]
    lines = [running.next().partition("Z  ")[2] for _ in range(5)]
    assert lines == [
        "3.18  prefill-0: serves prefill → nothing, holds none → ejected",
        "3.19  admission closed: maintenance",
        "3.20  admission open",
        "3.20  new: new, serves decode",
        "3.20  decode-0: gone",
    ]
    assert running.end(signal.SIGINT) == 130
    assert running.rest("err") == [""]  # the line that ^C is on


def test_following_placement_as_json_lines(control: FakeControl, start: Start) -> None:
    publish_history(control)
    running = start("-o", "json", "placement", "-f", "--control", control.address)
    first, held = json.loads(running.next()), json.loads(running.next())
    assert (first["version"], len(first["engines"])) == (17, 2)
    assert held == {
        "epoch": 3,
        "version": 18,
        "closed": "",
        "changes": [
            {"engine": "prefill-0", "field": "phases", "before": ["prefill"], "after": []},
            {"engine": "prefill-0", "field": "holds", "before": [], "after": ["ejected"]},
        ],
    }
    assert json.loads(running.next())["changes"] == [
        {"engine": "", "field": "closed", "before": "", "after": "maintenance"}
    ]
    running.end(signal.SIGINT)


def test_following_placement_over_a_takeover_shows_the_difference(control: FakeControl, start: Start) -> None:
    control.publish(snapshot=fleets.snapshot())
    with FakeControl() as next_active:
        next_active.status = fleets.wounded()
        next_active.status.epoch = 4
        next_active.standby_of = ""
        moved = fleets.snapshot(epoch=4, version=1)
        moved.engines[0].weight = 0.5
        next_active.publish(snapshot=moved)
        running = start("placement", "-f", "--control", f"{control.address},{next_active.address}")
        for _ in range(4):
            running.next()
        next_active.standby_of = None
        control.publish(farewell={"reason": "superseded"})
        assert running.next().endswith("4.1  epoch 3 → 4: another control process leads, or the same one anew")
        assert running.next().endswith("4.1  prefill-0: weight 1 → 0.5")
        assert running.next("err") == f"narwhalctl: {control.address}: ended the stream: superseded"
        running.end(signal.SIGINT)


def test_a_change_that_does_not_fit_brings_a_new_stream(control: FakeControl, start: Start) -> None:
    control.publish(snapshot=fleets.snapshot())
    running = start("placement", "-f", "--control", control.address)
    for _ in range(4):
        running.next()
    control._placements[:] = [placement_pb2.PlacementMessage(snapshot=fleets.snapshot(version=31))]
    control._placements.append(placement_pb2.PlacementMessage(change=change(40, closed="maintenance")))
    control._wake()
    assert "a change is based on placement 3.39, held is 3.17" in running.next("err")
    assert running.next().endswith("3.31  nothing that shows changed")
    running.end(signal.SIGINT)


def test_the_call_ends_with_the_command(control: FakeControl, run: Run) -> None:
    control.publish(snapshot=fleets.snapshot())
    run("placement")
    assert control.unwatched(WAIT_S)


@pytest.mark.parametrize("command", [["events"], ["status", "-o", "json"]])
def test_a_reader_that_leaves_ends_the_command_quietly(control: FakeControl, command: list[str]) -> None:
    for n in range(4, 3000):
        control.tell(event(n, "ready", "x" * 200))
    control.status.engines.extend([control.status.engines[0]] * 2000)
    process = subprocess.Popen(
        [sys.executable, "-c", "from narwhal.cli.main import main; main()", "--control", control.address, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Unbuffered, Python drops what a pipe did not take at once, and the reader's leave goes unnoticed.
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}, "PYTHONWARNINGS": "error"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(WAIT_S) == 141
    process.stderr.close()
