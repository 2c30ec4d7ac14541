"""`narwhal-attest`: the composition root."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import structlog
import uvloop
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from narwhal.attest.contract import Contract, load_contract
from narwhal.attest.endpoints import DOCUMENT, attest_http
from narwhal.attest.sidecar import Sidecar
from narwhal.config import FleetFileError
from narwhal.config.fields import BaseUrl
from narwhal.daemon import Address, StartError, bound, give_up, joined, listen
from narwhal.logs import LogFormat, setup_logging

_ENDING_S = 1.0  # for answers under way

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags. Seconds."""

    engine: str
    contract: Path
    http: tuple[str, int]
    timeout_s: float
    interval_s: float


class Attest:
    """One sidecar process."""

    def __init__(self, options: Options, contract: Contract) -> None:
        self._options = options
        self._sidecar = Sidecar(options.engine, contract, timeout_s=options.timeout_s, interval_s=options.interval_s)

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT. Raises StartError."""
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        runner = web.AppRunner(attest_http(self._sidecar), access_log=None, shutdown_timeout=_ENDING_S)
        await runner.setup()
        try:
            with listen(self._options.http, "HTTP") as listener:
                await web.SockSite(runner, listener).start()
                log.info(
                    "listening",
                    engine=self._options.engine,
                    http=joined(*bound(listener)),
                    document=DOCUMENT,
                    digest=self._sidecar.contract.digest,
                    pid=os.getpid(),
                )
                await self._look_until(told)
        finally:
            await runner.cleanup()
            await self._sidecar.close()

    async def _look_until(self, told: asyncio.Event) -> None:
        looking = asyncio.create_task(self._sidecar.run())
        stop = asyncio.create_task(told.wait())
        try:
            await asyncio.wait({looking, stop}, return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                looking.result()
        finally:
            looking.cancel()
            stop.cancel()
            await asyncio.gather(looking, stop, return_exceptions=True)

    def _reload(self) -> None:
        """Reads the contract again; the process that is attested stays. An invalid file changes nothing."""
        try:
            self._sidecar.contract = load_contract(self._options.contract)
        except FleetFileError as error:
            log.error("the contract file is not applied", engine=self._options.engine, reason="; ".join(error.problems))
            return
        log.info("the contract file was read again", engine=self._options.engine, digest=self._sidecar.contract.digest)


def _engine_url(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        return TypeAdapter(BaseUrl).validate_python(value)
    except ValidationError as error:
        raise click.BadParameter(error.errors()[0]["msg"]) from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--engine", required=True, metavar="URL", callback=_engine_url, help="The engine's own address.")
@click.option(
    "--contract", required=True, type=click.Path(path_type=Path), help="The contract's fields, in YAML or JSON."
)
@click.option(
    "--http", type=Address(), default="127.0.0.1:7402", show_default=True, help="Where it is served; port 0: any."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=2.0,
    show_default=True,
    help="Seconds in which the engine must say which process it is; less than the fleet's engine.health_timeout_s.",
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds between two looks that nobody asked for.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.version_option(package_name="narwhal")
def main(  # noqa: PLR0917 - click passes them by name
    engine: str, contract: Path, http: tuple[str, int], timeout_s: float, interval_s: float, log_format: LogFormat
) -> None:
    """The sidecar beside an engine: serves its attestation document at /attestation.

    The document holds the contract's fields and names the engine process that was seen first. It is 503 while that
    process cannot be asked, and for good once another one answers: restart the sidecar with the engine. SIGHUP reads
    the contract again.

    Exit status: 0 after SIGTERM or SIGINT, 1 when it cannot run (an address in use), 2 for a usage or configuration
    error.
    """
    setup_logging(log_format)
    try:
        fields = load_contract(contract)
    except FleetFileError as error:
        for problem in error.problems:
            click.echo(f"{contract}: {problem}", err=True)
        sys.exit(2)
    options = Options(engine=engine, contract=contract, http=http, timeout_s=timeout_s, interval_s=interval_s)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Attest(options, fields).run())
    except StartError as error:
        give_up("narwhal-attest", error)
