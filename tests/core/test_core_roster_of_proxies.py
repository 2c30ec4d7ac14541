"""The roster of proxies by itself: what it tells people, and who stands for a slot (spec P6, R4)."""

from dataclasses import replace

import pytest

from narwhal.control.core.events import (
    CommandRefusedError,
    ForgetCommand,
    ProxyAcked,
    ProxyConnected,
    ProxyLeft,
    ProxyLost,
    ProxyNacked,
    Refusal,
)
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.view import ProxyView
from narwhal.reports import ProxyKey

OLD, NEW = (ProxyKey(id="edge", slot=0, boot=boot) for boot in (1, 2))
SECOND = ProxyKey(id="edge", slot=1, boot=1)
KIND = EventKind


def hello(key: ProxyKey, stream: int = 1) -> ProxyConnected:
    return ProxyConnected(proxy=key, address="10.0.0.1:8000", pid=7, highest_epoch=3, stream=stream)


def told(kind: EventKind, message: str, proxy: str = "edge/0") -> Record:
    return Record(kind=kind, message=message, proxy=proxy)


CAME = told(KIND.PROXY_CONNECTED, "proxy edge/0 connected from 10.0.0.1:8000 (pid 7)")


def with_old(max_age_s: float = 600.0) -> Proxies:
    """Boot 1 of edge/0 has come on its second stream, applies 1.5 and carries work."""
    proxies = Proxies(max_age_s=max_age_s)
    assert proxies.connected(hello(OLD, stream=2), now=100.0) == ([CAME], None)
    proxies.acked(ProxyAcked(proxy=OLD, epoch=1, version=5, resident={"d": 2}, unread={"p": 1}), now=101.0)
    return proxies


def views(proxies: Proxies, now: float = 110.0) -> list[ProxyView]:
    return list(proxies.view(suspect=lambda key: f"why {key}", now=now))


SEEN = ProxyView(
    key=OLD,
    address="10.0.0.1:8000",
    pid=7,
    connected=True,
    acked=(1, 5),
    refused=None,
    refused_reason="",
    silent_s=9.0,
    resident={"d": 2},
    unread={"p": 1},
    suspect="why edge/0",
)


@pytest.mark.rule("P6")
def test_what_is_shown_of_a_proxy() -> None:
    assert views(with_old()) == [SEEN]


@pytest.mark.rule("P6")
def test_the_same_process_on_a_new_stream_still_applies_and_carries_what_it_did() -> None:
    proxies = with_old()
    assert proxies.connected(hello(OLD, stream=3), now=110.0) == ([CAME], None)
    assert views(proxies) == [replace(SEEN, silent_s=0.0)]


@pytest.mark.rule("P6")
def test_a_newer_boot_retires_the_older_and_begins_with_nothing() -> None:
    proxies = with_old()
    retired = told(KIND.PROXY_RETIRED, "proxy edge/0 was restarted; its process before counts no longer")
    assert proxies.connected(hello(NEW), now=110.0) == ([retired, CAME], OLD)
    assert views(proxies) == [replace(SEEN, key=NEW, acked=(0, 0), silent_s=0.0, resident={}, unread={})]
    late = told(
        KIND.PROXY_RETIRED, "proxy edge/0 connected from a process older than the one known, and does not count"
    )
    assert proxies.connected(hello(OLD, stream=9), now=111.0) == ([late], OLD)
    assert [view.key for view in views(proxies)] == [NEW]
    # It may also be the newer one on a machine whose clock went back: that is for an operator to say.
    proxies.lost(ProxyLost(proxy=NEW, reason="reset", stream=1), now=112.0)
    hint = "; if it is the newer one, the clock there went back: it counts after `narwhalctl proxies forget edge/0`"
    assert proxies.connected(hello(OLD, stream=9), now=113.0) == ([replace(late, message=late.message + hint)], OLD)
    proxies.forget(ForgetCommand(id="edge", slot=0))
    assert proxies.connected(hello(OLD, stream=10), now=114.0) == ([CAME], None)


@pytest.mark.rule("P6")
def test_a_refusal_names_the_placement_and_stays_until_one_at_least_as_new_is_applied() -> None:
    proxies = with_old()
    nack = ProxyNacked(proxy=OLD, epoch=1, version=6, reason="engine d listed twice")
    assert proxies.nacked(nack, now=105.0) == [
        told(KIND.PLACEMENT_REFUSED, "proxy edge/0 refused placement 1.6: engine d listed twice")
    ]
    refused = replace(SEEN, refused=(1, 6), refused_reason="engine d listed twice", silent_s=5.0)
    assert views(proxies) == [refused]
    proxies.acked(ProxyAcked(proxy=OLD, epoch=1, version=5), now=110.0)
    assert (views(proxies)[0].refused, views(proxies)[0].refused_reason) == ((1, 6), "engine d listed twice")
    proxies.acked(ProxyAcked(proxy=OLD, epoch=1, version=6), now=110.0)
    assert (views(proxies)[0].refused, views(proxies)[0].refused_reason) == (None, "")
    assert proxies.nacked(replace(nack, proxy=NEW), now=110.0) == []


