"""Answers that are not streamed, on an engine whose core stops for longer than the lease of the KV that it has yet to
read, and then goes on: it would answer them with the text of blocks that are others' by then."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from narwhal.sim.text import expected_text
from tests.process.faults import INTERVAL_S, TOKEN_S, at, behave, misbehave, serving, short, told
from tests.process.harness import MODEL, WAIT_S, Stage, until

SILENT_S = 1.5
OLD_S, LEASE_S = 4.0, 8.0  # a handoff that is older is not sent on; or is gone
BUSY_S = 2.0  # what a busy machine adds
TOKENS = 6


@dataclass
class Readers:
    """What clients got that stream nothing: how long each request took, and what was not the right text."""

    took_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@asynccontextmanager
async def reading(address: str, clients: int = 8) -> AsyncIterator[Readers]:
    """Clients that ask for whole answers one after the other until the block ends, and look at each text."""
    seen, stop = Readers(), asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:

        async def read(number: int) -> None:
            while not stop.is_set():
                prompt = f"reader {number} has had {len(seen.took_s)} answers " * 4
                body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS}
                began = time.monotonic()
                async with session.post(f"http://{address}/v1/completions", json=body) as answer:
                    got = await answer.json()
                seen.took_s.append(time.monotonic() - began)
                if answer.status != 200 or got["choices"][0]["text"] != expected_text(prompt, TOKENS):
                    seen.wrong.append(f"{answer.status} {got}")

        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(read(number))
            try:
                yield seen
            finally:
                stop.set()


@pytest.mark.rule("V11", "V6", "V4", "F10")
@pytest.mark.parametrize("probe_s", [TOKEN_S, 20.0], ids=["probe within the lease", "probe beyond the lease"])
async def test_a_core_that_goes_on_after_the_lease_answers_nobody(stage: Stage, probe_s: float) -> None:
    """For as long as its probe may take, here by the time that a health answer has, the engine is held and not out."""
    stage.write_fleet(
        **short(
            recovery={"silent_leg_s": SILENT_S, "readmit_every": 4},
            engine={
                "kv_lease_s": LEASE_S,
                "decode_read_timeout_s": 60.0,
                "health_timeout_s": probe_s,
            },
            serving={"handoff_max_age_s": OLD_S, "max_attempts": 3, "queue_capacity": 64, "queue_timeout_s": 30.0},
        )
    )
    # Prefills take most of the time: when the core stops, the most of what it is given is still to come.
    await stage.engines(arguments=("--kv-lease-s", str(LEASE_S), "--prefill-base-ms", "100"))
    serve = await stage.serve()

    async def asked() -> set[str]:
        _, body = await stage.get(f"127.0.0.1:{stage.ports['d1']}", "/sim/requests?phase=decode")
        return {r["request_id"] for r in json.loads(body)}

    async with reading(serve.at["http"]) as seen:
        await until(lambda: len(seen.took_s) >= 20, "clients are served")
        unread = (await stage.ledger())["expired"]
        stopped_at = time.time()
        await misbehave(stage, "d1", "core-stopped")
        known = await asked()

        async def waits() -> bool:
            return bool(await asked() - known)

        await until(waits, "the stopped engine was given something")

        async def lease_is_over() -> bool:
            return (await stage.ledger())["expired"] > unread

        await until(lease_is_over, "the lease of what it was given is over")
        assert bool(told(serve, "engine_ejected", "d1")) == (probe_s < LEASE_S)
        await behave(stage, "d1")
        await serving(stage, serve.at["grpc"], "d1")
        count = len(seen.took_s)
        await until(lambda: len(seen.took_s) >= count + 40, "clients are served by all again")
    assert not seen.wrong
    assert (await stage.ledger())["late_pulls"] == 0
    assert not told(serve, "engine_ejected", "d2")

    # Told of, probed for as long as that may take, out; or held for so long, and what it has not read is too old.
    legs = [e for e in serve.events("leg_failed") if e["engine"] == "d1"]
    stalled, late = ([at(e) for e in legs if e["outcome"] == outcome] for outcome in ("stalled", "read_timeout"))
    assert stalled
    assert late
    bound_s = max(SILENT_S + INTERVAL_S + TOKEN_S, OLD_S if probe_s > LEASE_S else 0.0)
    assert max(late) - stopped_at < LEASE_S
    assert SILENT_S < max(seen.took_s) < bound_s + 2 * INTERVAL_S + BUSY_S
