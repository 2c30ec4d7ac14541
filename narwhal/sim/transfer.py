"""KV transfers between engines, over a side channel: a TCP port of the producer that the decode engine connects to.

One line of JSON asks, one answers, matched by number. Since the content really comes from the producer's process, a
producer that is dead, stopped or restarted has its real effects on the decode engine.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from narwhal.sim.faults import FaultSet, Hook
from narwhal.sim.options import EngineOptions

Message = dict[str, Any]


class TransferFailed(Exception):
    """The content of a handoff could not be read; says why. The engine that wanted it lives on."""


class SideServer:
    """The producer's end: answers handshakes and pulls."""

    def __init__(self, answer: Callable[[Message], Message], running: Callable[[], bool]) -> None:
        self._answer = answer
        self._running = running
        self._server: asyncio.Server | None = None
        self._held: list[tuple[_Served, Message]] = []
        self.connections: set[_Served] = set()
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Served(self), host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Close the listener and cut every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.abort()
        self._held.clear()

    def received(self, served: "_Served", message: Message) -> None:
        """A question came; while the engine is stopped it waits."""
        if self._running():
            served.send({**self._answer(message), "n": message["n"]})
        else:
            self._held.append((served, message))

    def resume(self) -> None:
        """The engine runs again: answer what waited."""
        held, self._held = self._held, []
        for served, message in held:
            self.received(served, message)


class _Lines(asyncio.Protocol):
    """A connection of JSON lines."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                message = orjson.loads(line)
            except orjson.JSONDecodeError:
                self.abort()
                return
            self.message(message)

    def message(self, message: Message) -> None:
        raise NotImplementedError

    def send(self, message: Message) -> None:
        """Send one message; without effect once the connection is gone."""
        if self._transport is not None:
            self._transport.write(orjson.dumps(message) + b"\n")

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()


class _Served(_Lines):
    def __init__(self, server: SideServer) -> None:
        super().__init__()
        self._side = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._side.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._side.connections.discard(self)

    def message(self, message: Message) -> None:
        self._side.received(self, message)


class _Link(_Lines):
    """The decode engine's connection to one producer."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self.closed = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(TransferFailed("the producer closed the connection"))
        self._waiting.clear()

    def message(self, message: Message) -> None:
        future = self._waiting.pop(message["n"], None)
        if future is not None and not future.done():
            future.set_result(message)

    async def ask(self, message: Message) -> Message:
        """Send a question and wait for its answer, however long it takes. Raises TransferFailed."""
        if self.closed:
            raise TransferFailed("the producer closed the connection")
        number = next(self._numbers)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self.send({**message, "n": number})
        try:
            return await future
        finally:
            self._waiting.pop(number, None)


@dataclass(slots=True)
class _Peer:
    """What the decode engine remembers of a producer process since their handshake."""

    name: str
    agent: str


class Transfers:
    """The decode engine's end: reads handoffs, remembers the peers it shook hands with."""

    def __init__(self, options: EngineOptions, faults: FaultSet) -> None:
        self._options = options
        self._faults = faults
        self._links: dict[tuple[str, int], _Link] = {}
        self._peers: dict[str, _Peer] = {}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self.ok = 0
        self.failed = 0

    def forget(self) -> None:
        """The process ended: connections are cut, no peer is known."""
        for link in self._links.values():
            link.abort()
        self._links.clear()
        self._peers.clear()

    async def pull(self, params: Mapping[str, Any]) -> str:
        """The content of a well-formed handoff of another engine. Raises TransferFailed."""
        try:
            content = await self._pull(params)
        except TransferFailed:
            self.failed += 1
            raise
        self.ok += 1
        return content

    async def _pull(self, params: Mapping[str, Any]) -> str:
        if params.get("transfer_mode", "pull") != "pull":
            raise TransferFailed(f"transfer mode {params['transfer_mode']} is not supported")
        engine_id: str = params["remote_engine_id"]
        link, peer = await self._shaken(params["remote_host"], params["remote_port"], engine_id)
        for fault in self._faults.take(Hook.PULL, peer=peer.name):
            if fault.row.name == "first-transfer-slow":
                await asyncio.sleep(fault.params["seconds"])
            else:
                raise TransferFailed(f"transfer from {peer.name} failed")
        # A process that restarted under the same engine id is spoken to with what was learnt from the old one.
        question = {"op": "pull", "agent": peer.agent, "id": params["remote_request_id"], "by": self._options.id}
        answer = await link.ask(question)
        if "content" not in answer:
            raise TransferFailed(str(answer.get("error")))
        return str(answer["content"])

    async def _shaken(self, host: str, port: int, engine_id: str) -> tuple[_Link, _Peer]:
        """A connection to the producer, after the handshake that precedes the first transfer."""
        link = self._links.get((host, port))
        peer = self._peers.get(engine_id)
        if link is not None and not link.closed and peer is not None:
            return link, peer
        async with self._locks.setdefault((host, port), asyncio.Lock()):
            link = self._links.get((host, port))
            if link is None or link.closed:
                link = self._links[host, port] = await self._connect(host, port)
            peer = self._peers.get(engine_id)
            if peer is None:
                peer = self._peers[engine_id] = await self._handshake(link, engine_id)
        return link, peer

    async def _connect(self, host: str, port: int) -> _Link:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._options.handshake_timeout_s):
                _, link = await loop.create_connection(_Link, host, port)
        except socket.gaierror:
            await asyncio.sleep(started + self._options.resolve_timeout_s - loop.time())
            raise TransferFailed("the producer's name does not resolve") from None
        except TimeoutError:
            raise TransferFailed("the producer does not accept the connection") from None
        except OSError as error:
            raise TransferFailed(f"the producer cannot be reached: {error.strerror}") from None
        return link

    async def _handshake(self, link: _Link, engine_id: str) -> _Peer:
        try:
            async with asyncio.timeout(self._options.handshake_timeout_s):
                answer = await link.ask({"op": "hello", "by": self._options.id})
        except TimeoutError:
            raise TransferFailed("the producer does not answer the handshake") from None
        if answer.get("engine_id") != engine_id:
            raise TransferFailed(f"remote engine id mismatch: expected {engine_id}, got {answer.get('engine_id')}")
        await asyncio.sleep(self._options.first_pull_s)
        return _Peer(str(answer["name"]), str(answer["agent"]))
