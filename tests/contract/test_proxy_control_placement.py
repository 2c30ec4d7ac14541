"""The placement client against a control service that says what the test tells it to, over real gRPC."""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from narwhal._pb import placement_pb2
from narwhal.clock import RealClock
from narwhal.config import ProxyConfig, ProxySettings
from narwhal.proxy import link as link_module
from narwhal.proxy.link import Introduction
from narwhal.proxy.seams import Inflight, Picture
from narwhal.proxy.view import PlacementView
from narwhal.reports import ProxyKey
from narwhal.vocabulary import Phase
from narwhal.wire import change_to_wire
from tests.proxy.fake_control import FakeControl, Stream, dial, entry, heartbeat, placement, snapshot, until

ME = ProxyKey(id="proxy-a", slot=1, boot=77)


class Running:
    """A view, running."""

    def __init__(self, *addresses: str, fleet: str = "", settings: ProxySettings | None = None) -> None:
        self.inflight = Inflight()
        self.view = PlacementView(
            addresses=addresses,
            dial=dial,
            introduction=Introduction(proxy=ME, fleet=fleet, address="127.0.0.1:8000", pid=os.getpid()),
            inflight=self.inflight,
            clock=RealClock(),
            rng=random.Random(1),
            settings=settings,
        )
        self.task = asyncio.create_task(self.view.run())

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@contextlib.asynccontextmanager
async def running(*addresses: str, **options: object) -> AsyncIterator[Running]:
    """Runs a view for as long as the block."""
    proxy = Running(*addresses, **options)  # type: ignore[arg-type]
    try:
        yield proxy
    finally:
        await proxy.stop()


def says(*messages: object) -> Callable[[Stream], None]:
    """A control that starts every stream with these."""
    return lambda stream: stream.send(*messages)  # type: ignore[arg-type]


def open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def settings_message(settings: ProxySettings) -> placement_pb2.PlacementMessage:
    return placement_pb2.PlacementMessage(settings=placement_pb2.Settings(fleet=settings.name, json=settings.to_json()))


@pytest.mark.rule("P1", "P6")
async def test_it_introduces_itself_applies_a_snapshot_and_changes_and_acknowledges_each() -> None:
    first = placement(3, 1)
    second = placement(3, 2, entry("p1"), entry("d2", Phase.DECODE))
    async with FakeControl(says(first)) as control, running(control.address, fleet="f") as proxy:
        await until(lambda: control.streams and (3, 1) in control.newest.acks)
        hello = control.newest.hello
        assert (hello.proxy.id, hello.proxy.slot, hello.proxy.boot) == ("proxy-a", 1, 77)
        assert (hello.fleet, hello.address, hello.pid, hello.highest_epoch) == ("f", "127.0.0.1:8000", os.getpid(), 0)
        control.newest.send(placement_pb2.PlacementMessage(change=change_to_wire(first, second, now=0.0)))
        await until(lambda: (3, 2) in control.newest.acks)
        assert proxy.view.placement is not None
        assert set(proxy.view.placement.engines) == {"p1", "d2"}
        assert control.newest.nacks == []


@pytest.mark.case("D9")
@pytest.mark.rule("P6")
@pytest.mark.parametrize(
    "kind", ["duplicate", "role", "weight", "url", "no engines", "empty message", "unknown removed"]
)
async def test_a_strange_placement_is_refused_with_a_reason_and_the_last_good_one_kept(kind: str) -> None:
    good = placement(3, 4)
    async with FakeControl(says(good)) as control, running(control.address) as proxy:
        await until(lambda: proxy.view.placement)
        strange = snapshot(placement(3, 5))
        if kind == "duplicate":
            strange.snapshot.engines.append(strange.snapshot.engines[0])
        elif kind == "role":
            strange.snapshot.engines[0].role = 9  # type: ignore[assignment]
        elif kind == "weight":
            strange.snapshot.engines[0].weight = 0.0
        elif kind == "url":
            strange.snapshot.engines[0].url = ""
        elif kind == "no engines":
            del strange.snapshot.engines[:]
        elif kind == "empty message":
            strange.snapshot.Clear()
            strange.snapshot.epoch = 3
        else:
            strange.change.CopyFrom(placement_pb2.Change(epoch=3, base_version=4, version=5, removed=["nobody"]))
        control.newest.send(strange)
        await until(lambda: control.newest.nacks)
        assert control.newest.nacks[0]
        assert proxy.view.placement is not None
        assert proxy.view.placement.order == (3, 4)
        control.newest.send(placement(3, 6))
        await until(lambda: (3, 6) in control.newest.acks)
        assert len(control.streams) == 1


@pytest.mark.rule("P1", "P6")
async def test_a_change_on_another_base_is_refused_so_that_a_snapshot_can_follow() -> None:
    async with FakeControl(says(placement(3, 4))) as control, running(control.address) as proxy:
        await until(lambda: proxy.view.placement)
        change = change_to_wire(placement(3, 7), placement(3, 8), now=0.0)
        control.newest.send(placement_pb2.PlacementMessage(change=change))
        await until(lambda: control.newest.nacks)
        assert control.newest.nacks == ["change is based on 3.7, placement held is 3.4"]


