"""Keeps one etcd lease alive, in a thread of its own, and moves the instant up to which its holder may act.

It renews only while the event loop shows life: a process whose loop is dead must lose the lease. A renewal without an
answer is neither lost nor renewed; only an answer that the lease is gone, or the end of its validity, is its end.
"""

import random
import threading
from typing import Any

from narwhal.clock import Clock
from narwhal.control.store.base import Lease, StoreError
from narwhal.control.store.etcd_client import Connection, EtcdSettings, Unanswered

_LOOK_S = 0.1  # how often a loop without life is looked at again


class LeaseKeeper:
    """One lease's renewals, from its beginning to its end."""

    def __init__(self, settings: EtcdSettings, clock: Clock, *, lease: Lease, etcd_id: int, first: int) -> None:
        """`etcd_id` names the lease in etcd, `first` the endpoint that granted it."""
        self._settings = settings
        self._clock = clock
        self._lease = lease
        self._etcd_id = etcd_id
        self._alive_at = clock.boottime()
        self._trouble = ""  # why the last renewal was none
        self._stop = threading.Event()
        self._connection = Connection(settings, timeout_s=settings.attempt_s, first=first)
        self._thread = threading.Thread(target=self._run, name="narwhal-etcd-lease", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread still lives."""
        return self._thread.is_alive()

    def alive(self) -> None:
        """The event loop is alive. To be called on it, several times in a TTL."""
        self._alive_at = self._clock.boottime()

    def follow(self, lease: Lease) -> None:
        """The same etcd lease now bears another epoch: `lease` takes the place of the one before."""
        lease.valid_until = self._lease.valid_until
        self._lease = lease

    def stop(self) -> None:
        """Renews no more. The lease in etcd lives on until it is revoked or runs out."""
        self._stop.set()
        self._connection.close()

    def _run(self) -> None:
        try:
            # The first renewal is at once, so that the connection stands when the lease needs it.
            pause_s = 0.0
            while not self._stop.wait(pause_s) and not self._lease.lost:
                pause_s = self._step()
        except Exception as error:
            self._lose(f"renewals of the lease failed: {type(error).__name__}: {error}")
        finally:
            self._connection.close()

    def _step(self) -> float:
        """One look, and one renewal if the loop lives. Returns seconds until the next."""
        settings, now = self._settings, self._clock.boottime()
        if now >= self._lease.valid_until:
            # Whether etcd still has it does not matter: its holder has fenced itself already.
            self._lose(f"the lease was not renewed in time{': ' if self._trouble else ''}{self._trouble}")
            return 0.0
        silent_s = now - self._alive_at
        if silent_s > settings.ttl_s:
            self._trouble = f"the event loop showed no life for {silent_s:.1f} s"
            return _LOOK_S
        try:
            ttl_s = self._renew()
        except StoreError as error:
            self._trouble = str(error)
            return random.uniform(0.05, 0.15) if isinstance(error, Unanswered) else settings.renewal_s / 2
        self._trouble = ""
        if ttl_s <= 0:
            self._lose("etcd says that the lease is gone")
        elif self._clock.boottime() < self._lease.valid_until:
            # Counted from before the renewal left: etcd cannot have begun to count earlier.
            self._lease.valid_until = now + min(ttl_s, settings.ttl_s) - settings.safety_margin_s
        return max(0.0, now + settings.renewal_s - self._clock.boottime())

    def _renew(self) -> int:
        """One round trip. The lease's TTL after it, 0 when it is gone. Raises StoreError."""

        def ask(client: Any) -> int | None:
            return next((int(answer.TTL) for answer in client.refresh_lease(self._etcd_id)), None)

        ttl_s = self._connection.call(ask)
        if ttl_s is None:
            self._connection.drop()
            raise Unanswered("etcd ended a renewal without an answer")
        return ttl_s

    def _lose(self, why: str) -> None:
        self._lease.lost = self._lease.lost or why
