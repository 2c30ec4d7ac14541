"""Engines that list the configured model and answer 401, 403 or 404 to what they are asked with it (spec R9)."""

import json

import pytest

from tests.metronome import Metronome
from tests.process.faults import at, behave, ejected, explained, misbehave, serving, short, told
from tests.process.harness import Load, Stage, load, until

CLIENTS = 4


async def tries(stage: Stage, engine: str) -> int:
    """How often the engine has been asked for a completion by its gate."""
    _, body = await stage.get(f"127.0.0.1:{stage.ports[engine]}", "/sim/requests")
    return sum((request["request_id"] or "").startswith("gate-") for request in json.loads(body))


async def more(seen: Load, count: int, what: str) -> None:
    """Wait until so many more requests have been served."""
    target = seen.served + count
    await until(lambda: seen.served >= target, what)


@pytest.mark.rule("F6", "R1", "R9", "V4")
@pytest.mark.case("G4")
@pytest.mark.parametrize(("engine", "status"), [("d1", 404), ("p1", 403)])
async def test_case_G4_with_attempts_left_nobody_is_told_and_the_gate_stays_shut(
    stage: Stage, engine: str, status: int
) -> None:
    stage.write_fleet(**short(serving={"max_attempts": 3, "retry_base_s": 0.01}, recovery={"readmit_every": 1}))
    await stage.engines()
    serve = await stage.serve()
    async with load(serve.at["http"], clients=CLIENTS) as seen:
        await more(seen, 20, "load runs")
        await misbehave(stage, engine, "status", status=status)
        out = await ejected(serve, engine)
        assert out["cause"] == "inference probe"
        before = await tries(stage, engine)

        async def tried() -> bool:
            return await tries(stage, engine) >= before + 3

        await until(tried, "its gate is tried again and again")
        assert {e["check"] for e in told(serve, "engine_check_failed", engine)} == {"generation"}
        lines = await explained(serve.at["grpc"], engine)
        said = "ejected for ", "as another engine would, then ", f"answered {status}"
        assert any(all(words in line for words in said) for line in lines), "\n".join(lines)
        assert not told(serve, "engine_readmitted", engine)
        await behave(stage, engine)
        await serving(stage, serve.at["grpc"], engine)
        await more(seen, 20, "load runs on")
    assert set(seen.statuses) == {200}
    assert {e["engine"] for e in told(serve, "engine_ejected")} == {engine}


@pytest.mark.rule("R9", "V2")
@pytest.mark.case("G4")
async def test_case_G4_at_defaults_a_handful_fail_before_it_is_out(stage: Stage) -> None:
    stage.write_fleet("p1", "d1", "d2")
    await stage.engines("p1", "d1", "d2")
    serve = await stage.serve()
    async with load(serve.at["http"], clients=CLIENTS) as seen:
        await more(seen, 20, "load runs")
        with Metronome() as metronome:
            await misbehave(stage, "d1", "status", status=404)
            await ejected(serve, "d1")
        await stage.caught_up(serve.at["grpc"])
        answered = len(seen.statuses)
        await more(seen, 100, "the other serves")
    assert set(seen.statuses) == {200, 502}
    assert seen.statuses[answered + CLIENTS :].count(502) == 0
    failed = [e for e in serve.events("leg_failed") if e["outcome"] == "wrong_identity"]
    (out,) = told(serve, "engine_ejected", "d1")
    assert at(out) - at(failed[0]) < 0.5 + metronome.total_s
    # One for each leg that was on its way there when the proxy heard of the first; from then on it goes elsewhere.
    assert 1 <= seen.statuses.count(502) <= CLIENTS


@pytest.mark.rule("H3", "R9")
async def test_when_all_of_a_role_answer_so_the_fleet_says_that_nobody_serves_until_one_does(stage: Stage) -> None:
    engines = [
        {"id": n, "url": f"http://127.0.0.1:{stage.ports[n]}", "role": role, "pinned": True}
        for n, role in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode"))
    ]
    stage.write_fleet(**short(recovery={"readmit_every": 1}), engines=engines)
    await stage.engines("p1", "d1", "d2")
    serve = await stage.serve()
    async with load(serve.at["http"], clients=CLIENTS) as seen:
        await more(seen, 20, "load runs")
        for name in ("d1", "d2"):
            await misbehave(stage, name, "status", status=401)
        for name in ("d1", "d2"):
            await ejected(serve, name)
        await stage.caught_up(serve.at["grpc"])
        status, body = await stage.get(serve.at["admin"], "/ready")
        assert (status, "no eligible engines" in body) == (503, True)
        await behave(stage, "d1")
        await serving(stage, serve.at["grpc"], "d1")
        await more(seen, 20, "one serves")
    assert set(seen.statuses) == {200, 502, 503}
    assert not told(serve, "engine_ejected", "p1")
