"""The fleet: every decision goes through here. Events in, effects out.

Decides: nothing by itself; it hands each input to the machine that owns it, carries what one machine decides to the
others, and shows the result. It cannot see: the store, the lease, streams, sockets or clocks. Pure.

The caller (one loop, no locks) calls `handle` for everything that happens, `tick` for each stage of a monitor pass, and
`handle(Woke())` at `next_due()`; after each call it compares `placement` and the revisions with what it last sent and
stored. An exception from `handle` or `tick` other than `CommandRefused` is a fault of this code.
"""

from collections.abc import Mapping

from narwhal.control.core.coverage import Candidate, cover, uncovered
from narwhal.control.core.decisions import Admission, Decision, Ejection
from narwhal.control.core.engine import Engine, Held, Standing, joining
from narwhal.control.core.events import (
    CheckAnswered,
    Effect,
    EventKind,
    Input,
    PassEnded,
    ProxyAcked,
    ProxyConnected,
    ProxyLeft,
    ProxyLost,
    ProxyNacked,
    Record,
    Reloaded,
    Reported,
    Woke,
)
from narwhal.control.core.handoff import SavedFleet
from narwhal.control.core.monitor import Monitor
from narwhal.control.core.persistence import (
    load_cursors,
    load_engine,
    load_proxies,
    moved,
    save_cursors,
    save_engine,
    save_proxies,
)
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.publication import PlacementContent, outside, unstored
from narwhal.control.core.readmission import Readmission
from narwhal.control.core.render import engine_view, entry
from narwhal.control.core.settings import CoreSettings, EngineSpec
from narwhal.control.core.tallies import Tallies
from narwhal.control.core.view import FleetView
from narwhal.reports import Batch, ProxyKey
from narwhal.vocabulary import Hold, NotReady, Stage


class InvariantBrokenError(AssertionError):
    """The state is one that no correct history leads to."""


