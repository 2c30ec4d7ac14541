"""What a proxy applies, refuses and says of itself: the decisions, with literal instants."""

import math

import pytest

from narwhal.placement import EngineEntry
from narwhal.proxy.held import Held, Outdated, Refused
from narwhal.vocabulary import Phase
from tests.proxy.fake_control import entry, placement

P = frozenset({Phase.PREFILL})


@pytest.mark.rule("P5")
def test_a_lower_epoch_is_refused_however_high_its_version() -> None:
    held = Held()
    held.offer(placement(5, 1), now=0.0)
    with pytest.raises(Outdated, match="epoch 4 is below 5"):
        held.offer(placement(4, 900), now=1.0)
    assert held.order == (5, 1)


@pytest.mark.rule("P5")
def test_an_epoch_counts_as_seen_even_when_its_placement_was_refused() -> None:
    held = Held()
    held.offer(placement(5, 3), now=0.0)
    with pytest.raises(Refused):
        held.offer(placement(6, 1, entry("p1", url="nonsense")), now=1.0)
    assert held.order == (5, 3)
    with pytest.raises(Outdated):
        held.offer(placement(5, 4), now=2.0)


def test_an_older_version_of_the_same_epoch_is_refused_and_the_same_one_welcome() -> None:
    held = Held()
    held.offer(placement(5, 3), now=0.0)
    with pytest.raises(Refused, match="version 2 is older than 3"):
        held.offer(placement(5, 2), now=1.0)
    held.offer(placement(5, 3), now=7.0)
    assert held.age(9.0) == 2.0


@pytest.mark.case("D9")
@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ((entry("p1"), entry("d1", url="127.0.0.1:80")), "engine d1: its url is not an http address"),
        ((entry("p1", url="ftp://host"),), "engine p1: its url"),
        ((entry("p1", url="http://"),), "engine p1: its url"),
        ((entry("p1", url="http://host:99999"),), "engine p1: its url"),
        ((entry("p1", url="http://[::1"),), "engine p1: its url"),
        ((entry("p1", quarantine_due=math.inf),), "its quarantine never ends"),
        ((entry("p1", quarantine_due=math.nan),), "its quarantine never ends"),
    ],
)
def test_strange_engines_are_refused_with_the_reason(engines: tuple[EngineEntry, ...], reason: str) -> None:
    held = Held()
    held.offer(placement(1, 1), now=0.0)
    with pytest.raises(Refused, match=reason):
        held.offer(placement(1, 2, *engines), now=1.0)
    assert held.order == (1, 1)


def test_the_reason_that_control_is_told_is_bounded_however_long_its_names_are() -> None:
    with pytest.raises(Refused, match="engine xxxx") as refused:
        Held().offer(placement(1, 2, entry("x" * 50_000, url="nonsense")), now=1.0)
    assert len(str(refused.value)) == 1000


@pytest.mark.case("D9", "J1")
def test_an_empty_fleet_is_applied_only_when_it_is_meant() -> None:
    held = Held()
    held.offer(placement(1, 1), now=0.0)
    empty = placement(1, 2)
    object.__setattr__(empty, "engines", {})
    with pytest.raises(Refused, match="no engines, although admission is open"):
        held.offer(empty, now=1.0)
    object.__setattr__(empty, "closed", "maintenance")
    held.offer(empty, now=1.0)
    assert held.not_ready(now=1.0, max_age_s=600) == "maintenance"


@pytest.mark.case("D9")
@pytest.mark.parametrize(("epoch", "version"), [(0, 1), (1, 0), (0, 0)])
def test_a_placement_without_a_number_is_refused(epoch: int, version: int) -> None:
    with pytest.raises(Refused):
        Held().offer(placement(epoch, version), now=0.0)


@pytest.mark.rule("P7", "M10")
def test_a_placement_is_believed_for_its_age_and_then_stale() -> None:
    held = Held()
    assert held.not_ready(now=0.0, max_age_s=10) == "no placement"
    assert held.age(0.0) == math.inf
    held.offer(placement(1, 1), now=100.0)
    held.confirm((1, 1), now=105.0)
    assert held.not_ready(now=115.0, max_age_s=10) == ""
    assert held.not_ready(now=115.1, max_age_s=10) == "placement stale"
    assert held.not_ready(now=1e9, max_age_s=0) == ""


@pytest.mark.rule("P7")
def test_word_of_a_newer_placement_does_not_keep_the_one_held_fresh() -> None:
    held = Held()
    held.offer(placement(1, 1), now=0.0)
    for second in range(1, 20):
        held.confirm((1, 2), now=float(second))
    assert held.not_ready(now=11.0, max_age_s=10) == "placement stale"


@pytest.mark.rule("P7", "M10")
def test_admission_that_was_closed_stays_closed_with_controls_reason() -> None:
    held = Held()
    held.offer(placement(1, 1, closed="monitoring degraded: health OSError"), now=0.0)
    assert held.not_ready(now=500.0, max_age_s=600) == "monitoring degraded: health OSError"


@pytest.mark.rule("M10")
@pytest.mark.parametrize(
    ("prefill", "decode", "ready"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_ready_needs_an_eligible_engine_for_each_phase(prefill: bool, decode: bool, ready: bool) -> None:
    held = Held()
    engines = (
        entry("p1", phases=P if prefill else frozenset()),
        entry("d1", Phase.DECODE, phases=frozenset({Phase.DECODE}) if decode else frozenset()),
    )
    held.offer(placement(1, 1, *engines), now=0.0)
    assert held.not_ready(now=0.0, max_age_s=600) == ("" if ready else "no eligible engines")


@pytest.mark.rule("H4", "M10")
def test_a_quarantine_ends_in_the_proxy_without_a_message() -> None:
    held = Held()
    quarantined = entry("p1", phases=frozenset(), quarantine_due=30.0, phases_after_quarantine=P)
    held.offer(placement(1, 1, quarantined, entry("d1", Phase.DECODE)), now=0.0)
    assert held.not_ready(now=29.9, max_age_s=600) == "no eligible engines"
    assert held.not_ready(now=30.0, max_age_s=600) == ""
