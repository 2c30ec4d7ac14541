"""`narwhalctl proxies`: who carries traffic, by which placement, and who has fallen behind."""

from collections.abc import Iterator, Sequence

import click

from narwhal.cli import model
from narwhal.cli.client import Control
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.reach import ask
from narwhal.cli.render import Block, Cell, Line, Printer, Say, Table, Tone, age, counts, done, some


@click.group(invoke_without_command=True)
@click.pass_context
@pass_settings
def proxies(settings: Settings, ctx: click.Context) -> None:
    """Show every proxy worker: its placement, lag and legs in flight.

    `-o wide` adds address, process and the engines that its legs are on. `forget` says that a lost one is gone.
    """
    if ctx.invoked_subcommand is not None:
        return

    async def question(control: Control) -> model.Status:
        return await control.status()

    status = ask(settings.control, question)
    facts = {
        "fleet": status.fleet,
        "epoch": status.control.epoch,
        "version": status.control.version,
        "proxies": status.proxies,
    }
    Printer(settings).show(facts, lambda wide: _layout(status, wide))


@proxies.command()
@click.argument("proxy", metavar="ID[/SLOT]")
@click.option("--dry-run", is_flag=True, help="Only say what would happen.")
@pass_settings
def forget(settings: Settings, proxy: str, dry_run: bool) -> None:
    """Say that a lost proxy is gone: drains wait for it no longer.

    Only when it runs no more: one that does may go on placing legs on engines that are being drained.
    """
    answer = ask(settings.control, lambda control: control.forget(proxy, dry_run=dry_run))
    Printer(settings).show(answer, lambda _: done(answer.told, dry_run=dry_run))


def _layout(status: model.Status, wide: bool) -> Iterator[Block]:
    yield Line(summary(status))
    if status.proxies:
        yield table(status.proxies, wide)


def summary(status: model.Status) -> Say:
    """The proxies in one sentence: how many there are, and which of them need a look."""
    connected = [proxy for proxy in status.proxies if proxy.connected]
    lost = [proxy for proxy in status.proxies if not proxy.connected]
    trouble = [
        f"{proxy.name} is {some(proxy.lag, 'version')} behind"
        + (f", refused {_refused(proxy)}" if proxy.refused_version else "")
        for proxy in connected
        if proxy.lag or proxy.refused_version
    ]
    trouble += [f"{proxy.name} is suspect: {proxy.suspect}" for proxy in status.proxies if proxy.suspect]
    trouble += [f"{proxy.name} lost, silent for {age(proxy.silent_s)}" for proxy in lost]
    placement = f"placement {status.control.epoch}.{status.control.version}"
    words = f"{some(len(connected), 'proxy')} connected"
    if trouble:
        return Say(f"{words}; {'; '.join(trouble)}", Tone.WARN)
    if not connected:
        return Say(f"{words}: nobody carries traffic", Tone.WARN)
    return Say(f"{words}, {'current' if len(connected) == 1 else 'all current'} at {placement}", Tone.GOOD)


def table(proxies: Sequence[model.Proxy], wide: bool) -> Table:
    """The proxies as `proxies` and `status -o wide` show them."""
    columns = ["PROXY", "STATE", "PLACEMENT", "LAG", "SILENT", "LEGS"]
    if wide:
        columns += ["ADDRESS", "PID", "BOOT", "RESIDENT", "UNREAD", "SUSPECT"]
    columns.append("REFUSED")
    return Table(columns=columns, rows=[_row(proxy, wide) for proxy in proxies])


def _row(proxy: model.Proxy, wide: bool) -> list[Cell]:
    row: list[Cell] = [
        proxy.name,
        _state(proxy),
        f"{proxy.acked_epoch}.{proxy.acked_version}" if proxy.acked_version else "",
        Say(str(proxy.lag), Tone.WARN if proxy.lag else Tone.NONE),
        age(proxy.silent_s),
        str(sum(proxy.resident.values())),
    ]
    if wide:
        row += [proxy.address, str(proxy.pid), str(proxy.boot), counts(proxy.resident.items())]
        row += [counts(proxy.unread.items()), proxy.suspect]
    row.append(Say(_refused(proxy) if proxy.refused_version else "", Tone.BAD))
    return row


def _state(proxy: model.Proxy) -> Say:
    if not proxy.connected:
        return Say("lost", Tone.BAD)
    return Say("suspect", Tone.BAD) if proxy.suspect else Say("connected", Tone.GOOD)


def _refused(proxy: model.Proxy) -> str:
    return f"{proxy.refused_epoch}.{proxy.refused_version}: {proxy.refused_reason}"
