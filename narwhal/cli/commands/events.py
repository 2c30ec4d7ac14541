"""`narwhalctl events`: what happened, one line an event, over restarts and takeovers of the control service."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import click

from narwhal.cli import model
from narwhal.cli.client import Control
from narwhal.cli.complete import engine_names
from narwhal.cli.follow import follow as over_reconnects
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.plain import plain
from narwhal.cli.reach import connect
from narwhal.cli.render import Block, Line, Printer, Say, Tone, notice, some

KEPT = 4096  # events that a control process keeps

# By its ending, what a kind means to whom is on call.
_TONES = (
    (
        (
            "not_ready", "_lost", "_refused", "_failed", "_ejected", "_degraded", "_fenced", "_not_resumed",
            "_suspect", "_cut_off",
        ),
        Tone.BAD,
    ),
    (("hold_placed", "relapsed", "_blamed", "_kept"), Tone.WARN),
    (("ready", "_joined", "_readmitted", "_recovered", "_trusted", "_back"), Tone.GOOD),
)  # fmt: skip


class Journal:
    """What of an event stream is new, over reconnects.

    Sequences count within one control process, and a process may win the lease twice: events of a new epoch are read
    from the first that is kept, and those that were shown before are left out.
    """

    def __init__(self, after: int) -> None:
        self._last = after  # newest sequence seen of this epoch's process
        self._epoch: int | None = None
        self._shown: dict[tuple[int, float, str], None] = {}  # in order of arrival, bounded

    def resume(self, epoch: int) -> int:
        """The sequence to ask for on a new connection to a process of this epoch."""
        if self._epoch not in (None, epoch):
            self._last = 0
        self._epoch = epoch
        return self._last

    def take(self, event: model.Event) -> tuple[bool, int]:
        """Whether the event is new, and how many before it were missed. It counts as shown from now on."""
        missed = max(0, event.sequence - self._last - 1) if self._last else 0
        self._last = event.sequence
        key = (event.sequence, event.at, event.kind)
        if key in self._shown:
            return False, missed
        self._shown[key] = None
        if len(self._shown) > KEPT:
            del self._shown[next(iter(self._shown))]
        return True, missed


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with new events, over restarts and takeovers, until ctrl-C.")
@click.option("--engine", metavar="ENGINE", shell_complete=engine_names, help="Only events of this engine.")
@click.option(
    "--since-seq", type=click.IntRange(min=0), default=0, metavar="N", help="Only events after the one numbered N."
)
@pass_settings
def events(settings: Settings, follow: bool, engine: str | None, since_seq: int) -> None:
    """Show what happened, oldest first, one line an event.

    The active control process keeps its newest 4096 events and numbers them from 1. With `-o json` each line is one
    object.
    """
    printer, journal = Printer(settings), Journal(since_seq)

    async def show() -> None:
        first = True
        async with aclosing(_stream(settings, journal, engine, follow)) as stream:
            async for event in stream:
                if first and event.sequence <= since_seq:
                    # What happened since would else be withheld until the numbers have caught up.
                    ahead = f"the process that leads has numbered no event {since_seq} yet, as after a restart"
                    notice(f"{ahead}: all that it keeps follow")
                first = False
                new, missed = journal.take(event)
                if missed:
                    notice(f"{some(missed, 'event')} before #{event.sequence} are not kept any more")
                if new and engine in (None, event.engine):
                    _print(printer, event)

    asyncio.run(show())


async def _stream(
    settings: Settings, journal: Journal, engine: str | None, follow: bool
) -> AsyncGenerator[model.Event]:
    def start(control: Control, status: model.Status) -> AsyncGenerator[model.Event]:
        if engine is not None and engine not in {known.id for known in status.engines}:
            known = ", ".join(known.id for known in status.engines)
            notice(f"fleet {status.fleet} has no engine {engine} now; it has {known or 'none'}")
        return control.events(after=journal.resume(status.control.epoch), follow=follow)

    if follow:
        stream = over_reconnects(settings.control, start, notice=notice)
        async with aclosing(stream):
            async for event in stream:
                yield event
        return
    async with (
        connect(settings.control) as control,
        aclosing(start(control, await control.status(proxies=False))) as stream,
    ):
        async for event in stream:
            yield event


def _print(printer: Printer, event: model.Event) -> None:
    facts = {"time": event.time, **plain(event)}
    printer.item(facts, lambda wide: _layout(event, wide))


def _layout(event: model.Event, wide: bool) -> Iterator[Block]:
    tone = next((tone for endings, tone in _TONES if event.kind.endswith(endings)), Tone.NONE)
    pairs = {"engine": event.engine, "proxy": event.proxy, **event.fields} if wide else {}
    more = "".join(f"  {name}={value}" for name, value in pairs.items() if value)
    yield Line(
        Say(event.time, Tone.DIM), f"  #{event.sequence:<5} ", Say(f"{event.kind:<21}", tone), f" {event.message}{more}"
    )
