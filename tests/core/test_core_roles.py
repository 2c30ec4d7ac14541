"""Role control: floors, loads, guards, consolidation risk. Numbers typed from spec C and the fleet file's defaults."""

import pytest

from narwhal.control.core.events import CommandRefusedError, DrainCommand, ProxyAcked, ProxyConnected, Refusal, Reloaded
from narwhal.control.core.records import EventKind
from narwhal.control.core.settings import EngineSpec, RoleMode
from narwhal.vocabulary import Outcome, Phase, Stage
from tests.core.rig import EDGE, OTHER, decode, prefill
from tests.core.role_rig import FOUR, SIX, THIRD, D, Fleet, P, count

# --- modes (C1) -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("C1", "C3")
@pytest.mark.parametrize("to", [P, D])
def test_a_loaded_role_takes_an_engine_from_one_that_has_little_to_do(to: Phase) -> None:
    rig = Fleet(*FOUR)
    rig.loaded(1.2 if to is P else 0.3, 1.2 if to is D else 0.3, passes=4)
    assert [(m[1], m[2]) for m in rig.moves()] == [(to, "load")]
    assert (count(rig, to), count(rig, to.other)) == (3, 1)
    moved = rig.moves()[0][0]
    assert rig.engine(moved).phases == {to}


@pytest.mark.rule("C1")
def test_advice_is_shown_once_and_changes_nothing() -> None:
    rig = Fleet(*FOUR, mode=RoleMode.ADVISORY)
    before, placed = rig.roles(), rig.fleet.placement(now=rig.now)
    rig.loaded(0.3, 1.2, passes=8)
    assert rig.roles() == before
    assert rig.fleet.placement(now=rig.now) is placed
    (told,) = rig.records(EventKind.ROLE_PROPOSED)
    proposal = rig.control().proposal
    assert proposal is not None
    assert (proposal.engine, proposal.to, told.engine) == ("p1", D, "p1")
    assert "nothing was changed" in told.message
    rig.loaded(0.3, 0.3, passes=6)
    assert rig.control().proposal is None


@pytest.mark.rule("C1")
def test_advice_that_comes_and_goes_is_told_once_a_minute_and_names_one_engine() -> None:
    rig = Fleet(*FOUR, mode=RoleMode.ADVISORY)
    rig.send(ProxyConnected(proxy=EDGE, address="a:1", pid=1, highest_epoch=0))
    named = set()
    for n in range(12):
        legs = {"p1": n % 2 * 9, "p2": 5}  # each of them has the least work now and then
        rig.send(ProxyAcked(proxy=EDGE, epoch=1, version=0, resident=legs))
        rig.loaded(0.3, 1.2)
        proposal = rig.control().proposal
        named |= {proposal.engine} if proposal is not None else set()
    assert len(named) == 1
    for _ in range(4):
        rig.loaded(0.3, 0.3, passes=6)
        assert rig.control().proposal is None
        rig.loaded(0.3, 1.2, passes=6)
        assert rig.control().proposal is not None
    assert len(rig.records(EventKind.ROLE_PROPOSED)) == 1
    rig.loaded(0.3, 0.3, passes=66)
    rig.loaded(0.3, 1.2, passes=4)
    assert len(rig.records(EventKind.ROLE_PROPOSED)) == 2


@pytest.mark.rule("C1")
def test_off_decides_nothing() -> None:
    rig = Fleet(*FOUR, mode=RoleMode.OFF)
    rig.loaded(0.3, 1.2, passes=8)
    assert (rig.moves(), rig.records(EventKind.ROLE_PROPOSED), rig.control().proposal) == ([], [], None)
    assert rig.why_not() == "role control is off"


# --- guards (C2–C4): each is the only one that speaks against the move ------------------------------------------------


@pytest.mark.rule("C3")
def test_the_load_must_last_three_passes() -> None:
    rig = Fleet(*FOUR)
    rig.loaded(0.3, 0.3, passes=1)
    rig.loaded(0.3, 1.2, passes=3)  # a pass decides by the intervals before it
    assert rig.moves() == []
    assert "for 2 of 3 passes" in rig.why_not()
    rig.loaded(0.3, 1.2, passes=1)
    assert len(rig.moves()) == 1


@pytest.mark.rule("C3")
def test_below_the_target_nothing_moves() -> None:
    rig = Fleet(*FOUR)
    rig.loaded(0.3, 0.93, passes=8)
    assert rig.moves() == []
    assert "wants an engine from 1.00" in rig.why_not()


@pytest.mark.rule("C3")
@pytest.mark.parametrize(("other", "moves"), [(0.46, 1), (0.55, 0)])
def test_a_role_gives_up_an_engine_up_to_half_its_target(other: float, moves: int) -> None:
    rig = Fleet(*FOUR)
    rig.loaded(other, 1.2, passes=8)
    assert len(rig.moves()) == moves
    assert moves or "prefill gives none up" in rig.why_not()


