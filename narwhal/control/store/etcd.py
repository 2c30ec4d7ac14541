"""The etcd store: a few keys of a cluster that control processes share.

`<prefix>/<fleet>/lease` is bound to an etcd lease and says who leads; `epoch` beside it says who led last and outlives
it; `handoff` is the document; `past` tells of the epochs before, `proof` is what a standby left to show that it can
write. Every other write is a transaction that requires the writer's own lease key as it put it, so
that a superseded writer changes nothing, and the handoff as it left it, so that a write whose answer was lost cannot
come after a later one; where it has been done already the same transaction says so.
"""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, sleep_using_event, stop_after_delay, stop_when_event_set
from tenacity.wait import wait_random

from narwhal.clock import Clock
from narwhal.control.store.base import Lease, LeaseLost, Owner, StoreError
from narwhal.control.store.etcd_claim import Bid, Changed, Claims, Held, read_claim
from narwhal.control.store.etcd_client import (
    Connection,
    EtcdSettings,
    Keys,
    NotThere,
    State,
    Unanswered,
    check_files,
    delete,
    modified,
    put,
    read_value,
    transact,
)
from narwhal.control.store.etcd_lease import LeaseKeeper
from narwhal.control.store.etcd_watch import COMPARE_S, Watcher
from narwhal.control.store.thread import BlockingThread

T = TypeVar("T")

_KEPT_ASIDE = 5
_LONGEST_CLOSE_S = 0.5
_BEATS_IN_A_TTL = 10
DEFAULT_QUOTA_BYTES = 2 * 1024**3  # etcd 3.4 does not tell the quota that it was given
_WARN_AT = (0.9, 0.75, 0.5, 0.25)  # of it


