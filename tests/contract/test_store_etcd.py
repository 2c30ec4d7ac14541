"""The etcd store against a real etcd: who may write, who may lead, what is seen, what is told."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from narwhal.clock import RealClock
from narwhal.control.store.base import LeaseLost, StoreError
from narwhal.control.store.etcd import DEFAULT_QUOTA_BYTES, EtcdStore
from narwhal.control.store.etcd_client import Connection, Keys, State
from narwhal.control.store.etcd_watch import Watcher
from tests.contract.damaged import NO_LEASES
from tests.contract.etcd_kit import BOUND_S, Open, key, led, opened, settings, until
from tests.etcd import Etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """A server for tests that leave it as it was; each has a fleet of its own."""
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest_asyncio.fixture
async def another(etcd: Etcd) -> AsyncIterator[Open]:
    async with opened(etcd) as make:
        yield make


# --- keys -------------------------------------------------------------------------------------------------------------


async def test_three_keys_below_the_prefix_and_the_fleet(etcd: Etcd) -> None:
    async with opened(etcd, prefix="/a/b/", fleet="f") as make:
        store = await make()
        lease = await store.acquire("me", "h:1")
        assert lease is not None
        await store.save(lease, b"document")
        with etcd.client() as client:
            kept = {known.key: (value, known.lease_id) for value, known in client.get_prefix("/a/b/")}
    assert set(kept) == {b"/a/b/f/lease", b"/a/b/f/epoch", b"/a/b/f/handoff"}
    assert kept[b"/a/b/f/handoff"] == (b"document", 0)
    assert kept[b"/a/b/f/lease"][1] != 0  # goes with its lease; the others stay
    assert kept[b"/a/b/f/epoch"][1] == 0
    for part in (b'"epoch": 1', b'"holder": "me"', b'"address": "h:1"'):
        assert part in kept[b"/a/b/f/lease"][0]
        assert part in kept[b"/a/b/f/epoch"][0]


@pytest.mark.rule("S2")
async def test_the_newest_documents_that_were_set_aside_are_kept(etcd: Etcd, another: Open) -> None:
    store = await another()
    kept = []
    for number in range(7):
        lease = await led(store)
        kept.append((await store.set_aside(lease, f"document {number}".encode())).removeprefix("etcd key "))
    with etcd.client() as client:
        there = {known.key.decode(): value for value, known in client.get_prefix(key(store, "aside/"))}
    assert sorted(there) == kept[-5:]
    assert there[kept[-1]] == b"document 6"


@pytest.mark.parametrize("text", NO_LEASES, ids=range(len(NO_LEASES)))
async def test_an_epoch_that_cannot_be_read_lets_nobody_lead(text: bytes, etcd: Etcd, another: Open) -> None:
    store = await another()
    with etcd.client() as client:
        client.put(key(store, "epoch"), text)
        with pytest.raises(StoreError, match="not readable as a lease"):
            await store.acquire("a", "h:1")
        client.delete(key(store, "epoch"))
    assert await store.acquire("a", "h:1") is not None


# --- one writer -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("S4")
async def test_a_superseded_writer_that_believes_in_its_lease_changes_nothing(etcd: Etcd, another: Open) -> None:
    mine, other = await another(), await another()
    old = await led(mine)
    await mine.save(old, b"mine")
    # Its lease ends behind its back: nothing has told it when it writes.
    mine._watcher.close()
    held = mine._claims.held
    assert held is not None
    held.keeper.stop()
    with etcd.client() as client:
        client.revoke_lease(held.etcd_id)
    new = await other.acquire("b", "h:2")
    assert new is not None
    assert old.may_act(RealClock().boottime())
    before = await other.load()
    with pytest.raises(LeaseLost):
        await mine.save(old, b"too late")
    assert await other.load() == before == b"mine"
    assert old.lost
    await other.save(new, b"theirs")


@pytest.mark.rule("S4")
async def test_after_a_wipe_equal_revisions_do_not_make_an_old_writer_the_new_one(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        async with opened(etcd, fleet="f") as make:
            mine = await make()
            old = await led(mine)
            mine._watcher.close()
            held = mine._claims.held
            assert held is not None
            held.keeper.stop()
            await asyncio.to_thread(etcd.wipe)
            await asyncio.to_thread(etcd.start)
            other = await make()
            await led(other)
            theirs = other._claims.held
            assert theirs is not None
            # All that could be mistaken: revision, epoch, holder and address are the same.
            assert (theirs.created, theirs.claim.owner) == (held.created, held.claim.owner)
            with pytest.raises(LeaseLost):
                await mine.save(old, b"of another life")
            assert await other.load() is None


@pytest.mark.rule("S4")
async def test_a_write_that_was_given_up_and_is_done_late_does_not_undo_a_later_one(etcd: Etcd, another: Open) -> None:
    store = await another()
    lease = await led(store)
    await store.save(lease, b"first")
    late = lose_answer(store, "Txn", done=False)
    await store.save(lease, b"second")
    await store.save(lease, b"third")
    with etcd.client() as client:
        assert not client.kvstub.Txn(late[0], 10).succeeded
    assert await store.load() == b"third"


@pytest.mark.rule("S4")
@pytest.mark.parametrize("done", [True, False], ids=["done", "not done"])
async def test_a_write_without_an_answer_is_looked_for_before_it_is_tried_again(
    done: bool, etcd: Etcd, another: Open
) -> None:
    store = await another()
    lease = await led(store)
    await store.save(lease, b"before")
    assert lose_answer(store, "Txn", done=done) == []
    await store.save(lease, b"after")
    assert await store.load() == b"after"
    with etcd.client() as client:
        _, known = client.get(key(store, "handoff"))
    assert known.version == 2  # written once, not twice


@pytest.mark.parametrize("done", [True, False], ids=["done", "not done"])
@pytest.mark.parametrize("call", ["Txn", "LeaseGrant", "Range"])
async def test_an_acquisition_without_an_answer_is_looked_for_before_it_is_tried_again(
    call: str, done: bool, another: Open
) -> None:
    store, other = await another(), await another()
    lost = lose_answer(store, call, done=done)
    lease = await store.acquire("a", "h:1")
    assert lost
    assert lease is not None
    assert lease.epoch == 1
    assert await other.acquire("b", "h:2") is None
    await store.save(lease, b"document")


@pytest.mark.parametrize("done", [True, False], ids=["done", "not done"])
@pytest.mark.parametrize("call", ["Txn", "Range"])
async def test_a_move_without_an_answer_is_looked_for_before_it_is_tried_again(
    call: str, done: bool, another: Open
) -> None:
    store, other = await another(), await another()
    assert await store.acquire("a", "h:1") is not None
    lost = lose_answer(store, call, done=done)
    lease = await store.acquire("a", "h:1", above=6)
    assert lost
    assert lease is not None
    assert lease.epoch == 7
    await store.save(lease, b"of the new epoch")
    assert await other.acquire("b", "h:2") is None


STUBS = {"Txn": "kvstub", "Range": "kvstub", "LeaseGrant": "leasestub"}


def lose_answer(store: EtcdStore, call: str, *, done: bool) -> list[Any]:
    """The store's next call of this kind gets no answer, though it may be done. Returns where the request will be."""
    stub = getattr(store._connection._connected(), STUBS[call])
    real = getattr(stub, call)
    requests: list[Any] = []

    def lost(request: Any, *arguments: Any, **others: Any) -> Any:
        setattr(stub, call, real)
        requests.append(request)
        if done:
            real(request, *arguments, **others)
        return real(request, 1e-6, **others)  # raises what gRPC raises when time is up

    setattr(stub, call, lost)
    return requests


