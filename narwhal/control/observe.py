"""What happened, told once and rendered three ways: a log line, an entry of the bounded journal, a count.

The words of a record are the core's (or the shell's, for what the process itself does); nothing is phrased here.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from narwhal.clock import Clock
from narwhal.control.core.events import Answer, CheckAnswered, HealthAnswered, TransferAnswered
from narwhal.control.core.evidence import Action
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.transfers import Fault, judged
from narwhal.vocabulary import Check, Outcome, Verdict

# Kinds that an operator may have to act on; everything else is information.
_WARNINGS = frozenset(
    {
        EventKind.ENGINE_CHECK_FAILED,
        EventKind.ENGINE_EJECTED,
        EventKind.HOLD_PLACED,
        EventKind.LAST_ENGINE_KEPT,
        EventKind.DRAIN_OVERDUE,
        EventKind.UNDRAIN_FAILED,
        EventKind.RELAPSED,
        EventKind.PRODUCER_BLAMED,
        EventKind.CONTROL_CUT_OFF,
        EventKind.PROXY_SUSPECT,
        EventKind.ROLE_RISK,
        EventKind.FLEET_SLOW,
        EventKind.PROXY_LOST,
        EventKind.PLACEMENT_REFUSED,
        EventKind.STAGE_FAILED,
        EventKind.NOT_READY,
        EventKind.HANDOFF_NOT_RESUMED,
        EventKind.STORE_FAILED,
        EventKind.STORE_WARNING,
        EventKind.JOURNAL_FAILED,
        EventKind.RELOAD_REFUSED,
        EventKind.CONTROL_YIELDED,
        EventKind.YIELD_REFUSED,
        EventKind.ACTIVE_MISSED,
    }
)
# Counters whose first label is no engine.
OF_THE_FLEET = frozenset({"role_moves_total", "role_proposals_total"})
_ERRORS = frozenset({EventKind.MONITOR_DEGRADED, EventKind.CONTROL_FENCED})

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One journal entry."""

    sequence: int  # from 1, rising by one
    at: float  # seconds since the Unix epoch
    boottime: float  # seconds since the machine's boot: what happened on one machine is in this order
    record: Record


class Observer:
    """Takes records; one per process."""

    def __init__(self, clock: Clock, *, capacity: int = 4096) -> None:
        """`capacity`: entries that are kept for those who come later."""
        self._clock = clock
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self._sequence = 0
        self._news = asyncio.Event()
        self._counted: dict[str, Counter[tuple[str, ...]]] = {}

    @property
    def sequence(self) -> int:
        """Of the newest entry; 0 before the first."""
        return self._sequence

    def record(self, record: Record) -> None:
        """Tells everybody of one event."""
        self._sequence += 1
        self._count(record)
        wall, boottime = self._clock.wall(), self._clock.boottime()
        self._entries.append(Entry(sequence=self._sequence, at=wall, boottime=boottime, record=record))
        news, self._news = self._news, asyncio.Event()
        news.set()
        write_log(record, boottime)

    def answered(self, answer: Answer) -> None:
        """Counts an answer of an engine. Every one, though only a change of it is told."""
        match answer:
            case CheckAnswered():
                self.count("probes_total", answer.engine, answer.check, answer.result.verdict)
            case HealthAnswered():
                self.count("probes_total", answer.engine, Action.HEALTH_PROBE, _verdict(answer.outcome))
            case TransferAnswered():
                fault = judged(answer.produced, answer.consumed).fault
                self.count("probes_total", answer.engine, Check.KV_TRANSFER, _TRANSFERRED.get(fault, Verdict.FAIL))

    def count(self, name: str, *labels: str) -> None:
        """Adds one to a counter. The first label is the engine, but for those of the whole fleet."""
        self._counted.setdefault(name, Counter())[labels] += 1

    def counted(self, name: str) -> Mapping[tuple[str, ...], int]:
        """A counter's values by its labels."""
        return self._counted.get(name, {})

    def _count(self, record: Record) -> None:
        match record.kind:
            case EventKind.ENGINE_EJECTED:
                self.count("ejections_total", record.engine, record.fields.get("cause", ""))
            case EventKind.PROBE_ENDED if record.fields["probe"] == Action.INFERENCE_PROBE:
                # Each took several answers, and what they amount to is the core's to say.
                self.count("probes_total", record.engine, Action.INFERENCE_PROBE, record.fields["result"])
            case EventKind.ROLE_MOVED:
                self.count("role_moves_total", record.fields["to"], record.fields["cause"])
            case EventKind.ROLE_PROPOSED:
                self.count("role_proposals_total", record.fields["to"], record.fields["cause"])
            case EventKind.ENGINE_REMOVED:
                for counter in (c for name, c in self._counted.items() if name not in OF_THE_FLEET):
                    for labels in [labels for labels in counter if labels[0] == record.engine]:
                        del counter[labels]

    def after(self, sequence: int) -> list[Entry]:
        """The entries after `sequence` that are still kept, oldest first; all of them after a sequence that this
        process has not reached, since it was another process's."""
        missing = self._sequence - sequence if sequence <= self._sequence else self._sequence
        if not missing:
            return []
        if missing >= len(self._entries):
            return list(self._entries)
        return [self._entries[i] for i in range(len(self._entries) - missing, len(self._entries))]

    async def follow(self, sequence: int, *, until: float) -> AsyncIterator[Entry]:
        """The entries after `sequence`, then new ones, until the monotonic instant `until`.

        Who reads too slowly misses entries and sees a gap in their sequence; nothing is queued for a reader.
        """
        if sequence > self._sequence:
            sequence = 0  # another process's
        while True:
            news = self._news
            for entry in self.after(sequence):
                sequence = entry.sequence
                yield entry
            if sequence == self._sequence:
                try:
                    async with asyncio.timeout(until - self._clock.monotonic()):
                        await news.wait()
                except TimeoutError:
                    return


_TRANSFERRED = {Fault.NONE: Verdict.PASS, Fault.UNKNOWN: Verdict.INCONCLUSIVE}


def _verdict(outcome: Outcome | None) -> Verdict:
    if outcome is None:
        return Verdict.PASS
    return Verdict.INCONCLUSIVE if outcome is Outcome.LOCAL else Verdict.FAIL


def write_log(record: Record, boottime: float) -> None:
    """The log line of a record."""
    fields: dict[str, Any] = {"kind": record.kind.value, "boottime": round(boottime, 6), **_named(record.fields)}
    if record.engine:
        fields["engine"] = record.engine
    if record.proxy:
        fields["proxy"] = record.proxy
    level = "error" if record.kind in _ERRORS else "warning" if record.kind in _WARNINGS else "info"
    getattr(log, level)(record.message, **fields)


def _named(fields: Mapping[str, str]) -> dict[str, str]:
    """Fields whose names do not collide with those every line has."""
    taken = ("event", "level", "timestamp", "kind", "boottime")
    return {(f"{name}_" if name in taken else name): v for name, v in fields.items()}
