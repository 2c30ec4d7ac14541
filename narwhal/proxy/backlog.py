"""What a proxy worker has yet to tell control: outcomes in order, cut into numbered batches, kept until acknowledged.

Decides: what merges with what, what a batch holds, what may be forgotten (spec S6). It cannot see: connections, clocks.

Order is kept per engine: an outcome is never moved across a failure of its own engine. Successes, and outcomes that are
nobody's fault, merge into one run for as long as no failure of that engine comes between.

Memory stays bounded while control is away. Up to `kept` runs wait in full. Beyond that the older half gives up its
order and its details and becomes counts per engine, phase and outcome under incarnation 0, which no engine has: totals
stay exact. The last success of each kind there keeps its place: failures from before and after the half would else look
like failures in a row. Control thereby judges an engine by the newest runs, and never more harshly than it deserves.
"""

from collections import deque
from dataclasses import dataclass, replace

from narwhal.measures import LegMeasures
from narwhal.reports import Batch, LegFailure, ProxyKey, RequestCounts, Run
from narwhal.vocabulary import Outcome, Phase, RequestResult

RUNS_KEPT = 4096
RUNS_PER_BATCH = 1000  # a batch of failures with long details stays far below gRPC's 4 MiB a message
NO_INCARNATION = 0  # incarnations start at 1: control counts such a run and takes it for nobody's evidence


@dataclass(slots=True, eq=False)
class _Pending:
    """A run that no batch holds yet. Successes arrive by the thousand a second: they cost one addition here."""

    engine: str
    phase: Phase
    incarnation: int
    outcome: Outcome
    count: int = 1
    failure: LegFailure | None = None

    def run(self) -> Run:
        return Run(
            engine=self.engine,
            phase=self.phase,
            incarnation=self.incarnation,
            outcome=self.outcome,
            count=self.count,
            failure=self.failure,
        )


class Backlog:
    """Everything of one proxy worker that is not acknowledged."""

    def __init__(self, proxy: ProxyKey, *, kept: int = RUNS_KEPT) -> None:
        self.proxy = proxy
        self.unacknowledged = 0  # outcomes of legs, sent or not
        self._kept = self._limit = kept
        self._sequence = 0
        self._sent: deque[Batch] = deque()
        self._ordered: deque[_Pending] = deque()
        self._growing: dict[str, dict[tuple[Phase, int, Outcome], _Pending]] = {}  # by engine: since its last failure
        self._folded: dict[tuple[str, Phase, Outcome], _Pending] = {}
        self._requests = dict.fromkeys(RequestResult, 0)
        self._retried = 0

    # --- in ---------------------------------------------------------------------------------------------------------

    def merge(self, engine: str, phase: Phase, incarnation: int, outcome: Outcome) -> None:
        """One leg ended well, or for a reason that is no evidence."""
        self.unacknowledged += 1
        since_failure = self._growing.get(engine)
        if since_failure is None:
            since_failure = self._growing[engine] = {}
        key = (phase, incarnation, outcome)
        pending = since_failure.get(key)
        if pending is not None:
            pending.count += 1
            return
        since_failure[key] = pending = _Pending(engine, phase, incarnation, outcome)
        self._append(pending)

    def failure(self, run: Run) -> None:
        """One leg failed. What comes after it on this engine stays after it."""
        self.unacknowledged += run.count
        self._growing.pop(run.engine, None)
        self._append(_Pending(run.engine, run.phase, run.incarnation, run.outcome, run.count, run.failure))

    def request(self, result: RequestResult, retries: int) -> None:
        """A client request ended, after so many retries."""
        self._requests[result] += 1
        self._retried += retries

    # --- out --------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether there is anything that no batch holds yet."""
        return bool(self._ordered or self._folded or any(self._requests.values()) or self._retried)

    @property
    def unacknowledged_requests(self) -> int:
        """Client requests that have ended and are not acknowledged, sent or not."""
        told = (batch.requests for batch in self._sent)
        return sum(self._requests.values()) + sum(r.served + r.failed + r.rejected + r.cancelled for r in told)

    @property
    def sent(self) -> tuple[Batch, ...]:
        """Batches that were cut and are not acknowledged, oldest first: exactly what a new stream must repeat. Their
        measures are not among that: they would tell of now what was then."""
        return tuple(self._sent)

    def cut(self, measures: tuple[LegMeasures, ...] = (), measured_s: float = 0.0) -> Batch | None:
        """The next batch, numbered and from now on unchangeable; None when nothing waits and there are no `measures`,
        taken over the last `measured_s`, to go with it."""
        if not self.waiting and not measures:
            return None
        taken = list(self._folded.values())  # as many as engines, phases and outcomes can make at most
        self._folded.clear()
        while self._ordered and len(taken) < RUNS_PER_BATCH:
            taken.append(self._ordered.popleft())
        self._stop_growing(taken)
        self._sequence += 1
        batch = Batch(
            proxy=self.proxy,
            sequence=self._sequence,
            runs=tuple(pending.run() for pending in taken),
            requests=self._cut_requests(),
        )
        self._sent.append(batch)
        return replace(batch, measures=measures, measured_s=measured_s) if measures else batch

    def acknowledge(self, sequence: int) -> None:
        """Control has stored everything up to and including `sequence`. One that was never cut raises ValueError."""
        if sequence > self._sequence:
            raise ValueError(f"acknowledged batch {sequence} of {self._sequence}")
        while self._sent and self._sent[0].sequence <= sequence:
            self.unacknowledged -= sum(run.count for run in self._sent.popleft().runs)

    # --- within -----------------------------------------------------------------------------------------------------

    def _append(self, pending: _Pending) -> None:
        self._ordered.append(pending)
        if len(self._ordered) > self._limit:
            self._fold()

    def _is_growing(self, pending: _Pending) -> bool:
        key = (pending.phase, pending.incarnation, pending.outcome)
        return self._growing.get(pending.engine, {}).get(key) is pending

    def _stop_growing(self, taken: list[_Pending]) -> None:
        for pending in taken:
            if self._is_growing(pending):
                since_failure = self._growing[pending.engine]
                del since_failure[(pending.phase, pending.incarnation, pending.outcome)]
                if not since_failure:
                    del self._growing[pending.engine]

    def _cut_requests(self) -> RequestCounts:
        counts = RequestCounts(
            served=self._requests[RequestResult.SERVED],
            failed=self._requests[RequestResult.FAILED],
            rejected=self._requests[RequestResult.REJECTED],
            cancelled=self._requests[RequestResult.CANCELLED],
            retried=self._retried,
        )
        self._requests = dict.fromkeys(RequestResult, 0)
        self._retried = 0
        return counts

    def _fold(self) -> None:
        """Turn the older half of the runs into counts, but for what still grows and the last success of each kind."""
        older = [self._ordered.popleft() for _ in range(len(self._ordered) // 2)]
        last = {(p.engine, p.phase, p.incarnation, p.outcome): p for p in older if p.failure is None}
        staying = {id(pending) for pending in last.values()}
        self._ordered.extendleft(reversed([p for p in older if id(p) in staying]))
        # However many kinds there are: each folding is to rid us of a quarter of the runs at least.
        self._limit = max(self._kept, 4 * len(staying))
        for pending in older:
            if id(pending) in staying:
                continue
            key = (pending.engine, pending.phase, pending.outcome)
            into = self._folded.get(key)
            if into is None:
                self._folded[key] = _Pending(
                    pending.engine, pending.phase, NO_INCARNATION, pending.outcome, pending.count
                )
            else:
                into.count += pending.count
