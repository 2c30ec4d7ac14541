"""The roster of proxies, and exact totals (spec P6, S6)."""

from typing import Any

import pytest

from narwhal.control.core.events import ProxyAcked, ProxyConnected, ProxyLeft, ProxyLost, ProxyNacked
from narwhal.control.core.proxies import lag
from narwhal.control.core.records import EventKind
from narwhal.control.core.view import ProxyView
from narwhal.reports import ProxyKey, RequestCounts
from narwhal.vocabulary import Outcome, Stage
from tests.core.rig import EDGE, OTHER, Rig, decode, prefill

OLD, NEW = ProxyKey(id="edge", slot=0, boot=1), ProxyKey(id="edge", slot=0, boot=2)


def rig_of(**settings: Any) -> Rig:
    return Rig(prefill("p"), decode("d"), **settings)


def hello(key: ProxyKey, stream: int = 0) -> ProxyConnected:
    return ProxyConnected(proxy=key, address="10.0.0.1:8000", pid=7, highest_epoch=3, stream=stream)


def proxies(rig: Rig) -> dict[ProxyKey, ProxyView]:
    return {p.key: p for p in rig.fleet.view(now=rig.now).proxies}


@pytest.mark.rule("P6")
def test_a_proxy_is_known_from_its_hello_to_its_goodbye() -> None:
    rig = rig_of()
    rig.send(hello(EDGE))
    rig.now += 2
    view = proxies(rig)[EDGE]
    assert (view.address, view.pid, view.connected, view.acked, view.silent_s) == ("10.0.0.1:8000", 7, True, (0, 0), 2)
    rig.send(ProxyAcked(proxy=EDGE, epoch=3, version=9, resident={"d": 2}))
    view = proxies(rig)[EDGE]
    assert (view.acked, view.silent_s, view.resident) == ((3, 9), 0, {"d": 2})
    assert rig.engine("d").inflight == 2
    rig.send(ProxyLeft(proxy=EDGE, reason="SIGTERM"))
    assert proxies(rig) == {}
    assert rig.engine("d").inflight == 0


@pytest.mark.rule("P6")
def test_acknowledgements_only_rise_and_residency_is_the_newest() -> None:
    rig = rig_of()
    rig.send(hello(EDGE))
    for epoch, version, legs in ((1, 5, 3), (1, 4, 2), (2, 1, 1), (1, 9, 0)):
        rig.send(ProxyAcked(proxy=EDGE, epoch=epoch, version=version, resident={"d": legs}))
    assert proxies(rig)[EDGE].acked == (2, 1)
    assert proxies(rig)[EDGE].resident == {"d": 0}


@pytest.mark.rule("P6")
def test_a_refusal_is_shown_until_the_proxy_is_past_it() -> None:
    rig = rig_of()
    rig.send(hello(EDGE))
    rig.send(ProxyNacked(proxy=EDGE, epoch=1, version=5, reason="engine listed twice"))
    view = proxies(rig)[EDGE]
    assert (view.refused, view.refused_reason) == ((1, 5), "engine listed twice")
    assert "engine listed twice" in rig.records(EventKind.PLACEMENT_REFUSED)[0].message
    rig.send(ProxyAcked(proxy=EDGE, epoch=1, version=4))
    assert proxies(rig)[EDGE].refused == (1, 5)
    rig.send(ProxyAcked(proxy=EDGE, epoch=1, version=6))
    assert (proxies(rig)[EDGE].refused, proxies(rig)[EDGE].refused_reason) == (None, "")


@pytest.mark.rule("P6")
@pytest.mark.parametrize(
    ("acked", "published", "behind"),
    [((1, 5), (1, 5), 0), ((1, 3), (1, 5), 2), ((1, 9), (2, 4), 4), ((0, 0), (1, 3), 3)],
)
def test_who_lags(acked: tuple[int, int], published: tuple[int, int], behind: int) -> None:
    assert lag(acked, published) == behind


@pytest.mark.rule("P6")
def test_a_newer_boot_retires_the_older_at_once() -> None:
    rig = rig_of()
    rig.send(hello(OLD))
    rig.send(ProxyAcked(proxy=OLD, epoch=1, version=1, resident={"d": 4}))
    rig.send(hello(NEW))
    assert list(proxies(rig)) == [NEW]
    assert proxies(rig)[NEW].resident == {}
    assert rig.kinds().count(EventKind.PROXY_RETIRED) == 1
    # What the older one still says, and its stream's end, change nothing.
    for event in (
        ProxyAcked(proxy=OLD, epoch=9, version=9),
        ProxyLost(proxy=OLD, reason="x"),
        ProxyLeft(proxy=OLD, reason="x"),
    ):
        rig.send(event)
    assert list(proxies(rig)) == [NEW]
    assert proxies(rig)[NEW].connected
    rig.send(hello(OLD))
    assert list(proxies(rig)) == [NEW]


@pytest.mark.rule("P6")
def test_another_slot_is_another_proxy() -> None:
    rig = rig_of()
    rig.send(hello(ProxyKey(id="edge", slot=1, boot=5)))
    rig.send(hello(OLD))
    assert [k.slot for k in proxies(rig)] == [0, 1]


