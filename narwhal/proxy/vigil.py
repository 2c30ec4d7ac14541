"""Watches the legs that run: suspicions of no forward progress (spec F10), the end of silent legs on engines that are
out (V11), and the engines to step around for a while (V12).

Decides: which leg is told of as stalled, which one ends, which engine is avoided. It cannot see: other proxies
(control asks them), nor whether a suspicion is right.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from narwhal.config import ProxySettings, RecoveryConfig
from narwhal.placement import EngineEntry, Placement
from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.connection import EngineConnection
from narwhal.proxy.outcome import LegKind
from narwhal.proxy.witness import Leg, Witness
from narwhal.vocabulary import Hold, Outcome

LOOK_EVERY_S = 0.25  # bounds how late any of it is noticed
# How a leg that has given nothing ends, by what it was waiting for. A count is left to its time-out, which is short.
SILENT = {
    LegKind.LOAD: Outcome.FIRST_TOKEN_TIMEOUT,
    LegKind.FIRST_TOKEN: Outcome.FIRST_TOKEN_TIMEOUT,
    LegKind.STREAM: Outcome.STREAM_SILENT,
    LegKind.ANSWER: Outcome.READ_TIMEOUT,
    LegKind.PREFILL: Outcome.PREFILL_TIMEOUT,
}
# Spec V12: at least and at most so long, whatever the engine names.
DETOUR_LEAST_S, DETOUR_MOST_S = 1.0, 30.0


@dataclass(slots=True, eq=False)
class Watched:
    """A leg that runs."""

    leg: Leg
    connection: EngineConnection
    producer: EngineEntry | None
    request_id: str  # the client's
    attempt: int
    handoff_due: float  # when the KV that it has to read is too old to be used; never, where it reads none
    told: bool = False
    held_at: float = math.inf  # since when its engine is seen on a verification hold; told of, or never


class Vigil:
    """The legs of one worker."""

    def __init__(
        self,
        settings: Callable[[], ProxySettings],
        placement: Callable[[], Placement | None],
        heard_at: Mapping[str, float],
        witness: Witness,
    ) -> None:
        """`heard_at`: when anything last came from an engine, by its URL."""
        self._settings = settings
        self._placement = placement
        self._heard_at = heard_at
        self._witness = witness
        self._running: set[Watched] = set()
        self._look_due = 0.0
        self._detours: dict[str, float] = {}

    @property
    def running(self) -> int:
        """Legs that are watched."""
        return len(self._running)

    def legs(self) -> Iterable[Watched]:
        """The legs that are watched."""
        return self._running

    def begin(self, watched: Watched) -> None:
        """A leg's request is written."""
        self._running.add(watched)

    def end(self, watched: Watched) -> None:
        """It has ended."""
        self._running.discard(watched)

    def look(self, now: float) -> None:
        """Part of the watchdog's round."""
        if now < self._look_due or not self._running:
            return
        self._look_due = now + LOOK_EVERY_S
        settings, placement = self._settings(), self._placement()
        recovery = settings.recovery
        for watched in list(self._running):
            connection = watched.connection
            quiet_s = now - connection.quiet_since if connection.quiet_since else 0.0
            # While the engine gives something to any other leg it is not the engine that gives nothing.
            silent_s = min(quiet_s, now - self._heard_at.get(connection.url, 0.0))
            hopeless = self._hopeless(watched, quiet_s, silent_s, recovery)
            if hopeless and (why := self._out(watched, placement, settings.engine.first_token_timeout_s, now)):
                detail = f"silent for {quiet_s:.1f} s on an engine that {why}"
                connection.settle(LegEnd(SILENT[connection.kind], detail=detail), abort=True)
                continue
            limit_s = self._limit_s(connection.kind, recovery.stall_s, recovery.silent_leg_s)
            if limit_s and not watched.told and silent_s >= limit_s:
                watched.told = True
                self._witness.stalled(
                    watched.leg,
                    quiet_s=quiet_s,
                    producer=watched.producer,
                    request_id=watched.request_id,
                    attempt=watched.attempt,
                )

    @staticmethod
    def _hopeless(watched: Watched, quiet_s: float, silent_s: float, recovery: RecoveryConfig) -> bool:
        """Whether the leg has been silent for so long that it ends should its engine be out (spec V11). A prefill or a
        whole answer gives nothing before it is done: it must be one that control was told of. A whole answer also ends
        only while its engine gives nobody anything: of one that works it is about to come."""
        kind = watched.connection.kind
        if kind is LegKind.PREFILL:
            return watched.told
        if kind is LegKind.ANSWER:
            return watched.told and 0 < recovery.silent_leg_s <= silent_s
        return kind in SILENT and 0 < recovery.stall_s <= quiet_s

    @staticmethod
    def _out(watched: Watched, placement: Placement | None, probe_s: float, now: float) -> str:
        """What keeps a hopeless leg's engine from being waited for; empty when nothing does. A probe may have to end in
        silence several times before the engine is ejected. A whole answer is not waited for so long: an engine that
        goes on once the lease of the handoff is over answers with others' KV, and nothing in the answer tells (spec
        V6). `probe_s`: for which a probe of it has had no answer then, or it would be held no more."""
        entry = placement.engines.get(watched.leg.entry.id) if placement is not None else None
        if entry is None:
            return ""
        if Hold.EJECTED in entry.holds:
            return "is ejected"
        if watched.connection.kind is not LegKind.ANSWER or Hold.VERIFICATION not in entry.holds:
            watched.held_at = math.inf
            return ""
        watched.held_at = min(watched.held_at, now)
        old = now >= max(watched.handoff_due, watched.held_at + probe_s)
        return "is held, and may not have read its KV in time" if old else ""

    @staticmethod
    def _limit_s(kind: LegKind, stall_s: float, silent_leg_s: float) -> float:
        """Seconds of silence that are suspicious; 0: none. Before the first token its deadline is what counts."""
        if kind is LegKind.STREAM:
            return stall_s
        return 0.0 if SILENT.get(kind) is Outcome.FIRST_TOKEN_TIMEOUT else silent_leg_s

    # --- engines to step around ---

    def detour(self, engine: str, named_s: float, *, now: float) -> None:
        """The engine said that it is busy, and perhaps for how many seconds (else 0); or that it is another."""
        self._detours[engine] = now + min(max(named_s, DETOUR_LEAST_S), DETOUR_MOST_S)

    def avoided(self, now: float) -> frozenset[str]:
        """Engines that no leg goes to now while another can take it. Local, and no hold."""
        if not self._detours:
            return frozenset()
        self._detours = {engine: due for engine, due in self._detours.items() if now < due}
        return frozenset(self._detours)
