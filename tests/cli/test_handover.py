"""history and switchover: what they ask, print and exit with."""

from collections.abc import Iterator

import grpc
import pytest

from narwhal._pb import fleet_pb2
from tests.cli import fleets
from tests.cli.conftest import Run
from tests.cli.fake_control import FakeControl

EPOCHS = [
    fleet_pb2.EpochEntry(epoch=7, holder="c1", address="10.0.0.1:7400", ending="untold", reason="did not say"),
    fleet_pb2.EpochEntry(
        epoch=8,
        holder="c2",
        address="10.0.0.2:7400",
        began_at=1796011488.12,
        ended_at=1796011618.12,
        ending="stopped",
        reason="shutting down",
    ),
    fleet_pb2.EpochEntry(epoch=9, holder="c1", address="10.0.0.1:7400", began_at=1796011618.5, ending="lasts"),
]


@pytest.fixture(autouse=True)
def fleet(control: FakeControl) -> None:
    control.status = fleets.wounded()
    control.epochs = EPOCHS


@pytest.fixture
def heir(control: FakeControl) -> Iterator[FakeControl]:
    """The control process that stands by and leads next."""
    with FakeControl() as other:
        other.status = fleets.wounded()
        other.status.epoch, other.status.holder = 4, "c2"
        other.standby_of = control.address
        control.heir = other
        yield other


def test_history_is_a_row_an_epoch(run: Run) -> None:
    assert run("history").out == (
        "EPOCH  HOLDER  BEGAN                     LASTED  ENDED    WHY\n"
        "7      c1      -                         -       untold   did not say\n"
        "8      c2      2026-11-30T04:04:48.120Z  2m10s   stopped  shutting down\n"
        "9      c1      2026-11-30T04:06:58.500Z  -       lasts    -\n"
    )
    assert "8      c2      10.0.0.2:7400  2026" in run("history", "-o", "wide").out


def test_history_json(run: Run) -> None:
    first, second, third = run("history", "-o", "json").json["epochs"]
    assert (first["began_at"], first["ended_at"]) == (None, None)
    assert second == {
        "epoch": 8,
        "holder": "c2",
        "address": "10.0.0.2:7400",
        "began_at": 1796011488.12,
        "ended_at": 1796011618.12,
        "ending": "stopped",
        "reason": "shutting down",
    }
    assert third["ended_at"] is None


def test_a_switchover_ends_when_the_next_one_leads(run: Run, control: FakeControl, heir: FakeControl) -> None:
    ran = run("switchover")  # the standby's address is not given: the active names it
    assert ran.code == 0
    assert ran.out.startswith(f"c2 at {heir.address} leads under epoch 4, epoch 3 is over (took ")
    (asked,) = control.yields
    assert (asked.operator, asked.standby, asked.dry_run) == (True, "", False)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_switchover_to_who_leads_already_is_done(run: Run, control: FakeControl, more: list[str]) -> None:
    ran = run("switchover", "--to", "c1", *more)
    words = f"c1 at {control.address} leads already, under epoch 3: nothing to do\n"
    assert (ran.code, ran.out, ran.err) == (0, words, "")
    facts = run("switchover", "--to", "c1", "-o", "json", *more).json
    assert (facts["before"], facts["epoch"], facts["holder"], facts["dry_run"]) == (3, 3, "c1", bool(more))
    assert not control.yields


def test_a_switchover_to_one_by_name_as_json(run: Run, control: FakeControl, heir: FakeControl) -> None:
    facts = run("switchover", "--to", "c2", "-o", "json").json
    assert facts.pop("took_s") > 0
    assert facts == {"dry_run": False, "before": 3, "epoch": 4, "holder": "c2", "address": heir.address}
    assert control.yields[0].standby == "c2"


def test_a_dry_run_changes_nothing(run: Run, control: FakeControl, heir: FakeControl) -> None:
    ran = run("switchover", "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"nothing was changed; without --dry-run:\nc2 at {heir.address} leads instead of epoch 3\n"
    assert control.yields[0].dry_run
    assert control.standby_of is None


def test_a_refusal_is_a_no_in_the_words_of_control(run: Run, control: FakeControl) -> None:
    control.command_error, control.told = grpc.StatusCode.FAILED_PRECONDITION, ["no standby is there"]
    ran = run("switchover")
    assert (ran.code, ran.out, ran.err) == (1, "", "narwhalctl: no standby is there\n")


def test_when_nobody_leads_afterwards_it_says_so(
    run: Run, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narwhal.cli.reach.NEXT_S", 0.5)
    ran = run("switchover")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == "narwhalctl: epoch 3 is over, and nobody leads after 0.5 s: see narwhalctl status\n"


def test_what_is_not_known_to_be_done_is_not_asked_for_twice(run: Run, control: FakeControl) -> None:
    control.command_error, control.told = grpc.StatusCode.UNAVAILABLE, ["leads no more"]
    ran = run("switchover")
    assert (ran.code, len(control.yields)) == (3, 1)
    assert "it may have been done all the same" in ran.err


def test_status_tells_of_standbys_and_whether_they_could_lead(run: Run, control: FakeControl) -> None:
    control.status.standbys.extend(
        [
            fleet_pb2.StandbyStatus(holder="c2", address="10.0.0.2:7400", copy_epoch=3, copy_age_s=0.42),
            fleet_pb2.StandbyStatus(holder="c3", address="10.0.0.3:7400", copy_epoch=3, problem="other engines"),
            fleet_pb2.StandbyStatus(holder="c4", address="10.0.0.4:7400"),
        ]
    )
    out = run("status").out
    assert "\nstandby   c2 at 10.0.0.2:7400, ready to lead, its copy is 420ms old\n" in out
    assert "\nstandby   c3 at 10.0.0.3:7400, would not take over: other engines\n" in out
    assert "\nstandby   c4 at 10.0.0.4:7400, has no copy of the state handoff yet\n" in out
    (first, *_) = run("status", "-o", "json").json["standbys"]
    assert first == {
        "holder": "c2",
        "address": "10.0.0.2:7400",
        "copy_epoch": 3,
        "copy_age_s": 0.42,
        "problem": "",
        "silent_s": 0.0,
    }
