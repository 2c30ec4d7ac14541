"""What a takeover knows of an engine, a proxy, a report: every field there and back (spec S1, S2, S7, R8)."""

from dataclasses import fields, replace
from typing import Any

import pytest

from narwhal.control.core.engine import Drain, Engine, Held, joining
from narwhal.control.core.events import ProcessIdentity, ProxyConnected, ProxyLost
from narwhal.control.core.evidence import Evidence
from narwhal.control.core.handoff import SavedCursor, SavedDrain, SavedEngine, SavedHold, SavedProxy, SavedRelapses
from narwhal.control.core.persistence import (
    load_cursors,
    load_engine,
    load_proxies,
    moved,
    save_cursors,
    save_engine,
    save_proxies,
)
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.relapse import Relapses
from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.tallies import Cursor, Tallies
from narwhal.reports import ProxyKey
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase
from tests.core.rig import decode

C = FailureClass
PROCESS = ProcessIdentity(version="0.32.0", started_at=1_700_000_000.25)
OLDER = ProcessIdentity(version="0.31.0", started_at=1_600_000_000.5)
SPEC = decode("d")
SETTINGS = CoreSettings(name="fleet", model="tiny", engines=(SPEC,), ramp_s=0.0)
THEN, NOW = 1000.0, 50.0  # clocks of two processes have nothing to do with each other

# Everything that there is to keep of an engine, no two values alike.
LIVE = Engine(
    spec=SPEC,
    role=Phase.PREFILL,
    role_since=THEN - 7.0,
    incarnation=4,
    holds={
        Hold.DRAIN: Held(kind=Hold.DRAIN, reason="new release", since=THEN - 20.0),
        Hold.QUARANTINE: Held(kind=Hold.QUARANTINE, reason="after a failure", since=THEN - 3.0, due=THEN + 9.0),
    },
    identity=PROCESS,
    drain=Drain(
        reason="new release",
        url="http://d",
        since=THEN - 20.0,
        due=THEN + 280.0,
        wall=1_700_000_500.0,
        restart=True,
        whole=False,
        captured=True,
        identity=OLDER,
        settled=True,
        overdue=True,
    ),
    admitted_at=THEN - 90.0,
    backoff_s=40.0,
    evidence=Evidence(
        streaks={C.STREAM: 2, C.TIMEOUT: 5},
        stalls=1,
        timeout_is_stream=True,
        producers={"p1": 3, "p2": 6},
    ),
    relapses=Relapses(
        ejected_for=frozenset({C.STREAM, C.CONNECTION}),
        watched={C.STREAM: THEN + 11.0, C.OVERLOAD: THEN, C.TIMEOUT: THEN + 12.0},
        level=2,
        forget_due=THEN + 70.0,
        held_until=THEN + 10.0,
    ),
    misses=1,
    outcomes={Outcome.STREAM_COMPLETE: 20, Outcome.REFUSED: 3},
)
SAVED = SavedEngine(
    url="http://d",
    role=Phase.PREFILL,
    role_age_s=7.0,
    incarnation=4,
    holds=(
        SavedHold(kind=Hold.DRAIN, reason="new release", age_s=20.0, remaining_s=None),
        SavedHold(kind=Hold.QUARANTINE, reason="after a failure", age_s=3.0, remaining_s=9.0),
    ),
    identity=PROCESS,
    drain=SavedDrain(
        reason="new release",
        url="http://d",
        age_s=20.0,
        remaining_s=280.0,
        wall=1_700_000_500.0,
        restart=True,
        whole=False,
        captured=True,
        identity=OLDER,
        settled=True,
        overdue=True,
    ),
    admitted_age_s=90.0,
    gate_in_s=15.0,
    backoff_s=40.0,
    streaks={C.STREAM: 2, C.TIMEOUT: 5},
    stalls=1,
    timeout_is_stream=True,
    producers={"p1": 3, "p2": 6},
    relapses=SavedRelapses(
        ejected_for=(C.CONNECTION, C.STREAM),  # in one order, whoever writes
        watched_s={C.STREAM: 11.0, C.TIMEOUT: 12.0},  # what has been forgotten is not kept
        level=2,
        forget_in_s=70.0,
        held_for_s=10.0,
    ),
    misses=1,
    outcomes={Outcome.STREAM_COMPLETE: 20, Outcome.REFUSED: 3},
)


