"""The sections of the fleet file: every key, its default, its bounds and what it means.

`docs/configuration.md` and `narwhalctl config schema` are made from these descriptions. Times are seconds.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from narwhal.config.fields import (
    Amount,
    BaseUrl,
    Count,
    DocumentUrl,
    Duration,
    Endpoint,
    HeaderSecret,
    Interval,
    Maybe,
    Name,
    Natural,
    Positive,
    Prefix,
    Secret,
    Section,
    Text,
    refuse,
)
from narwhal.tls import TlsFiles
from narwhal.vocabulary import Phase


class EngineConfig(Section):
    """One inference server process."""

    id: Name = Field(description="Name of the engine, unique in the fleet: letters, digits, `.`, `_`, `-`.")
    url: BaseUrl = Field(description="Base address of its OpenAI HTTP API, `http(s)://host[:port]`, or `${NAME}`.")
    role: Phase = Field(
        strict=False,
        description="The phase that the engine is assigned at first.",
    )
    pinned: bool = Field(
        default=False,
        description="A pinned engine never changes role and never stands in for the other one.",
    )
    attestation_url: Maybe[DocumentUrl] = Field(
        default=None,
        description="Where its attestation document is served, or `${NAME}`; needs `engine_contract`.",
    )
    max_inflight: Natural = Field(
        default=0,
        description="Legs that may run on it at once over all proxies; 0 = no limit.",
    )
    max_inflight_tokens: Natural = Field(
        default=0,
        description="Prompt tokens that may be in flight on it at once over all proxies; 0 = no limit.",
    )


class SloConfig(Section):
    """Latency targets of role control and of the dashboards."""

    ttft_s: Positive = Field(
        default=2.0,
        description="Target for the time to the first token, seconds.",
    )
    tpot_s: Positive = Field(
        default=0.1,
        description="Target for the time per output token after the first, seconds.",
    )


class StoreConfig(Section):
    """Where the lease and the state handoff are kept."""

    kind: Literal["file", "etcd"] = Field(
        default="file",
        description="`file`: a directory on one machine; `etcd`: a cluster that standbys share.",
    )
    path: Text = Field(
        default="run/",
        description="Directory of the file store, relative to the working directory of the process.",
    )
    endpoints: tuple[Endpoint, ...] = Field(
        default=(),
        strict=False,
        description="etcd members, each `http(s)://host:port` or `${NAME}`.",
    )
    prefix: Prefix = Field(
        default="/narwhal",
        description="etcd keys are written below `<prefix>/<fleet name>/`.",
    )
    ca: Maybe[Text] = Field(
        default=None,
        description="File with the CA certificates that etcd's are checked against.",
    )
    cert: Maybe[Text] = Field(
        default=None,
        description="File with the client certificate for etcd.",
    )
    key: Maybe[Text] = Field(
        default=None,
        description="File with the private key of `store.cert`.",
    )
    username: Maybe[Text] = Field(default=None, description="etcd user.")
    password: Maybe[Secret] = Field(
        default=None,
        description="Password of `store.username`, or `${NAME}`.",
    )


class JournalConfig(Section):
    """The event journal, which `narwhalctl replay` reads."""

    path: Maybe[Text] = Field(
        default=None,
        description="Directory of the event journal; `journal` in `store.path` unless told otherwise.",
    )
    max_bytes: Natural = Field(
        default=268435456,
        description="Bytes that all its files may take, at least 1048576; the oldest go first. 0 = no journal.",
    )


class LeaseConfig(Section):
    """The one lease that makes a control process the active one."""

    ttl_s: Interval = Field(
        default=3.0,
        description="Time to live, seconds (whole ones on etcd); renewed every third of it.",
    )
    safety_margin_s: Positive = Field(
        default=0.5,
        description="The holder fences itself this long before its lease can expire, seconds.",
    )


class StandbyConfig(Section):
    """When a standby replaces the active."""

    probe_interval_s: Interval = Field(
        default=0.25,
        description="Time between two readiness probes of the active, seconds.",
    )
    takeover_after: Count = Field(
        default=4,
        description="Consecutive answers `not control-ready` (or none) after which it asks the active to yield.",
    )
    max_handoff_age_s: Positive = Field(
        default=30.0,
        description="A standby whose copy of the state handoff is older does not take over, seconds.",
    )


class ThresholdsConfig(Section):
    """When role control moves an engine."""

    expand: Positive = Field(
        default=1.0,
        description="Load (measured latency over its target) from which a role wants another engine.",
    )
    shrink: Duration = Field(
        default=0.5,
        description="Load up to which a role can give one up.",
    )
    cooldown_s: Duration = Field(
        default=10.0,
        description="Least time between two moves, seconds.",
    )
    sustained_intervals: Count = Field(
        default=3,
        description="Monitor passes for which the load must last before a move.",
    )
    dwell_s: Duration = Field(
        default=30.0,
        description="An engine that moved stays at least this long, seconds.",
    )
    risk_window_s: Duration = Field(
        default=60.0,
        description="A role that misses its target this soon after giving up an engine gives up no more, seconds.",
    )


class ControllerConfig(Section):
    """The monitor and role control."""

    monitor_interval_s: Interval = Field(
        default=1.0,
        description="Time between the starts of two monitor passes, seconds.",
    )
    monitor_failure_limit: Count = Field(
        default=5,
        description="Consecutive passes with a failed stage after which admission closes.",
    )
    stage_timeout_s: Duration = Field(
        default=0.0,
        description="A stage that runs longer is cancelled and counts as failed, seconds; "
        "0 = ten monitor intervals, at least 5.",
    )
    mode: Literal["off", "advisory", "auto"] = Field(
        default="advisory",
        description="Role control: `off`, `advisory` (decide and show, change nothing) or `auto`.",
    )
    min_prefill: Count = Field(
        default=1,
        description="Engines that the prefill role keeps at least.",
    )
    min_decode: Count = Field(
        default=1,
        description="Engines that the decode role keeps at least.",
    )
    thresholds: ThresholdsConfig = Field(
        default=ThresholdsConfig(),
        description="When role control moves an engine.",
    )

    @property
    def stage_timeout(self) -> float:
        """The bound of a monitor stage that applies, seconds."""
        return self.stage_timeout_s or max(5.0, 10.0 * self.monitor_interval_s)


class ServingConfig(Section):
    """How a proxy admits, queues and retries requests."""

    max_connections: Count = Field(
        default=512,
        description="Seats and data connections of one proxy worker: one admitted request holds one seat.",
    )
    max_attempts: int = Field(
        default=1,
        ge=1,
        le=3,
        description="Attempts per request, the first one included; 1 to 3.",
    )
    queue_capacity: Natural = Field(
        default=0,
        description="Requests that may wait for a seat; 0 = a 429 at once.",
    )
    queue_timeout_s: Duration = Field(
        default=0.0,
        description="Longest wait in the queue, seconds.",
    )
    request_timeout_s: Positive = Field(
        default=600.0,
        description="Deadline of a request with its queueing and retries, seconds.",
    )
    client_timeout_s: Positive = Field(
        default=60.0,
        description="Longest that a client may take for a request's head, pause in its body, or not read its answer, "
        "seconds.",
    )
    prefill_timeout_s: Positive = Field(
        default=120.0,
        description="Longest time that a prefill leg may take, seconds.",
    )
    retry_base_s: Positive = Field(
        default=0.1,
        description="Backoff before the first retry, seconds; doubles with each.",
    )
    retry_cap_s: Positive = Field(default=1.0, description="Longest backoff, seconds.")
    retry_budget: Amount = Field(
        default=10.0,
        description="Retry credits of a worker at most; a retry takes one.",
    )
    retry_replenish: Amount = Field(
        default=0.1,
        description="Retry credits that a request which succeeds gives back.",
    )
    handoff_max_age_s: Positive = Field(
        default=25.0,
        description="A KV handoff older than this is not used, seconds; below `engine.kv_lease_s`.",
    )
    max_request_bytes: Count = Field(
        default=4_194_304,
        description="Largest request body, bytes; beyond it 413.",
    )
    graceful_timeout_s: Duration = Field(
        default=30.0,
        description="Time that running requests get after SIGTERM before they are cut, seconds.",
    )


class EngineSettings(Section):
    """How engines are spoken to: the protocol, its deadlines, its credential."""

    connector: Literal["vllm-nixl"] = Field(
        default="vllm-nixl",
        description="Adapter for the engines' KV transfer protocol.",
    )
    control_connections: Natural = Field(
        default=0,
        description="Connections reserved for health checks, probes and readmission; "
        "0 = twice the number of engines, at least 4.",
    )
    first_token_timeout_s: Positive = Field(
        default=5.0,
        description="Deadline of a decode leg's first token, seconds.",
    )
    kv_first_pull_timeout_s: Positive = Field(
        default=20.0,
        description="The same for the first transfer between two engines, which have to shake hands, seconds.",
    )
    decode_read_timeout_s: Positive = Field(
        default=60.0,
        description="Longest silence after the first token, seconds.",
    )
    connect_timeout_s: Positive = Field(
        default=10.0,
        description="Deadline of a connection attempt to an engine, seconds.",
    )
    pool_timeout_s: Positive = Field(
        default=5.0,
        description="Longest wait for a free connection of a pool, seconds.",
    )
    health_timeout_s: Positive = Field(
        default=5.0,
        description="Deadline of a health answer, seconds.",
    )
    keepalive_s: Positive = Field(
        default=4.0,
        description="An idle connection is dropped after this long, seconds; keep it below the engine's own limit.",
    )
    kv_lease_s: Positive = Field(
        default=30.0,
        description="Time for which the engines keep KV that nobody has pulled, seconds.",
    )
    tokenize: bool = Field(
        default=False,
        description="Ask a prefill engine how many tokens a prompt has, where some `max_inflight_tokens` asks for it; "
        "otherwise that is estimated from its bytes.",
    )
    tokenize_timeout_s: Positive = Field(
        default=2.0,
        description="Deadline of such a count, seconds.",
    )
    api_key: Maybe[HeaderSecret] = Field(
        default=None,
        description="Bearer token that the engines expect, or `${NAME}`.",
    )


class HealthConfig(Section):
    """Performance drift: an engine's decode latency against its own healthy baseline."""

    window_s: Interval = Field(
        default=30.0,
        description="Length of a measuring window, seconds.",
    )
    drift_band: float = Field(
        default=2.0,
        gt=1,
        le=1000,
        description="A window drifts above this many times the baseline.",
    )
    min_samples: Count = Field(
        default=3,
        description="Samples that a window needs to be judged.",
    )
    probation_windows: Count = Field(
        default=3,
        description="Drifting windows in a row that put the engine on probation.",
    )
    evict_windows: Count = Field(
        default=5,
        description="Drifting windows in a row that ask for an inference probe.",
    )
    recovery_windows: Count = Field(
        default=3,
        description="Good windows in a row that end probation.",
    )


