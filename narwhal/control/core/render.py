"""One engine's record as placement and as operators see it. Pure.

Decides nothing: the phases it shows are those that coverage gave.
"""

from collections.abc import Iterator

from narwhal.control.core.coverage import Candidate
from narwhal.control.core.engine import Engine
from narwhal.control.core.telling import failure_words
from narwhal.control.core.view import CheckView, DrainView, DriftView, EngineView, EvidenceView, HealthView, HoldView
from narwhal.placement import EngineEntry
from narwhal.vocabulary import HARD_HOLDS, Check, FailureClass, Hold, Phase


def released(engine: Engine, *, now: float) -> Candidate | None:
    """What the engine is once its quarantine ends; None when it is in none."""
    held = engine.holds.get(Hold.QUARANTINE)
    return engine.candidate(now=now, without=(Hold.QUARANTINE,)) if held is not None and held.active(now) else None


def entry(engine: Engine, phases: frozenset[Phase], after: frozenset[Phase], *, now: float) -> EngineEntry:
    """The engine in placement. `after`: the phases that it may serve once its quarantine ends."""
    held = engine.carried(now=now)
    quarantine = next((h for h in held if h.kind is Hold.QUARANTINE), None)
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
    waits_for: tuple[str, ...],
    drift: DriftView | None,
    stays: str,
    limit: int,
    now: float,
) -> EngineView:
    """The engine as operators see it. `limit`: the streak at which a class is acted upon."""
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
    return EngineView(
        id=engine.id,
        url=engine.spec.url,
        role=engine.role,
        pinned=engine.spec.pinned,
        incarnation=engine.incarnation,
        phases=phases,
        weight=engine.weight(now=now),
        holds=holds,
        checks=_checks(engine, now),
        streaks=dict(engine.evidence.streaks),
        outcomes=dict(engine.outcomes),
        identity=engine.identity,
        inflight=inflight,
        evidence=tuple(_evidence(engine, limit, now)),
        producers=tuple(reversed(engine.evidence.producers)),
        health=tuple(
            HealthView(outcome=h.outcome, detail=h.detail, latency_s=h.latency_s, age_s=now - h.at)
            for h in reversed(engine.health)
        ),
        gates=dict(engine.gates),
        misses=engine.misses,
        suspicion=suspicion,
        gate_in_s=gate_in_s,
        drain=_drain(engine, waits_for, now),
        drift=drift,
        role_age_s=None if engine.role_since is None else now - engine.role_since,
        stays=stays,
    )


def _drain(engine: Engine, waits_for: tuple[str, ...], now: float) -> DrainView | None:
    drain = engine.drain
    if drain is None:
        return None
    return DrainView(
        reason=drain.reason,
        url=drain.url,
        age_s=now - drain.since,
        remaining_s=max(0.0, drain.due - now),
        restart=drain.restart,
        whole=drain.whole,
        captured=drain.captured,
        identity=drain.identity,
        settled=drain.settled,
        overdue=drain.overdue and not drain.settled,
        waits_for=waits_for,
    )


def _checks(engine: Engine, now: float) -> tuple[CheckView, ...]:
    return tuple(
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


def _evidence(engine: Engine, limit: int, now: float) -> Iterator[EvidenceView]:
    evidence = engine.evidence
    for failure in FailureClass:
        streak, last = evidence.streaks.get(failure, 0), evidence.last.get(failure)
        if streak or last is not None:
            yield EvidenceView(
                failure=failure,
                streak=streak,
                limit=limit,
                total=evidence.totals.get(failure, 0),
                last=last,
                last_words=failure_words(last) if last is not None else "",
                last_age_s=now - last.at if last is not None else 0.0,
            )
