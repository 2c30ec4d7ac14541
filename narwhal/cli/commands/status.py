"""`narwhalctl status`: is the fleet ready, if not why, and what needs a look."""

from collections.abc import Iterator

import click

from narwhal.cli import engine_model, model
from narwhal.cli.commands import engines, proxies, roles
from narwhal.cli.options import AnswerIsNo, Settings, pass_settings
from narwhal.cli.reach import ask
from narwhal.cli.render import Block, Cell, Line, Printer, Say, Table, Tone, age, latency, some

PHASES = ("prefill", "decode")


@click.command()
@pass_settings
def status(settings: Settings) -> None:
    """Say whether the fleet is ready, and what needs a look.

    Exits 0 when the fleet is ready, else 1. `-o wide` adds what `engines` and `proxies` show.
    """
    fleet = ask(settings.control, lambda control: control.status())
    Printer(settings).show(fleet, lambda wide: _layout(fleet, wide))
    if not fleet.ready:
        raise AnswerIsNo("")


def _layout(fleet: model.Status, wide: bool) -> Iterator[Block]:
    yield _headline(fleet)
    yield Line()
    yield from engines.tables(fleet.engines, wide)
    yield Line()
    if wide and fleet.proxies:
        yield proxies.table(fleet.proxies, wide)
        yield Line()
    if wide:
        yield from roles.tables(fleet.roles)
        yield Line()
    yield Table(rows=list(_footer(fleet, wide)))


def _headline(fleet: model.Status) -> Line:
    serving = sum(bool(engine.phases) for engine in fleet.engines)
    if fleet.ready:
        verdict = Say("READY", Tone.GOOD)
        text = f"{serving} of {some(len(fleet.engines), 'engine')} {'serves' if serving == 1 else 'serve'}"
        if out := [f"{engine.id} ({_why(engine)})" for engine in fleet.engines if not engine.phases]:
            return Line(verdict, f"  {fleet.fleet}: ", Say(f"{text}; out: {', '.join(out)}", Tone.WARN))
        return Line(verdict, f"  {fleet.fleet}: {text}")
    missing = [phase for phase in PHASES if not any(phase in engine.phases for engine in fleet.engines)]
    reason = fleet.reason + (f" for {' and '.join(missing)}" if missing and fleet.reason.endswith("engines") else "")
    return Line(Say("NOT READY", Tone.BAD), f"  {fleet.fleet}: ", Say(reason, Tone.BAD))


def _why(engine: engine_model.Engine) -> str:
    words = ", ".join(hold.kind for hold in engine.holds) or "no hold"
    if engine.drain is None:
        return words
    state = "ready to stop" if engine.drain.settled else "overdue" if engine.drain.overdue else "not ready to stop"
    return f"{words}, {state}"


def _footer(fleet: model.Status, wide: bool) -> Iterator[tuple[Cell, Cell]]:
    control, totals = fleet.control, fleet.totals
    yield "proxies", proxies.summary(fleet)
    yield "roles", roles.summary(fleet.roles)
    yield "monitor", _monitor(fleet.monitor)
    newest = sorted(fleet.monitor.errors, key=lambda error: error.age_s)
    for error in newest if wide else newest[:1]:
        times = f"{error.count} times" if error.count > 1 else "once"
        yield "stage", f"{error.stage} {error.error_class} {times}, last {age(error.age_s)} ago: {error.message}"
    yield (
        "requests",
        f"{totals.served} served, {totals.failed} failed, {totals.rejected} rejected, "
        f"{totals.cancelled} cancelled, {totals.retried} retried",
    )
    role = "active" if control.ready else "active but not control-ready"
    yield (
        "control",
        f"{control.holder} at {control.address}, {role}, epoch {control.epoch}, placement {control.version}",
    )
    for standby in fleet.standbys:
        yield "standby", _standby(standby)
    yield "model", fleet.model


def _standby(standby: model.Standby) -> Say:
    who = f"{standby.holder} at {standby.address}"
    if standby.problem:
        return Say(f"{who}, would not take over: {standby.problem}", Tone.WARN)
    if not standby.copy_epoch:
        return Say(f"{who}, has no copy of the state handoff yet", Tone.WARN)
    return Say(f"{who}, ready to lead, its copy is {latency(standby.copy_age_s)} old")


def _monitor(monitor: model.Monitor) -> Say:
    if monitor.degraded:
        return Say(f"DEGRADED: admission is closed, {some(monitor.failure_streak, 'pass')} failed in a row", Tone.BAD)
    if monitor.failure_streak:
        return Say(f"failing: {some(monitor.failure_streak, 'pass')} failed in a row", Tone.WARN)
    words = f"healthy, {some(monitor.passes, 'pass')}"
    return Say(
        f"{words}, {some(sum(e.count for e in monitor.errors), 'earlier stage error')}" if monitor.errors else words
    )
