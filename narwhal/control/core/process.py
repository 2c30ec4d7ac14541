"""Which process runs an engine: is it the same one, is it newer (spec R1, R4, R8). Pure."""

from narwhal.control.core.engine import Drain
from narwhal.control.core.events import ProcessIdentity

SAME_START_S = 0.5  # two readings of one start time differ by rounding at most


def same_process(one: ProcessIdentity, other: ProcessIdentity) -> bool:
    """Whether both are readings of one process."""
    return one.version == other.version and abs(one.started_at - other.started_at) <= SAME_START_S


def started_after(identity: ProcessIdentity, started_at: float) -> bool:
    """Whether the process started later than that, by more than two readings can differ."""
    return identity.started_at > started_at + SAME_START_S


def process_words(identity: ProcessIdentity) -> str:
    """A process, for people."""
    return f"version {identity.version} started at {identity.started_at:.3f}"


def not_restarted(drain: Drain, seen: ProcessIdentity, url: str) -> str:
    """Why a process does not do for planned maintenance (spec R4); empty when it does. At another address than was
    drained another process may have run for long: it must be another one, not a newer one."""
    known = drain.identity
    if known is not None and url != drain.url:
        if not same_process(known, seen):
            return ""
        return f"not restarted: {process_words(seen)} answers, which was drained at {drain.url}"
    before = known.started_at if known is not None else drain.wall
    if started_after(seen, before):
        return ""
    newer = "the drained one" if known is not None else "the drain, whose process is unknown,"
    return f"not restarted: {process_words(seen)} answers, a process newer than {newer} ({before:.3f}) is asked for"