@pytest.mark.rule("P6", "R4")
def test_one_that_is_lost_is_told_of_once_and_counts_for_its_bound() -> None:
    proxies = with_old(max_age_s=600.0)
    lost = ProxyLost(proxy=OLD, reason="silent for 10 s", stream=2)
    assert proxies.lost(replace(lost, stream=1), now=110.0) == []
    assert proxies.lost(replace(lost, proxy=NEW), now=110.0) == []
    assert proxies.lost(lost, now=110.0) == [told(KIND.PROXY_LOST, "proxy edge/0 lost: silent for 10 s")]
    assert proxies.lost(lost, now=300.0) == []
    found = proxies.find(OLD)
    assert found is not None
    assert (found.connected, found.counts_until) == (False, 710.0)
    # Another bound in the fleet file is for those that are lost from now on.
    proxies.configure(max_age_s=50.0)
    proxies.connected(hello(SECOND), now=300.0)
    proxies.lost(ProxyLost(proxy=SECOND, reason="reset", stream=1), now=300.0)
    proxies.drop_old(now=349.9)
    assert [view.key for view in views(proxies)] == [OLD, SECOND]
    proxies.drop_old(now=350.0)
    assert [view.key for view in views(proxies)] == [OLD]
    proxies.drop_old(now=710.0)
    assert views(proxies) == []


@pytest.mark.rule("P7", "S7")
@pytest.mark.parametrize(("counts_for_s", "until"), [(30.0, 130.0), (None, None)])
def test_one_that_the_control_process_before_knew_is_lost_until_it_says_hello(
    counts_for_s: float | None, until: float | None
) -> None:
    proxies = Proxies(max_age_s=600.0)
    proxies.restore(OLD, counts_for_s=counts_for_s, now=100.0)
    found = proxies.find(OLD)
    assert found is not None
    assert (found.connected, found.counts_until, found.heard_at) == (False, until, 100.0)
    assert proxies.connected(hello(OLD), now=110.0) == ([CAME], None)
    found = proxies.find(OLD)
    assert found is not None
    assert (found.connected, found.counts_until) == (True, None)


@pytest.mark.rule("P6")
def test_a_goodbye() -> None:
    proxies = with_old()
    assert proxies.left(ProxyLeft(proxy=NEW, reason="SIGTERM")) == []
    assert proxies.left(ProxyLeft(proxy=OLD, reason="SIGTERM")) == [told(KIND.PROXY_LEFT, "proxy edge/0 left: SIGTERM")]
    assert proxies.known() == ()
    assert proxies.left(ProxyLeft(proxy=OLD, reason="SIGTERM")) == []


def both_lost() -> Proxies:
    proxies = with_old()
    proxies.connected(hello(SECOND), now=100.0)
    for key, stream in ((OLD, 2), (SECOND, 1)):
        proxies.lost(ProxyLost(proxy=key, reason="reset", stream=stream), now=110.0)
    return proxies


@pytest.mark.rule("R4")
def test_an_operator_forgets_all_workers_of_a_proxy_or_one() -> None:
    forgotten = [
        told(KIND.PROXY_FORGOTTEN, f"proxy {name} is forgotten (an operator says that it is gone)", name)
        for name in ("edge/0", "edge/1")
    ]
    assert both_lost().forget(ForgetCommand(id="edge")) == forgotten
    proxies = both_lost()
    assert proxies.forget(ForgetCommand(id="edge", slot=1)) == forgotten[1:]
    assert [proxy.key for proxy in proxies.known()] == [OLD]
    assert proxies.forget(ForgetCommand(id="edge", slot=0)) == forgotten[:1]


@pytest.mark.rule("R4")
@pytest.mark.parametrize(
    ("command", "refusal", "words"),
    [
        (ForgetCommand(id="other"), Refusal.NOT_FOUND, "no proxy other is known"),
        (ForgetCommand(id="edge", slot=4), Refusal.NOT_FOUND, "no proxy edge/4 is known"),
        (
            ForgetCommand(id="edge"),
            Refusal.PRECONDITION,
            "proxy edge/0, edge/1 is connected: stop it, then it says goodbye by itself",
        ),
        (
            ForgetCommand(id="edge", slot=0),
            Refusal.PRECONDITION,
            "proxy edge/0 is connected: stop it, then it says goodbye by itself",
        ),
    ],
)
def test_forgetting_what_is_connected_or_unknown_is_refused_with_the_reason(
    command: ForgetCommand, refusal: Refusal, words: str
) -> None:
    proxies = with_old()
    proxies.connected(hello(SECOND), now=100.0)
    with pytest.raises(CommandRefusedError) as refused:
        proxies.forget(command)
    assert (refused.value.refusal, str(refused.value)) == (refusal, words)
    assert [proxy.key for proxy in proxies.known()] == [OLD, SECOND]


def test_whatever_changes_who_counts_is_seen_by_a_number_that_rises() -> None:
    proxies = both_lost()
    seen = [proxies.changed]
    for change in (
        lambda: proxies.connected(hello(OLD, stream=3), now=111.0),
        lambda: proxies.lost(ProxyLost(proxy=OLD, reason="reset", stream=3), now=112.0),
        lambda: proxies.left(ProxyLeft(proxy=OLD, reason="SIGTERM")),
        lambda: proxies.forget(ForgetCommand(id="edge", slot=1)),
        lambda: proxies.connected(hello(NEW), now=120.0),
        lambda: proxies.lost(ProxyLost(proxy=NEW, reason="reset", stream=1), now=120.0),
        lambda: proxies.drop_old(now=720.0),
    ):
        change()
        seen.append(proxies.changed)
    assert seen == sorted(set(seen))
    proxies.acked(ProxyAcked(proxy=OLD, epoch=1, version=6), now=112.0)
    proxies.drop_old(now=10_000.0)
    assert proxies.changed == seen[-1]


def test_legs_are_added_up_over_all_proxies() -> None:
    proxies = with_old()
    assert proxies.resident() == {"d": 2}
    proxies.connected(hello(SECOND), now=100.0)
    proxies.acked(ProxyAcked(proxy=SECOND, epoch=1, version=5, resident={"d": 3, "e": 1}), now=101.0)
    assert proxies.resident() == {"d": 5, "e": 1}
