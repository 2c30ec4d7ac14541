"""One worker process of a proxy: `python -m narwhal.proxy.workers`, started by the supervisor only. Composition root.

Started by exec, since a process forked from one that used gRPC hangs in its first call. Everything it needs comes over
the line: nothing secret stands in its arguments. It ends in good order on SIGTERM and when its supervisor is gone; a
second SIGTERM cuts what still runs.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import sys
from typing import Any

import grpc
import structlog
import uvloop
from prometheus_client import CollectorRegistry, generate_latest

from narwhal.clock import Clock, RealClock
from narwhal.config import ProxySettings, ServingConfig
from narwhal.connectors.vllm_nixl import VllmNixl
from narwhal.logs import setup_logging
from narwhal.proxy.accepting import Acceptor
from narwhal.proxy.attempt import Fault
from narwhal.proxy.backlog import Backlog
from narwhal.proxy.client import Client, Connection, Letterhead
from narwhal.proxy.endpoints import ALIVE, DataPath, path_of, unready
from narwhal.proxy.errors import reply
from narwhal.proxy.garbage import collect_seldom
from narwhal.proxy.line import Line, Start
from narwhal.proxy.link import Dial, Introduction, say_goodbye
from narwhal.proxy.measuring import Measuring
from narwhal.proxy.metrics import Metrics, ProxyCollector
from narwhal.proxy.reporter import OutcomeReporter
from narwhal.proxy.seams import Inflight
from narwhal.proxy.server import ClientServer
from narwhal.proxy.view import PlacementView
from narwhal.tls import TlsError, TlsFiles, read_tls
from narwhal.vocabulary import NotReady

# A worker that has just been started leaves connections to the others until it has a placement, but not for ever: alone
# and without control it has to say so on /ready.
FIRST_PLACEMENT_S = 1.0

CONNECTORS = {"vllm-nixl": VllmNixl}

_log = structlog.get_logger()


def dialler(tls: list[str]) -> Dial:
    """How control is called: over TLS when the three files (ca, cert, key) are given. Raises TlsError."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, never one that has gone silent
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if not tls:
        return lambda address: grpc.aio.insecure_channel(address, options=options)
    ca, cert, key = tls
    read = read_tls(TlsFiles(ca=ca, cert=cert, key=key))
    credentials = grpc.ssl_channel_credentials(read.ca, read.key, read.cert)
    return lambda address: grpc.aio.secure_channel(address, credentials, options=options)


