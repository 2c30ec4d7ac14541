"""One daemon thread for calls that block, so that a hung disk stops neither the event loop nor the process's end."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from narwhal.control.store.base import StoreError

T = TypeVar("T")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class BlockingThread:
    """Runs one blocking call at a time, in order of asking."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: asyncio.Future[Any] | None = None
        self._closed = False
        # The library's executor joins its threads at exit, which a hung call would make last for ever.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """The result of `call`, or what it raised; StoreError after `close`.

        A caller that is cancelled leaves the call running; the next one waits for its end before it starts its own,
        so that a medium that hangs collects no backlog.
        """
        while self._running is not None and not self._running.done():
            await asyncio.wait([self._running])
        if self._closed:
            raise StoreError("the store is closed")
        loop = asyncio.get_running_loop()
        job: asyncio.Future[T] = loop.create_future()
        job.add_done_callback(_retrieve)
        self._running = job
        self._jobs.put((call, job, loop))
        return await asyncio.shield(job)

    def close(self) -> None:
        """Lets the thread end after the call it is in. Does not wait for it."""
        self._closed = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (taken := self._jobs.get()) is not None:
            call, job, loop = taken
            try:
                result, error = call(), None
            except BaseException as raised:  # whatever it is belongs to the caller
                result, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(_settle, job, result, error)
            del call, job, taken, result, error


def _settle(job: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if job.done():
        return
    if error is not None:
        job.set_exception(error)
    else:
        job.set_result(result)


def _retrieve(job: "asyncio.Future[Any]") -> None:
    """Marks the exception of a call whose caller has left as seen."""
    if not job.cancelled():
        job.exception()
