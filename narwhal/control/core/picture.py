"""What the fleet looks like: placement, the view, explanations, readiness. Pure.

Decides: nothing beyond what coverage computes, which all of them show (spec M9, P1). Reads the other machines' state.
"""

from collections.abc import Iterable, Mapping

from narwhal.control.core.coverage import Candidate, cover, uncovered
from narwhal.control.core.drain import Drains
from narwhal.control.core.engine import Engine
from narwhal.control.core.explain import explain
from narwhal.control.core.monitor import Monitor
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.publication import PlacementContent, outside, unstored
from narwhal.control.core.readmission import Readmission
from narwhal.control.core.render import engine_view, entry
from narwhal.control.core.roster import Roster
from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.suspicion import Suspicions
from narwhal.control.core.tallies import Tallies
from narwhal.control.core.view import EngineView, Explanation, FleetView
from narwhal.control.core.witnesses import Witnesses
from narwhal.vocabulary import NotReady, Phase


class Picture:
    """Looks at everything, changes nothing."""

    def __init__(
        self,
        settings: CoreSettings,
        roster: Roster,
        *,
        monitor: Monitor,
        proxies: Proxies,
        tallies: Tallies,
        witnesses: Witnesses,
        readmission: Readmission,
        suspicions: Suspicions,
        drains: Drains,
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._engines = roster.engines
        self._monitor = monitor
        self._proxies = proxies
        self._tallies = tallies
        self._witnesses = witnesses
        self._readmission = readmission
        self._suspicions = suspicions
        self._drains = drains
        self._revision = -1
        self._candidates: tuple[Candidate, ...] = ()
        self._content: PlacementContent | None = None
        self.boundary: float | None = None  # when an engine changes by itself next, as of the last `candidates`

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed."""
        self._settings = settings

    def candidates(self, now: float) -> tuple[Candidate, ...]:
        """What coverage is computed from: the same tuple until a durable decision, or time, has changed it."""
        revision = self._roster.decided
        if revision != self._revision or (self.boundary is not None and now >= self.boundary):
            self._revision = revision
            self._candidates = tuple(engine.candidate(now=now) for engine in self._engines.values())
            self.boundary = min((due for engine in self._engines.values() for due in engine.due()), default=None)
            self._content = None
        return self._candidates

    def placement(self, *, now: float) -> PlacementContent:
        """What proxies should know: the same object until it changes."""
        candidates, closed = self.candidates(now), self.closed()
        if self._content is None or self._content.closed != closed:
            phases = cover(candidates)
            engines = {e.id: entry(e, candidates, phases[e.id], now=now) for e in self._engines.values()}
            self._content = PlacementContent(closed=closed, engines=engines, candidates=candidates)
        return self._content

    def view(self, *, stored: Mapping[str, int] | None, now: float) -> FleetView:
        """Everything there is to show."""
        candidates = self._publishable(stored, now)
        phases = cover(candidates)
        inflight = self._proxies.resident()
        return FleetView(
            name=self._settings.name,
            model=self._settings.model,
            not_ready=self.not_ready(candidates),
            closed=self.closed(),
            engines=tuple(self._engine_view(e, phases[e.id], inflight, now) for e in self._engines.values()),
            proxies=self._proxies.view(suspect=self._witnesses.suspect, now=now),
            monitor=self._monitor.view(now=now),
            totals=self._tallies.requests,
        )

    def _publishable(self, stored: Mapping[str, int] | None, now: float) -> tuple[Candidate, ...]:
        """The candidates, those held out that wait for their incarnation to be stored."""
        if stored is None:
            return self.candidates(now)
        return outside(self.candidates(now), unstored({e.id: e.incarnation for e in self._engines.values()}, stored))

    def explain(
        self,
        engine: str,
        history: Iterable[tuple[float, str]],
        *,
        cut_off: bool,
        stored: Mapping[str, int] | None,
        now: float,
    ) -> Explanation:
        """Why the engine is, or is not, eligible. `cut_off`: control is, from the engines (spec L4)."""
        phases = cover(self._publishable(stored, now))[engine]
        view = self._engine_view(self._engines[engine], phases, self._proxies.resident(), now)
        return explain(view, history, closed=self.closed(), cut_off=cut_off, now=now)

    def _engine_view(
        self, engine: Engine, phases: frozenset[Phase], inflight: Mapping[str, int], now: float
    ) -> EngineView:
        suspicion = self._suspicions.known.get(engine.id)
        due = self._readmission.due(engine.id)
        return engine_view(
            engine,
            phases,
            inflight=inflight.get(engine.id, 0),
            suspicion=self._readmission.words(engine.id) if suspicion is None else suspicion.words(now=now),
            gate_in_s=None if due is None else max(0.0, due - now),
            waits_for=self._drains.waits_for(engine, now=now),
            limit=self._settings.eject_after,
            now=now,
        )

    def closed(self) -> str:
        """Why admission is closed for everybody; empty when it is open."""
        if self._monitor.degraded:
            return self._monitor.degraded
        whole = all(engine.drain is not None and engine.drain.whole for engine in self._engines.values())
        return NotReady.MAINTENANCE if self._engines and whole else ""

    def not_ready(self, candidates: tuple[Candidate, ...]) -> str:
        """The first reason of spec M9 that the core can see."""
        return self.closed() or (NotReady.NO_ENGINES if uncovered(candidates) else "")
