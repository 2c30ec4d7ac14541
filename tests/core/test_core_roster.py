"""Which engines there are, and what a reload does to each (spec S2, R8, B4)."""

from dataclasses import replace

import pytest

from narwhal.control.core.effects import ProbeHealth
from narwhal.control.core.engine import Engine
from narwhal.control.core.events import Reloaded, RoleCommand
from narwhal.control.core.records import EventKind
from narwhal.control.core.roster import Change, Roster
from narwhal.control.core.settings import CoreSettings, DriftSettings, EngineSpec
from narwhal.vocabulary import Hold, Outcome, Phase
from tests.core.rig import PROCESS, Rig, decode, of, prefill

P, D, E = prefill("p"), decode("d"), decode("e")
KIND = EventKind


def settings(*engines: EngineSpec) -> CoreSettings:
    return CoreSettings(name="fleet", model="tiny", engines=engines)


def roster(*engines: EngineSpec) -> Roster:
    """All of them in service as incarnation 1."""
    made = Roster(numbers=100)
    made.load(settings(*engines), {}, now=10.0)
    for engine in made.engines.values():
        engine.admit(identity=None, ramp_s=0.0, now=10.0)
    return made


def reload(made: Roster, *engines: EngineSpec) -> list[Change]:
    return made.reload(settings(*engines), now=20.0)


def added(engine: str) -> Change:
    return Change(kind=KIND.ENGINE_ADDED, engine=engine, words="added to the fleet", anew=True)


def removed(record: Engine) -> Change:
    return Change(kind=KIND.ENGINE_REMOVED, engine=record.id, words="removed from the fleet", anew=True, gone=record)


@pytest.mark.rule("R8")
def test_engines_that_were_never_admitted_are_joining() -> None:
    made = Roster(numbers=100)
    made.load(settings(P, D), {}, now=10.0)
    assert list(made.engines) == ["p", "d"]
    for engine in made.engines.values():
        assert set(engine.holds) == {Hold.JOINING}
        assert (engine.holds[Hold.JOINING].since, engine.incarnation) == (10.0, 0)
        assert engine.next_number() == 101  # above those of every earlier epoch
        assert engine.changes is made.changes


@pytest.mark.rule("S2")
def test_a_reload_that_changes_nothing() -> None:
    made = roster(P, D)
    before = dict(made.engines)
    assert reload(made, P, D) == []
    assert all(made.engines[name] is engine for name, engine in before.items())


@pytest.mark.rule("S2")
@pytest.mark.case("B4")
def test_engines_come_and_go_and_stand_in_the_order_of_the_file() -> None:
    made = roster(P, D)
    known, record = made.engines, made.engines["p"]
    made.changes.anew = False
    assert reload(made, E, D) == [removed(record), added("e")]
    assert made.engines is known  # one object for good: others keep it
    assert list(made.engines) == ["e", "d"]
    assert made.changes.anew
    fresh = made.engines["e"]
    assert (set(fresh.holds), fresh.incarnation) == ({Hold.JOINING}, 0)
    assert fresh.changes is made.changes


@pytest.mark.rule("R8", "F5")
def test_one_that_comes_back_under_its_old_id_goes_on_with_its_numbers() -> None:
    """What was asked of, or said about, the engine that had this id before must not speak about this one."""
    made = roster(P, D)
    asked = [made.engines["d"].next_number() for _ in range(5)]
    reload(made, P)
    reload(made, P, D)
    back = made.engines["d"]
    assert (set(back.holds), back.incarnation) == ({Hold.JOINING}, 1)
    assert back.next_number() > max(asked)
    back.admit(identity=None, ramp_s=0.0, now=21.0)
    assert back.incarnation == 2
    # Once more: it is the newest incarnation that is gone on from.
    reload(made, P)
    reload(made, P, D)
    assert made.engines["d"].incarnation == 2
    # One that was never admitted has none to go on from.
    reload(made, P, D, E)
    reload(made, P, D)
    reload(made, P, D, E)
    assert made.engines["e"].incarnation == 0


@pytest.mark.rule("R8")
def test_another_address_is_another_engine_under_the_same_id() -> None:
    made = roster(P, D)
    record = made.engines["d"]
    asked = record.next_number()
    assert reload(made, P, replace(D, url="http://elsewhere")) == [
        Change(
            kind=KIND.ENGINE_CHANGED,
            engine="d",
            words="its address changed from http://d",
            anew=True,
            url="http://elsewhere",
        )
    ]
    moved = made.engines["d"]
    assert (moved.spec.url, moved.incarnation, set(moved.holds)) == ("http://elsewhere", 1, {Hold.JOINING})
    assert moved.holds[Hold.JOINING].reason == "its address changed from http://d"
    assert moved.next_number() > asked
    assert moved.changes is made.changes


