"""Whose fault it is: a producer's and not its readers', control's own network, a proxy's own descriptors.

NARWHAL_FAULT_ROUNDS sets how often a producer dies: 3 unless told otherwise, 20 by hand.
"""

import os
import resource
import signal
import time

import pytest

from scripts.bench.gate import Gate
from scripts.bench.users import End, Users
from tests.process.faults import behave, explained, misbehave, serving, short, told
from tests.process.harness import Program, Stage, load, until

ROUNDS = int(os.environ.get("NARWHAL_FAULT_ROUNDS", "3"))


async def served(users: Users, count: int) -> None:
    """Wait until so many more requests have been served."""
    since = time.monotonic()
    await until(lambda: users.ends(since=since)[End.WHOLE] >= count, "users are served")


async def out_again(serve: Program, name: str, before: int) -> None:
    """Wait for an ejection more than there were."""
    await until(lambda: len(told(serve, "engine_ejected", name)) > before, lambda: f"{name} is out\n{serve.tail()}")


@pytest.mark.rule("F7")
async def test_a_dead_producer_ejects_no_engine_that_reads_from_it(stage: Stage) -> None:
    """It is killed while its handoffs wait to be read; every other time it lives on and its KV cannot be read."""
    stage.write_fleet(**short(recovery={"readmit_every": 1}))
    producers = {name: await stage.engines(name) for name in ("p1", "p2")}
    await stage.engines("d1", "d2", tpot_ms=2)
    serve = await stage.serve()
    async with Users(addresses=[serve.at["http"]], count=12, patience_s=60).asking() as users:
        for number in range(ROUNDS):
            name = ("p1", "p2")[number % 2]
            await serving(stage, serve.at["grpc"], "p1", "p2", "d1", "d2")
            await served(users, 24)
            before = len(told(serve, "engine_ejected", name))
            if number % 2:
                await misbehave(stage, name, "serve-fails")
            else:
                for reader in ("d1", "d2"):
                    await misbehave(stage, reader, "delay", seconds=0.3, phase="decode")
                await served(users, 8)
                producers[name].signal(signal.SIGKILL)
            await out_again(serve, name, before)
            if number % 2:
                await behave(stage, name)
            else:
                for reader in ("d1", "d2"):
                    await behave(stage, reader)
                await producers[name].ended()
                producers[name] = await stage.engines(name)
    wrongly = {e["engine"] for e in told(serve, "engine_ejected")} - {"p1", "p2"}
    assert not wrongly, serve.tail()
    assert len(told(serve, "engine_ejected")) == ROUNDS
    assert {a.end for a in users.asked} <= {End.WHOLE, End.BEFORE, End.MIDWAY}


@pytest.mark.rule("L4")
@pytest.mark.case("C13")
async def test_case_C13_control_that_reaches_no_engine_ejects_none(stage: Stage) -> None:
    names = ("p1", "d1", "d2")
    gates = {name: Gate(target=stage.ports[name]) for name in names}
    try:
        for gate in gates.values():
            await gate.start()
        engines = [
            {"id": n, "url": f"http://127.0.0.1:{gates[n].port}", "role": "prefill" if n == "p1" else "decode"}
            for n in names
        ]
        stage.write_fleet(**short(engine={"health_timeout_s": 0.5}), engines=engines)
        await stage.engines(*names)
        control = await stage.control()
        proxy = await stage.proxy("--control", control.at["grpc"])
        await stage.ready(proxy.at["admin"])
        async with load(proxy.at["http"], clients=3) as seen:
            await until(lambda: seen.served >= 20, "load runs")
            # A machine that stands still for longer than an engine may take looks the same, and is over by itself.
            before = len(told(control, "control_cut_off"))
            await until(lambda: len(told(control, "control_back")) == before, "control is in reach of all")
            for gate in gates.values():
                gate.shut(control.pid)
            cut = (await until(lambda: told(control, "control_cut_off")[before:], "control finds out"))[0]
            assert cut["event"].startswith("control is cut off: 3 of 3 engines do not answer it")
            passes = (await stage.status(control.at["grpc"])).monitor.passes

            async def many_sweeps() -> bool:
                return (await stage.status(control.at["grpc"])).monitor.passes >= passes + 12

            await until(many_sweeps, "several sweeps more")
            assert not told(control, "engine_ejected")
            lines = await explained(control.at["grpc"], "d1")
            assert lines[0].startswith("engine d1 is eligible")
            assert "control is cut off from the engines: that this one does not answer it says nothing" in lines
            assert len(told(control, "control_cut_off")) == before + 1
            for gate in gates.values():
                gate.open()
            await until(lambda: len(told(control, "control_back")) > before, "control is back")
        assert set(seen.statuses) == {200}
        assert not told(control, "engine_ejected")
    finally:
        for gate in gates.values():
            await gate.close()


@pytest.mark.rule("F5", "F12")
@pytest.mark.case("C14")
async def test_case_C14_a_proxy_without_descriptors_is_the_fault_itself(stage: Stage) -> None:
    stage.write_fleet(**short())
    await stage.engines()
    control = await stage.control()
    starved = await stage.proxy("--control", control.at["grpc"], "--id", "starved")
    sound = await stage.proxy("--control", control.at["grpc"], "--id", "sound")
    for proxy in (starved, sound):
        await stage.ready(proxy.at["admin"])
    pid = starved.events("worker started")[-1]["pid"]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    users = Users(addresses=[starved.at["http"], sound.at["http"]], count=12, patience_s=60)
    async with users.asking():
        await until(lambda: users.ends(since=0)[End.WHOLE] >= 24, "users are served")
        used = {int(entry) for entry in os.listdir(f"/proc/{pid}/fd")}
        free = next(number for number in range(len(used) + 1) if number not in used)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, limits[1]))
        (suspect,) = await until(lambda: told(control, "proxy_suspect"), "the proxy is shown as the fault")
        await served(users, 48)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        await served(users, 24)  # those that were refused on the way
        back = time.monotonic()
        await served(users, 48)
    assert suspect["proxy"] == "starved/0"
    assert "is suspect itself: its legs fail by causes of its own" in suspect["event"]
    proxies = {p.proxy.id: p.suspect for p in await stage.proxies(control.at["grpc"])}
    assert proxies["starved"]
    assert not proxies["sound"]
    status = await stage.status(control.at["grpc"])
    assert [e.id for e in status.engines if e.evidence or e.holds or not e.phases] == []
    assert not told(control, "engine_ejected")
    # What it could not do for want of a descriptor was refused as its own saturation.
    assert {a.status for a in users.failed(since=0)} <= {429}
    assert not users.failed(since=back)
