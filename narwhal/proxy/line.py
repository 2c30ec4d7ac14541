"""The line between the supervisor and one worker: JSON messages, one a line, over a socket pair.

The worker inherits its end. It carries the worker's orders and its answers, and its end is proof that the other side is
gone: there is no file to clean up, and no worker outlives its supervisor unnoticed.

To a worker: `start` (once, first), `ask` (answer with `state`), `settings` (the fleet file was read again).
From a worker: `begun` (it speaks to control), `serving` (it accepts connections), `state`, `draining` (seconds that it
will take at most).
"""

import asyncio
import json
import socket
from dataclasses import asdict, dataclass
from typing import Any

from narwhal.logs import LogFormat
from narwhal.reports import ProxyKey

LONGEST = 64 * 1024 * 1024  # a snapshot of metrics with very many engines


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The supervisor's first message."""

    id: str
    slot: int
    boot: int
    controls: list[str]
    fleet: str  # empty: whichever control serves
    settings: str  # of the fleet file, JSON; empty without one
    address: str
    log_format: LogFormat
    tls: list[str]  # files: ca, cert, key; empty without TLS

    @property
    def proxy(self) -> ProxyKey:
        """Who this worker is."""
        return ProxyKey(id=self.id, slot=self.slot, boot=self.boot)

    def as_message(self) -> dict[str, Any]:
        """As the line carries it."""
        return asdict(self)

    def goodbye_arguments(self, reason: str) -> list[str]:
        """Arguments of a process that says goodbye for this worker, which died. Nothing secret stands in them."""
        return ["goodbye", json.dumps(asdict(self) | {"settings": ""}), reason]


class Line:
    """One end. Build it with `open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> "Line":
        """Take over `end`."""
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end, limit=LONGEST))

    def send(self, kind: str, content: Any = None) -> None:
        """Say something. To nobody, when the other side is gone."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps([kind, content]).encode() + b"\n")

    async def receive(self) -> tuple[str, Any] | None:
        """What the other side says next; None when it is gone."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):
            return None
        if not line.endswith(b"\n"):
            return None
        kind, content = json.loads(line)
        return kind, content

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return
