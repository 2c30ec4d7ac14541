"""What a control process is, and the words in which it says so."""

import math
from dataclasses import dataclass
from enum import StrEnum

from narwhal.control.core.history import Ending
from narwhal.control.core.records import EventKind, Record
from narwhal.control.store.base import Lease


class Standing(StrEnum):
    """What this process is."""

    STARTING = "starting"
    STANDBY = "standby"
    ACTIVE = "active"
    FENCED = "fenced"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """What /ready says (spec M9)."""

    reason: str  # empty when ready
    control_ready: bool
    epoch: int
    holder: str


def told(kind: EventKind, message: str, **fields: str) -> Record:
    """A record of what the process itself is or does."""
    return Record(kind=kind, message=message, fields=fields)


_KINDS = {
    Ending.STOPPED: (EventKind.CONTROL_RELEASED, "let go of the lease"),
    Ending.YIELDED: (EventKind.CONTROL_YIELDED, "yielded"),
    Ending.SWITCHED: (EventKind.CONTROL_YIELDED, "yielded"),
    Ending.FENCED: (EventKind.CONTROL_FENCED, "fenced"),
}


def over(lease: Lease, ending: Ending, reason: str) -> Record:
    """The record of a term that is over."""
    kind, words = _KINDS[ending]
    # Until when it could have acted, seconds of CLOCK_BOOTTIME: it may hear of its end only later.
    bound = {"valid_until": f"{lease.valid_until:.6f}"} if math.isfinite(lease.valid_until) else {}
    return told(kind, f"{words}: {reason}", epoch=str(lease.epoch), **bound)


def active(lease: Lease, why: str = "") -> Record:
    """The record of a lease that is in force from now on."""
    words = f"active under epoch {lease.epoch}{', ' if why else ''}{why}"
    return told(EventKind.CONTROL_ACTIVE, words, epoch=str(lease.epoch))
