"""Whose a placement stream is, what ends it, and what may come in on it, over real gRPC."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from narwhal._pb import placement_pb2
from narwhal.vocabulary import Phase
from tests.contract.control_kit import Control, Engines, Proxy, control, drain, identity, plan_of, soon, until
from tests.contract.stream_kit import settled


@pytest_asyncio.fixture
async def process(served: Engines) -> AsyncIterator[Control]:
    """Control whose engines have joined."""
    async with control(served) as made:
        await until(lambda: made.serving() == {"p0", "d0"})
        yield made


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
