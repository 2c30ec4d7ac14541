"""An HTTP/1.1 client that reports what went over the socket, for recordings and for the contract tests.

A client library hides the facts that matter here: when the headers came and when the first event, how the body was
framed, whether the last chunk arrived, and whether the connection stayed open. One request per connection, blocking,
bounded by a deadline. Standard library only.
"""

import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# How long, in seconds, a connection is watched after an answer, to see whether the server closes it.
LINGER_S = 0.15


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request; `body` is sent as JSON unless it is bytes or None."""

    method: str
    path: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()

    def encode(self, host: str) -> bytes:
        payload = b"" if self.body is None else self.body
        head = [f"{self.method} {self.path} HTTP/1.1", f"Host: {host}"]
        if not isinstance(payload, bytes):
            payload = json.dumps(payload).encode()
        if self.body is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
        head += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + payload


@dataclass(kw_only=True)
class Exchange:
    """What came back. Times are seconds since the request was sent; None means that it never came.

    `end` says how the exchange ended: `complete` (the whole body as framed), `cut` (the connection closed inside the
    body), `closed` (it closed before a response began), `reset`, `refused`, `silent` (nothing until the deadline),
    `unfinished` (a part, then nothing until the deadline) or `left` (the client went away on purpose). `connection` is
    `kept` or `closed`, as seen shortly after a complete answer.
    """

    status: int | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    framing: str = "none"
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    headers_s: float | None = None
    end_s: float = 0.0
    end: str = "silent"
    connection: str = "closed"

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    @property
    def is_stream(self) -> bool:
        return (self.header("content-type") or "").startswith("text/event-stream")

    def events(self) -> list[str]:
        """The data of each complete server-sent event, in order."""
        return [data for _, data in self.timed_events()]

    def timed_events(self) -> list[tuple[float, str]]:
        """The events with the time at which each was complete, in seconds since the request."""
        found, buffer = [], b""
        for at, piece in self.pieces:
            buffer += piece
            while (cut := buffer.find(b"\n\n")) >= 0:
                block, buffer = buffer[:cut], buffer[cut + 2 :]
                lines = block.decode("utf-8").split("\n")
                data = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
                if data:
                    found.append((at, "\n".join(data)))
        return found


class Reader:
    """Takes bytes off one socket until its deadline and keeps the time of each piece of the body."""

    def __init__(self, sock: socket.socket, began: float, due: float, exchange: Exchange) -> None:
        self.sock, self.began, self.due, self.exchange = sock, began, due, exchange
        self.buffer = b""

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def more(self) -> bool:
        """Reads once into the buffer; False at the end of the connection. Raises TimeoutError at the deadline."""
        self.sock.settimeout(max(self.due - time.monotonic(), 0.001))
        got = self.sock.recv(65536)
        self.buffer += got
        return bool(got)

    def until(self, mark: bytes) -> bytes | None:
        while mark not in self.buffer:
            if not self.more():
                return None
        found, _, self.buffer = self.buffer.partition(mark)
        return found

    def take(self, count: int) -> bool:
        """Moves `count` bytes to the body, as they come; False when the connection ended before."""
        while count:
            if not self.buffer and not self.more():
                return False
            piece, self.buffer = self.buffer[:count], self.buffer[count:]
            count -= len(piece)
            self.exchange.pieces.append((self.elapsed(), piece))
        return True


def read_head(reader: Reader) -> bool:
    head = reader.until(b"\r\n\r\n")
    if head is None:
        return False
    exchange = reader.exchange
    exchange.headers_s = reader.elapsed()
    status_line, *lines = head.decode("latin-1").split("\r\n")
    exchange.status = int(status_line.split(" ")[1])
    exchange.headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return True


def read_body(reader: Reader, method: str, enough: Callable[[Exchange], bool]) -> str:
    """Reads the body as its framing says; returns the word for `Exchange.end`."""
    exchange = reader.exchange
    length = exchange.header("content-length")
    if method == "HEAD" or exchange.status in {204, 304}:
        exchange.framing = "none" if length is None else "length"
        return "complete"
    if (exchange.header("transfer-encoding") or "").lower() == "chunked":
        exchange.framing = "chunked"
        return read_chunks(reader, enough)
    if length is not None:
        exchange.framing = "length"
        return "complete" if reader.take(int(length)) else "cut"
    exchange.framing = "close"
    while reader.take(1):
        if enough(exchange):
            return "left"
    return "complete"


def read_chunks(reader: Reader, enough: Callable[[Exchange], bool]) -> str:
    while True:
        line = reader.until(b"\r\n")
        if line is None:
            return "cut"
        size = int(line.partition(b";")[0], 16)
        if size == 0:
            return "complete" if reader.until(b"\r\n") is not None else "cut"
        if not reader.take(size) or reader.until(b"\r\n") is None:
            return "cut"
        if enough(reader.exchange):
            return "left"


def still_open(sock: socket.socket, linger_s: float) -> bool:
    readable, _, _ = select.select([sock], [], [], linger_s)
    try:
        return not readable or bool(sock.recv(1))
    except OSError:
        return False


def send(
    url: str,
    request: Request,
    *,
    timeout_s: float = 60.0,
    linger_s: float = LINGER_S,
    enough: Callable[[Exchange], bool] = lambda _: False,
    on_piece: Callable[[Exchange], None] | None = None,
) -> Exchange:
    """Sends one request to `http://HOST:PORT` and returns what happened; never raises for what the server did.

    `enough` is asked after each chunk and makes the client leave; `on_piece` is told after each chunk and may do
    something to the server meanwhile.
    """

    def asked(so_far: Exchange) -> bool:
        if on_piece is not None:
            on_piece(so_far)
        return enough(so_far)

    host, _, port = url.removeprefix("http://").partition(":")
    exchange = Exchange()
    began = time.monotonic()
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as sock:
            sock.sendall(request.encode(f"{host}:{port}"))
            reader = Reader(sock, began, began + timeout_s, exchange)
            exchange.end = read_body(reader, request.method, asked) if read_head(reader) else "closed"
            exchange.end_s = reader.elapsed()
            if exchange.end == "complete":
                exchange.connection = "kept" if still_open(sock, linger_s) else "closed"
    except ConnectionRefusedError:
        exchange.end = "refused"
    except TimeoutError:
        exchange.end = "silent" if exchange.headers_s is None else "unfinished"
    except OSError:
        exchange.end = "reset"
    exchange.end_s = exchange.end_s or time.monotonic() - began
    return exchange