# --- one leader -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("S5")
async def test_of_ten_contenders_one_leads_each_time_and_the_epoch_never_goes_back(another: Open) -> None:
    stores = [await another() for _ in range(10)]
    last = 0
    for _ in range(4):
        leases = await asyncio.gather(*(s.acquire(f"c{n}", f"h:{n}") for n, s in enumerate(stores)))
        won = [(n, lease) for n, lease in enumerate(leases) if lease is not None]
        assert len(won) == 1
        winner, lease = won[0]
        assert lease.epoch == last + 1
        owner = await stores[0].owner()
        assert owner is not None
        assert (owner.holder, owner.epoch) == (f"c{winner}", lease.epoch)
        last = lease.epoch
        await stores[winner].release(lease)


@pytest.mark.rule("S5")
async def test_contenders_that_lost_leave_no_lease_behind(etcd: Etcd, another: Open) -> None:
    stores = [await another() for _ in range(6)]
    leases = await asyncio.gather(*(s.acquire(f"c{n}", "h:1") for n, s in enumerate(stores)))
    losers = [s for s, lease in zip(stores, leases, strict=True) if lease is None]
    assert len(losers) == 5
    left = [etcd_id for s in losers for etcd_id in s._claims._left]
    assert await asyncio.gather(*(s.acquire("again", "h:1") for s in losers)) == [None] * 5
    with etcd.client() as client:
        assert [client.get_lease_info(etcd_id).TTL for etcd_id in left] == [-1] * len(left)


