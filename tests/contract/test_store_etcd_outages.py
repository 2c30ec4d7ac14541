"""The etcd store when etcd is slow, stopped, killed, wiped or in pieces, and when this process is."""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from narwhal.clock import RealClock
from narwhal.control.store.base import Lease, LeaseLost, NotYet, StoreError
from narwhal.control.store.etcd import EtcdStore
from narwhal.control.store.etcd_lease import LeaseKeeper
from tests.contract.control_kit import ShiftedClock
from tests.contract.etcd_kit import led, opened, until
from tests.etcd import Etcd, Member

TTL_S = 3
BUSY_S = 20.0  # what a busy machine may add to a bound; a call that hangs is far beyond it


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path) as etcd:
        yield etcd


def boottime() -> float:
    return RealClock().boottime()


def hang(member: Member) -> None:
    """It takes connections and answers nothing."""
    member.signal(signal.SIGSTOP)


def end(member: Member) -> None:
    """It is gone."""
    member.kill()


async def bounded_failure(
    store: EtcdStore, call: Callable[[], Awaitable[Any]], *, kind: type[StoreError] = StoreError
) -> StoreError:
    settings = store._settings
    began = boottime()
    with pytest.raises(StoreError) as caught:
        await call()
    assert boottime() - began < settings.bound_s + settings.call_s + BUSY_S
    assert type(caught.value) is kind
    return caught.value


# --- etcd is away -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("S5", "S8")
@pytest.mark.case("I1")
@pytest.mark.parametrize("away", [hang, end])
async def test_without_etcd_the_holder_fences_on_its_own_clock_and_every_call_fails_in_time(
    away: Callable[[Member], None], etcd: Etcd
) -> None:
    member = etcd.members[0]
    async with opened(etcd, ttl_s=TTL_S) as make:
        active, standby = await make(), await make()
        lease = await led(active)
        await active.save(lease, b"stored")
        await until(lambda: lease.valid_until > boottime() + TTL_S - 1.4, "a fresh renewal")
        away(member)
        since = boottime()
        assert lease.may_act(since)  # it serves until its deadline
        failures = await asyncio.gather(
            bounded_failure(active, lambda: active.save(lease, b"lost")),
            bounded_failure(standby, standby.load),
        )
        assert "etcd at http://127.0.0.1" in str(failures[1])
        await until(lambda: not lease.may_act(boottime()), "it fences itself")
        # A renewal that was under way may have been counted; none that was sent later.
        assert lease.valid_until <= since + TTL_S - 0.5
        await until(lambda: lease.lost, "the end of it is said")
        assert "not renewed in time: etcd at http" in lease.lost
        await asyncio.gather(
            bounded_failure(standby, lambda: standby.acquire("b", "h:2")),
            bounded_failure(active, lambda: active.acquire("a", "h:1")),
        )
        with pytest.raises(LeaseLost):
            await active.save(lease, b"after the end")
        await asyncio.to_thread(back, etcd, member)
        taken = await takes(standby)
        assert taken.epoch == 2
        # A store that was stopped may still take up what the holder asked for while it could act: a time-out said
        # "unknown". It does so before anybody else has the lease, or not at all.
        assert await standby.load() in ((b"stored", b"lost") if away is hang else (b"stored",))
        assert await active.acquire("a", "h:1") is None


def back(etcd: Etcd, member: Member) -> None:
    if member.process is not None:
        member.signal(signal.SIGCONT)
    etcd.start()


async def takes(store: EtcdStore, holder: str = "b", address: str = "h:2") -> Lease:
    """The lease, as soon as `store` gets it; the store may fail meanwhile."""
    taken: list[Lease] = []

    async def take() -> bool:
        lease = await store.acquire(holder, address)
        taken.extend([lease] if lease else [])
        return bool(taken)

    await eventually(take)
    return taken[0]


