"""Drains of real processes: stopped at the instant they are ready to, restarted, returned; under load, and through
everything that may happen to control meanwhile.

NARWHAL_DRAIN_ROUNDS sets how often the main test goes round: 5 unless told otherwise, 100 by hand.
"""

import os
import signal

import pytest

from narwhal._pb import fleet_pb2
from tests.process.harness import Load, Program, Stage, ctl, load, until

ROUNDS = int(os.environ.get("NARWHAL_DRAIN_ROUNDS", "5"))
FLEET = ("p1", "d1", "d2")


async def engine_status(stage: Stage, control: str, name: str) -> fleet_pb2.EngineStatus:
    status = await stage.status(control)
    return next(engine for engine in status.engines if engine.id == name)


async def more(seen: Load, count: int, what: str) -> None:
    """Wait until so many more requests have been served."""
    target = seen.served + count
    await until(lambda: seen.served >= target, what)


async def kill(program: Program) -> None:
    """As the operator does, but harder: nothing that it still had to do gets done."""
    program.signal(signal.SIGKILL)
    await program.ended()


@pytest.mark.rule("R4", "R5", "V5")
@pytest.mark.case("H1", "H2")
async def test_case_H2_an_engine_may_be_killed_at_the_instant_it_is_ready_to_stop(stage: Stage) -> None:
    """Every engine in turn: a producer is stopped under decode legs that may still want to read from it."""
    stage.write_fleet(*FLEET, recovery={"ramp_s": 1})
    running = {name: await stage.engines(name) for name in FLEET}
    serve = await stage.serve("--workers", "2")
    async with load(serve.at["http"], clients=8) as seen:
        await until(lambda: seen.served >= 20, "load runs")
        for number in range(ROUNDS):
            name = FLEET[number % len(FLEET)]
            code, out, err = await ctl(serve.at["grpc"], "drain", name, "--wait", "--deadline", "60")
            await kill(running[name])
            assert code == 0, err
            assert out.endswith(f"engine {name} is ready to stop\n")
            running[name] = await stage.engines(name)
            code, out, err = await ctl(serve.at["grpc"], "undrain", name, "--wait")
            assert code == 0, f"{out}{err}"
            await more(seen, 10, "requests go on")
    assert set(seen.statuses) == {200}, seen.broken
    assert not seen.broken


@pytest.mark.rule("R4")
@pytest.mark.case("H2")
async def test_case_H2_a_producer_waits_for_those_that_are_still_to_read_from_it(stage: Stage) -> None:
    """Decode engines that take their time before they read: no leg runs on the producer, and yet it is needed."""
    stage.write_fleet("p1", "p2", "d1")
    running = {name: await stage.engines(name) for name in ("p1", "p2", "d1")}
    serve = await stage.serve()
    await stage.post(
        f"http://127.0.0.1:{stage.ports['d1']}/sim/fault", {"mode": "delay", "seconds": 1.0, "phase": "decode"}
    )
    async with load(serve.at["http"], clients=8) as seen:
        await until(lambda: seen.served >= 8, "load runs")
        code, _, err = await ctl(serve.at["grpc"], "drain", "p1", "--wait", "--deadline", "60")
        await kill(running["p1"])
        assert code == 0, err
        await more(seen, 16, "requests go on")
    assert set(seen.statuses) == {200}


@pytest.mark.rule("R4", "R5", "S2", "S6")
async def test_a_drain_survives_kills_a_reload_and_a_restart_of_everything(stage: Stage) -> None:
    stage.write_fleet(*FLEET)
    running = {name: await stage.engines(name) for name in FLEET}
    serve = await stage.serve()
    code, _, err = await ctl(serve.at["grpc"], "drain", "d1", "--wait", "--reason", "new driver")
    assert code == 0, err

    async def still_drained() -> fleet_pb2.EngineStatus:
        engine = await engine_status(stage, serve.at["grpc"], "d1")
        assert [hold.kind for hold in engine.holds] == ["drain"]
        assert (engine.drain.reason, engine.drain.settled, list(engine.phases)) == ("new driver", True, [])
        return engine

    # kill -9 of control, which narwhal-serve starts again with --resume.
    epoch = (await stage.status(serve.at["grpc"])).epoch
    started = [e for e in serve.events("started") if e["program"] == "narwhal-control"]
    os.kill(started[-1]["pid"], signal.SIGKILL)

    async def leads_anew() -> bool:
        return (await stage.status(serve.at["grpc"])).epoch > epoch

    await until(leads_anew, "a new control leads")
    before = await still_drained()
    assert before.drain.process.started_at > 0

    stage.write_fleet(*FLEET, recovery={"eject_after": 4})
    serve.signal(signal.SIGHUP)
    await until(lambda: serve.events("the fleet file was read again"), "the fleet file is read again")
    await still_drained()

    serve.signal(signal.SIGTERM)
    assert await serve.ended() == 0
    for program in running.values():
        await kill(program)
    for name in ("p1", "d2"):
        await stage.engines(name)
    serve = await stage.start(
        "narwhal-serve", "--fleet", str(stage.fleet_file), "--resume",
        *(f for flag in ("--http", "--admin", "--grpc", "--control-http") for f in (flag, "127.0.0.1:0")),
    )  # fmt: skip
    await stage.ready(serve.at["admin"])
    after = await still_drained()
    assert after.drain.process == before.drain.process

    code, _, err = await ctl(serve.at["grpc"], "undrain", "d1")
    assert (code, "d1 stays drained: its check health: fail" in err) == (1, True), err
    await still_drained()
    await stage.engines("d1")
    code, _, err = await ctl(serve.at["grpc"], "undrain", "d1", "--wait")
    assert code == 0, err
    assert list((await engine_status(stage, serve.at["grpc"], "d1")).phases)


