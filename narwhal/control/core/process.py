"""Which process runs an engine: is it the same one, is it newer (spec R1, R4, R8). Pure."""

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
