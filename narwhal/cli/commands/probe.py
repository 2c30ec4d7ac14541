"""`narwhalctl probe`: does an engine work? Asked now, answered when the probe has ended."""

import click

from narwhal.cli.complete import engine_names
from narwhal.cli.options import AnswerIsNo, Settings, pass_settings
from narwhal.cli.reach import ask
from narwhal.cli.render import Printer, done, notice


@click.command()
@click.argument("engine", shell_complete=engine_names)
@click.option("--dry-run", is_flag=True, help="Only say what would begin.")
@pass_settings
def probe(settings: Settings, engine: str, dry_run: bool) -> None:
    """Probe an engine now and wait for the answer.

    An engine in service runs the legs that its role permits, with healthy peers, and is ejected when it fails; one that
    is out has its gate tried. Exits 0 when it passed, else 1. Ctrl-C stops the waiting, not the probe.
    """
    answer = ask(settings.control, lambda control: control.probe(engine, dry_run=dry_run, progress=notice))
    Printer(settings).show(answer, lambda _: done(answer.told, dry_run=dry_run))
    if answer.verdict != "pass" and not dry_run:
        raise AnswerIsNo("")
