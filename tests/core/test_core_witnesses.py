"""Whose word counts: what other proxies saw of the same engines (spec F10, F12)."""

import pytest

from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.witnesses import Witnesses
from narwhal.reports import ProxyKey

ONE, TWO, THREE = (ProxyKey(id=name, slot=0, boot=1) for name in ("one", "two", "three"))
FLEET = ("a", "b", "c")
TRUSTED = Record(kind=EventKind.PROXY_TRUSTED, message="proxy one/0 is suspect no longer", proxy="one/0")
OWN = "its legs fail by causes of its own"


def suspected(reason: str) -> Record:
    return Record(kind=EventKind.PROXY_SUSPECT, message=f"proxy one/0 is suspect itself: {reason}", proxy="one/0")


def others_work(witnesses: Witnesses, *, now: float) -> None:
    for engine in FLEET:
        witnesses.success(TWO, engine, now=now)


def fails(witnesses: Witnesses, engine: str, *, now: float) -> tuple[bool, list[Record]]:
    return witnesses.at_fault(ONE, engine, in_service=FLEET, now=now)


def suspect_one() -> Witnesses:
    """One fails on two of three engines, on which another proxy succeeds."""
    witnesses = Witnesses()
    others_work(witnesses, now=100.0)
    assert fails(witnesses, "a", now=100.0) == (False, [])
    reason = "its legs fail on 2 of 3 engines that serve other proxies"
    assert fails(witnesses, "b", now=100.0) == (True, [suspected(reason)])
    assert witnesses.suspect(ONE) == reason
    return witnesses


@pytest.mark.rule("F12")
def test_a_proxy_that_fails_alone_on_most_engines_is_told_of_once() -> None:
    witnesses = suspect_one()
    assert fails(witnesses, "c", now=100.5) == (True, [])
    assert witnesses.suspect(TWO) == ""


@pytest.mark.rule("F12")
@pytest.mark.parametrize(("after_s", "fault"), [(1.9, True), (2.0, False)])
def test_the_successes_of_others_speak_for_two_seconds(after_s: float, fault: bool) -> None:
    witnesses = Witnesses()
    others_work(witnesses, now=100.0)
    fails(witnesses, "a", now=100.0)
    assert fails(witnesses, "b", now=100.0 + after_s)[0] is fault


@pytest.mark.rule("F12")
def test_its_own_successes_do_not_speak_against_it_and_another_one_before_them_does() -> None:
    alone = Witnesses()
    for engine in FLEET:
        alone.success(ONE, engine, now=100.0)
    assert [fails(alone, engine, now=100.0)[0] for engine in FLEET] == [False, False, False]
    witnesses = Witnesses()
    others_work(witnesses, now=100.0)
    for engine in FLEET:
        witnesses.success(ONE, engine, now=100.1)
        witnesses.success(ONE, engine, now=100.2)
    assert [fails(witnesses, engine, now=100.3)[0] for engine in FLEET] == [False, True, True]


@pytest.mark.rule("F12")
@pytest.mark.parametrize(
    ("in_service", "faults"),
    [
        (("a",), [False]),  # one engine is never most
        (("a", "b"), [False, True]),
        (("a", "b", "c", "d"), [False, False, True]),  # half of them is not more than half
    ],
)
def test_most_is_more_than_half_and_at_least_two(in_service: tuple[str, ...], faults: list[bool]) -> None:
    witnesses = Witnesses()
    for engine in in_service:
        witnesses.success(TWO, engine, now=100.0)
    for engine, fault in zip(in_service, faults, strict=False):
        assert witnesses.at_fault(ONE, engine, in_service=in_service, now=100.0)[0] is fault


@pytest.mark.rule("F12")
def test_an_engine_that_is_out_of_service_no_longer_counts_as_one_it_fails_on() -> None:
    witnesses = Witnesses()
    others_work(witnesses, now=100.0)
    fails(witnesses, "a", now=100.0)
    assert witnesses.at_fault(ONE, "b", in_service=("b", "c"), now=100.0) == (False, [])
    # Nor when it is another engine under the same id.
    others_work(witnesses, now=100.0)
    witnesses.forget_engine("b")
    assert fails(witnesses, "c", now=100.0)[0] is False


