"""Live records ⇄ what the state handoff keeps of them (spec S1). Pure.

Decides: what a takeover must know of an engine, and what of it memory may lose: checks, last errors and totals of
evidence are for people and are learnt anew.
"""

from dataclasses import replace

from narwhal.control.core.engine import RAMP_START, SHUT, Drain, Engine, Held, Move, Standing, joining, ramp_from
from narwhal.control.core.evidence import REMEMBERS, Evidence
from narwhal.control.core.handoff import SavedCursor, SavedDrain, SavedEngine, SavedHold, SavedProxy, SavedRelapses
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.relapse import Relapses
from narwhal.control.core.settings import CoreSettings, EngineSpec
from narwhal.control.core.tallies import CURSOR_KEPT_S, Cursor, Tallies
from narwhal.reports import ProxyKey
from narwhal.vocabulary import FailureClass


def _remaining(due: float | None, now: float) -> float | None:
    return None if due is None else max(0.0, due - now)


def _instant(remaining_s: float | None, now: float) -> float | None:
    return None if remaining_s is None else now + remaining_s


def save_engine(engine: Engine, *, gate_due: float | None, now: float) -> SavedEngine:
    """One engine's state at `now`."""
    evidence, relapses = engine.evidence, engine.relapses
    return SavedEngine(
        url=engine.spec.url,
        role=engine.role,
        role_age_s=None if engine.role_since is None else max(0.0, now - engine.role_since),
        incarnation=engine.incarnation,
        holds=tuple(
            SavedHold(kind=h.kind, reason=h.reason, age_s=max(0.0, now - h.since), remaining_s=_remaining(h.due, now))
            for h in engine.carried(now=now)
        ),
        identity=engine.identity,
        drain=None if engine.drain is None else _save_drain(engine.drain, now),
        admitted_age_s=None if engine.admitted_at is None else max(0.0, now - engine.admitted_at),
        gate_in_s=_remaining(gate_due, now),
        backoff_s=engine.backoff_s,
        streaks=dict(evidence.streaks),
        stalls=evidence.stalls,
        timeout_is_stream=evidence.timeout_is_stream,
        producers=dict(evidence.producers),
        relapses=SavedRelapses(
            ejected_for=tuple(c for c in FailureClass if c in relapses.ejected_for),
            watched_s={c: due - now for c, due in relapses.watched.items() if due > now},
            level=relapses.level,
            forget_in_s=_remaining(relapses.forget_due, now),
            held_for_s=_remaining(relapses.held_until, now),
        ),
        misses=engine.misses,
        outcomes=dict(engine.outcomes),
    )


def _save_drain(drain: Drain, now: float) -> SavedDrain:
    return SavedDrain(
        reason=drain.reason,
        url=drain.url,
        age_s=max(0.0, now - drain.since),
        remaining_s=max(0.0, drain.due - now),
        wall=drain.wall,
        restart=drain.restart,
        whole=drain.whole,
        captured=drain.captured,
        identity=drain.identity,
        settled=drain.settled,
        overdue=drain.overdue,
    )


def _load_drain(saved: SavedDrain, now: float) -> Drain:
    return Drain(
        reason=saved.reason,
        url=saved.url,
        since=now - saved.age_s,
        due=now + saved.remaining_s,
        wall=saved.wall,
        restart=saved.restart,
        whole=saved.whole,
        captured=saved.captured,
        identity=saved.identity,
        settled=saved.settled,
        overdue=saved.overdue,
    )


