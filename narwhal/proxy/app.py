"""`narwhal-proxy`: the composition root of the supervisor. Workers have their own in `workers.py`."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import structlog
from aiohttp import web

from narwhal.clock import RealClock
from narwhal.config import FleetConfig, FleetFileError, load_fleet
from narwhal.config.reload import PROXY_FIXED, PROXY_REFUSED, refuse_reload, restart_words
from narwhal.daemon import Address, Addresses, Listening, StartError, bound, give_up, joined, listen, unlisten
from narwhal.logs import LogFormat, setup_logging
from narwhal.proxy.admin import admin_http
from narwhal.proxy.line import Start
from narwhal.proxy.supervisor import Supervisor
from narwhal.tls import TlsError, read_tls

CONTROL = "127.0.0.1:7400"
MOST_WORKERS = 256

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags."""

    fleet: Path | None
    control: tuple[str, ...]
    http: tuple[str, int]
    admin: tuple[str, int]
    workers: int
    id: str
    log_format: LogFormat


class Proxy:
    """One proxy: the listening sockets, the workers, the signals."""

    def __init__(self, options: Options, config: FleetConfig | None) -> None:
        self._options = options
        self._config = config

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT has drained all workers. Raises StartError."""
        options = self._options
        self._check_tls()
        with contextlib.ExitStack() as stack:
            listener = listen(options.http, "HTTP")
            stack.callback(unlisten, listener)
            admin = stack.enter_context(listen(options.admin, "admin"))
            http = joined(*bound(listener))
            supervisor = Supervisor(
                template=self._template(http),
                workers=options.workers,
                listener=listener,
                clock=RealClock(),
                rng=random.Random(),
            )
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, supervisor.stop)
            loop.add_signal_handler(signal.SIGHUP, self._reload, supervisor)
            runner = web.AppRunner(admin_http(supervisor), access_log=None)
            await runner.setup()
            try:
                await web.SockSite(runner, admin).start()
                working = asyncio.create_task(supervisor.run())
                await supervisor.serving()
                log.info("listening", http=http, admin=joined(*bound(admin)), workers=options.workers, pid=os.getpid())
                await working
            finally:
                await runner.cleanup()

    def _check_tls(self) -> None:
        """Each worker reads the files for itself; what is wrong with them at the start ends it. Raises StartError."""
        files = self._config.tls.files if self._config is not None else None
        if files is not None:
            try:
                read_tls(files)
            except TlsError as error:
                raise StartError(str(error), 2) from error

    def _template(self, http: str) -> Start:
        config, options = self._config, self._options
        tls = config.tls.files if config is not None else None
        return Start(
            id=options.id or f"{socket.gethostname()}-{Path(http.rpartition(':')[2]).name}",
            slot=0,
            boot=0,
            controls=list(options.control),
            fleet=config.name if config is not None else "",
            settings=config.proxy_settings().to_json().decode() if config is not None else "",
            address=http,
            log_format=options.log_format,
            tls=[tls.ca, tls.cert, tls.key] if tls is not None else [],
        )

    def _reload(self, supervisor: Supervisor) -> None:
        """Reads the fleet file again. An invalid one changes nothing and says so."""
        if self._options.fleet is None or self._config is None:
            log.info("nothing to read again: this proxy takes its settings from control")
            return
        try:
            config = load_fleet(self._options.fleet, os.environ)
            refuse_reload(self._config, config, PROXY_REFUSED)
        except FleetFileError as error:
            log.error("the fleet file is not applied", reason="; ".join(error.problems))
            return
        supervisor.reload(config.proxy_settings().to_json().decode())
        log.info(f"the fleet file was read again{restart_words(self._config, config, PROXY_FIXED)}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--fleet", type=click.Path(path_type=Path), help="The fleet file; not needed where --control is given.")
@click.option(
    "--control", type=Addresses(), help=f"gRPC addresses of all control processes.  [default: {CONTROL} with --fleet]"
)
@click.option("--http", type=Listening(), default="127.0.0.1:8000", show_default=True, help="Where clients are served.")
@click.option(
    "--admin", type=Address(), default="127.0.0.1:8001", show_default=True, help="/health, /ready, /metrics of all."
)
@click.option("--workers", type=click.IntRange(1, MOST_WORKERS), default=1, show_default=True, help="Worker processes.")
@click.option("--id", "name", default="", help="Name of this proxy; the host's name and the HTTP port by default.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.version_option(package_name="narwhal")
def main(  # noqa: PLR0917 - click passes them by name
    fleet: Path | None,
    control: tuple[str, ...] | None,
    http: tuple[str, int],
    admin: tuple[str, int],
    workers: int,
    name: str,
    log_format: LogFormat,
) -> None:
    """The data proxy: serves the OpenAI API over the engines that control places.

    Exit status: 0 after SIGTERM or SIGINT, 1 when it cannot run (an address in use), 2 for a usage or configuration
    error. A second SIGTERM cuts what still runs.
    """
    if fleet is None and control is None:
        raise click.UsageError("one of --fleet and --control is needed")
    setup_logging(log_format)
    config = None
    if fleet is not None:
        try:
            config = load_fleet(fleet, os.environ)
        except FleetFileError as error:
            for problem in error.problems:
                click.echo(f"{fleet}: {problem}", err=True)
            sys.exit(2)
    options = Options(
        fleet=fleet,
        control=control or (CONTROL,),
        http=http,
        admin=admin,
        workers=workers,
        id=name,
        log_format=log_format,
    )
    try:
        asyncio.run(Proxy(options, config).run())
    except StartError as error:
        give_up("narwhal-proxy", error)
