"""A closed-loop client of little cost: `client.py PORT CONNECTIONS SECONDS TOKENS`; 0 asks for one token, not streamed.

Prints the requests that ended well, those that did not, and the tokens that came, in the time given.
"""

import argparse
import asyncio
from typing import cast

import uvloop

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, kind in (("port", int), ("connections", int), ("seconds", float), ("tokens", int)):
    PARSER.add_argument(name, type=kind)
PORT, CONNECTIONS, SECONDS, TOKENS = vars(PARSER.parse_args()).values()
BODY = b'{"model":"bench","prompt":"%b","max_tokens":%d,"stream":%b}' % (
    b"the narwhal dives under the ice " * 16,
    TOKENS or 1,
    b"true" if TOKENS else b"false",
)
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nAccept: */*\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
STREAM_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection: the next request follows the answer."""

    good = bad = open = 0
    stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.ask()

    def ask(self) -> None:
        """Send the request."""
        self.tail = b""
        Client.open += 1
        self.transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        if TOKENS:
            self.tail = self.tail[-len(STREAM_END) :] + data
            if not self.tail.endswith(STREAM_END):
                return
        else:
            self.tail += data
            head, found, body = self.tail.partition(b"\r\n\r\n")
            at = head.lower().find(b"content-length: ")
            if not found or (at >= 0 and len(body) < int(head[at + 16 :].split(b"\r\n", 1)[0])):
                return
            if not head.startswith(b"HTTP/1.1 200"):
                Client.bad += 1
                Client.good -= 1
        Client.good += 1
        Client.open -= 1
        if not Client.stopping:
            self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if Client.open:
            Client.bad += 1


async def main() -> None:
    """Run for the time given."""
    loop = asyncio.get_running_loop()
    for _ in range(CONNECTIONS):
        await loop.create_connection(Client, "127.0.0.1", PORT)
        if TOKENS:
            await asyncio.sleep(SECONDS / 100 / CONNECTIONS)  # spread, so that tokens do not come in bursts
    await asyncio.sleep(SECONDS)
    Client.stopping = True
    while Client.open and not Client.bad:  # noqa: ASYNC110  what was begun is part of the cost: let it end
        await asyncio.sleep(0.01)
    print(Client.good, Client.bad, Client.good * (TOKENS or 1), flush=True)


uvloop.run(main())
