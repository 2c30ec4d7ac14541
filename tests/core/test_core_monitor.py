"""The monitor's streak and readiness (spec M4–M7, M9)."""

import pytest

from narwhal.control.core.events import DrainCommand, PassEnded, StageFailure
from narwhal.control.core.monitor import Monitor
from narwhal.control.core.records import EventKind, Record
from narwhal.vocabulary import Outcome, Phase, Stage
from tests.core.rig import Rig, decode, prefill

DEGRADED = "monitoring degraded: liveness OSError"


def bad(*stages: Stage, error: str = "OSError") -> PassEnded:
    failures = tuple(StageFailure(stage=s, error_class=error, message="no") for s in stages)
    return PassEnded(failures=failures)


GOOD = PassEnded()


@pytest.mark.rule("M4")
def test_a_failed_pass_counts_once_however_many_stages_failed() -> None:
    rig = Rig(prefill("p"), decode("d"))
    rig.send(bad(Stage.LIVENESS, Stage.HANDOFF, Stage.DRAINS))
    assert rig.fleet.view(now=rig.now).monitor.streak == 1
    rig.send(bad(Stage.HANDOFF))
    assert rig.fleet.view(now=rig.now).monitor.streak == 2
    rig.send(GOOD)
    assert rig.fleet.view(now=rig.now).monitor.streak == 0
    assert rig.fleet.view(now=rig.now).monitor.passes == 3


@pytest.mark.rule("M5", "M9")
@pytest.mark.parametrize("limit", [1, 5])
def test_at_the_limit_admission_closes_and_the_reason_names_the_first_failing_stage(limit: int) -> None:
    rig = Rig(prefill("p"), decode("d"), monitor_failure_limit=limit)
    for _ in range(limit - 1):
        rig.send(bad(Stage.CONTROLLER, error="ValueError"))
    assert rig.fleet.view(now=rig.now).not_ready == ""
    rig.send(bad(Stage.LIVENESS, Stage.HANDOFF))
    view = rig.fleet.view(now=rig.now)
    assert (view.not_ready, view.closed, view.monitor.degraded) == (DEGRADED, DEGRADED, DEGRADED)
    content = rig.fleet.placement(now=rig.now)
    assert content.closed == DEGRADED
    assert content.engines["d"].phases == {Phase.DECODE}  # what was dispatched goes on, its retries too
    rig.send(bad(Stage.HANDOFF))  # the reason stays that of the pass that opened it
    assert rig.fleet.view(now=rig.now).not_ready == DEGRADED


@pytest.mark.rule("M6")
def test_one_good_pass_reopens() -> None:
    rig = Rig(prefill("p"), decode("d"), monitor_failure_limit=2)
    rig.send(bad(Stage.LIVENESS))
    rig.send(bad(Stage.LIVENESS))
    rig.send(GOOD)
    view = rig.fleet.view(now=rig.now)
    assert (view.not_ready, view.closed, view.monitor.streak) == ("", "", 0)
    assert rig.fleet.placement(now=rig.now).closed == ""
    assert [k for k in rig.kinds() if k.startswith("monitor")] == ["monitor_degraded", "monitor_recovered"]


@pytest.mark.rule("M2")
def test_errors_are_counted_per_stage_and_class_and_told_when_they_are_new() -> None:
    rig = Rig(prefill("p"), decode("d"))
    for _ in range(3):
        rig.send(bad(Stage.LIVENESS))
    rig.send(bad(Stage.LIVENESS, error="KeyError"))
    rig.now += 2
    errors = rig.fleet.view(now=rig.now).monitor.errors
    assert [(e.stage, e.error_class, e.count, e.message, e.age_s) for e in errors] == [
        (Stage.LIVENESS, "OSError", 3, "no", 2.0),
        (Stage.LIVENESS, "KeyError", 1, "no", 2.0),
    ]
    assert len(rig.records(EventKind.STAGE_FAILED)) == 2