class Fleet:
    """The decisions of one active control process, from one lease to its end.

    `epoch`: of that lease; numbers of checks and probes begin above those of every earlier epoch, so an answer that was
    asked for before matches nothing. `saved`: the state to go on from (`handoff.aged`), of the same set of engines.
    """

    def __init__(self, settings: CoreSettings, *, now: float, epoch: int = 1, saved: SavedFleet | None = None) -> None:
        self._settings = settings
        self._monitor = Monitor(failure_limit=settings.monitor_failure_limit)
        self._proxies = Proxies(max_age_s=settings.placement_max_age_s)
        self._tallies = Tallies()
        self._readmission = Readmission(settings)
        self._engines: dict[str, Engine] = {}
        self._numbers = epoch << 32  # where the numbers of an engine's checks begin
        self._reason: str | None = None  # of not being ready, as told last
        self._decided = 0  # decisions on engines that are gone, so that revisions only rise
        self._counted = 0
        self._content: tuple[tuple[int, str], float | None, PlacementContent] | None = None
        if saved is not None:
            self._load_rest(saved, now)
        for spec in settings.engines:
            known = saved.engines.get(spec.id) if saved is not None else None
            engine = joining(spec, now=now) if known is None else load_engine(spec, known, settings, now=now)
            engine.numbers = self._numbers
            self._engines[spec.id] = engine
            if engine.standing is Standing.JOINING:
                self._readmission.join(engine, now=now)
            elif engine.standing is Standing.EJECTED:
                due = now + ((known and known.gate_in_s) or 0.0)
                self._readmission.restore(engine, due=due)

    def _load_rest(self, saved: SavedFleet, now: float) -> None:
        self._tallies.requests = saved.requests
        self._tallies.unknown = dict(saved.unknown_outcomes)
        self._tallies.cursors = load_cursors(saved.cursors, now=now)
        load_proxies(self._proxies, saved.proxies, self._settings, now=now)

    # --- events in, effects out ---------------------------------------------------------------------------------------

    def handle(self, event: Input, *, now: float) -> tuple[Effect, ...]:
        """One thing happened at `now`. Answers that nobody waits for, and reports that were applied, change nothing."""
        effects = self._expire(now)
        effects += self._carry(self._decide(event, now), now)
        return self._settle(effects, now)

    def tick(self, stage: Stage, *, now: float) -> tuple[Effect, ...]:
        """The core's share of one stage of a monitor pass."""
        effects = self._expire(now)
        decisions: list[Decision] = []
        if stage is Stage.READMISSION:
            decisions += self._readmission.tick(self._engines, now=now)
        elif stage is Stage.ROLLOVER:
            self._tallies.drop_old(now=now)
            self._proxies.drop_old(now=now)
        effects += self._carry(decisions, now)
        return self._settle(effects, now)

    def next_due(self) -> float | None:
        """When `handle(Woke())` is wanted next, None for never. May lie in the past: then at once."""
        dues = [due for engine in self._engines.values() for due in engine.due()]
        prompt = self._readmission.next_due()
        return min((*dues, prompt) if prompt is not None else dues, default=None)

    def _decide(self, event: Input, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        match event:
            case Reported():
                decisions += self._reported(event.batch, now)
            case CheckAnswered():
                decisions += self._check_answered(event, now)
            case ProxyAcked():
                self._proxies.acked(event, now=now)
            case ProxyNacked():
                decisions += self._proxies.nacked(event, now=now)
            case ProxyConnected() | ProxyLost() | ProxyLeft():
                decisions += self._proxy_moved(event, now)
            case PassEnded():
                decisions += self._monitor.pass_ended(event, now=now)
            case Reloaded():
                decisions += self._reloaded(event.settings, now)
            case Woke():
                decisions += self._readmission.tick(self._engines, now=now, prompt_only=True)
        return decisions

    def _reported(self, batch: Batch, now: float) -> list[Decision]:
        connected = self._is_connected(batch.proxy)
        if not self._tallies.accept(batch, connected=connected, now=now):
            return []
        for run in batch.runs:
            engine = self._engines.get(run.engine)
            if engine is None:
                self._tallies.count_unknown(run)
                continue
            engine.outcomes[run.outcome] = engine.outcomes.get(run.outcome, 0) + run.count
            engine.counted += 1
        return []

    def _check_answered(self, event: CheckAnswered, now: float) -> list[Decision]:
        engine = self._engines.get(event.engine)
        if engine is None or event.incarnation != engine.incarnation:
            return []
        if self._readmission.expects(event):
            return self._readmission.answered(engine, event, now=now)
        return []

    def _proxy_moved(self, event: ProxyConnected | ProxyLost | ProxyLeft, now: float) -> list[Decision]:
        gone: ProxyKey | None = event.proxy
        match event:
            case ProxyConnected():
                records, gone = self._proxies.connected(event, now=now)
                if self._is_connected(event.proxy):
                    self._tallies.came(event.proxy)
            case ProxyLost():
                records = self._proxies.lost(event, now=now)
            case ProxyLeft():
                records = self._proxies.left(event)
        if gone is not None and not self._is_connected(gone):
            self._tallies.went(gone, now=now)
        return [*records]

    def _is_connected(self, key: ProxyKey) -> bool:
        proxy = self._proxies.find(key)
        return proxy is not None and proxy.connected

    # --- another fleet file -------------------------------------------------------------------------------------------

    def _reloaded(self, settings: CoreSettings, now: float) -> list[Decision]:
        """Engines come, go and change; those that stay keep their holds (spec S2)."""
        self._settings = settings
        self._monitor.configure(failure_limit=settings.monitor_failure_limit)
        self._proxies.configure(max_age_s=settings.placement_max_age_s)
        self._readmission.configure(settings)
        before, self._engines = self._engines, {}
        decisions: list[Decision] = []
        for engine in before.values():
            if all(spec.id != engine.id for spec in settings.engines):
                decisions.append(self._remove(engine))
        for spec in settings.engines:
            known = before.get(spec.id)
            if known is None:
                self._engines[spec.id] = joining(spec, now=now)
                self._engines[spec.id].numbers = self._numbers
                self._readmission.join(self._engines[spec.id], now=now)
                decisions.append(_changed(EventKind.ENGINE_ADDED, spec, "added to the fleet"))
            else:
                self._engines[spec.id] = known
                if known.spec != spec:
                    decisions.append(self._change(known, spec, now))
        self._decided += 1
        return decisions

    def _remove(self, engine: Engine) -> Decision:
        """Nothing of it remains but its share of the totals."""
        self._readmission.forget(engine.id)
        for outcome, count in engine.outcomes.items():
            self._tallies.unknown[outcome] = self._tallies.unknown.get(outcome, 0) + count
        self._decided += engine.decided
        self._counted += engine.counted
        # An engine that is added under this id later must not take its answers for its own.
        self._numbers = max(self._numbers, engine.numbers)
        return _changed(EventKind.ENGINE_REMOVED, engine.spec, "removed from the fleet")

    def _change(self, engine: Engine, spec: EngineSpec, now: float) -> Decision:
        """The same engine with other properties; at another address it is another engine (spec R8)."""
        before = engine.spec
        if spec.url != before.url:
            self._readmission.forget(engine.id)
            other = moved(engine, spec, now=now)
            other.numbers = engine.numbers
            self._decided += engine.decided - other.decided if other is not engine else 0
            self._counted += engine.counted - other.counted if other is not engine else 0
            self._engines[spec.id] = other
            self._readmission.join(other, now=now)
            return _changed(EventKind.ENGINE_CHANGED, spec, f"its address changed from {before.url}")
        engine.spec = spec
        if spec.role is not before.role or spec.pinned:
            engine.role = spec.role
        engine.decided += 1
        return _changed(EventKind.ENGINE_CHANGED, spec, "its entry in the fleet file changed")

    # --- what one machine decides, the others learn -------------------------------------------------------------------

    def _carry(self, decisions: list[Decision], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for decision in decisions:
            match decision:
                case Ejection():
                    effects += self._eject(decision, now)
                case Admission():
                    effects += self._admit(decision, now)
                case _:
                    effects.append(decision)
        return effects

    def _eject(self, decision: Ejection, now: float) -> list[Effect]:
        engine = self._engines[decision.engine]
        engine.eject(decision.reason, now=now)
        self._readmission.ejected(engine, now=now)
        message = f"engine {engine.id} ejected ({decision.cause}): {decision.reason}"
        fields = {"cause": decision.cause}
        return [Record(kind=EventKind.ENGINE_EJECTED, message=message, engine=engine.id, fields=fields)]

    def _admit(self, decision: Admission, now: float) -> list[Effect]:
        engine = self._engines[decision.engine]
        first = engine.standing is Standing.JOINING
        engine.admit(identity=decision.identity, ramp_s=self._settings.ramp_s, now=now)
        self._readmission.forget(engine.id)
        kind = EventKind.ENGINE_JOINED if first else EventKind.ENGINE_READMITTED
        message = f"engine {engine.id} {'joined' if first else 'is back'} as incarnation {engine.incarnation}"
        fields = {"incarnation": str(engine.incarnation)}
        return [Record(kind=kind, message=message, engine=engine.id, fields=fields)]

    def _expire(self, now: float) -> list[Effect]:
        """Holds end at their deadline, whatever woke us."""
        effects: list[Effect] = []
        for engine in self._engines.values():
            for held in engine.expire(now=now):
                effects.append(hold_ended(engine, held))
        return effects

    def _settle(self, effects: list[Effect], now: float) -> tuple[Effect, ...]:
        """Tell when readiness has changed; check that the state is one that may be."""
        reason = self._not_ready(self._candidates(now))
        if reason != self._reason:
            self._reason = reason
            if reason:
                effects.append(Record(kind=EventKind.NOT_READY, message=f"not ready: {reason}"))
            else:
                effects.append(Record(kind=EventKind.READY, message="ready"))
        self._check_invariants()
        return tuple(effects)

    def _check_invariants(self) -> None:
        for engine in self._engines.values():
            if not engine.incarnation and engine.standing is not Standing.JOINING:
                raise InvariantBrokenError(f"{engine.id} is {engine.standing} and was never admitted")
            at_gate = engine.id in self._readmission.gates
            if at_gate == (engine.standing is Standing.IN_SERVICE):
                raise InvariantBrokenError(f"{engine.id} is {engine.standing}, gate {at_gate}")

    # --- what is to be seen -------------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """Rises with every durable decision; persist at once."""
        return self._decided + sum(engine.decided for engine in self._engines.values())

    @property
    def counters_revision(self) -> int:
        """Rises with counters, streaks, report cursors and the roster of proxies; the next pass persists."""
        counted = self._counted + sum(engine.counted for engine in self._engines.values())
        return self._tallies.changed + self._proxies.changed + counted

    def incarnations(self) -> dict[str, int]:
        """The incarnation of each engine, 0 for one that was never admitted."""
        return {engine.id: engine.incarnation for engine in self._engines.values()}

    def report_cursors(self) -> dict[ProxyKey, int]:
        """The last report applied of each proxy process; acknowledge it once a handoff taken now or later is stored."""
        return {proxy: cursor.sequence for proxy, cursor in self._tallies.cursors.items()}

    def save(self, *, now: float) -> SavedFleet:
        """The state for the handoff (`handoff.to_document`)."""
        gates = self._readmission.gates
        return SavedFleet(
            fleet=self._settings.name,
            engine_set=tuple(self._engines),
            engines={
                e.id: save_engine(e, gate_due=gates[e.id].due if e.id in gates else None, now=now)
                for e in self._engines.values()
            },
            requests=self._tallies.requests,
            unknown_outcomes=dict(self._tallies.unknown),
            proxies=save_proxies(self._proxies, now=now),
            cursors=save_cursors(self._tallies, now=now),
        )

    def placement(self, *, now: float) -> PlacementContent:
        """What proxies should know, before `publication.publishable`."""
        closed = self._closed()
        key = (self.revision, closed)
        if self._content is not None and self._content[0] == key:
            due = self._content[1]
            if due is None or now < due:
                return self._content[2]
        candidates = self._candidates(now)
        phases = cover(candidates)
        engines = {e.id: entry(e, candidates, phases[e.id], now=now) for e in self._engines.values()}
        content = PlacementContent(closed=closed, engines=engines, candidates=candidates)
        due = min((at for e in self._engines.values() for at in e.due() if at > now), default=None)
        self._content = (key, due, content)
        return content

    def view(self, *, now: float, stored: Mapping[str, int] | None = None) -> FleetView:
        """Everything there is to show. With `stored` (incarnations of the newest stored handoff) phases are those that
        may be published, as in `publication.publishable`."""
        waiting = frozenset() if stored is None else unstored(self.incarnations(), stored)
        candidates = outside(self._candidates(now), waiting)
        phases = cover(candidates)
        inflight = self._proxies.resident()
        return FleetView(
            name=self._settings.name,
            model=self._settings.model,
            not_ready=self._not_ready(candidates),
            closed=self._closed(),
            engines=tuple(
                engine_view(e, phases[e.id], inflight=inflight.get(e.id, 0), now=now) for e in self._engines.values()
            ),
            proxies=self._proxies.view(now=now),
            monitor=self._monitor.view(now=now),
            totals=self._tallies.requests,
        )

    def _candidates(self, now: float) -> tuple[Candidate, ...]:
        return tuple(engine.candidate(now=now) for engine in self._engines.values())

    def _closed(self) -> str:
        if self._monitor.degraded:
            return self._monitor.degraded
        whole = all(Hold.MAINTENANCE in engine.holds for engine in self._engines.values())
        return NotReady.MAINTENANCE if self._engines and whole else ""

    def _not_ready(self, candidates: tuple[Candidate, ...]) -> str:
        """The first reason of spec M9 that the core can see."""
        return self._closed() or (NotReady.NO_ENGINES if uncovered(candidates) else "")


def _changed(kind: EventKind, spec: EngineSpec, words: str) -> Record:
    return Record(kind=kind, message=f"engine {spec.id}: {words}", engine=spec.id)


def hold_ended(engine: Engine, held: Held) -> Record:
    """A hold ended by its deadline."""
    message = f"engine {engine.id}: {held.kind} hold over ({held.reason})"
    return Record(kind=EventKind.HOLD_ENDED, message=message, engine=engine.id, fields={"hold": held.kind})
