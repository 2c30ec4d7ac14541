"""`narwhalctl switchover`: a standby leads, and the active becomes a standby."""

import asyncio
from collections.abc import Iterator

import click

from narwhal.cli import outcomes
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.reach import switchover as switch
from narwhal.cli.render import Block, Line, Printer, done, latency


@click.command()
@click.option("--to", "standby", metavar="HOLDER", default="", help="The standby that is to lead; any that is fit.")
@click.option("--dry-run", is_flag=True, help="Only say who would lead.")
@pass_settings
def switchover(settings: Settings, standby: str, dry_run: bool) -> None:
    """Have a standby lead instead of the active control process.

    The active stores its state, lets go of the lease and stands by; nothing is lost, and clients notice nothing. Exits
    1, with nothing changed, where no standby is fit: it needs a fresh copy of the state, and a write to the store of
    its own.
    """
    answer = asyncio.run(switch(settings.control, standby, dry_run=dry_run))
    Printer(settings).show(answer, lambda _: _layout(answer))


def _layout(answer: outcomes.Switched) -> Iterator[Block]:
    if answer.before == answer.epoch:
        yield Line(f"{answer.holder} at {answer.address} leads already, under epoch {answer.epoch}: nothing to do")
    elif answer.dry_run:
        yield from done([f"{answer.holder} at {answer.address} leads instead of epoch {answer.before}"], dry_run=True)
    else:
        yield Line(
            f"{answer.holder} at {answer.address} leads under epoch {answer.epoch}, epoch {answer.before} is over "
            f"(took {latency(answer.took_s)})"
        )
