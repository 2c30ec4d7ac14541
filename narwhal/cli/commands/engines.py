"""`narwhalctl engines`: every engine, what it serves, and what keeps work off it."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import click

from narwhal.cli import engine_model
from narwhal.cli.options import Settings, pass_settings
from narwhal.cli.reach import ask
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


def _layout(engines: Sequence[engine_model.Engine], wide: bool) -> Iterator[Block]:
    serving = sum(bool(engine.phases) for engine in engines)
    text = f"{serving} of {some(len(engines), 'engine')} {'serves' if serving == 1 else 'serve'}"
    yield Line(Say(text, Tone.GOOD if serving == len(engines) else Tone.BAD))
    yield from tables(engines, wide)


def tables(engines: Sequence[engine_model.Engine], wide: bool) -> Iterator[Block]:
    """The engines as `engines` and `status` show them; when wide their checks, evidence and health too."""
    columns = ["ENGINE", "ROLE", "SERVES", "INFLIGHT", "WEIGHT", "FAILURES"]
    if wide:
        columns += ["URL", "PINNED", "INCARNATION", "OUTCOMES", "READ FROM"]
    columns.append("WHY")
    if engines:
        yield Table(columns=columns, rows=[_row(engine, wide) for engine in engines])
    for table in _more(engines) if wide else ():
        if table.rows:
            yield Line()
            yield table


def _instant(process: engine_model.Process) -> str:
    return datetime.fromtimestamp(process.started_at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _drain_row(engine: str, drain: engine_model.Drain) -> list[Cell]:
    state = Say("overdue", Tone.BAD) if drain.overdue else Say("waits", Tone.WARN)
    process = drain.process
    unknown = "unknown" if drain.captured else "not read yet"
    return [
        engine,
        "maintenance" if drain.maintenance else "drain",
        age(drain.age_s),
        age(drain.remaining_s),
        Say("ready to stop", Tone.GOOD) if drain.settled else state,
        "restarted" if drain.planned else "as it is",
        process.version if process is not None else unknown,
        _instant(process) if process is not None else unknown,
        drain.reason,
    ]


def _evidence_row(engine: engine_model.Engine, known: engine_model.Evidence) -> list[Cell]:
    last = known.last
    row: list[Cell] = [
        engine.id,
        known.failure_class,
        Say(f"{known.streak} of {known.limit}", Tone.WARN if known.streak else Tone.NONE),
        str(known.total),
    ]
    if last is None:
        return [*row, "", "", "", ""]
    return [*row, age(last.age_s), last.outcome, str(last.status or ""), last.words]


def _health_row(engine: engine_model.Engine, health: engine_model.Health) -> list[Cell]:
    outcome = Say(health.outcome, Tone.BAD) if health.outcome else Say("ok", Tone.GOOD)
    return [engine.id, outcome, age(health.age_s), latency(health.latency_s), health.detail]


def _drift_row(engine: str, drift: engine_model.Drift) -> list[Cell]:
    slow = Say(str(drift.drifting), Tone.WARN if drift.drifting else Tone.NONE)
    return [engine, latency(drift.step_s), latency(drift.usual_s), str(drift.samples), slow, str(drift.good)]


def _more(engines: Sequence[engine_model.Engine]) -> Iterator[Table]:
    """What is known of engines beside their row."""
    yield Table(
        columns=["ENGINE", "CHECK", "VERDICT", "AGE", "TOOK", "SEEN"],
        rows=[_check_row(engine, check) for engine in engines for check in engine.checks],
    )
    yield Table(
        columns=["ENGINE", "CLASS", "STREAK", "TOTAL", "LAST", "OUTCOME", "STATUS", "SEEN"],
        rows=[_evidence_row(engine, known) for engine in engines for known in engine.evidence],
    )
    yield Table(
        columns=["ENGINE", "PROCESS", "STARTED"],
        rows=[[e.id, e.process.version, _instant(e.process)] for e in engines if e.process is not None],
    )
    yield Table(
        columns=["ENGINE", "DRAIN", "SINCE", "DEADLINE IN", "STATE", "RETURNS", "PROCESS", "STARTED", "REASON"],
        rows=[_drain_row(engine.id, engine.drain) for engine in engines if engine.drain is not None],
    )
    yield Table(
        columns=["ENGINE", "PER TOKEN", "USUAL", "SAMPLES", "SLOW WINDOWS", "GOOD WINDOWS"],
        rows=[_drift_row(engine.id, engine.drift) for engine in engines if engine.drift is not None],
    )
    yield Table(
        columns=["ENGINE", "ROLE SINCE", "STAYS"],
        rows=[
            [e.id, "" if e.role_age_s is None else age(e.role_age_s), e.stays]
            for e in engines
            if e.stays or e.role_age_s is not None
        ],
    )
    yield Table(
        columns=["ENGINE", "HEALTH", "AGE", "TOOK", "SEEN"],
        rows=[_health_row(engine, health) for engine in engines for health in engine.health],
    )


def _row(engine: engine_model.Engine, wide: bool) -> list[Cell]:
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
        row.append(", ".join(engine.producers))
    row.append(Say("; ".join(_why(engine)), Tone.WARN if engine.phases else Tone.BAD))
    return row


def _check_row(engine: engine_model.Engine, check: engine_model.Check) -> list[Cell]:
    tone = {"pass": Tone.GOOD, "fail": Tone.BAD, "inconclusive": Tone.WARN}.get(check.verdict, Tone.NONE)
    verdict = Say(check.verdict, tone)
    return [engine.id, check.check, verdict, age(check.age_s), latency(check.latency_s), check.detail]


def _why(engine: engine_model.Engine) -> Iterator[str]:
    """What keeps work off an engine, the check that keeps it so, and what is being done about it."""
    yield from map(_hold, engine.holds)
    if engine.misses:
        yield f"silent in {some(engine.misses, 'sweep')}"
    if engine.holds:
        for check in engine.checks:
            if check.verdict in ("fail", "inconclusive"):
                yield f"{check.check} {check.verdict} {age(check.age_s)} ago: {check.detail}"
    if engine.drain is not None:
        yield drain_words(engine.drain)
    if engine.suspicion:
        yield engine.suspicion
    elif engine.gate_in_s is not None:
        yield f"tried again in {age(engine.gate_in_s)}"


def drain_words(drain: engine_model.Drain) -> str:
    """How far a drain is, in a phrase."""
    if drain.settled:
        return "ready to stop"
    late = "drain overdue" if drain.overdue else f"{age(drain.remaining_s)} to its deadline"
    return f"{late}, waits for {'; '.join(drain.waits_for)}"


def _hold(hold: engine_model.Hold) -> str:
    """One hold in a phrase: what, since when, for how long still, why."""
    words = f"{hold.kind} {age(hold.age_s)}"
    if hold.remaining_s is not None:
        words += f", {age(hold.remaining_s)} left"
    if not hold.effective:
        words += ", yields to keep the phase served"
    return f"{words}: {hold.reason}" if hold.reason else words
