"""`narwhalctl role`: an engine changes its role."""

import click

from narwhal.cli.complete import engine_names
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.reach import ask
from narwhal.cli.render import Printer, done


@click.command()
@click.argument("engine", shell_complete=engine_names)
@click.argument("to", metavar="prefill|decode", type=click.Choice(["prefill", "decode"]))
@click.option("--dry-run", is_flag=True, help="Only say what would happen.")
@pass_settings
def role(settings: Settings, engine: str, to: str, dry_run: bool) -> None:
    """Give an engine a role, for new placements.

    Legs that run there run on. In mode `auto` role control may change it again, after `thresholds.dwell_s` at the
    earliest.
    """
    answer = ask(settings.control, lambda control: control.set_role(engine, to, dry_run=dry_run))
    Printer(settings).show(answer, lambda _: done(answer.told, dry_run=dry_run))
