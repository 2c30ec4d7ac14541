"""Requests as the bytes that a client may send, and how it is told that they cannot be served."""

import asyncio
import json

import orjson

from tests.proxy.harness import MODEL, read_answer

BODY = {"model": MODEL, "prompt": "a narwhal", "max_tokens": 3}
DATA = orjson.dumps(BODY)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"


async def error_of(reader: asyncio.StreamReader) -> tuple[int, str, str | None]:
    """(status, type, code) of an error that ends its connection."""
    status, head, body = await asyncio.wait_for(read_answer(reader), 5.0)
    assert b"connection: close" in head.lower()
    assert await asyncio.wait_for(reader.read(), 5.0) == b"", "one answer, and the end"
    error = json.loads(body)["error"]
    return status, error["type"], error["code"]