@pytest.mark.rule("S5")
async def test_a_lease_that_etcd_no_longer_knows_is_lost_at_the_next_renewal(etcd: Etcd) -> None:
    async with opened(etcd, ttl_s=2) as make:
        store = await make()
        lease = await led(store)
        store._watcher.close()  # which would see it sooner
        held = store._claims.held
        assert held is not None
        with etcd.client() as client:
            client.revoke_lease(held.etcd_id)
        await until(lambda: lease.lost, "the lease is lost")
        assert lease.lost == "etcd says that the lease is gone"


@pytest.mark.rule("S5")
async def test_renewals_move_the_deadline_on_and_count_from_before_they_were_sent(etcd: Etcd) -> None:
    clock = RealClock()
    async with opened(etcd, ttl_s=4) as make:
        store = await make()
        before = clock.boottime()
        lease = await led(store)
        first = lease.valid_until
        assert first <= clock.boottime() + 4 - 0.5
        assert first >= before + 4 - 0.5
        await until(lambda: clock.boottime() > first, "longer than the first deadline")
        assert lease.may_act(clock.boottime())
        assert lease.valid_until <= clock.boottime() + 4 - 0.5
        assert not lease.lost


# --- what is seen -----------------------------------------------------------------------------------------------------


async def quiet(store: EtcdStore) -> None:
    """Until the store has nothing more to tell."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(BOUND_S):
        while True:
            began = loop.time()
            await store.changed(0.3)
            if loop.time() - began >= 0.3:
                return


async def tells(store: EtcdStore) -> None:
    """It tells of a change by itself, not because the time to wait is over."""
    async with asyncio.timeout(BOUND_S):
        await store.changed(2 * BOUND_S)


@pytest.mark.rule("S7")
async def test_a_standby_is_woken_by_a_newer_document_and_by_a_lease_that_becomes_free(another: Open) -> None:
    active, standby = await another(compare_s=3600.0), await another(compare_s=3600.0)
    lease = await led(active)
    for act in (active.save(lease, b"document"), active.release(lease)):
        await quiet(standby)
        await act
        await tells(standby)


@pytest.mark.rule("S7")
async def test_a_change_between_a_reading_and_the_wait_is_not_missed(another: Open) -> None:
    active, standby = await another(), await another(compare_s=3600.0)
    lease = await led(active)
    await quiet(standby)
    await active.save(lease, b"document")
    await until(standby._news.is_set, "the watch has seen it")
    await tells(standby)


async def test_a_lease_key_that_is_deleted_ends_the_lease_at_once(etcd: Etcd, another: Open) -> None:
    store = await another(compare_s=3600.0)
    lease = await led(store)
    with etcd.client() as client:
        client.delete(key(store, "lease"))
    await until(lambda: lease.lost, "the lease is lost")
    with pytest.raises(LeaseLost):
        await store.save(lease, b"too late")
    again = await led(store)
    assert again.epoch == 2


async def test_the_watch_takes_no_move_of_our_own_for_somebody_elses(another: Open) -> None:
    store = await another(compare_s=0.05)
    lease = await store.acquire("a", "h:1")
    for above in range(10, 40):
        lease = await store.acquire("a", "h:1", above=above)
        assert lease is not None
        await store.save(lease, b"document")
    assert lease is not None
    assert not lease.lost
    assert lease.epoch == 40


@pytest.mark.case("I9")
async def test_a_watch_that_is_created_at_a_compacted_revision_reads_again(etcd: Etcd) -> None:
    chosen = settings(etcd)
    keys = Keys(chosen)
    states: list[State] = []
    rounds = itertools.count()

    def between_reading_and_watching(_: int) -> None:
        if next(rounds) == 0:
            with etcd.client() as client:
                for n in range(5):
                    client.put(keys.handoff, f"missed {n}")
                client.compact(client.get_response(keys.handoff).header.revision, physical=True)

    watcher = Watcher(
        chosen, keys, RealClock(), seen=states.append, sized=between_reading_and_watching, compare_s=3600.0
    )

    def newest() -> bytes:
        return states[-1].handoff.value if states and states[-1].handoff else b""

    try:
        await until(lambda: newest() == b"missed 4", "what was missed is read")
        assert states[0].handoff is None
        with etcd.client() as client:
            client.put(keys.handoff, "and on")
            await until(lambda: newest() == b"and on", "the watch goes on")
    finally:
        watcher.close()


@pytest.mark.case("I9")
async def test_what_a_silent_watch_does_not_tell_is_found_by_comparing(
    etcd: Etcd, another: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def silent(_self: Connection, *_: object, for_s: float) -> Iterator[Any]:
        ended.wait(for_s)
        yield from ()

    monkeypatch.setattr(Connection, "watch", silent)
    try:
        active, standby = await another(), await another(compare_s=1.0)
        lease = await led(active)
        await active.save(lease, b"document")
        await until(standby._news.is_set, "the change is found")
        standby._news.clear()
        await active.save(lease, b"another")
        await tells(standby)
    finally:
        ended.set()


@pytest.mark.case("I9")
async def test_the_watch_survives_a_restart_with_compaction(tmp_path: Path) -> None:
    with Etcd(tmp_path) as etcd:
        async with opened(etcd) as make:
            active, standby = await make(), await make(compare_s=3600.0)
            lease = await led(active)
            await active.save(lease, b"before")
            for _ in range(2):
                await asyncio.to_thread(etcd.kill)
                await asyncio.to_thread(etcd.start)
                with etcd.client() as client:
                    client.put("elsewhere", "x")
                    client.compact(client.get_response("elsewhere").header.revision, physical=True)
                await active.save(lease, b"between")
                await quiet(standby)
                await active.save(lease, b"after")
                await tells(standby)


# --- room -------------------------------------------------------------------------------------------------------------


async def test_a_growing_database_is_told_long_before_the_quota_and_once_for_each_step(another: Open) -> None:
    told: list[str] = []
    store = await another(warn=told.append)
    for share in (0.1, 0.24, 0.26, 0.3, 0.49, 0.51, 0.6, 0.92, 0.95, 0.1, 0.3):
        store._sized(int(share * DEFAULT_QUOTA_BYTES))
    await until(lambda: len(told) >= 4, "four warnings")
    await asyncio.sleep(0)
    assert [words.partition(" of the 2 GiB")[0].rpartition(" ")[2] for words in told] == ["25%", "50%", "90%", "25%"]
    assert "--auto-compaction" in told[0]


async def test_the_size_of_the_database_is_asked_for(etcd: Etcd) -> None:
    sizes: list[int] = []
    chosen = settings(etcd)
    watcher = Watcher(chosen, Keys(chosen), RealClock(), seen=lambda _: None, sized=sizes.append)
    try:
        await until(lambda: sizes, "a size")
    finally:
        watcher.close()
    assert sizes[0] > 10_000


async def test_a_full_etcd_is_named_and_writes_go_on_once_it_has_room_again(tmp_path: Path) -> None:
    with Etcd(tmp_path, flags=["--quota-backend-bytes", str(2 * 1024 * 1024)]) as etcd:
        async with opened(etcd) as make:
            store = await make()
            lease = await led(store)

            async def fill() -> None:
                for n in range(60):
                    await store.save(lease, bytes([n]) * 100_000)

            with pytest.raises(
                StoreError, match=r"full and refuses every write \(NOSPACE\): compact and defragment"
            ) as e:
                await fill()
            assert not isinstance(e.value, LeaseLost)
            assert await store.load() is not None
            assert not lease.lost  # leases are renewed all the same
            with etcd.client() as client:
                client.compact(client.get_response("x").header.revision, physical=True)
                client.defragment()
                for alarm in list(client.list_alarms()):
                    client.disarm_alarm(alarm.member_id)
            await store.save(lease, b"room again")
            assert await store.load() == b"room again"
