"""Why an engine is, or is not, eligible: the whole answer in words (`narwhalctl explain`). Pure.

Decides nothing. Everything it says is in the view, which placement, metrics and the other surfaces show too.
"""

from collections.abc import Iterable, Iterator

from narwhal.control.core.process import process_words
from narwhal.control.core.telling import in_a_row, silent
from narwhal.control.core.view import EngineView, Explanation, HoldView, Told
from narwhal.vocabulary import Hold, Phase

HISTORY_SHOWN = 20

# Holds whose name says by itself what the engine is; of every other one people say that it is on.
_STATES = frozenset({Hold.JOINING, Hold.EJECTED})


def ago(age_s: float) -> str:
    """How long ago, for people."""
    return f"{span(age_s)} ago"


def span(age_s: float) -> str:
    """How long, for people."""
    return f"{age_s:.1f} s" if age_s < 120 else f"{age_s / 60:.0f} min"


def explain(
    view: EngineView, history: Iterable[tuple[float, str]], *, closed: str, cut_off: bool, now: float
) -> Explanation:
    """The explanation, most important line first. `closed`: why nobody is admitted at all, empty when admission is
    open; `cut_off`: control does not reach the engines; `history`: (instant, words), oldest first."""
    told = tuple(Told(age_s=now - at, message=message) for at, message in list(history)[-HISTORY_SHOWN:][::-1])
    lines = (
        *_eligibility(view, closed),
        *map(_hold, view.holds),
        *_drained(view),
        *_found_out(view),
        *_evidence(view),
        *_pace(view),
        *_health(view, cut_off),
        *_checks(view),
        *(f"{ago(entry.age_s)}: {entry.message}" for entry in told),
    )
    return Explanation(engine=view, lines=lines, history=told)


def _eligibility(view: EngineView, closed: str) -> Iterator[str]:
    role = f"role {view.role}{', pinned' if view.pinned else ''}, incarnation {view.incarnation}"
    if view.phases:
        serves = " and ".join(p for p in Phase if p in view.phases)
        weight = f", weight {view.weight:.1f}" if view.weight < 1 else ""
        yield f"engine {view.id} is eligible: serves {serves} ({role}{weight})"
    elif held := [_name(h.kind) for h in view.holds if h.effective]:
        yield f"engine {view.id} is not eligible: {', '.join(held)} ({role})"
    else:
        # Nothing holds it, so coverage lets it serve as soon as the stored handoff has its incarnation (spec P2).
        yield f"engine {view.id} is not eligible yet: its admission is being stored ({role})"
    if closed:
        yield f"no engine gets new work: {closed}"
    if view.role_age_s is not None:
        yield f"changed its role to {view.role} {ago(view.role_age_s)}{f'; {view.stays}' if view.stays else ''}"


def _name(kind: Hold) -> str:
    return kind if kind in _STATES else f"{kind} hold"


def _hold(hold: HoldView) -> str:
    ends = "" if hold.remaining_s is None else f", ends in {max(0.0, hold.remaining_s):.1f} s"
    yields = "" if hold.effective else ", yields: no other engine can serve"
    return f"{_name(hold.kind)} for {span(hold.age_s)}{ends}{yields}: {hold.reason}"


def _drained(view: EngineView) -> Iterator[str]:
    drain = view.drain
    if drain is None:
        return
    if drain.settled:
        yield "ready to stop"
    else:
        late = "overdue, waits for" if drain.overdue else f"to settle within {span(drain.remaining_s)}, waits for"
        yield f"drain: {late} {'; '.join(drain.waits_for)}"
    known = process_words(drain.identity) if drain.identity is not None else "a process that is not known"
    if drain.restart and drain.captured:
        elsewhere = drain.url != view.url and drain.identity is not None
        must = f"be another process than that one at {drain.url}" if elsewhere else "have been restarted since"
        yield f"drained was {known}; to return, `narwhalctl undrain {view.id}`, it must {must}"
    else:
        yield f"to return: `narwhalctl undrain {view.id}`"


def _found_out(view: EngineView) -> Iterator[str]:
    if view.suspicion:
        yield view.suspicion
    if view.gate_in_s is not None:
        yield f"its gate is tried next in {view.gate_in_s:.1f} s"


def _evidence(view: EngineView) -> Iterator[str]:
    for known in view.evidence:
        last = f"{ago(known.last_age_s)}: {known.last_words}" if known.last is not None else ""
        if known.streak:
            row = f"{in_a_row({known.failure: known.streak})} (acted upon at {known.limit})"
            yield f"evidence: {row}, the last {last}" if last else f"evidence: {row}"
        else:
            yield f"cleared since: {known.failure} failure {last}"
    if view.producers:
        yield f"its failed decode legs read from: {', '.join(view.producers)}"
    if view.misses:
        yield f"liveness: {silent(view.misses)}"
    if not any(known.streak for known in view.evidence) and not view.misses:
        yield "evidence: none now"


def _pace(view: EngineView) -> Iterator[str]:
    drift = view.drift
    if drift is None:
        return
    row = f"{drift.drifting} slow windows" if drift.drifting else f"{drift.good} good windows"
    took = f"{drift.step_s * 1000:.1f} ms a token in the last window where {drift.usual_s * 1000:.1f} ms are usual"
    yield f"decode latency: {took}; {row} in a row"


def _health(view: EngineView, cut_off: bool) -> Iterator[str]:
    if cut_off:
        yield "control is cut off from the engines: that this one does not answer it says nothing"
    if view.health:
        seen = "; ".join(f"{h.detail} after {h.latency_s * 1000:.0f} ms, {ago(h.age_s)}" for h in view.health)
        yield f"health, newest first: {seen}"


def _checks(view: EngineView) -> Iterator[str]:
    for c in view.checks:
        yield f"check {c.check}: {c.verdict}: {c.detail} ({ago(c.age_s)}, took {c.latency_s * 1000:.0f} ms)"
