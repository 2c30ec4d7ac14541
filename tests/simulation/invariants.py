"""Everything that must hold, looked at when it could break: who acts, who is placed where, what is stored first."""

import json
from typing import TYPE_CHECKING, Any

from narwhal.control.core.effects import Effect, ProbeHealth, ProbeInference, RunCheck
from narwhal.control.core.events import Input
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import SavedFleet
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.settings import CoreSettings
from narwhal.placement import EngineEntry, Placement
from narwhal.reports import Batch, ProxyKey
from narwhal.vocabulary import HARD_HOLDS, Hold, Phase
from tests.simulation.blame import Blame, Recount
from tests.simulation.engines import Engine
from tests.simulation.ledger import Ledger
from tests.simulation.prober import Prober
from tests.simulation.store import Document, Store
from tests.simulation.truth import Totals, ejected_in, holds_in, resumed
from tests.simulation.world import Invariant, Violation, World

if TYPE_CHECKING:
    from tests.simulation.control import Control
    from tests.simulation.proxies import Proxy
    from tests.simulation.requests import Leg
    from tests.simulation.term import Term


REVERSAL_S = 60.0
EDGE_S = 1.0  # so far wall clocks are apart, by which ages pass a takeover


class Watch:
    """Told of everything; raises `Violation`."""

    def __init__(self, world: World, engines: dict[str, Engine], ledger: Ledger, store: Store) -> None:
        self.world = world
        self.engines = engines
        self.ledger = ledger
        self.store = store
        self.proxies: list[Proxy] = []
        self.controls: list[Control] = []
        self.totals = Totals()
        self.blame = Blame(self)
        self.recounts: dict[Term, Recount] = {}
        self.out: dict[str, tuple[int, float]] = {}  # ejected engines → their incarnation, and when
        self.settled: set[str] = set()  # engines that were reported ready to stop
        self._settling: set[str] = set()  # the same, when the drain itself may not be stored yet
        self.trouble_at: float | None = -1e9  # when something was wrong around control last; None: it is now
        self.resumes = 0
        self._seen: dict[ProxyKey, tuple[int, int]] = {}
        self._highest = 0  # epoch that anybody has published under
        self._moves: list[tuple[float, Phase]] = []  # when an engine got another role, and which
        store.stored = self.stored
        world.after_each = self.after_each

    # --- after every event ----------------------------------------------------------------------------------------

    def after_each(self) -> None:
        """Whatever happened: at most one control process may act."""
        acting = [c.name for c in self.controls if c.term is not None and c.term.lease.may_act(c.boottime())]
        if len(acting) > 1:
            raise Violation(Invariant.ONE_ACTS, f"{' and '.join(acting)} may act at once")

    def control_in_trouble(self, within_s: float) -> bool:
        """Whether something around control was wrong in the last seconds: then it cannot find out anything."""
        return self.trouble_at is None or self.world.now < self.trouble_at + within_s

    # --- proxies --------------------------------------------------------------------------------------------------

    def applied(self, proxy: "Proxy", placement: Placement) -> None:
        """A proxy works by this placement from now on."""
        before = self._seen.get(proxy.key, (0, 0))
        if placement.order < before:
            raise Violation(Invariant.NO_LOWER_EPOCH, f"{proxy.name} has seen {before}, applies {placement.order}")
        self._seen[proxy.key] = placement.order

    def met(self, proxy: "Proxy", epoch: int) -> None:
        """A proxy takes the word of a control process of this epoch."""
        seen, _ = self._seen.get(proxy.key, (0, 0))
        if epoch < seen:
            raise Violation(Invariant.NO_LOWER_EPOCH, f"{proxy.name} has seen epoch {seen}, believes {epoch}")

    def leg_begun(self, proxy: "Proxy", leg: "Leg") -> None:
        """A leg starts."""
        if leg.entry.id in self.settled:
            raise Violation(
                Invariant.DRAINED, f"{proxy.name} starts a {leg.phase} leg on {leg.entry.id}, which is ready to stop"
            )
        placement = proxy.held.placement
        entry = placement.engines.get(leg.entry.id) if placement is not None else None
        if entry is None or not _permits(entry, leg.phase, proxy.now()):
            raise Violation(Invariant.LEGS_FOLLOW_PLACEMENT, f"{proxy.name} starts a {leg.phase} leg on {leg.entry.id}")

    def cut(self, proxy: "Proxy", batch: Batch) -> None:
        """A report can change no more."""
        self.totals.cut(batch)

    def acknowledged(self, proxy: "Proxy", sequence: int) -> None:
        """A proxy hears that reports up to this one are stored."""
        self.totals.acked[proxy.key] = max(self.totals.acked[proxy.key], sequence)

    def proxy_killed(self, proxy: "Proxy") -> None:
        """What it had not sent is lost."""
        self.totals.killed.add(proxy.key)

    # --- control --------------------------------------------------------------------------------------------------

    def fleet(self, settings: CoreSettings, *, now: float, epoch: int, saved: SavedFleet | None) -> Fleet:
        """The core of a new term."""
        return Fleet(settings, now=now, epoch=epoch, saved=saved)

    def through_json(self, document: dict[str, Any]) -> object:
        """The document as somebody else reads it."""
        return json.loads(json.dumps(document))

    def leading(self, term: "Term", document: Document | None) -> None:
        """A term begins."""
        self.recounts = {term: Recount(term)}
        self.blame.term_began()
        self.out = {}
        self._settling = set()
        # A move that no document has was none: roles are again as they were.
        taken_at = document.taken_at if document is not None else -1.0
        self._moves = [move for move in self._moves if move[0] < taken_at]
        if document is not None:
            self.resumes += 1
            resumed(term, document)
            now = self.world.now
            self.out = {e: (incarnation, now) for e, incarnation in ejected_in(document.state).items()}
            for engine, saved in document.state.engines.items():
                self.recounts[term].streaks[engine].update(saved.streaks)

    def term_over(self, term: "Term") -> None:
        """A term ends: what its probes had under way has no reader any more."""
        for entry in self.ledger.entries:
            if entry.probe and not entry.sent_to:
                entry.excused = True

    def handling(self, term: "Term", event: Input) -> None:
        """The core is about to hear of it."""
        if term in self.recounts:
            self.recounts[term].handling(event)

    def handled(self, term: "Term", event: Input) -> None:
        """The core has heard of it, and its effects were performed."""
        if term in self.recounts:
            self.recounts[term].handled(event)

    def recorded(self, term: "Term", record: Record) -> None:
        """The core tells people."""
        self.blame.recorded(term, record)
        if record.kind is EventKind.ENGINE_EJECTED:
            self.out[record.engine] = (term.fleet.incarnations()[record.engine], self.world.now)
        elif record.kind is EventKind.ROLE_MOVED:
            self._role_moved(term, record)
        elif record.kind is EventKind.DRAIN_SETTLED:
            self._ready_to_stop(record.engine)
        elif record.kind in (EventKind.ENGINE_READMITTED, EventKind.ENGINE_JOINED):
            self.settled.discard(record.engine)
            self._settling.discard(record.engine)

    def _role_moved(self, term: "Term", record: Record) -> None:
        now, to, roles = self.world.now, Phase(record.fields["to"]), term.control.plan.core.roles
        placed = term.fleet.placement(now=term.control.now()).engines.values()
        left = [e.id for e in placed if e.role is to.other and not HARD_HOLDS & {*e.holds} - {Hold.JOINING}]
        if len(left) < roles.floor(to.other):
            raise Violation(Invariant.ROLE_FLOORS, f"{record.engine} got {to}; {to.other} is left with {left}")
        undone = [at for at, before in self._moves if before is not to and now < at + REVERSAL_S - EDGE_S]
        if undone and record.fields["cause"] == "load":
            raise Violation(
                Invariant.NO_REVERSAL, f"{record.engine} got {to}, {now - undone[-1]:.1f} s after a move back"
            )
        self._moves.append((now, to))

    def _ready_to_stop(self, engine: str) -> None:
        for proxy in self.proxies:
            if proxy.alive and (proxy.inflight[engine] or proxy.unread[engine]):
                raise Violation(Invariant.DRAINED, f"{engine} is ready to stop, and {proxy.name} has work there")
        self._settling.add(engine)

    def ticked(self, term: "Term") -> None:
        """A stage of a pass is done."""
        self.blame.ticked(term)

    def asked(self, term: "Term", effect: Effect) -> None:
        """The core asks for a probe or a check."""
        if isinstance(effect, ProbeInference) and effect.producer == effect.consumer:
            raise Violation(Invariant.NO_KV_LEFT, f"{effect.consumer.engine} is to read its own handoff")
        if isinstance(effect, (ProbeInference, ProbeHealth)) and term in self.recounts:
            self.recounts[term].open.add((effect.engine, effect.number))
        if isinstance(effect, (ProbeInference, ProbeHealth, RunCheck)):
            self.world.say(term.control.name, f"asks {_asked(effect)}")

    def probing(self, prober: Prober) -> None:
        """A probe begins."""
        running = [engine for engine, kind in prober.running.values() if kind == "inference"]
        twice = {engine for engine in running if running.count(engine) > 1}
        if twice:
            raise Violation(Invariant.ONE_PROBE, f"{', '.join(twice)} is probed twice at once")

    def published(self, term: "Term", placement: Placement) -> None:
        """Control is about to stream this."""
        if placement.epoch < self._highest:
            raise Violation(Invariant.ONE_ACTS, f"epoch {placement.epoch} is published after {self._highest}")
        self._highest = placement.epoch
        document = self.store.document
        stored = {e: s.incarnation for e, s in document.state.engines.items()} if document is not None else {}
        for entry in placement.engines.values():
            self._placed(entry, stored.get(entry.id, 0))
        known = term.incarnations  # what control knows to be stored; the store may be further
        for phase in Phase:
            able = [e for e in placement.engines.values() if _able(e, phase) and known.get(e.id) == e.incarnation]
            if able and not any(phase in e.phases for e in placement.engines.values()):
                names = ", ".join(e.id for e in able)
                raise Violation(Invariant.PHASES_COVERED, f"nobody serves {phase}, though {names} could")
        if self.world.tracing:
            serving = " ".join(f"{e.id}={_words(e)}" for e in placement.engines.values())
            self.world.say(term.control.name, f"publishes {placement.epoch}.{placement.version} {serving}")

    def _placed(self, entry: EngineEntry, stored: int) -> None:
        if not entry.phases and not entry.phases_after_quarantine:
            return
        incarnation, _ = self.out.get(entry.id, (-1, 0.0))
        if entry.incarnation <= incarnation or HARD_HOLDS & set(entry.holds):
            raise Violation(Invariant.EJECTED_IS_OUT, f"{entry.id} is to serve {sorted(entry.phases)}")
        if entry.incarnation > stored:
            raise Violation(
                Invariant.STORED_FIRST, f"{entry.id} serves as incarnation {entry.incarnation}, stored is {stored}"
            )
        self.out.pop(entry.id, None)

    def stored(self, document: Document) -> None:
        """The store has a newer document."""
        if document.epoch != self.store.epoch:
            lease = f"the lease is {self.store.holder or 'nobody'}'s, epoch {self.store.epoch}"
            raise Violation(Invariant.ONE_ACTS, f"{document.holder} writes under epoch {document.epoch}, {lease}")
        # A command is answered once what it decided is stored: only then has anybody been told.
        told = {e for e in self._settling if {Hold.DRAIN, Hold.MAINTENANCE} & holds_in(document.state, e)}
        self.settled |= told
        self._settling -= told
        held = ejected_in(document.state)
        for engine, (incarnation, at) in self.out.items():
            saved = document.state.engines[engine].incarnation
            if at < document.taken_at and engine not in held and saved <= incarnation:
                raise Violation(Invariant.RESUME, f"the document does not say that {engine} is ejected")

    def acknowledging(self, proxy: "Proxy", sequence: int) -> None:
        """Control is about to tell a proxy that its report is stored."""
        document = self.store.document
        kept = document.cursors().get(proxy.key, 0) if document is not None else 0
        if kept < sequence:
            raise Violation(Invariant.ACKNOWLEDGED_STORED, f"report {sequence} of {proxy.key}, stored is {kept}")

    # --- at rest --------------------------------------------------------------------------------------------------

    def at_rest(self, term: "Term") -> None:
        """Nothing is under way any more."""
        for proxy in self.proxies:
            if proxy.running or proxy.admission.taken or proxy.admission.waiting or proxy.inflight:
                raise Violation(Invariant.LEGS_END, f"{proxy.name}: {dict(proxy.inflight)} in flight at rest")
        self.totals.at_rest(term, self.proxies)
        for entry in self.ledger.entries:
            if entry.probe and entry.heard and not entry.excused and not entry.sent_to:
                raise Violation(Invariant.NO_KV_LEFT, f"handoff {entry.number} of {entry.producer} was never read")


def _permits(entry: EngineEntry, phase: Phase, now: float) -> bool:
    if phase in entry.phases:
        return True
    return entry.quarantine_due is not None and now >= entry.quarantine_due and phase in entry.phases_after_quarantine


def _able(entry: EngineEntry, phase: Phase) -> bool:
    return not HARD_HOLDS & set(entry.holds) and (entry.role is phase or not entry.pinned)


def _words(entry: EngineEntry) -> str:
    phases = "+".join(sorted(p[0] for p in entry.phases)) or "-"
    holds = f"({','.join(entry.holds)})" if entry.holds else ""
    return f"{phases}.{entry.incarnation}{holds}"


def _asked(effect: ProbeInference | ProbeHealth | RunCheck) -> str:
    if isinstance(effect, RunCheck):
        return f"{effect.engine} for {effect.check}"
    if isinstance(effect, ProbeHealth):
        return f"{effect.engine} for health"
    producer = effect.producer.engine if effect.producer is not None else "nobody"
    return f"{effect.consumer.engine} to read from {producer}, on account of {effect.engine}"
