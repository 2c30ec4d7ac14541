"""What proxies tell control: who speaks, and what was seen, in order (spec S6). Shared values of both sides. Pure.

A batch is a list of runs in the order things happened. Successes of one engine, phase and incarnation are run-lengths;
a failure is told in full and ends the run before it.
"""

from dataclasses import dataclass, field

from narwhal.measures import LegMeasures
from narwhal.vocabulary import Outcome, Phase


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ProxyKey:
    """One proxy worker process. A newer boot of the same (id, slot) retires the older."""

    id: str
    slot: int
    boot: int  # microseconds since the Unix epoch at process start

    def __str__(self) -> str:
        return f"{self.id}/{self.slot}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LegFailure:
    """One failed leg, in full."""

    outcome: Outcome
    producer: str = ""  # the engine the handoff came from; empty for a prefill leg
    producer_incarnation: int = 0
    status: int = 0  # HTTP status, 0 when no response began
    detail: str = ""  # one line for operators: what the proxy saw
    request_id: str = ""
    elapsed_s: float = 0.0  # from the leg's start to its failure
    engine_silent: bool = False  # the engine had given nothing to any leg of the proxy for `recovery.stall_s`


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """`count` equal outcomes in a row on one engine, phase and incarnation; a failure has count 1 and its details.

    Neutral outcomes (cancelled, local, deadline) travel as counted runs too: totals need them, evidence ignores them.
    """

    engine: str
    phase: Phase
    incarnation: int
    outcome: Outcome
    count: int = 1
    failure: LegFailure | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a run counts at least one outcome, got {self.count}")
        if self.failure is not None and (self.count != 1 or self.failure.outcome is not self.outcome):
            raise ValueError("a failure is a run of one and repeats its outcome")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestCounts:
    """Client requests that ended since the batch before, by result, and the retries made for them."""

    served: int = 0
    failed: int = 0
    rejected: int = 0
    cancelled: int = 0
    retried: int = 0

    def __bool__(self) -> bool:
        return bool(self.served or self.failed or self.rejected or self.cancelled or self.retried)

    def plus(self, other: "RequestCounts") -> "RequestCounts":
        """The sum, field by field."""
        return RequestCounts(
            served=self.served + other.served,
            failed=self.failed + other.failed,
            rejected=self.rejected + other.rejected,
            cancelled=self.cancelled + other.cancelled,
            retried=self.retried + other.retried,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One numbered report. Sequences of a proxy key start at 1 and rise by one; a resent batch equals the first, but
    has no measures: those speak of a time that is over."""

    proxy: ProxyKey
    sequence: int
    runs: tuple[Run, ...] = ()
    requests: RequestCounts = field(default_factory=RequestCounts)
    measures: tuple[LegMeasures, ...] = ()
    measured_s: float = 0.0  # over how many seconds, up to now, the measures were taken
