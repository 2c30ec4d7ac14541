"""The history of epochs: who led when, and why each ended."""

import json

import pytest

from narwhal.control.store.base import Lease, StoreError
from tests.contract.control_kit import Engines, Proxy, control, until
from tests.contract.handover_kit import epochs, messages, settled
from tests.contract.model_store import Medium, ModelStore


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