def values(record: Any) -> dict[str, Any]:
    """The fields of a record, but for what joins it to its fleet."""
    return {f.name: getattr(record, f.name) for f in fields(record) if f.name != "changes"}


@pytest.mark.rule("S1")
def test_every_field_of_an_engine_is_written() -> None:
    assert save_engine(LIVE, gate_due=THEN + 15.0, now=THEN) == SAVED
    assert list(save_engine(LIVE, gate_due=None, now=THEN).producers) == ["p1", "p2"]  # newest last


@pytest.mark.rule("S1", "S2")
def test_every_field_of_an_engine_is_read_at_another_clock() -> None:
    shift = NOW - THEN
    engine = load_engine(SPEC, SAVED, SETTINGS, now=NOW)
    drain = values(engine.drain)
    assert drain.pop("since") == NOW - 20.0
    assert drain.pop("due") == NOW + 280.0
    assert drain == {k: v for k, v in values(LIVE.drain).items() if k not in ("since", "due")}
    expected = replace(
        LIVE,
        role_since=NOW - 7.0,
        holds={
            Hold.DRAIN: Held(kind=Hold.DRAIN, reason="new release", since=NOW - 20.0),
            Hold.QUARANTINE: Held(kind=Hold.QUARANTINE, reason="after a failure", since=NOW - 3.0, due=NOW + 9.0),
        },
        admitted_at=NOW - 90.0,
        drain=engine.drain,
        # Which failures were those of reading is not kept: until they are over they count as its own (spec F7).
        evidence=replace(LIVE.evidence, own=True),
        relapses=Relapses(
            ejected_for=frozenset({C.STREAM, C.CONNECTION}),
            watched={C.STREAM: THEN + 11.0 + shift, C.TIMEOUT: THEN + 12.0 + shift},
            level=2,
            forget_due=NOW + 70.0,
            held_until=NOW + 10.0,
        ),
    )
    assert values(engine) == values(expected)


@pytest.mark.rule("S1")
def test_an_engine_of_which_there_is_nothing_to_keep() -> None:
    fresh = joining(SPEC, now=THEN)
    saved = save_engine(fresh, gate_due=None, now=THEN)
    assert saved == SavedEngine(
        url="http://d",
        role=Phase.DECODE,
        role_age_s=None,
        incarnation=0,
        holds=(SavedHold(kind=Hold.JOINING, reason="never admitted", age_s=0.0, remaining_s=None),),
        identity=None,
        drain=None,
        admitted_age_s=None,
        gate_in_s=None,
        backoff_s=0.0,
        streaks={},
        stalls=0,
        timeout_is_stream=False,
        producers={},
        relapses=SavedRelapses(),
        misses=0,
        outcomes={},
    )
    assert values(load_engine(SPEC, saved, SETTINGS, now=NOW)) == values(joining(SPEC, now=NOW))


@pytest.mark.rule("S1")
def test_ages_and_remaining_times_are_never_below_zero() -> None:
    """An instant that lies ahead, or a deadline that has passed, while the document is being written."""
    drain = replace(LIVE.drain, since=THEN + 0.5, due=THEN - 5.0) if LIVE.drain is not None else None
    holds = {Hold.DRAIN: Held(kind=Hold.DRAIN, reason="new release", since=THEN + 0.5)}
    relapses = Relapses(forget_due=THEN - 1.0, held_until=THEN - 2.0)
    early = replace(LIVE, role_since=THEN + 0.5, admitted_at=THEN + 0.5, drain=drain, holds=holds, relapses=relapses)
    saved = save_engine(early, gate_due=THEN - 1.0, now=THEN)
    assert saved.drain is not None
    assert (saved.role_age_s, saved.admitted_age_s, saved.gate_in_s) == (0.0, 0.0, 0.0)
    assert (saved.drain.age_s, saved.drain.remaining_s, saved.holds[0].age_s) == (0.0, 0.0, 0.0)
    assert (saved.relapses.forget_in_s, saved.relapses.held_for_s) == (0.0, 0.0)


