"""Starts a proxy's workers, replaces those that die, asks them for their state, and ends them in good order.

It never speaks gRPC: a process that did could not start workers safely. The goodbye for a worker that died (spec P6) is
said by a short process of its own. Decides nothing about requests.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import structlog

from narwhal.clock import Clock
from narwhal.proxy.line import Line, Start
from narwhal.proxy.metrics import merge
from narwhal.proxy.pace import RETRY_CAP_S, backoff_s
from narwhal.vocabulary import NotReady

ANSWER_S = 1.0  # for a worker's state; one that is stopped must not hold up a scrape
ENDING_S = 15.0  # beyond a drain's grace: the last reports and the goodbye, each with its own bound

_MODULE = ("-m", "narwhal.proxy.workers")
_log = structlog.get_logger()


@dataclass(eq=False)
class Worker:
    """One worker process."""

    start: Start
    process: asyncio.subprocess.Process
    line: Line
    answered: asyncio.Event
    grace: "asyncio.Future[float]"  # seconds that its drain takes at most, once it drains
    asked: bool = False  # and has not answered yet: one that is stopped is not asked again and again
    begun: bool = False  # it speaks to control from now on, and ends in good order when told
    state: dict[str, Any] | None = None


class Supervisor:
    """The workers of one proxy, slot by slot. `run` lasts until `stop` was called and all have ended."""

    def __init__(self, *, template: Start, workers: int, listener: socket.socket, clock: Clock, rng: Random) -> None:
        """`template`: what every worker is told, but for its slot and boot."""
        self._template = template
        self._count = workers
        self._listener = listener
        self._clock = clock
        self._rng = rng
        self._slots: dict[int, Worker] = {}
        self._gone: dict[str, Any] = {"counters": {}, "histograms": {}, "gauges": {}}  # counts of workers that died
        self._stopping = asyncio.Event()
        self._signals = 0
        self._boot = 0
        self._goodbyes: set[asyncio.Task[None]] = set()
        self._first = asyncio.Event()

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep every slot filled; returns when `stop` was called and every worker has ended."""
        async with asyncio.TaskGroup() as group:
            for slot in range(self._count):
                group.create_task(self._keep(slot))
        if self._goodbyes:
            await asyncio.wait(self._goodbyes)

    async def serving(self) -> None:
        """Returns as soon as one worker accepts connections, or all are to end."""
        await self._first.wait()

    def stop(self) -> None:
        """Drain all workers; called again, cut what runs; and again, kill."""
        self._signals += 1
        self._stopping.set()
        self._first.set()
        for worker in self._slots.values():
            with contextlib.suppress(ProcessLookupError):
                if self._signals == 2:
                    worker.process.terminate()
                elif self._signals > 2:
                    worker.process.kill()

    def reload(self, settings: str) -> None:
        """The fleet file was read again: `settings` are what a proxy needs of it, as JSON."""
        self._template = replace(self._template, settings=settings)
        for worker in self._slots.values():
            worker.line.send("settings", settings)

    async def _keep(self, slot: int) -> None:
        """One worker after the other."""
        failures = 0
        while not self._stopping.is_set():
            began = self._clock.monotonic()
            try:
                worker = await self._spawn(slot)
            except OSError as error:
                _log.error("no worker can be started", slot=slot, reason=error.strerror)
            else:
                await self._attend(worker)
                self._ended(worker)
            failures = 0 if self._clock.monotonic() - began > RETRY_CAP_S else failures + 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s(failures, self._rng)):
                    await self._stopping.wait()

    async def _spawn(self, slot: int) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *_MODULE,
                "work",
                str(theirs.fileno()),
                str(self._listener.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._listener.fileno()),
            )
        # Rises even when the clock is set back: a newer boot retires the older, never the reverse.
        self._boot = max(self._boot + 1, int(self._clock.wall() * 1e6))
        start = replace(self._template, slot=slot, boot=self._boot)
        worker = Worker(start, process, await Line.open(ours), asyncio.Event(), asyncio.Future[float]())
        worker.line.send("start", start.as_message())
        self._slots[slot] = worker
        _log.info("worker started", proxy=str(start.proxy), pid=process.pid)
        return worker

    async def _attend(self, worker: Worker) -> None:
        """Listen to a worker for as long as it lives."""
        listening = asyncio.create_task(self._listen(worker))
        try:
            await self._until_over(worker)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await worker.line.close()

    async def _until_over(self, worker: Worker) -> None:
        """Wait for the worker's end; bring it about when all are to end."""
        over = asyncio.create_task(worker.process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({over, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                return
            with contextlib.suppress(ProcessLookupError):
                worker.process.terminate()
            either: set[asyncio.Future[Any]] = {over, worker.grace}
            await asyncio.wait(either, timeout=ENDING_S, return_when=asyncio.FIRST_COMPLETED)
            if worker.grace.done():
                await asyncio.wait({over}, timeout=worker.grace.result() + ENDING_S)
            if not over.done():
                _log.error("worker does not end and is killed", proxy=str(worker.start.proxy))
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()
                await over
        finally:
            stopping.cancel()
            over.cancel()
            await asyncio.gather(stopping, over, return_exceptions=True)

    def _ended(self, worker: Worker) -> None:
        """Keep its counts, and say what it could not say itself."""
        status = worker.process.returncode
        if self._slots.get(worker.start.slot) is worker:
            del self._slots[worker.start.slot]
        if worker.state is not None:
            self._gone = merge([self._gone, worker.state["metrics"] | {"gauges": {}}])
        if status == 0 or (self._stopping.is_set() and not worker.begun):
            _log.info("worker ended", proxy=str(worker.start.proxy), pid=worker.process.pid)
            return
        how = f"status {status}" if status is None or status > 0 else f"signal {-status}"
        _log.error("worker died", proxy=str(worker.start.proxy), pid=worker.process.pid, reason=how)
        task = asyncio.create_task(self._say_goodbye(worker.start, f"worker died: {how}"))
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)

    async def _say_goodbye(self, start: Start, reason: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *_MODULE, *start.goodbye_arguments(reason), stdin=asyncio.subprocess.DEVNULL
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        if process.returncode:
            _log.warning("control heard no goodbye for a worker that died", proxy=str(start.proxy))

    # --- what workers say -------------------------------------------------------------------------------------------

    async def _listen(self, worker: Worker) -> None:
        while (message := await worker.line.receive()) is not None:
            kind, content = message
            if kind == "state":
                worker.state = content
                worker.asked = False
                worker.answered.set()
            elif kind == "begun":
                worker.begun = True
            elif kind == "serving":
                self._first.set()
            elif kind == "draining" and not worker.grace.done():
                worker.grace.set_result(content)

    async def ask(self) -> list[dict[str, Any]]:
        """The states of those workers that answer in time; the others' last word is kept for `metrics`."""
        asked = list(self._slots.values())
        for worker in asked:
            if not worker.asked:
                worker.asked = True
                worker.answered.clear()
                worker.line.send("ask")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(*(worker.answered.wait() for worker in asked))
        return [worker.state for worker in asked if worker.answered.is_set() and worker.state is not None]

    async def not_ready(self) -> str:
        """Why the proxy is not ready (spec M10); empty when every worker that answers is."""
        if self._stopping.is_set():
            return NotReady.DRAINING.value
        states = await self.ask()
        if not states:
            return "no worker answers"
        return next((state["not_ready"] for state in states if state["not_ready"]), "")

    async def metrics(self) -> tuple[str, Mapping[str, Any]]:
        """(fleet, the sum over all workers since this proxy started). An engine that left the fleet leaves it too."""
        await self.ask()
        states = [worker.state for worker in self._slots.values() if worker.state is not None]
        merged = merge([self._gone, *(state["metrics"] for state in states)])
        known = [state["engines"] for state in states if state["engines"] is not None]
        if known:
            engines = {engine for names in known for engine in names}
            legs = merged["counters"].get("legs", {})
            merged["counters"]["legs"] = {key: n for key, n in legs.items() if key.split("\t")[0] in engines}
        fleet = next((state["fleet"] for state in states if state["fleet"]), self._template.fleet)
        return fleet, merged

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by slot."""
        return {slot: worker.process.pid for slot, worker in self._slots.items()}
