"""Placement streams over real gRPC: what comes first, what follows, who has applied it, and whose placement it is."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import grpc
import pytest
import pytest_asyncio

from narwhal._pb import fleet_pb2, placement_pb2
from narwhal.vocabulary import Phase
from tests.contract.control_kit import (
    ROLES,
    Control,
    Engines,
    Proxy,
    control,
    identity,
    soon,
    until,
    until_answer,
    with_engines,
)
from tests.contract.model_store import Medium
from tests.contract.stream_kit import settled

PREFILL, DECODE = placement_pb2.PHASE_PREFILL, placement_pb2.PHASE_DECODE


@pytest_asyncio.fixture
async def process(served: Engines) -> AsyncIterator[Control]:
    """Control whose engines have joined."""
    async with control(served) as made:
        await until(lambda: made.serving() == {"p0", "d0"})
        yield made


# --- what a stream carries --------------------------------------------------------------------------------------------


@pytest.mark.rule("P1")
async def test_settings_then_a_snapshot_then_changes_whose_versions_rise_by_one(served: Engines) -> None:
    served.status = {"p0": 503, "d0": 503}
    async with control(served) as process, Proxy(process, fleet="fleet") as proxy:
        await until(lambda: process.leader.loop is not None)
        first = await proxy.read()
        assert first.WhichOneof("message") == "settings"
        assert (first.settings.fleet, first.settings.json) == ("fleet", b'{"name": "fleet"}')
        second = await proxy.read()
        assert second.WhichOneof("message") == "snapshot"
        snapshot = second.snapshot
        assert (snapshot.epoch, snapshot.version, snapshot.closed) == (1, 1, "")
        assert [(e.id, list(e.phases), list(e.holds)) for e in snapshot.engines] == [
            ("p0", [], ["joining"]),
            ("d0", [], ["joining"]),
        ]
        held = {e.id: e for e in snapshot.engines}
        version = snapshot.version
        served.status = {}
        while not all(held[e].phases for e in ("p0", "d0")):
            change = (await proxy.next("change")).change
            assert (change.epoch, change.base_version, change.version) == (1, version, version + 1)
            assert change.engines, "a version without other content"
            version = change.version
            held |= {e.id: e for e in change.engines}
        assert {e: list(m.phases) for e, m in held.items()} == {"p0": [PREFILL], "d0": [DECODE]}
        assert all(m.incarnation == 1 and not m.holds and m.weight == 1.0 for m in held.values())


@pytest.mark.rule("P8")
async def test_an_observer_gets_what_a_proxy_gets_but_never_the_settings(process: Control) -> None:
    call = process.placement.WatchPlacement(placement_pb2.WatchPlacementRequest(name="lb"))
    first = await soon(call.read())
    assert isinstance(first, placement_pb2.PlacementMessage)
    assert {e.id for e in first.snapshot.engines} == {"p0", "d0"}
    roles = {**ROLES, "d1": Phase.DECODE}
    plan = with_engines(process.leader.plan, process.engines, roles)
    async with Proxy(process) as proxy:
        snapshot = await settled(proxy)
        assert [e.id for e in snapshot.engines] == [e.id for e in first.snapshot.engines]
        await soon(process.leader.reload(plan))
        seen = (await proxy.next("change")).change
        kinds = set()
        while True:
            message = await soon(call.read())
            assert isinstance(message, placement_pb2.PlacementMessage)
            kinds.add(message.WhichOneof("message"))
            if message.WhichOneof("message") == "change":
                break
        assert message.change.SerializeToString() == seen.SerializeToString()
        assert "settings" not in kinds
    call.cancel()


async def test_new_settings_reach_proxies_before_the_placement_they_belong_to(process: Control) -> None:
    async with Proxy(process) as proxy:
        await settled(proxy)
        plan = with_engines(process.leader.plan, process.engines, {**ROLES, "d1": Phase.DECODE})
        await soon(process.leader.reload(type(plan)(**{**plan.__dict__, "proxy_settings": b"{}"})))
        message = await proxy.next("settings", "change")
        assert message.settings.json == b"{}"
        assert (await proxy.next("settings", "change")).change.engines[0].id == "d1"


@pytest.mark.case("B4")
async def test_an_engine_removed_by_a_reload_leaves_placement_probes_and_metrics(process: Control) -> None:
    plan = with_engines(process.leader.plan, process.engines, {**ROLES, "d1": Phase.DECODE})
    await soon(process.leader.reload(plan))
    await until(lambda: "d1" in process.serving())
    assert b'engine="d0"' in process.metrics.render()
    async with Proxy(process) as proxy:
        await settled(proxy)
        await soon(
            process.leader.reload(with_engines(plan, process.engines, {"p0": Phase.PREFILL, "d1": Phase.DECODE}))
        )
        assert list((await proxy.next("change")).change.removed) == ["d0"]
    assert process.told().count("engine_removed") == 1
    assert b'engine="d0"' not in process.metrics.render()
    assert b'engine="d1"' in process.metrics.render()
    loop = process.leader.loop
    assert loop is not None
    assert [e.id for e in loop.view().engines] == ["p0", "d1"]
    # Added again under the same name, it is another engine: it has to join.
    process.engines.status["d0"] = 500
    await soon(process.leader.reload(plan))
    await until(lambda: "engine_check_failed" in process.told())
    assert process.serving() == {"p0", "d1"}


@pytest.mark.rule("P10")
async def test_control_sends_a_heartbeat_every_second(process: Control) -> None:
    async with Proxy(process) as proxy:
        snapshot = await settled(proxy)
        beats = []
        for _ in range(4):
            message = await proxy.next("heartbeat")
            beats.append(asyncio.get_running_loop().time())
            assert (message.heartbeat.epoch, message.heartbeat.version) == (1, snapshot.version)
            await proxy.ack(snapshot.epoch, snapshot.version)
        gaps = [b - a for a, b in pairwise(beats)]
        assert 0.9 < sum(gaps) / len(gaps) < 1.3
        assert max(gaps) < 2.5


@pytest.mark.rule("P9")
async def test_residency_is_the_sum_over_proxies_newest_only_at_most_twice_a_second(process: Control) -> None:
    async with Proxy(process) as one, Proxy(process, identity("other")) as other:
        first, _ = await settled(one), await settled(other)
        began = asyncio.get_running_loop().time()
        for legs in range(1, 200):
            await one.ack(first.epoch, first.version, p0=legs)
            await other.ack(first.epoch, first.version, p0=1, d0=2)
            await asyncio.sleep(0.005)
        pictures = 0
        while True:
            message = await one.next("residency")
            pictures += 1
            picture = {r.engine_id: r.legs for r in message.residency.resident}
            if picture == {"p0": 200, "d0": 2}:
                break
        took = asyncio.get_running_loop().time() - began
        assert pictures <= took / 0.5 + 2
        assert message.residency.proxies == 2
        await one.goodbye("done")
        message = await other.next("residency")
        while {r.engine_id: r.legs for r in message.residency.resident} != {"p0": 1, "d0": 2}:
            message = await other.next("residency")
        assert message.residency.proxies == 1


@pytest.mark.rule("P9")
async def test_prompt_tokens_are_summed_beside_the_legs(process: Control) -> None:
    async with Proxy(process) as one, Proxy(process, identity("other")) as other:
        first, _ = await settled(one), await settled(other)
        for proxy, tokens in ((one, 700), (other, 50)):
            resident = [placement_pb2.Residency(engine_id="p0", legs=1, tokens=tokens)]
            ack = placement_pb2.Ack(epoch=first.epoch, version=first.version, resident=resident)
            await proxy.call.write(placement_pb2.ProxyMessage(ack=ack))
        while [(r.engine_id, r.legs, r.tokens) for r in (await one.next("residency")).residency.resident] != [
            ("p0", 2, 750)
        ]:
            pass
        await other.goodbye("done")
        while [r.tokens for r in (await one.next("residency")).residency.resident] != [700]:
            pass


# --- acknowledgements and refusals ------------------------------------------------------------------------------------


@pytest.mark.rule("P6")
async def test_control_shows_who_applies_what_and_who_lags(process: Control) -> None:
    async with Proxy(process) as proxy:
        snapshot = await settled(proxy)
        await soon(
            process.leader.reload(with_engines(process.leader.plan, process.engines, {**ROLES, "d1": Phase.DECODE}))
        )
        change = (await proxy.next("change")).change

        async def status() -> fleet_pb2.ProxyStatus:
            return (await process.fleet.ListProxies(fleet_pb2.ListProxiesRequest())).proxies[0]

        before = await until_answer(status, lambda s: s.acked_version == snapshot.version)
        assert before.lag >= 1
        assert (before.connected, before.address, before.pid) == (True, "10.0.0.1:8000", 7)
        await proxy.nack(1, change.version, "no room")
        refused = await until_answer(status, lambda s: s.refused_version)
        assert (refused.refused_version, refused.refused_reason) == (change.version, "no room")
        again = (await proxy.next("snapshot")).snapshot
        await proxy.ack(1, again.version)
        assert not (await until_answer(status, lambda s: not s.lag)).refused_version
    assert "placement_refused" in process.told()


@pytest.mark.rule("P6")
async def test_a_refusal_is_answered_by_a_snapshot_and_more_of_them_at_a_bounded_rate(process: Control) -> None:
    async with Proxy(process) as proxy:
        snapshot = await settled(proxy)
        began = asyncio.get_running_loop().time()
        snapshots = 0
        while snapshots < 3:
            await proxy.nack(1, snapshot.version, "cannot")
            message = await proxy.next("snapshot", "heartbeat")
            if message.WhichOneof("message") == "snapshot":
                snapshots += 1
                assert message.snapshot.version >= snapshot.version
        assert 1.9 < asyncio.get_running_loop().time() - began < 8


# --- leadership -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("S5")
@pytest.mark.case("I18")
async def test_an_active_below_the_highest_epoch_a_proxy_has_seen_acquires_above_it(process: Control) -> None:
    serving = process.serving()
    async with Proxy(process, identity("early")) as early, Proxy(process, highest_epoch=41) as proxy:
        snapshot = (await proxy.next("snapshot")).snapshot
        assert (snapshot.epoch, snapshot.version) == (42, 1)
        while (await early.next("snapshot")).snapshot.epoch != 42:
            pass
        assert {e.id for e in snapshot.engines if e.phases} == serving
    lease = process.leader.lease
    assert lease is not None
    assert lease.epoch == 42
    assert "control_fenced" not in process.told()


@pytest.mark.rule("P5", "S5")
async def test_a_fenced_control_ends_its_streams_and_takes_the_lease_again(process: Control) -> None:
    async with Proxy(process) as proxy:
        await settled(proxy)
        lease = process.leader.lease
        assert lease is not None
        lease.valid_until = process.clock.boottime()  # it could not be renewed
        farewell = (await proxy.next("farewell")).farewell
        assert farewell.reason == "the lease was not renewed in time"
        assert (await proxy.end())[0] is grpc.StatusCode.UNAVAILABLE
    async with Proxy(process) as proxy:
        assert (await proxy.next("snapshot")).snapshot.epoch == 2
    assert process.serving() == {"p0", "d0"}, "the stored handoff was applied"


@pytest.mark.rule("S7")
async def test_a_standby_keeps_proxies_warm_and_streams_to_them_when_it_takes_over(served: Engines) -> None:
    medium = Medium()
    async with control(served, medium=medium) as active:
        await until(lambda: active.serving() == {"p0", "d0"})
        async with control(served, medium=medium, holder="b") as standby:
            await until(lambda: standby.told() == ["control_standby"])
            async with Proxy(standby) as proxy:
                assert (await proxy.read()).WhichOneof("message") == "settings"
                beat = (await proxy.next("heartbeat", "snapshot")).heartbeat
                assert (beat.epoch, beat.version) == (0, 0)
                await proxy.ack(1, 5)
                await active.leader.stop()
                snapshot = (await proxy.next("snapshot")).snapshot
                assert (snapshot.epoch, snapshot.version) == (2, 1)
                assert {e.id for e in snapshot.engines if e.phases} == {"p0", "d0"}
                loop = standby.leader.loop
                assert loop is not None
                assert [p.connected for p in loop.view().proxies] == [True]


async def test_observers_are_sent_to_the_active(served: Engines) -> None:
    medium = Medium()
    async with control(served, medium=medium) as active, control(served, medium=medium, holder="b") as standby:
        await until(lambda: standby.told() == ["control_standby"])
        call = standby.placement.WatchPlacement(placement_pb2.WatchPlacementRequest(name="lb"))
        assert await soon(call.code()) is grpc.StatusCode.FAILED_PRECONDITION
        assert active.address in (await call.details() or "")
