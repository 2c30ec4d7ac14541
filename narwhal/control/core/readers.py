"""Decode legs that failed with the handoffs of one producer, over all their readers (spec F7). Pure.

Decides: whether the producer is what they have in common. It cannot see: which failures may be those of reading, nor
what is done about the producer.
"""

from collections import deque
from collections.abc import Mapping

from narwhal.control.core.engine import Engine
from narwhal.control.core.telling import listed
from narwhal.vocabulary import Phase

KEPT_S = 30.0  # failures further apart have no cause in common that still matters
KEPT = 16  # newest ones of each producer
READERS = 2  # that one fails to read may be its own doing


class FailedReads:
    """The newest failed reads of every producer."""

    def __init__(self) -> None:
        self._failed: dict[str, deque[tuple[float, str, int]]] = {}

    def failed(self, producer: str, reader: str, *, count: int, now: float) -> None:
        """`count` decode legs of `reader` failed with handoffs of `producer`."""
        self._failed.setdefault(producer, deque(maxlen=KEPT)).append((now, reader, count))

    def common(self, producer: Engine, engines: Mapping[str, Engine], enough: int, *, now: float) -> str:
        """Why the producer is to blame, or empty: `enough` legs on several readers failed with its handoffs, lately and
        with no other's, though there are others."""
        others = (e for e in engines.values() if e is not producer and e.role is Phase.PREFILL)
        if not any(e.free(now=now) for e in others):
            return ""
        readers: dict[str, int] = {}
        for at, reader, count in self._failed.get(producer.id, ()):
            if now < at + KEPT_S and engines[reader].evidence.producers.keys() <= {producer.id}:
                readers[reader] = readers.get(reader, 0) + count
        legs = sum(readers.values())
        if len(readers) < READERS or legs < enough:
            return ""
        del self._failed[producer.id]
        return f"{legs} decode legs on {listed(readers)} failed with its handoffs, and with no other's"

    def forget(self, engine: str) -> None:
        """As a producer and as a reader: its incarnation is over."""
        self._failed.pop(engine, None)
        for producer, failed in self._failed.items():
            if any(reader == engine for _, reader, _ in failed):
                self._failed[producer] = deque((f for f in failed if f[1] != engine), maxlen=KEPT)
