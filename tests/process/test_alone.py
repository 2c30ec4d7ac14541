"""Control is gone, killed or fenced, under load: proxies serve on, and what they saw is told when it is back (P7)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.users import End, Users
from tests.etcd import Etcd
from tests.process.faults import short
from tests.process.harness import Stage, until

# How long control is away. By hand: NARWHAL_ALONE_S=60.
ALONE_S = float(os.environ.get("NARWHAL_ALONE_S", "6"))
PATIENT: dict[str, Any] = {"serving": {"max_attempts": 3}}


async def alone(users: Users) -> float:
    """Users go on for as long as control is away. Returns since when, on the users' clock."""
    since = users.asked[-1].ended_at
    await until(lambda: users.asked[-1].ended_at >= since + ALONE_S, "users are served", ALONE_S + 90)
    return since


async def counted(stage: Stage, control: str, users: Users) -> None:
    """Control's totals come to be exactly what the users saw: nothing missing, nothing twice."""

    whole = users.ends(since=0)[End.WHOLE]

    async def all_told() -> bool:
        status = await stage.status(control)
        totals = status.totals
        told = totals.served + totals.failed + totals.rejected + totals.cancelled
        legs = sum(e.outcomes["stream_complete"] + e.outcomes["answer_complete"] for e in status.engines)
        assert (totals.served <= whole, told <= len(users.asked), legs <= whole) == (True, True, True), status
        return (totals.served, totals.failed + totals.rejected, legs) == (whole, len(users.asked) - whole, whole)

    await until(all_told, f"{whole} of {len(users.asked)} requests are counted as served")


@pytest.mark.rule("P7", "S6")
@pytest.mark.case("J8")
async def test_case_J8_control_is_killed_and_then_a_decode_engine(stage: Stage) -> None:
    stage.write_fleet(**short(**PATIENT))
    await stage.engines("p1", "p2", "d1")
    victim = await stage.engines("d2")
    flags = ("--grpc", stage.address(), "--http", stage.address())
    control = await stage.control(*flags)
    proxy = await stage.proxy("--control", control.at["grpc"])
    await stage.ready(proxy.at["admin"])
    async with Users(addresses=[proxy.at["http"]], patience_s=60).asking() as users:
        await until(lambda: users.ends(since=0)[End.WHOLE] >= 16, "users are served")
        control.signal(signal.SIGKILL)
        await control.ended()
        since = await alone(users)
        assert users.failed(since=since) == []
        assert (await stage.get(proxy.at["http"], "/ready"))[0] == 200

        victim.signal(signal.SIGKILL)
        since = await alone(users)
        # What streamed on the engine when it died is lost, nothing else: at most one request of each user.
        assert len(users.failed(since=since)) <= users.count
        assert {a.end for a in users.failed(since=since)} <= {End.MIDWAY}
        refused = [e for e in proxy.events("leg_failed") if e["outcome"] == "refused"]
        # Those that were about to connect when the first was refused; then it is stepped around.
        assert 1 <= len(refused) <= users.count
        since = await alone(users)
        assert users.failed(since=since) == []
        assert [e for e in proxy.events("leg_failed") if e["outcome"] == "refused"] == refused

        control = await stage.control("--resume", *flags)

        async def out() -> bool:
            status = await stage.status(control.at["grpc"])
            return [e.id for e in status.engines if not e.phases] == ["d2"]

        await until(out, "control finds what is left")
        since = users.asked[-1].ended_at
        await until(lambda: users.ends(since=since)[End.WHOLE] >= 16, "users are served")
        assert users.failed(since=since) == []
    await counted(stage, control.at["grpc"], users)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd of the test's own."""
    with Etcd(tmp_path / "etcd") as server:
        yield server


@pytest.mark.rule("P7", "S5", "S8")
async def test_control_is_fenced_while_its_store_is_away(stage: Stage, etcd: Etcd) -> None:
    store = {"kind": "etcd", "endpoints": list(etcd.endpoints)}
    stage.write_fleet(**short(store=store, lease={"ttl_s": 2}))
    await stage.engines()
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"], "--workers", "2")
    await stage.ready(proxy.at["admin"])
    async with Users(addresses=[proxy.at["http"]], patience_s=60).asking() as users:
        await until(lambda: users.ends(since=0)[End.WHOLE] >= 16, "users are served")
        with etcd.members[0].stopped():

            async def is_fenced() -> bool:
                status, body = await stage.get(control.at["http"], "/ready")
                return status == 503 and "fenced" in body

            await until(is_fenced, "control is fenced")
            since = await alone(users)
            assert (await stage.get(proxy.at["http"], "/ready"))[0] == 200

        async def leads() -> bool:
            return (await stage.get(control.at["http"], "/ready"))[0] == 200

        await until(leads, "control leads again")
        await until(lambda: users.ends(since=since)[End.WHOLE] >= 32, "users are served")
    assert users.failed(since=0) == []
    await counted(stage, control.at["grpc"], users)
