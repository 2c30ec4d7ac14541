"""`narwhal-sim`: simulated engines as a program."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import click
import orjson
import structlog
import uvloop

from narwhal.clock import RealClock
from narwhal.config import FleetFileError, load_fleet
from narwhal.logs import setup_logging
from narwhal.sim import faults as fault_table
from narwhal.sim.engine import KILLED, Engine
from narwhal.sim.faults import Fault
from narwhal.sim.host import Host
from narwhal.sim.options import HOME_HANDOFFS, LOAD_FAILURE_POLICIES, EngineOptions

_DEFAULTS = EngineOptions()
_Faults = list[tuple[str, Fault]]


def _number(name: str, help_text: str) -> Callable[[Any], Any]:
    """A flag for one numeric field of `EngineOptions`."""
    default = getattr(_DEFAULTS, name)
    return click.option(
        f"--{name.replace('_', '-')}", name, type=type(default), default=default, show_default=True, help=help_text
    )


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--id", "name", default=_DEFAULTS.id, show_default=True, help="Name of the one engine.")
@click.option("--host", default=_DEFAULTS.host, show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=None, help="HTTP port of the one engine; 0 takes a free one."
)
@click.option(
    "--engine", "pairs", multiple=True, metavar="ID=PORT", help="One of several engines in this process; repeatable."
)
@click.option(
    "--fleet",
    type=click.Path(dir_okay=False),
    help="Start every engine of this fleet file at its URL, in this process.",
)
@click.option("--model", default=None, help=f"The model served.  [default: {_DEFAULTS.model}, or the fleet file's]")
@click.option("--version", "version", default=_DEFAULTS.version, show_default=True, help="What `/version` answers.")
@click.option("--api-key", default=None, help="Bearer token that `/v1/*` wants.  [default: none, or the fleet file's]")
@click.option("--engine-id", default=None, help="A fixed KV engine id.  [default: a new one at every start]")
@click.option(
    "--kv-load-failure-policy",
    type=click.Choice(LOAD_FAILURE_POLICIES),
    default="fail",
    show_default=True,
    help="What a decode engine does when a transfer fails.",
)
@click.option(
    "--fault",
    "fault_texts",
    multiple=True,
    metavar="[ID:]NAME[=VALUE][,KEY=VALUE…]",
    help="A fault from the start (`narwhal-sim faults` lists them); repeatable.",
)
@click.option(
    "--home-handoffs",
    type=click.Choice(HOME_HANDOFFS),
    default=_DEFAULTS.home_handoffs,
    show_default=True,
    help="What becomes of a handoff that is sent to its own producer.",
)
@click.option(
    "--empty-short-handoffs", is_flag=True, help="Handoffs of prompts shorter than one KV block name no blocks."
)
@_number("prefill_base_ms", "Milliseconds of every prefill.")
@_number("prefill_ms_per_token", "Milliseconds of prefill per prompt token.")
@_number("tpot_ms", "Milliseconds between output tokens.")
@_number("jitter", "Share by which every time varies, e.g. 0.2.")
@_number("seed", "Seed of that variation.")
@_number("tokens_per_step", "Most tokens in one stream event.")
@_number("block_size", "Tokens per KV block.")
@_number("max_model_len", "Tokens of prompt and answer together.")
@_number("kv_lease_s", "Seconds after which an unread handoff is freed.")
@_number("keepalive_s", "Seconds after which an idle connection is closed.")
@_number("first_pull_s", "Seconds of the handshake of two engines' first transfer.")
@_number("handshake_timeout_s", "Seconds after which an unanswered handshake fails.")
@_number("resolve_timeout_s", "Seconds after which a transfer from an unknown host name fails.")
@_number("shutdown_s", "Seconds of 500s after SIGTERM.")
@_number("core_death_s", "Seconds between the engine core's death and the exit.")
@click.pass_context
def main(
    context: click.Context,
    /,
    *,
    name: str,
    port: int | None,
    pairs: tuple[str, ...],
    fleet: str | None,
    fault_texts: tuple[str, ...],
    **flags: Any,
) -> None:
    """Simulated engines that speak the engine protocol over real sockets, with injectable faults.

    Prints one line of JSON when ready. SIGTERM ends the engines as vLLM ends.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        options = _engines(name, port, pairs, fleet, flags)
        started = _faults(fault_texts, {each.id for each in options})
    except (ValueError, FleetFileError) as error:
        raise click.UsageError(str(error)) from None
    setup_logging()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_serve(options, started))
    except OSError as error:
        click.echo(f"narwhal-sim: cannot listen: {error.strerror or error}", err=True)
        sys.exit(1)
    sys.exit(code)