@pytest.mark.rule("F12")
def test_it_is_trusted_again_once_it_fails_on_fewer_than_two() -> None:
    witnesses = suspect_one()
    fails(witnesses, "c", now=100.1)
    assert witnesses.success(ONE, "c", now=100.2) == []
    assert witnesses.suspect(ONE) != ""
    assert witnesses.success(ONE, "b", now=100.3) == [TRUSTED]
    assert witnesses.suspect(ONE) == ""
    assert witnesses.success(ONE, "a", now=100.4) == []


@pytest.mark.rule("F12")
def test_it_is_trusted_again_when_the_others_fail_too() -> None:
    witnesses = suspect_one()
    assert fails(witnesses, "c", now=102.0) == (False, [TRUSTED])
    assert fails(witnesses, "c", now=102.0) == (False, [])


@pytest.mark.rule("F5", "F12")
def test_causes_of_its_own_are_shown_for_a_minute_after_the_newest() -> None:
    witnesses = Witnesses()
    assert witnesses.own_cause(ONE, now=100.0) == [suspected(OWN)]
    assert witnesses.own_cause(ONE, now=130.0) == []
    assert witnesses.expire(now=189.9) == []
    assert witnesses.suspect(ONE) == OWN
    assert witnesses.expire(now=190.0) == [TRUSTED]
    assert witnesses.expire(now=300.0) == []
    assert witnesses.suspect(ONE) == ""


@pytest.mark.rule("F12")
def test_failing_alone_is_the_weightier_reason_of_the_two() -> None:
    witnesses = Witnesses()
    witnesses.own_cause(ONE, now=100.0)
    others_work(witnesses, now=100.0)
    # Its successes do not end what a minute ends, nor does a failure that others share.
    assert witnesses.success(ONE, "a", now=100.0) == []
    assert fails(witnesses, "a", now=100.0) == (False, [])
    assert fails(witnesses, "b", now=100.0)[1][0].message.endswith("fail on 2 of 3 engines that serve other proxies")
    assert witnesses.own_cause(ONE, now=100.0) == []
    assert witnesses.expire(now=1000.0) == []  # only its own successes end this one
    assert witnesses.suspect(ONE).endswith("that serve other proxies")


def test_of_a_proxy_that_is_gone_nothing_is_kept() -> None:
    witnesses = suspect_one()
    witnesses.forget_proxy(TWO)
    assert witnesses.suspect(ONE) != ""
    witnesses.forget_proxy(ONE)
    assert witnesses.suspect(ONE) == ""
    witnesses = suspect_one()
    witnesses.forget_others({ONE})
    assert witnesses.suspect(ONE) != ""
    witnesses.forget_others({TWO})
    assert witnesses.suspect(ONE) == ""


@pytest.mark.rule("F10")
def test_a_stall_is_contradicted_by_what_another_proxy_had_within_its_limit() -> None:
    witnesses = Witnesses()

    def contradicted(proxy: ProxyKey, now: float, limit_s: float = 3.0) -> bool:
        return witnesses.contradicts_stall(proxy, "a", limit_s=limit_s, now=now)

    assert not contradicted(ONE, 100.0)
    witnesses.success(ONE, "a", now=100.0)
    assert not contradicted(ONE, 100.0)  # its own legs it has looked at
    # A report is up to a second old when it comes, so what it tells of may be too.
    assert [contradicted(TWO, now) for now in (100.0, 101.9, 102.0)] == [True, True, False]
    assert contradicted(TWO, 128.9, limit_s=30.0)
    witnesses.success(TWO, "a", now=101.0)
    witnesses.success(TWO, "a", now=104.0)
    # The newest of somebody else, whoever spoke last.
    assert [contradicted(proxy, 104.0) for proxy in (ONE, TWO, THREE)] == [True, False, True]
    witnesses.forget_engine("a")
    assert not contradicted(ONE, 104.0)
