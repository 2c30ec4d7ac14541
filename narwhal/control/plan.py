"""What a control process works by: the validated fleet file, cut to the size of each part."""

from dataclasses import dataclass

from narwhal.config import FleetConfig
from narwhal.control.core.settings import CoreSettings, EngineSpec
from narwhal.control.engine_client import ProbeSettings


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a control process works by: the fleet file, cut to size. Seconds."""

    core: CoreSettings
    probes: ProbeSettings
    proxy_settings: bytes  # sent to proxies
    interval_s: float
    stage_timeout_s: float
    poll_s: float  # how often a standby looks
    takeover_after: int  # of its looks at the active (spec M8)
    max_handoff_age_s: float  # of a standby's copy (spec S7)


def core_settings(config: FleetConfig) -> CoreSettings:
    """What the core knows of the fleet file."""
    recovery, engine = config.recovery, config.engine
    return CoreSettings(
        name=config.name,
        model=config.model,
        engines=tuple(
            EngineSpec(
                id=e.id,
                url=e.url,
                role=e.role,
                pinned=e.pinned,
                attestation_url=e.attestation_url or "",
                max_inflight=e.max_inflight,
                max_inflight_tokens=e.max_inflight_tokens,
            )
            for e in config.engines
        ),
        monitor_interval_s=config.controller.monitor_interval_s,
        monitor_failure_limit=config.controller.monitor_failure_limit,
        eject_after=recovery.eject_after,
        readmit_every=recovery.readmit_every,
        liveness_every=recovery.liveness_every,
        liveness_misses=recovery.liveness_misses,
        failure_quarantine_s=recovery.failure_quarantine_s,
        stall_s=recovery.stall_s,
        silent_leg_s=recovery.silent_leg_s,
        probe_tokens=recovery.probe_tokens,
        relapse_window_s=recovery.relapse_window_s,
        ramp_s=recovery.ramp_s,
        health_timeout_s=engine.health_timeout_s,
        first_token_timeout_s=engine.first_token_timeout_s,
        kv_first_pull_timeout_s=engine.kv_first_pull_timeout_s,
        placement_max_age_s=config.proxy.placement_max_age_s,
        attested=config.engine_contract is not None,
    )


def make_plan(config: FleetConfig) -> Plan:
    """What a control process works by."""
    engine = config.engine
    return Plan(
        core=core_settings(config),
        probes=ProbeSettings(
            connections=config.control_connections,
            connect_timeout_s=engine.connect_timeout_s,
            pool_timeout_s=engine.pool_timeout_s,
            keepalive_s=engine.keepalive_s,
            api_key=engine.api_key.get_secret_value() if engine.api_key is not None else "",
            contract=config.engine_contract,
        ),
        proxy_settings=config.proxy_settings().to_json(),
        interval_s=config.controller.monitor_interval_s,
        stage_timeout_s=config.controller.stage_timeout,
        poll_s=config.standby.probe_interval_s,
        takeover_after=config.standby.takeover_after,
        max_handoff_age_s=config.standby.max_handoff_age_s,
    )