@pytest.mark.rule("P6")
def test_the_late_end_of_an_older_stream_does_not_lose_a_proxy_that_is_back() -> None:
    rig = rig_of()
    rig.send(hello(EDGE, stream=1))
    rig.send(ProxyAcked(proxy=EDGE, epoch=1, version=3, resident={"d": 1}))
    rig.send(hello(EDGE, stream=2))
    assert proxies(rig)[EDGE].acked == (1, 3)
    rig.send(ProxyLost(proxy=EDGE, reason="reset", stream=1))
    assert proxies(rig)[EDGE].connected
    rig.send(ProxyLost(proxy=EDGE, reason="reset", stream=2))
    assert not proxies(rig)[EDGE].connected


@pytest.mark.rule("P7")
def test_a_lost_proxy_counts_until_its_placement_is_too_old() -> None:
    rig = rig_of(placement_max_age_s=600.0)
    rig.send(hello(EDGE))
    rig.send(ProxyAcked(proxy=EDGE, epoch=1, version=1, resident={"d": 3}))
    rig.send(ProxyLost(proxy=EDGE, reason="silent for 10 s"))
    rig.now += 599.9
    rig.tick(Stage.ROLLOVER)
    assert rig.engine("d").inflight == 3
    rig.now += 0.1
    rig.tick(Stage.ROLLOVER)
    assert proxies(rig) == {}


@pytest.mark.rule("P7")
def test_for_ever_means_for_ever() -> None:
    rig = rig_of(placement_max_age_s=0.0)
    rig.send(hello(EDGE))
    rig.send(ProxyLost(proxy=EDGE, reason="gone"))
    rig.now += 1e7
    rig.tick(Stage.ROLLOVER)
    assert list(proxies(rig)) == [EDGE]


# --- reports --------------------------------------------------------------------------------------------------------


@pytest.mark.rule("S6")
def test_requests_are_counted_once() -> None:
    rig = rig_of()
    counts = RequestCounts(served=3, failed=1, rejected=2, cancelled=1, retried=4)
    for sequence in (1, 1, 2, 1, 2):
        rig.batch(sequence=sequence, requests=counts)
    assert rig.fleet.view(now=rig.now).totals == counts.plus(counts)
    assert rig.fleet.report_cursors() == {EDGE: 2}


@pytest.mark.rule("S6")
def test_each_boot_has_a_cursor_of_its_own() -> None:
    rig = rig_of()
    one = RequestCounts(served=1)
    rig.batch(sequence=5, requests=one, proxy=OLD)
    rig.batch(sequence=1, requests=one, proxy=NEW)
    rig.batch(sequence=6, requests=one, proxy=OLD)  # sent by the older process before it ended
    assert rig.fleet.view(now=rig.now).totals.served == 3
    assert rig.fleet.report_cursors() == {OLD: 6, NEW: 1}


@pytest.mark.rule("S6")
def test_a_batch_that_was_applied_moves_no_revision() -> None:
    rig = rig_of()
    rig.batch(sequence=1, requests=RequestCounts(served=1))
    before = (rig.fleet.revision, rig.fleet.counters_revision)
    assert rig.batch(sequence=1, requests=RequestCounts(served=1)) == ()
    assert (rig.fleet.revision, rig.fleet.counters_revision) == before
    rig.batch(sequence=2)
    assert rig.fleet.revision == before[0]
    assert rig.fleet.counters_revision > before[1]


@pytest.mark.rule("S6")
def test_outcomes_on_unknown_engines_count_in_the_totals_and_nowhere_else() -> None:
    rig = rig_of()
    rig.batch(rig.run("ghost", Outcome.REFUSED), rig.run("phantom", Outcome.STREAM_COMPLETE, count=4))
    assert rig.saved().unknown_outcomes == {Outcome.REFUSED: 1, Outcome.STREAM_COMPLETE: 4}
    assert {e.id for e in rig.engines()} == {"p", "d"}
    assert all(e.outcomes == {} for e in rig.engines())


@pytest.mark.rule("S6")
def test_a_cursor_goes_an_hour_after_its_proxy() -> None:
    rig = rig_of(placement_max_age_s=10.0)
    rig.send(hello(EDGE))
    rig.batch(sequence=3)
    rig.batch(sequence=8, proxy=OTHER)  # never said hello: its hour runs from its last report
    rig.now += 3599
    rig.tick(Stage.ROLLOVER)
    assert rig.fleet.report_cursors() == {EDGE: 3, OTHER: 8}
    rig.now += 1
    rig.tick(Stage.ROLLOVER)
    assert rig.fleet.report_cursors() == {EDGE: 3}
    rig.send(ProxyLost(proxy=EDGE, reason="gone"))
    rig.now += 3599
    rig.tick(Stage.ROLLOVER)
    assert rig.fleet.report_cursors() == {EDGE: 3}
    rig.send(hello(EDGE))
    rig.now += 5000
    rig.tick(Stage.ROLLOVER)
    assert rig.fleet.report_cursors() == {EDGE: 3}
    rig.send(hello(NEW))  # retires it
    rig.now += 3600
    rig.tick(Stage.ROLLOVER)
    assert rig.fleet.report_cursors() == {}


def test_a_gap_is_accepted_since_refusing_would_stop_for_ever() -> None:
    rig = rig_of()
    rig.batch(sequence=57, requests=RequestCounts(served=1))
    rig.batch(sequence=56, requests=RequestCounts(served=1))
    assert rig.fleet.report_cursors() == {EDGE: 57}
    assert rig.fleet.view(now=rig.now).totals.served == 1
