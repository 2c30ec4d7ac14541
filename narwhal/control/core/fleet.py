"""The fleet: every decision goes through here. Events in, effects out.

Decides: nothing by itself; it hands each input to the machine that owns it, carries what one machine decides to the
others, and shows the result. It cannot see: the store, the lease, streams, sockets or clocks. Pure.

The caller (one loop, no locks) calls `handle` for everything that happens, `tick` for each stage of a monitor pass, and
`handle(Woke())` at `next_due()`; after each call it compares `placement` and the revisions with what it last sent and
stored. An exception from `handle` or `tick` other than `CommandRefusedError` is a fault of this code.
"""

from collections import deque
from collections.abc import Mapping

from narwhal.control.core import telling
from narwhal.control.core.answers import Answers
from narwhal.control.core.commands import Commands
from narwhal.control.core.decisions import Admission, Decision, Ejection, RoleMove, Settled
from narwhal.control.core.drain import Drains
from narwhal.control.core.drift import Drift
from narwhal.control.core.effects import Effect
from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.events import (
    CheckAnswered,
    CommandRefusedError,
    DrainCommand,
    EjectCommand,
    ForgetCommand,
    HealthAnswered,
    IdentityCaptured,
    InferenceAnswered,
    Input,
    PassEnded,
    ProbeCommand,
    ProxyAcked,
    ProxyConnected,
    ProxyLeft,
    ProxyLost,
    ProxyNacked,
    Published,
    Refusal,
    Reloaded,
    Reported,
    RoleCommand,
    TransferAnswered,
    UndrainCommand,
    Woke,
)
from narwhal.control.core.handoff import SavedFleet
from narwhal.control.core.identity import ModelChecks
from narwhal.control.core.intake import Intake
from narwhal.control.core.invariants import check
from narwhal.control.core.liveness import Liveness
from narwhal.control.core.monitor import Monitor
from narwhal.control.core.persistence import load_cursors, load_proxies, save_cursors, save_engine, save_proxies
from narwhal.control.core.picture import Picture
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.publication import PlacementContent
from narwhal.control.core.readmission import Readmission
from narwhal.control.core.records import Record
from narwhal.control.core.roles import Roles
from narwhal.control.core.roster import Roster
from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.signals import Signals
from narwhal.control.core.summary import Summary
from narwhal.control.core.suspicion import Suspicions
from narwhal.control.core.tallies import Tallies
from narwhal.control.core.view import Explanation, FleetView
from narwhal.control.core.witnesses import Witnesses
from narwhal.reports import ProxyKey
from narwhal.vocabulary import Stage

HISTORY_KEPT = 50  # records of each engine


