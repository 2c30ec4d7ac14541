"""What a command brought about, or of a dry run would have.

Plain values, by the rules of `model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command brought about, or of a dry run would have."""

    engine: str
    dry_run: bool
    told: tuple[str, ...]  # in the words of the events


@dataclass(frozen=True, kw_only=True)
class Probed(Done):
    """What a probe came to."""

    verdict: str  # pass, fail or inconclusive; empty for a dry run


@dataclass(frozen=True, kw_only=True)
class Drained:
    """How far a drain has come, or what it would bring about."""

    engines: tuple[str, ...]
    dry_run: bool
    told: tuple[str, ...]  # in the words of the events
    settled: tuple[str, ...]  # of them those that are ready to stop
    waits_for: Mapping[str, tuple[str, ...]]  # what the others wait for


@dataclass(frozen=True, kw_only=True)
class Returned:
    """Engines that are back, or would be tried."""

    engines: tuple[str, ...]
    dry_run: bool
    told: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """A proxy that drains wait for no longer, or would not."""

    proxy: str  # as it was named
    dry_run: bool
    told: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Switched:
    """What a switchover came to."""

    dry_run: bool
    before: int  # epoch that is over; of a dry run the one that lasts
    epoch: int  # of the new active; 0 for a dry run
    holder: str  # who leads now; of a dry run who would
    address: str
    took_s: float  # from asking to the answer of the new active; 0 for a dry run
