"""Runs the stages of a monitor pass, each isolated and bounded (spec M1–M3). Decides nothing: what the failures mean
is the core's affair.

A stage is a runner from a table, so that a fault can be put in any of them from outside.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from narwhal.clock import Clock
from narwhal.control.core.events import StageFailure
from narwhal.vocabulary import Stage

Runner = Callable[[], Awaitable[None]]
Ended = Callable[[tuple[StageFailure, ...], float], None]

log = structlog.get_logger()


class Monitor:
    """Passes at an interval, until cancelled."""

    def __init__(
        self, runners: Mapping[Stage, Runner], *, interval_s: float, timeout_s: float, clock: Clock, ended: Ended
    ) -> None:
        """`ended` is told the failures of each pass, in the order of the stages, and the seconds it took."""
        self._runners = runners
        self._clock = clock
        self._ended = ended
        self._stuck: dict[Stage, asyncio.Task[None]] = {}
        self.interval_s = interval_s
        self.timeout_s = timeout_s

    async def run(self) -> None:
        """Runs passes for ever, their starts `interval_s` apart; a pass that takes longer is followed at once."""
        due = self._clock.monotonic()
        try:
            while True:
                await self.run_pass()
                now = self._clock.monotonic()
                # Starts that were missed are left out, not caught up with.
                due = max(due + self.interval_s, now)
                await asyncio.sleep(due - now)
        finally:
            for task in self._stuck.values():
                task.cancel()

    async def run_pass(self) -> tuple[StageFailure, ...]:
        """One pass: every stage that has a runner, in the order of the spec. Returns what failed."""
        began = self._clock.monotonic()
        failures = []
        for stage in Stage:
            runner = self._runners.get(stage)
            if runner is not None:
                failure = await self._run_stage(stage, runner)
                if failure is not None:
                    failures.append(failure)
        self._ended(tuple(failures), self._clock.monotonic() - began)
        return tuple(failures)

    async def _run_stage(self, stage: Stage, runner: Runner) -> StageFailure | None:
        stuck = self._stuck.get(stage)
        if stuck is not None:
            if not stuck.done():
                return _timed_out(stage, f"still running after its bound of {self.timeout_s:g} s, though cancelled")
            del self._stuck[stage]
        task = asyncio.ensure_future(runner())
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            # Not awaited: a stage that ignores its cancellation must not hold up the others.
            task.cancel()
            task.add_done_callback(_retrieve)
            self._stuck[stage] = task
            return _timed_out(stage, f"cancelled after {self.timeout_s:g} s")
        if task.cancelled():
            return StageFailure(stage=stage, error_class="CancelledError", message="cancelled from within")
        error = task.exception()
        if error is None:
            return None
        log.debug("monitor stage raised", stage=stage.value, exc_info=error)
        return StageFailure(stage=stage, error_class=type(error).__name__, message=str(error))


def _timed_out(stage: Stage, message: str) -> StageFailure:
    return StageFailure(stage=stage, error_class="TimeoutError", message=message)


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Marks the exception of a stage that was given up as seen."""
    if not task.cancelled():
        task.exception()
