"""A door on the way to a server: while it is shut, whoever goes through it gets no answer.

That is how a network without a way back looks: connections stand, new ones are taken, and nothing comes. What was sent
meanwhile arrives once the door is open again, late. It runs in a thread of its own, so that it needs no test's loop.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

START_S = 30.0


class Door:
    """Forwards connections to a port of 127.0.0.1 from one of its own. Ends with `close`."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()
        assert self._started.wait(START_S), "the door does not stand"

    def shut(self) -> None:
        """Nothing passes from now on."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def open(self) -> None:
        """Everything passes again, and what waited first."""
        self._loop.call_soon_threadsafe(self._open.set)

    def close(self) -> None:
        """End it, and every connection."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accepted, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._spawn(self._pump(reader, far_writer))
        self._spawn(self._pump(far_reader, writer))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    await self._open.wait()
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()
