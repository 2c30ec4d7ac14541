"""The numbers that decisions depend on, as plain values. Pure.

Built from the validated fleet file by the composition root, so that the core neither parses nor validates.
Seconds end in `_s`; counts are plain.
"""

from dataclasses import dataclass
from enum import StrEnum

from narwhal.vocabulary import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """One engine as the fleet file lists it."""

    id: str
    url: str
    role: Phase
    pinned: bool = False
    attestation_url: str = ""
    max_inflight: int = 0
    max_inflight_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftSettings:
    """Performance drift (spec H5): `recovery.health` of the fleet file."""

    window_s: float = 30.0
    drift_band: float = 2.0  # a window drifts above so many times the baseline
    min_samples: int = 3  # of a window, to be judged
    probation_windows: int = 3
    evict_windows: int = 5
    recovery_windows: int = 3


class RoleMode(StrEnum):
    """What role control does (spec C1)."""

    OFF = "off"
    ADVISORY = "advisory"  # decides and shows, changes nothing
    AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSettings:
    """Role control (spec C): `controller` and `slo` of the fleet file."""

    mode: RoleMode = RoleMode.ADVISORY
    min_prefill: int = 1
    min_decode: int = 1
    expand: float = 1.0  # load from which a role wants another engine
    shrink: float = 0.5  # load up to which a role can give one up
    cooldown_s: float = 10.0  # between two moves
    sustained_intervals: int = 3  # passes for which the load must last
    dwell_s: float = 30.0  # that an engine stays after a move
    risk_window_s: float = 60.0
    ttft_s: float = 2.0  # target for the time to the first token
    tpot_s: float = 0.1  # target for the time per output token

    def floor(self, role: Phase) -> int:
        """Engines that the role keeps at least."""
        return self.min_prefill if role is Phase.PREFILL else self.min_decode


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreSettings:
    """What the core knows of the fleet file. Defaults are those of the fleet file."""

    name: str
    model: str
    engines: tuple[EngineSpec, ...]
    monitor_interval_s: float = 1.0
    monitor_failure_limit: int = 5
    eject_after: int = 3
    readmit_every: int = 10
    liveness_every: int = 10
    liveness_misses: int = 2
    failure_quarantine_s: float = 0.0
    stall_s: float = 3.0
    silent_leg_s: float = 20.0
    probe_tokens: int = 16
    relapse_window_s: float = 60.0
    ramp_s: float = 30.0
    health_timeout_s: float = 5.0
    first_token_timeout_s: float = 5.0
    kv_first_pull_timeout_s: float = 20.0
    placement_max_age_s: float = 600.0
    attested: bool = False  # the fleet has an engine_contract
    drift: DriftSettings = DriftSettings()
    roles: RoleSettings = RoleSettings()

    @property
    def readmit_interval_s(self) -> float:
        """Seconds between tries of an engine's gate."""
        return self.readmit_every * self.monitor_interval_s
