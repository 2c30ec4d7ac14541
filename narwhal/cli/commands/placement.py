"""`narwhalctl placement`: what proxies are told, and each change of it."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import click

from narwhal.cli import model, placement_model
from narwhal.cli.client import Control
from narwhal.cli.follow import follow as over_reconnects
from narwhal.cli.options import AnswerIsNo, Settings, pass_settings
from narwhal.cli.reach import ask
from narwhal.cli.render import Block, Cell, Line, Printer, Say, Table, Tone, age, notice

SUBSCRIBER = "narwhalctl"


@click.command()
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with what changes, over restarts and takeovers, until ctrl-C."
)
@pass_settings
def placement(settings: Settings, follow: bool) -> None:
    """Show the placement that proxies work by.

    With `-f` what changes follows, one line an engine; with `-o json` then one object a placement.
    """
    printer = Printer(settings)
    if follow:
        asyncio.run(_follow(settings, printer))
        return
    newest = ask(settings.control, _newest)
    printer.show(newest, lambda wide: _layout(newest, wide))


async def _newest(control: Control) -> placement_model.Placement:
    async with aclosing(control.placements(name=SUBSCRIBER, follow=False)) as stream:
        async for newest in stream:
            return newest
    raise AnswerIsNo(f"{control.address}: has published no placement yet")


async def _follow(settings: Settings, printer: Printer) -> None:
    def start(control: Control, status: model.Status) -> AsyncGenerator[placement_model.Placement]:
        return control.placements(name=SUBSCRIBER)

    held: placement_model.Placement | None = None
    async with aclosing(over_reconnects(settings.control, start, notice=notice)) as stream:
        async for newest in stream:
            if held is None:
                _first(printer, newest)
            elif newest.order != held.order:
                _next(printer, placement_model.step(held, newest))
            held = newest


def _first(printer: Printer, placement: placement_model.Placement) -> None:
    printer.item(placement, lambda wide: _layout(placement, wide))


def _next(printer: Printer, step: placement_model.PlacementStep) -> None:
    at = datetime.now(UTC).strftime("%H:%M:%SZ")
    printer.item(step, lambda wide: _step_layout(step, at))


def _layout(placement: placement_model.Placement, wide: bool) -> Iterator[Block]:
    admission = Say(f"admission is closed: {placement.closed}", Tone.BAD) if placement.closed else "admission is open"
    yield Line(f"placement {placement.order}: ", admission)
    columns = ["ENGINE", "ROLE", "SERVES", "WEIGHT", "HOLDS"]
    if wide:
        columns += ["URL", "PINNED", "INCARNATION", "QUARANTINE", "THEN SERVES", "MAX LEGS", "MAX TOKENS"]
    if placement.engines:
        yield Table(columns=columns, rows=[_row(engine, wide) for engine in placement.engines])


def _row(engine: placement_model.PlacedEngine, wide: bool) -> list[Cell]:
    row: list[Cell] = [
        engine.id,
        engine.role,
        Say(_serves(engine.phases), Tone.GOOD if engine.phases else Tone.BAD),
        f"{engine.weight:.2f}".rstrip("0").rstrip("."),
        Say(", ".join(engine.holds), Tone.WARN),
    ]
    if wide:
        quarantined = engine.quarantine_remaining_s is not None
        row += [
            engine.url,
            "yes" if engine.pinned else "no",
            str(engine.incarnation),
            f"{age(engine.quarantine_remaining_s or 0)} left" if quarantined else "",
            _serves(engine.phases_after_quarantine) if quarantined else "",
            str(engine.max_inflight or ""),
            str(engine.max_inflight_tokens or ""),
        ]
    return row


def _step_layout(step: placement_model.PlacementStep, at: str) -> Iterator[Block]:
    head = Say(f"{at}  {step.epoch}.{step.version}  ", Tone.DIM)
    for subject, changes in groupby(step.changes, key=lambda change: change.engine or change.field):
        yield Line(head, *_change(subject, list(changes)))
    if not step.changes:
        yield Line(head, "nothing that shows changed")


def _change(subject: str, changes: list[placement_model.Difference]) -> Iterator[Cell]:
    """What changed about one engine, about admission or about the epoch."""
    change = changes[0]
    if change.field == "epoch":
        yield f"epoch {change.before} → {change.after}: another control process leads, or the same one anew"
    elif change.field == "closed":
        yield Say(f"admission closed: {change.after}", Tone.BAD) if change.after else Say("admission open", Tone.GOOD)
    elif change.before is None:
        yield f"{subject}: new, serves {_serves(change.after['phases'])}"
    elif change.after is None:
        yield f"{subject}: gone"
    else:
        yield f"{subject}: "
        for at, each in enumerate(changes):
            yield ", " if at else ""
            yield _difference(each)


def _difference(change: placement_model.Difference) -> Say:
    name = {"phases": "serves"}.get(change.field, change.field.replace("_", " "))
    tone = Tone.NONE
    if change.field == "phases":
        tone = Tone.GOOD if len(change.after) > len(change.before) else Tone.BAD
    return Say(f"{name} {_value(change.field, change.before)} → {_value(change.field, change.after)}", tone)


def _value(field: str, value: Any) -> str:
    if field.startswith("phases"):
        return _serves(value)
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _serves(phases: "tuple[str, ...] | list[str]") -> str:
    return "+".join(phases) or "nothing"
