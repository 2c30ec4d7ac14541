"""What comes out of the core: what the shell is asked to do, and to tell. Pure, frozen, kept in the journal.

Effects ask for outside work only. Publishing and persisting are not effects: the loop compares placement content and
handoff revision with what it last sent and stored.
"""

from dataclasses import dataclass

from narwhal.control.core.records import Record
from narwhal.vocabulary import Check


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCheck:
    """Run one check on one engine through the control pool, and answer with `CheckAnswered`."""

    engine: str
    url: str
    incarnation: int
    number: int
    check: Check
    model: str = ""  # the configured model
    timeout_s: float = 0.0  # for each answer of the engine
    attestation_url: str = ""  # where its attestation document is, for that check


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeHealth:
    """Ask one engine for its health through the control pool, and answer with `HealthAnswered`, always."""

    engine: str
    url: str
    incarnation: int
    number: int
    timeout_s: float  # for an HTTP answer, once a control connection is there
    identity: bool = False  # read the process identity too


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One engine that a probe speaks to."""

    engine: str
    url: str
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeInference:
    """Run one inference through the control pool, and answer with `InferenceAnswered`, always.

    With a producer: take the consumer's connection first, so that a consumer that cannot be reached leaves no KV behind
    (then `produced` is None); a prefill leg on the producer; the decode leg on the consumer reads its handoff. Without:
    a completion without a handoff on the consumer. The decode leg streams `tokens` tokens to its terminal marker.
    """

    engine: str  # on whose account; producer, consumer or both may be others
    incarnation: int
    number: int
    model: str
    tokens: int
    producer: Target | None
    consumer: Target
    silence_s: float  # a leg that gives nothing for this long has failed (spec F6)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTransfer:
    """One KV transfer of a gate (spec R2): as `ProbeInference` with a producer, answered with `TransferAnswered`."""

    engine: str  # on whose account; its incarnation and number name the answer
    incarnation: int
    number: int
    model: str
    tokens: int
    producer: Target
    consumer: Target
    silence_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureIdentity:
    """Read which process runs an engine, and answer with `IdentityCaptured`, always."""

    engine: str
    url: str
    incarnation: int
    number: int
    timeout_s: float


Effect = Record | RunCheck | ProbeHealth | ProbeInference | RunTransfer | CaptureIdentity