@pytest.mark.case("J1")
async def test_the_stream_breaks_at_any_message_and_a_snapshot_comes_first_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten streams, each cut after one message more than the one before; each begins anew and ends up current."""
    monkeypatch.setattr(link_module, "backoff_s", lambda _failures, _rng: 0.0)

    def script(stream: Stream) -> None:
        number = len(control.streams)
        messages = [snapshot(placement(3, number)), heartbeat(3, number)]
        stream.send(*messages[: number % 3])
        if number <= 10:
            stream.end()

    async with FakeControl(script) as control, running(control.address) as proxy:
        await until(lambda: len(control.streams) > 10, "an eleventh stream")
        await until(lambda: proxy.view.held.order == (3, 11))
        highest = [s.hello.highest_epoch for s in control.streams]
        assert highest == sorted(highest)


@pytest.mark.rule("P7")
async def test_control_goes_away_and_comes_back_and_placement_is_kept_meanwhile() -> None:
    async with FakeControl(says(placement(3, 1))) as control, running(control.address) as proxy:
        await until(lambda: proxy.view.placement)
        await control.stop()
        await until(lambda: proxy.view.lead is None)
        assert proxy.view.held.order == (3, 1)
        control.on_stream = says(placement(4, 1))
        await control.start()
        await until(lambda: proxy.view.held.order == (4, 1))
        assert control.newest.hello.highest_epoch == 3


@pytest.mark.rule("P5", "S5")
async def test_of_two_control_processes_the_higher_epoch_is_followed_and_the_lower_refused() -> None:
    async with (
        FakeControl(says(placement(5, 1))) as old,
        FakeControl(says(heartbeat(0, 0))) as new,
        running(old.address, new.address) as proxy,
    ):
        await until(lambda: proxy.view.held.order == (5, 1))
        await until(lambda: new.streams and new.newest.acks, "the standby's heartbeat acknowledged")
        assert proxy.view.lead is not None
        assert proxy.view.lead.address == old.address
        lead = proxy.view.lead
        new.newest.send(placement(6, 1))
        await until(lambda: proxy.view.held.order == (6, 1))
        assert lead.lost.is_set()
        assert proxy.view.lead is not None
        assert proxy.view.lead.address == new.address
        streams = len(old.streams)
        old.newest.send(placement(5, 2, entry("p9"), entry("d9", Phase.DECODE)))
        await until(lambda: len(old.streams) > streams, "a new hello for the superseded one")
        assert old.streams[streams - 1].nacks == ["epoch 5 is below 6, seen before"]
        assert old.newest.hello.highest_epoch == 6
        assert proxy.view.held.order == (6, 1)
        assert len(new.streams) == 1


@pytest.mark.rule("P10")
async def test_a_control_that_is_connected_and_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SILENCE_S", 0.3)
    async with FakeControl(says(placement(3, 1))) as control, running(control.address) as proxy:
        await until(lambda: len(control.streams) >= 2, "looks elsewhere")
        await until(lambda: control.streams[0].over, "the silent stream is closed")
        assert proxy.view.held.order == (3, 1)


@pytest.mark.rule("P10")
def test_the_silence_that_is_borne_is_the_specified_one() -> None:
    assert link_module.SILENCE_S == 5.0


@pytest.mark.rule("P9", "R4")
async def test_heartbeats_are_acknowledged_with_exact_residency() -> None:
    async with FakeControl(says(placement(3, 1))) as control, running(control.address) as proxy:
        await until(lambda: control.streams and control.newest.acks)
        proxy.inflight.begin("p1")
        proxy.inflight.begin("d1")
        proxy.inflight.begin("d1")
        control.newest.send(heartbeat(3, 1))
        await until(lambda: control.newest.residents[-1] == {"p1": 1, "d1": 2})
        proxy.inflight.end("d1")
        control.newest.send(heartbeat(3, 1))
        await until(lambda: control.newest.residents[-1] == {"p1": 1, "d1": 1})


@pytest.mark.rule("R4")
@pytest.mark.parametrize("gone", [True, False], ids=["removed", "held"])
async def test_the_last_leg_of_an_excluded_engine_is_told_without_waiting_for_a_heartbeat(gone: bool) -> None:
    async with FakeControl(says(placement(3, 1))) as control, running(control.address) as proxy:
        await until(lambda: control.streams and control.newest.acks)
        for engine in ("p1", "d1", "d1"):
            proxy.inflight.begin(engine)
        held = entry("d1", Phase.DECODE, phases=frozenset())
        rest = (entry("p1"), entry("d2", Phase.DECODE))
        control.newest.send(placement(3, 2, *rest) if gone else placement(3, 2, *rest, held))
        await until(lambda: control.newest.residents[-1] == {"p1": 1, "d1": 2})
        acks = len(control.newest.acks)
        proxy.inflight.end("p1")  # still placed: nobody waits for it
        proxy.inflight.end("d1")  # one is left
        proxy.inflight.end("d1")
        await until(lambda: len(control.newest.acks) > acks)
        assert control.newest.residents[acks:] == [{}]


@pytest.mark.rule("P9")
async def test_the_load_of_others_is_the_fleets_without_ones_own() -> None:
    async with FakeControl(says(placement(3, 1))) as control, running(control.address) as proxy:
        proxy.inflight.begin("p1", 30)
        await until(lambda: control.streams and {"p1": 1} in control.newest.residents)
        everywhere = [
            placement_pb2.Residency(engine_id="p1", legs=4, tokens=100),
            placement_pb2.Residency(engine_id="d1", legs=2),
        ]
        fleet = placement_pb2.FleetResidency(resident=everywhere, proxies=5)
        control.newest.send(placement_pb2.PlacementMessage(residency=fleet))
        await until(lambda: proxy.view.picture.legs)
        assert proxy.view.picture == Picture(
            legs={"p1": 3, "d1": 2}, tokens={"p1": 70}, own_legs={"p1": 1}, own_tokens={"p1": 30}, proxies=5
        )
        control.newest.end()
        await until(lambda: len(control.streams) == 2)
        assert proxy.view.picture == Picture(proxies=5)


async def test_settings_of_control_stand_above_the_file_and_broken_ones_change_nothing() -> None:
    file = ProxySettings(name="f", model="m", proxy=ProxyConfig(placement_max_age_s=50))
    better = ProxySettings(name="f", model="m", proxy=ProxyConfig(placement_max_age_s=20))
    async with (
        FakeControl(says(settings_message(better), placement(3, 1))) as control,
        running(control.address, fleet="f", settings=file) as proxy,
    ):
        assert proxy.view.settings == file
        await until(lambda: proxy.view.settings == better)
        assert not proxy.view.set_file_settings(file)
        assert proxy.view.settings == better
        broken = placement_pb2.Settings(fleet="f", json=b'{"name": "f", "model": 3}')
        control.newest.send(placement_pb2.PlacementMessage(settings=broken), placement(3, 2))
        await until(lambda: (3, 2) in control.newest.acks)
        assert proxy.view.settings == better


async def test_a_standbys_settings_wait_until_it_leads() -> None:
    ours = ProxySettings(name="f", model="m", proxy=ProxyConfig(placement_max_age_s=20))
    theirs = ProxySettings(name="f", model="m", proxy=ProxyConfig(placement_max_age_s=30))
    async with (
        FakeControl(says(settings_message(ours), placement(3, 1))) as active,
        FakeControl(says(settings_message(theirs), heartbeat(0, 0))) as standby,
        running(active.address, standby.address) as proxy,
    ):
        await until(lambda: proxy.view.held.order == (3, 1) and standby.streams and standby.newest.acks)
        assert proxy.view.settings == ours
        standby.newest.send(placement(4, 1))
        await until(lambda: proxy.view.settings == theirs)


async def test_another_fleets_control_is_not_followed() -> None:
    other = ProxySettings(name="other", model="m")
    file = ProxySettings(name="f", model="m")
    async with (
        FakeControl(says(settings_message(other), placement(3, 1))) as control,
        running(control.address, fleet="f", settings=file) as proxy,
    ):
        await until(lambda: len(control.streams) >= 3)
        assert proxy.view.placement is None
        assert proxy.view.settings == file
        assert proxy.view.not_ready() == "no placement"


@pytest.mark.rule("P6")
async def test_it_says_goodbye_and_waits_until_that_was_heard() -> None:
    async with FakeControl(says(placement(3, 1))) as control, running(control.address) as proxy:
        await until(lambda: proxy.view.placement)
        await proxy.view.close("stopping")
        assert [g.reason for g in control.newest.goodbyes] == ["stopping"]
        await until(lambda: control.handlers == 0)
        assert len(control.streams) == 1


async def test_a_farewell_ends_the_stream_and_the_next_try_comes_at_once() -> None:
    farewell = placement_pb2.PlacementMessage(farewell=placement_pb2.Farewell(reason="fenced"))
    async with FakeControl(says(placement(3, 1))) as control, running(control.address) as proxy:
        await until(lambda: proxy.view.placement)
        control.newest.send(farewell)
        await until(lambda: len(control.streams) == 2)
        assert control.streams[0].over


@pytest.mark.case("J4")
async def test_five_hundred_reconnects_leave_no_handler_and_no_descriptor_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "backoff_s", lambda _failures, _rng: 0.0)

    def script(stream: Stream) -> None:
        stream.send(placement(3, len(control.streams)))

    async with FakeControl(script) as control, running(control.address) as proxy:

        async def connected(streams: int) -> None:
            await until(lambda: len(control.streams) == streams and control.newest.acks)

        await connected(1)
        descriptors = open_files()
        for number in range(1, 500, 2):
            control.newest.end()
            await connected(number + 1)
            await proxy.stop()  # leaves in the middle of reading
            proxy.task = asyncio.create_task(proxy.view.run())
            await connected(number + 2)
        await until(lambda: control.handlers == 1, "handlers end with their streams")
        await until(lambda: open_files() <= descriptors + 4, "descriptors are closed")
