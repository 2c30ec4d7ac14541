"""From one active to the next: standbys that ask, an active that yields or does not, what the history says of it."""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any

import grpc
import pytest

from narwhal._pb import fleet_pb2
from narwhal.control import candidate, yielding
from narwhal.control.core.history import Ending
from narwhal.control.leader import stage_runners
from narwhal.control.loop import ControlLoop
from narwhal.control.monitor import Runner
from narwhal.control.standing import Standing
from narwhal.control.store.base import Lease, Owner, StoreError
from narwhal.vocabulary import Phase, Stage
from tests.contract.control_kit import (
    ROLES,
    Control,
    Engines,
    Proxy,
    control,
    plan_of,
    soon,
    until,
    until_answer,
)
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


def messages(process: Control, kind: str) -> list[str]:
    return [e.record.message for e in process.observer.after(0) if e.record.kind == kind]


async def settled(process: Control) -> None:
    await until(lambda: process.serving() == {"p0", "d0"})


async def followed(active: Control, *standbys: Control) -> None:
    """The active knows these standbys, and each has its handoff."""
    for process in standbys:
        await until(lambda: process.leader.standing is Standing.STANDBY)  # noqa: B023 - awaited at once

    def fit(status: fleet_pb2.FleetStatus) -> bool:
        found = {s.holder for s in status.standbys if s.copy_epoch == status.epoch and not s.problem}
        return found == {process.leader.holder for process in standbys}

    await until_answer(lambda: active.fleet.GetStatus(fleet_pb2.GetStatusRequest()), fit)


async def epochs(process: Control) -> list[fleet_pb2.EpochEntry]:
    return list((await soon(process.fleet.GetHistory(fleet_pb2.GetHistoryRequest()))).epochs)


def patient(served: Engines, **changes: Any) -> Any:
    """A plan whose standbys wait long enough for an answer on a busy machine."""
    return replace(plan_of(served, ROLES), poll_s=0.1, **changes)


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


# --- an operator's switchover -----------------------------------------------------------------------------------------


async def switch(process: Control, **fields: Any) -> fleet_pb2.YieldResponse:
    return await soon(process.fleet.Yield(fleet_pb2.YieldRequest(operator=True, **fields)))


