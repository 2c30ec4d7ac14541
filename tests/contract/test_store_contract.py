"""What every store promises, over the model, the file store and a real etcd."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from narwhal.clock import RealClock
from narwhal.control.store.base import LeaseLost, Store
from narwhal.control.store.etcd import EtcdStore
from narwhal.control.store.etcd_client import EtcdSettings
from narwhal.control.store.file import FileStore
from tests.contract.model_store import Medium, ModelStore
from tests.etcd import Etcd

Another = Callable[[], Awaitable[Store]]

fleets = itertools.count(1)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One server for all of these tests; each has a fleet of its own."""
    with Etcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest_asyncio.fixture(params=["model", "file", "etcd"])
async def another(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Another]:
    """Makes stores of one fleet, as if each were another process's."""
    made: list[Store] = []
    medium = Medium()
    endpoints = request.getfixturevalue("etcd").endpoints if request.param == "etcd" else ()
    fleet = f"fleet{next(fleets)}"

    async def make() -> Store:
        store: Store
        match request.param:
            case "model":
                store = ModelStore(medium)
            case "file":
                store = await FileStore.open(tmp_path / "run")
            case _:
                settings = EtcdSettings(
                    endpoints=endpoints, prefix="/narwhal", fleet=fleet, ttl_s=60, safety_margin_s=0.5
                )
                store = await EtcdStore.open(settings, RealClock(), warn=print, patience_s=0.0)
        made.append(store)
        return store

    yield make
    for store in made:
        await store.close()


async def test_nothing_is_there_at_first(another: Another) -> None:
    store = await another()
    assert await store.load() is None
    assert await store.owner() is None


async def test_the_newest_document_is_read_whole_by_everybody(another: Another) -> None:
    mine, other = await another(), await another()
    lease = await mine.acquire("a", "h:1")
    assert lease is not None
    await mine.save(lease, b"first")
    await mine.save(lease, b"second" * 10_000)
    assert await other.load() == b"second" * 10_000
    assert await mine.load() == b"second" * 10_000


@pytest.mark.rule("S5")
async def test_one_lease_at_a_time(another: Another) -> None:
    mine, other = await another(), await another()
    lease = await mine.acquire("a", "h:1")
    assert lease is not None
    assert await other.acquire("b", "h:2") is None
    owner = await other.owner()
    assert owner is not None
    assert (owner.holder, owner.address, owner.epoch) == ("a", "h:1", 1)
    await mine.release(lease)
    taken = await other.acquire("b", "h:2")
    assert taken is not None
    assert taken.epoch == 2
    assert await mine.acquire("a", "h:1") is None


@pytest.mark.rule("S5")
async def test_the_epoch_rises_with_each_acquisition_and_never_goes_back(another: Another) -> None:
    epochs = []
    for above in (0, 0, 40, 3, 0):
        store = await another()
        lease = await store.acquire("a", "h:1", above=above)
        assert lease is not None
        epochs.append(lease.epoch)
        await store.close()
    assert epochs == [1, 2, 41, 42, 43]


@pytest.mark.rule("S5")
async def test_the_holder_moves_on_to_a_higher_epoch_without_letting_go(another: Another) -> None:
    mine, other = await another(), await another()
    first = await mine.acquire("a", "h:1")
    second = await mine.acquire("a", "h:1", above=9)
    assert first is not None
    assert second is not None
    assert second.epoch == 10
    assert second.may_act(0.0)
    with pytest.raises(LeaseLost):
        await mine.save(first, b"of the old epoch")
    await mine.save(second, b"of the new epoch")
    assert await other.acquire("b", "h:2") is None
    assert await other.load() == b"of the new epoch"


async def test_a_writer_whose_lease_is_over_changes_nothing(another: Another) -> None:
    mine, other = await another(), await another()
    lease = await mine.acquire("a", "h:1")
    assert lease is not None
    await mine.save(lease, b"mine")
    await mine.release(lease)
    with pytest.raises(LeaseLost):
        await mine.save(lease, b"too late")
    with pytest.raises(LeaseLost):
        await mine.set_aside(lease, b"too late")
    taken = await other.acquire("b", "h:2")
    assert taken is not None
    with pytest.raises(LeaseLost):
        await mine.save(lease, b"far too late")
    assert await other.load() == b"mine"


async def test_releasing_twice_is_no_error_and_frees_nobody_elses_lease(another: Another) -> None:
    mine, other = await another(), await another()
    lease = await mine.acquire("a", "h:1")
    assert lease is not None
    await mine.release(lease)
    assert await other.acquire("b", "h:2") is not None
    await mine.release(lease)
    assert await mine.acquire("a", "h:1") is None


async def test_closing_frees_the_lease(another: Another) -> None:
    mine, other = await another(), await another()
    lease = await mine.acquire("a", "h:1")
    assert lease is not None
    await mine.close()
    assert not lease.may_act(0.0)
    assert await other.acquire("b", "h:2") is not None


async def test_a_document_set_aside_does_not_replace_the_current_one(another: Another) -> None:
    store = await another()
    lease = await store.acquire("a", "h:1")
    assert lease is not None
    await store.save(lease, b"current")
    assert await store.set_aside(lease, b"old")
    assert await store.load() == b"current"


async def test_waiting_for_a_change_is_bounded(another: Another) -> None:
    await (await another()).changed(0.01)


async def test_the_history_is_kept_beside_the_document_by_whoever_holds_the_lease(another: Another) -> None:
    mine, other = await another(), await another()
    assert await other.history() is None
    lease = await mine.acquire("a", "h:1")
    assert lease is not None
    await mine.keep_history(lease, b"first")
    await mine.save(lease, b"document")
    await mine.keep_history(lease, b"second" * 5000)
    assert await other.history() == b"second" * 5000
    assert await other.load() == b"document"
    await mine.release(lease)
    with pytest.raises(LeaseLost):
        await mine.keep_history(lease, b"too late")
    taken = await other.acquire("b", "h:2")
    assert taken is not None
    with pytest.raises(LeaseLost):
        await mine.keep_history(lease, b"far too late")
    assert await mine.history() == b"second" * 5000


@pytest.mark.rule("M8")
async def test_a_proof_is_found_by_everybody_and_needs_no_lease(another: Another) -> None:
    mine, other = await another(), await another()
    lease = await mine.acquire("a", "h:1")
    assert lease is not None
    assert await mine.proof() == ""
    await other.prove("b one")
    assert await mine.proof() == "b one"
    await other.prove("b two")
    assert await mine.proof() == "b two"
    assert await mine.load() is None
    await mine.save(lease, b"untouched")