@pytest.mark.rule("M7")
def test_a_takeover_starts_at_zero() -> None:
    rig = Rig(prefill("p"), decode("d"), monitor_failure_limit=2)
    for _ in range(2):
        rig.send(bad(Stage.LIVENESS))
    after = Rig(prefill("p"), decode("d"), saved=rig.saved())
    view = after.fleet.view(now=after.now)
    assert (view.monitor.streak, view.monitor.errors, view.not_ready) == (0, (), "")


@pytest.mark.rule("M9")
def test_the_order_of_the_reasons() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), monitor_failure_limit=1)
    rig.report("d", Outcome.REFUSED, count=3)
    assert rig.fleet.view(now=rig.now).not_ready == "no eligible engines"
    rig.send(DrainCommand(engines=("p", "d"), reason="", deadline_s=300.0, restart=True, wall=0.0))
    view = rig.fleet.view(now=rig.now)
    assert (view.not_ready, view.closed) == ("maintenance", "maintenance")
    rig.send(bad(Stage.LIVENESS))
    assert rig.fleet.view(now=rig.now).not_ready == DEGRADED


@pytest.mark.rule("M9", "P4")
def test_fallback_is_enough_to_be_ready() -> None:
    rig = Rig(prefill("p"), decode("d"))
    rig.report("d", Outcome.REFUSED, count=3)
    assert rig.fleet.view(now=rig.now).not_ready == ""
    assert rig.engine("p").phases == {Phase.PREFILL, Phase.DECODE}


def test_changes_of_readiness_are_told_once() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), liveness_every=0)
    assert rig.kinds().count(EventKind.READY) == 1
    rig.report("d", Outcome.REFUSED, count=3)
    for _ in range(5):
        rig.run_pass()
    assert rig.kinds().count(EventKind.NOT_READY) == 2  # before the first engine joined, and now


def told_by(monitor: Monitor, *passes: PassEnded) -> list[Record]:
    return [effect for ended in passes for effect in monitor.pass_ended(ended, now=0.0) if isinstance(effect, Record)]


def stage_failed(stage: str, error: str = "OSError") -> Record:
    message = f"stage {stage} failed: {error}: no"
    return Record(kind=EventKind.STAGE_FAILED, message=message, fields={"stage": stage, "class": error})


@pytest.mark.rule("M2", "M5", "M6")
def test_what_people_read_of_a_failing_monitor() -> None:
    monitor = Monitor(failure_limit=2)
    assert told_by(monitor, bad(Stage.LIVENESS, Stage.HANDOFF)) == [stage_failed("liveness"), stage_failed("handoff")]
    assert told_by(monitor, bad(Stage.LIVENESS)) == [
        Record(
            kind=EventKind.MONITOR_DEGRADED,
            message=f"{DEGRADED}, after 2 failed passes in a row; admission is closed",
            fields={"stage": "liveness", "class": "OSError"},
        )
    ]
    # The same failure after a pass without it is news again; that monitoring is degraded is none.
    assert told_by(monitor, bad(Stage.HANDOFF)) == [stage_failed("handoff")]
    recovered = Record(kind=EventKind.MONITOR_RECOVERED, message=f"recovered from {DEGRADED}")
    assert told_by(monitor, GOOD) == [recovered]
    assert monitor.degraded == ""
    assert told_by(monitor, GOOD, bad(Stage.HANDOFF)) == [stage_failed("handoff")]


@pytest.mark.rule("M5")
def test_another_limit_holds_from_the_next_pass_on() -> None:
    monitor = Monitor(failure_limit=5)
    told_by(monitor, bad(Stage.LIVENESS), bad(Stage.LIVENESS))
    monitor.configure(failure_limit=3)
    assert monitor.degraded == ""
    told_by(monitor, bad(Stage.LIVENESS))
    assert monitor.degraded == DEGRADED
