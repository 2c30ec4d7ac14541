"""One worker's data path with everything on but a control plane: `worker.py PORT PREFILL_PORT DECODE_PORT`; for the
first, `fd:N` is a listening socket that was inherited.

Placement, admission, deadlines, metrics and the merging of outcomes are the product's; the feed stands still.
"""

import argparse
import asyncio
import socket
import sys

import uvloop

from narwhal.clock import RealClock
from narwhal.config import ProxySettings
from narwhal.connectors.vllm_nixl import VllmNixl
from narwhal.placement import EngineEntry, Placement
from narwhal.proxy.accepting import Acceptor
from narwhal.proxy.endpoints import DataPath
from narwhal.proxy.garbage import collect_seldom
from narwhal.proxy.seams import Picture
from narwhal.reports import Run
from narwhal.vocabulary import Outcome, Phase, RequestResult

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("port", help="or fd:N, a listening socket that was inherited")
for name in ("prefill_port", "decode_port"):
    PARSER.add_argument(name, type=int)
PORT, PREFILL, DECODE = vars(PARSER.parse_args()).values()


def listener() -> socket.socket:
    """Where clients come."""
    where, inherited, number = PORT.rpartition("fd:")
    if inherited:
        return socket.socket(fileno=int(number))
    made = socket.create_server(("127.0.0.1", int(where or number)), backlog=1024)
    made.setblocking(False)
    return made


class Feed:
    """A fleet of two engines that never changes."""

    def __init__(self) -> None:
        engines = {
            role.value: EngineEntry(
                id=role.value, url=f"http://127.0.0.1:{port}", role=role, phases=frozenset({role}), incarnation=1
            )
            for role, port in ((Phase.PREFILL, PREFILL), (Phase.DECODE, DECODE))
        }
        self.placement: Placement | None = Placement(epoch=1, version=1, engines=engines)
        self.settings = ProxySettings(name="bench", model="bench")
        self.picture = Picture()
        self.controlled = True

    def not_ready(self) -> str:
        return ""


class Counts:
    """Merges outcomes as a reporter does while control is away."""

    def __init__(self) -> None:
        self.legs: dict[tuple[str, Phase, int, Outcome], int] = {}
        self.requests: dict[RequestResult, int] = {}

    def success(self, engine: str, phase: Phase, incarnation: int, outcome: Outcome) -> None:
        key = (engine, phase, incarnation, outcome)
        self.legs[key] = self.legs.get(key, 0) + 1

    neutral = success

    def failure(self, run: Run) -> None:
        print(run, file=sys.stderr, flush=True)

    def request(self, result: RequestResult, retries: int) -> None:
        self.requests[result] = self.requests.get(result, 0) + 1


async def main() -> None:
    """Serve until killed."""
    collect_seldom()
    data = DataPath(Feed(), Counts(), RealClock(), VllmNixl())
    data.start()
    Acceptor(listener(), data.handler).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


uvloop.run(main())
