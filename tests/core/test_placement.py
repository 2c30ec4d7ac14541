"""The placement value: order, candidates, choice."""

import random
from collections import Counter

import pytest

from narwhal.placement import EngineEntry, Placement
from narwhal.vocabulary import Hold, Phase

BOTH = frozenset(Phase)
PREFILL = frozenset({Phase.PREFILL})
DECODE = frozenset({Phase.DECODE})
NONE: frozenset[Phase] = frozenset()


def engine(name: str, phases: frozenset[Phase] = DECODE, **more: object) -> EngineEntry:
    fields = {"id": name, "url": f"http://{name}", "role": Phase.DECODE, "phases": phases, "incarnation": 1, **more}
    return EngineEntry(**fields)  # type: ignore[arg-type]


def placed(*engines: EngineEntry, epoch: int = 1, version: int = 1) -> Placement:
    return Placement(epoch=epoch, version=version, engines={e.id: e for e in engines})


@pytest.mark.rule("P5")
@pytest.mark.parametrize(
    ("new", "old", "wins"),
    [
        ((1, 2), (1, 1), True),
        ((1, 1), (1, 1), False),
        ((1, 1), (1, 2), False),
        ((2, 1), (1, 9), True),
        ((1, 9), (2, 1), False),
    ],
)
def test_order_is_epoch_then_version(new: tuple[int, int], old: tuple[int, int], wins: bool) -> None:
    assert placed(epoch=new[0], version=new[1]).supersedes(placed(epoch=old[0], version=old[1])) is wins


def test_anything_supersedes_nothing() -> None:
    assert placed().supersedes(None)


def test_same_content_looks_past_versions() -> None:
    assert placed(engine("a"), version=1).same_content(placed(engine("a"), version=7))
    assert not placed(engine("a")).same_content(placed(engine("a", holds=(Hold.DRAIN,))))
    assert not placed(engine("a")).same_content(placed())


@pytest.mark.parametrize("bad", [{"id": ""}, {"url": ""}, {"weight": 0.0}, {"weight": 1.5}, {"weight": float("nan")}])
def test_an_entry_that_makes_no_sense_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"id and a url|weight"):
        engine("a", **bad)  # type: ignore[arg-type]


@pytest.mark.rule("P3")
def test_less_work_for_its_weight_wins() -> None:
    p = placed(engine("a"), engine("b"))
    for draws in ((0.0, 0.0), (0.9, 0.9), (0.0, 0.9)):
        chosen = p.choose(Phase.DECODE, now=0, load={"a": 3, "b": 1}, draws=draws)
        assert chosen is not None
        assert chosen.id == "b"
    # Half the weight carries half the work: 2 legs on weight 0.5 are as 4 on weight 1.
    p = placed(engine("a", weight=0.5), engine("b"))
    chosen = p.choose(Phase.DECODE, now=0, load={"a": 2, "b": 3}, draws=(0.0, 0.0))
    assert chosen is not None
    assert chosen.id == "b"


@pytest.mark.rule("P3")
def test_two_choices_spread_over_all_and_avoid_the_fullest() -> None:
    draw = random.Random(7)
    p = placed(*(engine(f"e{i}") for i in range(6)))
    load: Counter[str] = Counter()
    for _ in range(600):
        chosen = p.choose(Phase.DECODE, now=0, load=load, draws=(draw.random(), draw.random()))
        assert chosen is not None
        load[chosen.id] += 1
    assert set(load) == {f"e{i}" for i in range(6)}
    assert max(load.values()) - min(load.values()) <= 8


@pytest.mark.rule("P3", "R10")
@pytest.mark.parametrize(("busy", "least", "most"), [(0, 0.02, 0.10), (1, 0.08, 0.25), (4, 0.3, 0.7), (20, 1.0, 1.0)])
def test_an_engine_of_a_tenth_of_the_weight_is_chosen_now_and_then(busy: int, least: float, most: float) -> None:
    """Right after readmission, at rest too: an engine that gets no work at all proves nothing."""
    draw = random.Random(11)
    p = placed(engine("back", weight=0.1), engine("peer"))
    chosen = [
        p.choose(Phase.DECODE, now=0, load={"peer": busy}, draws=(draw.random(), draw.random())) for _ in range(2000)
    ]
    share = sum(e is not None and e.id == "back" for e in chosen) / len(chosen)
    assert least <= share <= most