@pytest.mark.rule("C3")
@pytest.mark.parametrize(("of_ten", "moves"), [(4, 1), (6, 0)])
def test_prefill_that_has_prompts_most_of_the_time_gives_up_no_engine(of_ten: int, moves: int) -> None:
    """However quick it is: with an engine less it would have them all the time, and a queue."""
    rig = Fleet(*FOUR, mode=RoleMode.ADVISORY)
    for n in range(30):
        rig.measure("p1", first=0.1, waiting=int(n % 10 < of_ten), proxy=OTHER)
        rig.measure("p2", first=0.1, waiting=int(n % 10 < of_ten), proxy=THIRD)
        rig.loaded(0.05, 1.2)
    assert len(rig.records(EventKind.ROLE_PROPOSED)) == moves


@pytest.mark.rule("C3")
def test_prefill_that_always_has_prompts_wants_no_engine_for_that() -> None:
    rig = Fleet(*FOUR)
    for _ in range(40):
        rig.measure("p1", first=0.1, waiting=1)
        rig.measure("p2", first=0.1, waiting=1, proxy=OTHER)
        rig.run_pass()
    assert rig.role(P).load.busy == 1.0
    assert rig.moves() == []


@pytest.mark.rule("C3")
def test_ten_seconds_pass_between_two_moves() -> None:
    rig = Fleet(*SIX)
    rig.loaded(0.1, 3.0, passes=4)
    began = rig.now
    assert len(rig.moves()) == 1
    while len(rig.moves()) == 1:
        rig.loaded(0.1, 3.0)
        assert rig.now < began + 20
    assert rig.now - began == pytest.approx(10.0, abs=0.1)


@pytest.mark.rule("C3")
def test_one_engine_moves_in_a_pass() -> None:
    rig = Fleet(*SIX, cooldown_s=0.0)
    rig.loaded(0.1, 3.0, passes=4)
    assert len(rig.moves()) == 1
    rig.loaded(0.1, 3.0, passes=2)  # what is there now has to be found too little anew
    assert len(rig.moves()) == 1
    rig.loaded(0.1, 3.0, passes=1)
    assert len(rig.moves()) == 2


@pytest.mark.rule("C2")
@pytest.mark.parametrize(("floor", "moves"), [(1, 1), (2, 0)])
def test_a_role_keeps_its_floor(floor: int, moves: int) -> None:
    rig = Fleet(*FOUR, min_prefill=floor)
    rig.loaded(0.1, 3.0, passes=6)
    assert len(rig.moves()) == moves
    assert moves or "its floor is 2" in rig.why_not()


@pytest.mark.rule("C2")
def test_a_pinned_engine_does_not_move() -> None:
    rig = Fleet(prefill("p1", pinned=True), prefill("p2", pinned=True), decode("d1"), decode("d2"))
    rig.loaded(0.1, 3.0, passes=6)
    assert rig.moves() == []
    assert "p1 pinned, p2 pinned" in rig.why_not()


@pytest.mark.rule("C2")
def test_a_held_engine_does_not_move() -> None:
    rig = Fleet(prefill("p1"), prefill("p2", pinned=True), prefill("p3", pinned=True), decode("d1"))
    rig.report("p1", Outcome.HTTP_5XX, count=3)
    rig.loaded(0.1, 3.0, passes=6)
    assert rig.moves() == []
    assert "p1 held" in rig.why_not()


@pytest.mark.rule("C2")
def test_an_engine_that_moved_stays_thirty_seconds() -> None:
    """Another engine would have to move back; the window in which none may is set aside to see this guard alone."""
    rig = Fleet(prefill("p1"), prefill("p2"), decode("d1", pinned=True), risk_window_s=0.0)
    rig.order("p1", D)
    moved_at = rig.now
    while len(rig.moves()) == 1:
        rig.loaded(3.0, 0.1)
        assert rig.now < moved_at + 40
    assert rig.moves()[1][:2] == ("p1", P)
    assert rig.now - moved_at == pytest.approx(30.0, abs=1.1)


@pytest.mark.rule("C3")
def test_no_move_is_reversed_within_sixty_seconds() -> None:
    rig = Fleet(*SIX)
    rig.loaded(0.1, 3.0, passes=4)
    moved_at = rig.now
    assert len(rig.moves()) == 1
    while len(rig.moves()) == 1:
        rig.loaded(3.0, 0.1)
        assert rig.now < moved_at + 80
    assert rig.moves()[1][1] == P
    assert rig.now - moved_at == pytest.approx(60.0, abs=1.1)


