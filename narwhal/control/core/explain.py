"""Why an engine is, or is not, eligible: the whole answer in words (`narwhalctl explain`). Pure.

Decides nothing. Every fact comes from the records that decisions are made of.
"""

from collections.abc import Iterable, Iterator

from narwhal.control.core.engine import Engine
from narwhal.control.core.telling import failure_words
from narwhal.control.core.view import EngineView
from narwhal.vocabulary import Check, Phase

HISTORY_SHOWN = 20


def ago(age_s: float) -> str:
    """An age for people."""
    return f"{age_s:.1f} s ago" if age_s < 120 else f"{age_s / 60:.0f} min ago"


def explain(
    view: EngineView, engine: Engine, history: Iterable[tuple[float, str]], *, limit: int, now: float
) -> tuple[str, ...]:
    """The lines, most important first. `limit`: the streak at which a class is acted upon."""
    return (
        *_eligibility(view),
        *_holds(view),
        *_suspicion(view),
        *_evidence(engine, limit, now),
        *_health(engine, now),
        *_checks(view),
        *_history(history, now),
    )


def _eligibility(view: EngineView) -> Iterator[str]:
    serves = " and ".join(p for p in Phase if p in view.phases)
    role = f"role {view.role}{', pinned' if view.pinned else ''}, incarnation {view.incarnation}"
    if view.phases:
        weight = f", weight {view.weight:.1f}" if view.weight < 1 else ""
        yield f"engine {view.id} is eligible: serves {serves} ({role}{weight})"
    elif any(h.effective for h in view.holds):
        kinds = ", ".join(h.kind for h in view.holds if h.effective)
        yield f"engine {view.id} is not eligible: held by {kinds} ({role})"
    else:
        yield f"engine {view.id} carries no hold and serves no phase now ({role})"


def _holds(view: EngineView) -> Iterator[str]:
    for hold in view.holds:
        ends = "" if hold.remaining_s is None else f", ends in {max(0.0, hold.remaining_s):.1f} s"
        yields = "" if hold.effective else ", yields: no other engine can serve"
        yield f"hold {hold.kind}: {hold.reason} (since {ago(hold.age_s)}{ends}{yields})"
    if view.gate_in_s is not None:
        yield f"its gate is tried next in {view.gate_in_s:.1f} s"


def _suspicion(view: EngineView) -> Iterator[str]:
    if view.suspicion:
        yield f"being found out: {view.suspicion}"


def _evidence(engine: Engine, limit: int, now: float) -> Iterator[str]:
    evidence = engine.evidence
    if not evidence.streaks and not engine.misses:
        yield "evidence: none"
    for failure, streak in evidence.streaks.items():
        last = evidence.last.get(failure)
        seen = f"; last {ago(now - last.at)}: {failure_words(last)}" if last is not None else ""
        yield f"evidence {failure}: {streak} in a row (acted upon at {limit}){seen}"
    if evidence.producers:
        yield f"its failed decode legs read from: {', '.join(reversed(evidence.producers))}"
    if engine.misses:
        yield f"liveness: silent in {engine.misses} sweeps in a row"
    for failure, last in evidence.last.items():
        if failure not in evidence.streaks:
            yield f"cleared since: {failure}, last {ago(now - last.at)}: {failure_words(last)}"


def _health(engine: Engine, now: float) -> Iterator[str]:
    if engine.health:
        seen = ", ".join(
            f"{h.detail} after {h.latency_s * 1000:.0f} ms {ago(now - h.at)}" for h in reversed(engine.health)
        )
        yield f"health, newest first: {seen}"


def _checks(view: EngineView) -> Iterator[str]:
    known = {c.check: c for c in view.checks}
    for check in Check:
        if check in known:
            c = known[check]
            yield f"check {check}: {c.verdict}: {c.detail} ({ago(c.age_s)}, took {c.latency_s * 1000:.0f} ms)"


def _history(history: Iterable[tuple[float, str]], now: float) -> Iterator[str]:
    for at, message in list(history)[-HISTORY_SHOWN:][::-1]:
        yield f"{ago(now - at)}: {message}"
