"""The monitor's passes, and what failing ones do to a whole control process."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from narwhal.clock import Clock, RealClock
from narwhal.control.core.effects import Effect
from narwhal.control.core.events import Input, ProxyNacked, StageFailure
from narwhal.control.leader import stage_runners
from narwhal.control.loop import ControlLoop
from narwhal.control.monitor import Monitor, Runner
from narwhal.vocabulary import Phase, Stage
from tests.contract.control_kit import (
    ROLES,
    Control,
    Proxy,
    batch,
    control,
    engines,
    soon,
    until,
    until_answer,
    with_engines,
)
from tests.contract.model_store import Medium

ORDER = ["controller", "health", "drains", "rollover", "readmission", "liveness", "telemetry", "handoff"]


class Passes:
    """A monitor whose stages do as told."""

    def __init__(self, *, timeout_s: float = 5.0, interval_s: float = 0.01, clock: Clock | None = None) -> None:
        self.ran: list[str] = []
        self.ended: list[tuple[StageFailure, ...]] = []
        self.faults: dict[Stage, Callable[[], Awaitable[None]]] = {}
        self.monitor = Monitor(
            {stage: self._runner(stage) for stage in Stage},
            interval_s=interval_s,
            timeout_s=timeout_s,
            clock=clock or RealClock(),
            ended=lambda failures, _took: self.ended.append(failures),
        )

    def _runner(self, stage: Stage) -> Runner:
        async def run() -> None:
            self.ran.append(stage.value)
            if stage in self.faults:
                await self.faults[stage]()

        return run


async def boom() -> None:
    raise ZeroDivisionError("division by zero")


async def forever() -> None:
    await asyncio.sleep(3600)


async def deaf() -> None:
    """Ignores its cancellation."""
    until_at = asyncio.get_running_loop().time() + 0.3
    while asyncio.get_running_loop().time() < until_at:
        try:
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            continue


async def cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.rule("M1")
async def test_the_stages_of_a_pass_run_in_the_order_of_the_spec() -> None:
    passes = Passes()
    assert await passes.monitor.run_pass() == ()
    assert passes.ran == ORDER
    assert passes.ended == [()]


@pytest.mark.rule("M2")
@pytest.mark.parametrize("stage", ORDER)
async def test_an_exception_in_one_stage_is_told_and_the_others_still_run(stage: str) -> None:
    passes = Passes()
    passes.faults[Stage(stage)] = boom
    failure = StageFailure(stage=Stage(stage), error_class="ZeroDivisionError", message="division by zero")
    assert await passes.monitor.run_pass() == (failure,)
    assert passes.ran == ORDER
    assert passes.ended == [(failure,)]


async def test_failures_come_in_the_order_of_the_stages_and_a_stage_that_cancels_itself_is_one() -> None:
    passes = Passes()
    passes.faults = {Stage.HANDOFF: boom, Stage.CONTROLLER: cancelled, Stage.DRAINS: boom}
    failures = await passes.monitor.run_pass()
    assert [(f.stage, f.error_class) for f in failures] == [
        (Stage.CONTROLLER, "CancelledError"),
        (Stage.DRAINS, "ZeroDivisionError"),
        (Stage.HANDOFF, "ZeroDivisionError"),
    ]


@pytest.mark.rule("M3")
async def test_a_stage_that_outlives_its_bound_is_cancelled_and_counts_as_a_timeout() -> None:
    passes = Passes(timeout_s=0.05)
    passes.faults[Stage.HEALTH] = forever
    failures = await soon(passes.monitor.run_pass())
    assert [(f.stage, f.error_class) for f in failures] == [(Stage.HEALTH, "TimeoutError")]
    assert passes.ran == ORDER
    del passes.faults[Stage.HEALTH]
    await asyncio.sleep(0)
    assert await passes.monitor.run_pass() == ()


@pytest.mark.rule("M3")
async def test_a_stage_that_ignores_its_cancellation_holds_up_nothing_and_never_runs_twice_at_once() -> None:
    passes = Passes(timeout_s=0.05)
    passes.faults[Stage.HEALTH] = deaf
    for _ in range(2):
        failures = await soon(passes.monitor.run_pass())
        assert [(f.stage, f.error_class) for f in failures] == [(Stage.HEALTH, "TimeoutError")]
    assert passes.ran.count("health") == 1
    assert passes.ran.count("handoff") == 2
    del passes.faults[Stage.HEALTH]
    await until_answer(passes.monitor.run_pass, lambda failures: failures == ())


class Timeless(asyncio.SelectorEventLoop):
    """A loop whose time passes only while it waits, and then at once: no machine is too busy for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        real = selector.select

        def select(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return real(0)

        selector.select = select

    def time(self) -> float:
        return self.now


@pytest.mark.rule("M1")
def test_passes_start_at_the_interval_without_drift_and_missed_ones_are_left_out() -> None:
    starts: list[float] = []
    enough = asyncio.Event()

    async def noted() -> None:
        starts.append(asyncio.get_running_loop().time())
        if len(starts) == 8:
            enough.set()
        await asyncio.sleep(0.25 if len(starts) == 4 else 0.04)

    async def eight(loop: Timeless) -> None:
        clock = RealClock()
        clock.monotonic = loop.time  # type: ignore[method-assign]
        passes = Passes(interval_s=0.1, clock=clock)
        passes.faults[Stage.CONTROLLER] = noted
        task = asyncio.create_task(passes.monitor.run())
        await enough.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with contextlib.closing(Timeless()) as loop:
        loop.run_until_complete(eight(loop))
    gaps = [round(b - a, 2) for a, b in pairwise(starts)]
    assert gaps == [0.1, 0.1, 0.1, 0.25, 0.1, 0.1, 0.1], "starts that were missed are not caught up with"


# --- end to end -------------------------------------------------------------------------------------------------------


async def ready(process: Control) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.get(f"{process.http}/ready") as response:
        return response.status, await response.json()


async def settle(process: Control) -> None:
    await until(lambda: process.serving() == {"p0", "d0"})


@pytest.mark.rule("M4", "M5", "M6", "M7")
async def test_a_failing_store_degrades_the_control_plane_until_it_is_back() -> None:
    medium = Medium()
    async with engines() as served, control(served, medium=medium) as process:
        await settle(process)
        assert (await ready(process))[0] == 200
        async with Proxy(process) as proxy:
            await proxy.next("snapshot")
            medium.failing = "cannot write run: No space left on device"
            change = (await proxy.next("change")).change
            assert change.closed == "monitoring degraded: handoff StoreError"
            assert not change.engines, "running requests go on: engines stay as they are"
            status, body = await ready(process)
            assert status == 503
            assert body == {
                "status": "not ready",
                "reason": "monitoring degraded: handoff StoreError",
                "control_ready": False,
                "epoch": 1,
                "holder": "a",
            }
            loop = process.leader.loop
            assert loop is not None
            monitor = loop.view().monitor
            assert monitor.streak >= 5
            assert {(e.stage, e.error_class) for e in monitor.errors} == {(Stage.HANDOFF, "StoreError")}
            passes = monitor.passes
            await until(lambda: loop.view().monitor.passes > passes)  # passes continue
            medium.failing = ""
            assert (await proxy.next("change")).change.closed == ""
        await until(lambda: "monitor_recovered" in process.told())
        assert (await ready(process))[0] == 200
        assert loop.view().monitor.streak == 0
        told = process.told()
        assert told.count("stage_failed") == 1, "a lasting failure is told once"
        assert told.count("monitor_degraded") == 1
        metrics = process.metrics.render().decode()
        assert 'narwhal_monitor_stage_errors_total{class="StoreError",fleet="fleet",stage="handoff"}' in metrics
        assert 'narwhal_monitor_degraded{fleet="fleet"} 0.0' in metrics


@pytest.mark.rule("M5")
async def test_the_first_failing_stage_of_the_pass_is_named() -> None:
    def failing(loop: ControlLoop) -> dict[Stage, Runner]:
        return {**stage_runners(loop), Stage.LIVENESS: boom, Stage.DRAINS: boom}

    async with engines() as served, control(served, runners=failing) as process:
        await until(lambda: process.publisher.placement is not None and process.publisher.placement.closed)
        assert process.publisher.placement is not None
        assert process.publisher.placement.closed == "monitoring degraded: drains ZeroDivisionError"


@pytest.mark.rule("M5")
async def test_an_event_that_the_core_cannot_handle_shows_as_a_failure_of_the_monitor() -> None:
    async with engines() as served, control(served) as process:
        await settle(process)
        loop = process.leader.loop
        assert loop is not None
        handle = loop._fleet.handle

        def broken(event: Input, *, now: float) -> tuple[Effect, ...]:
            if isinstance(event, ProxyNacked):
                raise KeyError("planted")
            return handle(event, now=now)

        loop._fleet.handle = broken  # type: ignore[method-assign]
        async with Proxy(process) as proxy:
            await proxy.next("snapshot")
            while "monitor_degraded" not in process.told():
                await proxy.nack(1, 1, "no")
                await asyncio.sleep(0.01)
        (words,) = [e.record.message for e in process.observer.after(0) if e.record.kind == "monitor_degraded"]
        assert words.startswith("monitoring degraded: controller KeyError")
        await until(lambda: "monitor_recovered" in process.told())


@pytest.mark.rule("P2")
async def test_an_engine_comes_in_only_once_the_handoff_with_it_is_stored_and_goes_out_at_once() -> None:
    medium = Medium()
    async with engines() as served:
        served.status = {"d0": 503, "p0": 503}
        async with control(served, medium=medium) as process:
            await until(lambda: medium.document is not None)
            async with Proxy(process) as proxy:
                snapshot = (await proxy.next("snapshot")).snapshot
                assert not any(e.phases for e in snapshot.engines)
                medium.gate = asyncio.Event()
                served.status = {}
                loop = process.leader.loop
                assert loop is not None
                await until(lambda: process.told().count("engine_joined") == 2)
                assert process.serving() == set(), "published before it was stored"
                assert (await ready(process))[1]["reason"] == "no eligible engines"
                await asyncio.sleep(0.2)  # however long the store takes
                assert process.serving() == set()
                medium.gate.set()
                await until(lambda: process.serving() == {"p0", "d0"})
                assert medium.document is not None
                assert json.loads(medium.document)["engines"]["d0"]["incarnation"] == 1
                medium.gate = asyncio.Event()
                plan = with_engines(process.leader.plan, served, {"p0": Phase.PREFILL, "d1": Phase.DECODE})
                reload = asyncio.create_task(process.leader.reload(plan))
                while "d0" not in (change := (await proxy.next("change")).change).removed:
                    pass
                assert change.removed == ["d0"]
                assert not reload.done(), "a command is answered when the handoff that holds it is stored"
                medium.gate.set()
                await soon(reload)
                assert set(json.loads(medium.document)["engines"]) == {"p0", "d1"}


@pytest.mark.rule("S1")
async def test_every_pass_writes_the_handoff_and_counters_wait_for_it() -> None:
    medium = Medium()
    async with engines() as served, control(served, medium=medium) as process:
        await settle(process)
        saves = medium.saves
        await until(lambda: medium.saves >= saves + 3)
        call = process.outcomes.ReportOutcomes()
        await soon(call.write(batch(1)))
        await soon(call.read())
        assert medium.document is not None
        document = json.loads(medium.document)
        call.cancel()
    assert (document["schema"], document["schema_version"], document["fleet"]) == ("narwhal.handoff", 1, "fleet")
    assert document["engine_set"] == list(ROLES)
    assert document["lease"] == {"epoch": 1, "holder": "a"}
    assert document["requests"] == {"served": 1, "failed": 0, "rejected": 0, "cancelled": 0, "retried": 0}
