"""Placement streams over real gRPC: what comes first, what follows, and what ends a stream."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import grpc
import pytest
import pytest_asyncio

from narwhal._pb import fleet_pb2, placement_pb2
from narwhal.control.core.events import ProxyConnected
from narwhal.control.publisher import LONGEST_BACKLOG, Publisher
from narwhal.placement import EngineEntry, Placement
from narwhal.reports import ProxyKey
from narwhal.vocabulary import Phase
from tests.contract.control_kit import (
    ROLES,
    Control,
    Engines,
    Proxy,
    ShiftedClock,
    control,
    drain,
    identity,
    plan_of,
    soon,
    until,
    until_answer,
    with_engines,
)
from tests.contract.model_store import Medium

PREFILL, DECODE = placement_pb2.PHASE_PREFILL, placement_pb2.PHASE_DECODE


@pytest_asyncio.fixture
async def process(served: Engines) -> AsyncIterator[Control]:
    """Control whose engines have joined."""
    async with control(served) as made:
        await until(lambda: made.serving() == {"p0", "d0"})
        yield made


async def settled(proxy: Proxy) -> placement_pb2.Snapshot:
    """The proxy's first placement, acknowledged."""
    snapshot = (await proxy.next("snapshot")).snapshot
    await proxy.ack(snapshot.epoch, snapshot.version)
    return snapshot


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


# --- who a stream belongs to ------------------------------------------------------------------------------------------


@pytest.mark.rule("P6")
async def test_a_newer_boot_retires_the_older_at_once(process: Control) -> None:
    async with Proxy(process, identity(boot=1)) as old:
        await settled(old)
        async with Proxy(process, identity(boot=2)) as new:
            await settled(new)
            farewell = (await old.next("farewell")).farewell
            assert farewell.reason == "a newer boot is connected"
            assert (await old.end())[0] is grpc.StatusCode.ABORTED
            async with Proxy(process, identity(boot=1)) as late:
                assert await late.end() == (grpc.StatusCode.ABORTED, "a newer boot of proxy/0 is connected")
            loop = process.leader.loop
            assert loop is not None
            assert [(p.key.boot, p.connected) for p in loop.view().proxies] == [(2, True)]
    assert process.told().count("proxy_retired") == 1


async def test_a_proxy_that_reconnects_before_its_old_stream_has_ended_is_never_lost(process: Control) -> None:
    async with Proxy(process) as old:
        await settled(old)
        async with Proxy(process) as new:
            await settled(new)
            assert (await old.end())[0] is grpc.StatusCode.ABORTED
            loop = process.leader.loop
            assert loop is not None
            assert [p.connected for p in loop.view().proxies] == [True]
            assert "proxy_lost" not in process.told()
    await until(lambda: "proxy_lost" in process.told())


@pytest.mark.rule("P6")
async def test_a_goodbye_ends_the_stream_in_good_order_and_the_proxy_counts_no_longer(process: Control) -> None:
    async with Proxy(process) as proxy:
        await settled(proxy)
        await proxy.goodbye("SIGTERM")
        assert (await proxy.end())[0] is grpc.StatusCode.OK
    loop = process.leader.loop
    assert loop is not None
    assert loop.view().proxies == ()
    assert "proxy_left" in process.told()
    assert "proxy_lost" not in process.told()


@pytest.mark.rule("P6")
@pytest.mark.parametrize("first", [True, False], ids=["without a hello", "after its own hello"])
async def test_a_supervisor_says_goodbye_for_a_dead_worker(first: bool, process: Control) -> None:
    async with Proxy(process, identity(slot=3)) as worker:
        await settled(worker)
        if first:
            call = process.placement.StreamPlacement()
            goodbye = placement_pb2.Goodbye(reason="killed", proxy=worker.who)
            await soon(call.write(placement_pb2.ProxyMessage(goodbye=goodbye)))
            assert await soon(call.code()) is grpc.StatusCode.OK
        else:
            async with Proxy(process, identity("supervisor")) as supervisor:
                await settled(supervisor)
                await supervisor.goodbye("killed", worker.who)
                assert (await worker.end())[0] is grpc.StatusCode.ABORTED
        assert (await worker.end())[0] is grpc.StatusCode.ABORTED
        loop = process.leader.loop
        assert loop is not None
        assert [p for p in loop.view().proxies if p.key.slot == 3] == []
    assert "proxy_left" in process.told()


