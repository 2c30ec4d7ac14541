"""A door before an engine that some processes cannot pass: how a network that is cut for one of them looks to it.

A connection is told apart by the process that opened it, through /proc; so it needs no privileges, and neither the
product nor the engine knows of it.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path


def owns(pid: int, port: int, to: int) -> bool:
    """Whether the process holds the socket from `port` to `to`, both of 127.0.0.1."""
    inode = next((found for found in _inodes(port, to)), None)
    if inode is None:
        return False
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link) == f"socket:[{inode}]":
                return True
    return False


def _inodes(port: int, to: int) -> Iterator[str]:
    wanted = (f"0100007F:{port:04X}", f"0100007F:{to:04X}")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if (words[1], words[2]) == wanted:
            yield words[9]


@dataclass(kw_only=True, eq=False)
class Gate:
    """Forwards connections to `target` on loopback, but for those of processes that are shut out."""

    target: int
    port: int = 0
    silent: bool = True  # those shut out hear nothing; else they are refused
    shut_out: Set[int] = frozenset()  # process ids
    _open: dict[asyncio.StreamWriter, int] = field(default_factory=dict)  # client's side → its port
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, on a free port when none is given."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def shut(self, *pids: int, silent: bool = True) -> None:
        """From now on these processes do not come through, on connections that are open already neither."""
        self.shut_out, self.silent = frozenset(pids), silent
        for writer, port in self._open.items():
            if self._is_shut(port):
                # Silent or not: bytes that are lost on the way end a connection sooner or later.
                writer.transport.abort()

    def open(self) -> None:
        """Everybody comes through again."""
        self.shut_out = frozenset()

    def _is_shut(self, port: int) -> bool:
        return any(owns(pid, port, self.port) for pid in self.shut_out)

    async def close(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        port = writer.get_extra_info("peername")[1]
        self._open[writer] = port
        try:
            if self._is_shut(port):
                if self.silent:
                    await reader.read(-1)  # takes what comes and gives nothing, until the other side has enough
                writer.transport.abort()
            else:
                await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            del self._open[writer]
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            out = asyncio.create_task(_copy(reader, back))
            home = asyncio.create_task(_copy(there, writer))
            _, rest = await asyncio.wait((out, home), return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            await asyncio.gather(out, home, return_exceptions=True)
        finally:
            back.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
