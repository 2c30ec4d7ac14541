"""What an operator should hear of the fleet in sum: ready or not, and who serves in spite of its holds. Pure.

Decides: when that is another than was told last. It cannot see: what changed it.
"""

from narwhal.control.core import telling
from narwhal.control.core.coverage import Candidate
from narwhal.control.core.picture import Picture
from narwhal.control.core.records import EventKind, Record
from narwhal.vocabulary import Phase


class Summary:
    """Tells each change once."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._seen: tuple[Candidate, ...] | None = None  # coverage and admission, as looked at last
        self._closed = ""
        self._reason: str | None = None  # of not being ready, as told last
        self._kept: frozenset[str] = frozenset()  # by last-engine protection, as told last

    def told(self, *, now: float) -> list[Record]:
        """What is to be told, when coverage or readiness is another than before."""
        candidates, closed = self._picture.candidates(now), self._picture.closed()
        if candidates is self._seen and closed == self._closed:
            return []
        self._seen, self._closed = candidates, closed
        records = self._protection(candidates, now)
        reason = self._picture.not_ready(now=now)
        if reason != self._reason:
            self._reason = reason
            kind = EventKind.NOT_READY if reason else EventKind.READY
            records.append(Record(kind=kind, message=f"not ready: {reason}" if reason else "ready"))
        return records

    def _protection(self, candidates: tuple[Candidate, ...], now: float) -> list[Record]:
        """Tell of engines that serve in spite of soft holds, once each."""
        held = [c for c in candidates if not c.hard and c.soft_since is not None]
        phases = self._picture.phases(now) if held else {}
        before, self._kept = self._kept, frozenset(c.id for c in held if phases[c.id])
        return [
            telling.kept(engine, " and ".join(p for p in Phase if p in phases[engine]))
            for engine in sorted(self._kept - before)
        ]
