"""Etcd at its quota: it renews leases and refuses every write. Real processes, and the way out of docs/etcd.md."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import etcd3
import grpc
import pytest

from tests.etcd import Etcd
from tests.process.faults import told
from tests.process.harness import Stage, load, until

QUOTA = 4 * 1024 * 1024


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path / "etcd", flags=["--quota-backend-bytes", str(QUOTA)]) as etcd:
        yield etcd


def fill(etcd: Etcd) -> None:
    """Somebody writes until etcd takes nothing more."""
    with etcd.client() as client, contextlib.suppress(grpc.RpcError, etcd3.Etcd3Exception):
        for number in range(200):
            client.put("somebody/else's", bytes([number]) * 100_000)


def make_room(etcd: Etcd) -> None:
    """What etcdctl compact, defrag and alarm disarm do."""
    with etcd.client() as client:
        client.compact(client.get_response("/").header.revision, physical=True)
        client.defragment()
        for alarm in list(client.list_alarms()):
            client.disarm_alarm(alarm.member_id)


@pytest.mark.rule("M5", "M6", "M8", "S8")
async def test_a_full_etcd_degrades_the_active_moves_no_lease_and_is_recovered_from_without_a_restart(
    stage: Stage, etcd: Etcd
) -> None:
    stage.write_fleet(
        "p1", "d1",
        store={"kind": "etcd", "endpoints": list(etcd.endpoints)},
        controller={"monitor_interval_s": 0.3},
        recovery={"ramp_s": 0},
    )  # fmt: skip
    await stage.engines("p1", "d1")
    active = await stage.control("--id", "a")
    await stage.ready(active.at["http"])
    standby = await stage.control("--id", "b", "--resume")
    proxy = await stage.proxy("--control", f"{active.at['grpc']},{standby.at['grpc']}")
    await stage.ready(proxy.at["http"])
    await asyncio.to_thread(fill, etcd)

    async def reason() -> str:
        return (await stage.get(active.at["http"], "/ready"))[1]

    async def degraded() -> bool:
        return "monitoring degraded: handoff StoreError" in await reason()

    async def names_it() -> bool:
        # The newest words: while it was being filled, etcd may have been slow first, and what lasts is logged once.
        errors = (await stage.status(active.at["grpc"])).monitor.errors
        return any("is full and refuses every write (NOSPACE): compact and defragment it" in e.message for e in errors)

    await until(degraded, active.tail)
    await until(names_it, active.tail)
    # The standby asks, cannot prove a write of its own, and is refused; nobody else leads.
    await until(lambda: told(active, "yield_refused"), lambda: f"{active.tail()}\n{standby.tail()}")
    assert not told(standby, "control_active")
    await asyncio.to_thread(make_room, etcd)
    await stage.ready(active.at["http"])
    assert not told(active, "control_fenced")
    assert len(told(active, "control_active")) == 1
    await stage.ready(proxy.at["http"])
    async with load(proxy.at["http"]) as seen:
        await until(lambda: seen.served >= 20, "requests are served again")
    assert set(seen.statuses) == {200}
