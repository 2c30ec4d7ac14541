"""What control asks of a store: one document, one lease, the past of that lease. The only IO that decisions wait for.

A store raises `StoreError` and nothing else. A failed call may still have done what it was asked: nobody may conclude
from an error that the store is unchanged. What holds in every store:

- one lease at a time; its epoch is above that of every lease before it;
- `load` gives the document of the newest `save` that returned, whole, or a newer one;
- a writer whose lease is over changes nothing.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from narwhal.placement import HIGHEST_EPOCH


class StoreError(Exception):
    """The store did not do what it was asked, or did not say so."""


class LeaseLost(StoreError):
    """The lease is over: whoever held it must act no more."""


class NotYet(StoreError):
    """Nobody seems to hold the lease, and it may not be taken yet: asking again later helps. The words stay the same
    for as long as that is so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who leads, as the store knows it."""

    holder: str  # the control process's id
    address: str  # its gRPC address, HOST:PORT
    epoch: int


def read_owner(text: bytes) -> tuple[Owner, dict[str, Any]]:
    """Who leads, as the document of a lease says it, and all that it says. Raises ValueError where it does not: without
    the last epoch a new one could go back, and above an impossible one nobody could lead."""
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise ValueError("is no object")
    holder, address, epoch = value.get("holder"), value.get("address"), value.get("epoch")
    if not isinstance(holder, str) or not isinstance(address, str):
        raise ValueError("does not name its holder")
    if type(epoch) is not int or not 0 < epoch <= HIGHEST_EPOCH + 1:  # what is led above the highest that is believed
        raise ValueError("has no epoch")
    return Owner(holder=holder, address=address, epoch=epoch), value


@dataclass(kw_only=True, slots=True)
class Lease:
    """The right to act for a fleet. Written by the store that granted it only, from whichever thread renews it."""

    owner: Owner
    # Seconds of CLOCK_BOOTTIME up to which the holder may act, the safety margin taken off. Infinite where the lease
    # ends with the process.
    valid_until: float = math.inf
    lost: str = ""  # why it is over; empty while it is not

    @property
    def epoch(self) -> int:
        """Rises with every acquisition."""
        return self.owner.epoch

    def may_act(self, boottime: float) -> bool:
        """Whether the holder may act at `boottime` (seconds of CLOCK_BOOTTIME). Needs neither loop nor store."""
        return not self.lost and boottime < self.valid_until

    def remaining_s(self, boottime: float) -> float:
        """Seconds of validity left at `boottime`, never below 0."""
        return 0.0 if self.lost else max(0.0, self.valid_until - boottime)


class Store(Protocol):
    """One fleet's document and lease."""

    async def load(self) -> bytes | None:
        """The newest document; None when there has never been one."""

    async def save(self, lease: Lease, document: bytes) -> None:
        """Replaces the document as a whole; it survives a crash of the machine once this returns.

        Raises LeaseLost, having written nothing, when `lease` is over.
        """

    async def set_aside(self, lease: Lease, document: bytes) -> str:
        """Keeps a copy of a document that is about to be replaced for good. Returns where, for people."""

    async def history(self) -> bytes | None:
        """The document of the past epochs; None when there has never been one."""

    async def keep_history(self, lease: Lease, document: bytes) -> None:
        """Replaces that document. Raises LeaseLost, having written nothing, when `lease` is over."""

    async def prove(self, proof: str) -> None:
        """Leaves `proof` where everybody finds it, instead of what anybody left before. Needs no lease: whoever finds
        it knows that this process can write here."""

    async def proof(self) -> str:
        """What was left last by `prove`; empty when nothing was."""

    async def acquire(self, holder: str, address: str, *, above: int = 0) -> Lease | None:
        """Takes the lease under an epoch higher than any before and than `above`; None when somebody else holds it.
        Raises NotYet while somebody may hold one that the store has forgotten.

        Called by the holder itself it moves on to such an epoch; nothing can be saved with the lease held until then.
        """

    async def release(self, lease: Lease) -> None:
        """Ends the lease at once, so that the next may take it. Ending one that is over is no error."""

    async def owner(self) -> Owner | None:
        """Who took the lease last; None when nobody has. Whether the lease is still held only `acquire` can tell."""

    async def changed(self, timeout_s: float) -> None:
        """Returns when the lease may be free or the document newer, at the latest after `timeout_s`."""

    async def close(self) -> None:
        """Ends whatever the store runs; a lease still held ends with it. Bounded, whatever the medium does."""