class EtcdStore:
    """A `Store` in etcd. Use `open`."""

    def __init__(
        self,
        settings: EtcdSettings,
        clock: Clock,
        *,
        warn: Callable[[str], None],
        compare_s: float = COMPARE_S,
        patience_s: float | None = None,
    ) -> None:
        """`warn` gets words for people, on the event loop that runs now. `compare_s` is the longest time between two
        readings of everything. `patience_s` is how long a process that has just started believes that a lease may be
        held of which etcd does not know; a TTL unless told otherwise."""
        self._settings = settings
        self._warn = warn
        self._warned_at = 0.0
        self._keys = Keys(settings)
        self._closing = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._beating: asyncio.TimerHandle | None = None
        self._connection = Connection(settings, timeout_s=settings.call_s)
        self._claims = Claims(settings, self._keys, clock, self._connection, patience_s=patience_s)
        self._thread = BlockingThread("narwhal-etcd-store")
        self._watcher = Watcher(settings, self._keys, clock, seen=self._seen, sized=self._sized, compare_s=compare_s)

    @classmethod
    async def open(
        cls,
        settings: EtcdSettings,
        clock: Clock,
        *,
        warn: Callable[[str], None],
        compare_s: float = COMPARE_S,
        patience_s: float | None = None,
    ) -> "EtcdStore":
        """The store of a fleet. Raises StoreError when a certificate cannot be read. That etcd cannot be reached is no
        reason to fail: whoever uses the store waits for it."""
        check_files(settings)
        return cls(settings, clock, warn=warn, compare_s=compare_s, patience_s=patience_s)

    # --- Store ------------------------------------------------------------------------------------------------------

    async def load(self) -> bytes | None:
        state = await self._run(self._claims.read)
        return state.handoff.value if state.handoff is not None else None

    async def save(self, lease: Lease, document: bytes) -> None:
        await self._run(lambda: self._save(lease, document))

    async def set_aside(self, lease: Lease, document: bytes) -> str:
        return await self._run(lambda: self._set_aside(lease, document))

    async def history(self) -> bytes | None:
        return await self._run(lambda: read_value(self._connection, self._keys.past))

    async def keep_history(self, lease: Lease, document: bytes) -> None:
        await self._run(lambda: self._keep_history(lease, document))

    async def prove(self, proof: str) -> None:
        await self._run(lambda: transact(self._connection, [], [put(self._keys.proof, proof.encode())]))

    async def proof(self) -> str:
        found = await self._run(lambda: read_value(self._connection, self._keys.proof))
        return (found or b"").decode(errors="replace")

    async def acquire(self, holder: str, address: str, *, above: int = 0) -> Lease | None:
        bid = Bid(holder=holder, address=address, above=above, token=secrets.token_hex(8))
        held = await self._run(lambda: self._claims.acquire(bid))
        if held is None:
            return None
        if self._beating is not None:
            self._beating.cancel()
        self._beat(held.keeper)
        return held.lease

    async def release(self, lease: Lease) -> None:
        # At once, so that nobody acts while the answer is on its way.
        lease.lost = lease.lost or "released"
        await self._run(lambda: self._release(lease))

    async def owner(self) -> Owner | None:
        state = await self._run(self._claims.read)
        return read_claim(state.epoch, self._keys.epoch).owner if state.epoch is not None else None

    async def changed(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)
        self._news.clear()

    async def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._watcher.close()
        if self._beating is not None:
            self._beating.cancel()
        held = self._claims.held
        if held is not None:
            held.lease.lost = held.lease.lost or "the store is closed"
        # After whatever the thread is at. When etcd hangs, the lease runs out by itself.
        with contextlib.suppress(TimeoutError, StoreError):
            await asyncio.wait_for(self._run(self._give_up), _LONGEST_CLOSE_S)
        held = self._claims.held
        if held is not None:
            held.keeper.stop()
        self._connection.close()
        self._thread.close()

    # --- in the thread of calls -------------------------------------------------------------------------------------

    async def _run(self, call: Callable[[], T]) -> T:
        """`call` in the thread of calls, again within the bound while there is no answer to it."""
        retrying = Retrying(
            retry=retry_if_exception_type(Unanswered),
            stop=stop_after_delay(self._settings.bound_s) | stop_when_event_set(self._closing),
            wait=wait_random(0.05, 0.2),
            sleep=sleep_using_event(self._closing),
            reraise=True,
        )

        def bounded() -> T:
            try:
                return retrying(call)
            except (Unanswered, NotThere) as error:
                raise StoreError(str(error)) from error

        return await self._thread.run(bounded)

    def _guards(self, held: Held) -> list[Any]:
        return self._claims.guards(held)

    def _save(self, lease: Lease, document: bytes) -> None:
        held, keys = self._claims.check(lease), self._keys
        done = transact(
            self._connection,
            [*self._guards(held), modified(keys.handoff, held.handoff_at)],
            [put(keys.handoff, document)],
            otherwise=(keys.lease, keys.handoff),
        )
        if done.revision:
            held.handoff_at = done.revision
            return
        ours, handoff = done.instead
        if ours is None or ours.created != held.created or ours.value != held.claim.value:
            self._lose(held)
        # An earlier write of ours, given up by us, was done after all; or a person changed the key.
        held.handoff_at = handoff.modified if handoff is not None else 0
        if handoff is None or handoff.value != document:
            raise Changed("the handoff in etcd is not as it was left")

    def _set_aside(self, lease: Lease, document: bytes) -> str:
        held, connection = self._claims.check(lease), self._connection
        key = self._keys.aside + f"{lease.epoch:08}".encode()
        prefix = self._keys.aside
        listed = connection.call(lambda c: c.get_prefix_response(prefix, sort_order="ascend", keys_only=True))
        old = [kv.key for kv in listed.kvs if kv.key != key][: -(_KEPT_ASIDE - 1)]
        done = transact(connection, self._guards(held), [put(key, document), *map(delete, old)])
        if not done.revision:
            self._lose(held)
        return f"etcd key {key.decode()}"

    def _keep_history(self, lease: Lease, document: bytes) -> None:
        held = self._claims.check(lease)
        if not transact(self._connection, self._guards(held), [put(self._keys.past, document)]).revision:
            self._lose(held)

    def _lose(self, held: Held) -> None:
        epoch = held.lease.epoch
        self._claims.lose(held, "the lease key is gone or another process's")
        raise LeaseLost(f"epoch {epoch} holds the lease no more: {held.lease.lost}")

    def _release(self, lease: Lease) -> None:
        held = self._claims.held
        if held is not None and held.lease is lease:
            self._claims.let_go(held, "released")
        self._claims.revoke_left()

    def _give_up(self) -> None:
        held = self._claims.held
        if held is not None:
            self._claims.let_go(held, "the store is closed")
        self._claims.revoke_left()

    # --- life of the loop, news -------------------------------------------------------------------------------------

    def _beat(self, keeper: LeaseKeeper) -> None:
        """Shows the keeper that the event loop is alive."""
        if keeper.running:
            keeper.alive()
            self._beating = self._loop.call_later(self._settings.ttl_s / _BEATS_IN_A_TTL, self._beat, keeper)

    def _seen(self, state: State) -> None:
        """The watch knows this state. In its thread."""
        held = self._claims.held
        if held is not None and state.revision >= held.since and not self._ours(held, state):
            held.lease.lost = held.lease.lost or "the lease key is gone or another process's"
        self._tell(self._news.set)

    def _ours(self, held: Held, state: State) -> bool:
        if state.lease is None:
            return False
        try:
            # The token alone: a move to a higher epoch may be seen here before it is known to be done.
            return read_claim(state.lease, self._keys.lease).token == held.claim.token
        except StoreError:
            return False

    def _sized(self, size: int) -> None:
        share = size / DEFAULT_QUOTA_BYTES
        reached = next((each for each in _WARN_AT if share >= each), 0.0)
        if reached > self._warned_at:
            words = (
                f"etcd's database has {size / 1024**2:,.0f} MiB, over {reached:.0%} of the 2 GiB at which etcd refuses "
                f"every write, unless it was given another quota: let it compact by itself (--auto-compaction-mode, "
                f"--auto-compaction-retention), and defragment it"
            )
            self._tell(lambda: self._warn(words))
        self._warned_at = reached

    def _tell(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens any more
            self._loop.call_soon_threadsafe(call)
