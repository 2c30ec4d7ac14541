"""Etcd stores of one fleet, as if each were another process's, and waits that are bounded."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from narwhal.clock import Clock, RealClock
from narwhal.control.store.base import Lease
from narwhal.control.store.etcd import EtcdStore
from narwhal.control.store.etcd_client import EtcdSettings
from tests.etcd import Etcd

BOUND_S = 60.0  # nothing here takes longer, however busy the machine is
_fleets = itertools.count(1)

Open = Callable[..., Awaitable[EtcdStore]]


def settings(etcd: Etcd, **others: Any) -> EtcdSettings:
    """Of a fleet of its own; a lease long enough that a busy machine does not end it."""
    known = {"prefix": "/narwhal", "fleet": f"fleet{next(_fleets)}", "ttl_s": 30, "safety_margin_s": 0.5}
    return EtcdSettings(**{"endpoints": etcd.endpoints, **known, **others})


@asynccontextmanager
async def opened(etcd: Etcd, **others: Any) -> AsyncIterator[Open]:
    """Makes stores of one fleet; what it makes is closed at the end."""
    chosen = settings(etcd, **others)
    async with AsyncExitStack() as stack:

        async def make(clock: Clock | None = None, **more: Any) -> EtcdStore:
            store = await EtcdStore.open(chosen, clock or RealClock(), **{"warn": print, "patience_s": 0.0, **more})
            stack.push_async_callback(store.close)
            return store

        yield make


async def led(store: EtcdStore, holder: str = "a") -> Lease:
    """The lease, which nobody else wants."""
    lease = await store.acquire(holder, "h:1")
    assert lease is not None
    return lease


async def until(condition: Callable[[], Any], what: str) -> None:
    """Waits for what other threads and processes bring about."""
    try:
        async with asyncio.timeout(BOUND_S):
            while not condition():  # noqa: ASYNC110 - nothing here could set an event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {BOUND_S:g} s: {what}") from None


def key(store: EtcdStore, name: str) -> str:
    """The full name of a key of the store's fleet."""
    return store._keys.first.decode().removesuffix("epoch") + name
