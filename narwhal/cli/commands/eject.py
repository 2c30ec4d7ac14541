"""`narwhalctl eject`: an engine out of placement, by an operator's word."""

import click

from narwhal.cli.complete import engine_names
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.reach import ask
from narwhal.cli.render import Printer, done


@click.command()
@click.argument("engine", shell_complete=engine_names)
@click.option("--reason", metavar="TEXT", default="", help="Why; events and `explain` say it.")
@click.option("--dry-run", is_flag=True, help="Only say what would happen.")
@pass_settings
def eject(settings: Settings, engine: str, reason: str, dry_run: bool) -> None:
    """Take an engine out of placement, until its gate passes.

    Legs that run there run on. The gate is tried by itself, so an engine in good order is back soon.
    """
    answer = ask(settings.control, lambda control: control.eject(engine, reason=reason, dry_run=dry_run))
    Printer(settings).show(answer, lambda _: done(answer.told, dry_run=dry_run))
