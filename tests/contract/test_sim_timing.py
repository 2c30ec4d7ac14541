"""The timing knobs of a simulated engine: each has its effect on the wire. Lower bounds are exact, upper ones loose."""

import asyncio
import time

import pytest

from narwhal.sim.openai_stream import Timing
from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import sim_engine
from narwhal.sim.text import count_tokens
from tests.metronome import Metronome
from tests.sim.legs import COMPLETIONS, LONG, prefill, prompt
from tests.sim.raw import Answer, ask


def arrivals(answer: Answer) -> list[float]:
    """When each event came, measured from the first."""
    times: list[float] = []
    seen = b""
    for data, at in zip(answer.segments, answer.arrivals_s, strict=False):
        seen += data
        times += [at] * (seen.count(b"data: ") - len(times))
    return [at - times[0] for at in times]


async def test_prefill_time_has_a_base_and_a_part_per_token() -> None:
    async with sim_engine(prefill_base_ms=100.0, prefill_ms_per_token=5.0) as engine:
        began = time.monotonic()
        await prefill(engine.url, prompt())
        assert time.monotonic() - began >= 0.1 + count_tokens(LONG.encode()) * 0.005
        answer = await ask(engine.url, "POST", COMPLETIONS, prompt("x", stream=True))
        assert answer.headers_s is not None
        assert answer.headers_s < 0.1 <= answer.end_s  # headers do not wait for the prefill


@pytest.mark.parametrize("stream", [False, True])
async def test_time_per_output_token(stream: bool) -> None:
    async with sim_engine(prefill_base_ms=0.0, tpot_ms=25.0) as engine:
        answer = await ask(engine.url, "POST", COMPLETIONS, prompt(max_tokens=21, stream=stream))
        assert answer.end_s >= 20 * 0.025
        if stream:
            times = arrivals(answer)
            assert times[10] >= 10 * 0.025 - 0.005
            assert len(set(times)) > 15  # they came one by one


async def test_late_steps_do_not_delay_those_after_them() -> None:
    async with sim_engine(prefill_base_ms=0.0, tpot_ms=10.0) as engine:
        leg = asyncio.create_task(ask(engine.url, "POST", COMPLETIONS, prompt(max_tokens=151, stream=True)))
        await engine.wait_for(lambda e: e.state()["in_flight"] == 1)
        with Metronome() as metronome:
            time.sleep(1.2)  # noqa: ASYNC251  the whole loop stands still, engine and client
            answer = await leg
        assert answer.end_s >= 1.5
        assert answer.end_s - metronome.total_s < 2.6  # 2.7 if the steps after the pause had waited for it


def test_jitter_varies_by_its_share_and_follows_the_seed() -> None:
    def steps(seed: int, number: int) -> list[float]:
        timing = Timing(EngineOptions(tpot_ms=10.0, jitter=0.2, seed=seed), number, 1.0)
        return [timing.step_s() for _ in range(200)]

    first = steps(1, 1)
    assert all(0.008 <= step <= 0.012 for step in first)
    assert max(first) - min(first) > 0.003
    assert first == steps(1, 1)
    assert first != steps(2, 1)
    assert first != steps(1, 2)
    exact = Timing(EngineOptions(tpot_ms=10.0), 1, 3.0)
    assert [exact.step_s() for _ in range(3)] == [0.03] * 3


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"tpot_ms": -1.0}, "tpot_ms: must not be negative"),
        ({"jitter": 1.0}, "jitter: must be at least 0 and below 1"),
        ({"block_size": 0}, "block_size: must be at least 1"),
        ({"id": ""}, "id: must not be empty"),
        ({"home_handoffs": "hope"}, "home_handoffs: must be answer or fail"),
        ({"kv_load_failure_policy": "hope"}, "kv_load_failure_policy: must be fail or recompute"),
    ],
)
def test_options_that_make_no_sense_are_refused(bad: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineOptions(**bad)  # type: ignore[arg-type]


async def test_a_slow_reader_gets_everything_and_costs_no_memory() -> None:
    async with sim_engine(prefill_base_ms=0.0, tpot_ms=0.0) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port, limit=2**14)
        body = b'{"prompt": "a", "max_tokens": 30000, "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.sleep(0.3)
        assert engine.requests()[0]["outcome"] == "running"  # it waits for the reader
        raw = b""
        while not raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            raw += await reader.read(2**20)
        writer.close()
        await writer.wait_closed()
        assert raw.count(b"data: ") == 30001
        await engine.wait_for(lambda e: e.requests()[0]["outcome"] == "answered")
