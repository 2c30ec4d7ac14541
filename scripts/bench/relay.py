"""The price to compare with: a bare two-leg relay that places, checks, measures and reports nothing.

aiohttp towards the client, a protocol on httptools towards the engines, chunks written straight to the transport.
`relay.py PORT PREFILL_PORT DECODE_PORT`, all on 127.0.0.1.
"""

import argparse
import asyncio
from typing import ClassVar, cast

import orjson
import uvloop
from aiohttp import web
from httptools import HttpResponseParser

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("port", "prefill_port", "decode_port"):
    PARSER.add_argument(name, type=int)
PORT, PREFILL, DECODE = vars(PARSER.parse_args()).values()
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
HEAD = b"POST %b HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


class Connection(asyncio.Protocol):
    """One keep-alive connection to an engine."""

    idle: ClassVar[dict[int, list["Connection"]]] = {PREFILL: [], DECODE: []}

    def __init__(self, port: int) -> None:
        self.port = port
        self.parts: list[bytes] = []
        self.sink = self.parts.append

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    @classmethod
    async def take(cls, port: int) -> "Connection":
        """An idle connection, or a new one."""
        if cls.idle[port]:
            return cls.idle[port].pop()
        _, connection = await asyncio.get_running_loop().create_connection(lambda: cls(port), "127.0.0.1", port)
        return connection

    async def ask(self, path: bytes, body: bytes) -> bytes:
        """The body of the answer, unless a sink has taken it."""
        self.parser = HttpResponseParser(self)
        self.parts.clear()
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(HEAD % (path, len(body), body))
        await self.done
        self.sink = self.parts.append
        self.idle[self.port].append(self)
        return b"".join(self.parts)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.sink(data)

    def on_message_complete(self) -> None:
        self.done.set_result(None)


async def completion(request: web.Request) -> web.StreamResponse:
    """Both legs."""
    body, path = orjson.loads(await request.read()), request.path.encode()
    prefill = await Connection.take(PREFILL)
    answer = await prefill.ask(
        path, orjson.dumps({**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK})
    )
    body["kv_transfer_params"] = orjson.loads(answer)["kv_transfer_params"]
    decode = await Connection.take(DECODE)
    if not body.get("stream"):
        return web.Response(body=await decode.ask(path, orjson.dumps(body)), content_type="application/json")
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    out.enable_chunked_encoding()
    await out.prepare(request)
    assert request.transport is not None
    write = request.transport.write
    decode.sink = lambda data: write(b"%x\r\n%b\r\n" % (len(data), data))
    await decode.ask(path, orjson.dumps(body))
    await out.write_eof()
    return out


async def main() -> None:
    """Serve until killed."""
    app = web.Application()
    app.router.add_post("/v1/completions", completion)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", PORT).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


uvloop.run(main())