@pytest.mark.rule("R8")
def test_one_that_moves_while_it_joins_is_a_new_record_with_the_old_numbers() -> None:
    made = Roster(numbers=100)
    made.load(settings(P, D), {}, now=10.0)
    record = made.engines["d"]
    asked = [record.next_number() for _ in range(3)]
    (change,) = reload(made, P, replace(D, url="http://elsewhere"))
    moved = made.engines["d"]
    assert (change.anew, change.gone) == (True, None)
    assert moved is not record
    assert moved.next_number() == asked[-1] + 1
    assert moved.changes is made.changes
    # Numbers of engines to come begin above those of the record that is not kept.
    reload(made, P, replace(D, url="http://elsewhere"), E)
    assert made.engines["e"].next_number() > max(asked)


@pytest.mark.rule("S2")
@pytest.mark.parametrize(
    ("entry", "role", "told"),
    [
        (replace(D, max_inflight=7), Phase.PREFILL, ""),  # the role that it was given stays
        (replace(D, pinned=True), Phase.DECODE, ", its role is decode now"),
        (replace(D, role=Phase.PREFILL), Phase.PREFILL, ""),  # it was given that role already
    ],
)
def test_other_properties_are_taken_over_and_what_is_known_of_it_stays(
    entry: EngineSpec, role: Phase, told: str
) -> None:
    made = roster(P, D)
    record = made.engines["d"]
    record.assume(Phase.PREFILL, now=11.0)
    record.place(Hold.DRIFT, "slow", now=12.0)
    before = made.changes.decided
    words = f"its entry in the fleet file changed{told}"
    assert reload(made, P, entry) == [
        Change(kind=KIND.ENGINE_CHANGED, engine="d", words=words, anew=False, role=bool(told))
    ]
    assert record.role_since == (20.0 if told else 11.0)
    assert made.engines["d"] is record
    assert (record.spec, record.role, set(record.holds), record.incarnation) == (entry, role, {Hold.DRIFT}, 1)
    assert made.changes.decided > before + 1  # of the record and of the fleet: stored at once


@pytest.mark.rule("S2")
def test_a_reload_gives_an_engine_the_role_that_the_file_has_changed() -> None:
    made = roster(P, D)
    reload(made, P, replace(D, role=Phase.PREFILL))
    assert made.engines["d"].role is Phase.PREFILL


def test_what_a_reload_did_is_told_of_each_engine() -> None:
    rig = Rig(P, D, E)
    rig.send(Reloaded(settings=rig.with_settings(engines=(replace(P, url="http://new"), replace(D, max_inflight=3)))))
    kinds = (KIND.ENGINE_ADDED, KIND.ENGINE_REMOVED, KIND.ENGINE_CHANGED)
    assert [(r.kind, r.engine, r.message) for kind in kinds for r in rig.records(kind)] == [
        (KIND.ENGINE_REMOVED, "e", "engine e: removed from the fleet"),
        (KIND.ENGINE_CHANGED, "p", "engine p: its address changed from http://p"),
        (KIND.ENGINE_CHANGED, "d", "engine d: its entry in the fleet file changed"),
    ]


@pytest.mark.rule("R8")
def test_another_engine_under_an_old_id_answers_for_nothing_of_the_one_before() -> None:
    """Not for its relapses, nor for its comings and goings; nor is what was seen of it shown as seen of this one."""
    rig = Rig(P, D, E, liveness_every=1)
    for probe in of(rig.run_pass(), ProbeHealth):
        rig.answer_health(probe, Outcome.HTTP_5XX if probe.engine == "d" else None, status=503, identity=PROCESS)
    rig.send(RoleCommand(engine="d", role=Phase.PREFILL))
    rig.report("d", Outcome.REFUSED, count=3)
    elsewhere = replace(D, url="http://elsewhere")
    rig.send(Reloaded(settings=rig.with_settings(engines=(P, elsewhere, E), liveness_every=0)))
    view = rig.engine("d")
    assert (view.role, view.role_age_s, view.health, view.evidence) == (Phase.DECODE, None, (), ())
    rig.let_in()
    assert rig.holds("d") == set()
    rig.report("d", Outcome.REFUSED, count=3)  # soon after the other engine's: no relapse, and no longer interval
    assert rig.records(KIND.RELAPSED) == []
    assert rig.engine("d").gate_in_s == 10.0
    assert rig.engine("d").outcomes[Outcome.REFUSED] == 6  # totals stay exact


@pytest.mark.rule("C1", "C2", "H5", "S2")
def test_a_role_that_the_file_has_changed_is_told_and_kept_for_as_long_as_one_that_was_given() -> None:
    rig = Rig(P, D, E, liveness_every=0, drift=DriftSettings(window_s=1.0))
    for _ in range(6):
        for engine in ("d", "e"):
            rig.measure(engine, step=0.02)
        rig.run_pass()
    assert rig.engine("d").drift is not None
    rig.now += 1000.0
    rig.send(Reloaded(settings=rig.with_settings(engines=(P, replace(D, role=Phase.PREFILL), E))))
    (told,) = rig.records(KIND.ENGINE_CHANGED)
    assert told.message == "engine d: its entry in the fleet file changed, its role is prefill now"
    view = rig.engine("d")
    assert (view.role, view.role_age_s, view.stays) == (Phase.PREFILL, 0.0, "moved lately, stays for 30 s")
    assert view.drift is None  # what was normal for it was so under other work
