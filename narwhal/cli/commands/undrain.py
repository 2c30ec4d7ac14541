"""`narwhalctl undrain`: drained engines back into placement, by the whole gate."""

import click

from narwhal.cli.client import Undrain
from narwhal.cli.complete import engine_names
from narwhal.cli.options import Settings, UsageProblem, pass_settings
from narwhal.cli.reach import ask
from narwhal.cli.render import Printer, done, notice


@click.command()
@click.argument("engines", nargs=-1, metavar="ENGINE...", shell_complete=engine_names)
@click.option("--all", "everybody", is_flag=True, help="Every drained engine.")
@click.option(
    "--except", "but", multiple=True, metavar="ENGINE", shell_complete=engine_names,
    help="Of all, this one stays drained; repeatable.",
)  # fmt: skip
@click.option("--wait", is_flag=True, help="Return only when every connected proxy knows.")
@click.option("--dry-run", is_flag=True, help="Only say what would begin.")
@pass_settings
def undrain(  # noqa: PLR0917 - click passes them by name
    settings: Settings, engines: tuple[str, ...], everybody: bool, but: tuple[str, ...], wait: bool, dry_run: bool
) -> None:
    """Have the gates of drained engines tried now, and say how that ended.

    Exits 0 when they are back, 1 when a check failed: then the drain stays, and what was seen is said. Engines of a
    fleet in maintenance return all or none. Ctrl-C stops the waiting, not the gates.
    """
    if bool(engines) == everybody:
        raise UsageProblem("name engines, or --all that are drained")
    if but and not everybody:
        raise UsageProblem("--except needs --all")
    request = Undrain(engines=tuple(dict.fromkeys(engines)), everybody=everybody, but=but, wait=wait, dry_run=dry_run)
    answer = ask(settings.control, lambda control: control.undrain(request, progress=notice))
    Printer(settings).show(answer, lambda _: done(answer.told, dry_run=dry_run))
