"""`narwhal-serve`: control and proxies of one machine as one command. Starts both, replaces what dies, ends all well.

The proxies drain first and control goes last: the last outcomes need somebody who stores them. A control process that
died comes back with `--resume`.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
import structlog

from narwhal.clock import Clock, RealClock
from narwhal.config import FleetConfig, FleetFileError, load_fleet
from narwhal.daemon import Address, StartError, bound, give_up, joined, listen
from narwhal.logs import LogFormat, setup_logging
from narwhal.proxy.pace import RETRY_CAP_S, backoff_s

REFUSED = 2  # the exit status of a daemon that cannot start as it is told to, and says why; of nothing else
LOOK_EVERY_S = 0.05
LOOK_S = 2.0  # for one answer of a child that has just been started
# Beyond the grace of running requests: for the last reports and goodbyes, which have bounds of their own.
ENDING_S = 60.0

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags, with every port a real one."""

    fleet: Path
    resume: bool
    workers: int
    http: str
    admin: str
    grpc: str
    control_http: str
    log_format: LogFormat

    def control(self, *, resume: bool) -> list[str]:
        """Arguments of narwhal-control."""
        flags = ["--fleet", str(self.fleet), "--grpc", self.grpc, "--http", self.control_http]
        return [*flags, "--log-format", self.log_format, *(["--resume"] if resume else [])]

    def proxy(self) -> list[str]:
        """Arguments of narwhal-proxy."""
        flags = ["--fleet", str(self.fleet), "--control", self.grpc, "--http", self.http, "--admin", self.admin]
        return [*flags, "--workers", str(self.workers), "--log-format", self.log_format]