async def test_a_proxy_of_another_fleet_is_refused(process: Control) -> None:
    async with Proxy(process, fleet="other") as proxy:
        assert await proxy.end() == (grpc.StatusCode.FAILED_PRECONDITION, "this is fleet fleet, not other")
    assert "proxy_connected" not in process.told()


# --- the end of a stream ----------------------------------------------------------------------------------------------


@pytest.mark.rule("P10")
async def test_a_proxy_that_acknowledges_nothing_for_ten_seconds_is_disconnected(process: Control) -> None:
    async with Proxy(process, identity("silent")) as silent, Proxy(process, identity("lively")) as lively:
        first = await settled(silent)
        await settled(lively)
        await until(lambda: len(process.publisher.proxies) == 2)
        process.clock.monotonic_shift += 5.5
        shifted_at = process.publisher.now()
        await lively.ack(first.epoch, first.version)
        # A heartbeat from before may lie there still: only what control has heard tells that the word has come.
        heard = process.publisher._proxies["lively", 0]
        await until(lambda: heard.heard_at >= shifted_at)
        assert "proxy_lost" not in process.told()
        process.clock.monotonic_shift += 5.5
        assert (await silent.next("farewell")).farewell.reason == "acknowledged nothing for 10 s"
        assert (await silent.end())[0] is grpc.StatusCode.UNAVAILABLE
        assert process.told().count("proxy_lost") == 1
        assert [hello.proxy.id for hello in process.publisher.proxies] == ["lively"]


def grpc_tasks() -> int:
    """Tasks of gRPC's own coroutines, handlers among them; probes and the engines' HTTP server come and go beside."""
    return sum("_cython" in type(task.get_coro()).__module__ for task in asyncio.all_tasks())


@pytest.mark.case("J4")
@pytest.mark.rule("P10")
async def test_a_proxy_that_stopped_reading_is_let_go_of(served: Engines) -> None:
    """A stopped process: its kernel takes a few hundred kilobytes, then nothing, and never closes."""
    long = {f"{'d' * 400}{i}": Phase.DECODE for i in range(20)}
    plan = plan_of(served, {"p0": Phase.PREFILL, **long}, interval_s=1.0)
    served.status = dict.fromkeys(long, 503)
    async with control(served, plan=plan) as process:
        await until(lambda: process.leader.loop is not None and not process.leader.loop.over)
        before = grpc_tasks()
        call = process.placement.StreamPlacement()
        await soon(call.write(placement_pb2.ProxyMessage(hello=placement_pb2.Hello(proxy=identity()))))
        await until(lambda: process.publisher.proxies)
        assert grpc_tasks() > before
        subscriber = next(iter(process.publisher._proxies.values()))
        sent = 0
        while sent < 400:
            subscriber.snapshot()
            sent += 1
            await asyncio.sleep(0.001)
        assert subscriber._needs_snapshot, "the writer waits for the peer to read"
        process.clock.monotonic_shift += 10.5
        await until(lambda: "proxy_lost" in process.told())
        assert not process.publisher.proxies
        loop = process.leader.loop
        assert loop is not None
        assert not loop.over, "and nobody else was held up"
        call.cancel()
        await until(lambda: grpc_tasks() <= before, what="the handler's tasks have ended")


async def test_an_observer_has_to_come_again_after_an_hour(process: Control) -> None:
    call = process.placement.WatchPlacement(placement_pb2.WatchPlacementRequest(name="lb"))
    await soon(call.read())
    process.clock.monotonic_shift += 3600
    messages = await drain(call)
    assert messages[-1].farewell.reason == "subscribe again"
    assert await soon(call.code()) is grpc.StatusCode.UNAVAILABLE
    assert process.publisher.observers == 0


