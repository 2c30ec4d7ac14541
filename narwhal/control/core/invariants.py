"""What is true of the fleet after every step, whatever happened before. Pure.

A violation is a fault of the core: it is raised at the step that made it, not where it would have done harm. In a large
fleet a step looks at the engines that it speaks of, and every stage of a monitor pass at all of them.
"""

from collections.abc import Iterable, Mapping

from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.events import (
    CheckAnswered,
    HealthAnswered,
    IdentityCaptured,
    InferenceAnswered,
    Input,
    ProxyAcked,
    ProxyConnected,
    ProxyLeft,
    ProxyLost,
    ProxyNacked,
    Published,
    Reported,
    TransferAnswered,
)
from narwhal.control.core.readmission import Gate
from narwhal.control.core.suspicion import Suspicion
from narwhal.vocabulary import Hold


class InvariantBrokenError(AssertionError):
    """The state is one that no correct history leads to."""


def concerned(event: Input) -> Iterable[str] | None:
    """The engines that an event is about; None when it may be about all. Reports and acknowledgements come by the
    hundred a second to a large fleet, and each is about few engines, or none."""
    match event:
        case Reported():
            return [run.engine for run in event.batch.runs]
        case CheckAnswered() | HealthAnswered() | InferenceAnswered() | TransferAnswered() | IdentityCaptured():
            return (event.engine,)
        case ProxyAcked() | ProxyNacked() | ProxyConnected() | ProxyLost() | ProxyLeft() | Published():
            return ()
        case _:
            return None


def check(engines: Mapping[str, Engine], gates: Mapping[str, Gate], suspicions: Mapping[str, Suspicion]) -> None:
    """Raises `InvariantBrokenError` unless the records of all machines agree about every engine."""
    if not gates.keys() <= engines.keys() or not suspicions.keys() <= engines.keys():
        raise InvariantBrokenError("something is kept of an engine that has left the fleet")
    check_some(engines.values(), gates, suspicions)


def check_some(engines: Iterable[Engine], gates: Mapping[str, Gate], suspicions: Mapping[str, Suspicion]) -> None:
    """The same of these engines only."""
    for engine in engines:
        standing, suspicion = engine.standing, suspicions.get(engine.id)
        if not engine.incarnation and standing is not Standing.JOINING:
            raise InvariantBrokenError(f"{engine.id} is {standing} and was never admitted")
        if Hold.JOINING in engine.holds and Hold.EJECTED in engine.holds:
            raise InvariantBrokenError(f"{engine.id} is joining and ejected at once")
        gate, drain = gates.get(engine.id), engine.drain
        if gate is None if standing is not Standing.IN_SERVICE else gate is not None and gate.back is None:
            raise InvariantBrokenError(f"{engine.id} is {standing}, and its gate says otherwise")
        if gate is not None and gate.at is not None and drain is not None and gate.back is None:
            raise InvariantBrokenError(f"{engine.id} is drained and its gate is tried though nobody asked for it")
        if (Hold.DRAIN in engine.holds and (drain is None or drain.whole)) or (engine.shut and drain is None):
            raise InvariantBrokenError(f"{engine.id} carries the hold of another drain than it has")
        if drain is not None and not drain.whole and Hold.DRAIN not in engine.holds:
            raise InvariantBrokenError(f"{engine.id} is drained and not held")
        if drain is not None and drain.settled and not (engine.shut and drain.captured):
            raise InvariantBrokenError(f"{engine.id} is ready to stop before it was out and known")
        if suspicion is not None and standing is not Standing.IN_SERVICE:
            raise InvariantBrokenError(f"{engine.id} is {standing} and suspected")
        if (Hold.VERIFICATION in engine.holds) != (suspicion is not None and suspicion.held):
            raise InvariantBrokenError(f"{engine.id}: verification hold without a suspicion, or the reverse")
