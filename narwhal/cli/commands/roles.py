"""`narwhalctl roles`: how loaded both roles are, and who should change."""

from collections.abc import Iterator

import click

from narwhal.cli import engine_model, model
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.reach import ask
from narwhal.cli.render import Block, Cell, Line, Printer, Say, Table, Tone, age, latency


@click.command()
@pass_settings
def roles(settings: Settings) -> None:
    """Show the loads of both roles, and who should change.

    The first line says what role control has decided, or why it decides nothing. `-o wide` adds what was measured
    beside the loads, and every engine with the reason why it stays.
    """
    status = ask(settings.control, lambda control: control.status(proxies=False))
    facts = {"fleet": status.fleet, "roles": status.roles, "engines": status.engines}
    Printer(settings).show(facts, lambda wide: _layout(status, wide))


def summary(known: model.Roles) -> Say:
    """Role control in a line."""
    if not known.mode:
        return Say("not known")
    loads = ", ".join(f"{one.role} {one.load:.2f}" for one in known.roles)
    proposal = known.proposal
    if proposal is None:
        return Say(f"{known.mode}, load of {loads}")
    verb = "moved" if known.mode == "auto" else "should move"
    return Say(f"{known.mode}, load of {loads}: {proposal.engine} {verb} to {proposal.to}", Tone.WARN)


def _layout(status: model.Status, wide: bool) -> Iterator[Block]:
    yield from tables(status.roles, wide=wide)
    if wide and status.engines:
        yield Line()
        columns = ["ENGINE", "ROLE", "PINNED", "SINCE", "STAYS"]
        yield Table(columns=columns, rows=[_engine(engine) for engine in status.engines])


def tables(known: model.Roles, *, wide: bool = True) -> Iterator[Block]:
    """What was decided, and both roles."""
    proposal = known.proposal
    if proposal is None:
        yield Line(f"{known.mode}: nobody changes: {known.why_not}")
    else:
        verb = "now has" if known.mode == "auto" else "should have"
        words = f"{proposal.engine} {verb} the role {proposal.to} ({proposal.cause}: {proposal.reason})"
        yield Line(f"{known.mode}: ", Say(words, Tone.WARN))
    yield Line()
    columns = ["ROLE", "ENGINES", "FLOOR", "LOAD", "FIRST TOKEN", "PER TOKEN", "QUEUE", "WAITING", "BUSY"]
    if wide:
        columns += ["LATENCY", "PASSES", "SEAT", "PROMPT", "ANSWER", "GAVE UP"]
    if known.roles:
        yield Table(columns=[*columns, "RISK"], rows=[_row(one, wide) for one in known.roles])


def _row(one: model.Role, wide: bool) -> list[Cell]:
    row: list[Cell] = [
        one.role,
        Say(str(one.engines), Tone.BAD if one.engines < one.floor else Tone.NONE),
        str(one.floor),
        Say(f"{one.load:.2f}", Tone.WARN if one.above else Tone.NONE),
        _seconds(one.first_s),
        _seconds(one.step_s),
        latency(one.queue_s) if one.waiting else "",
        str(one.waiting),
        f"{one.busy:.0%}",
    ]
    if wide:
        row += [f"{one.latency:.2f}", str(one.above), _seconds(one.wait_s)]
        row += [_tokens(one.prompt_tokens), _tokens(one.output_tokens)]
        row.append("" if one.gave_age_s is None else age(one.gave_age_s))
    risks = (f"{r.kind} {r.count} times, last {age(r.age_s)} ago, blocks {age(r.blocks_s)}" for r in one.risks)
    return [*row, Say("; ".join(risks), Tone.WARN)]


def _seconds(value: float | None) -> str:
    return "" if value is None else latency(value)


def _tokens(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _engine(engine: engine_model.Engine) -> list[Cell]:
    since = "" if engine.role_age_s is None else age(engine.role_age_s)
    return [engine.id, engine.role, "yes" if engine.pinned else "no", since, engine.stays]
