"""Follows the three keys of a fleet in a thread of its own: read everything, watch from there, and so on for ever.

A watch can end, stay silent, or stand behind what was compacted, without a word. So it never lasts longer than the
compare interval, and whatever ends it, everything is read again: no change is lost, however the watch fared.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import structlog

from narwhal.clock import Clock
from narwhal.control.store.base import StoreError
from narwhal.control.store.etcd_client import Connection, EtcdSettings, Keys, State, database_bytes, entry, read_state

COMPARE_S = 10.0
SIZE_EVERY_S = 60.0

log = structlog.get_logger()


class Watcher:
    """One fleet's keys, followed until `close`."""

    def __init__(
        self,
        settings: EtcdSettings,
        keys: Keys,
        clock: Clock,
        *,
        seen: Callable[[State], None],
        sized: Callable[[int], None],
        compare_s: float = COMPARE_S,
    ) -> None:
        """`seen` gets every state that is come to know, `sized` the size of the database in bytes now and then; both
        are called in this thread."""
        self._keys = keys
        self._clock = clock
        self._seen = seen
        self._sized = sized
        self._compare_s = compare_s
        self._size_due = clock.boottime()
        self._stop = threading.Event()
        self._connection = Connection(settings, timeout_s=settings.call_s)
        self._thread = threading.Thread(target=self._run, name="narwhal-etcd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch. Does not wait for the thread."""
        self._stop.set()
        self._connection.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                whole = self._round()
            except StoreError as error:
                if not self._stop.is_set():
                    log.debug("etcd watch starts again", why=str(error))
                whole = False
            except Exception:
                log.exception("etcd watch failed")
                self._connection.drop()
                whole = False
            if not whole:
                self._stop.wait(random.uniform(0.1, 0.3))

    def _round(self) -> bool:
        """Reads, and watches from there. True when the watch lasted for as long as it should."""
        state = read_state(self._connection, self._keys)
        self._seen(state)
        self._measure()
        keys, since = self._keys, state.revision + 1
        for answer in self._connection.watch(keys.first, keys.last, since, for_s=self._compare_s):
            if answer.canceled or answer.compact_revision:
                return False
            for event in answer.events:
                name = keys.name(event.kv.key)
                if name is not None:
                    there = event.type == event.PUT
                    state = replace(state, revision=event.kv.mod_revision, **{name: entry(event.kv) if there else None})
            if answer.events:
                self._seen(state)
        return True

    def _measure(self) -> None:
        now = self._clock.boottime()
        if now < self._size_due:
            return
        self._size_due = now + SIZE_EVERY_S
        try:
            size = database_bytes(self._connection)
        except StoreError as error:
            log.debug("size of etcd's database not read", why=str(error))
        else:
            self._sized(size)
