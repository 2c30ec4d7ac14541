"""What operators ask: eject, probe, drain, undrain, give a role, forget a proxy. Pure.

Decides: whether the command can be done now, and by which event what was asked for has ended. A refusal changes
nothing.
"""

from collections.abc import Mapping

from narwhal.control.core import telling
from narwhal.control.core.decisions import Cause, Decision, Ejection
from narwhal.control.core.drain import Drains
from narwhal.control.core.engine import SHUT, Engine, Standing
from narwhal.control.core.events import (
    Command,
    CommandRefusedError,
    DrainCommand,
    EjectCommand,
    ForgetCommand,
    ProbeCommand,
    Refusal,
    RoleCommand,
    UndrainCommand,
)
from narwhal.control.core.evidence import Action
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.readmission import Readmission
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.roles import Roles
from narwhal.control.core.suspicion import Suspicions
from narwhal.vocabulary import Verdict

# What ends a probe that an operator asked for, and its verdict; None: the event itself names it. An engine that other
# evidence takes out meanwhile has failed. One that is being drained is not looked into any more, and one that has left
# the fleet, or has another address, can say nothing more.
_ENDS: Mapping[EventKind, Verdict | None] = {
    EventKind.PROBE_ENDED: None,
    EventKind.ENGINE_CHECK_FAILED: None,
    EventKind.ENGINE_JOINED: Verdict.PASS,
    EventKind.ENGINE_READMITTED: Verdict.PASS,
    EventKind.ENGINE_EJECTED: Verdict.FAIL,
    EventKind.ENGINE_REMOVED: Verdict.INCONCLUSIVE,
    EventKind.ENGINE_CHANGED: Verdict.INCONCLUSIVE,
    EventKind.DRAIN_BEGUN: Verdict.INCONCLUSIVE,
}


def probed(record: Record) -> Verdict | None:
    """The verdict of the probe that `ProbeCommand` began, if this event about its engine is the end of it."""
    if record.kind is EventKind.PROBE_ENDED and record.fields["probe"] != Action.INFERENCE_PROBE:
        return None  # another question about the engine
    if record.kind is EventKind.ENGINE_CHANGED and "url" not in record.fields:
        return None  # it is the same engine
    verdict = _ENDS.get(record.kind)
    return Verdict(record.fields["result"]) if record.kind in _ENDS and verdict is None else verdict


# What ends an operator's wish to have an engine back: whether it is.
_RETURNS: Mapping[EventKind, bool] = {
    EventKind.ENGINE_JOINED: True,
    EventKind.ENGINE_READMITTED: True,
    EventKind.UNDRAIN_FAILED: False,
    EventKind.ENGINE_REMOVED: False,
}


def returned(record: Record) -> bool | None:
    """Whether the engine that `UndrainCommand` named is back, if this event about it is the end of that."""
    return _RETURNS.get(record.kind)


class Commands:
    """Does what operators ask, through the machine that owns it."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        *,
        suspicions: Suspicions,
        readmission: Readmission,
        drains: Drains,
        proxies: Proxies,
        roles: Roles,
    ) -> None:
        self._engines = engines
        self._suspicions = suspicions
        self._readmission = readmission
        self._drains = drains
        self._proxies = proxies
        self._roles = roles

    def do(self, command: Command, *, now: float) -> list[Decision]:
        """Raises `CommandRefusedError`; then nothing was changed."""
        match command:
            case EjectCommand():
                return self._eject(self._engine(command.engine), command.reason)
            case ProbeCommand():
                return _probe(self._engine(command.engine), self._suspicions, self._readmission, now=now)
            case DrainCommand():
                return self._drain(command, now=now)
            case UndrainCommand():
                return self._undrain(command, now=now)
            case RoleCommand():
                return self._roles.command(self._engine(command.engine), command.role, now=now)
            case ForgetCommand():
                return [*self._proxies.forget(command), *self._drains.progress(now=now)]

    def _engine(self, name: str) -> Engine:
        engine = self._engines.get(name)
        if engine is None:
            raise CommandRefusedError(Refusal.NOT_FOUND, f"no engine {name} in this fleet")
        return engine

    @staticmethod
    def _eject(engine: Engine, reason: str) -> list[Decision]:
        if engine.standing is not Standing.IN_SERVICE:
            raise CommandRefusedError(Refusal.PRECONDITION, f"engine {engine.id} is {engine.standing}")
        return [Ejection(engine=engine.id, cause=Cause.OPERATOR, reason=reason or "no reason given")]

    def _drain(self, command: DrainCommand, *, now: float) -> list[Decision]:
        """Out, whatever the engine is doing; a gate that is being tried is given up (spec R4)."""
        engines = [self._engine(name) for name in command.engines]
        decisions = self._drains.begin(command, now=now)
        for engine in engines:
            decisions += self._readmission.drained(engine.id)
        return decisions

    def _undrain(self, command: UndrainCommand, *, now: float) -> list[Decision]:
        """Back through the gate; engines of a fleet in maintenance all or none (spec R5, R6)."""
        engines = [self._engine(name) for name in dict.fromkeys(command.engines)]
        for engine in engines:
            if engine.drain is None:
                raise CommandRefusedError(Refusal.PRECONDITION, f"engine {engine.id} is not drained")
            if self._readmission.trying(engine.id):
                words = f"engine {engine.id} is on its way back already: its gate is being tried"
                raise CommandRefusedError(Refusal.PRECONDITION, words)
        whole = any(engine.drain is not None and engine.drain.whole for engine in engines)
        for engine in engines:
            self._drains.out_now(engine, now=now)
        return self._readmission.bring_back(engines, whole=whole, now=now)


def _probe(engine: Engine, suspicions: Suspicions, readmission: Readmission, *, now: float) -> list[Decision]:
    """An inference probe of an engine in service; a try of the gate of one that is out."""
    if shut := SHUT & engine.holds.keys():
        raise CommandRefusedError(Refusal.PRECONDITION, f"engine {engine.id} is held out: {', '.join(sorted(shut))}")
    if engine.standing is Standing.IN_SERVICE:
        suspicion = suspicions.known.get(engine.id)
        if suspicion is not None and suspicion.open:
            raise CommandRefusedError(Refusal.PRECONDITION, f"a probe of engine {engine.id} is under way")
        return suspicions.ask(engine, now=now)
    gate = readmission.gates[engine.id]
    if gate.at is not None:
        raise CommandRefusedError(Refusal.PRECONDITION, f"the gate of engine {engine.id} is being tried already")
    readmission.hurry(engine, now=now)
    return [telling.gate_asked(engine.id), *readmission.tick(now=now, prompt_only=True)]
