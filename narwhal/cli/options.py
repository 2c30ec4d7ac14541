"""What every `narwhalctl` command shares: where control is, how to print, and what the exit code says.

Exit codes: 0 done; 1 the answer is no; 2 usage or configuration; 3 control cannot be reached. A command raises the
exception that stands for its answer; nothing else ends a command with a code. Data goes to stdout, the rest to stderr.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import IO, Any

import click

DEFAULT_CONTROL = "127.0.0.1:7400"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")


class Output(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """What was said about TLS; empty for nothing."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    fleet: str = ""  # the fleet file whose `tls` is taken where the others are empty


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where control is, and how it is spoken to."""

    addresses: tuple[str, ...] = (DEFAULT_CONTROL,)
    tls: TlsOptions = TlsOptions()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The global options as they apply to the command that runs. `output` is None where the command's default rules."""

    control: Where = Where()
    output: Output | None = None

    @property
    def colour(self) -> bool:
        """Whether stdout may carry colour: only a terminal, and not where `NO_COLOR` is set (https://no-color.org)."""
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class CommandError(click.ClickException):
    """A command that ends without having done what was asked. An empty message prints nothing."""

    def show(self, file: IO[Any] | None = None) -> None:
        for line in self.message.splitlines():
            click.echo(f"narwhalctl: {line}", file=file or sys.stderr)


class AnswerIsNo(CommandError):
    """A gate failed, the fleet is not ready, a wait ran out."""

    exit_code = 1


class UsageProblem(CommandError):
    """The command line or a file named in it is wrong."""

    exit_code = 2


class ControlUnreachable(CommandError):
    """No control process answered at any of the addresses."""

    exit_code = 3


def addresses(text: str) -> tuple[str, ...]:
    """`HOST:PORT[,…]` as its parts, in order, without repetition. Raises click.BadParameter."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for part in parts:
        match = _ADDRESS.fullmatch(part)
        if match is None or not 1 <= int(match.group(2)) <= 65535:
            raise click.BadParameter(f"must be HOST:PORT[,HOST:PORT...] with ports from 1 to 65535, got {part!r}")
    if not parts:
        raise click.BadParameter("must name at least one HOST:PORT")
    return parts


def _set_control(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        where = addresses(value)
        _update(ctx, lambda settings: replace(settings, control=replace(settings.control, addresses=where)))


def _set_tls(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        name = str(param.name).removeprefix("tls_")

        def change(settings: Settings) -> Settings:
            tls = replace(settings.control.tls, **{name: value})
            return replace(settings, control=replace(settings.control, tls=tls))

        _update(ctx, change)


def _set_output(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        _update(ctx, lambda settings: replace(settings, output=Output(value)))


def _update(ctx: click.Context, change: Callable[[Settings], Settings]) -> None:
    ctx.obj = change(ctx.find_object(Settings) or Settings())


# flag → its help
_TLS = {
    "--tls-ca": "CA certificates that control is checked against",
    "--tls-cert": "certificate that control is shown",
    "--tls-key": "private key of that certificate",
    "--tls-server-name": "name that control's certificate must be for, where that is not the address",
    "--fleet": "fleet file whose tls files are taken",
}


def variable(flag: str) -> str:
    """The environment variable that stands for a global option."""
    return "NARWHAL_" + flag.removeprefix("--").replace("-", "_").upper()


def _tls_options(environment: bool) -> list[click.Option]:
    return [
        click.Option(
            [flag],
            metavar="NAME" if flag.endswith("name") else "FILE",
            envvar=variable(flag) if environment else None,
            expose_value=False,
            callback=_set_tls,
            help=f"{meaning[0].upper()}{meaning[1:]}, or {variable(flag)}.",
        )
        for flag, meaning in _TLS.items()
    ]


def global_options(*, environment: bool = False) -> list[click.Option]:
    """Fresh global options, for the group and for each command: they may stand on either side of its name.

    Only the group's read the environment, else the environment would win over the group's flags.
    """
    return [
        click.Option(
            ["--control"],
            metavar="HOST:PORT[,...]",
            envvar=variable("--control") if environment else None,
            expose_value=False,
            callback=_set_control,
            help=f"Control processes to ask, or NARWHAL_CONTROL; {DEFAULT_CONTROL} unless told otherwise.",
        ),
        *_tls_options(environment),
        click.Option(
            ["-o", "--output"],
            type=click.Choice([output.value for output in Output]),
            expose_value=False,
            callback=_set_output,
            help="How data is printed; a table unless told otherwise.",
        ),
    ]


pass_settings = click.make_pass_decorator(Settings, ensure=True)
