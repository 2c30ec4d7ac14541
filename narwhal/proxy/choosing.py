"""Chooses the engine of a leg: least load of two (spec P3), within the soft caps (P9), around those that failed in this
request (V4), said that they are busy (V12), or took no connection while control was away (P7).
"""

import random
from collections.abc import Iterator, Mapping

from narwhal.clock import Clock
from narwhal.placement import EngineEntry, Placement
from narwhal.proxy.attempt import Fault
from narwhal.proxy.caps import full
from narwhal.proxy.seams import Feed, Inflight
from narwhal.proxy.sidestep import Sidestep
from narwhal.proxy.vigil import Vigil
from narwhal.vocabulary import Phase

NOBODY: frozenset[str] = frozenset()
# How much of what changed with us is taken to have changed with each other proxy. All of it would make our own chance
# theirs, too.
ALIKE = 0.5


class FleetLoad(Mapping[str, float]):
    """Legs in flight per engine over all proxies, as far as it can be told: exactly our own, the others' as they were
    when control last had them added up, and what they have changed since, which is taken from what we have.

    All proxies see the same picture, up to 1.5 s old, and go where it shows little: by it alone they stampede. Eight
    proxies on six engines with legs of 0.3 s were spread with a deviation of 57 % of the mean by it, 13 % by their own
    legs alone, and 14 % so; with legs of 11 s it is 6, 5 and 4 % (the model of `tests/proxy/test_caps.py`).
    """

    def __init__(self, feed: Feed, inflight: Inflight) -> None:
        self._feed = feed
        self._own = inflight.legs

    def __getitem__(self, engine: str) -> float:
        return self.get(engine)

    def get(self, engine: str, default: float = 0.0) -> float:  # type: ignore[override]  # no engine is unknown
        """Legs of `engine`."""
        picture, own = self._feed.picture, self._own.get(engine, 0)
        since = own - picture.own_legs.get(engine, 0)
        return max(own, own + picture.legs.get(engine, 0) + ALIKE * (picture.proxies - 1) * since)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own.keys() | self._feed.picture.legs.keys())

    def __len__(self) -> int:
        return len(self._own.keys() | self._feed.picture.legs.keys())


class Chooser:
    """The choices of one worker."""

    def __init__(
        self,
        feed: Feed,
        inflight: Inflight,
        clock: Clock,
        draws: random.Random,
        *,
        vigil: Vigil,
        sidestep: Sidestep,
    ) -> None:
        self._feed = feed
        self._inflight = inflight
        self._clock = clock
        self._draw = draws.random
        self._vigil = vigil
        self._sidestep = sidestep
        self._load = FleetLoad(feed, inflight)

    def choose(self, phase: Phase, avoid: frozenset[str], tokens: int) -> EngineEntry | Fault:
        """The engine of a leg of `phase` with `tokens` of prompt, on none of `avoid` while another can serve; or why
        there is none."""
        placement = self._feed.placement
        if placement is None:
            return Fault.NO_ENGINES
        now = self._clock.monotonic()
        aside = self._vigil.avoided(now) | self._sidestep.avoided
        wanted = avoid
        if aside:
            # `choose` takes one of `avoid` where there is nobody else: rather one that is busy, or took no connection a
            # while ago, than one that failed in this request.
            able = {entry.id for entry in placement.candidates(phase, now=now)}
            wanted = avoid | aside if able - avoid - aside else avoid
        chosen = self._of(placement, phase, now, wanted, tokens)
        if chosen is None and wanted:
            # Those that it would rather have are at their limit; the ones it avoids are better than none.
            chosen = self._of(placement, phase, now, NOBODY, tokens)
        if chosen is not None:
            return chosen
        return Fault.SATURATED if placement.candidates(phase, now=now) else Fault.NO_ENGINES

    def counts_tokens(self) -> bool:
        """Whether some engine's cap asks how long prompts are."""
        placement = self._feed.placement
        return placement is not None and placement.capped_by_tokens

    def _of(
        self, placement: Placement, phase: Phase, now: float, avoid: frozenset[str], tokens: int
    ) -> EngineEntry | None:
        def at_its_caps(entry: EngineEntry) -> bool:
            return full(entry, tokens, self._inflight, self._feed.picture)

        draws = self._draw(), self._draw()
        return placement.choose(phase, now=now, load=self._load, draws=draws, avoid=avoid, full=at_its_caps)
