"""The words of the core's decisions about engines: one function for each kind of event. Pure.

What is said here is what the log, the journal, `narwhalctl events` and `explain` show.
"""

from collections.abc import Iterable, Mapping

from narwhal.control.core.decisions import Cause, Ejection, RoleMove
from narwhal.control.core.engine import Drain, Engine, Standing
from narwhal.control.core.events import CheckResult
from narwhal.control.core.evidence import Seen
from narwhal.control.core.process import process_words
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.roster import Change
from narwhal.vocabulary import Check, FailureClass, Hold, Outcome, Phase, RiskKind, Verdict

# Outcomes that are an HTTP status, which people know by its number.
_STATUSES = frozenset(
    {Outcome.HTTP_408, Outcome.HTTP_429, Outcome.HTTP_5XX, Outcome.CLIENT_ERROR, Outcome.WRONG_IDENTITY}
)

# Causes that the reason of the ejection speaks of itself.
_SPOKEN_OF = frozenset({Cause.CONNECTION, Cause.HEALTH_PROBE, Cause.INFERENCE_PROBE, Cause.LIVENESS})


def in_a_row(streaks: Mapping[FailureClass, int]) -> str:
    """Streaks: `3 connection failures in a row`, `3 stream failures and 4 kv_handoff failures in a row`."""
    told = [f"{count} {failure} failure{'' if count == 1 else 's'}" for failure, count in streaks.items()]
    return f"{' and '.join(told)}{'' if max(streaks.values()) == 1 else ' in a row'}"


def silent(sweeps: int) -> str:
    """Liveness: `silent in 2 sweeps in a row`."""
    return f"silent in {sweeps} {'sweep' if sweeps == 1 else 'sweeps in a row'}"


