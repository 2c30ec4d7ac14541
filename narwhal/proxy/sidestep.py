"""Engines that take no connection while control is away: who is stepped around, and until when (spec P7).

While control is there it hears of a failed connection and judges; that needs legs that go on failing. Nobody judges
while it is away, so the first failure keeps an engine from further legs for as long as another can serve, and until a
connection that no request waits for succeeds. It stays so after control is back: what is still refused then is no place
to send a request to. Decides nothing about evidence: the legs that failed are reported as ever.
"""

import asyncio
from dataclasses import dataclass

import structlog

from narwhal.clock import Clock
from narwhal.placement import EngineEntry
from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.legs import Legs
from narwhal.proxy.outcome import NEUTRALS
from narwhal.proxy.seams import Feed

TRY_EVERY_S = 1.0  # a connection attempt to each; costs the engine nothing

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Out:
    """An engine that is stepped around."""

    entry: EngineEntry
    due: float  # when it is tried again
    attempt: asyncio.Task[None] | None = None


class Sidestep:
    """The engines of one worker that took no connection."""

    def __init__(self, feed: Feed, legs: Legs, clock: Clock) -> None:
        self._feed = feed
        self._legs = legs
        self._clock = clock
        self._out: dict[str, _Out] = {}
        self.avoided: frozenset[str] = frozenset()  # engines that get a leg only where no other can take it

    def failed(self, entry: EngineEntry, end: LegEnd) -> None:
        """No connection to `entry` came about."""
        if self._feed.controlled or end.outcome in NEUTRALS or entry.id in self._out:
            return
        self._out[entry.id] = _Out(entry, self._clock.monotonic() + TRY_EVERY_S)
        self.avoided = frozenset(self._out)
        self._legs.watch()
        log.warning("stepping_around", engine=entry.id, reason=end.detail)

    def look(self, now: float) -> bool:
        """Part of the watchdog's round. Says whether it wants to look again."""
        for out in list(self._out.values()):
            if self._replaced(out.entry):
                self._forget(out)
            elif now >= out.due and out.attempt is None:
                out.attempt = asyncio.get_running_loop().create_task(self._try(out, now))
        return bool(self._out)

    def close(self) -> None:
        """Try nothing any more."""
        for out in self._out.values():
            if out.attempt is not None:
                out.attempt.cancel()
        self._out.clear()

    def _replaced(self, entry: EngineEntry) -> bool:
        """Whether control has judged the engine since: it is gone, elsewhere, or was readmitted."""
        placement = self._feed.placement
        known = placement.engines.get(entry.id) if placement is not None else None
        return known is None or (known.url, known.incarnation) != (entry.url, entry.incarnation)

    async def _try(self, out: _Out, now: float) -> None:
        connection = await self._legs.connect(out.entry.url, now + self._feed.settings.engine.connect_timeout_s)
        out.attempt = None
        if isinstance(connection, LegEnd):
            out.due = self._clock.monotonic() + TRY_EVERY_S
            return
        connection.release()  # the next leg there takes it
        self._forget(out)

    def _forget(self, out: _Out) -> None:
        if out.attempt is not None:
            out.attempt.cancel()
        if self._out.pop(out.entry.id, None) is not None:
            self.avoided = frozenset(self._out)
            log.info("no_longer_stepping_around", engine=out.entry.id)
