"""Which reports can be believed: what other proxies saw of the same engines (spec F10, F12).

Decides: whether a missing-progress report is contradicted, and whether a proxy is itself the fault. It cannot see:
streaks, or what follows. Lives in memory only. Pure.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from narwhal.control.core.records import EventKind, Record
from narwhal.reports import ProxyKey
from narwhal.vocabulary import FailureClass

REPORT_LAG_S = 1.0  # a success may be this old when its report comes (spec S6)
CONTRADICTED_FOR_S = 2.0  # a success of another proxy speaks against a failure this long: two report intervals
OWN_FAULT_SHOWN_S = 60.0  # after the newest failure that a proxy called its own
AT_FAULT = frozenset({FailureClass.CONNECTION, FailureClass.TIMEOUT})  # classes set aside (spec F12)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Success:
    proxy: ProxyKey
    at: float


@dataclass(kw_only=True, slots=True)
class _Voice:
    """What one proxy says."""

    failing: set[str] = field(default_factory=set)  # engines on which its newest word is such a failure
    suspect: str = ""  # why it is the fault itself
    own_until: float | None = None  # until when failures of its own causes are shown


class Witnesses:
    """The newest words of every proxy about every engine."""

    def __init__(self) -> None:
        # The newest success, and the newest of another proxy than that: enough to ask for "by somebody else".
        self._successes: dict[str, tuple[_Success, _Success | None]] = {}
        self._voices: dict[ProxyKey, _Voice] = {}

    def success(self, proxy: ProxyKey, engine: str, *, now: float) -> list[Record]:
        """A leg of `proxy` on `engine` went well."""
        newest = self._successes.get(engine)
        other = None if newest is None else newest[0] if newest[0].proxy != proxy else newest[1]
        self._successes[engine] = (_Success(proxy=proxy, at=now), other)
        voice = self._voices.get(proxy)
        if voice is None:
            return []
        voice.failing.discard(engine)
        over = voice.suspect and voice.own_until is None and len(voice.failing) < 2
        return self._trust(proxy, voice) if over else []

    def contradicts_stall(self, proxy: ProxyKey, engine: str, *, limit_s: float, now: float) -> bool:
        """Whether another proxy had something of `engine` in the last `limit_s`, so that it is not the engine that gave
        nothing. The proxy itself has looked at its own legs before it said so."""
        at = self._by_other(proxy, engine)
        return at is not None and now < at - REPORT_LAG_S + limit_s

    def _by_other(self, proxy: ProxyKey, engine: str) -> float | None:
        known = self._successes.get(engine)
        if known is None:
            return None
        return next((s.at for s in known if s is not None and s.proxy != proxy), None)

    def at_fault(
        self, proxy: ProxyKey, engine: str, *, in_service: Collection[str], now: float
    ) -> tuple[bool, list[Record]]:
        """A leg of `proxy` on `engine` failed in a class of AT_FAULT, or was answered as by another engine (spec R9):
        whether the proxy is the fault, and what to tell.

        It is when its newest word about more than half of the engines in service, and at least two, is such a failure,
        while other proxies had successes on every one of them a moment ago.
        """
        voice = self._voices.setdefault(proxy, _Voice())
        voice.failing.add(engine)
        voice.failing &= set(in_service)
        failing = voice.failing
        most = len(failing) >= 2 and len(failing) * 2 > len(in_service)
        alone = most and all(self._recent_by_other(proxy, e, now) for e in failing)
        if not alone:
            told = self._trust(proxy, voice) if voice.suspect and voice.own_until is None else []
            return False, told
        if voice.suspect and voice.own_until is None:
            return True, []
        voice.own_until = None
        reason = f"its legs fail on {len(failing)} of {len(in_service)} engines that serve other proxies"
        return True, self._suspect(proxy, voice, reason)

    def _recent_by_other(self, proxy: ProxyKey, engine: str, now: float) -> bool:
        at = self._by_other(proxy, engine)
        return at is not None and now < at + CONTRADICTED_FOR_S

    def own_cause(self, proxy: ProxyKey, *, now: float) -> list[Record]:
        """A proxy says that a leg failed by its own cause: descriptors, ports, resolver (spec F5)."""
        voice = self._voices.setdefault(proxy, _Voice())
        if voice.suspect and voice.own_until is None:
            return []
        told = voice.suspect != ""
        voice.own_until = now + OWN_FAULT_SHOWN_S
        return [] if told else self._suspect(proxy, voice, "its legs fail by causes of its own")

    def expire(self, *, now: float) -> list[Record]:
        """Forget own causes that are long past."""
        records = []
        for proxy, voice in self._voices.items():
            if voice.own_until is not None and now >= voice.own_until:
                records += self._trust(proxy, voice)
        return records

    def _suspect(self, proxy: ProxyKey, voice: _Voice, reason: str) -> list[Record]:
        voice.suspect = reason
        message = f"proxy {proxy} is suspect itself: {reason}"
        return [Record(kind=EventKind.PROXY_SUSPECT, message=message, proxy=str(proxy))]

    def _trust(self, proxy: ProxyKey, voice: _Voice) -> list[Record]:
        voice.suspect, voice.own_until = "", None
        message = f"proxy {proxy} is suspect no longer"
        return [Record(kind=EventKind.PROXY_TRUSTED, message=message, proxy=str(proxy))]

    def suspect(self, proxy: ProxyKey) -> str:
        """Why the proxy is thought to be the fault, or empty."""
        voice = self._voices.get(proxy)
        return voice.suspect if voice is not None else ""

    def forget_proxy(self, proxy: ProxyKey) -> None:
        """The proxy is gone."""
        self._voices.pop(proxy, None)

    def forget_others(self, known: Collection[ProxyKey]) -> None:
        """Of proxies that nothing else is kept of."""
        self._voices = {proxy: voice for proxy, voice in self._voices.items() if proxy in known}

    def forget_engine(self, engine: str) -> None:
        """What was said of the engine is of an incarnation that is over."""
        self._successes.pop(engine, None)
        for voice in self._voices.values():
            voice.failing.discard(engine)
