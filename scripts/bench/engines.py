"""Two engines of canned bytes, cheap enough not to be what is measured: `engines.py INTERVAL_S` prints their ports.

The first answers every request as a prefill, the second as a decode: one token at once, or a stream of `max_tokens`
tokens `INTERVAL_S` apart.
"""

import argparse
import asyncio
import re
from functools import partial
from typing import cast

import uvloop

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("interval_s", type=float)
INTERVAL_S: float = PARSER.parse_args().interval_s
MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
STREAM = re.compile(rb'"stream": ?true')
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

DESCRIPTOR = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[5,6,7,8]],"remote_engine_id":"bench",'
    b'"remote_request_id":"cmpl-1-0","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_num_tokens":64}'
)
COMPLETION = (
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"bench","choices":[{"index":0,"text":" whale",'
    b'"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":64,"total_tokens":65,"completion_tokens":1}'
)
EVENT = (
    b'data: {"id":"cmpl-11111111-1111-1111-1111-111111111111","object":"text_completion","created":1750000000,'
    b'"model":"bench","choices":[{"index":0,"text":" whale","logprobs":null,"finish_reason":null,"stop_reason":null}],'
    b'"usage":null}\n\n'
)


def answer(body: bytes) -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


PREFILL = answer(COMPLETION + b',"kv_transfer_params":' + DESCRIPTOR + b"}")
DECODE = answer(COMPLETION + b"}")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = chunk(EVENT)
LAST = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection; requests come one at a time."""

    def __init__(self, decode: bool) -> None:
        self.decode = decode
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = LENGTH.search(head)
        if length is None or len(body) < int(length.group(1)):
            return
        self.buffer = b""
        if not self.decode:
            self.transport.write(PREFILL)
        elif STREAM.search(body):
            tokens = MAX_TOKENS.search(body)
            self.left = int(tokens.group(1)) if tokens else 1
            self.due = self.loop.time()
            self.transport.write(HEAD)
            self.step()
        else:
            self.transport.write(DECODE)

    def step(self) -> None:
        """The next token, on time on average."""
        if self.transport.is_closing():
            return
        self.left -= 1
        self.transport.write(TOKEN if self.left else TOKEN + LAST)
        if self.left:
            self.due += INTERVAL_S
            self.loop.call_later(max(0.0, self.due - self.loop.time()), self.step)


async def main() -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(partial(Engine, decode), "127.0.0.1", 0) for decode in (False, True)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


uvloop.run(main())
