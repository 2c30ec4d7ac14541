"""The model of a store: what the contract means, in memory, with faults that a test can switch on."""

import asyncio
import math
from dataclasses import dataclass, field

from narwhal.control.store.base import Lease, LeaseLost, Owner, StoreError


@dataclass
class Medium:
    """What several stores share: one fleet's document and lease."""

    document: bytes | None = None
    history: bytes | None = None
    proof: str = ""
    documents_aside: dict[str, bytes] = field(default_factory=dict)
    owner: Owner | None = None
    held: Lease | None = None
    saves: int = 0
    failing: str = ""  # every call fails with these words
    gate: asyncio.Event | None = None  # saves wait for it
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        """Something changed."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    def expire(self) -> None:
        """The lease ends without its holder doing anything, as when its machine was suspended."""
        self.held = None
        self.tell()


class ModelStore:
    """One process's view of a medium."""

    def __init__(self, medium: Medium, *, valid_until: float = math.inf) -> None:
        self._medium = medium
        self._valid_until = valid_until
        self.lease: Lease | None = None

    async def load(self) -> bytes | None:
        self._reach()
        return self._medium.document

    async def save(self, lease: Lease, document: bytes) -> None:
        if self._medium.gate is not None:
            await self._medium.gate.wait()
        self._reach()
        self._check(lease)
        self._medium.document = document
        self._medium.saves += 1
        self._medium.tell()

    async def set_aside(self, lease: Lease, document: bytes) -> str:
        self._reach()
        self._check(lease)
        name = f"aside-{lease.epoch}"
        self._medium.documents_aside[name] = document
        return name

    async def history(self) -> bytes | None:
        self._reach()
        return self._medium.history

    async def keep_history(self, lease: Lease, document: bytes) -> None:
        self._reach()
        self._check(lease)
        self._medium.history = document

    async def prove(self, proof: str) -> None:
        self._reach()
        self._medium.proof = proof

    async def proof(self) -> str:
        self._reach()
        return self._medium.proof

    async def acquire(self, holder: str, address: str, *, above: int = 0) -> Lease | None:
        self._reach()
        medium = self._medium
        if medium.held is not None and medium.held is not self.lease:
            return None
        last = medium.owner.epoch if medium.owner else 0
        medium.owner = Owner(holder=holder, address=address, epoch=max(last, above) + 1)
        medium.held = self.lease = Lease(owner=medium.owner, valid_until=self._valid_until)
        return self.lease

    async def release(self, lease: Lease) -> None:
        self._reach()
        if self._medium.held is lease:
            self._medium.held = None
            self._medium.tell()
        lease.lost = lease.lost or "released"

    async def owner(self) -> Owner | None:
        self._reach()
        return self._medium.owner

    async def changed(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._medium.news.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        if self.lease is not None and self._medium.held is self.lease:
            self._medium.expire()
        if self.lease is not None:
            self.lease.lost = self.lease.lost or "closed"

    def _reach(self) -> None:
        if self._medium.failing:
            raise StoreError(self._medium.failing)

    def _check(self, lease: Lease) -> None:
        if lease is not self._medium.held or lease.lost:
            raise LeaseLost(lease.lost or "expired")
