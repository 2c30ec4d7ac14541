"""Exact totals and what a resume must keep: counted here by itself, compared with what control says."""

from collections import Counter
from typing import TYPE_CHECKING

from narwhal.control.core.handoff import SavedFleet
from narwhal.reports import Batch, ProxyKey
from narwhal.vocabulary import Hold, Outcome, RequestResult
from tests.simulation.store import Document
from tests.simulation.world import Invariant, Violation

if TYPE_CHECKING:
    from tests.simulation.proxies import Proxy
    from tests.simulation.term import Term

EDGE_S = 0.001  # what may pass between two looks at one instant


class Totals:
    """Every report that was ever cut, by the proxy process that cut it."""

    def __init__(self) -> None:
        self.batches: dict[ProxyKey, list[Batch]] = {}
        self.acked: Counter[ProxyKey] = Counter()
        self.killed: set[ProxyKey] = set()

    def cut(self, batch: Batch) -> None:
        """A report is numbered and can change no more."""
        self.batches.setdefault(batch.proxy, []).append(batch)

    def at_rest(self, term: "Term", proxies: list["Proxy"]) -> None:
        """Nothing is under way: control's totals are those of the living, and what of the dead had arrived."""
        cursors = term.fleet.report_cursors()
        outcomes: Counter[tuple[str, Outcome]] = Counter()
        ended: Counter[RequestResult] = Counter()
        retries = 0
        for key in self.killed:
            reached = cursors.get(key, 0)
            if reached < self.acked[key]:
                raise Violation(
                    Invariant.TOTALS, f"{key} was told that report {self.acked[key]} is stored, control has {reached}"
                )
            for batch in self.batches.get(key, []):
                if batch.sequence <= reached:
                    retries += _add(batch, outcomes, ended)
        for proxy in proxies:
            if proxy.key in self.killed:
                continue
            outcomes += proxy.told
            ended += proxy.ended
            retries += proxy.retries
        view = term.fleet.view(now=term.control.now())
        found = Counter({(e.id, o): n for e in view.engines for o, n in e.outcomes.items() if n})
        if found != outcomes:
            more, fewer = found - outcomes, outcomes - found
            raise Violation(Invariant.TOTALS, f"legs counted too often: {dict(more)}, too seldom: {dict(fewer)}")
        totals = {result: getattr(view.totals, result.value) for result in RequestResult}
        if Counter({r: n for r, n in totals.items() if n}) != ended or view.totals.retried != retries:
            raise Violation(Invariant.TOTALS, f"requests: {view.totals}, truth: {dict(ended)}, {retries} retries")


def _add(batch: Batch, outcomes: Counter[tuple[str, Outcome]], ended: Counter[RequestResult]) -> int:
    for run in batch.runs:
        outcomes[run.engine, run.outcome] += run.count
    for result in RequestResult:
        count = getattr(batch.requests, result.value)
        if count:
            ended[result] += count
    return batch.requests.retried


def resumed(term: "Term", document: Document) -> None:
    """What a new term begins with is what the document says, but for the time that has passed."""
    state, now = document.state, term.control.now()
    view = term.fleet.view(now=now)
    elapsed_s = term.control.wall() - document.written_at
    for engine in view.engines:
        saved = state.engines[engine.id]
        if (saved.incarnation, dict(saved.outcomes)) != (engine.incarnation, dict(engine.outcomes)):
            raise Violation(Invariant.RESUME, f"{engine.id}: incarnation or counters differ")
        if dict(saved.streaks) != dict(engine.streaks) or saved.misses != engine.misses:
            raise Violation(
                Invariant.RESUME, f"{engine.id}: streaks {dict(engine.streaks)}, saved {dict(saved.streaks)}"
            )
        have = {hold.kind for hold in engine.holds}
        lost = _kept(saved.holds, elapsed_s) - have
        if lost or have - {hold.kind for hold in saved.holds}:
            raise Violation(
                Invariant.RESUME, f"{engine.id} holds {sorted(have)}, saved {[h.kind for h in saved.holds]}"
            )
    if view.totals != state.requests:
        raise Violation(Invariant.RESUME, f"requests {view.totals}, saved {state.requests}")
    if term.fleet.report_cursors() != document.cursors():
        raise Violation(Invariant.RESUME, "the cursors of reports differ")


def _kept(holds: tuple[object, ...], elapsed_s: float) -> set[Hold]:
    kept = set()
    for hold in holds:
        remaining_s = getattr(hold, "remaining_s", None)
        if remaining_s is None or remaining_s - elapsed_s > EDGE_S:
            kept.add(Hold(getattr(hold, "kind", "")))
    return kept


def holds_in(state: SavedFleet, engine: str) -> set[Hold]:
    """The holds of an engine that a document has."""
    return {hold.kind for hold in state.engines[engine].holds}


def ejected_in(state: SavedFleet) -> dict[str, int]:
    """The engines that a document holds as ejected → their incarnation."""
    return {
        engine: saved.incarnation
        for engine, saved in state.engines.items()
        if any(hold.kind is Hold.EJECTED for hold in saved.holds)
    }
