"""From one active to the next: standbys that ask, an active that yields or does not, what a standby goes on with."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from narwhal._pb import fleet_pb2
from narwhal.control import candidate, yielding
from narwhal.control.leader import stage_runners
from narwhal.control.loop import ControlLoop
from narwhal.control.monitor import Runner
from narwhal.control.standing import Standing
from narwhal.control.store.base import Lease, Owner, StoreError
from narwhal.vocabulary import Stage
from tests.contract.control_kit import Engines, control, soon, until, until_answer
from tests.contract.handover_kit import epochs, followed, messages, patient, refused, settled, switch
from tests.contract.model_store import Medium, ModelStore


class Broken:
    """A monitor stage that can be made to fail."""

    def __init__(self) -> None:
        self.stages: set[Stage] = set()

    def runners(self, loop: ControlLoop) -> Mapping[Stage, Runner]:
        real = stage_runners(loop)

        def of(stage: Stage) -> Runner:
            async def run() -> None:
                if stage in self.stages:
                    raise RuntimeError("planted")
                await real[stage]()

            return run

        return {stage: of(stage) for stage in Stage}


# --- a degraded active ------------------------------------------------------------------------------------------------


@pytest.mark.rule("M8", "S7")
async def test_a_degraded_active_yields_to_a_healthy_standby_which_leads_at_once(served: Engines) -> None:
    medium, broken = Medium(), Broken()
    plan = patient(served)
    async with (
        control(served, medium=medium, plan=plan, holder="a", runners=broken.runners) as active,
        control(served, medium=medium, plan=plan, holder="b") as other,
    ):
        await settled(active)
        await followed(active, other)
        broken.stages.add(Stage.LIVENESS)
        await until(lambda: other.leader.standing is Standing.ACTIVE)
        await settled(other)
        assert active.told().count("control_yielded") == 1
        (words,) = messages(active, "control_yielded")
        assert words == f"yielded: to b at {other.address}: monitoring degraded: liveness RuntimeError"
        (missed,) = messages(other, "active_missed")
        assert missed.startswith("a is not control-ready, 4 answers in a row: monitoring degraded: liveness Runtime")
        assert [(e.epoch, e.holder, e.ending) for e in await epochs(other)] == [(1, "a", "yielded"), (2, "b", "lasts")]
        await until(lambda: active.leader.standing is Standing.STANDBY)
        assert medium.proof.startswith("b "), "it has proven that it can write"
        assert other.publisher.placement is not None
        assert other.publisher.placement.closed == "", "M7: it begins with no failures"


@pytest.mark.rule("M8", "M6")
async def test_without_a_standby_a_degraded_active_stays_and_recovers_by_itself(served: Engines) -> None:
    broken = Broken()
    async with control(served, plan=patient(served), runners=broken.runners) as active:
        await settled(active)
        broken.stages.add(Stage.LIVENESS)
        await until(lambda: not active.leader.readiness().control_ready)
        passes = active.leader.passes
        await until(lambda: active.leader.passes > passes + 20)
        lease = active.leader.lease
        assert lease is not None
        assert lease.epoch == 1
        broken.stages.clear()
        await until(lambda: active.leader.readiness().reason == "")
        assert active.told().count("control_active") == 1


@pytest.mark.rule("M8")
async def test_two_that_fail_for_one_cause_do_not_pass_the_lease_to_and_fro(served: Engines) -> None:
    medium, broken = Medium(), Broken()
    plan = patient(served)
    async with (
        control(served, medium=medium, plan=plan, holder="a", runners=broken.runners) as one,
        control(served, medium=medium, plan=plan, holder="b", runners=broken.runners) as two,
    ):
        await settled(one)
        await followed(one, two)
        broken.stages.add(Stage.LIVENESS)
        await until(lambda: "yield_refused" in two.told())
        passes = two.leader.passes
        await until(lambda: two.leader.passes > passes + 30)
        lease = two.leader.lease
        assert lease is not None
        assert lease.epoch == 2
        (words,) = messages(two, "yield_refused")
        assert words.startswith("does not yield to a: the lease was yielded ")
        assert words.endswith("s ago, and is at most once in 60 s")
        two.clock.monotonic_shift = 61.0  # a minute later it may
        await until(lambda: one.leader.standing is Standing.ACTIVE)
        assert [e.ending for e in await epochs(one)] == ["yielded", "yielded", "lasts"]


@pytest.mark.rule("M8")
async def test_that_no_engine_is_eligible_is_no_failure_of_control(served: Engines) -> None:
    medium = Medium()
    plan = patient(served)
    async with (
        control(served, medium=medium, plan=plan, holder="a") as active,
        control(served, medium=medium, plan=plan, holder="b") as other,
    ):
        await settled(active)
        await followed(active, other)
        served.status = {"d0": 503}
        for engine in ("p0", "d0"):
            await soon(active.fleet.EjectEngine(fleet_pb2.EjectEngineRequest(engine_id=engine)))
        await until(lambda: active.leader.readiness().reason == "no eligible engines")
        passes = active.leader.passes
        await until(lambda: active.leader.passes > passes + 20)
        assert "active_missed" not in other.told()
        assert active.leader.lease is not None


@pytest.mark.rule("M8")
async def test_an_active_that_cannot_persist_does_not_yield(served: Engines) -> None:
    class Full(ModelStore):
        """Takes everything but the document."""

        full = False

        async def save(self, lease: Lease, document: bytes) -> None:
            if self.full:
                raise StoreError("no room")
            await super().save(lease, document)

    medium, broken = Medium(), Broken()
    store, plan = Full(medium), patient(served)
    async with (
        control(served, store=store, plan=plan, holder="a", runners=broken.runners) as active,
        control(served, medium=medium, plan=plan, holder="b") as other,
    ):
        await settled(active)
        await followed(active, other)
        store.full = True
        await until(lambda: "yield_refused" in active.told())
        (words,) = messages(active, "yield_refused")
        assert words == "does not yield to b: it cannot store its own state handoff: no room"
        assert active.leader.lease is not None
        assert active.publisher.placement is not None, "it goes on"
        store.full = False
        await until(lambda: active.leader.readiness().reason == "")


@pytest.mark.rule("M8")
async def test_a_standby_that_cannot_write_is_not_yielded_to(served: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly(ModelStore):
        async def prove(self, proof: str) -> None:
            raise StoreError("no writes")

    monkeypatch.setattr(yielding, "PROVE_S", 0.3)
    medium, broken = Medium(), Broken()
    plan = patient(served)
    async with (
        control(served, medium=medium, plan=plan, holder="a", runners=broken.runners) as active,
        control(served, store=ReadOnly(medium), plan=plan, holder="b") as other,
    ):
        await settled(active)
        await followed(active, other)
        broken.stages.add(Stage.LIVENESS)
        await until(lambda: "yield_refused" in active.told())
        (words,) = messages(active, "yield_refused")
        assert words == "does not yield to b: b has not proven that it can write to the store"
        assert active.leader.lease is not None


@pytest.mark.rule("M8")
async def test_an_active_that_does_not_answer_is_replaced_when_its_lease_is_over_and_not_earlier(
    served: Engines,
) -> None:
    ghost = Owner(holder="a", address="127.0.0.1:1", epoch=4)
    medium = Medium(owner=ghost, held=Lease(owner=ghost))
    async with control(served, medium=medium, plan=patient(served), holder="b") as other:
        await until(lambda: "active_missed" in other.told())
        (words,) = messages(other, "active_missed")
        assert words.startswith("a is not control-ready, 4 answers in a row: no answer: ")
        assert other.leader.standing is Standing.STANDBY
        medium.expire()
        await settled(other)
        assert [(e.epoch, e.holder, e.ending, e.HasField("began_at")) for e in await epochs(other)] == [
            (4, "a", "untold", False),
            (5, "b", "lasts", True),
        ]


# --- the store was away -----------------------------------------------------------------------------------------------


@pytest.mark.rule("S8")
@pytest.mark.case("I4")
async def test_case_I4_who_led_before_the_store_was_away_leads_again(
    served: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate, "RETURN_S", 60.0)
    medium = Medium()
    # A standby that looks often would be the first to find the lease free.
    async with (
        control(served, medium=medium, plan=replace(patient(served), poll_s=0.5), holder="a") as active,
        control(served, medium=medium, plan=replace(patient(served), poll_s=0.01), holder="b") as other,
    ):
        await until(lambda: active.leader.standing is not Standing.STARTING)
        if active.leader.standing is not Standing.ACTIVE:
            await followed(other, active)
            await switch(other)
        await settled(active)
        await followed(active, other)
        lease = active.leader.lease
        assert lease is not None
        medium.failing = "away"
        lease.valid_until = 0.0
        for process in (active, other):
            await until(lambda: "store_failed" in process.told())  # noqa: B023 - awaited at once
        medium.expire()
        medium.failing = ""
        await settled(active)
        assert [(e.epoch, e.holder, e.ending) for e in await epochs(active)][-2:] == [
            (lease.epoch, "a", "fenced"),
            (lease.epoch + 1, "a", "lasts"),
        ]
        # From then on the standby need not wait for it.
        await followed(active, other)
        await switch(active)
        await settled(other)


@pytest.mark.rule("S7", "S8")
async def test_when_it_does_not_come_back_with_the_store_the_standby_leads(
    served: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate, "RETURN_S", 0.5)
    ghost = Owner(holder="a", address="127.0.0.1:1", epoch=4)
    medium = Medium(owner=ghost, held=Lease(owner=ghost))
    async with control(served, medium=medium, plan=patient(served), holder="b") as other:
        await until(lambda: other.leader.standing is Standing.STANDBY)
        medium.failing = "away"
        await until(lambda: "store_failed" in other.told())
        medium.expire()
        medium.failing = ""
        began = other.clock.monotonic()
        await until(lambda: other.leader.standing is Standing.ACTIVE)
        assert other.clock.monotonic() - began > 0.3


# --- the standby's copy -----------------------------------------------------------------------------------------------


@pytest.mark.rule("S7")
@pytest.mark.case("I17")
async def test_a_standby_whose_copy_is_too_old_and_cannot_be_read_anew_says_so_and_does_not_lead(
    served: Engines,
) -> None:
    class Unread(ModelStore):
        """Gives the lease, and does not give the document."""

        unread = False

        async def load(self) -> bytes | None:
            if self.unread:
                raise StoreError("not to be read")
            return await super().load()

    medium = Medium()
    store, plan = Unread(medium), patient(served, max_handoff_age_s=30.0)
    async with control(served, store=store, plan=plan, holder="b") as other:
        async with control(served, medium=medium, plan=plan, holder="a") as active:
            await until(lambda: {other.leader.standing, active.leader.standing} >= {Standing.ACTIVE, Standing.STANDBY})
            if other.leader.standing is Standing.ACTIVE:
                await followed(other, active)
                await switch(other)
            await settled(active)
            await followed(active, other)
            store.unread = True
            other.clock.monotonic_shift = 31.0
            await until(lambda: any("more than 30 s old" in words for words in messages(other, "store_failed")))
            await until_answer(
                lambda: refused(active), lambda words: "more than 30 s old and cannot be read anew" in words
            )
        assert medium.held is None
        await asyncio.sleep(0.3)
        assert other.leader.standing is Standing.STANDBY
        assert medium.held is None
        store.unread = False
        await settled(other)


@pytest.mark.rule("S7")
@pytest.mark.case("I18")
@pytest.mark.parametrize("old", [False, True])
async def test_from_a_store_that_was_wiped_a_standby_goes_on_with_its_copy_unless_that_is_too_old(
    old: bool, served: Engines
) -> None:
    medium, plan = Medium(), patient(served)
    async with control(served, medium=medium, plan=plan, holder="a") as active:
        await settled(active)
        async with control(served, medium=medium, plan=plan, holder="b") as other:
            await followed(active, other)
            await soon(active.fleet.EjectEngine(fleet_pb2.EjectEngineRequest(engine_id="d0", reason="by hand")))
            served.status = {"d0": 503, "p0": 503}

            def has_it() -> bool:
                copy = other.leader.candidate.copy
                handoff = copy.judged.handoff if copy is not None else None
                return handoff is not None and any(h.kind == "ejected" for h in handoff.state.engines["d0"].holds)

            await until(has_it)
            active.leader.candidate.gives_way(10**9)  # the holder is gone for good
            if old:
                other.clock.monotonic_shift = 31.0
            medium.document, medium.owner, medium.history = None, None, None
            medium.expire()
            if old:
                await until(lambda: any("more than 30 s old" in w for w in messages(other, "handoff_not_resumed")))
                assert medium.held is None
                return
            await until(lambda: other.leader.standing is Standing.ACTIVE)
            lease = other.leader.lease
            assert lease is not None
            assert lease.epoch == 2, "above every epoch that was seen"
            assert other.serving() == {"p0"}, "nothing is readmitted by accident"
