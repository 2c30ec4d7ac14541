"""The candidates of coverage and the phases that follow, kept up with the records. Pure.

Decides nothing: `coverage` does. Looks again only at engines that have changed, so that an event in a large fleet costs
no more than in a small one.
"""

from collections.abc import Mapping

from narwhal.control.core.coverage import Candidate, cover
from narwhal.control.core.engine import Engine
from narwhal.control.core.roster import Roster
from narwhal.vocabulary import Phase


class Survey:
    """Looks at the records of a roster."""

    def __init__(self, roster: Roster) -> None:
        self._engines: Mapping[str, Engine] = roster.engines
        self._changes = roster.changes
        self._each: dict[str, Candidate] = {}
        self._dues: dict[str, float] = {}  # engine → when it changes by itself next, of those that will
        self._candidates: tuple[Candidate, ...] = ()
        self._phases: Mapping[str, frozenset[Phase]] | None = None
        self._fresh: dict[str, None] = {}  # looked at since `fresh` was asked last
        self.boundary: float | None = None  # when an engine changes by itself next, as of the last look

    def candidates(self, now: float) -> tuple[Candidate, ...]:
        """What coverage is computed from: the same tuple until an engine, or time, has changed something."""
        changes = self._changes
        if changes.anew:
            self._each, self._dues = {}, {}
            names = dict.fromkeys(self._engines)
        else:
            names = changes.unseen | dict.fromkeys(self.due(now))
        if not names and not changes.anew:
            return self._candidates
        changes.anew, changes.unseen = False, {}
        for name in names:
            self._look(self._engines[name], now)
        self._fresh |= names
        self._candidates = tuple(self._each.values())
        self._phases = None
        self.boundary = min(self._dues.values(), default=None)
        return self._candidates

    def _look(self, engine: Engine, now: float) -> None:
        self._each[engine.id] = engine.candidate(now=now)
        due = min(engine.due(), default=None)
        if due is None:
            self._dues.pop(engine.id, None)
        else:
            self._dues[engine.id] = due

    def due(self, now: float) -> list[str]:
        """The engines of which something ends by itself at `now`, as of the last look."""
        if self.boundary is None or now < self.boundary:
            return []
        return [name for name, due in self._dues.items() if now >= due]

    def phases(self, now: float) -> Mapping[str, frozenset[Phase]]:
        """The phases that each engine serves."""
        candidates = self.candidates(now)
        if self._phases is None:
            self._phases = cover(candidates)
        return self._phases

    def fresh(self) -> Mapping[str, None]:
        """The engines that have been looked at since this was asked last; more of them than have changed."""
        fresh, self._fresh = self._fresh, {}
        return fresh