def listed(names: Iterable[str]) -> str:
    """Names: `d1`, `d1 and d2`, `d1, d2 and d3`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def streak_words(streaks: Mapping[FailureClass, int], last: Seen | None) -> str:
    """Streaks, and the kind of the newest failure: `3 stream failures in a row (stream cut)`. What was seen in full is
    said once, where it is acted upon, and is shown with the evidence."""
    row = in_a_row(streaks)
    return row if last is None else f"{row} ({kind_words(last)})"


def kind_words(seen: Seen) -> str:
    """The kind of a failure: `stream cut`, `HTTP 503`."""
    by_status = seen.outcome in _STATUSES and seen.status
    return f"HTTP {seen.status}" if by_status else seen.outcome.replace("_", " ")


def failure_words(seen: Seen) -> str:
    """One failure as it was told: `decode leg: stream cut (closed after 3 tokens), on edge-1/0, handoff of p1,
    request r-17`."""
    by_status = seen.outcome in _STATUSES
    what = kind_words(seen)
    if seen.detail:
        # The detail often says it too, and then better.
        said = what.casefold() in seen.detail.casefold() or (by_status and not seen.status)
        what = seen.detail if said else f"{what} ({seen.detail})"
    parts = [f"{seen.phase} leg: {what}" if seen.phase else what]
    if seen.proxy:
        parts.append(f"on {seen.proxy}")
    if seen.producer:
        parts.append(f"handoff of {seen.producer}")
    if seen.request_id:
        parts.append(f"request {seen.request_id}")
    return ", ".join(parts)


def hold_placed(engine: Engine, kind: Hold, told: str = "") -> Record:
    """A hold is on. `told`: everything that was seen, said instead of the reason."""
    held = engine.holds[kind]
    span = f" for {held.due - held.since:g} s" if held.due is not None else ""
    message = f"engine {engine.id}: {kind} hold{span}: {told or held.reason}"
    return Record(kind=EventKind.HOLD_PLACED, message=message, engine=engine.id, fields={"hold": kind})


def hold_ended(engine: str, kind: Hold, why: str) -> Record:
    """A hold is off."""
    message = f"engine {engine}: {kind} hold over ({why})"
    return Record(kind=EventKind.HOLD_ENDED, message=message, engine=engine, fields={"hold": kind})


def ejected(decision: Ejection) -> Record:
    """An engine is out."""
    message = f"engine {decision.engine} ejected ({decision.cause}): {decision.told or decision.reason}"
    fields = {"cause": decision.cause}
    return Record(kind=EventKind.ENGINE_EJECTED, message=message, engine=decision.engine, fields=fields)


def ejected_for(decision: Ejection) -> str:
    """Why an engine is out, as long as it is: the reason, after a cause that it does not speak of."""
    return decision.reason if decision.cause in _SPOKEN_OF else f"{decision.cause}: {decision.reason}"


def admitted(engine: Engine, *, first: bool) -> Record:
    """An engine is in."""
    kind = EventKind.ENGINE_JOINED if first else EventKind.ENGINE_READMITTED
    message = f"engine {engine.id} {'joined' if first else 'is back'} as incarnation {engine.incarnation}"
    fields = {"incarnation": str(engine.incarnation), "result": Verdict.PASS}
    return Record(kind=kind, message=message, engine=engine.id, fields=fields)


def check_failed(engine: Engine, check: Check, result: CheckResult) -> Record:
    """A try of the gate has ended without the engine coming in."""
    back = "joining" if engine.standing is Standing.JOINING else "coming back"
    return Record(
        kind=EventKind.ENGINE_CHECK_FAILED,
        message=f"engine {engine.id} is kept from {back}: check {check}: {result.verdict}: {result.detail}",
        engine=engine.id,
        fields={"check": check, "result": result.verdict},
    )


def drain_begun(engine: str, drain: Drain, deadline_s: float) -> Record:
    """An operator takes an engine out."""
    kind = "maintenance of the whole fleet" if drain.whole else "drain"
    ask = "a newer process is asked for when it returns" if drain.restart else "it may return as the process it is"
    message = f"engine {engine}: {kind} ({drain.reason}), to settle within {deadline_s:g} s; {ask}"
    return Record(kind=EventKind.DRAIN_BEGUN, message=message, engine=engine)


def drain_changed(engine: str, words: str) -> Record:
    """A drain is another than it was."""
    return Record(kind=EventKind.DRAIN_CHANGED, message=f"engine {engine}: {words}", engine=engine)


def identity_captured(engine: str, drain: Drain) -> Record:
    """Which process a drain will ask a newer one than."""
    known = process_words(drain.identity) if drain.identity is not None else "unknown, the engine does not say"
    message = f"engine {engine}: the process that is drained: {known}"
    return Record(kind=EventKind.IDENTITY_CAPTURED, message=message, engine=engine)


def drain_settled(engine: str) -> Record:
    """A drained engine has no work and gets none."""
    return Record(kind=EventKind.DRAIN_SETTLED, message=f"engine {engine} is ready to stop", engine=engine)


def drain_overdue(engine: str, waits_for: Iterable[str]) -> Record:
    """The deadline of a drain has passed."""
    message = f"engine {engine}: its drain is overdue, it stays out and waits for {'; '.join(waits_for)}"
    return Record(kind=EventKind.DRAIN_OVERDUE, message=message, engine=engine)


def undrain_begun(engine: str) -> Record:
    """An operator wants an engine back."""
    message = f"engine {engine} is to return: its gate is tried"
    return Record(kind=EventKind.UNDRAIN_BEGUN, message=message, engine=engine)


def reloaded(change: Change) -> Record:
    """What a reload of the fleet file did to an engine."""
    fields = {"url": change.url} if change.url else {}
    message = f"engine {change.engine}: {change.words}"
    return Record(kind=change.kind, message=message, engine=change.engine, fields=fields)


def undrain_failed(engine: str, failed: str, check: Check, result: CheckResult) -> Record:
    """It does not return, because its gate failed, or that of another which was to return with it."""
    whose = "its" if engine == failed else f"engine {failed}'s"
    message = f"engine {engine} stays drained: {whose} check {check}: {result.verdict}: {result.detail}"
    fields = {"failed": failed, "check": check, "result": result.verdict, "detail": result.detail}
    return Record(kind=EventKind.UNDRAIN_FAILED, message=message, engine=engine, fields=fields)


def probe_started(engine: str, kind: str, reason: str) -> Record:
    """A probe begins. `reason`: empty when a hold has just said it."""
    message = f"engine {engine}: {kind} begins{f' ({reason})' if reason else ''}"
    return Record(kind=EventKind.PROBE_STARTED, message=message, engine=engine, fields={"probe": kind})


def gate_asked(engine: str) -> Record:
    """An operator has the gate tried now."""
    message = f"engine {engine}: its gate is tried now (asked for by an operator)"
    return Record(kind=EventKind.PROBE_STARTED, message=message, engine=engine, fields={"probe": "gate"})


def probe_ended(engine: str, kind: str, verdict: Verdict, detail: str) -> Record:
    """A probe has its answer."""
    message = f"engine {engine}: {kind}: {verdict}: {detail}"
    fields = {"probe": kind, "result": verdict}
    return Record(kind=EventKind.PROBE_ENDED, message=message, engine=engine, fields=fields)


def relapsed(engine: str, failure: FailureClass, reason: str, span_s: float) -> Record:
    """An engine fails again what it had been cleared of."""
    message = f"engine {engine} relapsed: {reason}; kept to a trickle for {span_s:g} s"
    return Record(kind=EventKind.RELAPSED, message=message, engine=engine, fields={"class": failure})


def blamed(producer: str, reason: str) -> Record:
    """A producer is held responsible for the failures of who read from it."""
    message = f"engine {producer} is blamed as producer: {reason}"
    return Record(kind=EventKind.PRODUCER_BLAMED, message=message, engine=producer)


def _slow_ones(drifting: int, scored: int, serving: int) -> str:
    if scored == serving:
        return f"{drifting} of {scored} decode engines that serve take longer than usual for a token"
    return f"{drifting} of {scored} decode engines that were measured, of {serving} that serve, take longer than usual"


def overload(drifting: int, scored: int, serving: int) -> Record:
    """Most engines are slower than usual in one window: that says nothing about any of them. `scored`: those that were
    measured, of `serving`."""
    message = f"{_slow_ones(drifting, scored, serving)}: the fleet is overloaded, none of them is put on probation"
    if serving == 1:
        message = (
            "the only decode engine that serves takes longer than usual for a token: it may be slow or overloaded, "
        )
        message += "without a peer to compare it with it is not put on probation"
    return Record(kind=EventKind.FLEET_SLOW, message=message)


def overload_over(drifting: int, scored: int, serving: int) -> Record:
    """Engines are judged one by one again."""
    message = f"no more than {_slow_ones(drifting, scored, serving)}: engines are judged one by one again"
    return Record(kind=EventKind.FLEET_USUAL, message=message)


def new_normal(drifting: int, scored: int, serving: int, *, windows: int) -> Record:
    """The fleet has been slow for so long that engines are judged by how it is now."""
    message = f"{_slow_ones(drifting, scored, serving)}, {windows} windows in a row: from now on that is what is usual"
    return Record(kind=EventKind.FLEET_USUAL, message=message)


def role_moved(move: RoleMove) -> Record:
    """An engine has another role."""
    message = f"engine {move.engine} now has the role {move.to} ({move.cause}: {move.reason})"
    return Record(kind=EventKind.ROLE_MOVED, message=message, engine=move.engine, fields=_move_fields(move))


def role_proposed(move: RoleMove) -> Record:
    """An engine should have another role, and role control only advises."""
    message = f"engine {move.engine} should have the role {move.to} ({move.cause}: {move.reason}); nothing was changed"
    return Record(kind=EventKind.ROLE_PROPOSED, message=message, engine=move.engine, fields=_move_fields(move))


def _move_fields(move: RoleMove) -> Mapping[str, str]:
    return {"to": move.to, "cause": move.cause}


def role_risk(role: Phase, kind: RiskKind, age_s: float, window_s: float) -> Record:
    """A role is short of an engine that it gave up."""
    message = f"{role}: {kind}, {age_s:.1f} s after it gave up an engine; it gives up no more for {window_s:g} s"
    return Record(kind=EventKind.ROLE_RISK, message=message, fields={"role": role, "risk": kind})


def kept(engine: str, phases: str) -> Record:
    """Last-engine protection."""
    message = f"engine {engine} serves {phases} in spite of its holds: no other engine can"
    return Record(kind=EventKind.LAST_ENGINE_KEPT, message=message, engine=engine)
