"""What proxies measured: which of it counts, and for how long."""

from typing import Any

import pytest

from narwhal.control.core.engine import Engine, joining
from narwhal.control.core.settings import EngineSpec
from narwhal.control.core.signals import Signals
from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.reports import Batch, ProxyKey
from narwhal.vocabulary import Hold, Phase

EDGE = ProxyKey(id="edge", slot=0, boot=1)
OTHER = ProxyKey(id="other", slot=0, boot=1)


def admitted(name: str) -> Engine:
    engine = joining(EngineSpec(id=name, url=f"http://{name}", role=Phase.DECODE), now=0.0)
    engine.admit(identity=None, ramp_s=0.0, now=0.0)
    return engine


def sketch(*values: float) -> Sketch:
    made = Sketch()
    for value in values:
        made.add(value)
    return made


class Kept:
    """The signals of one engine, `d`."""

    def __init__(self) -> None:
        self.engine = admitted("d")
        self.signals = Signals({"d": self.engine})

    def tell(
        self,
        *steps: float,
        proxy: ProxyKey = EDGE,
        over_s: float = 1.0,
        now: float = 0.0,
        waiting: int = 0,
        **more: Any,
    ) -> None:
        fields = {"engine": "d", "phase": Phase.DECODE, "incarnation": self.engine.incarnation, **more}
        sketches = {Measure.STEP: sketch(*steps)} if steps else {}
        measures = LegMeasures(sketches=sketches, waiting=waiting, **fields)
        self.signals.take(Batch(proxy=proxy, sequence=1, measures=(measures,), measured_s=over_s), now=now)

    def counted(self) -> int:
        return self.signals.measured(Phase.DECODE)[Measure.STEP].total

    def waiting(self, now: float) -> int:
        return self.signals.waiting(Phase.DECODE, now=now)


def test_a_window_is_seen_once_it_is_closed_and_for_five_intervals() -> None:
    kept = Kept()
    kept.tell(0.1, 0.2)
    assert kept.counted() == 0
    for n in range(5):
        kept.signals.rollover(now=1.0 + n)
        assert kept.counted() == 2
    kept.signals.rollover(now=6.0)
    assert kept.counted() == 0


def test_proxies_add_up() -> None:
    kept = Kept()
    kept.tell(0.1, 0.2, waiting=3)
    kept.tell(0.1, proxy=OTHER, waiting=4)
    kept.signals.rollover(now=1.0)
    assert (kept.counted(), kept.waiting(1.0)) == (3, 7)


def test_who_waits_is_believed_until_told_otherwise_or_two_and_a_half_seconds() -> None:
    kept = Kept()
    kept.tell(waiting=3)
    kept.tell(waiting=5, now=1.0)
    assert (kept.waiting(1.0), kept.waiting(3.4), kept.waiting(3.5)) == (5, 5, 0)
    kept.tell(0.1, now=2.0)
    assert kept.waiting(2.0) == 0
    kept.tell(waiting=4, now=3.0)
    kept.signals.take(Batch(proxy=EDGE, sequence=2, measures=(), measured_s=1.0), now=3.5)  # a whole picture, and empty
    assert kept.waiting(3.5) == 0
    kept.tell(waiting=4, now=4.0)
    kept.signals.take(Batch(proxy=EDGE, sequence=3), now=4.5)  # no picture at all
    assert kept.waiting(4.5) == 4


def test_a_role_is_busy_for_as_much_of_the_time_as_its_engines_have_legs_without_a_token() -> None:
    kept = Kept()
    kept.signals = Signals({"d": kept.engine, "e": admitted("e")})
    for n in range(30):
        kept.tell(waiting=n % 3, now=float(n))
        kept.signals.rollover(now=float(n))
    assert kept.signals.busy(Phase.DECODE) == pytest.approx(20 / 60)
    for n in range(30, 60):
        kept.tell(waiting=1, now=float(n))
        kept.signals.rollover(now=float(n))
    assert kept.signals.busy(Phase.DECODE) == pytest.approx(30 / 60)
    assert kept.signals.busy(Phase.PREFILL) == 0.0


