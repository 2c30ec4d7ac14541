"""The fleet's view as the messages of the operators' service. No decision."""

from narwhal._pb import fleet_pb2
from narwhal.clock import Clock
from narwhal.control.core.decisions import RoleMove
from narwhal.control.core.effects import Effect
from narwhal.control.core.events import ProcessIdentity
from narwhal.control.core.history import Epoch
from narwhal.control.core.proxies import lag
from narwhal.control.core.records import Record
from narwhal.control.core.view import (
    DrainView,
    DriftView,
    EngineView,
    EvidenceView,
    FleetView,
    MonitorView,
    ProxyView,
    RolesView,
    RoleView,
)
from narwhal.control.observe import Entry
from narwhal.control.yielding import Known
from narwhal.vocabulary import Phase
from narwhal.wire import phase_to_wire, proxy_to_wire, residency_to_wire


def words_of(effects: tuple[Effect, ...]) -> list[str]:
    """What a command told."""
    return [effect.message for effect in effects if isinstance(effect, Record)]


def status_message(view: FleetView) -> fleet_pb2.FleetStatus:
    """What the core knows; readiness and lease are the caller's to add."""
    totals = view.totals
    return fleet_pb2.FleetStatus(
        fleet=view.name,
        model=view.model,
        engines=[engine_message(e) for e in view.engines],
        monitor=_monitor(view.monitor),
        totals=fleet_pb2.RequestTotals(
            served=totals.served,
            failed=totals.failed,
            rejected=totals.rejected,
            cancelled=totals.cancelled,
            retried=totals.retried,
        ),
        proxies=sum(p.connected for p in view.proxies),
        roles=_roles(view.roles),
    )


def engine_message(engine: EngineView) -> fleet_pb2.EngineStatus:
    """One engine."""
    return fleet_pb2.EngineStatus(
        id=engine.id,
        url=engine.url,
        role=phase_to_wire(engine.role),
        pinned=engine.pinned,
        incarnation=engine.incarnation,
        phases=[phase_to_wire(p) for p in Phase if p in engine.phases],
        weight=engine.weight,
        holds=[
            fleet_pb2.HoldStatus(
                kind=h.kind, reason=h.reason, age_s=h.age_s, remaining_s=h.remaining_s, effective=h.effective
            )
            for h in engine.holds
        ],
        checks=[
            fleet_pb2.CheckStatus(
                check=c.check, verdict=c.verdict, detail=c.detail, age_s=c.age_s, latency_s=c.latency_s
            )
            for c in engine.checks
        ],
        streaks={str(kind): count for kind, count in engine.streaks.items() if count},
        outcomes={str(outcome): count for outcome, count in engine.outcomes.items() if count},
        inflight=engine.inflight,
        evidence=[_evidence(known) for known in engine.evidence],
        producer_ids=engine.producers,
        misses=engine.misses,
        suspicion=engine.suspicion,
        gate_in_s=engine.gate_in_s,
        health=[
            fleet_pb2.HealthStatus(detail=h.detail, outcome=h.outcome, latency_s=h.latency_s, age_s=h.age_s)
            for h in engine.health
        ],
        drain=None if engine.drain is None else _drain(engine.drain),
        process=_process(engine.identity),
        drift=None if engine.drift is None else _drift(engine.drift),
        role_age_s=engine.role_age_s,
        stays=engine.stays,
    )


def _drift(drift: DriftView) -> fleet_pb2.DriftStatus:
    return fleet_pb2.DriftStatus(
        step_s=drift.step_s,
        usual_s=drift.usual_s,
        samples=drift.samples,
        drifting=drift.drifting,
        good=drift.good,
    )


def _roles(roles: RolesView) -> fleet_pb2.RolesStatus:
    return fleet_pb2.RolesStatus(
        mode=roles.mode,
        roles=[_role(role) for role in roles.roles],
        proposal=None if roles.proposal is None else _proposal(roles.proposal),
        why_not=roles.why_not,
    )


def _role(role: RoleView) -> fleet_pb2.RoleStatus:
    load = role.load
    return fleet_pb2.RoleStatus(
        role=phase_to_wire(role.role),
        engines=role.engines,
        floor=role.floor,
        load=load.load,
        latency=load.latency,
        first_s=load.first_s,
        step_s=load.step_s,
        wait_s=load.wait_s,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        queue_s=load.queue_s,
        waiting=load.waiting,
        busy=load.busy,
        above=role.above,
        gave_age_s=role.gave_age_s,
        risks=[
            fleet_pb2.RiskStatus(kind=r.kind, count=r.count, age_s=r.age_s, blocks_s=r.blocks_s) for r in role.risks
        ],
    )


