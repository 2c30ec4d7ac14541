"""The state handoff: round trip, time that passes, refusals, comparison, reload (spec S1, S2, R8, K5)."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from narwhal.control.core.effects import ProbeHealth, ProbeInference, RunCheck
from narwhal.control.core.events import HealthAnswered, ProxyConnected, ProxyLost, Reloaded, RoleCommand, Woke
from narwhal.control.core.handoff import (
    Handoff,
    HandoffError,
    Resume,
    SavedDrain,
    SavedFleet,
    SavedHold,
    aged,
    compare,
    from_document,
    to_document,
)
from narwhal.control.core.records import EventKind
from narwhal.reports import RequestCounts
from narwhal.vocabulary import FailureClass, Hold, Outcome, Phase, Stage
from tests.core.rig import EDGE, OTHER, PROCESS, Rig, decode, of, only, prefill

C = FailureClass
ENGINES = (prefill("p1"), prefill("p2"), decode("d1"), decode("d2", pinned=True), decode("d3"))


def busy() -> Rig:
    """A fleet with something of everything: ejected, verified, quarantined, relapsed, moved, missed, counted."""
    rig = Rig(*ENGINES, failure_quarantine_s=50.0, ramp_s=30.0, liveness_every=10)
    rig.send(ProxyConnected(proxy=EDGE, address="a:1", pid=1, highest_epoch=0))
    rig.send(ProxyConnected(proxy=OTHER, address="a:2", pid=2, highest_epoch=0))
    rig.send(ProxyLost(proxy=OTHER, reason="gone"))
    rig.batch(requests=RequestCounts(served=10, failed=1, rejected=2, cancelled=3, retried=4))
    rig.pass_probe(rig.report("d1", Outcome.STREAM_CUT, count=3))
    rig.send(RoleCommand(engine="d3", role=Phase.PREFILL))
    rig.report("d1", Outcome.FIRST_TOKEN_TIMEOUT, count=3, producer="p1")
    rig.report("p2", Outcome.REFUSED, count=3)
    rig.report("d2", Outcome.HTTP_5XX)
    rig.report("d3", Outcome.STREAM_COMPLETE, count=20)
    rig.batch(rig.run("ghost", Outcome.REFUSED), proxy=OTHER)
    for _ in range(10):
        for probe in of(rig.run_pass(), ProbeHealth):
            rig.answer_health(probe, Outcome.REFUSED if probe.engine == "d2" else None, identity=PROCESS)
    return rig


def document_of(rig: Rig, wall: float = 5000.0) -> dict[str, Any]:
    document = to_document(rig.saved(), wall=wall, epoch=7, holder="control-a")
    read: dict[str, Any] = json.loads(json.dumps(document))
    return read


@pytest.mark.rule("S1")
def test_what_is_written_is_what_is_read() -> None:
    rig = busy()
    document = document_of(rig)
    handoff = from_document(document)
    assert handoff.state == rig.saved()
    assert (handoff.written_at, handoff.lease.epoch, handoff.lease.holder) == (5000.0, 7, "control-a")
    assert (document["schema"], document["schema_version"], document["fleet"]) == ("narwhal.handoff", 1, "fleet")
    assert document["engine_set"] == ["p1", "p2", "d1", "d2", "d3"]


@pytest.mark.rule("S1")
def test_it_holds_what_a_takeover_needs() -> None:
    state = from_document(document_of(busy())).state
    d1, d2, p2 = state.engines["d1"], state.engines["d2"], state.engines["p2"]
    assert {h.kind for h in d1.holds} == {Hold.VERIFICATION}
    assert d1.streaks == {C.STREAM: 3}
    assert d1.producers == {"p1": 1}
    assert d1.relapses.level == 1
    assert d2.misses == 1
    assert d2.streaks == {C.INFERENCE_STATUS: 1}
    assert [(h.kind, h.remaining_s) for h in d2.holds] == [(Hold.QUARANTINE, 40.0)]
    assert {h.kind for h in p2.holds} == {Hold.EJECTED, Hold.QUARANTINE}
    assert (p2.gate_in_s, p2.incarnation) == (10.0, 1)
    assert state.engines["d3"].outcomes == {Outcome.STREAM_COMPLETE: 20}
    assert state.engines["d3"].identity == PROCESS
    assert state.requests == RequestCounts(served=10, failed=1, rejected=2, cancelled=3, retried=4)
    assert state.unknown_outcomes == {Outcome.REFUSED: 1}
    assert {(p.id, p.connected) for p in state.proxies} == {("edge", True), ("other", False)}
    assert {(c.id, c.sequence) for c in state.cursors} == {("edge", 6), ("other", 1)}


@pytest.mark.rule("S1", "S7", "R8")
def test_a_takeover_decides_and_shows_the_same() -> None:
    rig = busy()
    handoff = from_document(document_of(rig, wall=5000.0))
    after = Rig(*ENGINES, saved=aged(handoff, wall=5000.0), now=77.0, failure_quarantine_s=50.0, ramp_s=30.0)
    before_content = rig.fleet.placement(now=rig.now).engines
    content = after.fleet.placement(now=after.now).engines
    for name, entry in content.items():
        old = before_content[name]
        assert (entry.phases, entry.holds, entry.incarnation, entry.weight) == (
            old.phases,
            old.holds,
            old.incarnation,
            old.weight,
        )
        if old.quarantine_due is not None:
            assert entry.quarantine_due is not None
            assert entry.quarantine_due - after.now == pytest.approx(old.quarantine_due - rig.now)
    assert after.fleet.view(now=after.now).totals == rig.fleet.view(now=rig.now).totals
    assert after.fleet.report_cursors() == rig.fleet.report_cursors()
    assert {e.id: e.streaks for e in after.engines()} == {e.id: e.streaks for e in rig.engines()}
    # The suspicion goes on: its probe begins anew at the next pass, with the producer that was remembered.
    asked = only(after.tick(Stage.HEALTH), ProbeInference)
    assert asked.engine == "d1"
    # Only what is out waits for a gate.
    assert of(after.send(Woke()), RunCheck) == []


@pytest.mark.rule("S7")
def test_known_proxies_count_until_they_say_hello_or_their_bound_passes() -> None:
    rig = busy()
    after = Rig(*ENGINES, saved=aged(from_document(document_of(rig)), wall=5000.0), placement_max_age_s=100.0)
    assert {(p.key.id, p.connected) for p in after.fleet.view(now=after.now).proxies} == {
        ("edge", False),
        ("other", False),
    }
    after.send(ProxyConnected(proxy=EDGE, address="a:1", pid=1, highest_epoch=0))
    after.now += 600
    after.tick(Stage.ROLLOVER)
    assert [(p.key.id, p.connected) for p in after.fleet.view(now=after.now).proxies] == [("edge", True)]


@pytest.mark.rule("S6")
def test_a_report_that_is_resent_after_a_takeover_counts_once() -> None:
    rig = busy()
    after = Rig(*ENGINES, saved=aged(from_document(document_of(rig)), wall=5000.0))
    totals = after.fleet.view(now=after.now).totals
    for sequence in range(1, 7):
        after.batch(sequence=sequence, requests=RequestCounts(served=1))
    assert after.fleet.view(now=after.now).totals == totals
    after.batch(sequence=7, requests=RequestCounts(served=1))
    assert after.fleet.view(now=after.now).totals.served == totals.served + 1


def test_an_answer_from_before_the_takeover_matches_nothing() -> None:
    rig = Rig(prefill("p"), decode("d"), liveness_every=0)
    old = only(rig.report("d", Outcome.HTTP_429, count=3), ProbeHealth)
    after = Rig(prefill("p"), decode("d"), saved=rig.saved())
    after.fleet = type(after.fleet)(after.settings, now=after.now, epoch=2, saved=rig.saved())
    new = only(after.tick(Stage.HEALTH), ProbeHealth)
    assert new.incarnation == old.incarnation
    assert new.number != old.number
    event = HealthAnswered(engine="d", incarnation=1, number=old.number, outcome=Outcome.REFUSED)
    assert after.send(event) == ()
    assert after.holds("d") == set()


# --- time passes ----------------------------------------------------------------------------------------------------


def after_s(rig: Rig, elapsed_s: float) -> SavedFleet:
    return aged(from_document(document_of(rig, wall=5000.0)), wall=5000.0 + elapsed_s)


@pytest.mark.rule("S1")
def test_remaining_times_go_on_running_and_never_below_zero() -> None:
    rig = busy()
    now, later, late = rig.saved(), after_s(rig, 3.0), after_s(rig, 1e6)
    held = now.engines["d2"].holds[0].remaining_s
    assert held is not None
    assert later.engines["d2"].holds[0].remaining_s == held - 3
    assert later.engines["d2"].holds[0].age_s == now.engines["d2"].holds[0].age_s + 3
    assert later.engines["p2"].gate_in_s == 7.0
    assert late.engines["p2"].gate_in_s == 0.0
    assert late.engines["d2"].holds[0].remaining_s == 0.0
    assert all(s == 0.0 for s in late.engines["d1"].relapses.watched_s.values())
    assert [c.drop_in_s for c in later.cursors if c.id == "other"] == [
        s - 3 for c in now.cursors if c.id == "other" and (s := c.drop_in_s) is not None
    ]


@pytest.mark.rule("S1")
def test_a_wall_clock_that_went_back_lets_no_time_pass() -> None:
    rig = busy()
    assert after_s(rig, -500.0) == after_s(rig, 0.0)


@pytest.mark.rule("S1", "H4")
def test_a_hold_whose_time_passed_meanwhile_is_over() -> None:
    rig = busy()
    after = Rig(*ENGINES, saved=after_s(rig, 100.0))
    assert after.holds("d2") == set()
    assert after.engine("d2").phases == {Phase.DECODE}
    assert Hold.VERIFICATION in after.holds("d1")  # has no deadline


# --- refusals -------------------------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every field of the document."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(*path, key), *leaves(inner, (*path, key))]
    return found


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


# Keyed by names that are data, not fields: one of them less is another document, not a broken one.
MAPPINGS = {"engines", "streaks", "outcomes", "producers", "watched_s", "unknown_outcomes", "gave_age_s"}


@pytest.mark.case("K5")
def test_a_document_without_any_one_field_is_refused() -> None:
    document = document_of(busy())
    fields = [p for p in leaves(document) if isinstance(p[-1], str) and (len(p) < 2 or p[-2] not in MAPPINGS)]
    assert len(fields) > 80
    for path in fields:
        broken = copy.deepcopy(document)
        del at(broken, path[:-1])[path[-1]]
        with pytest.raises(HandoffError, match=r"missing|unknown schema|engine_set"):
            from_document(broken)


@pytest.mark.case("K5")
def test_a_document_with_an_unknown_field_anywhere_is_refused() -> None:
    document = document_of(busy())
    objects = [()] + [p for p in leaves(document) if isinstance(at(document, p), dict) and p[-1] not in MAPPINGS]
    for path in objects:
        broken = copy.deepcopy(document)
        at(broken, path)["surprise"] = 1
        with pytest.raises(HandoffError, match=r"unknown field.*surprise"):
            from_document(broken)


@pytest.mark.case("K5")
def test_a_value_of_a_wrong_type_anywhere_is_refused() -> None:
    document = document_of(busy())
    for path in leaves(document):
        value = at(document, path)
        wrong: Any = ["x"] if not isinstance(value, list) else {"x": 1}
        broken = copy.deepcopy(document)
        at(broken, path[:-1])[path[-1]] = wrong
        with pytest.raises(HandoffError):
            from_document(broken)
        if isinstance(value, int | float) and not isinstance(value, bool):
            instants = path[-1] in ("written_at", "started_at")  # any number is one
            for worse in (True, "1", float("nan"), float("inf"), *(() if instants else (-1,))):
                broken = copy.deepcopy(document)
                at(broken, path[:-1])[path[-1]] = worse
                with pytest.raises(HandoffError):
                    from_document(broken)


@pytest.mark.case("K5")
@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("schema",), "something.else", "unknown schema 'something.else'"),
        (("schema_version",), 2, "unknown schema_version 2"),
        (("schema_version",), True, "unknown schema_version True"),
        (("schema_version",), "1", "unknown schema_version '1'"),
        (("engines", "d1", "role"), "both", "unknown Phase 'both'"),
        (("engines", "d1", "streaks", "wishes"), 1, "unknown FailureClass 'wishes'"),
        (("engines", "d1", "streaks", "stream"), 0, "streaks must be at least 1"),
        (("engines", "d1", "incarnation"), 0, "never admitted"),
        (("engines", "d1", "misses"), -1, "misses must not be negative"),
        (("engine_set",), ["p1"], "engine_set"),
        (("engines", "d2", "holds", 0, "kind"), "love", "unknown Hold 'love'"),
    ],
)
def test_the_refusal_says_what_is_wrong(path: tuple[Any, ...], value: Any, words: str) -> None:
    document = document_of(busy())
    at(document, path[:-1])[path[-1]] = value
    with pytest.raises(HandoffError) as refused:
        from_document(document)
    assert words in str(refused.value)


@pytest.mark.case("K5")
@pytest.mark.parametrize("document", [None, [], "x", 7, {}])
def test_what_is_no_document_is_refused(document: object) -> None:
    with pytest.raises(HandoffError):
        from_document(document)


def test_two_standings_at_once_are_refused() -> None:
    document = document_of(busy())
    holds = document["engines"]["p2"]["holds"]
    holds.append({"kind": "joining", "reason": "", "age_s": 0.0, "remaining_s": None})
    with pytest.raises(HandoffError, match="joining and ejected"):
        from_document(document)
    holds[-1] = holds[0]
    with pytest.raises(HandoffError, match="twice"):
        from_document(document)


@pytest.mark.rule("H1", "H4", "F11")
@pytest.mark.parametrize(
    ("kind", "remaining_s", "words"),
    [
        *((kind, 2.0, "does not end by itself") for kind in ("verification", "drift", "ejected", "drain")),
        *((kind, None, "ends by itself") for kind in ("quarantine", "relapse")),
    ],
)
def test_a_hold_that_ends_otherwise_than_its_kind_does_is_refused(
    kind: str, remaining_s: float | None, words: str
) -> None:
    document = document_of(busy())
    document["engines"]["p1"]["holds"] = [{"kind": kind, "reason": "", "age_s": 0.0, "remaining_s": remaining_s}]
    with pytest.raises(HandoffError, match=words):
        from_document(document)


def test_an_engine_that_is_out_and_suspected_is_refused() -> None:
    document = document_of(busy())
    suspected = {"kind": "verification", "reason": "", "age_s": 0.0, "remaining_s": None}
    document["engines"]["p2"]["holds"].append(suspected)
    with pytest.raises(HandoffError, match="cannot be suspected while it is joining or ejected"):
        from_document(document)


# --- may it be applied? ---------------------------------------------------------------------------------------------


@pytest.mark.rule("S2")
def test_the_same_engines_in_another_order_match() -> None:
    state = from_document(document_of(busy())).state
    found = compare(state, fleet="fleet", model="tiny", engines=["d3", "d2", "d1", "p2", "p1"])
    assert found.resume is Resume.APPLY


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
def test_another_fleets_handoff_is_refused() -> None:
    found = compare(from_document(document_of(busy())).state, fleet="tuna", model="tiny", engines=[])
    assert found.resume is Resume.REFUSE
    assert "'fleet'" in found.message
    assert "'tuna'" in found.message


@pytest.mark.rule("S2")
def test_another_set_of_engines_starts_fresh_and_names_the_drains_that_are_forgotten() -> None:
    state = from_document(document_of(busy())).state
    hold = SavedHold(kind=Hold.DRAIN, reason="disk", age_s=1.0, remaining_s=None)
    drain = SavedDrain(
        reason="disk", url="http://d1", age_s=1.0, remaining_s=9.0, wall=5.0, restart=True, whole=False,
        captured=True, identity=PROCESS, settled=False, overdue=False,
    )  # fmt: skip
    engine = replace(state.engines["d1"], holds=(*state.engines["d1"].holds, hold), drain=drain)
    state = replace(state, engines={**state.engines, "d1": engine})
    found = compare(state, fleet="fleet", model="tiny", engines=["p1", "p2", "d1", "d2", "d4"])
    assert found.resume is Resume.FRESH
    assert found.forgotten_drains == ("d1",)
    for words in ("added: d4", "removed: d3", "drains forgotten: d1"):
        assert words in found.message


# --- another fleet file ---------------------------------------------------------------------------------------------


@pytest.mark.rule("S2", "R8")
def test_a_changed_address_joins_anew_and_a_changed_pin_takes_the_files_role() -> None:
    rig = busy()
    moved = replace(decode("d1"), url="http://elsewhere")
    engines = (prefill("p1"), prefill("p2"), moved, decode("d2", pinned=True), prefill("d3", pinned=True))
    after = Rig(*engines, saved=rig.saved())
    assert after.holds("d1") == {Hold.JOINING}
    assert after.streaks("d1") == {}
    assert after.fleet.incarnations()["d1"] == 1
    assert after.engine("d3").role is Phase.PREFILL
    assert [c.engine for c in of(after.send(Woke()), RunCheck)] == ["d1"]
    after.let_in()
    assert after.holds("p2") == {Hold.EJECTED, Hold.QUARANTINE}


@pytest.mark.rule("S2")
@pytest.mark.case("B4")
def test_a_reload_keeps_the_holds_of_those_that_stay_and_nothing_of_those_that_go() -> None:
    rig = busy()
    total = sum(sum(e.outcomes.values()) for e in rig.engines()) + 1
    revision, counters = rig.fleet.revision, rig.fleet.counters_revision
    kept = (prefill("p1"), prefill("p2"), decode("d1"), decode("d4"))
    rig.send(Reloaded(settings=rig.with_settings(engines=kept)))
    assert [e.id for e in rig.engines()] == ["p1", "p2", "d1", "d4"]
    assert list(rig.fleet.placement(now=rig.now).engines) == ["p1", "p2", "d1", "d4"]
    assert Hold.VERIFICATION in rig.holds("d1")
    assert rig.holds("p2") == {Hold.EJECTED, Hold.QUARANTINE}
    assert rig.holds("d4") == {Hold.JOINING}
    assert rig.fleet.revision > revision
    assert rig.fleet.counters_revision >= counters
    state = rig.saved()
    assert set(state.engines) == {"p1", "p2", "d1", "d4"}
    gone = sum(state.unknown_outcomes.values())
    assert gone + sum(sum(e.outcomes.values()) for e in rig.engines()) == total
    for _ in range(30):
        for effect in rig.run_pass():
            assert getattr(effect, "engine", "") not in ("d2", "d3")
    assert {r.engine for r in rig.records(EventKind.ENGINE_REMOVED)} == {"d2", "d3"}


@pytest.mark.rule("R8", "F5")
def test_an_engine_that_comes_back_under_its_old_id_is_not_judged_by_what_was_before() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    everybody = rig.settings
    rig.send(Reloaded(settings=rig.with_settings(engines=(prefill("p"), decode("e")))))
    rig.send(Reloaded(settings=everybody))
    assert rig.holds("d") == {Hold.JOINING}
    rig.let_in()
    assert rig.fleet.incarnations()["d"] == 2
    rig.report("d", Outcome.REFUSED, count=3, incarnation=1)
    assert rig.holds("d") == set()


@pytest.mark.rule("R8")
def test_a_reload_that_moves_an_engine_drops_what_was_asked_of_the_old_address() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"), liveness_every=0)
    probe = only(rig.report("d", Outcome.HTTP_429, count=3), ProbeHealth)
    moved = (prefill("p"), replace(decode("d"), url="http://new"), decode("e"))
    rig.send(Reloaded(settings=rig.with_settings(engines=moved)))
    assert rig.holds("d") == {Hold.JOINING}
    assert rig.answer_health(probe, Outcome.REFUSED) == ()
    rig.let_in()
    assert (rig.engine("d").url, rig.fleet.incarnations()["d"]) == ("http://new", 2)


@pytest.mark.rule("S2")
def test_a_reload_changes_numbers_at_once() -> None:
    rig = Rig(prefill("p"), decode("d"), eject_after=3)
    rig.report("d", Outcome.REFUSED)
    rig.send(Reloaded(settings=rig.with_settings(eject_after=2)))
    rig.report("d", Outcome.REFUSED)
    assert rig.holds("d") == {Hold.EJECTED}


def test_a_handoff_is_a_value() -> None:
    handoff = from_document(document_of(busy()))
    assert isinstance(handoff, Handoff)
    assert handoff == from_document(document_of(busy()))