def test_measures_of_another_incarnation_or_an_unknown_engine_do_not_count() -> None:
    kept = Kept()
    kept.tell(0.1, incarnation=2)
    kept.tell(0.1, engine="e")
    kept.signals.rollover(now=1.0)
    assert kept.counted() == 0


def test_measures_from_while_control_was_away_do_not_count() -> None:
    kept = Kept()
    kept.tell(0.1, over_s=5.1)
    kept.signals.rollover(now=1.0)
    assert kept.counted() == 0
    kept.tell(0.1, over_s=5.0)
    kept.signals.rollover(now=2.0)
    assert kept.counted() == 1


def test_an_engine_that_is_out_is_not_measured_and_nobody_waits_there() -> None:
    kept = Kept()
    kept.tell(waiting=1)
    kept.signals.forget("d")
    assert kept.waiting(1.0) == 0
    kept.engine.eject("for a test", now=2.0)
    kept.tell(0.1, waiting=1)
    kept.signals.rollover(now=3.0)
    assert (kept.counted(), kept.waiting(3.0)) == (0, 0)


def test_who_is_held_or_stands_in_is_heard_only_where_nobody_of_the_role_speaks() -> None:
    d, p = admitted("d"), admitted("p")
    p.role = Phase.PREFILL
    kept = Kept()
    kept.engine, kept.signals = d, Signals({"d": d, "p": p})
    kept.tell(0.1, waiting=1)
    kept.tell(0.1, 0.1, 0.1, waiting=7, engine="p", proxy=OTHER)
    kept.signals.rollover(now=1.0)
    assert (kept.counted(), kept.waiting(1.0)) == (1, 1)
    d.place(Hold.QUARANTINE, "for a test", now=1.0, due=60.0)
    for n in range(6):
        kept.tell(0.1, waiting=1, now=2.0 + n)
        kept.tell(0.1, 0.1, 0.1, waiting=7, engine="p", proxy=OTHER, now=2.0 + n)
        kept.signals.rollover(now=2.0 + n)
    assert (kept.counted(), kept.waiting(7.0)) == (20, 8)


def test_an_engine_of_which_only_legs_that_wait_are_told_says_nothing_about_what_they_take() -> None:
    d, p = admitted("d"), admitted("p")
    p.role = Phase.PREFILL
    kept = Kept()
    kept.engine, kept.signals = d, Signals({"d": d, "p": p})
    kept.tell(waiting=1)
    kept.tell(0.1, 0.1, 0.1, engine="p", proxy=OTHER)
    kept.signals.rollover(now=1.0)
    assert (kept.counted(), kept.waiting(1.0)) == (3, 1)


def test_of_an_engine_that_has_left_the_fleet_nobody_waits() -> None:
    d, e = admitted("d"), admitted("e")
    engines = {"d": d, "e": e}
    kept = Kept()
    kept.engine, kept.signals = d, Signals(engines)
    kept.tell(waiting=2)
    kept.tell(waiting=3, engine="e", proxy=OTHER)
    kept.signals.rollover(now=0.5)
    assert kept.signals.busy(Phase.DECODE) == 1.0
    del engines["d"]
    assert kept.waiting(1.0) == 3
    kept.signals.rollover(now=1.0)
    assert kept.signals.busy(Phase.DECODE) == 1.0
    kept.signals.rollover(now=9.0)  # what the other proxy said is over too
    assert kept.signals.busy(Phase.DECODE) == pytest.approx(3 / 4)


def test_legs_of_both_phases_are_kept_apart() -> None:
    kept = Kept()
    kept.tell(0.1, waiting=1)
    kept.tell(0.1, 0.1, waiting=4, phase=Phase.PREFILL, proxy=OTHER)
    kept.signals.rollover(now=1.0)
    assert (kept.counted(), kept.waiting(1.0)) == (1, 1)
    assert kept.signals.measured(Phase.PREFILL)[Measure.STEP].total == 2
    assert kept.signals.waiting(Phase.PREFILL, now=1.0) == 4
    assert set(kept.signals.measured(Phase.PREFILL)) == set(Measure)
    assert kept.signals.busy(Phase.PREFILL) == 0.0  # no engine of the role is there
    kept.signals.forget("d")
    assert (kept.waiting(1.0), kept.signals.waiting(Phase.PREFILL, now=1.0)) == (0, 0)
