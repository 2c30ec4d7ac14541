"""One engine's record as placement and as operators see it. Pure.

Decides nothing: the phases it shows are those that coverage gave.
"""

from narwhal.control.core.coverage import Candidate, cover
from narwhal.control.core.engine import Engine
from narwhal.control.core.view import CheckView, EngineView, HoldView
from narwhal.placement import EngineEntry
from narwhal.vocabulary import HARD_HOLDS, Check, Hold, Phase


def entry(engine: Engine, candidates: tuple[Candidate, ...], phases: frozenset[Phase], *, now: float) -> EngineEntry:
    """The engine in placement. `candidates`: the whole fleet, for what it may serve once its quarantine ends."""
    held = engine.carried(now=now)
    quarantine = next((h for h in held if h.kind is Hold.QUARANTINE), None)
    after: frozenset[Phase] = frozenset()
    if quarantine is not None:
        free = engine.candidate(now=now, without=(Hold.QUARANTINE,))
        after = cover(free if c.id == engine.id else c for c in candidates)[engine.id]
    return EngineEntry(
        id=engine.id,
        url=engine.spec.url,
        role=engine.role,
        phases=phases,
        incarnation=engine.incarnation,
        weight=engine.weight(now=now),
        pinned=engine.spec.pinned,
        holds=tuple(h.kind for h in held),
        quarantine_due=quarantine.due if quarantine is not None else None,
        phases_after_quarantine=after,
        max_inflight=engine.spec.max_inflight,
        max_inflight_tokens=engine.spec.max_inflight_tokens,
    )


def engine_view(
    engine: Engine,
    phases: frozenset[Phase],
    *,
    inflight: int,
    suspicion: str,
    gate_in_s: float | None,
    now: float,
) -> EngineView:
    """The engine as operators see it."""
    held = engine.carried(now=now)
    # A soft hold on an engine that serves nevertheless yields to last-engine protection (spec H2).
    holds = tuple(
        HoldView(
            kind=h.kind,
            reason=h.reason,
            age_s=now - h.since,
            remaining_s=None if h.due is None else h.due - now,
            effective=h.kind in HARD_HOLDS or not phases,
        )
        for h in held
    )
    checks = tuple(
        CheckView(
            check=check,
            verdict=done.result.verdict,
            detail=done.result.detail,
            age_s=now - done.at,
            latency_s=done.result.latency_s,
        )
        for check in Check
        if (done := engine.checks.get(check)) is not None
    )
    return EngineView(
        id=engine.id,
        url=engine.spec.url,
        role=engine.role,
        pinned=engine.spec.pinned,
        incarnation=engine.incarnation,
        phases=phases,
        weight=engine.weight(now=now),
        holds=holds,
        checks=checks,
        streaks=dict(engine.evidence.streaks),
        outcomes=dict(engine.outcomes),
        identity=engine.identity,
        inflight=inflight,
        evidence=dict(engine.evidence.totals),
        misses=engine.misses,
        suspicion=suspicion,
        gate_in_s=gate_in_s,
    )
