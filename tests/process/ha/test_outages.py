"""Etcd hangs for one process, goes away for a while, loses a member, compacts or forgets: real processes, under load.

By hand: NARWHAL_OUTAGES sets how many short outages follow one another (2 unless told otherwise, 20 for case I3), and
NARWHAL_OUTAGE_S how long the one long outage lasts (4 s unless told otherwise; 30 and 300 for case I4), with
NARWHAL_OUTAGE_KIND=hangs not by the death of etcd's members but by their silence.
"""

import asyncio
import os
import random
import signal
import time

import pytest

from tests.metronome import Metronome
from tests.process.faults import serving, told
from tests.process.ha.ensemble import NAMES, TTL_S, Ensemble, boottime, passed, state
from tests.process.harness import ctl, until

OUTAGES = int(os.environ.get("NARWHAL_OUTAGES", "2"))
HANGS = os.environ.get("NARWHAL_OUTAGE_KIND", "dies") == "hangs"
OUTAGE_S = float(os.environ.get("NARWHAL_OUTAGE_S", "4"))


@pytest.mark.rule("S5", "S8")
@pytest.mark.case("I1")
async def test_case_I1_an_active_whose_etcd_calls_hang_fences_before_the_standby_leads(fleet: Ensemble) -> None:
    name, epoch = await fleet.settled()
    heir, program = fleet.other(name), fleet.control[name]
    before = len(told(program, "control_fenced"))
    async with fleet.load() as seen:
        began = boottime()
        fleet.shut(name)
        await fleet.followed(epoch + 1)
        took_s = boottime() - began
        await until(lambda: len(told(program, "control_fenced")) > before, program.tail)
        assert (await until(lambda: fleet.readiness(name), "it answers"))["control_ready"] is False
        fleet.open(name)
        again, newest = await fleet.settled()
        await seen.more(6)
    fenced = told(program, "control_fenced")[-1]
    active = [e for e in told(fleet.control[heir], "control_active") if int(e["epoch"]) == epoch + 1]
    print(f"fenced after {fenced['boottime'] - began:.2f} s, followed after {took_s:.2f} s")
    assert fenced["boottime"] < active[0]["boottime"]
    assert (again, newest) == (heir, epoch + 1)
    assert seen.errors == []


def everywhere(fleet: Ensemble, number: signal.Signals) -> None:
    for member in fleet.etcd.members:
        member.signal(number)


@pytest.mark.rule("S8", "P7")
@pytest.mark.case("I4")
async def test_case_I4_etcd_away_for_a_second_changes_nothing(fleet: Ensemble) -> None:
    name, epoch = await fleet.settled()
    fenced = len(told(fleet.control[name], "control_fenced"))
    async with fleet.load() as seen:
        for _ in range(20):
            everywhere(fleet, signal.SIGSTOP)
            began = boottime()
            await passed(1.0)
            everywhere(fleet, signal.SIGCONT)
            if boottime() - began < 1.2:
                break
            name, epoch = await fleet.settled()  # a machine that stood still made the outage a longer one
            fenced = len(told(fleet.control[name], "control_fenced"))
        await seen.more(6)
        await fleet.stored(name, time.time())
        assert await fleet.settled() == (name, epoch)
    assert len(told(fleet.control[name], "control_fenced")) == fenced
    assert seen.errors == []


@pytest.mark.rule("S8", "P7")
@pytest.mark.case("I4")
async def test_case_I4_etcd_away_for_long_is_outlived_by_everybody(fleet: Ensemble) -> None:
    name, epoch = await fleet.settled()
    before = state(await fleet.document(name))
    async with fleet.load() as seen:
        if HANGS:
            everywhere(fleet, signal.SIGSTOP)
        else:
            await asyncio.to_thread(fleet.etcd.kill)
        began = boottime()
        await until(lambda: not_active(fleet, name), "it fences itself")
        fenced_s = boottime() - began
        await passed(OUTAGE_S - fenced_s)
        assert not await leaders(fleet)
        if HANGS:
            everywhere(fleet, signal.SIGCONT)
        else:
            await asyncio.to_thread(fleet.etcd.start)
        back = boottime()
        again, newest = await fleet.settled()
        await seen.more(6)
    print(f"away {OUTAGE_S:g} s: {again} leads epoch {newest} {boottime() - back:.2f} s after; {name} led {epoch}")
    assert (again, newest) == (name, epoch + 1), "no change of active"
    assert state(await fleet.document(name)) == before
    assert seen.errors == []
    await fleet.counted()


async def not_active(fleet: Ensemble, name: str) -> bool:
    return not (await fleet.readiness(name)).get("control_ready")


async def leaders(fleet: Ensemble) -> list[str]:
    return [name for name in NAMES if (await fleet.readiness(name)).get("control_ready")]


