"""protobuf ⇄ values. With the servicers the only code that sees the generated modules.

Raises `WireError` for a message that no correct peer would send: unknown enum numbers, missing identities, counts of
zero. Fields this version does not know are ignored, as protobuf does.
"""

from collections.abc import Mapping
from math import isfinite
from types import MappingProxyType

from narwhal._pb import outcome_pb2, placement_pb2
from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.placement import EngineEntry, Placement
from narwhal.reports import Batch, LegFailure, ProxyKey, RequestCounts, Run
from narwhal.vocabulary import Hold, Outcome, Phase

# What no correct peer sends, and no store could keep: sums of these stay within 64 bits for as long as a fleet lives.
NOTHING: Mapping[str, int] = MappingProxyType({})  # no engine has any
MOST_COUNTED = 2**40  # in one run, or of one kind of request in one report
LONGEST_NAME = 256  # characters of an id
LONGEST_TEXT = 1000  # characters of a sentence for operators; what is longer is cut


class WireError(ValueError):
    """The peer's message makes no sense. What it says of it is bounded, however long the peer's names are."""

    def __init__(self, message: str) -> None:
        super().__init__(message[:LONGEST_TEXT])


_PHASES = {Phase.PREFILL: placement_pb2.PHASE_PREFILL, Phase.DECODE: placement_pb2.PHASE_DECODE}
_PHASES_BACK: dict[int, Phase] = {number: phase for phase, number in _PHASES.items()}
_OUTCOMES = {o: getattr(outcome_pb2, f"LEG_OUTCOME_{o.name}") for o in Outcome}
_OUTCOMES_BACK: dict[int, Outcome] = {number: outcome for outcome, number in _OUTCOMES.items()}
_HOLDS = {h.value: h for h in Hold}
_SKETCHES = {
    Measure.FIRST: "first_s",
    Measure.STEP: "step_s",
    Measure.WAIT: "wait_s",
    Measure.PROMPT: "prompt_tokens",
    Measure.OUTPUT: "output_tokens",
}


def phase_to_wire(phase: Phase) -> placement_pb2.Phase:
    """The protobuf number of a phase."""
    return _PHASES[phase]


def phase_from_wire(number: int) -> Phase:
    """The phase of a protobuf number."""
    try:
        return _PHASES_BACK[number]
    except KeyError:
        raise WireError(f"unknown phase {number}") from None


def proxy_to_wire(key: ProxyKey) -> placement_pb2.ProxyIdentity:
    """A proxy's identity as a message."""
    return placement_pb2.ProxyIdentity(id=key.id, slot=key.slot, boot=key.boot)


def proxy_from_wire(message: placement_pb2.ProxyIdentity) -> ProxyKey:
    """A proxy's identity."""
    if not message.id or not message.boot:
        raise WireError("a proxy needs an id and a boot")
    if len(message.id) > LONGEST_NAME:
        raise WireError(f"a proxy's id has at most {LONGEST_NAME} characters")
    return ProxyKey(id=message.id, slot=message.slot, boot=message.boot)


def engine_to_wire(entry: EngineEntry, *, now: float) -> placement_pb2.EnginePlacement:
    """One engine's placement; its quarantine as time remaining at `now` (monotonic seconds of this process)."""
    message = placement_pb2.EnginePlacement(
        id=entry.id,
        url=entry.url,
        role=_PHASES[entry.role],
        phases=[_PHASES[p] for p in Phase if p in entry.phases],
        incarnation=entry.incarnation,
        weight=entry.weight,
        holds=[h.value for h in entry.holds],
        phases_after_quarantine=[_PHASES[p] for p in Phase if p in entry.phases_after_quarantine],
        pinned=entry.pinned,
        max_inflight=entry.max_inflight,
        max_inflight_tokens=entry.max_inflight_tokens,
    )
    if entry.quarantine_due is not None:
        message.quarantine_remaining_s = max(0.0, entry.quarantine_due - now)
    return message


def engine_from_wire(message: placement_pb2.EnginePlacement, *, now: float) -> EngineEntry:
    """One engine's placement; its quarantine as an instant of this process's monotonic clock."""
    due = now + message.quarantine_remaining_s if message.HasField("quarantine_remaining_s") else None
    try:
        return EngineEntry(
            id=message.id,
            url=message.url,
            role=phase_from_wire(message.role),
            phases=frozenset(phase_from_wire(p) for p in message.phases),
            incarnation=message.incarnation,
            weight=message.weight,
            # A hold that a newer control knows and this process does not changes nothing here: phases decide.
            holds=tuple(_HOLDS[h] for h in message.holds if h in _HOLDS),
            quarantine_due=due,
            phases_after_quarantine=frozenset(phase_from_wire(p) for p in message.phases_after_quarantine),
            pinned=message.pinned,
            max_inflight=message.max_inflight,
            max_inflight_tokens=message.max_inflight_tokens,
        )
    except WireError:
        raise
    except ValueError as error:
        raise WireError(str(error)) from error


