"""What is true of the fleet after every step, whatever happened before. Pure.

After each step the engines that it was about are looked at, and all of them with each stage of a monitor pass.

A violation is a fault of the core: it is raised at the step that made it, not where it would have done harm.
"""

from collections.abc import Iterable, Mapping

from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.readmission import Gate
from narwhal.control.core.suspect import Suspicion
from narwhal.vocabulary import Hold

SMALL = 50  # engines up to which everything is looked at after every step: 50 µs, less than the step itself
GONE = "something is kept of an engine that has left the fleet"


class InvariantBrokenError(AssertionError):
    """The state is one that no correct history leads to."""


def check(
    engines: Mapping[str, Engine],
    gates: Mapping[str, Gate],
    suspicions: Mapping[str, Suspicion],
    *,
    about: Iterable[str] = (),
    whole: bool = True,
) -> None:
    """Raises `InvariantBrokenError` unless the records of all machines agree about every engine.

    `whole`: false when only the engines `about` which the step was can have changed, so that a step costs no more in a
    large fleet; in a small one everything is looked at all the same.
    """
    if whole or len(engines) <= SMALL:
        if not gates.keys() <= engines.keys() or not suspicions.keys() <= engines.keys():
            raise InvariantBrokenError(GONE)
        about = engines
    for name in about:
        engine = engines.get(name)
        if engine is not None:
            _agree(engine, gates.get(name), suspicions.get(name))
        elif name in gates or name in suspicions:
            raise InvariantBrokenError(GONE)


def _agree(engine: Engine, gate: Gate | None, suspicion: Suspicion | None) -> None:
    standing, drain = engine.standing, engine.drain
    if not engine.incarnation and standing is not Standing.JOINING:
        raise InvariantBrokenError(f"{engine.id} is {standing} and was never admitted")
    if Hold.JOINING in engine.holds and Hold.EJECTED in engine.holds:
        raise InvariantBrokenError(f"{engine.id} is joining and ejected at once")
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