def load_engine(spec: EngineSpec, saved: SavedEngine, settings: CoreSettings, *, now: float) -> Engine:
    """The engine as it was; joining under its old counters when its address has changed since (spec R8)."""
    relapses = saved.relapses
    engine = Engine(
        spec=replace(spec, url=saved.url),
        role=spec.role if spec.pinned else saved.role,
        role_since=None if saved.role_age_s is None else now - saved.role_age_s,
        incarnation=saved.incarnation,
        holds={
            h.kind: Held(kind=h.kind, reason=h.reason, since=now - h.age_s, due=_instant(h.remaining_s, now))
            for h in saved.holds
            if h.remaining_s is None or h.remaining_s > 0
        },
        identity=saved.identity,
        drain=None if saved.drain is None else _load_drain(saved.drain, now),
        admitted_at=None if saved.admitted_age_s is None else now - saved.admitted_age_s,
        backoff_s=saved.backoff_s,
        evidence=Evidence(
            streaks=dict(saved.streaks),
            stalls=saved.stalls,
            timeout_is_stream=saved.timeout_is_stream,
            producers=dict(saved.producers),
            own=bool(REMEMBERS & saved.streaks.keys()),
        ),
        relapses=Relapses(
            ejected_for=frozenset(relapses.ejected_for),
            watched={c: now + s for c, s in relapses.watched_s.items() if s > 0},
            level=relapses.level,
            forget_due=_instant(relapses.forget_in_s, now),
            held_until=_instant(relapses.held_for_s, now),
        ),
        misses=saved.misses,
        outcomes=dict(saved.outcomes),
    )
    if engine.admitted_at is not None and engine.standing is Standing.IN_SERVICE:
        engine.ramp = ramp_from(engine.admitted_at, settings.ramp_s)
        engine.settled_weight = RAMP_START if engine.ramp else 1.0
        engine.expire(now=now)
    if saved.url != spec.url:
        return moved(engine, spec, now=now)
    return engine


def moved(engine: Engine, spec: EngineSpec, *, now: float) -> Engine:
    """The record of an engine whose address has changed; its incarnations go on rising. A drain stays, and so does what
    it asks for on the way back: which process it was of is not forgotten."""
    reason = f"its address changed from {engine.spec.url}"
    if engine.drain is not None and not engine.drain.captured:
        # Who answers there now is not the process that was drained: that one stays unknown.
        engine.drain.captured, engine.drain.answer_due, engine.drain.capture_due = True, None, None
    if engine.may(Move.REJOIN):
        engine.rejoin(spec, reason, now=now)
        return engine
    fresh = joining(spec, reason, now=now) if engine.incarnation else joining(spec, now=now)
    fresh.outcomes, fresh.incarnation, fresh.drain = engine.outcomes, engine.incarnation, engine.drain
    fresh.holds |= {kind: held for kind, held in engine.holds.items() if kind in SHUT}
    return fresh


def save_proxies(proxies: Proxies, *, now: float) -> tuple[SavedProxy, ...]:
    """Every proxy process that may be placing legs."""
    return tuple(
        SavedProxy(
            id=p.key.id,
            slot=p.key.slot,
            boot=p.key.boot,
            connected=p.connected,
            counts_for_s=_remaining(p.counts_until, now),
        )
        for p in proxies.known()
    )


def load_proxies(proxies: Proxies, saved: tuple[SavedProxy, ...], settings: CoreSettings, *, now: float) -> None:
    """Known, and lost until they say hello: whoever was connected may have lost control only when control went."""
    bound = settings.placement_max_age_s or None
    for p in saved:
        key = ProxyKey(id=p.id, slot=p.slot, boot=p.boot)
        proxies.restore(key, counts_for_s=bound if p.connected else p.counts_for_s, now=now)


def save_cursors(tallies: Tallies, *, now: float) -> tuple[SavedCursor, ...]:
    """The report cursors."""
    return tuple(
        SavedCursor(id=p.id, slot=p.slot, boot=p.boot, sequence=c.sequence, drop_in_s=_remaining(c.drop_due, now))
        for p, c in tallies.cursors.items()
    )


def load_cursors(saved: tuple[SavedCursor, ...], *, now: float) -> dict[ProxyKey, Cursor]:
    """The report cursors; the hour of one whose proxy was connected begins now, and ends when the proxy comes."""
    cursors = {}
    for c in saved:
        remaining_s = CURSOR_KEPT_S if c.drop_in_s is None else c.drop_in_s
        cursors[ProxyKey(id=c.id, slot=c.slot, boot=c.boot)] = Cursor(sequence=c.sequence, drop_due=now + remaining_s)
    return cursors