def _entries(messages: "list[placement_pb2.EnginePlacement]", now: float) -> dict[str, EngineEntry]:
    entries: dict[str, EngineEntry] = {}
    for message in messages:
        entry = engine_from_wire(message, now=now)
        if entry.id in entries:
            raise WireError(f"engine {entry.id} is listed twice")
        entries[entry.id] = entry
    return entries


def snapshot_to_wire(placement: Placement, *, now: float) -> placement_pb2.Snapshot:
    """A whole placement."""
    return placement_pb2.Snapshot(
        epoch=placement.epoch,
        version=placement.version,
        closed=placement.closed,
        engines=[engine_to_wire(e, now=now) for e in placement.engines.values()],
    )


def snapshot_from_wire(message: placement_pb2.Snapshot, *, now: float) -> Placement:
    """A whole placement."""
    engines = _entries(list(message.engines), now)
    return Placement(epoch=message.epoch, version=message.version, closed=message.closed, engines=engines)


def change_to_wire(base: Placement, placement: Placement, *, now: float) -> placement_pb2.Change:
    """The step from `base` to `placement`, both of one epoch."""
    if base.epoch != placement.epoch:
        raise ValueError("a change stays within one epoch")
    return placement_pb2.Change(
        epoch=placement.epoch,
        base_version=base.version,
        version=placement.version,
        closed=placement.closed,
        engines=[engine_to_wire(e, now=now) for e in placement.engines.values() if base.engines.get(e.id) != e],
        removed=[engine for engine in base.engines if engine not in placement.engines],
    )


def apply_change(held: Placement | None, message: placement_pb2.Change, *, now: float) -> Placement:
    """`held` after the change. Raises `WireError` when the change is not based on `held`."""
    if held is None or (held.epoch, held.version) != (message.epoch, message.base_version):
        have = "none" if held is None else f"{held.epoch}.{held.version}"
        raise WireError(f"change is based on {message.epoch}.{message.base_version}, placement held is {have}")
    engines = dict(held.engines)
    for engine in message.removed:
        if engines.pop(engine, None) is None:
            raise WireError(f"change removes unknown engine {engine}")
    engines.update(_entries(list(message.engines), now))
    return Placement(epoch=message.epoch, version=message.version, closed=message.closed, engines=engines)


def residency_to_wire(legs: Mapping[str, int], tokens: Mapping[str, int] = NOTHING) -> list[placement_pb2.Residency]:
    """Legs in flight per engine, and their prompt tokens; engines without any leg are left out."""
    return [
        placement_pb2.Residency(engine_id=e, legs=n, tokens=max(tokens.get(e, 0), 0)) for e, n in legs.items() if n > 0
    ]


def residency_from_wire(messages: "list[placement_pb2.Residency]") -> dict[str, int]:
    """Legs in flight per engine."""
    return {m.engine_id: m.legs for m in messages}


def tokens_from_wire(messages: "list[placement_pb2.Residency]") -> dict[str, int]:
    """Prompt tokens in flight per engine, where there are any."""
    return {m.engine_id: m.tokens for m in messages if m.tokens}


def _run_to_wire(run: Run) -> outcome_pb2.OutcomeRun:
    message = outcome_pb2.OutcomeRun(
        engine_id=run.engine,
        phase=_PHASES[run.phase],
        incarnation=run.incarnation,
        outcome=_OUTCOMES[run.outcome],
        count=run.count,
    )
    if run.failure is not None:
        message.failure.CopyFrom(
            outcome_pb2.LegFailure(
                producer_id=run.failure.producer,
                producer_incarnation=run.failure.producer_incarnation,
                status=run.failure.status,
                detail=run.failure.detail,
                request_id=run.failure.request_id,
                elapsed_s=run.failure.elapsed_s,
                engine_silent=run.failure.engine_silent,
            )
        )
    return message


