"""The control service's messages as values of `model`, `engine_model` and `placement_model`."""

from collections.abc import Mapping
from typing import TypeVar

from narwhal._pb import fleet_pb2, placement_pb2
from narwhal.cli import engine_model, model, placement_model

T = TypeVar("T")


def status(message: fleet_pb2.FleetStatus, address: str, proxies: tuple[model.Proxy, ...]) -> model.Status:
    """The whole fleet. `address`: where it was answered."""
    monitor, totals = message.monitor, message.totals
    return model.Status(
        fleet=message.fleet,
        model=message.model,
        ready=message.ready,
        reason=message.reason,
        control=model.ControlProcess(
            address=address,
            ready=message.control_ready,
            epoch=message.epoch,
            holder=message.holder,
            version=message.version,
        ),
        monitor=model.Monitor(
            passes=monitor.passes,
            failure_streak=monitor.failure_streak,
            degraded=monitor.degraded,
            errors=tuple(
                model.StageError(
                    stage=e.stage, error_class=e.error_class, count=e.count, message=e.message, age_s=e.age_s
                )
                for e in monitor.errors
            ),
        ),
        engines=tuple(engine(known) for known in message.engines),
        proxies=proxies,
        roles=_roles(message.roles),
        totals=model.Totals(
            served=totals.served,
            failed=totals.failed,
            rejected=totals.rejected,
            cancelled=totals.cancelled,
            retried=totals.retried,
        ),
        standbys=tuple(
            model.Standby(
                holder=s.holder,
                address=s.address,
                copy_epoch=s.copy_epoch,
                copy_age_s=s.copy_age_s,
                problem=s.problem,
                silent_s=s.silent_s,
            )
            for s in message.standbys
        ),
    )


def epoch(message: fleet_pb2.EpochEntry) -> model.Epoch:
    """One period of leadership."""
    return model.Epoch(
        epoch=message.epoch,
        holder=message.holder,
        address=message.address,
        began_at=message.began_at if message.HasField("began_at") else None,
        ended_at=message.ended_at if message.HasField("ended_at") else None,
        ending=message.ending,
        reason=message.reason,
    )


def engine(message: fleet_pb2.EngineStatus) -> engine_model.Engine:
    """One engine."""
    return engine_model.Engine(
        id=message.id,
        url=message.url,
        role=_phase(message.role),
        pinned=message.pinned,
        incarnation=message.incarnation,
        phases=tuple(_phase(phase) for phase in message.phases),
        weight=message.weight,
        inflight=message.inflight,
        holds=tuple(
            engine_model.Hold(
                kind=hold.kind,
                reason=hold.reason,
                age_s=hold.age_s,
                remaining_s=hold.remaining_s if hold.HasField("remaining_s") else None,
                effective=hold.effective,
            )
            for hold in message.holds
        ),
        streaks=_sorted(message.streaks),
        checks=tuple(
            engine_model.Check(check=c.check, verdict=c.verdict, detail=c.detail, age_s=c.age_s, latency_s=c.latency_s)
            for c in message.checks
        ),
        outcomes=_sorted(message.outcomes),
        evidence=tuple(_evidence(known) for known in message.evidence),
        producers=tuple(message.producer_ids),
        misses=message.misses,
        suspicion=message.suspicion,
        gate_in_s=message.gate_in_s if message.HasField("gate_in_s") else None,
        health=tuple(
            engine_model.Health(detail=h.detail, outcome=h.outcome, latency_s=h.latency_s, age_s=h.age_s)
            for h in message.health
        ),
        drain=_drain(message.drain) if message.HasField("drain") else None,
        process=_process(message.process) if message.HasField("process") else None,
        drift=_drift(message.drift) if message.HasField("drift") else None,
        role_age_s=message.role_age_s if message.HasField("role_age_s") else None,
        stays=message.stays,
    )


def _drift(message: fleet_pb2.DriftStatus) -> engine_model.Drift:
    return engine_model.Drift(
        step_s=message.step_s,
        usual_s=message.usual_s,
        samples=message.samples,
        drifting=message.drifting,
        good=message.good,
    )


def _roles(message: fleet_pb2.RolesStatus) -> model.Roles:
    proposal = message.proposal
    return model.Roles(
        mode=message.mode,
        roles=tuple(_role(role) for role in message.roles),
        proposal=model.Proposal(
            engine=proposal.engine_id, to=_phase(proposal.to), cause=proposal.cause, reason=proposal.reason
        )
        if message.HasField("proposal")
        else None,
        why_not=message.why_not,
    )