@main.command("faults")
@click.option("--format", "form", type=click.Choice(("text", "markdown")), default="text", show_default=True)
def list_faults(form: str) -> None:
    """List the faults, one a line."""
    click.echo("\n".join(fault_table.lines(form)))


def _engines(
    name: str, port: int | None, pairs: tuple[str, ...], fleet: str | None, flags: dict[str, Any]
) -> list[EngineOptions]:
    """The engines that the flags name, in one of the three ways. Raises ValueError."""
    if sum((port is not None, bool(pairs), fleet is not None)) != 1:
        raise ValueError("give one of --port, --engine and --fleet")
    given = {key: value for key, value in flags.items() if value is not None}
    if fleet is not None:
        config = load_fleet(fleet, os.environ)
        given.setdefault("model", config.model)
        if config.engine.api_key is not None:
            given.setdefault("api_key", config.engine.api_key.get_secret_value())
        return [EngineOptions(**{**given, "id": str(each.id), **_address(str(each.url))}) for each in config.engines]
    if pairs:
        listed = [_pair(pair) for pair in pairs]
        if len({each for each, _ in listed}) != len(listed):
            raise ValueError("--engine: two engines have the same id")
        return [EngineOptions(**{**given, "id": each, "port": at}) for each, at in listed]
    return [EngineOptions(**given, id=name, port=port or 0)]


def _address(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.path not in ("", "/"):
        raise ValueError(f"{url}: simulated engines listen on http://HOST:PORT only")
    return {"host": parts.hostname, "port": parts.port or 80}


def _pair(text: str) -> tuple[str, int]:
    name, _, port = text.rpartition("=")
    if not name or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--engine: expected ID=PORT, got {text!r}")
    return name, int(port)


def _faults(texts: tuple[str, ...], ids: set[str]) -> _Faults:
    """The faults to start with, each with the engine it is for or None for all. Raises ValueError."""
    found: _Faults = []
    for text in texts:
        name, colon, rest = text.partition(":")
        target = name if colon and "=" not in name else None
        if target is not None and target not in ids:
            raise ValueError(f"--fault: no engine {target!r}; there are {', '.join(sorted(ids))}")
        copies = [target] if target is not None else sorted(ids)
        found += [(each, fault_table.parse(rest if target is not None else text)) for each in copies]
    return found


async def _serve(options: list[EngineOptions], started: _Faults) -> int:
    """Run the engines until they or the process are told to end; the exit code.

    Raises OSError where a port is taken.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[int] = loop.create_future()
    host: Host

    def on_exit(engine: Engine, code: int) -> None:
        if len(host.engines) == 1:
            if code != 0:
                _die(code)
            if not over.done():
                over.set_result(0)

    log = structlog.get_logger()
    host = Host(options, clock=RealClock(), log=lambda engine, what: log.info(what, engine=engine), on_exit=on_exit)
    await host.start()
    for name, fault in started:
        await host.engines[name].add_fault(fault)
    ending: list[asyncio.Task[None]] = []

    async def end() -> None:
        await host.terminate()
        if not over.done():
            over.set_result(0)

    def on_signal() -> None:
        if not ending:
            ending.append(loop.create_task(end()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    listed = [{"id": engine.id, "url": engine.url, "pid": os.getpid()} for engine in host.engines.values()]
    sys.stdout.write(orjson.dumps({"ready": True, "engines": listed}).decode() + "\n")
    sys.stdout.flush()
    code = await over
    await host.stop()
    return code


def _die(code: int) -> None:
    """End this process as its one engine ends: by the signal, or with the exit code; nothing is cleaned up."""
    if code == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


if __name__ == "__main__":
    main()