async def eventually(look: Callable[[], Awaitable[bool]]) -> None:
    """Waits until `look` is true; the store may fail meanwhile."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(StoreError):
                if await look():
                    return
            await asyncio.sleep(0.05)


@pytest.mark.rule("S8")
async def test_who_fenced_for_want_of_etcd_takes_the_lease_again(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=TTL_S) as make:
        store = await make()
        lease = await led(store)
        etcd.kill()
        await until(lambda: lease.lost, "it fences itself")
        with pytest.raises(StoreError):
            await store.release(lease)
        await asyncio.to_thread(etcd.start)
        again = await takes(store, "a", "h:1")
        assert again.epoch == 2
        await store.save(again, b"again")


@pytest.mark.case("I4")
@pytest.mark.parametrize("away", [hang, end])
async def test_a_short_outage_changes_nothing(away: Callable[[Member], None], etcd: Etcd) -> None:
    member = etcd.members[0]
    async with opened(etcd, ttl_s=12) as make:
        active, standby = await make(), await make()
        lease = await led(active)
        away(member)
        writing = asyncio.create_task(active.save(lease, b"written"))
        await asyncio.sleep(1.0)  # how long the outage lasts
        await asyncio.to_thread(back, etcd, member)
        await writing  # tried again until etcd was back
        deadline = lease.valid_until
        await until(lambda: lease.valid_until > deadline, "renewals go on")
        assert not lease.lost
        assert await standby.acquire("b", "h:2") is None
        assert await standby.load() == b"written"


@pytest.mark.case("I18")
async def test_in_a_wiped_store_the_holder_has_lost_and_leads_again_above_its_epoch(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=TTL_S) as make:
        store = await make()
        for _ in range(3):
            lease = await led(store)
        await store.save(lease, b"mine")
        await asyncio.to_thread(etcd.wipe)
        await asyncio.to_thread(etcd.start)
        await until(lambda: lease.lost, "the lease is lost")
        with pytest.raises(LeaseLost):
            await store.save(lease, b"too late")
        found = await store.acquire("a", "h:1", above=lease.epoch)
        assert found is not None
        assert found.epoch == 4
        assert await store.load() is None


@pytest.mark.case("I18")
@pytest.mark.rule("S5")
async def test_in_a_wiped_store_nobody_leads_before_the_forgotten_lease_is_over(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=TTL_S) as make:
        active, standby = await make(), await make()
        await led(standby, "b")
        old = await led(standby, "b")
        await standby.release(old)
        lease = await led(active)
        assert lease.epoch == 3
        assert await standby.acquire("b", "h:2") is None
        held = active._claims.held
        assert held is not None
        held.keeper.stop()  # the holder is cut off: nobody tells it
        active._watcher.close()
        with etcd.client() as client:
            client.delete_prefix("/")
        refused = await bounded_failure(standby, lambda: standby.acquire("b", "h:2"), kind=NotYet)
        assert "forgotten epoch 3" in str(refused)
        found = await takes(standby)
        assert not lease.may_act(boottime())
        assert found.epoch == 4


@pytest.mark.case("I18")
@pytest.mark.rule("S5")
async def test_in_a_wiped_store_a_process_without_memory_waits_until_a_forgotten_lease_is_over(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=TTL_S) as make:
        active = await make()
        lease = await led(active)
        held = active._claims.held
        assert held is not None
        held.keeper.stop()  # the holder is cut off: nobody tells it
        active._watcher.close()
        with etcd.client() as client:
            client.delete_prefix("/")
        fresh = await make(patience_s=None)
        refused = await bounded_failure(fresh, lambda: fresh.acquire("b", "h:2"), kind=NotYet)
        assert "etcd knows no epoch" in str(refused)
        taken = await takes(fresh)
        assert not lease.may_act(boottime())
        assert taken.epoch == 1


@pytest.mark.case("I18")
async def test_the_holder_that_a_wiped_store_forgot_leads_again_before_one_without_memory_does(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=TTL_S) as make:
        active = await make()
        lease = await led(active)
        await asyncio.to_thread(etcd.wipe)
        await asyncio.to_thread(etcd.start)
        await until(lambda: lease.lost, "the lease is lost")
        fresh = await make(patience_s=None)
        await bounded_failure(fresh, lambda: fresh.acquire("b", "h:2"), kind=NotYet)
        again = await active.acquire("a", "h:1", above=lease.epoch)
        assert again is not None
        assert again.epoch == 2
        assert await fresh.acquire("b", "h:2") is None


async def test_after_a_holder_that_let_go_a_process_without_memory_leads_at_once(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=TTL_S) as make:
        first = await make()
        await first.release(await led(first))
        second = await make(patience_s=3600.0)
        assert (await led(second, "b")).epoch == 2
        await second.close()
        third = await make(patience_s=3600.0)
        assert (await led(third, "c")).epoch == 3
        owner = await third.owner()
        assert owner is not None
        assert owner.holder == "c"


async def test_after_a_holder_that_died_a_process_without_memory_waits_and_one_that_saw_it_does_not(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=TTL_S) as make:
        active, standby = await make(), await make(patience_s=3600.0)
        await led(active)
        assert await standby.acquire("b", "h:2") is None
        held = active._claims.held
        assert held is not None
        held.keeper.stop()
        active._watcher.close()
        with etcd.client() as client:
            client.revoke_lease(held.etcd_id)
        fresh = await make(patience_s=3600.0)
        refused = await bounded_failure(fresh, lambda: fresh.acquire("c", "h:3"), kind=NotYet)
        assert "does not know how the last lease ended" in str(refused)
        taken = await standby.acquire("b", "h:2")
        assert taken is not None
        assert taken.epoch == 2


# --- members ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("three"), members=3) as etcd:
        yield etcd


@pytest.mark.rule("S8")
@pytest.mark.parametrize("away", [hang, end])
@pytest.mark.parametrize("who", ["first", "leader"])
async def test_of_three_members_any_one_may_go(who: str, away: Callable[[Member], None], three: Etcd) -> None:
    await asyncio.to_thread(three.start)
    async with opened(three, ttl_s=12) as make:
        active, standby = await make(), await make()
        lease = await led(active)
        member = three.members[0] if who == "first" else await asyncio.to_thread(three.leader)
        away(member)
        try:
            for number in range(3):
                await active.save(lease, b"%d" % number)
                assert await standby.load() == b"%d" % number
            deadline = lease.valid_until
            await until(lambda: lease.valid_until > deadline, "renewals go on")
            assert not lease.lost
            assert await standby.acquire("b", "h:2") is None
        finally:
            await asyncio.to_thread(back, three, member)


async def test_two_dead_members_named_first_do_not_hide_the_third(three: Etcd) -> None:
    await asyncio.to_thread(three.start)
    # Ports on which nobody listens, and one that takes connections and never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        endpoints = ("http://127.0.0.1:1", f"http://127.0.0.1:{port}", three.endpoints[2])
        async with opened(three, ttl_s=12, endpoints=endpoints) as make:
            store = await make()
            lease = await led(store)
            await store.save(lease, b"document")
            assert await store.load() == b"document"
            deadline = lease.valid_until
            await until(lambda: lease.valid_until > deadline, "renewals go on")


async def test_with_no_member_at_all_the_words_name_each_and_stay_the_same(three: Etcd) -> None:
    endpoints = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    async with opened(three, ttl_s=TTL_S, endpoints=endpoints) as make:
        store = await make()
        told = {str(await bounded_failure(store, store.load)) for _ in range(3)}
        assert len(told) == 1
        assert all(f"etcd at {endpoint}: " in told.copy().pop() for endpoint in endpoints)


# --- this process -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("S5")
@pytest.mark.case("I7")
async def test_a_blocked_loop_keeps_the_lease_for_a_while_and_loses_it_when_it_stays_blocked(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=2) as make:
        active, standby = await make(), await make()
        lease = await led(active)
        renewed = lease.valid_until
        time.sleep(1.2)  # noqa: ASYNC251 - the loop is blocked, which is the fault
        assert lease.valid_until > renewed
        assert lease.may_act(boottime())
        began = boottime()
        time.sleep(3 * 2)  # noqa: ASYNC251
        assert not lease.may_act(boottime())
        # Renewed while the loop had shown life within the last TTL, and not after.
        assert lease.valid_until <= began + 2 + 2
        assert "showed no life" in lease.lost
        taken = await standby.acquire("b", "h:2")
        assert taken is not None
        assert taken.epoch == 2
        with pytest.raises(LeaseLost):
            await active.save(lease, b"on waking")


@pytest.mark.rule("S5")
@pytest.mark.case("I13")
async def test_the_death_of_the_renewal_thread_alone_fences(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(etcd, ttl_s=TTL_S) as make:
        store = await make()
        lease = await led(store)
        held = store._claims.held
        assert held is not None

        def die(_self: LeaseKeeper) -> int:
            raise MemoryError("no room")

        monkeypatch.setattr(LeaseKeeper, "_renew", die)
        await until(lambda: not held.keeper.running, "the thread dies")
        assert not lease.may_act(boottime())
        assert lease.lost == "renewals of the lease failed: MemoryError: no room"


@pytest.mark.case("I13")
async def test_renewals_that_stop_without_a_word_fence_too(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=2) as make:
        store = await make()
        lease = await led(store)
        held = store._claims.held
        assert held is not None
        held.keeper._stop.set()
        await until(lambda: not lease.may_act(boottime()), "it fences itself")
        with pytest.raises(LeaseLost, match="not renewed in time"):
            await store.save(lease, b"too late")


@pytest.mark.rule("S5")
@pytest.mark.case("I19")
async def test_after_a_suspension_the_lease_is_over_before_anything_is_done(etcd: Etcd) -> None:
    clock = ShiftedClock()
    async with opened(etcd, ttl_s=TTL_S) as make:
        store = await make(clock)
        lease = await led(store)
        await store.save(lease, b"before")
        clock.boottime_shift = 2.0 * TTL_S  # a clock that only counts while the machine runs would not see it
        assert not lease.may_act(clock.boottime())
        # Though etcd would still renew it.
        await until(lambda: "not renewed in time" in lease.lost, "the end of it is said")
        with pytest.raises(LeaseLost):
            await store.save(lease, b"on waking")
        assert await store.load() == b"before"
        again = await led(store)
        assert again.epoch == 2


@pytest.mark.parametrize("away", [hang, end])
async def test_closing_is_bounded_whatever_etcd_does(away: Callable[[Member], None], etcd: Etcd) -> None:
    async with opened(etcd) as make:
        store = await make()
        lease = await led(store)
        away(etcd.members[0])
        waiting = [asyncio.create_task(store.save(lease, b"x")), asyncio.create_task(store.load())]
        await asyncio.sleep(0)
        began = boottime()
        await store.close()
        assert boottime() - began < BUSY_S
        assert lease.lost
        assert all(isinstance(e, StoreError) for e in await asyncio.gather(*waiting, return_exceptions=True))
        await until(lambda: not threads(), "its threads end")
    if etcd.members[0].process is not None:
        etcd.members[0].signal(signal.SIGCONT)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("narwhal-etcd")]