@pytest.mark.case("J1")
async def test_after_a_reconnect_a_snapshot_comes_first_wherever_the_stream_broke(process: Control) -> None:
    for breaks_after in range(1, 5):
        async with Proxy(process, identity(boot=10 + breaks_after)) as proxy:
            kinds = []
            for _ in range(breaks_after):
                message = await proxy.read()
                kinds.append(message.WhichOneof("message"))
                if kinds[-1] in ("snapshot", "heartbeat"):
                    await proxy.ack(1, process.publisher.placement.version if process.publisher.placement else 0)
            assert kinds[:2] == ["settings", "snapshot"][:breaks_after]
            assert "change" not in kinds


@pytest.mark.case("J4")
async def test_five_hundred_reconnects_leave_nothing_behind(process: Control) -> None:
    async def visit(number: int) -> None:
        async with Proxy(process, identity(f"p{number % 20}", boot=number + 1)) as proxy:
            await proxy.next("snapshot")

    await visit(0)
    await until(lambda: not process.publisher.proxies)
    gc.collect()
    tasks, files = grpc_tasks(), len(os.listdir("/proc/self/fd"))
    for start in range(1, 501, 20):
        await asyncio.gather(*(visit(start + i) for i in range(20)))
    await until(lambda: not process.publisher.proxies)
    await until(lambda: grpc_tasks() <= tasks, what="handlers have ended")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files + 2


@pytest.mark.case("J4")
@pytest.mark.rule("P10")
async def test_a_foreign_client_that_drops_its_calls_leaves_no_stream_open(process: Control) -> None:
    """This library's client does not end a call that is merely forgotten: the server has to."""
    hello = placement_pb2.ProxyMessage(hello=placement_pb2.Hello(proxy=identity("foreign")))
    tasks = len(asyncio.all_tasks())
    for number in range(20):
        call: Any = process.placement.StreamPlacement()
        hello.hello.proxy.id = f"foreign{number}"
        await soon(call.write(hello))
        await soon(call.read())
        del call
    gc.collect()
    await until(lambda: len(process.publisher.proxies) in (0, 20))
    process.clock.monotonic_shift += 10.5
    await until(lambda: not process.publisher.proxies)
    await until(lambda: process.told().count("proxy_lost") == 20)
    # What remains is the library's own: a waiter per call that its client has not given up, none of ours.
    await until(
        lambda: not [t for t in asyncio.all_tasks() if "narwhal" in repr(t.get_coro()) and "_listen" in repr(t)]
    )
    await until(lambda: len(asyncio.all_tasks()) <= tasks + 2 * 20)


# --- nonsense ---------------------------------------------------------------------------------------------------------


def message(**fields: object) -> bytes:
    return placement_pb2.ProxyMessage(**fields).SerializeToString()  # type: ignore[arg-type]