@pytest.mark.rule("S1")
def test_what_was_over_by_the_time_it_is_read_is_not_taken_up() -> None:
    holds = (*SAVED.holds[:1], replace(SAVED.holds[1], remaining_s=0.0))
    relapses = replace(SAVED.relapses, watched_s={C.STREAM: 0.0, C.TIMEOUT: 0.5})
    engine = load_engine(SPEC, replace(SAVED, holds=holds, relapses=relapses), SETTINGS, now=NOW)
    assert set(engine.holds) == {Hold.DRAIN}
    assert engine.relapses.watched == {C.TIMEOUT: NOW + 0.5}
    one_left = (*SAVED.holds[:1], replace(SAVED.holds[1], remaining_s=0.5))
    assert set(load_engine(SPEC, replace(SAVED, holds=one_left), SETTINGS, now=NOW).holds) == set(LIVE.holds)


@pytest.mark.rule("S2", "C2")
def test_a_pin_in_the_fleet_file_goes_before_the_role_that_was_saved() -> None:
    assert load_engine(decode("d", pinned=True), SAVED, SETTINGS, now=NOW).role is Phase.DECODE
    assert load_engine(decode("d"), SAVED, SETTINGS, now=NOW).role is Phase.PREFILL


@pytest.mark.rule("R10")
@pytest.mark.parametrize(
    ("age_s", "ramp_s", "weight", "steps"),
    [
        (0.0, 9.0, 0.1, 9),
        (4.0, 9.0, 0.5, 5),  # it goes on where it was
        (90.0, 9.0, 1.0, 0),
        (0.0, 0.0, 1.0, 0),
    ],
)
def test_an_engine_in_service_goes_on_with_its_ramp(age_s: float, ramp_s: float, weight: float, steps: int) -> None:
    settings = replace(SETTINGS, ramp_s=ramp_s)
    serving = replace(SAVED, holds=(), drain=None, admitted_age_s=age_s)
    engine = load_engine(SPEC, serving, settings, now=NOW)
    assert (engine.weight(now=NOW), engine.settled_weight, len(engine.ramp)) == (weight, weight, steps)


@pytest.mark.rule("R10")
def test_an_engine_that_is_out_or_was_never_in_has_no_ramp() -> None:
    settings = replace(SETTINGS, ramp_s=30.0)
    out = (SavedHold(kind=Hold.EJECTED, reason="dead", age_s=1.0, remaining_s=None),)
    for saved in (
        replace(SAVED, holds=out, drain=None, admitted_age_s=5.0),
        replace(SAVED, holds=(), drain=None, admitted_age_s=None),
    ):
        engine = load_engine(SPEC, saved, settings, now=NOW)
        assert (engine.ramp, engine.settled_weight) == ((), 1.0)


ELSEWHERE = replace(SPEC, url="http://elsewhere")


@pytest.mark.rule("R8")
def test_an_engine_at_another_address_joins_with_its_drain_and_what_that_asks_for() -> None:
    engine = load_engine(ELSEWHERE, SAVED, SETTINGS, now=NOW)
    assert engine.holds[Hold.JOINING].reason == "its address changed from http://d"
    assert set(engine.holds) == {Hold.JOINING, Hold.DRAIN}
    assert (engine.spec, engine.role, engine.incarnation) == (ELSEWHERE, Phase.DECODE, 4)
    assert engine.drain is not None
    drain = engine.drain
    assert (drain.restart, drain.reason, drain.url, drain.identity) == (True, "new release", "http://d", OLDER)
    assert engine.outcomes == LIVE.outcomes
    assert engine.evidence.streaks == {}


