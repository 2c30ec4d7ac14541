"""Tells control what this worker saw: batches in order, failures at once, resent until acknowledged (spec S6).

What merges and what may be forgotten is `backlog.py`'s to decide; this file moves batches over whatever control process
the placement view follows. `run()` goes on for ever, `close()` sends the rest and waits for it to be stored.

Not guaranteed: that an outcome is told when this process is killed before it was sent. Guaranteed: what was sent is
repeated unchanged until control says that it is stored, so that every outcome counts exactly once.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from random import Random

import grpc
import structlog

from narwhal._pb import outcome_pb2, outcome_pb2_grpc
from narwhal.clock import Clock
from narwhal.measures import LegMeasures
from narwhal.proxy.backlog import Backlog
from narwhal.proxy.link import SILENCE_S, Lead
from narwhal.proxy.measuring import Measuring
from narwhal.proxy.pace import RETRY_CAP_S, backoff_s
from narwhal.reports import Run
from narwhal.vocabulary import Outcome, Phase, RequestResult
from narwhal.wire import batch_to_wire

SUCCESSES_EVERY_S = 1.0  # spec S6
# Batches on the way. Control acknowledges after it stored, about once a second: enough for failures to go out one by
# one, and when it stops acknowledging the rest merges here instead of piling up there.
WINDOW = 256

_Call = grpc.aio.StreamStreamCall[outcome_pb2.ReportBatch, outcome_pb2.ReportAck]
_log = structlog.get_logger()


class OutcomeReporter:
    """The data path's `Reporter`: never blocks, never raises."""

    def __init__(
        self,
        backlog: Backlog,
        measuring: Measuring,
        *,
        wait_lead: Callable[[], Awaitable[Lead]],
        clock: Clock,
        rng: Random,
    ) -> None:
        self.backlog = backlog
        self._measuring = measuring
        self._measured_at = clock.monotonic()
        self._wait_lead = wait_lead
        self._clock = clock
        self._rng = rng
        self._wake = asyncio.Event()
        self._urgent = False
        self._closing = False
        self._settled = asyncio.Event()
        self._said = ""

    # --- in ---------------------------------------------------------------------------------------------------------

    def success(self, engine: str, phase: Phase, incarnation: int, outcome: Outcome) -> None:
        """A leg ended well, or the engine judged the request (4xx)."""
        self.backlog.merge(engine, phase, incarnation, outcome)

    def failure(self, run: Run) -> None:
        """A leg failed; sent at once."""
        self.backlog.failure(run)
        self._hurry()

    def neutral(self, engine: str, phase: Phase, incarnation: int, outcome: Outcome) -> None:
        """A leg ended for a reason that is no evidence."""
        self.backlog.merge(engine, phase, incarnation, outcome)

    def request(self, result: RequestResult, retries: int) -> None:
        """A client request ended, after so many retries."""
        self.backlog.request(result, retries)

    @property
    def unacknowledged(self) -> int:
        """Outcomes that control has not said to be stored: the gauge `outcomes_unacknowledged`."""
        return self.backlog.unacknowledged

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Report to whoever is followed, until cancelled."""
        failures = 0
        while True:
            lead = await self._wait_lead()
            began = self._clock.monotonic()
            reason = await self._session(lead)
            if reason and reason != self._said:
                self._said = reason
                _log.warning("report stream lost", control=lead.address, reason=reason)
            failures = 1 if self._clock.monotonic() - began > RETRY_CAP_S else failures + 1
            await asyncio.sleep(backoff_s(failures, self._rng))

    async def close(self) -> None:
        """Send what is left and wait until control has stored it, at most as long as for any word of it."""
        self._closing = True
        self._hurry()
        if self._done():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await self._settled.wait()
        outcomes, requests = self.unacknowledged, self.backlog.unacknowledged_requests
        if outcomes or requests:  # else only measures are, which are of use to nobody any more
            _log.warning("outcomes not reported", outcomes=outcomes, requests=requests)

    def _done(self) -> bool:
        return not self.backlog.waiting and not self.backlog.sent

    def _hurry(self) -> None:
        self._urgent = True
        self._wake.set()

    # --- one stream -------------------------------------------------------------------------------------------------

    async def _session(self, lead: Lead) -> str:
        """Report over one stream until it ends or another control process is followed. Returns why, for the log."""
        call = outcome_pb2_grpc.OutcomeServiceStub(lead.channel).ReportOutcomes()
        parts = [
            asyncio.create_task(self._send(call)),
            asyncio.create_task(self._take_acks(call)),
            asyncio.create_task(lead.lost.wait()),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            return next((reason for part in done if isinstance(reason := _result(part), str)), "")
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            call.cancel()  # a call that is merely dropped leaves its handler behind on the server

    async def _send(self, call: _Call) -> None:
        for batch in self.backlog.sent:
            await call.write(batch_to_wire(batch))
        while True:
            due = self._clock.monotonic() + SUCCESSES_EVERY_S
            while not self._urgent and (left := due - self._clock.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._wake.wait()
                self._wake.clear()
            await self._send_new(call)

    async def _send_new(self, call: _Call) -> None:
        self._urgent = False
        while len(self.backlog.sent) < WINDOW:
            batch = self.backlog.cut(*self._measured())
            if batch is None:
                return
            await call.write(batch_to_wire(batch))

    def _measured(self) -> tuple[tuple[LegMeasures, ...], float]:
        """What legs took, with the first batch of a second: many failures make many batches."""
        now = self._clock.monotonic()
        # The timer of the second that is over may fire a moment before its end.
        if now - self._measured_at < SUCCESSES_EVERY_S * 0.9:
            return (), 0.0
        self._measured_at = now
        return self._measuring.take(now)

    async def _take_acks(self, call: _Call) -> str:
        while True:
            ack = await call.read()
            if not isinstance(ack, outcome_pb2.ReportAck):
                code = await call.code()
                if code is grpc.StatusCode.OK:
                    return ""  # control ends streams that say nothing for long
                return f"{code.name.lower().replace('_', ' ')}: {await call.details()}"
            full = len(self.backlog.sent) >= WINDOW
            try:
                self.backlog.acknowledge(ack.sequence)
            except ValueError as error:
                return str(error)
            self._said = ""
            if full or self._closing:
                self._hurry()
            if self._closing and self._done():
                self._settled.set()


def _result(part: "asyncio.Task[object]") -> object:
    """What a part of a session came to; an error of the stream as words."""
    if part.cancelled():
        return ""  # its channel was closed under it: the control process is followed no more
    error = part.exception()
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower().replace('_', ' ')}: {error.details()}"
    if isinstance(error, asyncio.InvalidStateError):
        return ""  # a write on a stream that has ended; the reader says why
    if error is not None:
        raise error
    return part.result()
