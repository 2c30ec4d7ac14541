"""An operator's switchover: to a standby and back, and why not."""

from collections.abc import Awaitable
from dataclasses import replace

import grpc
import pytest

from narwhal._pb import fleet_pb2
from narwhal.control import candidate, yielding
from narwhal.control.core.history import Ending
from narwhal.vocabulary import Phase
from tests.contract.control_kit import Engines, control, plan_of, soon, until, until_answer
from tests.contract.handover_kit import epochs, followed, messages, patient, refused, settled, switch
from tests.contract.model_store import Medium


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
