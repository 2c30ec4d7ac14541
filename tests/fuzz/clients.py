"""What must hold of whatever bytes a client sends: properties, each of one kind of bytes. Shared as `engines.py` is."""

import json
from itertools import count
from types import SimpleNamespace
from typing import Any

import orjson

from narwhal.clock import RealClock
from narwhal.connectors.base import BadRequest, Route
from narwhal.connectors.vllm_nixl import VllmNixl
from narwhal.proxy.client import Client, Connection, Letterhead
from narwhal.proxy.errors import Refusal
from narwhal.proxy.incoming import MAX_AHEAD, MAX_HEAD_BYTES, SLICE, ClientConnection
from tests.fuzz.engines import cut, worded
from tests.proxy.harness import HANDOFF

CONNECTOR = VllmNixl()
STEERING = {"kv_transfer_params", "ec_transfer_params"}
LARGEST_BODY = 300
SHORTEST = b"GET / HTTP/1.1\r\nHost:\r\n\r\n"  # of requests that another may follow
READ = CONNECTOR.handoff(orjson.dumps({"kv_transfer_params": HANDOFF}))


def body(data: bytes) -> None:
    """On either route: refused in words, or legs whose transfer the client does not steer."""
    for route in Route:
        try:
            request = CONNECTOR.parse(route, data)
            first = json.loads(CONNECTOR.prefill_body(request))
            CONNECTOR.count_body(request)
        except BadRequest as refused:
            worded(str(refused))
            continue
        second = CONNECTOR.decode_body(request, READ)
        pairs: list[tuple[str, Any]] = json.loads(second, object_pairs_hook=list)
        assert len([name for name, _ in pairs if name in STEERING]) == 1
        sent = orjson.loads(second)
        assert sent["kv_transfer_params"] == HANDOFF
        asked = orjson.loads(data)
        assert sent.items() >= {k: v for k, v in asked.items() if k not in (*STEERING, "vllm_xargs")}.items()
        extra = sent.get("vllm_xargs")
        assert not isinstance(extra, dict) or not STEERING & set(extra)
        assert (first["stream"], first["max_tokens"]) == (False, 1)
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert CONNECTOR.estimated_tokens(request) <= len(request.raw)
        tokens = CONNECTOR.known_tokens(request)
        assert tokens is None or 0 <= tokens <= len(data)


class Socket:
    """A client's, as far as its connection asks for it."""

    def __init__(self) -> None:
        self.closed = self.paused = False
        self.written = b""

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Server:
    """Answers each request at once, or, `busy`, when it is told to."""

    def __init__(self, *, busy: bool) -> None:
        self.busy = busy
        self.served: list[Client] = []
        self.left: list[Client] = []
        self.lost_connections = 0
        self._letterhead = Letterhead(RealClock(), map(str, count()))

    def bounds(self) -> Any:
        return SimpleNamespace(max_request_bytes=LARGEST_BODY)

    def now(self) -> float:
        return 0.0

    def make(self, connection: Connection, method: bytes, target: bytes) -> Client:
        return Client(connection, self._letterhead, method, target, arrived_at=0.0, due=1.0)

    def begun(self, client: Client) -> None: ...

    def wants_body(self, client: Client) -> bool:
        return True

    def gone(self, client: Client) -> None:
        self.left.append(client)

    def serve(self, client: Client) -> None:
        self.served.append(client)
        if not self.busy:
            self.answer()

    def answer(self) -> None:
        client = self.served[-1]
        client.send(400 if client.refusal else 200, b"{}", extra="")
        client.connection.finished(client)

    def opened(self, connection: object) -> None: ...

    def lost(self, connection: object) -> None:
        self.lost_connections += 1


def _served(pieces: list[bytes], *, busy: bool) -> list[tuple[Any, ...]]:
    """The requests that a connection took from these bytes."""
    server, socket = Server(busy=busy), Socket()
    connection = ClientConnection(server, server)
    connection.connection_made(socket)  # type: ignore[arg-type]
    for piece in pieces:
        if socket.closed:
            break
        connection.data_received(piece)
        assert len(connection._waiting) <= MAX_AHEAD + SLICE // len(SHORTEST)
        assert not connection._rest or socket.paused
    answered = 0
    while busy and answered < len(server.served):
        answered += 1
        server.answer()
    connection.connection_lost(None)
    assert server.lost_connections == 1
    assert connection.transport is None
    for client in server.served:
        assert client.refusal is not Refusal.INTERNAL
        assert len(client.body) <= LARGEST_BODY
        assert len(client.target) <= MAX_HEAD_BYTES
        assert client.request_id
    heads = socket.written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 ")
    assert heads[0] == b""
    assert len(heads) == len(server.served) + 1
    return [(c.method, c.target, bytes(c.body), c.refusal, c.keep_alive, c.http11, c.trace_line) for c in server.served]


def http(data: bytes) -> None:
    """However a client's bytes are cut, they are the same requests, bounded, each answered once; no fault is ours."""
    body, pieces, how = cut(data)
    assert _served([body], busy=bool(how & 1)) == _served(pieces, busy=bool(how & 1))