@pytest.mark.rule("R8")
def test_one_that_was_joining_already_keeps_its_counters_and_what_shut_it() -> None:
    saved = replace(
        SAVED, holds=(*SAVED.holds, SavedHold(kind=Hold.JOINING, reason="new", age_s=1.0, remaining_s=None))
    )
    engine = load_engine(ELSEWHERE, saved, SETTINGS, now=NOW)
    assert set(engine.holds) == {Hold.JOINING, Hold.DRAIN}
    assert engine.holds[Hold.JOINING] == Held(kind=Hold.JOINING, reason="its address changed from http://d", since=NOW)
    assert (engine.incarnation, engine.outcomes, engine.identity) == (4, LIVE.outcomes, None)
    assert engine.drain is not None
    assert engine.drain.restart
    other = moved(joining(SPEC, now=1.0), ELSEWHERE, now=NOW)
    assert (other.spec, other.drain, set(other.holds)) == (ELSEWHERE, None, {Hold.JOINING})


HERE, GONE = ProxyKey(id="edge", slot=0, boot=3), ProxyKey(id="edge", slot=1, boot=4)


def two_proxies(max_age_s: float) -> Proxies:
    proxies = Proxies(max_age_s=max_age_s)
    for key in (GONE, HERE):
        proxies.connected(ProxyConnected(proxy=key, address="a:1", pid=1, highest_epoch=0), now=THEN)
    proxies.lost(ProxyLost(proxy=GONE, reason="reset"), now=THEN)
    return proxies


SAVED_PROXIES = (
    SavedProxy(id="edge", slot=0, boot=3, connected=True, counts_for_s=None),
    SavedProxy(id="edge", slot=1, boot=4, connected=False, counts_for_s=590.0),
)


@pytest.mark.rule("S1")
def test_every_proxy_that_may_be_placing_legs_is_written() -> None:
    assert save_proxies(two_proxies(600.0), now=THEN + 10.0) == SAVED_PROXIES
    assert save_proxies(two_proxies(0.0), now=THEN + 10.0)[1].counts_for_s is None


@pytest.mark.rule("S7", "R4", "P7")
@pytest.mark.parametrize(("max_age_s", "until"), [(600.0, NOW + 600.0), (0.0, None)])
def test_proxies_are_lost_until_they_say_hello(max_age_s: float, until: float | None) -> None:
    proxies = Proxies(max_age_s=max_age_s)
    load_proxies(proxies, SAVED_PROXIES, replace(SETTINGS, placement_max_age_s=max_age_s), now=NOW)
    # Whoever was connected may have lost control only when control went; the other's time goes on running.
    assert [(p.key, p.connected, p.counts_until) for p in proxies.known()] == [
        (HERE, False, until),
        (GONE, False, NOW + 590.0),
    ]


@pytest.mark.rule("S6")
def test_report_cursors_are_kept_for_an_hour_after_their_proxy_went() -> None:
    tallies = Tallies(cursors={HERE: Cursor(sequence=7), GONE: Cursor(sequence=9, drop_due=THEN + 100.0)})
    saved = save_cursors(tallies, now=THEN + 1.0)
    assert saved == (
        SavedCursor(id="edge", slot=0, boot=3, sequence=7, drop_in_s=None),
        SavedCursor(id="edge", slot=1, boot=4, sequence=9, drop_in_s=99.0),
    )
    # The hour of one whose proxy was connected begins when its control is gone, and ends when it comes.
    assert load_cursors(saved, now=NOW) == {
        HERE: Cursor(sequence=7, drop_due=NOW + 3600.0),
        GONE: Cursor(sequence=9, drop_due=NOW + 99.0),
    }