@pytest.mark.rule("P3")
def test_of_equals_the_one_with_fewer_legs_is_chosen_whatever_the_draws() -> None:
    draw = random.Random(12)
    p = placed(engine("a"), engine("b"))
    for _ in range(500):
        chosen = p.choose(Phase.DECODE, now=0, load={"a": 4, "b": 3}, draws=(draw.random(), draw.random()))
        assert chosen is not None
        assert chosen.id == "b"


def test_avoided_engines_serve_when_nobody_else_can() -> None:
    p = placed(engine("a"), engine("b"))
    one = p.choose(Phase.DECODE, now=0, load={"b": 9}, draws=(0.0, 0.0), avoid={"a"})
    assert one is not None
    assert one.id == "b"
    both = p.choose(Phase.DECODE, now=0, load={"b": 9}, draws=(0.0, 0.0), avoid={"a", "b"})
    assert both is not None
    assert both.id == "a"


@pytest.mark.rule("P9")
def test_a_full_engine_takes_nothing() -> None:
    p = placed(engine("a", max_inflight=2), engine("b", max_inflight=1))
    chosen = p.choose(Phase.DECODE, now=0, load={"a": 1, "b": 1}, draws=(0.9, 0.9))
    assert chosen is not None
    assert chosen.id == "a"
    assert p.choose(Phase.DECODE, now=0, load={"a": 2, "b": 1}, draws=(0.0, 0.0)) is None
    assert p.candidates(Phase.DECODE, now=0)  # saturated, not without engines


def test_nobody_serves_a_phase_that_no_engine_may() -> None:
    p = placed(engine("a", phases=NONE, holds=(Hold.EJECTED,)))
    assert p.candidates(Phase.DECODE, now=0) == ()
    assert p.choose(Phase.DECODE, now=0, load={}, draws=(0.0, 0.0)) is None


@pytest.mark.rule("H4")
def test_a_quarantine_ends_by_itself_where_candidates_are_selected() -> None:
    held = engine("a", phases=NONE, holds=(Hold.QUARANTINE,), quarantine_due=10.0, phases_after_quarantine=DECODE)
    p = placed(held, engine("b", phases=PREFILL))
    assert p.candidates(Phase.DECODE, now=9.99) == ()
    assert p.candidates(Phase.DECODE, now=10.0) == (held,)
    assert p.candidates(Phase.PREFILL, now=10.0) == (p.engines["b"],)


class Counting(dict[str, int]):
    """Legs in flight, and how often it was asked for them."""

    asked = 0

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        self.asked += 1
        return super().get(key, default)


@pytest.mark.rule("P3")
@pytest.mark.parametrize("cap", [0, 8])
def test_a_large_fleet_is_not_gone_through_for_every_leg(cap: int) -> None:
    draw = random.Random(13)
    p = placed(*(engine(f"e{i}", max_inflight=cap) for i in range(1000)))
    load = Counting()
    for _ in range(50):
        chosen = p.choose(Phase.DECODE, now=0, load=load, draws=(draw.random(), draw.random()), avoid={"e1", "e999"})
        assert chosen is not None
        assert chosen.id not in {"e1", "e999"}
    assert load.asked <= 50 * 4


@pytest.mark.rule("P3", "V4")
@pytest.mark.parametrize("avoid", [set(), {"a"}, {"f"}, {"c", "a"}, {"b", "c", "d", "e"}, {"a", "b", "c", "d", "e"}])
@pytest.mark.parametrize("full", [set(), {"b"}, {"a", "f"}, {"b", "c", "d", "e", "f"}])
def test_every_engine_that_is_free_and_not_avoided_is_chosen_equally_often(avoid: set[str], full: set[str]) -> None:
    draw = random.Random(14)
    names = "abcdef"
    p = placed(*(engine(name, max_inflight=1) for name in names))
    wanted = set(names) - avoid - full
    chosen: Counter[str] = Counter()
    for _ in range(1200):
        one = p.choose(
            Phase.DECODE,
            now=0,
            load=dict.fromkeys(full, 1),
            draws=(draw.random(), draw.random()),
            avoid=avoid,
        )
        chosen["none" if one is None else one.id] += 1
    assert set(chosen) == (wanted or {"none"})
    assert min(chosen.values()) > 0.7 * max(chosen.values())
