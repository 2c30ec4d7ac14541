"""What operators ask of one engine: eject, probe. Pure.

Decides: whether the command can be done now, and by which event a probe that was asked for has ended. A refusal changes
nothing.
"""

from collections.abc import Mapping

from narwhal.control.core import telling
from narwhal.control.core.decisions import Cause, Decision, Ejection
from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.events import (
    Command,
    CommandRefusedError,
    EjectCommand,
    EventKind,
    ProbeCommand,
    Record,
    Refusal,
)
from narwhal.control.core.evidence import Action
from narwhal.control.core.readmission import SHUT, Readmission
from narwhal.control.core.suspicion import Suspicions
from narwhal.vocabulary import Verdict

# What ends a probe that an operator asked for, and its verdict; None: the event itself names it. An engine that other
# evidence takes out meanwhile has failed, and one that has left the fleet can say nothing more.
_ENDS: Mapping[EventKind, Verdict | None] = {
    EventKind.PROBE_ENDED: None,
    EventKind.ENGINE_CHECK_FAILED: None,
    EventKind.ENGINE_JOINED: Verdict.PASS,
    EventKind.ENGINE_READMITTED: Verdict.PASS,
    EventKind.ENGINE_EJECTED: Verdict.FAIL,
    EventKind.ENGINE_REMOVED: Verdict.INCONCLUSIVE,
}


def probed(record: Record) -> Verdict | None:
    """The verdict of the probe that `ProbeCommand` began, if this event about its engine is the end of it."""
    if record.kind is EventKind.PROBE_ENDED and record.fields["probe"] != Action.INFERENCE_PROBE:
        return None  # another question about the engine
    verdict = _ENDS.get(record.kind)
    return Verdict(record.fields["result"]) if record.kind in _ENDS and verdict is None else verdict


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
        raise CommandRefusedError(Refusal.PRECONDITION, f"the gate of engine {engine.id} is being tried already")
    if shut := SHUT & engine.holds.keys():
        raise CommandRefusedError(Refusal.PRECONDITION, f"engine {engine.id} is held out: {', '.join(sorted(shut))}")
    readmission.hurry(engine, now=now)
    return [telling.gate_asked(engine.id), *readmission.tick(now=now, prompt_only=True)]
