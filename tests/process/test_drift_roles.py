"""An engine that grows slow, a fleet that does, and an engine that changes its role: real processes under load."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from narwhal._pb import fleet_pb2, placement_pb2
from tests.process.faults import behave, misbehave, short, told
from tests.process.harness import Program, Stage, ctl, load, until
from tests.process.test_faults import requests_of

WINDOW_S = 1.5
TPOT_MS = 20.0
# Every window has a dozen samples of an engine that takes its part of the load.
HEALTH = {"window_s": WINDOW_S, "min_samples": 3, "probation_windows": 3, "evict_windows": 5, "recovery_windows": 3}
DECODE = placement_pb2.PHASE_DECODE


@contextlib.asynccontextmanager
async def always_served(stage: Stage, control: str) -> AsyncIterator[list[set[str]]]:
    """While the block runs, each phase always has an engine; gives who served decode, look by look."""
    seen: list[set[str]] = []

    async def look() -> None:
        while True:
            status = await stage.status(control)
            for phase in (placement_pb2.PHASE_PREFILL, DECODE):
                assert any(phase in engine.phases for engine in status.engines), f"nobody serves {phase}: {status}"
            seen.append({engine.id for engine in status.engines if DECODE in engine.phases})
            await asyncio.sleep(0.1)

    looking = asyncio.create_task(look())
    try:
        yield seen
        assert not looking.done(), looking.exception()
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def held(serve: Program) -> list[str]:
    """Engines that were put on probation, in order."""
    return [str(e["engine"]) for e in told(serve, "hold_placed") if e.get("hold") == "drift"]


async def judged(stage: Stage, control: str, *names: str) -> None:
    """Wait until the decode latency of these engines has a baseline."""

    async def known() -> bool:
        status = await stage.status(control)
        return all(e.HasField("drift") and e.drift.good >= 2 for e in status.engines if e.id in names)

    await until(known, f"{names} are judged")


@pytest.mark.rule("H2", "H5")
async def test_an_engine_that_grows_slow_is_eased_out_and_comes_back(stage: Stage) -> None:
    stage.write_fleet(**short(recovery={"health": HEALTH}))
    await stage.engines(tpot_ms=TPOT_MS)
    serve = await stage.serve()
    control = serve.at["grpc"]
    async with load(serve.at["http"], clients=8) as seen, always_served(stage, control) as serving:
        await judged(stage, control, "d1", "d2")
        assert held(serve) == []
        await misbehave(stage, "d1", "slow-tokens", factor=3)
        await until(lambda: held(serve), lambda: f"d1 is on probation\n{serve.tail()}")
        await until(lambda: serving[-1] == {"d2"}, "d1 serves no more")
        # By now it has no traffic, and is sampled.
        since = len(told(serve, "probe_ended", "d1"))
        await until(lambda: len(told(serve, "probe_ended", "d1")) > since, "d1 is sampled on probation")
        await behave(stage, "d1")
        await until(lambda: serving[-1] == {"d1", "d2"}, lambda: f"d1 is back\n{serve.tail()}")
    assert set(held(serve)) == {"d1"}
    assert told(serve, "engine_ejected") == []
    assert set(seen.statuses) == {200}


@pytest.mark.rule("H5")
async def test_when_the_whole_fleet_grows_slow_nobody_is_held(stage: Stage) -> None:
    stage.write_fleet(**short(recovery={"health": HEALTH}))
    await stage.engines(tpot_ms=TPOT_MS)
    serve = await stage.serve()
    control = serve.at["grpc"]

    async def passes() -> int:
        return (await stage.status(control)).monitor.passes

    async with load(serve.at["http"], clients=8) as seen:
        await judged(stage, control, "d1", "d2")
        for engine in ("d1", "d2"):
            await misbehave(stage, engine, "slow-tokens", factor=3)
        await until(lambda: told(serve, "fleet_slow"), lambda: f"control sees it\n{serve.tail()}")
        began = await passes()

        async def long_enough() -> bool:
            return await passes() >= began + 5 * WINDOW_S / 0.5  # windows in which one engine alone would be held

        await until(long_enough, "five windows pass")
    assert held(serve) == []
    assert set(seen.statuses) == {200}


@pytest.mark.rule("C1")
async def test_an_operator_changes_a_role_and_new_legs_follow(stage: Stage) -> None:
    stage.write_fleet(**short())
    await stage.engines()
    serve = await stage.serve()

    async def run(*words: str) -> tuple[int, str]:
        code, out, err = await ctl(serve.at["grpc"], *words)
        return code, out + err

    async def decode_legs() -> int:
        """Of clients, on p2: gates of engines that join later transfer with it too."""
        asked = await requests_of(stage, "p2", "decode")
        return sum(not (r["request_id"] or "").startswith("probe-") for r in asked)

    async with load(serve.at["http"]) as seen:
        await until(lambda: seen.served > 40, "clients are served")
        assert await decode_legs() == 0
        code, told_ = await run("role", "p2", "decode")
        assert (code, told_) == (0, "engine p2 now has the role decode (operator: asked for by an operator)\n")

        async def decodes() -> bool:
            return await decode_legs() > 10

        await until(decodes, "p2 decodes")
        code, told_ = await run("role", "p1", "decode")
        assert code == 1
        assert "its floor is 1 (controller.min_prefill)" in told_

        async def measured() -> dict[str, Any] | None:
            _, words = await run("roles", "-o", "json")
            facts: dict[str, Any] = json.loads(words)
            assert {e["id"]: e["role"] for e in facts["engines"]} == {
                "p1": "prefill", "p2": "decode", "d1": "decode", "d2": "decode"
            }  # fmt: skip
            prefill: dict[str, Any] = facts["roles"]["roles"][0]
            return prefill if prefill["first_s"] is not None else None

        prefill = await until(measured, "what prefill legs take is told")
        assert prefill["prompt_tokens"] > 1
    assert set(seen.statuses) == {200}
    status: fleet_pb2.FleetStatus = await stage.status(serve.at["grpc"])
    assert next(e for e in status.engines if e.id == "p2").HasField("role_age_s")
