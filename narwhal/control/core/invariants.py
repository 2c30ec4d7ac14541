"""What is true of the fleet after every step, whatever happened before. Pure.

A violation is a fault of the core: it is raised at the step that made it, not where it would have done harm.
"""

from collections.abc import Mapping

from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.readmission import Gate
from narwhal.control.core.suspicion import Suspicion
from narwhal.vocabulary import Hold


class InvariantBrokenError(AssertionError):
    """The state is one that no correct history leads to."""


def check(engines: Mapping[str, Engine], gates: Mapping[str, Gate], suspicions: Mapping[str, Suspicion]) -> None:
    """Raises `InvariantBrokenError` unless the records of all machines agree about every engine."""
    if not gates.keys() <= engines.keys() or not suspicions.keys() <= engines.keys():
        raise InvariantBrokenError("something is kept of an engine that has left the fleet")
    for engine in engines.values():
        standing, suspicion = engine.standing, suspicions.get(engine.id)
        if not engine.incarnation and standing is not Standing.JOINING:
            raise InvariantBrokenError(f"{engine.id} is {standing} and was never admitted")
        if Hold.JOINING in engine.holds and Hold.EJECTED in engine.holds:
            raise InvariantBrokenError(f"{engine.id} is joining and ejected at once")
        if (engine.id in gates) == (standing is Standing.IN_SERVICE):
            raise InvariantBrokenError(f"{engine.id} is {standing}, and its gate says otherwise")
        if suspicion is not None and standing is not Standing.IN_SERVICE:
            raise InvariantBrokenError(f"{engine.id} is {standing} and suspected")
        if (Hold.VERIFICATION in engine.holds) != (suspicion is not None and suspicion.held):
            raise InvariantBrokenError(f"{engine.id}: verification hold without a suspicion, or the reverse")
