"""Takes connections off the listening socket that all workers of a proxy share.

A few at a time, and only while this worker runs and can serve: what it does not take, another worker can. A worker that
is stopped thereby holds up nothing but what it had taken.
"""

import asyncio
import errno
import socket
from collections.abc import Callable

import structlog

AT_ONCE = 4
EXHAUSTED_PAUSE_S = 0.1  # without a free descriptor, others get the connections meanwhile
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = structlog.get_logger()


class Acceptor:
    """Accepts on `listener` and hands each connection to a protocol of `factory`. Call on the event loop."""

    def __init__(self, listener: socket.socket, factory: Callable[[], asyncio.Protocol]) -> None:
        self.factory = factory
        self._listener = listener
        self._connecting: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._running = False

    def start(self) -> None:
        """Accept from now on."""
        self._running = True
        asyncio.get_running_loop().add_reader(self._listener, self._ready)

    def stop(self) -> None:
        """Accept nothing more; the socket stays open for the other workers."""
        self._running = False
        if self._paused is not None:
            self._paused.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)

    def _ready(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return  # another worker was faster
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                return  # else: the client went away before it was accepted
            task = asyncio.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(self.factory, connection)
        except OSError:
            connection.close()  # the client went away meanwhile

    def _pause(self, error: OSError) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._paused = loop.call_later(EXHAUSTED_PAUSE_S, self._resume)
        _log.error("no connection can be accepted", reason=error.strerror)

    def _resume(self) -> None:
        self._paused = None
        if self._running:
            self.start()