class Worker:
    """Everything of one worker. Build it on the running loop, then `run`."""

    def __init__(self, line: Line, listener: socket.socket, start: Start) -> None:
        clock = RealClock()
        self._line = line
        self._clock = clock
        self._inflight = Inflight()
        self._metrics = Metrics()
        self._view = PlacementView(
            addresses=start.controls,
            dial=dialler(start.tls),
            introduction=Introduction(proxy=start.proxy, fleet=start.fleet, address=start.address, pid=os.getpid()),
            inflight=self._inflight,
            clock=clock,
            rng=random.Random(),
            settings=ProxySettings.from_json(start.settings.encode()) if start.settings else None,
        )
        self._measuring = Measuring(clock.monotonic())
        self._reporter = OutcomeReporter(
            Backlog(start.proxy),
            self._measuring,
            wait_lead=self._view.wait_lead,
            clock=clock,
            rng=random.Random(),
        )
        self._metrics.gauges["placement_age_seconds"] = self._view.placement_age_s
        self._metrics.gauges["outcomes_unacknowledged"] = lambda: self._reporter.unacknowledged
        registry = CollectorRegistry()
        registry.register(ProxyCollector(lambda: self._view.settings.name, self._snapshot))
        self._exposition = lambda: generate_latest(registry)
        self._acceptor = Acceptor(listener, ClientServer(Unconfigured(clock)))
        self._path: DataPath | None = None
        self._told = asyncio.Event()
        self._signals = 0
        self._cuts: set[asyncio.Task[None]] = set()

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until told to end. Returns the exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._signalled)
        self._line.send("begun")
        work = [
            asyncio.create_task(self._view.run()),
            asyncio.create_task(self._reporter.run()),
            asyncio.create_task(self._obey()),
            asyncio.create_task(self._serve()),
        ]
        told = asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait([told, *work], return_when=asyncio.FIRST_COMPLETED)
            crashed = [error for task in work if task.done() and (error := task.exception()) is not None]
            for error in crashed:
                _log.error("worker crashed", exc_info=error)
            work.pop().cancel()
            await self._end()
            return 1 if crashed else 0
        finally:
            for task in (told, *work):
                task.cancel()
            await asyncio.gather(told, *work, return_exceptions=True)

    async def _serve(self) -> None:
        """Accept connections; answer them by the data path as soon as settings are known."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PLACEMENT_S):
                await self._view.configured.wait()
                await self._view.placed.wait()
        if self._view.configured.is_set():
            self._build_path()
        self._acceptor.start()
        self._line.send("serving")
        await self._view.configured.wait()
        if self._path is None:
            self._build_path()
        await asyncio.Event().wait()

    def _build_path(self) -> None:
        connector = CONNECTORS[self._view.settings.engine.connector]()
        self._path = DataPath(
            self._view,
            self._reporter,
            self._clock,
            connector,
            inflight=self._inflight,
            metrics=self._metrics,
            measuring=self._measuring,
            draws=random.Random(),
            exposition=self._exposition,
        )
        self._path.start()
        self._acceptor.factory = self._path.handler

    async def _end(self) -> None:
        """Let running requests finish within their grace, tell the rest, say goodbye."""
        grace_s = self._grace_s()
        self._line.send("draining", grace_s)
        if self._path is not None:
            await self._path.stop(grace_s)
        self._acceptor.stop()
        await self._reporter.close()
        await self._view.close("the proxy ends")

    def _grace_s(self) -> float:
        if self._signals > 1 or not self._view.configured.is_set():
            return 0.0
        return self._view.settings.serving.graceful_timeout_s

    def _signalled(self) -> None:
        self._signals += 1
        self._told.set()
        if self._signals > 1 and self._path is not None:
            cut = asyncio.create_task(self._path.stop(0.0))
            self._cuts.add(cut)
            cut.add_done_callback(self._cuts.discard)

    # --- the supervisor's orders ------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        while (message := await self._line.receive()) is not None:
            kind, content = message
            if kind == "ask":
                self._line.send("state", self._state())
            elif kind == "settings" and not self._view.set_file_settings(ProxySettings.from_json(content.encode())):
                _log.info("the fleet file was read again; control's settings stand above it")
        if not self._told.is_set():
            _log.warning("the supervisor is gone")
            self._told.set()
        await asyncio.Event().wait()

    def _state(self) -> dict[str, Any]:
        placement = self._view.placement
        path = self._path
        return {
            "not_ready": path.not_ready() if path is not None else NotReady.NO_PLACEMENT.value,
            "fleet": self._view.settings.name if self._view.configured.is_set() else "",
            "engines": list(placement.engines) if placement is not None else None,
            "metrics": self._snapshot(),
        }

    def _snapshot(self) -> dict[str, Any]:
        """The metrics, without engines that the fleet no longer has."""
        placement = self._view.placement
        if placement is not None:
            legs = self._metrics.legs
            for key in [key for key in legs if key[0] not in placement.engines]:
                del legs[key]
        return self._metrics.snapshot()


class Unconfigured:
    """What a worker answers before it knows its settings, which only control has."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._serving = ServingConfig()
        self._letterhead = Letterhead(clock, map("nw-{:x}".format, itertools.count(1)))

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def bounds(self) -> ServingConfig:
        """The defaults: nothing else is known."""
        return self._serving

    def make(self, connection: Connection, method: bytes, target: bytes) -> Client:
        """A request's head has come."""
        now = self._clock.monotonic()
        due = now + self._serving.request_timeout_s
        return Client(connection, self._letterhead, method, target, arrived_at=now, due=due)

    def begun(self, client: Client) -> None:
        """A request's body is still to come."""

    def wants_body(self, client: Client) -> bool:
        """No answer depends on it."""
        return False

    def gone(self, client: Client) -> None:
        """The client went away."""

    def serve(self, client: Client) -> None:
        """Say so, and that the process lives."""
        client.keep_alive = False
        bare = client.method == b"HEAD"
        path = path_of(client.target)
        if client.refusal is not None:
            client.refuse(reply(client.refusal))
        elif path == b"/health":
            client.send(*ALIVE, bare=bare)
        elif path == b"/ready":
            client.send(*unready(NotReady.NO_PLACEMENT.value), bare=bare)
        else:
            client.refuse(reply(Fault.CLOSED, code=NotReady.NO_PLACEMENT.value), bare=bare)
        client.connection.finished(client)


# --- the process ------------------------------------------------------------------------------------------------------


async def _work(line_fd: int, listener_fd: int) -> int:
    line = await Line.open(socket.socket(fileno=line_fd))
    message = await line.receive()
    if message is None:
        return 0  # the supervisor ended before it said anything
    start = Start(**message[1])
    setup_logging(start.log_format, proxy=str(start.proxy))
    collect_seldom()
    try:
        status = await Worker(line, socket.socket(fileno=listener_fd), start).run()
    except TlsError as error:
        # They were fine when the proxy started. The others serve on, and the supervisor tries again.
        _log.error("worker cannot start", reason=str(error))
        status = 1
    await line.close()
    return status


async def _goodbye(start: Start, reason: str) -> int:
    try:
        dial = dialler(start.tls)
    except TlsError:
        return 1  # which workers say why of
    heard = await asyncio.gather(*(say_goodbye(dial, address, start.proxy, reason) for address in start.controls))
    return 0 if any(heard) else 1


def main(arguments: list[str]) -> int:
    """`work LINE LISTENER` (descriptors), or `goodbye START REASON`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of the terminal's whole group: the supervisor decides
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if arguments[0] == "goodbye":
            return runner.run(_goodbye(Start(**json.loads(arguments[1])), arguments[2]))
        return runner.run(_work(int(arguments[1]), int(arguments[2])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
