"""`narwhalctl explain`: why an engine is, or is not, eligible, in the words of the decisions themselves."""

from collections.abc import Iterator

import click

from narwhal.cli import engine_model
from narwhal.cli.commands import engines
from narwhal.cli.complete import engine_names
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.reach import ask
from narwhal.cli.render import Block, Line, Printer, Say, Tone


@click.command()
@click.argument("engine", shell_complete=engine_names)
@pass_settings
def explain(settings: Settings, engine: str) -> None:
    """Say why an engine is, or is not, eligible.

    The answer comes first; then its holds, what counts against it, what was measured, and what happened, newest first.
    Exits 0 whatever the answer is.
    """
    explanation = ask(settings.control, lambda control: control.explain(engine))
    Printer(settings).show(explanation, lambda wide: _layout(explanation, wide))


def _layout(explanation: engine_model.Explanation, wide: bool) -> Iterator[Block]:
    answer, *reasons = explanation.lines or ("",)
    yield Line(Say(answer, Tone.GOOD if explanation.engine.phases else Tone.BAD))
    yield from map(Line, reasons)
    if wide:
        yield Line()
        yield from engines.tables([explanation.engine], wide)