def _proposal(move: RoleMove) -> fleet_pb2.RoleProposal:
    return fleet_pb2.RoleProposal(
        engine_id=move.engine, to=phase_to_wire(move.to), cause=move.cause, reason=move.reason
    )


def _drain(drain: DrainView) -> fleet_pb2.DrainStatus:
    return fleet_pb2.DrainStatus(
        reason=drain.reason,
        age_s=drain.age_s,
        remaining_s=drain.remaining_s,
        planned=drain.restart,
        maintenance=drain.whole,
        settled=drain.settled,
        overdue=drain.overdue,
        waits_for=drain.waits_for,
        process=_process(drain.identity),
        captured=drain.captured,
    )


def _process(identity: ProcessIdentity | None) -> fleet_pb2.ProcessIdentity | None:
    if identity is None:
        return None
    return fleet_pb2.ProcessIdentity(version=identity.version, started_at=identity.started_at)


def _evidence(known: EvidenceView) -> fleet_pb2.EvidenceStatus:
    message = fleet_pb2.EvidenceStatus(
        failure_class=known.failure, streak=known.streak, limit=known.limit, total=known.total
    )
    last = known.last
    if last is not None:
        message.last.CopyFrom(
            fleet_pb2.FailureStatus(
                words=known.last_words,
                outcome=last.outcome,
                status=last.status,
                detail=last.detail,
                phase=phase_to_wire(last.phase) if last.phase is not None else None,
                proxy=last.proxy,
                producer_id=last.producer,
                request_id=last.request_id,
                age_s=known.last_age_s,
            )
        )
    return message


def _monitor(monitor: MonitorView) -> fleet_pb2.MonitorStatus:
    return fleet_pb2.MonitorStatus(
        failure_streak=monitor.streak,
        degraded=bool(monitor.degraded),
        passes=monitor.passes,
        errors=[
            fleet_pb2.StageError(
                stage=e.stage, error_class=e.error_class, count=e.count, message=e.message, age_s=e.age_s
            )
            for e in monitor.errors
        ],
    )


def proxy_message(proxy: ProxyView, published: tuple[int, int]) -> fleet_pb2.ProxyStatus:
    """One proxy worker. `published`: (epoch, version) of the newest placement."""
    return fleet_pb2.ProxyStatus(
        proxy=proxy_to_wire(proxy.key),
        address=proxy.address,
        pid=proxy.pid,
        connected=proxy.connected,
        acked_epoch=proxy.acked[0],
        acked_version=proxy.acked[1],
        lag=lag(proxy.acked, published),
        refused_version=proxy.refused[1] if proxy.refused is not None else 0,
        refused_epoch=proxy.refused[0] if proxy.refused is not None else 0,
        refused_reason=proxy.refused_reason,
        silent_s=proxy.silent_s,
        resident=residency_to_wire(dict(proxy.resident)),
        suspect=proxy.suspect,
        unread=residency_to_wire(dict(proxy.unread)),
    )


def event_message(entry: Entry) -> fleet_pb2.Event:
    """One event."""
    record = entry.record
    return fleet_pb2.Event(
        sequence=entry.sequence,
        at=entry.at,
        kind=record.kind,
        message=record.message,
        engine_id=record.engine,
        proxy=record.proxy,
        fields=dict(record.fields),
        boottime=entry.boottime,
    )


def standby_message(known: Known, clock: Clock) -> fleet_pb2.StandbyStatus:
    """One standby."""
    said = known.said
    return fleet_pb2.StandbyStatus(
        holder=said.holder,
        address=said.address,
        copy_epoch=said.copy_epoch,
        copy_age_s=max(0.0, clock.wall() - said.copy_written_at) if said.copy_epoch else 0.0,
        problem=said.problem,
        silent_s=clock.monotonic() - known.heard_at,
    )


def epoch_message(epoch: Epoch) -> fleet_pb2.EpochEntry:
    """One period of leadership."""
    return fleet_pb2.EpochEntry(
        epoch=epoch.epoch,
        holder=epoch.holder,
        address=epoch.address,
        began_at=epoch.began_at,
        ended_at=epoch.ended_at,
        ending=epoch.ending,
        reason=epoch.reason,
    )
