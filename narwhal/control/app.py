"""`narwhal-control`: the composition root. Builds what is real (clock, store, servers), and ends it in good order."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import structlog
import uvloop

from narwhal.clock import Clock, RealClock
from narwhal.config import FleetConfig, FleetFileError, load_fleet
from narwhal.config.reload import CONTROL_FIXED, CONTROL_REFUSED, refuse_reload, restart_words
from narwhal.control.candidate import ResumeRefusedError
from narwhal.control.core.records import EventKind, Record
from narwhal.control.endpoints import control_http
from narwhal.control.fleet_service import FleetService
from narwhal.control.journal import Journal
from narwhal.control.leader import Leader
from narwhal.control.metrics import ControlMetrics
from narwhal.control.observe import Observer
from narwhal.control.peer import dialler
from narwhal.control.plan import make_plan
from narwhal.control.publisher import Publisher
from narwhal.control.servers import Servers, advertised, credentials
from narwhal.control.service import OutcomeService, PlacementService
from narwhal.control.standby import Standby
from narwhal.control.store.base import Store, StoreError
from narwhal.control.store.etcd import EtcdStore
from narwhal.control.store.etcd_client import EtcdSettings
from narwhal.control.store.file import FileStore
from narwhal.control.writer import NotLeading
from narwhal.control.yielding import Yielding
from narwhal.daemon import Address, StartError, give_up
from narwhal.logs import LogFormat, setup_logging
from narwhal.tls import TlsError

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags."""

    fleet: Path
    resume: bool
    grpc: tuple[str, int]
    http: tuple[str, int]
    id: str


def _etcd_settings(config: FleetConfig) -> EtcdSettings:
    store = config.store
    return EtcdSettings(
        endpoints=store.endpoints,
        prefix=store.prefix,
        fleet=config.name,
        ttl_s=int(config.lease.ttl_s),
        safety_margin_s=config.lease.safety_margin_s,
        ca=store.ca,
        cert=store.cert,
        key=store.key,
        username=store.username,
        password=store.password.get_secret_value() if store.password is not None else None,
    )


async def open_store(config: FleetConfig, observer: Observer) -> Store:
    """The store that the fleet file names; what people should know of it goes to `observer`. Raises StartError."""

    def warn(words: str) -> None:
        observer.record(Record(kind=EventKind.STORE_WARNING, message=words))

    try:
        if config.store.kind == "etcd":
            return await EtcdStore.open(_etcd_settings(config), RealClock(), warn=warn)
        return await FileStore.open(Path(config.store.path))
    except StoreError as error:
        raise StartError(str(error)) from error


# --- the process ------------------------------------------------------------------------------------------------------