class RecoveryConfig(Section):
    """When an engine is taken out, and how it comes back."""

    eject_after: Count = Field(
        default=3,
        description="Consecutive failures of one class that call for a verdict.",
    )
    readmit_every: Count = Field(
        default=10,
        description="Monitor passes between two attempts to readmit an engine.",
    )
    liveness_every: Natural = Field(
        default=10,
        description="Monitor passes between two liveness sweeps; 0 = no sweeps.",
    )
    liveness_misses: Count = Field(
        default=2,
        description="Consecutive silent sweeps that eject an engine.",
    )
    failure_quarantine_s: Duration = Field(
        default=0.0,
        description="Time for which one failure keeps new work off an engine, seconds; 0 = off.",
    )
    stall_s: Duration = Field(
        default=3.0,
        description="Silence of a stream on a silent engine that counts as a failure and is probed, seconds; 0 = off.",
    )
    silent_leg_s: Duration = Field(
        default=20.0,
        description="The same for a prefill or a non-streaming leg, seconds; above the longest prefill, and with time "
        "for a probe below `engine.kv_lease_s`; 0 = off.",
    )
    probe_tokens: Count = Field(
        default=16,
        description="Tokens that an inference probe must stream.",
    )
    relapse_window_s: Duration = Field(
        default=60.0,
        description="An engine that fails again this soon after passing a probe has relapsed, seconds.",
    )
    ramp_s: Duration = Field(
        default=30.0,
        description="Time over which the weight of a returned engine rises from a tenth to one, seconds.",
    )
    health: HealthConfig = Field(default=HealthConfig(), description="Performance drift.")


