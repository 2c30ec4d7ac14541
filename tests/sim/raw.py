"""A client that sees what libraries hide: how an answer ends, and when each piece of it came."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools


@dataclass
class Answer:
    """`end`: complete, cut (FIN before the end), reset, malformed, refused, silent (nothing more in time) or enough."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    end: str = "silent"
    headers_s: float | None = None
    end_s: float = 0.0
    segments: list[bytes] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The whole events so far, decoded; [DONE] as it is."""
        blocks = self.body.decode("utf-8", "replace").split("\n\n")[:-1]
        data = [block.removeprefix("data: ") for block in blocks]
        return [text if text == "[DONE]" else json.loads(text) for text in data]

    @property
    def text(self) -> str:
        """What the answer says, streamed or not, on either route."""
        found = self.events if self.headers.get("content-type", "").startswith("text/event-stream") else [self.json]
        said = ""
        for event in found:
            for choice in event["choices"] if isinstance(event, dict) and "choices" in event else []:
                said += (
                    choice["text"]
                    if "text" in choice
                    else (choice.get("delta") or choice["message"]).get("content", "")
                )
        return said

    @property
    def error(self) -> dict[str, Any] | None:
        """The error event of a stream, or the error of a body."""
        found = self.events if self.headers.get("content-type", "").startswith("text/event-stream") else [self.json]
        return next((event["error"] for event in found if isinstance(event, dict) and "error" in event), None)


class Connection:
    """One connection; requests one after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, url: str) -> "Connection":
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: engine",
            *(f"{key}: {value}" for key, value in (headers or {}).items()),
        ]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(raw)}"]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + raw)

    async def receive(
        self, *, timeout_s: float = 20.0, enough: Callable[[Answer], bool] = lambda answer: False, head: bool = False
    ) -> Answer:
        reading = _Reading()
        parser = httptools.HttpResponseParser(reading)
        reading.status_of = parser.get_status_code
        answer, began = reading.answer, time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while not reading.complete and not enough(answer):
                    data = await self.reader.read(65536)
                    answer.arrivals_s.append(time.monotonic() - began)
                    if not data:
                        answer.end = "cut"
                        break
                    answer.segments.append(data)
                    parser.feed_data(data)
                    if answer.headers_s is None and answer.status is not None:
                        answer.headers_s = time.monotonic() - began
                        reading.complete = reading.complete or head
                else:
                    answer.end = "complete" if reading.complete else "enough"
        except TimeoutError:
            answer.end = "silent"
        except ConnectionResetError:
            answer.end = "reset"
        except httptools.HttpParserError:
            answer.end = "malformed"
        answer.end_s = time.monotonic() - began
        return answer

    async def closed(self, timeout_s: float = 20.0) -> str:
        """How the other side ends this idle connection: closed or reset. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            try:
                return "closed" if await self.reader.read(1) == b"" else "data"
            except ConnectionResetError:
                return "reset"

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class _Reading:
    """The parser's callbacks."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.status_of: Callable[[], int] = int
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.answer.status = self.status_of()

    def on_body(self, body: bytes) -> None:
        self.answer.body += body

    def on_message_complete(self) -> None:
        self.complete = True


async def ask(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float = 20.0,
    enough: Callable[[Answer], bool] = lambda answer: False,
) -> Answer:
    """One request on a connection of its own, which is closed in the end."""
    try:
        connection = await Connection.to(url)
    except ConnectionRefusedError:
        return Answer(end="refused")
    except ConnectionResetError:  # it waited to be accepted when the listener was closed
        return Answer(end="reset")
    try:
        connection.send(method, path, body, headers)
        return await connection.receive(timeout_s=timeout_s, enough=enough, head=method == "HEAD")
    finally:
        await connection.close()


async def refused(url: str, *, timeout_s: float = 20.0) -> None:
    """Wait until connections are refused. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while (await ask(url, "GET", "/health", timeout_s=timeout_s)).end != "refused":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
