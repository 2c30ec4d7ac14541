"""All client connections of a worker: the factory of their protocols, and the watchdog over what clients owe us."""

import asyncio

from narwhal.proxy.client import Service
from narwhal.proxy.incoming import ClientConnection

CHECK_EVERY_S = 0.1  # bounds how late a limit is noticed


class ClientServer:
    """The connections of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self.connections: set[ClientConnection] = set()

    def __call__(self) -> ClientConnection:
        """The protocol of a new connection."""
        return ClientConnection(self._service, self)

    def opened(self, connection: ClientConnection) -> None:
        """A client is there."""
        self.connections.add(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)

    def lost(self, connection: ClientConnection) -> None:
        """It is gone."""
        self.connections.discard(connection)
        if not self.connections:
            self._ended.set()

    def _check(self) -> None:
        self._timer = None
        now = self._service.now()
        for connection in list(self.connections):
            connection.check(now)
        if self.connections:
            self._timer = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check)

    async def close(self, within_s: float) -> None:
        """End all connections; those that still have something to read get `within_s` for it."""
        for connection in list(self.connections):
            connection.end_idle()
        try:
            async with asyncio.timeout(within_s):
                while self.connections:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort()
        if self._timer is not None:
            self._timer.cancel()
