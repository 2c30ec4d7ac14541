"""The epochs of a fleet: who led, from when to when, and why each ended.

Decides what is written of an epoch and how many are kept. It cannot see: the store that keeps it, or the lease; a
holder that died says nothing of its end, and its successor can only say that. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from narwhal.control.core.codec import CodecError, decode, encode

SCHEMA = "narwhal.history"
SCHEMA_VERSION = 1
MOST_EPOCHS = 100
UNTOLD = "its holder did not say; the lease ran out, or was freed with the process"


class HistoryError(ValueError):
    """The document is not a history that this release reads."""


class Ending(StrEnum):
    """How an epoch ended. The words beside it say more."""

    LASTS = "lasts"
    STOPPED = "stopped"  # in good order
    YIELDED = "yielded"  # a degraded active, to a standby that asked (spec M8)
    SWITCHED = "switched"  # by an operator
    MOVED = "moved"  # on to a higher epoch, which somebody had seen (spec S5)
    FENCED = "fenced"  # the holder says so itself, later
    UNTOLD = "untold"


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One period of leadership. Wall times in seconds since the Unix epoch, by the clock of whoever wrote them."""

    epoch: int
    holder: str
    address: str  # gRPC, HOST:PORT
    began_at: float | None  # None: nobody wrote it down
    ended_at: float | None = None  # None while it lasts, and where nobody knows
    ending: Ending = Ending.LASTS
    reason: str = ""  # in words

    def __post_init__(self) -> None:
        if self.epoch < 1:
            raise ValueError(f"epoch must be at least 1, got {self.epoch}")


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The newest epochs, oldest first."""

    epochs: tuple[Epoch, ...] = ()

    def __post_init__(self) -> None:
        numbers = [known.epoch for known in self.epochs]
        if numbers != sorted(set(numbers)):
            raise ValueError("epochs must rise")

    def began(self, epoch: Epoch, *, before: Epoch | None = None) -> "History":
        """With a new epoch. Whatever had no end until now has one that nobody told.

        `before`: who led last as the lease says; written down where it is missing.
        """
        known = [
            replace(e, ending=Ending.UNTOLD, reason=UNTOLD) if e.ending is Ending.LASTS else e
            for e in self.epochs
            if e.epoch < epoch.epoch
        ]
        newest = known[-1].epoch if known else 0
        if before is not None and newest < before.epoch < epoch.epoch:
            known.append(replace(before, ending=Ending.UNTOLD, reason=UNTOLD))
        return History(epochs=tuple([*known, epoch][-MOST_EPOCHS:]))

    def ended(self, epoch: int, *, at: float, ending: Ending, reason: str) -> "History":
        """With the end of an epoch, unless it is known already. What nobody told may be told later."""

        def end(known: Epoch) -> Epoch:
            if known.epoch != epoch or known.ending not in (Ending.LASTS, Ending.UNTOLD):
                return known
            return replace(known, ended_at=at, ending=ending, reason=reason)

        return History(epochs=tuple(map(end, self.epochs)))

    def since_yield_s(self, *, wall: float) -> float | None:
        """Seconds from the newest end by a yield to the wall time `wall`, never below 0; None when there is none."""
        at = [e.ended_at for e in self.epochs if e.ending is Ending.YIELDED and e.ended_at is not None]
        return max(0.0, wall - at[-1]) if at else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    schema: str
    schema_version: int
    epochs: tuple[Epoch, ...]


def to_document(history: History) -> Mapping[str, Any]:
    """The JSON document of a history."""
    document: Mapping[str, Any] = encode(_Document(schema=SCHEMA, schema_version=SCHEMA_VERSION, epochs=history.epochs))
    return document


def from_document(document: object) -> History:
    """The history in `document`. Raises HistoryError."""
    try:
        known: _Document = decode(_Document, document)
        if (known.schema, known.schema_version) != (SCHEMA, SCHEMA_VERSION):
            raise HistoryError(f"unknown schema {known.schema!r}, version {known.schema_version}")
        return History(epochs=known.epochs)
    except (CodecError, ValueError) as error:
        raise HistoryError(str(error)) from None
