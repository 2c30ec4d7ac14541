"""Soft caps and the spread of many proxies over few engines, with pictures as old as they get (spec P3, P9)."""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from narwhal.clock import RealClock
from narwhal.config import ProxySettings
from narwhal.placement import EngineEntry, Placement
from narwhal.proxy.attempt import Fault
from narwhal.proxy.caps import is_full
from narwhal.proxy.choosing import Chooser
from narwhal.proxy.seams import Inflight, Picture
from narwhal.proxy.sidestep import Sidestep
from narwhal.proxy.vigil import Vigil
from narwhal.vocabulary import Phase
from tests.proxy.harness import FixedFeed, entry, settings

PICTURE_S, ACK_S = 0.5, 1.0

# (cap, own, own in the picture, others, proxies, more) → full; typed from the text of `caps.py` and spec P9
ROWS = [
    ((4, 3, 3, 0, 1, 1), False),
    ((4, 4, 3, 0, 1, 1), True),
    ((4, 0, 0, 4, 1, 1), True),  # others have filled it
    ((4, 0, 0, 9, 1, 1), True),
    ((8, 0, 0, 0, 4, 1), False),  # a share of 2
    ((8, 1, 0, 0, 4, 1), False),
    ((8, 2, 0, 0, 4, 1), True),
    ((8, 3, 2, 3, 4, 1), True),  # room of 3 between 4: one each
    ((8, 2, 2, 3, 4, 1), False),
    ((1000, 0, 0, 0, 1, 5000), False),  # longer than the cap: when nothing else runs
    ((1000, 1, 0, 0, 1, 5000), True),
    ((1000, 400, 0, 0, 1, 600), False),
    ((1000, 400, 0, 0, 1, 601), True),
]


@pytest.mark.rule("P9")
@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_when_an_engine_is_full(row: tuple[int, ...], expected: bool) -> None:
    cap, own, own_then, others, proxies, more = row
    assert is_full(cap, own=own, own_then=own_then, others=others, proxies=proxies, more=more) is expected


class _NoDetours(Vigil):
    def __init__(self) -> None:
        pass

    def avoided(self, now: float) -> frozenset[str]:
        return frozenset()


class _NoneOut(Sidestep):
    def __init__(self) -> None:
        self.avoided = frozenset()


@dataclass
class Proxy:
    """A proxy of the model: its own legs exactly, the others' by the last picture."""

    feed: FixedFeed
    chooser: Chooser
    inflight: Inflight
    acked: dict[str, int] = field(default_factory=dict)


class Fleet:
    """Proxies that choose among the same engines; control sums their acknowledgements and sends the picture."""

    def __init__(self, proxies: int, engines: list[EngineEntry], seed: int) -> None:
        self.draw = random.Random(seed)
        placement = Placement(epoch=1, version=1, engines={e.id: e for e in engines})
        chosen: ProxySettings = settings()
        self.proxies = [self._proxy(FixedFeed(placement, chosen)) for _ in range(proxies)]
        self.legs: Counter[str] = Counter()
        self.saturated = 0
        self.now = 0.0
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        for proxy in self.proxies:
            proxy.feed.picture = Picture(proxies=proxies)
        self._at(0.0, self._beat)
        self._at(0.0, self._picture)

    def _proxy(self, feed: FixedFeed) -> Proxy:
        inflight = Inflight()
        chooser = Chooser(feed, inflight, RealClock(), self.draw, vigil=_NoDetours(), sidestep=_NoneOut())
        return Proxy(feed, chooser, inflight)

    def _at(self, when: float, what: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def _beat(self) -> None:
        """A heartbeat: every proxy acknowledges, some of them late."""
        for proxy in self.proxies:
            self._at(self.now + self.draw.expovariate(20.0), lambda proxy=proxy: self._ack(proxy))
        self._at(self.now + ACK_S, self._beat)

    def _ack(self, proxy: Proxy) -> None:
        proxy.acked = dict(proxy.inflight.legs)

    def _picture(self) -> None:
        fleet: Counter[str] = Counter()
        for proxy in self.proxies:
            fleet.update(proxy.acked)
        for proxy in self.proxies:
            others = {e: n - proxy.acked.get(e, 0) for e, n in fleet.items()}
            proxy.feed.picture = Picture(legs=others, own_legs=dict(proxy.acked), proxies=len(self.proxies))
        self._at(self.now + PICTURE_S, self._picture)

    def ask(self, proxy: Proxy, for_s: float) -> None:
        """One leg, if an engine can take it."""
        chosen = proxy.chooser.choose(Phase.DECODE, frozenset(), 0)
        if isinstance(chosen, Fault):
            assert chosen is Fault.SATURATED
            self.saturated += 1
            return
        proxy.inflight.begin(chosen.id)
        self.legs[chosen.id] += 1
        self._at(self.now + for_s, lambda: self._end(proxy, chosen.id))

    def _end(self, proxy: Proxy, engine: str) -> None:
        proxy.inflight.end(engine)
        self.legs[engine] -= 1

    def run(self, until_s: float) -> None:
        """Whatever happens until then."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, what = heapq.heappop(self._events)
            what()  # type: ignore[operator]
        self.now = until_s


def engines(count: int, **changes: int) -> list[EngineEntry]:
    return [entry(f"d{n}", f"http://d{n}", Phase.DECODE, **changes) for n in range(count)]


@pytest.mark.rule("P3")
@pytest.mark.parametrize("seed", range(5))
def test_eight_proxies_spread_over_six_engines_and_none_is_stampeded(seed: int) -> None:
    """150 legs/s of 0.2–3 s: 240 in flight, 40 an engine, five on an engine from each proxy."""
    fleet = Fleet(8, engines(6), seed)
    least, most, at = 1.0, 1.0, 0.0
    while at < 30.0:
        at += fleet.draw.expovariate(150.0)
        fleet.run(at)
        fleet.ask(fleet.draw.choice(fleet.proxies), fleet.draw.uniform(0.2, 3.0))
        if at > 5.0:
            mean = sum(fleet.legs.values()) / 6
            least, most = min(least, min(fleet.legs.values()) / mean), max(most, max(fleet.legs.values()) / mean)
    assert least > 0.6
    assert most < 1.4


@pytest.mark.rule("P9")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("proxies", [1, 2, 8])
def test_a_cap_is_exceeded_by_no_more_than_what_is_stated(proxies: int, seed: int) -> None:
    """Twice the load that the caps allow, in bursts: the overshoot over 40 s, and that the engines are used."""
    cap, count = 32, 3
    fleet = Fleet(proxies, engines(count, max_inflight=cap), seed)
    most, used, looks, at = 0, 0, 0, 0.0
    while at < 40.0:
        at += fleet.draw.expovariate(2 * cap * count / 1.0)
        fleet.run(at)
        for _ in range(fleet.draw.choice((1, 1, 1, 12))):
            fleet.ask(fleet.draw.choice(fleet.proxies), fleet.draw.uniform(0.2, 1.8))
        most = max(most, *fleet.legs.values())
        if at > 5.0:
            used, looks = used + sum(fleet.legs.values()), looks + 1
    assert fleet.saturated
    assert most <= cap + (0 if proxies == 1 else max(proxies - 1, cap // 4))
    assert used / looks > 0.75 * cap * count
    print(f"{proxies} proxies: at most {most} of {cap}, {used / looks / count:.1f} on average")
