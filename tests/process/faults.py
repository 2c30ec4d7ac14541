"""What tests of faults share: a fleet whose bounds are short, and looking at what control decided."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import grpc

from narwhal._pb import fleet_pb2, fleet_pb2_grpc
from tests.process.harness import Program, Stage, until

INTERVAL_S = 0.5
TOKEN_S = 1.0
# Shorter than the defaults, in the same proportions to each other.
SHORT: dict[str, Any] = {
    "controller": {"monitor_interval_s": INTERVAL_S},
    "recovery": {"readmit_every": 2, "liveness_every": 2, "ramp_s": 0, "relapse_window_s": 0},
    "engine": {
        "first_token_timeout_s": TOKEN_S,
        "kv_first_pull_timeout_s": TOKEN_S,
        "health_timeout_s": 1.0,
        "decode_read_timeout_s": 4.0,
    },
}


def short(**sections: dict[str, Any]) -> dict[str, Any]:
    """The short settings, with these keys changed."""
    return {name: {**SHORT.get(name, {}), **sections.get(name, {})} for name in {**SHORT, **sections}}


def told(program: Program, kind: str, engine: str = "") -> list[dict[str, Any]]:
    """Events of this kind that control logged so far."""
    return [e for e in program.events() if e.get("kind") == kind and engine in ("", e.get("engine"))]


def at(entry: dict[str, Any]) -> float:
    """When it was logged, seconds of the wall clock."""
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


async def misbehave(stage: Stage, engine: str, mode: str, **parameters: Any) -> None:
    """A fault of a simulated engine."""
    await stage.post(f"http://127.0.0.1:{stage.ports[engine]}/sim/fault", {"mode": mode, **parameters})


async def behave(stage: Stage, engine: str) -> None:
    """No fault any more."""
    await stage.delete(f"http://127.0.0.1:{stage.ports[engine]}/sim/fault")


async def engine_of(stage: Stage, control: str, name: str) -> fleet_pb2.EngineStatus:
    """What control shows of an engine."""
    status = await stage.status(control)
    return next(engine for engine in status.engines if engine.id == name)


async def explained(control: str, name: str) -> Sequence[str]:
    """The lines of `explain`."""
    async with grpc.aio.insecure_channel(control, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        answer = await stub.ExplainEngine(fleet_pb2.ExplainEngineRequest(engine_id=name), timeout=30)
    return list(answer.lines)


async def ejected(program: Program, engine: str) -> dict[str, Any]:
    """The event of its ejection."""
    found: list[dict[str, Any]] = await until(
        lambda: told(program, "engine_ejected", engine), lambda: f"{engine} is out\n{program.tail()}"
    )
    return found[0]


async def serving(stage: Stage, control: str, *names: str) -> None:
    """Wait until these engines serve."""

    async def all_serve() -> bool:
        status = await stage.status(control)
        return all(engine.phases for engine in status.engines if engine.id in names)

    await until(all_serve, f"{', '.join(names)} serve")