class ProxyConfig(Section):
    """What a proxy does while control is away."""

    placement_max_age_s: Duration = Field(
        default=600.0,
        description="Time for which the last placement is served without control, seconds; 0 = for ever.",
    )


class TlsConfig(Section):
    """Mutual TLS of the gRPC services; all three files or none."""

    ca: Maybe[Text] = Field(
        default=None,
        description="File with the CA certificates that peers are checked against.",
    )
    cert: Maybe[Text] = Field(
        default=None,
        description="File with the certificate of this side.",
    )
    key: Maybe[Text] = Field(
        default=None,
        description="File with the private key of `tls.cert`.",
    )

    @property
    def files(self) -> TlsFiles | None:
        """All three, None without TLS."""
        if self.ca is None or self.cert is None or self.key is None:
            return None
        return TlsFiles(ca=self.ca, cert=self.cert, key=self.key)


def _not_yet(_: str) -> str:
    raise refuse("this release does not check tokens; leave it out")


class AuthConfig(Section):
    """Who may call the gRPC services."""

    tokens_file: Maybe[Annotated[Text, AfterValidator(_not_yet)]] = Field(
        default=None,
        description="Kept for bearer tokens with roles. This release does not check any, and refuses a file that names "
        "one: until then `tls` decides who may call.",
    )