@pytest.mark.rule("S8", "P7")
async def test_one_of_three_members_is_killed_and_comes_back(fleet: Ensemble) -> None:
    """Without a follower nothing changes. Without its leader etcd answers nobody for up to two election timeouts, which
    can be more than is left of a lease of this length: then the same process leads again."""
    name, epoch = await fleet.settled()
    async with fleet.load() as seen:
        for whom in ("follower", "leader"):
            leader = await asyncio.to_thread(fleet.etcd.leader)
            member = leader if whom == "leader" else next(m for m in fleet.etcd.members if m is not leader)
            member.kill()
            await fleet.stored(name, time.time() + 1.0)
            again, newest = await fleet.settled()
            assert again == name
            assert newest - epoch <= (whom == "leader")
            await asyncio.to_thread(fleet.etcd.start)
        await seen.more(6)
    assert seen.errors == []
    await fleet.counted()


@pytest.mark.rule("S5", "S8")
@pytest.mark.case("I3")
async def test_case_I3_after_short_outages_at_random_one_leads_again_in_time(fleet: Ensemble) -> None:
    rng = random.Random(OUTAGES)
    name, _ = await fleet.settled()
    async with fleet.load() as seen:
        for _ in range(OUTAGES):
            kind = rng.choice(("hangs", "dies", "one"))
            members = fleet.etcd.members if kind != "one" else rng.sample(fleet.etcd.members, 1)
            for member in members:
                if kind == "dies":
                    member.kill()
                else:
                    member.signal(signal.SIGSTOP)
            await passed(rng.uniform(0.2, 2.5))
            if kind == "dies":
                await asyncio.to_thread(fleet.etcd.start)
            else:
                for member in members:
                    member.signal(signal.SIGCONT)
            await passed(rng.uniform(0.1, 1.0))
        await asyncio.to_thread(fleet.etcd.wait)
        with Metronome() as metronome:
            began = boottime()
            name = await fleet.active()
            took_s = boottime() - began
        print(f"{OUTAGES} outages: {name} leads {took_s:.2f} s after the last")
        assert took_s < TTL_S + 4.0 + metronome.total_s
        await fleet.settled()
        await seen.more(6)
    assert len(await leaders(fleet)) == 1
    assert seen.errors == []


@pytest.mark.rule("S7")
@pytest.mark.case("I9")
async def test_case_I9_what_was_compacted_while_a_standby_could_not_watch_is_known_to_it_afterwards(
    fleet: Ensemble,
) -> None:
    name, epoch = await fleet.settled()
    heir = fleet.other(name)
    try:
        fleet.shut(heir)
        code, _, err = await ctl(fleet.at[name], "drain", "p3", "--wait", "--no-restart", "--reason", "in the gap")
        assert code == 0, err
        await asyncio.to_thread(compact, fleet)
        gap = time.time()
        fleet.open(heir)
        await fleet.copied(name, gap)
        await fleet.settled()
        # The one way to look at a standby's copy: have it lead.
        before = state(await fleet.document(name))
        assert before["p3"]["drain"]["reason"] == "in the gap"
        code, _, err = await ctl(fleet.at[name], "switchover", "--to", heir)
        assert code == 0, err
        await fleet.followed(epoch + 1)
        assert state(await fleet.document(heir)) == before
    finally:
        fleet.open(heir)
        await fleet.healed()


def compact(fleet: Ensemble) -> None:
    """Etcd forgets everything but the newest value of every key."""
    with fleet.etcd.client() as client:
        client.compact(client.get_response("/").header.revision, physical=True)


@pytest.mark.rule("S5", "P5")
@pytest.mark.case("I18")
async def test_case_I18_the_store_is_wiped_and_nothing_is_readmitted_by_accident(fleet: Ensemble) -> None:
    name, epoch = await fleet.settled()
    stage = fleet.stage
    await stage.post(f"http://127.0.0.1:{stage.ports['d3']}/sim/fault", {"mode": "health-status"})
    try:
        code, _, err = await ctl(fleet.at[name], "eject", "d3")
        assert code == 0, err
        await asyncio.to_thread(fleet.one_ruler)  # what etcd remembers up to here is forgotten now
        async with fleet.load() as seen:
            await asyncio.to_thread(fleet.etcd.wipe)
            await asyncio.to_thread(fleet.etcd.start)
            began = boottime()
            # A store that is back within the lease's time finds an active that leads on until it asks to renew.
            again, newest = await fleet.settled(above=epoch)
            took_s = boottime() - began
            await seen.more(6)
        print(f"wiped: {again} leads epoch {newest} {took_s:.2f} s after etcd was back; {name} led {epoch}")
        engines = state(await fleet.document(again))
        assert [kind for kind, _ in engines["d3"]["holds"]] == ["ejected"]
        assert all(engines[each]["holds"] == [] for each in ("p1", "p2", "d1", "d2"))
        assert seen.errors == []
        await fleet.counted()
    finally:
        await stage.delete(f"http://127.0.0.1:{stage.ports['d3']}/sim/fault")
        await serving(stage, fleet.at[await fleet.active()], "d3")
