"""The fleets that the command line is shown in tests."""

from narwhal._pb import fleet_pb2, placement_pb2

PREFILL, DECODE = placement_pb2.PHASE_PREFILL, placement_pb2.PHASE_DECODE


def wounded() -> fleet_pb2.FleetStatus:
    """Ready, with one engine ejected and one that would be held were it not the last."""
    return fleet_pb2.FleetStatus(
        fleet="demo",
        model="tiny",
        ready=True,
        control_ready=True,
        epoch=3,
        holder="c1",
        version=17,
        engines=[
            fleet_pb2.EngineStatus(
                id="prefill-0",
                url="http://127.0.0.1:9000",
                role=PREFILL,
                pinned=True,
                incarnation=1,
                phases=[PREFILL],
                weight=1.0,
                inflight=3,
                outcomes={"handoff": 1204},
            ),
            fleet_pb2.EngineStatus(
                id="decode-0",
                url="http://127.0.0.1:9001",
                role=DECODE,
                incarnation=4,
                weight=1.0,
                holds=[fleet_pb2.HoldStatus(kind="ejected", reason="connection refused", age_s=130.7, effective=True)],
                checks=[
                    fleet_pb2.CheckStatus(
                        check="health", verdict="fail", detail="connection refused", age_s=4.2, latency_s=0.0031
                    )
                ],
                streaks={"connection": 3, "timeout": 1},
                outcomes={"stream_complete": 800, "refused": 3},
                evidence=[
                    fleet_pb2.EvidenceStatus(
                        failure_class="connection",
                        streak=3,
                        limit=4,
                        total=5,
                        last=fleet_pb2.FailureStatus(
                            words="decode leg: refused (connecting), on edge/1, handoff of prefill-0, request r-17",
                            outcome="refused",
                            detail="connecting",
                            phase=DECODE,
                            proxy="edge/1",
                            producer_id="prefill-0",
                            request_id="r-17",
                            age_s=131,
                        ),
                    ),
                    fleet_pb2.EvidenceStatus(failure_class="timeout", streak=1, limit=4),
                    fleet_pb2.EvidenceStatus(
                        failure_class="overload",
                        limit=4,
                        total=2,
                        last=fleet_pb2.FailureStatus(
                            words="HTTP 429 (GET /health answered 429)",
                            outcome="http_429",
                            status=429,
                            detail="GET /health answered 429",
                            age_s=400,
                        ),
                    ),
                ],
                producer_ids=["prefill-0"],
                misses=1,
                gate_in_s=7.9,
                drift=fleet_pb2.DriftStatus(step_s=0.061, usual_s=0.02, samples=44, drifting=3),
                role_age_s=12,
                stays="held",
                health=[
                    fleet_pb2.HealthStatus(
                        detail="GET /health: no answer within 5 s", outcome="read_timeout", latency_s=5, age_s=140
                    ),
                    fleet_pb2.HealthStatus(detail="GET /health answered 200", latency_s=0.0021, age_s=150),
                ],
            ),
            fleet_pb2.EngineStatus(
                id="decode-1",
                url="http://127.0.0.1:9002",
                role=DECODE,
                incarnation=2,
                phases=[PREFILL, DECODE],
                weight=0.55,
                inflight=12,
                suspicion="inference probe again in 4.0 s",
                holds=[
                    fleet_pb2.HoldStatus(
                        kind="quarantine", reason="stream cut", age_s=65, remaining_s=25, effective=False
                    )
                ],
            ),
        ],
        monitor=fleet_pb2.MonitorStatus(
            failure_streak=2,
            passes=86412,
            errors=[
                fleet_pb2.StageError(
                    stage="health", error_class="TimeoutError", count=2, message="stage took 10 s", age_s=1.5
                ),
                fleet_pb2.StageError(
                    stage="handoff", error_class="StoreError", count=1, message="disk full", age_s=7300
                ),
            ],
        ),
        totals=fleet_pb2.RequestTotals(served=1200, failed=3, rejected=2, cancelled=7, retried=4),
        proxies=1,
        roles=roles(),
    )


def roles() -> fleet_pb2.RolesStatus:
    """Advice to move an engine; prefill has given one up before, and missed its target then."""
    return fleet_pb2.RolesStatus(
        mode="advisory",
        roles=[
            fleet_pb2.RoleStatus(
                role=PREFILL,
                engines=1,
                floor=1,
                load=0.31,
                latency=0.29,
                first_s=0.58,
                wait_s=0.0004,
                prompt_tokens=812.3,
                queue_s=0.62,
                waiting=3,
                busy=0.31,
                gave_age_s=44,
                risks=[fleet_pb2.RiskStatus(kind="target missed", count=2, age_s=41, blocks_s=19)],
            ),
            fleet_pb2.RoleStatus(
                role=DECODE,
                engines=1,
                floor=1,
                load=1.2,
                latency=1.2,
                first_s=0.21,
                step_s=0.12,
                output_tokens=96,
                above=4,
            ),
        ],
        proposal=fleet_pb2.RoleProposal(
            engine_id="prefill-1", to=DECODE, cause="load", reason="load of decode 1.20 for 4 passes, of prefill 0.31"
        ),
    )


