"""What the fleet looks like: placement, the view, explanations, readiness. Pure.

Decides: nothing beyond what coverage computes, which all of them show (spec M9, P1). Reads the other machines' state.
"""

from collections.abc import Iterable, Mapping

from narwhal.control.core.coverage import Candidate, after, cover, uncovered
from narwhal.control.core.drain import Drains
from narwhal.control.core.engine import Engine
from narwhal.control.core.explain import explain
from narwhal.control.core.monitor import Monitor
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.publication import PlacementContent, outside, unstored
from narwhal.control.core.readmission import Readmission
from narwhal.control.core.render import engine_view, entry, released
from narwhal.control.core.roster import Roster
from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.survey import Survey
from narwhal.control.core.suspicion import Suspicions
from narwhal.control.core.tallies import Tallies
from narwhal.control.core.view import EngineView, Explanation, FleetView
from narwhal.control.core.witnesses import Witnesses
from narwhal.placement import EngineEntry
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
        self._survey = Survey(roster)
        self._entries: dict[str, EngineEntry] = {}
        self._content: PlacementContent | None = None
        # Candidates and stored incarnations → whether a phase has nobody, as asked last.
        self._lacked: tuple[tuple[Candidate, ...], Mapping[str, int] | None, bool] | None = None

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed."""
        self._settings = settings

    @property
    def boundary(self) -> float | None:
        """When an engine changes by itself next, as of the last `candidates`."""
        return self._survey.boundary

    def due(self, now: float) -> list[str]:
        """The engines that change by themselves at `now`, as of the last `candidates`."""
        return self._survey.due(now)

    def candidates(self, now: float) -> tuple[Candidate, ...]:
        """What coverage is computed from: the same tuple until a durable decision, or time, has changed it."""
        return self._survey.candidates(now)

    def phases(self, now: float) -> Mapping[str, frozenset[Phase]]:
        """The phases that each engine serves."""
        return self._survey.phases(now)

    def placement(self, *, now: float) -> PlacementContent:
        """What proxies should know: the same object until it changes."""
        candidates, closed = self.candidates(now), self.closed()
        before = self._content
        if before is None or before.candidates is not candidates:
            self._entries = self._entered(candidates, now)
        elif before.closed == closed:
            return before
        self._content = PlacementContent(closed=closed, engines=self._entries, candidates=candidates)
        return self._content

    def _entered(self, candidates: tuple[Candidate, ...], now: float) -> dict[str, EngineEntry]:
        """The entries of all engines, made anew for those that may show something else than before: what an engine in
        quarantine may serve after it depends on all others."""
        fresh, phases, before = self._survey.fresh(), self.phases(now), self._entries
        anew: dict[str, Candidate | None] = {}
        for name, engine in self._engines.items():
            known = before.get(name)
            if known is None or name in fresh or known.quarantine_due is not None or known.phases != phases[name]:
                anew[name] = released(engine, now=now)
        then = after(candidates, (one for one in anew.values() if one is not None))
        return {
            name: entry(engine, phases[name], then.get(name, frozenset()), now=now) if name in anew else before[name]
            for name, engine in self._engines.items()
        }

    def view(self, *, stored: Mapping[str, int] | None, now: float) -> FleetView:
        """Everything there is to show."""
        phases = self._publishable(stored, now)
        inflight = self._proxies.resident()
        return FleetView(
            name=self._settings.name,
            model=self._settings.model,
            not_ready=self.not_ready(stored=stored, now=now),
            closed=self.closed(),
            engines=tuple(self._engine_view(e, phases[e.id], inflight, now) for e in self._engines.values()),
            proxies=self._proxies.view(suspect=self._witnesses.suspect, now=now),
            monitor=self._monitor.view(now=now),
            totals=self._tallies.requests,
        )

    def _publishable(self, stored: Mapping[str, int] | None, now: float) -> Mapping[str, frozenset[Phase]]:
        """The phases that each engine serves; with `stored`, those that wait for their incarnation to be stored held
        out."""
        waiting = self._waiting(stored)
        return cover(outside(self.candidates(now), waiting)) if waiting else self.phases(now)

    def _waiting(self, stored: Mapping[str, int] | None) -> frozenset[str]:
        if stored is None:
            return frozenset()
        return unstored({name: engine.incarnation for name, engine in self._engines.items()}, stored)

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
        phases = self._publishable(stored, now)[engine]
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

    def not_ready(self, *, now: float, stored: Mapping[str, int] | None = None) -> str:
        """The first reason of spec M9 that the core can see; with `stored` for those that may be published."""
        return self.closed() or (NotReady.NO_ENGINES if self._lacking(stored, now) else "")

    def _lacking(self, stored: Mapping[str, int] | None, now: float) -> bool:
        """Whether nobody serves a phase. Asked for more often than it changes."""
        candidates = self.candidates(now)
        known = self._lacked
        if known is None or known[0] is not candidates or known[1] is not stored:
            waiting = self._waiting(stored)
            lacking = bool(uncovered(outside(candidates, waiting)))
            self._lacked = known = (candidates, stored, lacking)
        return known[2]
