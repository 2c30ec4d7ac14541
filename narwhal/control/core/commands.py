"""What operators ask of one engine: eject, probe. Pure.

Decides: whether the command can be done now. A refusal changes nothing.
"""

from collections.abc import Mapping

from narwhal.control.core.decisions import Cause, Decision, Ejection
from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.events import Command, CommandRefusedError, EjectCommand, ProbeCommand, Refusal
from narwhal.control.core.readmission import Readmission
from narwhal.control.core.suspicion import Suspicions


def command(
    event: Command,
    engines: Mapping[str, Engine],
    suspicions: Suspicions,
    readmission: Readmission,
    *,
    now: float,
) -> list[Decision]:
    """Do what is asked. Raises `CommandRefusedError`."""
    engine = engines.get(event.engine)
    if engine is None:
        raise CommandRefusedError(Refusal.NOT_FOUND, f"no engine {event.engine} in this fleet")
    match event:
        case EjectCommand():
            if engine.standing is not Standing.IN_SERVICE:
                raise CommandRefusedError(Refusal.PRECONDITION, f"engine {engine.id} is {engine.standing}")
            return [Ejection(engine=engine.id, cause=Cause.OPERATOR, reason=event.reason or "no reason given")]
        case ProbeCommand():
            return _probe(engine, suspicions, readmission, now=now)


def _probe(engine: Engine, suspicions: Suspicions, readmission: Readmission, *, now: float) -> list[Decision]:
    """An inference probe of an engine in service; a try of the gate of one that is out."""
    if engine.standing is Standing.IN_SERVICE:
        suspicion = suspicions.known.get(engine.id)
        if suspicion is not None and suspicion.open:
            raise CommandRefusedError(Refusal.PRECONDITION, f"a probe of engine {engine.id} is under way")
        return suspicions.ask(engine, now=now)
    gate = readmission.gates[engine.id]
    if gate.at is not None:
        raise CommandRefusedError(Refusal.PRECONDITION, f"engine {engine.id} is being checked already")
    readmission.hurry(engine, now=now)
    return readmission.tick(now=now, prompt_only=True)