def _run_from_wire(message: outcome_pb2.OutcomeRun) -> Run:
    outcome = _OUTCOMES_BACK.get(message.outcome)
    if outcome is None:
        raise WireError(f"unknown outcome {message.outcome}")
    failure = None
    if message.HasField("failure"):
        failure = LegFailure(
            outcome=outcome,
            producer=message.failure.producer_id,
            producer_incarnation=message.failure.producer_incarnation,
            status=message.failure.status,
            detail=message.failure.detail[:LONGEST_TEXT],
            request_id=message.failure.request_id[:LONGEST_NAME],
            elapsed_s=_seconds(message.failure.elapsed_s, "a leg"),
            engine_silent=message.failure.engine_silent,
        )
    _at_most(message.count, "a run")
    try:
        return Run(
            engine=message.engine_id,
            phase=phase_from_wire(message.phase),
            incarnation=message.incarnation,
            outcome=outcome,
            count=message.count,
            failure=failure,
        )
    except WireError:
        raise
    except ValueError as error:
        raise WireError(str(error)) from error


def _at_most(count: int, what: str) -> None:
    if count > MOST_COUNTED:
        raise WireError(f"{what} counts at most {MOST_COUNTED}, got {count}")


def counts_to_wire(counts: RequestCounts) -> outcome_pb2.RequestCounts:
    """Request counts as a message."""
    return outcome_pb2.RequestCounts(
        served=counts.served,
        failed=counts.failed,
        rejected=counts.rejected,
        cancelled=counts.cancelled,
        retried=counts.retried,
    )


def _measures_to_wire(measures: LegMeasures) -> outcome_pb2.LegMeasures:
    message = outcome_pb2.LegMeasures(
        engine_id=measures.engine,
        phase=_PHASES[measures.phase],
        incarnation=measures.incarnation,
        waiting=measures.waiting,
    )
    for measure, sketch in measures.sketches.items():
        into = getattr(message, _SKETCHES[measure])
        into.buckets.extend(sketch.counts.keys())
        into.counts.extend(sketch.counts.values())
    return message


def _measures_from_wire(message: outcome_pb2.LegMeasures) -> LegMeasures:
    sketches = {}
    for measure, name in _SKETCHES.items():
        if message.HasField(name):
            sketch: outcome_pb2.Sketch = getattr(message, name)
            if len(sketch.buckets) != len(sketch.counts) or len(set(sketch.buckets)) != len(sketch.buckets):
                raise WireError(f"the buckets of {name} and their counts do not fit")
            for count in sketch.counts:
                _at_most(count, name)
            sketches[measure] = Sketch(dict(zip(sketch.buckets, sketch.counts, strict=True)))
    _at_most(message.waiting, "waiting")
    try:
        return LegMeasures(
            engine=message.engine_id,
            phase=phase_from_wire(message.phase),
            incarnation=message.incarnation,
            sketches=sketches,
            waiting=message.waiting,
        )
    except WireError:
        raise
    except ValueError as error:
        raise WireError(str(error)) from error


def _seconds(took_s: float, what: str) -> float:
    """Refuses what is no span of time: no journal could hold it."""
    if not isfinite(took_s) or took_s < 0:
        raise WireError(f"{what} cannot take {took_s} seconds")
    return took_s


def batch_to_wire(batch: Batch) -> outcome_pb2.ReportBatch:
    """A report as a message."""
    return outcome_pb2.ReportBatch(
        proxy=proxy_to_wire(batch.proxy),
        sequence=batch.sequence,
        runs=[_run_to_wire(r) for r in batch.runs],
        requests=counts_to_wire(batch.requests),
        measures=[_measures_to_wire(m) for m in batch.measures],
        measured_s=batch.measured_s,
    )


def batch_from_wire(message: outcome_pb2.ReportBatch) -> Batch:
    """A report. Raises `WireError` without a sequence or with a run that makes no sense."""
    if not message.sequence:
        raise WireError("a report needs a sequence")
    counts = message.requests
    for name in ("served", "failed", "rejected", "cancelled", "retried"):
        _at_most(getattr(counts, name), name)
    return Batch(
        proxy=proxy_from_wire(message.proxy),
        sequence=message.sequence,
        runs=tuple(_run_from_wire(r) for r in message.runs),
        requests=RequestCounts(
            served=counts.served,
            failed=counts.failed,
            rejected=counts.rejected,
            cancelled=counts.cancelled,
            retried=counts.retried,
        ),
        measures=tuple(_measures_from_wire(m) for m in message.measures),
        measured_s=_seconds(message.measured_s, "measuring"),
    )