@dataclass(eq=False)
class Child:
    """One daemon, kept running until `stop` was called."""

    program: str
    arguments: Callable[[bool], list[str]]  # by whether it is a restart
    address: str  # where its /health is
    clock: Clock
    rng: random.Random
    up: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Start it, and again whenever it dies. Raises StartError when it ends before it was ever up, or refuses to
        start: by then it may have answered /health, as control does before it has read the state handoff."""
        failures = 0
        began_once = False
        try:
            while not self.stopping.is_set():
                began = self.clock.monotonic()
                status = await self._live()
                if self.stopping.is_set():
                    return
                how = f"status {status}" if status >= 0 else f"signal {-status}"
                if not self.up.is_set() or (status == REFUSED and not began_once):
                    # A daemon that gives up says why itself.
                    told = status in (1, REFUSED)
                    raise StartError("" if told else f"{self.program} did not start: {how}", status if told else 1)
                began_once = True
                log.error("died and is started again", program=self.program, reason=how)
                failures = 0 if self.clock.monotonic() - began > RETRY_CAP_S else failures + 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff_s(failures, self.rng)):
                        await self.stopping.wait()
        finally:
            self.over.set()

    async def _live(self) -> int:
        """One process from its start to its end. Returns its status."""
        self.process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "narwhal.cli.child", str(os.getpid()), self.program, *self.arguments(self.up.is_set())),
            stdin=asyncio.subprocess.DEVNULL,
            process_group=0,  # what the terminal sends to everybody is for narwhal-serve to pass on
        )
        log.info("started", program=self.program, pid=process.pid)
        if self.stopping.is_set():
            self.signal(signal.SIGTERM)
        looking = asyncio.create_task(self._look())
        status = await process.wait()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        return status

    async def _look(self) -> None:
        while not await healthy(self.address):  # noqa: ASYNC110  another process's state has no event
            await asyncio.sleep(LOOK_EVERY_S)
        self.up.set()

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on, if it runs."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def stop(self, within_s: float) -> None:
        """End it: SIGTERM, and SIGKILL when it takes longer than it may."""
        self.stopping.set()
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(within_s):
                await self.over.wait()
        except TimeoutError:
            log.error("does not end and is killed", program=self.program)
            self.signal(signal.SIGKILL)
            await self.over.wait()


async def healthy(address: str) -> bool:
    """Whether `GET /health` there answers 200."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LOOK_S):
            reader, writer = await asyncio.open_connection(host.removeprefix("[").removesuffix("]"), int(port))
            try:
                writer.write(b"GET /health HTTP/1.0\r\nHost: narwhal-serve\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


class Serve:
    """Both daemons."""

    def __init__(self, options: Options, grace_s: float) -> None:
        clock, rng = RealClock(), random.Random()
        self._options = options
        self._grace_s = grace_s
        self._signals = 0
        self._told = asyncio.Event()
        self.control = Child(
            "narwhal-control",
            lambda again: options.control(resume=options.resume or again),
            options.control_http,
            clock,
            rng,
        )
        self.proxy = Child("narwhal-proxy", lambda _again: options.proxy(), options.http, clock, rng)

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises StartError when a daemon does not start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        children = [asyncio.create_task(self.control.run()), asyncio.create_task(self.proxy.run())]
        told = asyncio.create_task(self._told.wait())
        announcing = asyncio.create_task(self._announce())
        try:
            await asyncio.wait({told, *children}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            announcing.cancel()
            told.cancel()
            await self.proxy.stop(self._grace_s + ENDING_S)
            await self.control.stop(ENDING_S)
            ended = await asyncio.gather(*children, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    async def _announce(self) -> None:
        await self.control.up.wait()
        await self.proxy.up.wait()
        options = self._options
        log.info(
            "listening", http=options.http, admin=options.admin, grpc=options.grpc, control_http=options.control_http
        )

    def _signalled(self) -> None:
        self._signals += 1
        self._told.set()
        if self._signals > 1:
            self.proxy.signal(signal.SIGTERM)  # cuts what still runs
        if self._signals > 2:
            self.control.signal(signal.SIGKILL)

    def _reload(self) -> None:
        self.control.signal(signal.SIGHUP)
        self.proxy.signal(signal.SIGHUP)


def free_addresses(**wanted: tuple[str, int]) -> dict[str, str]:
    """HOST:PORT of each, free a moment ago, all different. Raises StartError.

    Looked at before anything starts: a daemon that finds its port taken would say so, but another one that answers
    there would pass for it meanwhile. Where the port is 0 the choice stays the same over restarts.
    """
    with contextlib.ExitStack() as stack:
        listeners = {name: stack.enter_context(listen(address, name)) for name, address in wanted.items()}
        return {name: joined(*bound(listener)) for name, listener in listeners.items()}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--fleet", required=True, type=click.Path(path_type=Path), help="The fleet file.")
@click.option("--resume", is_flag=True, help="Go on from the saved state handoff.")
@click.option("--workers", type=click.IntRange(1, 256), default=1, show_default=True, help="Proxy worker processes.")
@click.option("--http", type=Address(), default="127.0.0.1:8000", show_default=True, help="Where clients are served.")
@click.option("--admin", type=Address(), default="127.0.0.1:8001", show_default=True, help="The proxy's admin port.")
@click.option("--grpc", type=Address(), default="127.0.0.1:7400", show_default=True, help="Control's gRPC.")
@click.option("--control-http", type=Address(), default="127.0.0.1:7401", show_default=True, help="Control's HTTP.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.version_option(package_name="narwhal")
def main(  # noqa: PLR0917 - click passes them by name
    fleet: Path,
    resume: bool,
    workers: int,
    http: tuple[str, int],
    admin: tuple[str, int],
    grpc: tuple[str, int],
    control_http: tuple[str, int],
    log_format: LogFormat,
) -> None:
    """Everything one machine needs: a control process on the file store, and proxies.

    A port of 0 takes any free one. Exit status: 0 after SIGTERM or SIGINT has drained everything, 1 when it cannot run
    (an address in use), 2 for a usage or configuration error. A second SIGTERM cuts what still runs.
    """
    setup_logging(log_format)
    try:
        config: FleetConfig = load_fleet(fleet, os.environ)
    except FleetFileError as error:
        for problem in error.problems:
            click.echo(f"{fleet}: {problem}", err=True)
        sys.exit(2)
    try:
        addresses = free_addresses(http=http, admin=admin, grpc=grpc, control_http=control_http)
        options = Options(fleet=fleet, resume=resume, workers=workers, log_format=log_format, **addresses)
        asyncio.run(_run(options, config.serving.graceful_timeout_s))
    except StartError as error:
        give_up("narwhal-serve", error)


async def _run(options: Options, grace_s: float) -> None:
    await Serve(options, grace_s).run()
