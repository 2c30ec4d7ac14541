"""The closed words of Narwhal: the same word in the spec, the wire, the metric label, the log field and the error body.

Pure: nothing here does anything. A word that crosses the wire is mapped to its protobuf number in `narwhal.wire`.
"""

from enum import StrEnum


class Phase(StrEnum):
    """One of the two halves of a request; also an engine's role (the phase it is assigned)."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> "Phase":
        """The opposite phase."""
        return Phase.DECODE if self is Phase.PREFILL else Phase.PREFILL


class FailureClass(StrEnum):
    """The classes of evidence (spec F1). Only the control plane assigns them."""

    CONNECTION = "connection"
    TIMEOUT = "timeout"
    STREAM = "stream"
    OVERLOAD = "overload"
    INFERENCE_STATUS = "inference_status"
    KV_HANDOFF = "kv_handoff"


class Outcome(StrEnum):
    """What a proxy or a probe saw of one leg, before anybody judges it (the left column of spec F2 and F4, and F5)."""

    # Successes.
    HANDOFF = "handoff"  # prefill answered 200 with a usable KV handoff
    STREAM_COMPLETE = "stream_complete"  # terminal marker, at least one token before it, no error event
    ANSWER_COMPLETE = "answer_complete"  # complete non-streaming decode answer
    CLIENT_ERROR = "client_error"  # 4xx other than 408 and 429, the engine judged the request

    # Before a response, or a non-streaming answer cut short.
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    RESET = "reset"  # reset or closed before a response began
    TLS_FAILED = "tls_failed"
    ANSWER_CUT = "answer_cut"

    # Transport time-outs.
    CONNECT_TIMEOUT = "connect_timeout"
    PREFILL_TIMEOUT = "prefill_timeout"
    READ_TIMEOUT = "read_timeout"  # header or read time-out of a non-streaming decode leg

    # Streams.
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    STREAM_SILENT = "stream_silent"
    STREAM_CUT = "stream_cut"  # closed without its terminal marker
    MARKER_WITHOUT_TOKEN = "marker_without_token"
    ERROR_EVENT = "error_event"  # inside a 200 stream, whether or not the terminal marker follows
    STREAM_MALFORMED = "stream_malformed"
    STALLED = "stalled"  # no forward progress (spec F10); the leg goes on

    # Statuses.
    HTTP_408 = "http_408"
    HTTP_429 = "http_429"
    HTTP_5XX = "http_5xx"
    WRONG_IDENTITY = "wrong_identity"  # 401, 403, or 404 for the configured model (spec R9)

    # Prefill answered 200 without a usable KV handoff.
    HANDOFF_UNUSABLE = "handoff_unusable"

    # Nothing of these is evidence against an engine (spec F5).
    CANCELLED = "cancelled"  # the client went away
    LOCAL = "local"  # the proxy's own causes: descriptors, pool, ports, resolver
    DEADLINE = "deadline"  # the request's own deadline cut the leg before the engine's limits would have


class RequestResult(StrEnum):
    """How one client request ended, as the durable counters count it (spec S1)."""

    SERVED = "served"
    FAILED = "failed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class Hold(StrEnum):
    """Reasons that keep new work off an engine (spec H1)."""

    JOINING = "joining"
    EJECTED = "ejected"
    DRAIN = "drain"
    MAINTENANCE = "maintenance"
    DRIFT = "drift"
    QUARANTINE = "quarantine"
    RELAPSE = "relapse"
    VERIFICATION = "verification"


HARD_HOLDS = frozenset({Hold.JOINING, Hold.EJECTED, Hold.DRAIN, Hold.MAINTENANCE})
SOFT_HOLDS = frozenset(Hold) - HARD_HOLDS


class RiskKind(StrEnum):
    """How a role that gave up an engine turned out to be short of it (spec C4)."""

    TARGET_MISSED = "target missed"  # of its latency
    FIRST_TOKEN_LATE = "first token late"  # one did not come in time


class Check(StrEnum):
    """The checks of the readmission gate, in the order of spec R1."""

    HEALTH = "health"
    ATTESTATION = "attestation"
    MODEL = "model"
    GENERATION = "generation"
    KV_TRANSFER = "kv_transfer"
    FINAL_HEALTH = "final_health"


class Verdict(StrEnum):
    """Answer of a check or of a probe leg. Every asker handles all of them."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    NOT_CONFIGURED = "not configured"
    NOT_TESTED = "not tested"


class Stage(StrEnum):
    """The stages of a monitor pass, in the order of spec M1."""

    CONTROLLER = "controller"
    HEALTH = "health"
    DRAINS = "drains"
    ROLLOVER = "rollover"
    READMISSION = "readmission"
    LIVENESS = "liveness"
    TELEMETRY = "telemetry"
    HANDOFF = "handoff"


class NotReady(StrEnum):
    """Fixed reasons of /ready, of closed admission and of a 503's error code (spec M9, M10). `monitoring degraded` is
    followed by the stage and the exception class."""

    STANDBY = "standby"
    FENCED = "fenced"
    DEGRADED = "monitoring degraded"
    MAINTENANCE = "maintenance"
    NO_ENGINES = "no eligible engines"
    NO_PLACEMENT = "no placement"
    PLACEMENT_STALE = "placement stale"
    DRAINING = "draining"  # a proxy on its way out after SIGTERM
