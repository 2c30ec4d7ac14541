"""Role control by itself, with loads given exactly: every guard in its words, and what moves (spec C1–C4)."""

from dataclasses import replace
from typing import Any

import pytest

from narwhal.control.core.decisions import Decision, MoveCause, RoleMove
from narwhal.control.core.engine import Engine, joining
from narwhal.control.core.events import CommandRefusedError, ProxyAcked, ProxyConnected, Refusal
from narwhal.control.core.handoff import SavedRisk, SavedRoles
from narwhal.control.core.loads import Load
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.roles import Roles
from narwhal.control.core.settings import CoreSettings, EngineSpec, RoleMode, RoleSettings
from narwhal.control.core.view import RiskView, RolesView, RoleView
from narwhal.measures import Measure, middle
from narwhal.reports import Run
from narwhal.vocabulary import Hold, Outcome, Phase, RiskKind
from tests.core.given import Given, sketch
from tests.core.rig import EDGE, decode, prefill

P, D = Phase.PREFILL, Phase.DECODE
SIX = (prefill("p1"), prefill("p2"), prefill("p3"), decode("d1"), decode("d2"), decode("d3"))
FOUR = (prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
NOW = 1000.0


class Control:
    """Role control of engines in service; a leg that waits is a tenth of a load."""

    def __init__(self, *specs: EngineSpec, **roles: Any) -> None:
        fields = {"mode": RoleMode.AUTO, "ttft_s": 50.0, **roles}
        self.settings = CoreSettings(name="f", model="m", engines=specs, roles=RoleSettings(**fields))
        self.engines = {spec.id: joining(spec, now=NOW) for spec in specs}
        for engine in self.engines.values():
            engine.admit(identity=None, ramp_s=0.0, now=NOW)
        self.given = Given()
        self.proxies = Proxies(max_age_s=600.0)
        self.roles = Roles(self.settings, self.engines, self.given, self.proxies)
        self.now = NOW

    def tick(self, prefill_load: float = 0.0, decode_load: float = 0.0, passes: int = 1) -> list[Decision]:
        """Passes, a second apart, with these loads; what they decided."""
        self.given.legs = {P: round(prefill_load * 10), D: round(decode_load * 10)}
        decided: list[Decision] = []
        for _ in range(passes):
            self.now += 1.0
            decided += self.roles.tick(now=self.now)
        return decided

    def why_not(self) -> str:
        return self.roles.view(now=self.now).why_not

    def view(self) -> RolesView:
        return self.roles.view(now=self.now)

    def role(self, phase: Phase) -> RoleView:
        return next(view for view in self.view().roles if view.role is phase)

    def engine(self, name: str) -> Engine:
        return self.engines[name]


def moved(engine: str, to: Phase, cause: MoveCause, reason: str) -> RoleMove:
    return RoleMove(engine=engine, to=to, cause=cause, reason=reason)


# --- why nothing moves ------------------------------------------------------------------------------------------------


def test_before_the_first_pass_nobody_has_looked() -> None:
    control = Control(*FOUR)
    view = control.view()
    assert (view.mode, view.proposal, view.why_not) == (RoleMode.AUTO, None, "no monitor pass has looked yet")
    assert view.roles == (
        RoleView(role=P, engines=2, floor=1, load=Load(), above=0, gave_age_s=None, risks=()),
        RoleView(role=D, engines=2, floor=1, load=Load(), above=0, gave_age_s=None, risks=()),
    )


IDLE = "load 0.00, wants an engine from 1.00"


@pytest.mark.rule("C2", "C3")
def test_every_guard_says_why_nothing_moves() -> None:
    control = Control(*FOUR)
    control.tick(0.4, 0.9)
    assert (
        control.why_not()
        == "prefill: load 0.40, wants an engine from 1.00; decode: load 0.90, wants an engine from 1.00"
    )
    control.tick(0.0, 1.0)
    assert control.why_not() == f"prefill: {IDLE}; decode: load 1.00 for 1 of 3 passes"
    control.tick(0.6, 1.2, passes=3)
    assert control.why_not() == (
        "prefill: load 0.60, wants an engine from 1.00; decode: prefill gives none up, its load 0.60 is above 0.50"
    )
    control.given.share[P] = 0.625
    control.tick(0.2, 1.2)
    assert control.why_not() == (
        "prefill: load 0.20, wants an engine from 1.00; "
        "decode: prefill gives none up, it is busy for 62% of the time, more than 50%"
    )


@pytest.mark.rule("C2", "C3")
@pytest.mark.parametrize(
    ("engines", "roles", "words"),
    [
        (FOUR, {"min_prefill": 2}, "prefill has 2 engines, its floor is 2"),
        (
            (prefill("p1", pinned=True), prefill("p2", pinned=True), decode("d1")),
            {},
            "no engine of prefill may move: p1 pinned, p2 pinned",
        ),
    ],
)
def test_floors_and_pins(engines: tuple[EngineSpec, ...], roles: dict[str, Any], words: str) -> None:
    control = Control(*engines, **roles)
    assert control.tick(0.0, 1.2, passes=4) == []
    assert control.why_not() == f"prefill: {IDLE}; decode: {words}"


@pytest.mark.rule("C2")
def test_who_stays_says_why() -> None:
    control = Control(*SIX, dwell_s=30.0)
    control.engine("p2").place(Hold.DRIFT, "slow", now=NOW)
    control.engine("p3").assume(D, now=NOW)
    control.engine("d1").eject("dead", now=NOW)
    pinned = Engine(spec=decode("d9", pinned=True), role=D)
    assert [control.roles.stays(e, now=NOW + 10.0) for e in (*control.engines.values(), pinned)] == [
        "", "held", "moved lately, stays for 20 s", "held", "", "", "pinned",
    ]  # fmt: skip
    assert control.roles.stays(control.engine("p3"), now=NOW + 29.9) == "moved lately, stays for 0 s"
    assert control.roles.stays(control.engine("p3"), now=NOW + 30.0) == ""
    assert control.roles.stays(joining(decode("d8"), now=NOW), now=NOW) == "held"


# --- moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.rule("C1", "C3")
def test_a_move_for_load_says_the_loads_and_is_followed_by_its_cooldown() -> None:
    control = Control(*SIX)
    assert control.tick(0.5, 1.0, passes=2) == []
    move = moved("p1", D, MoveCause.LOAD, "load of decode 1.00 for 3 passes, of prefill 0.50")
    assert control.tick(0.5, 1.0) == [move]
    assert (control.view().proposal, control.why_not()) == (move, "")
    assert (control.engine("p1").role, control.engine("p1").role_since) == (D, control.now)
    assert (control.role(D).engines, control.role(P).engines) == (4, 2)
    assert (control.role(D).above, control.role(P).gave_age_s, control.role(D).gave_age_s) == (0, 0.0, None)
    control.tick(0.5, 1.0, passes=3)
    words = "the move before was lately, 7 s of cooldown are left"
    assert control.why_not() == f"prefill: load 0.50, wants an engine from 1.00; decode: {words}"
    assert control.view().proposal is None
    # No engine comes back for a minute, however much the other role wants one.
    control.tick(1.2, 0.2, passes=17)
    words = "it gave an engine up lately, none comes back for 40 s"
    assert control.why_not() == f"prefill: {words}; decode: load 0.20, wants an engine from 1.00"
    assert control.tick(1.2, 0.2, passes=39) == []
    reason = "load of prefill 1.20 for 57 passes, of decode 0.20"
    assert control.tick(1.2, 0.2) == [moved("p1", P, MoveCause.LOAD, reason)]


@pytest.mark.rule("C3")
@pytest.mark.parametrize(("cooldown_s", "passes"), [(10.0, 10), (20.0, 20)])
def test_the_cooldown_is_over_to_the_second(cooldown_s: float, passes: int) -> None:
    control = Control(*SIX, cooldown_s=cooldown_s)
    control.tick(0.1, 2.0, passes=3)
    assert control.tick(0.1, 2.0, passes=passes - 1) == []
    assert len(control.tick(0.1, 2.0)) == 1


@pytest.mark.rule("C2")
def test_a_shortfall_is_told_with_its_floor() -> None:
    control = Control(*FOUR, min_decode=2)
    control.engine("d1").eject("dead", now=NOW)
    assert control.tick() == [moved("p1", D, MoveCause.FLOOR, "decode has 1 of at least 2 engines")]
    assert control.tick() == []


@pytest.mark.rule("C2")
def test_a_role_that_joins_counts_for_as_long_as_an_engine_that_moves_has_to_stay() -> None:
    control = Control(prefill("p1"), prefill("p2"), decode("d1"), dwell_s=30.0)
    control.engines["d1"] = joining(decode("d1"), now=NOW + 5.0)
    assert control.tick(passes=34) == []
    assert control.role(D).engines == 1
    assert control.tick() == [moved("p1", D, MoveCause.FLOOR, "decode has 0 of at least 1 engine")]
    # One that carries another hard hold beside counts at no time.
    engine = joining(decode("d2"), now=control.now)
    engine.place(Hold.DRAIN, "disk", now=control.now)
    control.engines["d2"] = engine
    assert control.role(D).engines == 1


@pytest.mark.rule("C3")
def test_who_moves() -> None:
    """Whoever came from there, then who was named in the pass before, then who has the least work."""
    control = Control(*SIX, mode=RoleMode.ADVISORY)
    control.proxies.connected(ProxyConnected(proxy=EDGE, address="a:1", pid=1, highest_epoch=0), now=NOW)

    def named(**legs: int) -> str:
        control.proxies.acked(ProxyAcked(proxy=EDGE, epoch=1, version=1, resident=legs), now=NOW)
        control.tick(0.1, 2.0, passes=3)
        proposal = control.view().proposal
        assert proposal is not None
        return proposal.engine

    assert named(p1=2, p2=1, p3=3) == "p2"
    assert named(p1=0, p2=9, p3=3) == "p2"
    control.tick()  # nothing is named any more
    assert named(p1=4, p2=9, p3=3) == "p3"
    control.tick()
    assert named(p1=1, p2=1) == "p3"  # of whom no proxy says anything: nothing runs there
    control.engines["d1"].assume(P, now=NOW - 100.0)
    assert named(d1=50) == "d1"


@pytest.mark.rule("C1")
def test_advice_is_told_again_only_after_a_minute_without_it() -> None:
    control = Control(*SIX, mode=RoleMode.ADVISORY, risk_window_s=60.0)
    (told,) = control.tick(0.1, 1.5, passes=30)
    assert isinstance(told, Record)
    assert told.message == (
        "engine p1 should have the role decode (load: load of decode 1.50 for 3 passes, of prefill 0.10); "
        "nothing was changed"
    )
    assert control.engine("p1").role is P
    assert control.tick(passes=59) == []
    assert control.tick(0.1, 1.5, passes=3) != []
    assert control.tick(passes=50) == []
    assert control.tick(0.1, 1.5, passes=3) == []
    # Other advice is news at once.
    assert len(control.tick(1.5, 0.1, passes=3)) == 1


# --- an operator's word -----------------------------------------------------------------------------------------------


@pytest.mark.rule("C1", "C2")
def test_an_operator_moves_an_engine_whatever_loads_are() -> None:
    control = Control(*FOUR)
    move = moved("p1", D, MoveCause.OPERATOR, "asked for by an operator")
    assert control.roles.command(control.engine("p1"), D, now=NOW + 1.0) == [move]
    assert (control.engine("p1").role, control.role(P).engines) == (D, 1)
    # One that cannot serve is missed by no floor.
    control.engine("p2").eject("dead", now=NOW)
    assert len(control.roles.command(control.engine("p2"), D, now=NOW + 1.0)) == 1


PIN = "engine p1 is pinned to prefill in the fleet file"


@pytest.mark.rule("C2")
@pytest.mark.parametrize(
    ("engines", "role", "words"),
    [
        (FOUR, P, "engine p1 has the role prefill already"),
        ((prefill("p1", pinned=True), prefill("p2"), decode("d1")), D, PIN),
        ((prefill("p1"), decode("d1")), D, "prefill has 1 engine, its floor is 1 (controller.min_prefill)"),
    ],
)  # fmt: skip
def test_an_operators_word_that_cannot_be_followed(engines: tuple[EngineSpec, ...], role: Phase, words: str) -> None:
    control = Control(*engines)
    with pytest.raises(CommandRefusedError) as refused:
        control.roles.command(control.engine("p1"), role, now=NOW)
    assert (refused.value.refusal, str(refused.value)) == (Refusal.PRECONDITION, words)
    assert control.engine("p1").role is P


# --- consolidation risk -----------------------------------------------------------------------------------------------


def late(count: int = 1) -> Run:
    return Run(engine="p2", phase=P, incarnation=1, outcome=Outcome.PREFILL_TIMEOUT, count=count)


def risk(kind: RiskKind, age_s: float, words: str) -> Record:
    message = f"prefill: {words}, {age_s:.1f} s after it gave up an engine; it gives up no more for 60 s"
    return Record(kind=EventKind.ROLE_RISK, message=message, fields={"role": "prefill", "risk": kind.value})


@pytest.mark.rule("C4")
def test_a_role_that_is_short_of_what_it_gave_up_gives_up_no_more() -> None:
    control = Control(*SIX, cooldown_s=0.0, ttft_s=middle(8))
    control.roles.command(control.engine("p1"), D, now=NOW)
    changed = control.roles.changed
    assert control.roles.timed_out(late(3), now=NOW + 2.5) == [risk(RiskKind.FIRST_TOKEN_LATE, 2.5, "first token late")]
    assert control.roles.timed_out(late(2), now=NOW + 4.0) == []
    assert control.roles.changed == changed + 2  # each is for the next pass to store
    control.given.sketches[P] = {Measure.FIRST: sketch(b8=1)}  # just at its target
    assert control.tick() == [risk(RiskKind.TARGET_MISSED, 1.0, "target missed")]
    control.given.sketches[P] = {}
    control.now = NOW + 9.0
    assert control.role(P).risks == (
        RiskView(kind=RiskKind.FIRST_TOKEN_LATE, count=5, age_s=5.0, blocks_s=55.0),
        RiskView(kind=RiskKind.TARGET_MISSED, count=1, age_s=8.0, blocks_s=52.0),
    )
    assert control.role(D).risks == ()
    control.settings = replace(control.settings, roles=replace(control.settings.roles, ttft_s=50.0))
    control.roles.configure(control.settings)
    control.tick(0.1, 2.0, passes=3)
    words = "prefill gives none up for 52 s: first token late after it gave up an engine"
    assert control.why_not() == f"prefill: load 0.10, wants an engine from 1.00; decode: {words}"
    # Each lasts its minute, counted from its newest event.
    control.now = NOW + 60.0
    control.tick(0.1, 0.1)
    assert [r.kind for r in control.role(P).risks] == [RiskKind.FIRST_TOKEN_LATE]
    assert control.roles.save(now=NOW + 61.0).risks == (
        SavedRisk(role=P, kind=RiskKind.FIRST_TOKEN_LATE, age_s=57.0, count=5),
    )
    control.now = NOW + 63.5
    control.tick(0.1, 0.1)
    assert control.role(P).risks == ()
    assert control.roles.save(now=control.now).risks == ()


@pytest.mark.rule("C4")
@pytest.mark.parametrize(("after_s", "told"), [(59.9, 1), (60.0, 0)])
def test_what_comes_a_minute_later_says_nothing_about_the_move(after_s: float, told: int) -> None:
    control = Control(*SIX)
    control.roles.command(control.engine("p1"), D, now=NOW)
    assert len(control.roles.timed_out(late(), now=NOW + after_s)) == told
    assert len(control.role(P).risks) == told


@pytest.mark.rule("C4", "S1")
def test_what_a_takeover_goes_on_from() -> None:
    control = Control(*SIX)
    assert control.roles.save(now=NOW) == SavedRoles()
    control.roles.command(control.engine("p1"), D, now=NOW)
    control.roles.timed_out(late(2), now=NOW + 3.0)
    saved = SavedRoles(
        gave_age_s={P: 10.0},
        risks=(SavedRisk(role=P, kind=RiskKind.FIRST_TOKEN_LATE, age_s=7.0, count=2),),
    )
    assert control.roles.save(now=NOW + 10.0) == saved
    # An instant that lies ahead of the writing is no age below zero.
    assert control.roles.save(now=NOW - 1.0).gave_age_s == {P: 0.0}
    assert control.roles.save(now=NOW - 1.0).risks[0].age_s == 0.0
    after = Control(*SIX)
    after.roles.load(saved, now=NOW + 500.0)
    after.now = NOW + 501.0
    assert after.role(P).gave_age_s == 11.0
    assert after.role(P).risks == (RiskView(kind=RiskKind.FIRST_TOKEN_LATE, count=2, age_s=8.0, blocks_s=52.0),)
    assert after.roles.save(now=NOW + 500.0) == saved
