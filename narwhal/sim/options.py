"""The settings of one simulated engine."""

from dataclasses import dataclass

from narwhal.sim.text import MODEL

LOAD_FAILURE_POLICIES = ("fail", "recompute")
HOME_HANDOFFS = ("answer", "fail")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One engine's settings. Raises ValueError, naming the field, where a value makes no sense."""

    id: str = "engine-0"
    """The engine's name in answers of `/sim/*`, in the handshake between engines and in faults that name a peer."""
    host: str = "127.0.0.1"
    port: int = 0
    """HTTP port; 0 binds a free one, which then stays the engine's over restarts."""
    model: str = MODEL
    """The one model served; others get 404."""
    version: str = "0.32.0"
    api_key: str | None = None
    """Where set, the API routes want it as a bearer token and answer 401 otherwise."""

    prefill_base_ms: float = 2.0
    """Milliseconds of every prefill."""
    prefill_ms_per_token: float = 0.02
    """Milliseconds of prefill per prompt token."""
    tpot_ms: float = 5.0
    """Milliseconds between output tokens."""
    jitter: float = 0.0
    """Every time varies by up to this share: 0.2 is ± 20 %. The variation follows `seed`."""
    seed: int = 0
    tokens_per_step: int = 1
    """The most tokens that one stream event carries; above 1 the number varies, the first event always carries one."""

    engine_id: str | None = None
    """A fixed KV engine id; None makes a new one at every start, as the engine does by default."""
    block_size: int = 16
    """Tokens per KV block."""
    empty_short_handoffs: bool = False
    """Whether the handoff of a prompt shorter than one block names no blocks at all."""
    max_model_len: int = 32768
    """Tokens of prompt and answer together."""
    kv_lease_s: float = 30.0
    """Seconds after which an unread handoff's blocks are freed."""
    first_pull_s: float = 0.02
    """Seconds that the handshake of the first transfer between two engine processes takes."""
    handshake_timeout_s: float = 5.0
    """Seconds after which a handshake that nobody answers fails."""
    resolve_timeout_s: float = 10.0
    """Seconds after which a transfer from a host whose name does not resolve fails."""
    kv_load_failure_policy: str = "fail"
    """After a failed transfer: `fail` the request, or `recompute` the prompt here."""
    home_handoffs: str = "answer"
    """What becomes of a handoff sent to its own producer; engines have been seen to do either: `answer` from their
    prefix cache, or `fail` as for a peer that cannot be reached. Its blocks stay pinned both ways."""

    keepalive_s: float = 5.0
    """Seconds after which an idle connection is closed."""
    shutdown_s: float = 0.3
    """Seconds between SIGTERM and the closed listener, in which new requests get 500."""
    core_death_s: float = 0.5
    """Seconds between the death of the engine core and the exit of the process, in which `/health` is 503."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and value < 0 and name != "seed":
                raise ValueError(f"{name}: must not be negative, got {value}")
        if not self.id:
            raise ValueError("id: must not be empty")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter: must be at least 0 and below 1, got {self.jitter}")
        for name in ("block_size", "max_model_len", "tokens_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.kv_load_failure_policy not in LOAD_FAILURE_POLICIES:
            raise ValueError(f"kv_load_failure_policy: must be fail or recompute, got {self.kv_load_failure_policy!r}")
        if self.home_handoffs not in HOME_HANDOFFS:
            raise ValueError(f"home_handoffs: must be answer or fail, got {self.home_handoffs!r}")
