"""At no instant do two control processes both act: over rounds of kills, stops, ends and outages drawn from seeds, the
journals of all processes and the history of etcd are put side by side.

NARWHAL_RULER_ROUNDS sets how many rounds there are (3 unless told otherwise, 50 by hand), NARWHAL_RULER_SEED the first.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

import grpc
import pytest

from narwhal._pb import fleet_pb2, fleet_pb2_grpc
from tests.process.faults import serving
from tests.process.ha.ensemble import NAMES, TTL_S, Ensemble, passed
from tests.process.ha.reigns import Journal, Reign, proof, reigns

ROUNDS = int(os.environ.get("NARWHAL_RULER_ROUNDS", "3"))
SEED = int(os.environ.get("NARWHAL_RULER_SEED", "1"))


# --- what is proven with is proven first ------------------------------------------------------------------------------


def active(epoch: int, at: float) -> dict[str, object]:
    return {"kind": "control_active", "epoch": str(epoch), "boottime": at, "event": "leads"}


def fenced(epoch: int, at: float, valid_until: float) -> dict[str, object]:
    return {"kind": "control_fenced", "epoch": str(epoch), "boottime": at, "valid_until": f"{valid_until}", "event": ""}


def decided(at: float) -> dict[str, object]:
    return {"kind": "engine_ejected", "boottime": at, "event": "engine d1 ejected"}


def test_a_reign_ends_with_its_lease_however_late_the_process_hears_of_it() -> None:
    journal = Journal(name="a", pid=1, entries=[active(1, 10.0), fenced(1, 20.0, 13.0), active(3, 30.0)], dead_at=40.0)
    assert reigns(journal) == [
        Reign(pid=1, name="a", epoch=1, begin=10.0, end=13.0),
        Reign(pid=1, name="a", epoch=3, begin=30.0, end=40.0),
    ]


def test_two_that_act_at_once_are_found() -> None:
    one = Journal(name="a", pid=1, entries=[active(1, 10.0), decided(11.0), fenced(1, 15.0, 14.0)])
    assert proof([one, Journal(name="b", pid=2, entries=[active(2, 14.1)])]).faults == []
    (words,) = proof([one, Journal(name="b", pid=2, entries=[active(2, 13.9)])]).faults
    assert words.startswith("a (1) under epoch 1 from 10.000 to 14.000, and b (2) under epoch 2 from 13.900 to ")


def test_a_decision_of_a_process_that_does_not_lead_is_found() -> None:
    late = Journal(name="a", pid=1, entries=[active(1, 10.0), decided(14.5), fenced(1, 15.0, 14.0)])
    assert proof([late]).faults == ["a (1) at 14.500: engine d1 ejected"]
    assert proof([Journal(name="b", pid=2, entries=[decided(1.0)])]).faults == ["b (2) at 1.000: engine d1 ejected"]


def test_an_epoch_that_goes_back_is_found() -> None:
    journals = [Journal(name=n, pid=p, entries=[active(e, at)], dead_at=at + 1) for n, p, e, at in
                (("a", 1, 2, 10.0), ("b", 2, 2, 20.0))]  # fmt: skip
    assert proof(journals).faults == ["epochs do not rise from reign to reign: [2, 2]"]


# --- the rounds -------------------------------------------------------------------------------------------------------


async def killed(fleet: Ensemble, name: str, rng: random.Random) -> None:
    """SIGKILL, and started again soon or late."""
    await fleet.end(name, signal.SIGKILL)
    await passed(rng.choice((0.0, TTL_S * rng.random() * 1.5)))
    await fleet.begin(name)


async def ended(fleet: Ensemble, name: str, _rng: random.Random) -> None:
    """SIGTERM, and started again at once."""
    await fleet.end(name, signal.SIGTERM)
    await fleet.begin(name)


async def stopped(fleet: Ensemble, name: str, rng: random.Random) -> None:
    """SIGSTOP for less or more than a lease lasts."""
    program = fleet.control[name]
    program.signal(signal.SIGSTOP)
    await passed(rng.uniform(0.3, 2.0) * TTL_S)
    program.signal(signal.SIGCONT)


async def cut_off(fleet: Ensemble, name: str, rng: random.Random) -> None:
    """Etcd answers this one process nothing, and then everything late."""
    fleet.shut(name)
    await passed(rng.uniform(0.3, 1.8) * TTL_S)
    fleet.open(name)


async def away(fleet: Ensemble, _name: str, rng: random.Random) -> None:
    """Etcd hangs, or dies and comes back with its data; the whole of it, or the member that the others follow."""
    members, lasts_s = fleet.etcd.members, rng.uniform(0.2, 1.5) * TTL_S
    if rng.random() < 0.3:
        members = [await asyncio.to_thread(fleet.etcd.leader)]
    hangs = rng.random() < 0.5
    for member in members:
        if hangs:
            member.signal(signal.SIGSTOP)
        else:
            member.kill()
    await passed(lasts_s)
    for member in members:
        if hangs:
            member.signal(signal.SIGCONT)
    await asyncio.to_thread(fleet.etcd.start)


Fault = Callable[[Ensemble, str, random.Random], Awaitable[None]]
FAULTS: tuple[Fault, ...] = (killed, killed, ended, stopped, stopped, cut_off, cut_off, away)


async def a_round(fleet: Ensemble, seed: int) -> list[str]:
    """Up to three faults at once or one soon after the other, of the active, the standby or etcd."""
    rng = random.Random(f"one ruler {seed}")
    name, _ = await fleet.settled()
    told = []
    work: list[asyncio.Task[None]] = []
    left = list(NAMES)
    for _ in range(rng.randint(1, 3)):
        fault = rng.choice(FAULTS)
        if fault is away:
            whom = ""
        elif left:
            whom = name if name in left and rng.random() < 0.75 else rng.choice(left)
            left.remove(whom)
        else:
            continue
        told.append(f"{fault.__name__} {whom}".rstrip())
        work.append(asyncio.create_task(_later(rng.choice((0.0, rng.random() * 2)), fault, fleet, whom, rng)))
        if fault is away:
            break  # the store's own faults are one at a time
    await asyncio.gather(*work)
    return told


async def _later(delay_s: float, fault: Fault, fleet: Ensemble, whom: str, rng: random.Random) -> None:
    await passed(delay_s)
    await fault(fleet, whom, rng)


async def restless(fleet: Ensemble) -> None:
    """Somebody asks both processes for the same again and again, so that whoever leads has always something to decide;
    and so has one that only believes that it leads. A probe begins at once, whether or not the store answers."""
    async with contextlib.AsyncExitStack() as stack:
        stubs = []
        for address in fleet.at.values():
            options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 200)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            stubs.append(fleet_pb2_grpc.FleetServiceStub(channel))

        async def ask(stub: "fleet_pb2_grpc.FleetServiceAsyncStub") -> None:
            eject = fleet_pb2.EjectEngineRequest(engine_id="p3", reason="restless")
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.ProbeEngine(fleet_pb2.ProbeEngineRequest(engine_id="d3"), timeout=0.5)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.EjectEngine(eject, timeout=0.5)
                await asyncio.sleep(0.02)

        await asyncio.gather(*map(ask, stubs))


@pytest.mark.rule("S4", "S5", "P5")
@pytest.mark.case("I1", "I2", "I3")
async def test_at_no_instant_do_two_control_processes_act(fleet: Ensemble) -> None:
    before = await asyncio.to_thread(fleet.one_ruler)
    seen = Counter[str]()
    asking = asyncio.create_task(restless(fleet))
    try:
        async with fleet.load() as load:
            for seed in range(SEED, SEED + ROUNDS):
                told = await a_round(fleet, seed)
                name, epoch = await fleet.settled()
                seen.update(words.partition(" ")[0] for words in told)
                print(f"round {seed}: {', '.join(told)}; {name} leads epoch {epoch}")
                await load.more(6)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    found = await asyncio.to_thread(fleet.one_ruler)
    assert load.errors == []
    await fleet.counted()
    print(
        f"{ROUNDS} rounds ({', '.join(f'{n} {what}' for what, n in seen.most_common())}): "
        f"{len(found.reigns) - len(before.reigns)} more reigns, {found.decisions - before.decisions} decisions, "
        f"{load.served} requests served"
    )
    assert len(found.reigns) > len(before.reigns)
    await serving(fleet.stage, fleet.at[await fleet.active()], "p3")
