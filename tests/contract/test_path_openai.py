"""The official client against the data path and simulated engines: what an application sees."""

import asyncio

import openai
import pytest

from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import sim_engines
from narwhal.sim.text import expected_chat_text, expected_text
from tests.metronome import Metronome
from tests.proxy.harness import data_path, on_uvloop, placed, settings, until

PROMPT = "the narwhal dives under the ice " * 3
MESSAGES = [{"role": "user", "content": "how deep?"}]


@pytest.mark.rule("V5")
@on_uvloop
async def test_both_routes_streaming_and_not() -> None:
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d", tpot_ms=1.0)) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url})) as path,
        openai.AsyncOpenAI(base_url=path.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["sim-model"]
        text = expected_text(PROMPT, max_tokens=9)
        whole = await client.completions.create(model="sim-model", prompt=PROMPT, max_tokens=9)
        assert whole.choices[0].text == text
        stream = await client.completions.create(model="sim-model", prompt=PROMPT, max_tokens=9, stream=True)
        assert "".join([event.choices[0].text async for event in stream]) == text
        said = expected_chat_text(MESSAGES, max_tokens=9)
        answer = await client.chat.completions.create(model="sim-model", messages=MESSAGES, max_tokens=9)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == said
        options = {"include_usage": True}
        events = await client.chat.completions.create(  # type: ignore[call-overload]
            model="sim-model", messages=MESSAGES, max_tokens=9, stream=True, stream_options=options
        )
        seen = [event async for event in events]
        assert "".join(event.choices[0].delta.content or "" for event in seen if event.choices) == said
        assert seen[-1].usage.completion_tokens == 9
        totals = p.totals()
        assert (totals["issued"], totals["pulled"], totals["double_pulls"], totals["late_pulls"]) == (4, 4, 0, 0)


@pytest.mark.rule("V8")
@on_uvloop
async def test_errors_are_the_clients_own_exceptions() -> None:
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d", tpot_ms=1.0)) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url})) as path,
        openai.AsyncOpenAI(base_url=path.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="another", prompt=PROMPT)
        assert missing.value.code == "model_not_found"
        await d.set_fault("cut", after=2)
        stream = await client.completions.create(model="sim-model", prompt=PROMPT, max_tokens=9, stream=True)
        with pytest.raises(openai.APIError, match="decode engine failed"):
            [event async for event in stream]
        path.feed.reason = "maintenance"
        with pytest.raises(openai.InternalServerError) as closed:
            await client.completions.create(model="sim-model", prompt=PROMPT)
        assert (closed.value.status_code, closed.value.code) == (503, "maintenance")


@pytest.mark.case("G1")
@pytest.mark.rule("V2")
@on_uvloop
async def test_case_G1_a_saturated_proxy_is_waited_for_as_long_as_it_says() -> None:
    async with (
        sim_engines(EngineOptions(id="p"), EngineOptions(id="d", tpot_ms=1.0)) as (p, d),
        data_path(placed({"p": p.url}, {"d": d.url}), settings(serving={"max_connections": 1})) as path,
        openai.AsyncOpenAI(base_url=path.url + "/v1", api_key="none", max_retries=2) as client,
    ):
        await p.set_fault("delay", seconds=0.5, count=1)
        first = asyncio.create_task(client.completions.create(model="sim-model", prompt=PROMPT, max_tokens=2))
        await until(lambda: path.data.admission.taken == 1)
        with Metronome() as metronome:
            second = await client.completions.create(model="sim-model", prompt=PROMPT, max_tokens=2)
        assert metronome.took_s > 0.9
        assert metronome.ran_s < 3.0
        assert second.choices[0].text == (await first).choices[0].text
        assert path.data.metrics.requests["/v1/completions", "429"] == 1
