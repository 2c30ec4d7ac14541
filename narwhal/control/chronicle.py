"""Keeps the stored history of epochs up with what the active knows, as soon as the store lets it. Decides nothing.

A holder that dies before it could write leaves a gap, which its successor fills in as far as it can tell.
"""

import asyncio
import contextlib
from collections.abc import Callable

import orjson

from narwhal.clock import Clock
from narwhal.control.core.history import Ending, Epoch, History, to_document
from narwhal.control.store.base import Lease, LeaseLost, Owner, Store, StoreError

RETRY_S = 1.0
LAST_WRITE_S = 0.3  # what the end of a term waits for the store


def epoch_of(owner: Owner, began_at: float | None) -> Epoch:
    """An epoch that begins."""
    return Epoch(epoch=owner.epoch, holder=owner.holder, address=owner.address, began_at=began_at)


class Chronicle:
    """The history as one term writes it."""

    def __init__(
        self, history: History, *, before: Owner | None, store: Store, lease: Callable[[], Lease], clock: Clock
    ) -> None:
        """`before`: who led last, as far as that is known. `lease`: the one in force."""
        self._store = store
        self._lease = lease
        self._clock = clock
        self._news = asyncio.Event()
        self._stored: History | None = None
        self.history = history
        self.begin(before=before)

    def begin(self, *, before: Owner | None = None) -> None:
        """The lease in force is a new epoch."""
        began = epoch_of(self._lease().owner, self._clock.wall())
        known = epoch_of(before, None) if before is not None and before.epoch else None
        self._tell(self.history.began(began, before=known))

    def end(self, epoch: int, ending: Ending, reason: str, *, at: float | None = None) -> None:
        """An epoch is over, since the wall time `at` or now."""
        self._tell(self.history.ended(epoch, at=self._clock.wall() if at is None else at, ending=ending, reason=reason))

    async def run(self) -> None:
        """Writes whatever is new, until cancelled or until the lease is lost."""
        while True:
            self._news.clear()
            try:
                await self._write()
            except LeaseLost:
                return
            except StoreError:
                await asyncio.sleep(RETRY_S)
            else:
                await self._news.wait()

    async def close(self) -> None:
        """Writes what is new, if that can be done soon."""
        with contextlib.suppress(StoreError, TimeoutError):
            await asyncio.wait_for(self._write(), LAST_WRITE_S)

    async def _write(self) -> None:
        history = self.history
        if history != self._stored:
            await self._store.keep_history(self._lease(), orjson.dumps(to_document(history)))
            self._stored = history

    def _tell(self, history: History) -> None:
        self.history = history
        self._news.set()
