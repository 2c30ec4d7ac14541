"""`narwhalctl history`: who led when, and why each epoch ended."""

from collections.abc import Iterator, Sequence

import click

from narwhal.cli import model
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.plain import utc
from narwhal.cli.reach import ask
from narwhal.cli.render import Block, Cell, Printer, Say, Table, Tone, age

_TONES = {"lasts": Tone.GOOD, "fenced": Tone.BAD, "untold": Tone.BAD, "yielded": Tone.WARN, "moved": Tone.WARN}


@click.command()
@pass_settings
def history(settings: Settings) -> None:
    """Show who led when, and why each epoch ended.

    The last 100 epochs, which the store keeps, newest last. `-o wide` adds addresses.
    """
    epochs = ask(settings.control, lambda control: control.history())
    Printer(settings).show({"epochs": epochs}, lambda wide: _layout(epochs, wide))


def _layout(epochs: Sequence[model.Epoch], wide: bool) -> Iterator[Block]:
    columns = ["EPOCH", "HOLDER", *(["ADDRESS"] if wide else []), "BEGAN", "LASTED", "ENDED", "WHY"]
    yield Table(columns=columns, rows=[_row(epoch, wide) for epoch in epochs])


def _row(epoch: model.Epoch, wide: bool) -> list[Cell]:
    began, ended = epoch.began_at, epoch.ended_at
    return [
        str(epoch.epoch),
        epoch.holder,
        *([epoch.address] if wide else []),
        utc(began) if began is not None else "",
        age(ended - began) if began is not None and ended is not None else "",
        Say(epoch.ending, _TONES.get(epoch.ending, Tone.NONE)),
        epoch.reason,
    ]
