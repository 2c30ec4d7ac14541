"""One request's machine: prefill → decode → done, with the attempts that its policy allows (spec V2–V6, V8, V9). Pure.

Decides: which leg comes next, which engines it keeps away from, whether a failure is tried again, and what the client
is told when it is not. It cannot see: bytes, connections, which engine was chosen and why, or the clock.
"""

from enum import StrEnum
from typing import NamedTuple

from narwhal.proxy.admission import RetryBudget
from narwhal.vocabulary import Outcome, Phase


class State(StrEnum):
    """Where a request is."""

    NEW = "new"
    PREFILL = "prefill"  # a prefill leg runs
    HELD = "held"  # its KV handoff is in hand, the decode leg is being placed
    DECODE = "decode"  # the handoff was sent to a decode engine
    BACKOFF = "backoff"  # between two attempts; no leg runs
    DONE = "done"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.NEW: frozenset({State.PREFILL, State.DONE}),
    State.PREFILL: frozenset({State.HELD, State.BACKOFF, State.PREFILL, State.DONE}),
    State.HELD: frozenset({State.DECODE, State.BACKOFF, State.PREFILL, State.DONE}),
    # Never DECODE → HELD: a handoff is sent to one decode leg (spec V5).
    State.DECODE: frozenset({State.BACKOFF, State.PREFILL, State.DONE}),
    State.BACKOFF: frozenset({State.PREFILL, State.DONE}),
    State.DONE: frozenset(),
}


class Fault(StrEnum):
    """Why a request that got past its body ends without an engine's answer; `errors.py` has the HTTP of each."""

    UPSTREAM = "upstream"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    ENGINE_BUSY = "engine_busy"
    ENGINE_IDENTITY = "engine_identity"
    SATURATED = "saturated"
    NO_ENGINES = "no_engines"
    CLOSED = "closed"  # admission is closed; the reason of /ready goes with it
    QUEUE = "queue"
    DEADLINE = "deadline"


# What the client is told when a leg's failure ends the request before any output.
FAULTS: dict[Outcome, Fault] = {
    Outcome.REFUSED: Fault.UPSTREAM,
    Outcome.UNREACHABLE: Fault.UPSTREAM,
    Outcome.RESET: Fault.UPSTREAM,
    Outcome.TLS_FAILED: Fault.UPSTREAM,
    Outcome.ANSWER_CUT: Fault.UPSTREAM,
    Outcome.CONNECT_TIMEOUT: Fault.UPSTREAM_TIMEOUT,
    Outcome.PREFILL_TIMEOUT: Fault.UPSTREAM_TIMEOUT,
    Outcome.READ_TIMEOUT: Fault.UPSTREAM_TIMEOUT,
    Outcome.FIRST_TOKEN_TIMEOUT: Fault.UPSTREAM_TIMEOUT,
    Outcome.STREAM_SILENT: Fault.UPSTREAM_TIMEOUT,
    Outcome.STREAM_CUT: Fault.UPSTREAM,
    Outcome.MARKER_WITHOUT_TOKEN: Fault.UPSTREAM,
    Outcome.ERROR_EVENT: Fault.UPSTREAM,
    Outcome.STREAM_MALFORMED: Fault.UPSTREAM,
    Outcome.HTTP_408: Fault.UPSTREAM_TIMEOUT,
    Outcome.HTTP_429: Fault.ENGINE_BUSY,
    Outcome.HTTP_5XX: Fault.UPSTREAM,
    Outcome.WRONG_IDENTITY: Fault.ENGINE_IDENTITY,
    Outcome.HANDOFF_UNUSABLE: Fault.UPSTREAM,
    Outcome.LOCAL: Fault.SATURATED,  # no descriptor, no port: this worker has no room
    Outcome.DEADLINE: Fault.DEADLINE,
}

# Failures that another attempt may follow (spec V4); of the 5xx only those statuses. An engine that says 401, 403
# or 404 judges itself and not the request (spec R9).
RETRIED = frozenset(FAULTS) - {Outcome.LOCAL, Outcome.DEADLINE}
RETRIED_STATUSES = frozenset({500, 502, 503, 504})


class Policy(NamedTuple):
    """The settings that one request lives by, as they were when it came."""

    max_attempts: int
    handoff_max_age_s: float


class LegEnd(NamedTuple):
    """How a leg ended that did not do its work."""

    outcome: Outcome
    status: int = 0
    retry_after: str = ""  # the engine's own Retry-After, where it gave one
    idle_closed: bool = False  # a reused connection closed at once, before any byte of an answer came (spec V9)
    detail: str = ""  # for operators


class StartLeg(NamedTuple):
    """Start a leg of `phase`, on none of `avoid` while another engine can serve."""

    phase: Phase
    attempt: int
    avoid: frozenset[str]
    fresh: bool  # on a new connection, not on an idle one


class Backoff(NamedTuple):
    """Wait until the monotonic instant `until`, then ask `resume`."""

    until: float


class Fail(NamedTuple):
    """Tell the client: an error before any output, an error event after it."""

    fault: Fault
    phase: Phase
    retry_after: str = ""


class Pass(NamedTuple):
    """Pass the engine's answer to the client as it is."""


