"""The fleet as all surfaces show it: view, placement and readiness agree, and are made anew only when they change."""

import pytest

from narwhal.control.core.events import (
    EjectCommand,
    PassEnded,
    ProbeCommand,
    ProxyAcked,
    ProxyConnected,
    Reloaded,
    StageFailure,
    Woke,
)
from narwhal.control.core.settings import RoleMode
from narwhal.reports import RequestCounts
from narwhal.vocabulary import Hold, Outcome, Phase, Stage
from tests.core.rig import EDGE, Rig, decode, prefill

P, D = Phase.PREFILL, Phase.DECODE
PINNED = (prefill("p", pinned=True), decode("d", pinned=True), decode("e", pinned=True))
FAILED = PassEnded(failures=(StageFailure(stage=Stage.LIVENESS, error_class="OSError", message="no"),))


def test_everything_that_there_is_to_show_of_a_fleet() -> None:
    rig = Rig(*PINNED, name="west", model="llama", monitor_failure_limit=1)
    rig.send(ProxyConnected(proxy=EDGE, address="a:1", pid=7, highest_epoch=0))
    rig.send(ProxyAcked(proxy=EDGE, epoch=1, version=1, resident={"d": 2}))
    rig.batch(rig.run("d", Outcome.LOCAL), requests=RequestCounts(served=3, retried=1))
    view = rig.fleet.view(now=rig.now)
    assert (view.name, view.model, view.not_ready, view.closed) == ("west", "llama", "", "")
    assert [(e.id, set(e.phases), e.inflight) for e in view.engines] == [("p", {P}, 0), ("d", {D}, 2), ("e", {D}, 0)]
    (proxy,) = view.proxies
    assert (proxy.key, proxy.suspect) == (EDGE, "its legs fail by causes of its own")
    assert view.totals == RequestCounts(served=3, retried=1)
    assert (view.monitor.passes, view.roles.mode) == (0, RoleMode.ADVISORY)
    assert {e.stays for e in view.engines} == {"pinned"}
    rig.now += 2.0
    rig.send(FAILED)
    view = rig.fleet.view(now=rig.now)
    degraded = "monitoring degraded: liveness OSError"
    assert (view.not_ready, view.closed, view.monitor.passes) == (degraded, degraded, 1)
    assert view.proxies[0].silent_s == 2.0
    assert view.monitor.errors[0].age_s == 0.0


@pytest.mark.rule("P2", "M9")
def test_an_engine_whose_admission_is_not_stored_serves_nobody_yet_on_any_surface() -> None:
    rig = Rig(*PINNED[:2], liveness_every=0)
    stored = rig.fleet.incarnations()
    rig.send(EjectCommand(engine="d", reason="x"))
    rig.readmit("d")
    view = rig.fleet.view(now=rig.now, stored=stored)
    assert view.not_ready == "no eligible engines"
    assert {e.id: set(e.phases) for e in view.engines} == {"p": {P}, "d": set()}
    waits = "engine d is not eligible yet: its admission is being stored (role decode, pinned, incarnation 2)"
    assert rig.fleet.explain("d", now=rig.now, stored=stored).lines[0] == waits
    now_stored = rig.fleet.incarnations()
    view = rig.fleet.view(now=rig.now, stored=now_stored)
    assert (view.not_ready, {e.id: set(e.phases) for e in view.engines}) == ("", {"p": {P}, "d": {D}})
    assert rig.fleet.view(now=rig.now).not_ready == ""
    # Asked for again with the older handoff, the answer is the older one.
    assert rig.fleet.view(now=rig.now, stored=stored).not_ready == "no eligible engines"


def test_what_an_engine_is_doing_is_said_by_its_suspicion_or_by_its_gate() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    rig.report("d", Outcome.STREAM_CUT, count=3)
    rig.send(EjectCommand(engine="e", reason="x"))
    rig.send(ProbeCommand(engine="e"))
    assert [rig.engine(e).suspicion for e in ("p", "d", "e")] == [
        "",
        "inference probe under way",
        "its gate is being tried: check health under way",
    ]
    assert [rig.engine(e).gate_in_s for e in ("p", "d", "e")] == [None, None, 10.0]
    rig.now += 1000.0  # long overdue, which is not less than at once
    assert rig.engine("e").gate_in_s == 0.0


@pytest.mark.rule("P1")
def test_placement_is_made_anew_when_what_it_says_changes_and_entries_that_stay_are_the_same() -> None:
    rig = Rig(*PINNED, liveness_every=0, monitor_failure_limit=1)
    first = rig.fleet.placement(now=rig.now)
    rig.report("d", Outcome.STREAM_COMPLETE, count=5)
    assert rig.fleet.placement(now=rig.now) is first
    rig.send(FAILED)
    closed = rig.fleet.placement(now=rig.now)
    assert (closed.closed, closed.engines) == ("monitoring degraded: liveness OSError", first.engines)
    assert rig.fleet.placement(now=rig.now) is closed
    rig.send(PassEnded())
    assert rig.fleet.placement(now=rig.now) == first
    rig.send(EjectCommand(engine="e", reason="x"))
    after = rig.fleet.placement(now=rig.now)
    assert (after.engines["e"].phases, after.engines["e"].holds) == (frozenset(), (Hold.EJECTED,))
    assert after.engines["d"] is first.engines["d"]
    assert rig.fleet.placement(now=rig.now) is after


@pytest.mark.rule("P1", "H4")
def test_what_an_engine_serves_after_its_quarantine_follows_what_happens_to_the_others() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True), prefill("q"), liveness_every=0,
              failure_quarantine_s=50.0)  # fmt: skip
    rig.report("q", Outcome.HTTP_5XX)

    def of_q() -> tuple[set[Phase], set[Phase], float | None]:
        """What it serves now and after its quarantine, and for how long that lasts."""
        entry = rig.fleet.placement(now=rig.now).engines["q"]
        left_s = None if entry.quarantine_due is None else entry.quarantine_due - rig.now
        return set(entry.phases), set(entry.phases_after_quarantine), left_s

    assert of_q() == (set(), {P}, 50.0)
    # d goes: q, held as it is, serves decode as the last that can, and both phases once its time is over.
    rig.report("d", Outcome.REFUSED, count=3)
    assert of_q() == ({D}, {P, D}, 50.0)
    rig.now += 50.0
    rig.send(Woke())
    assert of_q() == ({P, D}, set(), None)


@pytest.mark.rule("S2")
def test_a_reload_shows_the_engines_and_numbers_that_the_file_has_now() -> None:
    rig = Rig(*PINNED, liveness_every=0)
    before = rig.fleet.placement(now=rig.now)
    rig.send(Reloaded(settings=rig.with_settings(engines=(*PINNED[1:], decode("f")), model="other", eject_after=7)))
    view = rig.fleet.view(now=rig.now)
    assert (view.model, [e.id for e in view.engines]) == ("other", ["d", "e", "f"])
    content = rig.fleet.placement(now=rig.now)
    assert list(content.engines) == ["d", "e", "f"]
    assert content.engines["d"] == before.engines["d"]
    rig.report("d", Outcome.HTTP_5XX)
    assert rig.engine("d").evidence[0].limit == 7