async def refused(process: Control, **fields: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await switch(process, **fields)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return caught.value.details() or ""


@pytest.mark.rule("S7")
async def test_an_operator_switches_to_a_standby_and_back_and_nothing_is_lost(served: Engines) -> None:
    medium, plan = Medium(), patient(served)
    async with (
        control(served, medium=medium, plan=plan, holder="a") as one,
        control(served, medium=medium, plan=plan, holder="b") as two,
    ):
        await settled(one)
        await followed(one, two)
        before = one.publisher.placement
        assert before is not None
        rehearsed = await switch(one, dry_run=True)
        assert (rehearsed.epoch, rehearsed.standby, rehearsed.address) == (1, "b", two.address)
        assert one.leader.lease is not None
        done = await switch(one)
        assert (done.epoch, done.standby, done.address) == (1, "b", two.address)
        await settled(two)
        assert two.publisher.placement is not None
        assert two.publisher.placement.engines == before.engines
        assert messages(one, "control_yielded") == [f"yielded: to b at {two.address}: an operator asked for it"]
        await followed(two, one)
        await switch(two, standby="a")  # at once: an operator's word knows no minute
        await settled(one)
        assert [(e.epoch, e.holder, e.ending) for e in await epochs(one)] == [
            (1, "a", "switched"),
            (2, "b", "switched"),
            (3, "a", "lasts"),
        ]


async def test_an_operator_is_told_why_there_is_nobody_to_switch_to(served: Engines) -> None:
    medium, plan = Medium(), patient(served)
    other_engines = replace(plan, core=plan_of(served, {"p0": Phase.PREFILL, "d1": Phase.DECODE}).core)
    async with control(served, medium=medium, plan=plan, holder="a") as active:
        await settled(active)
        assert await refused(active) == "no standby is there"
        assert await refused(active, standby="c") == "no standby c is there"
        async with control(served, medium=medium, plan=other_engines, holder="b") as other:
            await until(lambda: "handoff_not_resumed" in other.told())
            await until_answer(
                lambda: refused(active),
                lambda words: words.startswith("b would not take over: the handoff has another set of engines"),
            )
        assert active.leader.lease is not None


async def test_a_standby_that_is_gone_is_not_switched_to(served: Engines) -> None:
    medium, plan = Medium(), patient(served)
    async with control(served, medium=medium, plan=plan, holder="a") as active:
        await settled(active)
        async with control(served, medium=medium, plan=plan, holder="b") as other:
            await followed(active, other)
        active.clock.monotonic_shift = yielding.HEARD_S + 1.0
        assert await refused(active) == "no standby is there"


async def test_who_yielded_takes_the_lease_again_when_nobody_else_does(
    served: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate, "GIVE_WAY_S", 0.3)
    medium = Medium()
    async with control(served, medium=medium, holder="a") as active:
        await settled(active)
        began = active.clock.monotonic()
        await active.leader.yield_lease(Ending.SWITCHED, "to b: which dies at this moment")
        await settled(active)
        assert active.clock.monotonic() - began >= 0.3
        assert [e.ending for e in await epochs(active)] == ["switched", "lasts"]


async def test_only_the_active_answers_and_a_standby_names_itself(served: Engines) -> None:
    medium, plan = Medium(), patient(served)
    async with (
        control(served, medium=medium, plan=plan, holder="a") as active,
        control(served, medium=medium, plan=plan, holder="b") as other,
    ):
        await settled(active)
        await followed(active, other)
        calls: list[Awaitable[object]] = [
            other.fleet.GetHistory(fleet_pb2.GetHistoryRequest()),
            other.fleet.StandBy(fleet_pb2.StandByRequest(holder="c")),
            other.fleet.Yield(fleet_pb2.YieldRequest(operator=True)),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await soon(call)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert active.address in (caught.value.details() or "")
        calls = [
            active.fleet.Yield(fleet_pb2.YieldRequest()),
            active.fleet.Yield(fleet_pb2.YieldRequest(standby="b", dry_run=True)),
            active.fleet.StandBy(fleet_pb2.StandByRequest()),
            active.fleet.StandBy(fleet_pb2.StandByRequest(holder="c", copy_written_at=float("nan"))),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await soon(call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await soon(active.fleet.Yield(fleet_pb2.YieldRequest(standby="b")))
        assert caught.value.details() == "it is control-ready"


# --- the history ------------------------------------------------------------------------------------------------------


async def test_the_history_survives_restarts_and_is_complete_though_holders_die(served: Engines) -> None:
    medium = Medium()
    async with control(served, medium=medium, holder="a") as process:
        await settled(process)
        lease = process.leader.lease
        assert lease is not None
        lease.valid_until = 0.0  # it fences itself, and leads again
        await until(lambda: process.leader.lease not in (None, lease))
        await settled(process)
        fenced, lasting = await epochs(process)
        assert (fenced.epoch, fenced.ending, fenced.reason) == (1, "fenced", "the lease was not renewed in time")
        assert fenced.began_at <= fenced.ended_at <= lasting.began_at
        document = medium.history
    async with control(served, medium=medium, holder="b", resume=True) as process:
        await settled(process)
        assert [(e.epoch, e.holder, e.ending) for e in await epochs(process)] == [
            (1, "a", "fenced"),
            (2, "a", "stopped"),
            (3, "b", "lasts"),
        ]
    medium.history = document  # as a holder that was killed leaves it
    async with control(served, medium=medium, holder="c", resume=True) as process:
        await settled(process)
        assert [(e.epoch, e.holder, e.ending) for e in await epochs(process)] == [
            (1, "a", "fenced"),
            (2, "a", "untold"),
            (4, "c", "lasts"),
        ]


@pytest.mark.rule("S5")
async def test_a_move_above_an_epoch_that_proxies_have_seen_is_in_the_history(served: Engines) -> None:
    async with control(served, holder="a") as process:
        await settled(process)
        async with Proxy(process, highest_epoch=7):
            await until(lambda: process.leader.lease is not None and process.leader.lease.epoch == 8)
        first, second = await epochs(process)
        assert (first.epoch, first.ending, first.reason) == (1, "moved", "moved above epoch 7, which proxies have seen")
        assert (second.epoch, second.ending) == (8, "lasts")


async def test_a_history_that_cannot_be_read_begins_anew_and_says_so(served: Engines) -> None:
    medium = Medium(history=b"{")
    async with control(served, medium=medium) as process:
        await settled(process)
        assert messages(process, "store_warning")[0].startswith("the history of epochs begins anew, it cannot be read")
        assert [e.epoch for e in await epochs(process)] == [1]

        def written() -> bool:
            return medium.history is not None and medium.history != b"{"

        await until(written)
        assert json.loads(medium.history or b"")["schema"] == "narwhal.history"


async def test_a_history_that_cannot_be_written_holds_nothing_up_and_is_written_later(served: Engines) -> None:
    class Forgetful(ModelStore):
        refuses = True

        async def keep_history(self, lease: Lease, document: bytes) -> None:
            if self.refuses:
                raise StoreError("not now")
            await super().keep_history(lease, document)

    medium = Medium()
    store = Forgetful(medium)
    async with control(served, store=store) as process:
        await settled(process)
        assert medium.history is None
        store.refuses = False
        await until(lambda: medium.history is not None)


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
