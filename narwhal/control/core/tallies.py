"""Durable counts, and which reports they already hold (spec S1, S6).

Decides: whether a report is new. It cannot see: what a report means for an engine. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from narwhal.reports import Batch, ProxyKey, RequestCounts, Run
from narwhal.vocabulary import Outcome

CURSOR_KEPT_S = 3600.0  # after its proxy went (spec S6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The last report applied of one proxy process."""

    sequence: int
    drop_due: float | None = None  # set while the proxy is away


@dataclass(kw_only=True, slots=True)
class Tallies:
    """Requests by result, outcomes on engines that the fleet does not have, and the cursors that make them exact."""

    requests: RequestCounts = field(default_factory=RequestCounts)
    unknown: dict[Outcome, int] = field(default_factory=dict)
    cursors: dict[ProxyKey, Cursor] = field(default_factory=dict)
    changed: int = 0  # rises with every change

    def accept(self, batch: Batch, *, connected: bool, now: float) -> bool:
        """Move the proxy's cursor to `batch` and count its requests. False, and nothing changed, when it was applied
        before.

        A gap is accepted: it is what a control process sees that lost its cursors, and refusing would stop for ever.
        """
        cursor = self.cursors.get(batch.proxy)
        if cursor is not None and batch.sequence <= cursor.sequence:
            return False
        due = None if connected else now + CURSOR_KEPT_S
        self.cursors[batch.proxy] = Cursor(sequence=batch.sequence, drop_due=due)
        self.requests = self.requests.plus(batch.requests)
        self.changed += 1
        return True

    def count_unknown(self, run: Run) -> None:
        """Outcomes on an engine that the fleet does not have, all such engines together."""
        self.unknown[run.outcome] = self.unknown.get(run.outcome, 0) + run.count

    def count_gone(self, outcomes: Mapping[Outcome, int]) -> None:
        """The outcomes of an engine that has left the fleet."""
        for outcome, count in outcomes.items():
            self.unknown[outcome] = self.unknown.get(outcome, 0) + count
        self.changed += 1

    def came(self, proxy: ProxyKey) -> None:
        """The proxy is there: its cursor stays."""
        self._due(proxy, None)

    def went(self, proxy: ProxyKey, *, now: float) -> None:
        """The proxy is away: its cursor goes in an hour."""
        self._due(proxy, now + CURSOR_KEPT_S)

    def _due(self, proxy: ProxyKey, due: float | None) -> None:
        cursor = self.cursors.get(proxy)
        if cursor is not None and cursor.drop_due != due:
            self.cursors[proxy] = Cursor(sequence=cursor.sequence, drop_due=due)
            self.changed += 1

    def drop_old(self, *, now: float) -> None:
        """Forget the cursors whose time is over."""
        old = [p for p, cursor in self.cursors.items() if cursor.drop_due is not None and now >= cursor.drop_due]
        for proxy in old:
            del self.cursors[proxy]
        self.changed += bool(old)
