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
            ),
            fleet_pb2.EngineStatus(
                id="decode-1",
                url="http://127.0.0.1:9002",
                role=DECODE,
                incarnation=2,
                phases=[PREFILL, DECODE],
                weight=0.55,
                inflight=12,
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
    )


def dead() -> fleet_pb2.FleetStatus:
    """Not ready: its only decode engine is gone."""
    fleet = wounded()
    del fleet.engines[2]
    fleet.ready, fleet.reason = False, "no eligible engines"
    return fleet


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
