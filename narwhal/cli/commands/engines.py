"""`narwhalctl engines`: every engine, what it serves, and what keeps work off it."""

from collections.abc import Iterator, Sequence

import click

from narwhal.cli import model
from narwhal.cli.client import ask
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.render import Block, Cell, Line, Printer, Say, Table, Tone, age, counts, latency, some


@click.command()
@pass_settings
def engines(settings: Settings) -> None:
    """Show every engine: what it serves and what keeps work off it.

    `-o wide` adds url, incarnation, the last checks and outcomes.
    """
    status = ask(settings.control, lambda control: control.status(proxies=False))
    Printer(settings).show(
        {"fleet": status.fleet, "engines": status.engines}, lambda wide: _layout(status.engines, wide)
    )


def _layout(engines: Sequence[model.Engine], wide: bool) -> Iterator[Block]:
    serving = sum(bool(engine.phases) for engine in engines)
    text = f"{serving} of {some(len(engines), 'engine')} {'serves' if serving == 1 else 'serve'}"
    yield Line(Say(text, Tone.GOOD if serving == len(engines) else Tone.BAD))
    yield from tables(engines, wide)


def tables(engines: Sequence[model.Engine], wide: bool) -> Iterator[Block]:
    """The engines as `engines` and `status` show them; their checks in a table of its own, when wide."""
    columns = ["ENGINE", "ROLE", "SERVES", "INFLIGHT", "WEIGHT", "FAILURES"]
    if wide:
        columns += ["URL", "PINNED", "INCARNATION", "OUTCOMES"]
    columns.append("WHY")
    if engines:
        yield Table(columns=columns, rows=[_row(engine, wide) for engine in engines])
    checks = [_check_row(engine, check) for engine in engines for check in engine.checks]
    if wide and checks:
        yield Line()
        yield Table(columns=["ENGINE", "CHECK", "VERDICT", "AGE", "TOOK", "SEEN"], rows=checks)


def _row(engine: model.Engine, wide: bool) -> list[Cell]:
    row: list[Cell] = [
        engine.id,
        engine.role,
        Say("+".join(engine.phases) or "nothing", Tone.GOOD if engine.phases else Tone.BAD),
        str(engine.inflight),
        f"{engine.weight:.2f}".rstrip("0").rstrip("."),
        Say(counts(engine.streaks.items()), Tone.WARN),
    ]
    if wide:
        outcomes = counts(engine.outcomes.items())
        row += [engine.url, "yes" if engine.pinned else "no", str(engine.incarnation), outcomes]
    row.append(Say("; ".join(_why(engine)), Tone.WARN if engine.phases else Tone.BAD))
    return row


def _check_row(engine: model.Engine, check: model.Check) -> list[Cell]:
    tone = {"pass": Tone.GOOD, "fail": Tone.BAD, "inconclusive": Tone.WARN}.get(check.verdict, Tone.NONE)
    verdict = Say(check.verdict, tone)
    return [engine.id, check.check, verdict, age(check.age_s), latency(check.latency_s), check.detail]


def _why(engine: model.Engine) -> Iterator[str]:
    """What keeps work off an engine, and the check that keeps it so."""
    yield from map(_hold, engine.holds)
    if engine.holds:
        for check in engine.checks:
            if check.verdict in ("fail", "inconclusive"):
                yield f"{check.check} {check.verdict} {age(check.age_s)} ago: {check.detail}"


def _hold(hold: model.Hold) -> str:
    """One hold in a phrase: what, since when, for how long still, why."""
    words = f"{hold.kind} {age(hold.age_s)}"
    if hold.remaining_s is not None:
        words += f", {age(hold.remaining_s)} left"
    if not hold.effective:
        words += ", yields to keep the phase served"
    return f"{words}: {hold.reason}" if hold.reason else words