def dead() -> fleet_pb2.FleetStatus:
    """Not ready: its only decode engine is gone."""
    fleet = wounded()
    del fleet.engines[2]
    fleet.ready, fleet.reason = False, "no eligible engines"
    return fleet


def drained(*, settled: bool, overdue: bool = False) -> fleet_pb2.EngineStatus:
    """An engine that an operator has taken out."""
    return fleet_pb2.EngineStatus(
        id="decode-1",
        url="http://127.0.0.1:9002",
        role=DECODE,
        incarnation=2,
        weight=1.0,
        holds=[fleet_pb2.HoldStatus(kind="drain", reason="new driver", age_s=65, effective=True)],
        drain=fleet_pb2.DrainStatus(
            reason="new driver",
            age_s=65,
            remaining_s=0 if overdue else 235,
            planned=True,
            settled=settled,
            overdue=overdue,
            waits_for=[] if settled else ["2 legs of proxy edge/0"],
            captured=True,
            process=fleet_pb2.ProcessIdentity(version="0.32.0", started_at=1_790_000_000.25),
        ),
        process=fleet_pb2.ProcessIdentity(version="0.32.0", started_at=1_790_000_000.25),
    )


def proxies() -> list[fleet_pb2.ProxyStatus]:
    """One current, one that refused, one lost."""
    return [
        fleet_pb2.ProxyStatus(
            proxy=placement_pb2.ProxyIdentity(id="edge", slot=0, boot=1_790_000_000_000_000),
            address="10.0.0.5:8000",
            pid=4711,
            connected=True,
            acked_epoch=3,
            acked_version=17,
            silent_s=0.4,
            resident=[
                placement_pb2.Residency(engine_id="prefill-0", legs=3),
                placement_pb2.Residency(engine_id="decode-1", legs=12),
            ],
        ),
        fleet_pb2.ProxyStatus(
            proxy=placement_pb2.ProxyIdentity(id="edge", slot=1, boot=1_790_000_000_000_001),
            address="10.0.0.5:8000",
            pid=4712,
            connected=True,
            acked_epoch=3,
            acked_version=15,
            lag=2,
            suspect="its legs fail on 2 of 3 engines that serve other proxies",
            refused_epoch=3,
            refused_version=16,
            refused_reason="engine decode-1 is listed twice",
            silent_s=0.9,
        ),
        fleet_pb2.ProxyStatus(
            proxy=placement_pb2.ProxyIdentity(id="far", slot=0, boot=1_790_000_000_000_002),
            address="10.0.0.6:8000",
            pid=99,
            silent_s=4000,
            lag=17,
        ),
    ]


def placed(
    engine: str,
    role: placement_pb2.Phase,
    *phases: placement_pb2.Phase,
    weight: float = 1.0,
    holds: tuple[str, ...] = (),
) -> placement_pb2.EnginePlacement:
    """One engine of a placement."""
    return placement_pb2.EnginePlacement(
        id=engine, url=f"http://{engine}:9000", role=role, phases=phases, incarnation=1, weight=weight, holds=holds
    )


def snapshot(epoch: int = 3, version: int = 17) -> placement_pb2.Snapshot:
    """Two engines that serve, one of them in quarantine for its second phase."""
    quarantined = placed("decode-0", DECODE, DECODE, weight=0.1, holds=("quarantine",))
    quarantined.quarantine_remaining_s = 12.5
    quarantined.phases_after_quarantine.extend([PREFILL, DECODE])
    quarantined.max_inflight = 64
    return placement_pb2.Snapshot(
        epoch=epoch, version=version, engines=[placed("prefill-0", PREFILL, PREFILL), quarantined]
    )


def explanation() -> fleet_pb2.Explanation:
    """Of the engine that `wounded` shows as ejected."""
    ejected = next(engine for engine in wounded().engines if engine.id == "decode-0")
    return fleet_pb2.Explanation(
        engine=ejected,
        lines=["engine decode-0 is not eligible: ejected (role decode, incarnation 4)", "1 line more", "and a third"],
        history=[fleet_pb2.HistoryEntry(age_s=130.7, message="1 line more")],
    )