HELLO = message(hello=placement_pb2.Hello(proxy=identity("bad")))
NONSENSE = {
    "garbage": ([b"\xff\xff\xff"], "not a message of this stream"),
    "an acknowledgement first": ([message(ack=placement_pb2.Ack())], "first message must be a hello"),
    "a goodbye of nobody first": ([message(goodbye=placement_pb2.Goodbye())], "first message must be a hello"),
    "nothing": ([message()], "first message must be a hello"),
    "no name": ([message(hello=placement_pb2.Hello(proxy=identity("")))], "needs an id and a boot"),
    "no boot": ([message(hello=placement_pb2.Hello(proxy=identity(boot=0)))], "needs an id and a boot"),
    "an epoch at the end of numbers": (
        [message(hello=placement_pb2.Hello(proxy=identity(), highest_epoch=2**64 - 1))],
        "highest_epoch must be at most",
    ),
    "two hellos": ([HELLO, HELLO], "a second hello"),
    "garbage later": ([HELLO, b"\xff\xff\xff"], "not a message of this stream"),
    "an acknowledgement of the future": (
        [HELLO, message(ack=placement_pb2.Ack(epoch=1, version=1000))],
        "acknowledged 1.1000, which was never published",
    ),
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_message_that_makes_no_sense_is_an_invalid_argument_and_nothing_more(
    name: str, process: Control
) -> None:
    messages, words = NONSENSE[name]
    call: Any = process.channel.stream_stream("/narwhal.v1.PlacementService/StreamPlacement")()
    for data in messages:
        await soon(call.write(data))
    await drain(call)
    assert await soon(call.code()) is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (await call.details() or "")
    async with Proxy(process, identity("good")) as proxy:
        await settled(proxy)


async def test_an_observer_whose_request_is_garbage_is_refused(process: Control) -> None:
    method: Any = process.channel.unary_stream("/narwhal.v1.PlacementService/WatchPlacement")
    call = method(b"\xff\xff")
    assert await soon(call.code()) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_of_a_newer_proxy_is_ignored(process: Control) -> None:
    call: Any = process.channel.stream_stream("/narwhal.v1.PlacementService/StreamPlacement")()
    await soon(call.write(HELLO))
    await soon(call.write(b"\xaa\x06\x03abc"))  # field 101, unknown
    await soon(call.write(message(goodbye=placement_pb2.Goodbye(reason="done"))))
    await drain(call)
    assert await soon(call.code()) is grpc.StatusCode.OK


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


# --- the publisher by itself ------------------------------------------------------------------------------------------


def placement(version: int, *, engines: int = 2, epoch: int = 1) -> Placement:
    entries = {
        f"e{i}": EngineEntry(
            id=f"e{i}",
            url=f"http://h:{i + 1}",
            role=Phase.DECODE,
            phases=frozenset({Phase.DECODE}),
            incarnation=version,
        )
        for i in range(engines)
    }
    return Placement(epoch=epoch, version=version, engines=entries)


def hello(number: int) -> ProxyConnected:
    return ProxyConnected(
        proxy=ProxyKey(id=f"p{number}", slot=0, boot=1), address="", pid=1, highest_epoch=0, stream=number
    )


async def test_every_message_is_serialised_once_and_shared() -> None:
    publisher = Publisher(ShiftedClock())
    publisher.configure("fleet", b"{}")
    publisher.publish(placement(1))
    subscribers = [publisher.join(hello(i)) for i in range(3)] + [publisher.observe()]
    settings = [await s.next() for s in subscribers[:3]]
    first = [await s.next() for s in subscribers]
    publisher.publish(placement(2))
    publisher.beat()
    changes = [await s.next() for s in subscribers]
    beats = [await s.next() for s in subscribers]
    for shared in (settings, first, changes, beats):
        assert len({id(m) for m in shared}) == 1
    assert len({settings[0], first[0], changes[0], beats[0]}) == 4


async def test_a_subscriber_that_falls_behind_gets_one_snapshot_instead_of_a_backlog() -> None:
    publisher = Publisher(ShiftedClock())
    publisher.publish(placement(1))
    slow = publisher.observe()
    assert await slow.next()
    for version in range(2, LONGEST_BACKLOG + 10):
        publisher.publish(placement(version))
        publisher.beat()
    data = await slow.next()
    assert data is not None
    parsed = placement_pb2.PlacementMessage.FromString(data)
    assert parsed.snapshot.version == LONGEST_BACKLOG + 9
    data = await slow.next()
    assert data is not None
    assert placement_pb2.PlacementMessage.FromString(data).WhichOneof("message") == "heartbeat"
    publisher.publish(placement(LONGEST_BACKLOG + 10))
    data = await slow.next()
    assert data is not None
    assert placement_pb2.PlacementMessage.FromString(data).change.base_version == LONGEST_BACKLOG + 9


async def test_a_new_epoch_is_a_snapshot_for_everybody() -> None:
    publisher = Publisher(ShiftedClock())
    publisher.publish(placement(5))
    subscriber = publisher.observe()
    await subscriber.next()
    publisher.publish(placement(1, epoch=2))
    data = await subscriber.next()
    assert data is not None
    snapshot = placement_pb2.PlacementMessage.FromString(data).snapshot
    assert (snapshot.epoch, snapshot.version) == (2, 1)