def _role(message: fleet_pb2.RoleStatus) -> model.Role:
    def known(name: str) -> float | None:
        return getattr(message, name) if message.HasField(name) else None

    return model.Role(
        role=_phase(message.role),
        engines=message.engines,
        floor=message.floor,
        load=message.load,
        latency=message.latency,
        first_s=known("first_s"),
        step_s=known("step_s"),
        wait_s=known("wait_s"),
        prompt_tokens=known("prompt_tokens"),
        output_tokens=known("output_tokens"),
        queue_s=message.queue_s,
        waiting=message.waiting,
        busy=message.busy,
        above=message.above,
        gave_age_s=known("gave_age_s"),
        risks=tuple(model.Risk(kind=r.kind, count=r.count, age_s=r.age_s, blocks_s=r.blocks_s) for r in message.risks),
    )


def role_of(word: str) -> placement_pb2.Phase:
    """The number of `prefill` or `decode`."""
    return placement_pb2.PHASE_PREFILL if word == "prefill" else placement_pb2.PHASE_DECODE


def _drain(message: fleet_pb2.DrainStatus) -> engine_model.Drain:
    return engine_model.Drain(
        reason=message.reason,
        age_s=message.age_s,
        remaining_s=message.remaining_s,
        planned=message.planned,
        maintenance=message.maintenance,
        settled=message.settled,
        overdue=message.overdue,
        waits_for=tuple(message.waits_for),
        captured=message.captured,
        process=_process(message.process) if message.HasField("process") else None,
    )


def _process(message: fleet_pb2.ProcessIdentity) -> engine_model.Process:
    return engine_model.Process(version=message.version, started_at=message.started_at)


def _evidence(message: fleet_pb2.EvidenceStatus) -> engine_model.Evidence:
    last = message.last
    return engine_model.Evidence(
        failure_class=message.failure_class,
        streak=message.streak,
        limit=message.limit,
        total=message.total,
        last=engine_model.Failure(
            words=last.words,
            outcome=last.outcome,
            status=last.status,
            detail=last.detail,
            phase=_phase(last.phase) if last.phase else "",
            proxy=last.proxy,
            producer=last.producer_id,
            request_id=last.request_id,
            age_s=last.age_s,
        )
        if message.HasField("last")
        else None,
    )


def proxy(message: fleet_pb2.ProxyStatus) -> model.Proxy:
    """One proxy worker."""
    return model.Proxy(
        id=message.proxy.id,
        slot=message.proxy.slot,
        boot=message.proxy.boot,
        address=message.address,
        pid=message.pid,
        connected=message.connected,
        acked_epoch=message.acked_epoch,
        acked_version=message.acked_version,
        lag=message.lag,
        refused_epoch=message.refused_epoch,
        refused_version=message.refused_version,
        refused_reason=message.refused_reason,
        silent_s=message.silent_s,
        resident={residency.engine_id: residency.legs for residency in message.resident},
        unread={residency.engine_id: residency.legs for residency in message.unread},
        suspect=message.suspect,
    )


def event(message: fleet_pb2.Event) -> model.Event:
    """One event."""
    return model.Event(
        sequence=message.sequence,
        at=message.at,
        kind=message.kind,
        message=message.message,
        engine=message.engine_id,
        proxy=message.proxy,
        fields=_sorted(message.fields),
    )


def snapshot(message: placement_pb2.Snapshot) -> placement_model.Placement:
    """A whole placement."""
    engines = tuple(_placed(engine) for engine in message.engines)
    return placement_model.Placement(
        epoch=message.epoch, version=message.version, closed=message.closed, engines=engines
    )


def changed(held: placement_model.Placement | None, message: placement_pb2.Change) -> placement_model.Placement | None:
    """`held` after a change; None when the change is based on another placement."""
    if held is None or (held.epoch, held.version) != (message.epoch, message.base_version):
        return None
    engines = {engine.id: engine for engine in held.engines if engine.id not in message.removed}
    engines.update({engine.id: _placed(engine) for engine in message.engines})
    return placement_model.Placement(
        epoch=message.epoch, version=message.version, closed=message.closed, engines=tuple(engines.values())
    )


def _placed(message: placement_pb2.EnginePlacement) -> placement_model.PlacedEngine:
    remaining_s = message.quarantine_remaining_s if message.HasField("quarantine_remaining_s") else None
    return placement_model.PlacedEngine(
        id=message.id,
        url=message.url,
        role=_phase(message.role),
        phases=tuple(_phase(phase) for phase in message.phases),
        incarnation=message.incarnation,
        weight=message.weight,
        pinned=message.pinned,
        holds=tuple(message.holds),
        quarantine_remaining_s=remaining_s,
        phases_after_quarantine=tuple(_phase(phase) for phase in message.phases_after_quarantine),
        max_inflight=message.max_inflight,
        max_inflight_tokens=message.max_inflight_tokens,
    )


def _phase(number: int) -> str:
    """The word of a phase; a number that this client does not know is shown as it is."""
    known = placement_pb2.Phase.DESCRIPTOR.values_by_number.get(number)
    return known.name.removeprefix("PHASE_").lower() if known else str(number)


def _sorted(counts: Mapping[str, T]) -> dict[str, T]:
    return {key: counts[key] for key in sorted(counts)}