@pytest.mark.rule("R1", "R4")
async def test_an_engine_that_was_not_restarted_stays_drained_and_the_command_says_why(stage: Stage) -> None:
    stage.write_fleet(*FLEET)
    await stage.engines(*FLEET)
    serve = await stage.serve()
    await ctl(serve.at["grpc"], "drain", "d2", "--wait")
    code, out, err = await ctl(serve.at["grpc"], "undrain", "d2")
    assert (code, out) == (1, "")
    assert "narwhalctl: engine d2 stays drained: its check generation: fail: not restarted: version 0.32.0" in err
    _, out, _ = await ctl(serve.at["grpc"], "explain", "d2")
    assert "engine d2 is not eligible: drain hold" in out
    assert "\nready to stop\n" in out
    assert "\ncheck generation: fail: not restarted" in out


@pytest.mark.rule("R2")
@pytest.mark.case("B3")
@pytest.mark.parametrize("fault", ["first-transfer-fails", "first-transfer-slow=2"])
async def test_case_B3_a_first_transfer_in_trouble_is_the_gates_and_no_clients(stage: Stage, fault: str) -> None:
    stage.write_fleet("p1", "p2", "d1", "d2", recovery={"ramp_s": 1})
    running = {name: await stage.engines(name) for name in ("p1", "p2", "d1", "d2")}
    serve = await stage.serve()
    async with load(serve.at["http"]) as seen:
        await until(lambda: seen.served >= 20, "load runs")
        code, _, err = await ctl(serve.at["grpc"], "drain", "d1", "--wait")
        assert code == 0, err
        await kill(running["d1"])
        await stage.engines("d1", arguments=("--fault", f"d1:{fault}"))
        code, _, err = await ctl(serve.at["grpc"], "undrain", "d1", "--wait")
        assert code == 0, err
        served = (await engine_status(stage, serve.at["grpc"], "d1")).outcomes

        async def works() -> bool:
            now = (await engine_status(stage, serve.at["grpc"], "d1")).outcomes
            return now["answer_complete"] >= served["answer_complete"] + 10

        await until(works, "d1 takes work")
    assert set(seen.statuses) == {200}
    assert not (await engine_status(stage, serve.at["grpc"], "d1")).streaks


@pytest.mark.rule("R6", "M9")
async def test_maintenance_of_the_fleet_under_load_cuts_nobody_off(stage: Stage) -> None:
    stage.write_fleet("p1", "d1", "d2")
    running = {name: await stage.engines(name, tpot_ms=20) for name in FLEET}
    serve = await stage.serve("--workers", "2")
    async with load(serve.at["http"]) as seen:
        await until(lambda: seen.served >= 20, "load runs")
        code, out, err = await ctl(serve.at["grpc"], "drain", "--all", "--wait", "--deadline", "60")
        assert code == 0, err
        for name in FLEET:
            assert f"engine {name} is ready to stop\n" in out
            await kill(running[name])
        status, text = await stage.get(serve.at["admin"], "/ready")
        assert (status, "maintenance" in text) == (503, True)
        for name in FLEET:
            running[name] = await stage.engines(name, tpot_ms=20)
        code, out, err = await ctl(serve.at["grpc"], "undrain", "--all", "--wait")
        assert code == 0, f"{out}{err}"
        await stage.ready(serve.at["admin"])
        await more(seen, 20, "requests are served again")
    # Turned away while the fleet was down, and nothing else: what had been admitted ran to its end.
    assert set(seen.statuses) == {200, 503}
    totals = (await stage.status(serve.at["grpc"])).totals
    assert totals.failed == 0


@pytest.mark.rule("R9")
@pytest.mark.case("G4")
async def test_case_G4_an_engine_that_serves_another_model_is_found_out_and_comes_back_by_its_gate(
    stage: Stage,
) -> None:
    stage.write_fleet("p1", "d1", "d2", recovery={"readmit_every": 2})
    await stage.engines(*FLEET)
    serve = await stage.serve()
    admin = f"http://127.0.0.1:{stage.ports['d1']}/sim/fault"
    async with load(serve.at["http"]) as seen:
        await until(lambda: seen.served >= 20, "load runs")
        await stage.post(admin, {"mode": "wrong-model"})

        async def out() -> bool:
            engine = await engine_status(stage, serve.at["grpc"], "d1")
            return any(h.kind == "ejected" and h.reason.startswith("model: ") for h in engine.holds)

        await until(out, "d1 is ejected for its model")
        await stage.caught_up(serve.at["grpc"])
        answered = len(seen.statuses)
        await more(seen, 20, "the others serve")
        _, explained, _ = await ctl(serve.at["grpc"], "explain", "d1")
        assert "serves another-model, not sim-model" in explained
        await stage.delete(admin)

        async def back() -> bool:
            return bool((await engine_status(stage, serve.at["grpc"], "d1")).phases)

        await until(back, "d1 is back")
    assert set(seen.statuses) <= {200, 502}
    assert 502 not in seen.statuses[answered + 6 :]  # those that were under way by then may still be told