class Fleet:
    """The decisions of one active control process, from one lease to its end.

    `epoch`: of that lease; numbers of checks and probes begin above those of every earlier epoch, so an answer that was
    asked for before matches nothing. `saved`: the state to go on from (`handoff.aged`), of the same set of engines.
    """

    def __init__(self, settings: CoreSettings, *, now: float, epoch: int = 1, saved: SavedFleet | None = None) -> None:
        self._settings = settings
        self._roster = Roster(numbers=epoch << 32)
        self._engines: Mapping[str, Engine] = self._roster.engines
        self._monitor = Monitor(failure_limit=settings.monitor_failure_limit)
        self._proxies = Proxies(max_age_s=settings.placement_max_age_s)
        self._tallies = Tallies()
        self._witnesses = Witnesses()
        self._readmission = Readmission(settings, self._engines)
        self._suspicions = Suspicions(settings, self._engines)
        self._liveness = Liveness(settings, self._engines, now=now)
        self._models = ModelChecks(settings, self._engines)
        self._drains = Drains(settings, self._engines, self._proxies)
        self._signals = Signals(self._engines)
        self._drift = Drift(settings.drift, self._engines, self._suspicions, now=now)
        self._roles = Roles(settings, self._engines, self._signals, self._proxies)
        self._commands = Commands(
            self._engines,
            suspicions=self._suspicions,
            readmission=self._readmission,
            drains=self._drains,
            proxies=self._proxies,
            roles=self._roles,
        )
        self._intake = Intake(
            settings,
            self._engines,
            tallies=self._tallies,
            witnesses=self._witnesses,
            suspicions=self._suspicions,
            liveness=self._liveness,
            models=self._models,
            signals=self._signals,
            drift=self._drift,
            roles=self._roles,
        )
        self._answers = Answers(
            self._engines,
            suspicions=self._suspicions,
            readmission=self._readmission,
            liveness=self._liveness,
            models=self._models,
            drains=self._drains,
            drift=self._drift,
        )
        self._history: dict[str, deque[tuple[float, str]]] = {}
        self._picture = Picture(
            settings,
            self._roster,
            monitor=self._monitor,
            proxies=self._proxies,
            tallies=self._tallies,
            witnesses=self._witnesses,
            readmission=self._readmission,
            suspicions=self._suspicions,
            drains=self._drains,
            drift=self._drift,
            roles=self._roles,
        )
        self._summary = Summary(self._picture)
        self._roster.load(settings, saved.engines if saved is not None else {}, now=now)
        if saved is not None:
            self._load(saved, now)
        for engine in self._engines.values():
            if engine.standing is Standing.JOINING:
                self._readmission.join(engine, now=now)
        self._picture.candidates(now)

    def _load(self, saved: SavedFleet, now: float) -> None:
        self._tallies.requests = saved.requests
        self._tallies.unknown = dict(saved.unknown_outcomes)
        self._tallies.cursors = load_cursors(saved.cursors, now=now)
        load_proxies(self._proxies, saved.proxies, self._settings, now=now)
        self._roles.load(saved.roles, now=now)
        self._drains.restore(now=now)
        for engine in self._engines.values():
            if engine.standing is Standing.EJECTED:
                known = saved.engines[engine.id].gate_in_s
                self._readmission.restore(engine, due=now + (known or 0.0))
            elif engine.standing is Standing.IN_SERVICE:
                self._suspicions.restore(engine, now=now)

    # --- events in, effects out ---------------------------------------------------------------------------------------

    def handle(self, event: Input, *, now: float) -> tuple[Effect, ...]:
        """One thing happened at `now`. Answers that nobody waits for, and reports that were applied, change nothing.

        Raises `CommandRefusedError` for a command that cannot be done.
        """
        effects = self._expire(now)
        effects += self._carry(self._decide(event, now), now)
        return self._settle(effects, now, about=getattr(event, "engine", ""))

    def tick(self, stage: Stage, *, now: float) -> tuple[Effect, ...]:
        """The core's share of one stage of a monitor pass."""
        effects = self._expire(now)
        decisions: list[Decision] = []
        match stage:
            case Stage.CONTROLLER:
                decisions += self._roles.tick(now=now)
            case Stage.HEALTH:
                decisions += [*self._suspicions.tick(now=now), *self._models.tick(now=now)]
                decisions += self._drift.tick(now=now)
            case Stage.DRAINS:
                decisions += self._drains.tick(now=now)
            case Stage.ROLLOVER:
                self._signals.rollover(now=now)
                self._drift.rollover(now=now)
                self._tallies.drop_old(now=now)
                self._proxies.drop_old(now=now)
                self._witnesses.forget_others(self._tallies.cursors)
                decisions += self._witnesses.expire(now=now)
            case Stage.READMISSION:
                decisions += self._readmission.tick(now=now)
            case Stage.LIVENESS:
                decisions += self._liveness.tick(now=now)
        effects += self._carry(decisions, now)
        return self._settle(effects, now)

    def next_due(self) -> float | None:
        """When `handle(Woke())` is wanted next, None for never. May lie in the past: then at once."""
        dues = (
            self._picture.boundary,
            self._readmission.next_due(),
            self._drains.next_due(),
            self._suspicions.next_due(),
        )
        return min((due for due in dues if due is not None), default=None)

    def _decide(self, event: Input, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        match event:
            case Reported():
                connected = self._is_connected(event.batch.proxy)
                for judged in self._intake.take(event.batch, connected=connected, now=now):
                    decisions += self._carry(judged, now)
            case CheckAnswered() | HealthAnswered() | InferenceAnswered() | TransferAnswered() | IdentityCaptured():
                for decided in self._answers.take(event, now=now):
                    decisions += self._carry(decided, now)
            case EjectCommand() | ProbeCommand() | RoleCommand():
                decisions += self._commands.do(event, now=now)
            case DrainCommand() | UndrainCommand() | ForgetCommand():
                decisions += self._commands.do(event, now=now)
            case Published():
                decisions += self._drains.published(event, now=now)
            case ProxyAcked() | ProxyNacked():
                decisions += self._placement_answered(event, now)
            case ProxyConnected() | ProxyLost() | ProxyLeft():
                decisions += self._proxy_moved(event, now)
            case PassEnded():
                decisions += self._monitor.pass_ended(event, now=now)
            case Reloaded():
                decisions += self._reloaded(event.settings, now)
            case Woke():
                decisions += self._readmission.tick(now=now, prompt_only=True)
                decisions += [*self._drains.progress(now=now), *self._suspicions.wake(now=now)]
        return decisions

    # --- proxies ------------------------------------------------------------------------------------------------------

    def _placement_answered(self, event: ProxyAcked | ProxyNacked, now: float) -> list[Decision]:
        if isinstance(event, ProxyNacked):
            return [*self._proxies.nacked(event, now=now)]
        self._proxies.acked(event, now=now)
        return self._drains.progress(now=now)

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
            if self._proxies.find(gone) is None:
                self._witnesses.forget_proxy(gone)
        return [*records, *self._drains.progress(now=now)]

    def _is_connected(self, key: ProxyKey) -> bool:
        proxy = self._proxies.find(key)
        return proxy is not None and proxy.connected

    # --- another fleet file -------------------------------------------------------------------------------------------

    def _reloaded(self, settings: CoreSettings, now: float) -> list[Decision]:
        """Engines come, go and change; those that stay keep their holds (spec S2)."""
        self._settings = settings
        self._monitor.configure(failure_limit=settings.monitor_failure_limit)
        self._proxies.configure(max_age_s=settings.placement_max_age_s)
        self._liveness.configure(settings, now=now)
        self._drift.configure(settings.drift, now=now)
        machines = (self._readmission, self._suspicions, self._models, self._intake, self._picture, self._drains)
        for machine in (*machines, self._roles):
            machine.configure(settings)
        decisions: list[Decision] = []
        for change in self._roster.reload(settings, now=now):
            if change.anew:
                self._forget(change.engine)
                self._drift.forget(change.engine)
                self._suspicions.removed(change.engine, now=now)
                decisions += self._readmission.removed(change.engine)
            if change.role:
                # What was normal for it was so under other work.
                self._drift.forget(change.engine)
            if change.gone is not None:
                # Nothing of it remains but its share of the totals.
                self._tallies.count_gone(change.gone.outcomes)
                self._history.pop(change.engine, None)
            elif change.anew:
                decisions += self._drains.follow_suit(self._engines[change.engine], now=now)
                self._readmission.join(self._engines[change.engine], now=now)
            decisions.append(telling.reloaded(change))
        return decisions

    # --- what one machine decides, the others learn -------------------------------------------------------------------

    def _carry(self, decisions: list[Decision], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for decision in decisions:
            match decision:
                case Ejection():
                    effects += self._eject(decision, now)
                case Admission():
                    effects += self._admit(decision, now)
                case RoleMove():
                    # What was normal for it was so under other work.
                    self._drift.forget(decision.engine)
                    effects.append(telling.role_moved(decision))
                case Settled():
                    self._liveness.forget(decision.engine)
                    self._models.forget(decision.engine)
                    effects += self._suspicions.dismissed(self._engines[decision.engine], now=now)
                case _:
                    effects.append(decision)
        if any(isinstance(decision, Admission) for decision in decisions):
            effects += self._carry(self._drains.split(now=now), now)
        return effects

    def _eject(self, decision: Ejection, now: float) -> list[Effect]:
        engine = self._engines[decision.engine]
        engine.eject(telling.ejected_for(decision), now=now)
        self._readmission.ejected(engine, now=now)
        self._suspicions.ejected(engine, now=now)
        self._forget(engine.id)
        return [telling.ejected(decision)]

    def _admit(self, decision: Admission, now: float) -> list[Effect]:
        engine = self._engines[decision.engine]
        first, before = engine.standing is Standing.JOINING, engine.identity
        self._suspicions.readmitted(engine, now=now)
        engine.admit(identity=decision.identity, ramp_s=self._settings.ramp_s, now=now)
        self._readmission.forget(engine.id)
        self._suspicions.met(decision.met)
        return [telling.admitted(engine, first=first), *self._drift.admitted(engine, before=before)]

    def _forget(self, engine: str) -> None:
        """What is under way about an engine, or was said of it, is of an incarnation that is over."""
        self._liveness.forget(engine)
        self._models.forget(engine)
        self._witnesses.forget_engine(engine)
        self._signals.forget(engine)

    def _expire(self, now: float) -> list[Effect]:
        """Holds end at their deadline, whatever woke us."""
        self._picture.candidates(now)
        return [
            telling.hold_ended(name, held.kind, f"its time is over; it was for: {held.reason}")
            for name in self._picture.due(now)
            for held in self._engines[name].expire(now=now)
        ]

    def _settle(self, effects: list[Effect], now: float, *, about: str | None = None) -> tuple[Effect, ...]:
        """Tell what has changed in sum; keep the history; check that the state is one that may be. `about`: the engine
        that an event names; None for a stage of a pass."""
        effects += self._summary.told(now=now)
        for effect in effects:
            if isinstance(effect, Record) and effect.engine in self._engines:
                kept = self._history.setdefault(effect.engine, deque(maxlen=HISTORY_KEPT))
                kept.append((now, effect.message))
        changes = self._roster.changes
        names, changes.unchecked = changes.unchecked, {}
        if about:
            names[about] = None
        known = self._suspicions.known
        check(self._engines, self._readmission.gates, known, about=names, whole=about is None)
        return tuple(effects)

    # --- what is to be stored -----------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """Rises with every durable decision; persist at once."""
        return self._roster.changes.decided

    @property
    def counters_revision(self) -> int:
        """Rises with counters, streaks, report cursors and the roster of proxies; the next pass persists."""
        return self._tallies.changed + self._proxies.changed + self._roles.changed + self._roster.changes.counted

    def incarnations(self) -> dict[str, int]:
        """The incarnation of each engine, 0 for one that was never admitted."""
        return {engine.id: engine.incarnation for engine in self._engines.values()}

    def report_cursors(self) -> dict[ProxyKey, int]:
        """The last report applied of each proxy process; acknowledge it once a handoff taken now or later is stored."""
        return {proxy: cursor.sequence for proxy, cursor in self._tallies.cursors.items()}

    def save(self, *, now: float) -> SavedFleet:
        """The state for the handoff (`handoff.to_document`)."""
        return SavedFleet(
            fleet=self._settings.name,
            model=self._settings.model,
            engine_set=tuple(self._engines),
            engines={
                e.id: save_engine(e, gate_due=self._readmission.saved_due(e.id), now=now)
                for e in self._engines.values()
            },
            requests=self._tallies.requests,
            unknown_outcomes=dict(self._tallies.unknown),
            proxies=save_proxies(self._proxies, now=now),
            cursors=save_cursors(self._tallies, now=now),
            roles=self._roles.save(now=now),
        )

    # --- what is to be seen -------------------------------------------------------------------------------------------

    def placement(self, *, now: float) -> PlacementContent:
        """What proxies should know, before `publication.publishable`."""
        return self._picture.placement(now=now)

    def view(self, *, now: float, stored: Mapping[str, int] | None = None) -> FleetView:
        """Everything there is to show. With `stored` (incarnations of the newest stored handoff) phases are those that
        may be published, as in `publication.publishable`."""
        return self._picture.view(stored=stored, now=now)

    def explain(self, engine: str, *, now: float, stored: Mapping[str, int] | None = None) -> Explanation:
        """Why the engine is, or is not, eligible. `stored` as for the view.

        Raises `CommandRefusedError` for an unknown engine.
        """
        if engine not in self._engines:
            raise CommandRefusedError(Refusal.NOT_FOUND, f"no engine {engine} in this fleet")
        history, cut_off = self._history.get(engine, ()), self._liveness.cut_off
        return self._picture.explain(engine, history, cut_off=cut_off, stored=stored, now=now)
