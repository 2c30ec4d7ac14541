"""Failure evidence: what counts against an engine, what clears it, and what follows (spec F1–F5).

Decides: the class of an outcome, what a success clears, and what a class asks for. It cannot see: where an outcome
came from (incarnations, proxies at fault and order are judged before), nor probes. Pure.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from narwhal.vocabulary import FailureClass, Outcome, Phase

# Spec F2: what was seen → its class.
CLASS_OF = {
    Outcome.REFUSED: FailureClass.CONNECTION,
    Outcome.UNREACHABLE: FailureClass.CONNECTION,
    Outcome.RESET: FailureClass.CONNECTION,
    Outcome.TLS_FAILED: FailureClass.CONNECTION,
    Outcome.ANSWER_CUT: FailureClass.CONNECTION,
    Outcome.CONNECT_TIMEOUT: FailureClass.TIMEOUT,
    Outcome.PREFILL_TIMEOUT: FailureClass.TIMEOUT,
    Outcome.READ_TIMEOUT: FailureClass.TIMEOUT,
    Outcome.FIRST_TOKEN_TIMEOUT: FailureClass.STREAM,
    Outcome.STREAM_SILENT: FailureClass.STREAM,
    Outcome.STREAM_CUT: FailureClass.STREAM,
    Outcome.MARKER_WITHOUT_TOKEN: FailureClass.STREAM,
    Outcome.ERROR_EVENT: FailureClass.STREAM,
    Outcome.STREAM_MALFORMED: FailureClass.STREAM,
    Outcome.STALLED: FailureClass.STREAM,
    Outcome.HTTP_408: FailureClass.OVERLOAD,
    Outcome.HTTP_429: FailureClass.OVERLOAD,
    Outcome.HTTP_5XX: FailureClass.INFERENCE_STATUS,
    Outcome.HANDOFF_UNUSABLE: FailureClass.KV_HANDOFF,
}

# Spec F4: what a success clears. 401, 403 and 404 are 4xx like any other here; spec R9 treats them beside it.
CLEARS = {
    Outcome.CLIENT_ERROR: frozenset({FailureClass.CONNECTION, FailureClass.INFERENCE_STATUS}),
    Outcome.WRONG_IDENTITY: frozenset({FailureClass.CONNECTION, FailureClass.INFERENCE_STATUS}),
    Outcome.HANDOFF: frozenset({FailureClass.CONNECTION, FailureClass.INFERENCE_STATUS, FailureClass.KV_HANDOFF}),
    Outcome.STREAM_COMPLETE: frozenset({FailureClass.CONNECTION, FailureClass.INFERENCE_STATUS, FailureClass.STREAM}),
    Outcome.ANSWER_COMPLETE: frozenset({FailureClass.CONNECTION, FailureClass.INFERENCE_STATUS}),
}
# Spec F4, second row; liveness misses and the quarantine end with it.
CLEARED_BY_HEALTH = frozenset({FailureClass.CONNECTION, FailureClass.TIMEOUT, FailureClass.OVERLOAD})
# Spec F6: what a passed inference probe clears.
CLEARED_BY_INFERENCE = frozenset({FailureClass.STREAM, FailureClass.INFERENCE_STATUS, FailureClass.KV_HANDOFF})

# Spec F7: failures of a decode leg that may be its producer's doing. A leg that was refused never came to read.
REMEMBERS = frozenset({FailureClass.TIMEOUT, FailureClass.STREAM, FailureClass.INFERENCE_STATUS})

# Of these, what happens after the first token: the handoff had been read.
HAD_READ = frozenset({Outcome.STALLED, Outcome.STREAM_SILENT})

# Spec F5: neither for nor against an engine.
NEUTRAL = frozenset({Outcome.CANCELLED, Outcome.LOCAL, Outcome.DEADLINE})


class Action(StrEnum):
    """What follows when a class reaches the threshold (spec F3)."""

    EJECT = "eject"
    HEALTH_PROBE = "health probe"
    INFERENCE_PROBE = "inference probe"


VERDICT_OF = {
    FailureClass.CONNECTION: Action.EJECT,
    FailureClass.TIMEOUT: Action.HEALTH_PROBE,
    FailureClass.OVERLOAD: Action.HEALTH_PROBE,
    FailureClass.STREAM: Action.INFERENCE_PROBE,
    FailureClass.INFERENCE_STATUS: Action.INFERENCE_PROBE,
    FailureClass.KV_HANDOFF: Action.INFERENCE_PROBE,
}
# Which comes first when classes at the threshold ask for different things.
URGENCY = (Action.EJECT, Action.INFERENCE_PROBE, Action.HEALTH_PROBE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The newest failure of a class, as it was told; for people."""

    outcome: Outcome
    phase: Phase | None  # None: seen by control's own probe
    at: float
    proxy: str = ""  # id/slot; empty when control saw it itself
    status: int = 0
    detail: str = ""
    producer: str = ""
    request_id: str = ""


@dataclass(kw_only=True, slots=True)
class Evidence:
    """What counts against one engine now."""

    streaks: dict[FailureClass, int] = field(default_factory=dict)  # classes at zero are left out
    timeout_is_stream: bool = False  # after a relapse of `timeout`, until it is cleared (spec F11)
    stalls: int = 0  # how many of the `stream` streak are missing progress (spec F10)
    producers: dict[str, int] = field(default_factory=dict)  # of failed decode legs → incarnation, newest last (F7)
    own: bool = False  # some failure of these classes was not one of reading from a remembered producer
    totals: dict[FailureClass, int] = field(default_factory=dict)  # counted since this process began
    last: dict[FailureClass, Seen] = field(default_factory=dict)

    def add(self, failure: FailureClass, seen: Seen, count: int) -> None:
        """`count` failures of one class, and of no other (spec F1)."""
        self.streaks[failure] = self.streaks.get(failure, 0) + count
        self.totals[failure] = self.totals.get(failure, 0) + count
        self.last[failure] = seen
        if seen.outcome is Outcome.STALLED:
            self.stalls += count

    def blame(self, producer: str, incarnation: int) -> None:
        """Remember the producer whose handoff a failed decode leg read (spec F7)."""
        self.producers.pop(producer, None)
        self.producers[producer] = incarnation

    def clear(self, classes: frozenset[FailureClass], *, held: bool = False) -> bool:
        """End these streaks; returns whether any was running.

        `held`: the engine is on the verification hold. What it reads well meanwhile, from other producers, does not
        make the producers of its failures any better: they stay remembered until the probe has its answer.
        """
        ended = [c for c in classes if self.streaks.pop(c, 0)]
        if FailureClass.STREAM in ended:
            self.stalls = 0
        if FailureClass.TIMEOUT in ended:
            self.timeout_is_stream = False
        if not held and not REMEMBERS & self.streaks.keys():
            self.forget_producers()
        return bool(ended)

    def forget_producers(self) -> None:
        """The failures that they are remembered from are over."""
        self.producers.clear()
        self.own = False