@pytest.mark.rule("C3")
def test_who_came_from_there_goes_back_first_then_who_has_least_to_do() -> None:
    rig = Fleet(*SIX, risk_window_s=0.0, dwell_s=0.0, cooldown_s=0.0)
    rig.order("d2", P)
    rig.loaded(0.1, 3.0, passes=6)
    assert rig.moves()[1][0] == "d2"


# --- floors (C2) ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("C2")
def test_a_shortfall_is_repaired_at_once_one_engine_a_pass() -> None:
    rig = Fleet(*SIX, min_decode=2)
    rig.report("d1", Outcome.REFUSED, count=3)
    rig.report("d2", Outcome.REFUSED, count=3)
    rig.report("d3", Outcome.REFUSED, count=3)
    rig.tick(Stage.CONTROLLER)
    assert [m[1:] for m in rig.moves()] == [(D, "floor")]
    rig.tick(Stage.CONTROLLER)
    assert [m[1:] for m in rig.moves()] == [(D, "floor")] * 2
    rig.tick(Stage.CONTROLLER)
    assert len(rig.moves()) == 2


@pytest.mark.rule("C2")
def test_a_shortfall_is_not_repaired_below_the_other_floor() -> None:
    rig = Fleet(prefill("p1"), prefill("p2"), decode("d1"), min_prefill=2)
    rig.report("d1", Outcome.REFUSED, count=3)
    rig.tick(Stage.CONTROLLER)
    assert rig.moves() == []


@pytest.mark.rule("C2")
def test_engines_that_start_up_are_waited_for() -> None:
    rig = Fleet(prefill("p1"), prefill("p2"), decode("d1"))
    rig.send(Reloaded(settings=rig.with_settings(engines=(prefill("p1"), prefill("p2"), decode("d9")))))
    began = rig.now
    while not rig.moves():
        rig.run_pass()
        assert rig.now < began + 40
    assert rig.now - began == pytest.approx(30.0, abs=1.1)


@pytest.mark.rule("C1", "C2")
def test_in_advisory_mode_a_shortfall_is_shown_and_not_repaired() -> None:
    rig = Fleet(*FOUR, mode=RoleMode.ADVISORY)
    rig.report("d1", Outcome.REFUSED, count=3)
    rig.report("d2", Outcome.REFUSED, count=3)
    rig.run_pass()
    assert rig.moves() == []
    (told,) = rig.records(EventKind.ROLE_PROPOSED)
    assert told.fields == {"to": "decode", "cause": "floor"}


# --- an operator's word -----------------------------------------------------------------------------------------------


@pytest.mark.rule("C1")
@pytest.mark.parametrize("mode", RoleMode)
def test_an_operator_gives_a_role_in_every_mode(mode: RoleMode) -> None:
    rig = Fleet(*FOUR, mode=mode)
    rig.order("p2", D)
    assert rig.roles()["p2"] is D
    assert rig.engine("p2").phases == {D}
    assert rig.moves() == [("p2", "decode", "operator")]


@pytest.mark.rule("C1")
def test_a_role_change_makes_no_new_incarnation_and_keeps_holds() -> None:
    rig = Fleet(*FOUR)
    rig.send(DrainCommand(engines=("p2",), reason="r", deadline_s=60.0, restart=False, wall=1.0))
    before = rig.engine("p2")
    rig.order("p2", D)
    after = rig.engine("p2")
    assert (after.incarnation, [h.kind for h in after.holds]) == (before.incarnation, [h.kind for h in before.holds])


@pytest.mark.rule("C2")
@pytest.mark.parametrize(
    ("engines", "engine", "role", "refusal", "says"),
    [
        (FOUR, "x", D, Refusal.NOT_FOUND, "no engine x"),
        (FOUR, "p1", P, Refusal.PRECONDITION, "has the role prefill already"),
        ((prefill("p1", pinned=True), prefill("p2"), decode("d1")), "p1", D, Refusal.PRECONDITION, "pinned to prefill"),
        ((prefill("p1"), decode("d1"), decode("d2")), "p1", D, Refusal.PRECONDITION, "its floor is 1"),
    ],
)
def test_an_order_that_cannot_be_followed_changes_nothing(
    engines: tuple[EngineSpec, ...], engine: str, role: Phase, refusal: Refusal, says: str
) -> None:
    rig = Fleet(*engines)
    before = rig.roles()
    with pytest.raises(CommandRefusedError, match=says) as refused:
        rig.order(engine, role)
    assert refused.value.refusal is refusal
    assert rig.roles() == before


def test_explain_says_when_the_role_changed() -> None:
    rig = Fleet(*FOUR)
    rig.order("p2", D)
    rig.run_pass()
    lines = rig.fleet.explain("p2", now=rig.now).lines
    assert "changed its role to decode 1.0 s ago; moved lately, stays for 29 s" in lines
