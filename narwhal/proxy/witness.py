"""Tells of legs: to control what was seen, to the metrics what is counted, to the log what failed. Judges nothing."""

from collections.abc import Callable, MutableMapping
from typing import NamedTuple

import structlog

from narwhal.clock import Clock
from narwhal.placement import EngineEntry
from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.metrics import Metrics
from narwhal.proxy.outcome import NEUTRALS, LegKind
from narwhal.proxy.seams import Reporter
from narwhal.reports import LegFailure, Run
from narwhal.vocabulary import Outcome, Phase

# What an engine does only by generating.
PROGRESS = frozenset({Outcome.HANDOFF, Outcome.STREAM_COMPLETE, Outcome.ANSWER_COMPLETE})
# Streams that ended because nothing came any more (spec F10).
SILENCES = frozenset({Outcome.FIRST_TOKEN_TIMEOUT, Outcome.STREAM_SILENT})
MAX_DETAIL = 400  # characters of what an engine said that are passed on to operators

log = structlog.get_logger(__name__)


class Leg(NamedTuple):
    """A leg that runs or has run."""

    entry: EngineEntry
    phase: Phase
    kind: LegKind
    started_at: float  # monotonic seconds


class Witness:
    """Stands by every leg's end."""

    def __init__(
        self,
        reporter: Reporter,
        metrics: Metrics,
        clock: Clock,
        *,
        heard_at: MutableMapping[str, float],
        stall_s: Callable[[], float],
    ) -> None:
        """`heard_at`: when anything last came from an engine, by its URL; `stall_s`: how long a silence is told of, 0:
        none is."""
        self._heard_at = heard_at
        self._stall_s = stall_s
        self._reporter = reporter
        self._metrics = metrics
        self._clock = clock

    def succeeded(self, leg: Leg, outcome: Outcome) -> None:
        """The leg did its work, or the engine judged the request itself."""
        entry, phase = leg.entry, leg.phase
        if outcome in PROGRESS:
            self._heard_at[entry.url] = self._clock.monotonic()  # it may be over before the watchdog has looked
        self._metrics.leg(entry.id, phase, outcome)
        self._reporter.success(entry.id, phase, entry.incarnation, outcome)

    def neutral(self, leg: Leg, outcome: Outcome) -> None:
        """The leg ended for a reason that is no evidence (spec F5)."""
        entry, phase = leg.entry, leg.phase
        self._metrics.leg(entry.id, phase, outcome)
        self._reporter.neutral(entry.id, phase, entry.incarnation, outcome)

    def stalled(self, leg: Leg, *, quiet_s: float, producer: EngineEntry | None, request_id: str, attempt: int) -> None:
        """The leg has given nothing for `quiet_s`, nor has its engine to any other leg. It goes on (spec F10)."""
        end = LegEnd(Outcome.STALLED, detail=f"nothing came for {quiet_s:.1f} s")
        self.failed(leg, end, producer=producer, request_id=request_id, attempt=attempt)

    def failed(self, leg: Leg, end: LegEnd, *, producer: EngineEntry | None, request_id: str, attempt: int) -> None:
        """The leg failed, or is suspected to. `producer`: where a decode leg's handoff came from; `request_id` is the
        client's."""
        entry = leg.entry
        detail = end.detail[:MAX_DETAIL]
        log.warning(
            "leg_failed",
            request_id=request_id,
            engine=entry.id,
            phase=leg.phase.value,
            outcome=end.outcome.value,
            status=end.status,
            attempt=attempt,
            detail=detail,
        )
        if end.outcome in NEUTRALS:
            self.neutral(leg, end.outcome)
            return
        self._metrics.leg(entry.id, leg.phase, end.outcome)
        failure = LegFailure(
            outcome=end.outcome,
            producer=producer.id if producer else "",
            producer_incarnation=producer.incarnation if producer else 0,
            status=end.status,
            detail=detail,
            request_id=f"{request_id}-{attempt}-{leg.phase.value}",
            elapsed_s=self._clock.monotonic() - leg.started_at,
            engine_silent=end.outcome in SILENCES and self._silent(entry.url),
        )
        self._reporter.failure(
            Run(engine=entry.id, phase=leg.phase, incarnation=entry.incarnation, outcome=end.outcome, failure=failure)
        )

    def _silent(self, url: str) -> bool:
        """Whether nothing has come from the engine, to any leg, for as long as is told of."""
        return 0 < self._stall_s() <= self._clock.monotonic() - self._heard_at.get(url, 0.0)