class Control:
    """One control process."""

    def __init__(self, options: Options, config: FleetConfig) -> None:
        self._options = options
        self._config = config  # as it was at the start
        self._observer = Observer(RealClock())
        self._reloading = asyncio.Lock()
        self._reloads: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT. Raises StartError."""
        servers = Servers()
        servers.bind_grpc(self._options.grpc, credentials(self._config.tls))
        store = await open_store(self._config, self._observer)
        try:
            await self._serve(servers, store)
        finally:
            await store.close()

    async def _serve(self, servers: Servers, store: Store) -> None:
        clock = RealClock()
        publisher = Publisher(clock)
        holder = self._options.id or f"{socket.gethostname()}/{servers.grpc_address.rpartition(':')[2]}"
        journal = self._journal(holder, clock)
        leader = Leader(
            plan=make_plan(self._config),
            store=store,
            clock=clock,
            publisher=publisher,
            observer=self._observer,
            holder=holder,
            address=advertised(servers.grpc_address),
            resume=self._options.resume,
            journal=journal,
        )
        record = self._observer.record
        yielding = Yielding(leader, store=store, clock=clock, record=record)
        standby = Standby(leader, store=store, clock=clock, record=record, dial=dialler(self._config.tls))
        metrics = ControlMetrics(leader, publisher, self._observer, clock)
        try:
            await servers.start_http(control_http(leader, metrics.render), self._options.http)
            fleet = self._config.name
            await servers.start(
                [
                    PlacementService(leader, publisher, fleet=fleet).handlers(),
                    OutcomeService(leader).handlers(),
                    FleetService(leader, publisher, self._observer, clock, yielding).handlers(),
                ]
            )
            log.info("listening", grpc=servers.grpc_address, http=servers.http_address, fleet=fleet, pid=os.getpid())
            health = servers.follow(lambda: leader.readiness().control_ready)
            await self._until_told(leader, [leader.run(), publisher.run(), standby.run(), health])
        finally:
            await servers.stop()
            if journal is not None:
                await journal.close()

    def _journal(self, holder: str, clock: Clock) -> Journal | None:
        """The event journal, unless it is switched off."""
        config = self._config
        if not config.journal.max_bytes:
            return None
        return Journal(
            config.journal_directory,
            max_bytes=config.journal.max_bytes,
            clock=clock,
            holder=holder,
            tell=self._observer.record,
        )

    async def _until_told(self, leader: Leader, work: list[Awaitable[None]]) -> None:
        """Runs `work` until a signal ends the process, or one of it fails."""
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload_soon, leader)
        tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(each) for each in work]
        stop = asyncio.create_task(told.wait())
        try:
            everything: list[asyncio.Future[Any]] = [stop, *tasks]
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            await leader.stop()
            for task in tasks:
                if task.done():
                    task.result()
        except ResumeRefusedError as error:
            raise StartError(str(error), 2) from error
        finally:
            ending: list[asyncio.Future[Any]] = [stop, *tasks, *self._reloads]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    # --- reload -----------------------------------------------------------------------------------------------------

    def _reload_soon(self, leader: Leader) -> None:
        task = asyncio.get_running_loop().create_task(self._reload(leader))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self, leader: Leader) -> None:
        """Reads the fleet file again. An invalid one changes nothing and says so."""
        async with self._reloading:
            try:
                config = await asyncio.to_thread(load_fleet, self._options.fleet, os.environ)
                refuse_reload(self._config, config, CONTROL_REFUSED)
                new = make_plan(config)
            except FleetFileError as error:
                words = f"the fleet file is not applied: {'; '.join(error.problems)}"
                self._observer.record(Record(kind=EventKind.RELOAD_REFUSED, message=words))
                return
            with contextlib.suppress(NotLeading):  # the next term begins with it
                await leader.reload(new)
            words = f"the fleet file was read again{restart_words(self._config, config, CONTROL_FIXED)}"
            self._observer.record(Record(kind=EventKind.RELOADED, message=words))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--fleet", required=True, type=click.Path(path_type=Path), help="The fleet file.")
@click.option("--resume", is_flag=True, help="Go on from the saved state handoff.")
@click.option(
    "--grpc", type=Address(), default="127.0.0.1:7400", show_default=True, help="Where gRPC is served; port 0: any."
)
@click.option(
    "--http", type=Address(), default="127.0.0.1:7401", show_default=True, help="Where HTTP is served; port 0: any."
)
@click.option("--id", "name", default="", help="Name of this process; the host's name and the gRPC port by default.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.version_option(package_name="narwhal")
def main(  # noqa: PLR0917 - click passes them by name
    fleet: Path, resume: bool, grpc: tuple[str, int], http: tuple[str, int], name: str, log_format: LogFormat
) -> None:
    """The control service: watches the engines of a fleet and decides which may serve.

    Active or standby, decided by the lease. Exit status: 0 after SIGTERM or SIGINT, 1 when it cannot run (an address in
    use, a store that cannot be opened), 2 for a usage or configuration error.
    """
    setup_logging(log_format)
    try:
        config = load_fleet(fleet, os.environ)
    except FleetFileError as error:
        for problem in error.problems:
            click.echo(f"{fleet}: {problem}", err=True)
        sys.exit(2)
    options = Options(fleet=fleet, resume=resume, grpc=grpc, http=http, id=name)

    async def run() -> None:
        await Control(options, config).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except StartError as error:
        give_up("narwhal-control", error)
    except TlsError as error:  # the files were another's a moment ago: they are read for each side of a connection
        give_up("narwhal-control", StartError(str(error), 2))