Step = StartLeg | Backoff | Fail | Pass


class IllegalTransition(Exception):
    """The performer did something that the machine does not allow; nothing has changed."""


NOBODY: frozenset[str] = frozenset()


class Attempt:
    """The machine. Its methods tell it what happened and return what to do next."""

    __slots__ = (
        "_budget",
        "_due",
        "_extra",
        "_failed",
        "_handoff_at",
        "_policy",
        "_producer",
        "number",
        "retries",
        "state",
    )

    def __init__(self, policy: Policy, budget: RetryBudget, due: float) -> None:
        """`due`: the request's own deadline, a monotonic instant."""
        self._policy = policy
        self._budget = budget
        self._due = due
        self._failed = NOBODY
        self._producer = ""
        self._handoff_at = 0.0
        self._extra = 0  # attempts that do not count (spec V9)
        self.state = State.NEW
        self.number = 0
        self.retries = 0

    @property
    def phase(self) -> Phase:
        """The phase that the request is in, for errors and reports."""
        return Phase.DECODE if self.state in (State.HELD, State.DECODE) else Phase.PREFILL

    def begin(self) -> StartLeg:
        """The request has its seat."""
        return self._prefill()

    def avoid(self, step: StartLeg, engine: str) -> StartLeg:
        """`engine` failed the request in passing: the leg of `step`, which has not begun, and later ones avoid it."""
        self._failed |= {engine}
        return step._replace(avoid=step.avoid | {engine})

    def prefilled(self, producer: str, now: float) -> StartLeg:
        """The prefill leg on `producer` gave a usable KV handoff, not before `now`."""
        self._move(State.HELD)
        self._producer = producer
        self._handoff_at = now
        return StartLeg(Phase.DECODE, self.number, self._failed | {producer}, self._extra > 0)

    @property
    def handoff_due(self) -> float:
        """When the handoff is too old to be used (spec V6)."""
        return self._handoff_at + self._policy.handoff_max_age_s

    def may_dispatch(self, now: float) -> bool:
        """Whether the handoff is still young enough to be sent on (spec V6)."""
        return now < self.handoff_due

    def dispatched(self) -> None:
        """The handoff is about to be written to a decode engine; it can never be sent again."""
        self._move(State.DECODE)

    def loaded(self) -> None:
        """The decode engine has read the handoff into its cache: the producer has no part in what follows."""
        if self.state is not State.DECODE:
            raise IllegalTransition(f"no handoff was sent in state {self.state}")
        self._producer = ""

    def expired(self, now: float, wait_s: float) -> Step:
        """The handoff grew too old before it could be sent: the attempt ends, no engine is to blame. `wait_s`: how long
        to wait before another one."""
        if self.state is not State.HELD:
            raise IllegalTransition(f"no handoff is held in state {self.state}")
        return self._again(now, wait_s) or self._end(Fault.UPSTREAM_TIMEOUT)

    def unplaced(self, fault: Fault) -> Step:
        """No engine can take the leg."""
        return self._end(fault)

    def answered(self) -> Pass:
        """The decode leg's whole answer is there, or an engine has judged the request itself (4xx)."""
        self._move(State.DONE)
        return Pass()

    def cancelled(self) -> None:
        """The client went away."""
        if self.state is not State.DONE:
            self._move(State.DONE)

    def leg_failed(self, engine: str, end: LegEnd, *, output: bool, now: float, wait_s: float) -> Step:
        """The running leg on `engine` failed. `output`: the client has already got bytes of an answer; `wait_s`: how
        long to wait before another attempt, if there is one."""
        if self.state not in (State.PREFILL, State.HELD, State.DECODE):
            raise IllegalTransition(f"no leg runs in state {self.state}")
        phase = self.phase
        if end.idle_closed and phase is Phase.DECODE and not self._extra:
            self._extra = 1
            return self._prefill()
        if not output and end.outcome in RETRIED and (end.status < 500 or end.status in RETRIED_STATUSES):
            self._failed |= {engine, self._producer} if self._producer else {engine}
            again = self._again(now, wait_s)
            if again is not None:
                return again
        return self._end(FAULTS[end.outcome], end.retry_after)

    def resume(self) -> StartLeg:
        """The backoff is over."""
        if self.state is not State.BACKOFF:
            raise IllegalTransition(f"nothing to resume in state {self.state}")
        return self._prefill()

    def _again(self, now: float, wait_s: float) -> Backoff | None:
        """Another attempt after a backoff, or None when policy, deadline or budget do not allow one."""
        if self.number - self._extra >= self._policy.max_attempts:
            return None
        until = now + wait_s
        if until >= self._due or not self._budget.take():
            return None
        self._move(State.BACKOFF)
        self.retries += 1
        return Backoff(until)

    def _prefill(self) -> StartLeg:
        self._move(State.PREFILL)
        self.number += 1
        self._producer = ""
        return StartLeg(Phase.PREFILL, self.number, self._failed, False)

    def _end(self, fault: Fault, retry_after: str = "") -> Fail:
        phase = self.phase
        self._move(State.DONE)
        return Fail(fault, phase, retry_after)

    def _move(self, to: State) -> None:
        if to not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.state} → {to}")
        self.state = to
