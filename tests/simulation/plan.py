"""What one run is made of, drawn from its seed: the fleet, the numbers it works by, the proxies, the traffic."""

from dataclasses import dataclass
from random import Random

from narwhal.control.core.settings import CoreSettings, DriftSettings, EngineSpec, RoleMode, RoleSettings
from narwhal.proxy.attempt import Policy
from narwhal.vocabulary import Phase


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fixed part of a run. Seconds."""

    seed: int
    core: CoreSettings
    policy: Policy
    proxies: int
    controls: int
    lease_ttl_s: float  # 0: a lease that the kernel frees with its process
    seats: int
    queue: int
    rate: float  # requests a second over all proxies
    trouble_s: float  # how long things go wrong
    troubles: int  # how many
    overlap: bool  # several at once
    connect_timeout_s: float
    prefill_timeout_s: float
    read_timeout_s: float
    request_timeout_s: float
    pool_timeout_s: float
    control_connections: int
    turn_s: float  # after which requests ask for more of the one phase and less of the other; 0: never


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = Random(f"plan {seed}")
    engines = _engines(rng)
    core = CoreSettings(
        name="sim",
        model="m",
        engines=engines,
        eject_after=rng.choice((3, 3, 3, 1, 5)),
        readmit_every=rng.choice((10, 10, 5)),
        liveness_every=rng.choice((10, 10, 5)),
        liveness_misses=rng.choice((2, 2, 3)),
        failure_quarantine_s=rng.choice((0.0, 0.0, 2.0, 8.0)),
        stall_s=rng.choice((3.0, 3.0, 0.0)),
        silent_leg_s=rng.choice((30.0, 8.0)),
        probe_tokens=16,
        ramp_s=rng.choice((30.0, 0.0)),
        drift=_drift(Random(f"drift {seed}")),
        roles=_roles(roles := Random(f"roles {seed}")),
    )
    return Plan(
        seed=seed,
        core=core,
        policy=Policy(max_attempts=rng.choice((1, 2, 3)), handoff_max_age_s=25.0),
        proxies=rng.choice((1, 2, 2, 3)),
        controls=2,
        lease_ttl_s=rng.choice((0.0, 3.0)),
        seats=rng.choice((64, 64, 4)),
        queue=rng.choice((0, 8)),
        rate=rng.choice((1.5, 1.5, 3.0, 3.0, 5.0, 5.0, 0.05, 0.05)),
        trouble_s=rng.uniform(30.0, 90.0),
        troubles=rng.choice((1, 1, 2, 3, 5)),
        overlap=rng.random() < 0.3,
        connect_timeout_s=rng.choice((2.0, 10.0)),
        prefill_timeout_s=rng.choice((6.0, 30.0)),
        read_timeout_s=rng.choice((8.0, 30.0)),
        request_timeout_s=rng.choice((20.0, 90.0)),
        pool_timeout_s=5.0,
        control_connections=max(4, 2 * len(engines)),
        turn_s=roles.choice((0.0, 12.0, 25.0, 25.0, 45.0)),
    )


def _drift(rng: Random) -> DriftSettings:
    """Windows as short as what goes wrong."""
    return DriftSettings(
        window_s=rng.choice((2.0, 2.0, 5.0)), min_samples=rng.choice((1, 1, 3)), probation_windows=rng.choice((1, 2))
    )


def _roles(rng: Random) -> RoleSettings:
    """Targets that what is asked of the fleet comes to miss and to keep (`paces.DEMAND`)."""
    ttft_s, tpot_s = rng.choice(((0.15, 0.1), (0.15, 0.1), (0.15, 1.0), (2.0, 0.1), (2.0, 1.0)))
    return RoleSettings(
        mode=rng.choice((RoleMode.AUTO, RoleMode.AUTO, RoleMode.AUTO, RoleMode.ADVISORY, RoleMode.OFF)),
        min_prefill=rng.choice((1, 1, 2)),
        cooldown_s=rng.choice((10.0, 1.0)),
        sustained_intervals=rng.choice((3, 1)),
        dwell_s=rng.choice((30.0, 5.0)),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


def _engines(rng: Random) -> tuple[EngineSpec, ...]:
    prefills, decodes = rng.choice(((1, 1), (2, 2), (2, 2), (2, 3), (3, 2), (1, 2), (2, 1), (3, 3), (1, 0)))
    pinned = rng.random() < 0.4 and decodes > 0
    names = [(f"p{i + 1}", Phase.PREFILL) for i in range(prefills)]
    names += [(f"d{i + 1}", Phase.DECODE) for i in range(decodes)]
    return tuple(EngineSpec(id=name, url=f"http://{name}:8000", role=role, pinned=pinned) for name, role in names)
