"""A client's completion through the real processes: the official client, control, proxy, engines."""

import json
import signal

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from narwhal._pb import fleet_pb2
from narwhal.sim.text import expected_chat_text, expected_text
from tests.process.harness import MODEL, Stage, load, until

MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What is a narwhal's tusk for?"}]


def client_of(address: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0, timeout=90)


@pytest.mark.rule("V5", "S1", "P1")
async def test_the_official_client_completes_both_routes_streamed_and_not(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    serve = await stage.serve("--workers", "2")

    async def joined() -> bool:
        return all(engine.phases for engine in (await stage.status(serve.at["grpc"])).engines)

    await until(joined, "every engine has passed its gate")
    before = await stage.ledger()  # the gates' own transfers
    async with client_of(serve.at["http"]) as client:
        assert [m.id for m in (await client.models.list()).data] == [MODEL]
        for number in range(4):
            prompt = f"tell me of number {number}"
            whole = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=24)
            assert whole.choices[0].text == expected_text(prompt, 24)
            stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, stream=True)
            assert "".join([event.choices[0].text async for event in stream]) == expected_text(prompt, 24)
            chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20 + number)
            assert chat.choices[0].message.content == expected_chat_text(MESSAGES, 20 + number)
            events = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=20 + number, stream=True
            )
            parts = [event.choices[0].delta.content or "" async for event in events if event.choices]
            assert "".join(parts) == expected_chat_text(MESSAGES, 20 + number)

    ledger = await stage.ledger()
    assert (ledger["issued"] - before["issued"], ledger["pulled"] - before["pulled"]) == (16, 16)
    assert ledger["issued"] == ledger["pulled"]
    assert (ledger["late_pulls"], ledger["double_pulls"], ledger["unknown_pulls"], ledger["open"]) == (0, 0, 0, 0)

    def outcomes(status: fleet_pb2.FleetStatus) -> dict[str, int]:
        found: dict[str, int] = {}
        for engine in status.engines:
            for outcome, count in engine.outcomes.items():
                found[outcome] = found.get(outcome, 0) + count
        return found

    async def counted() -> fleet_pb2.FleetStatus | None:
        status = await stage.status(serve.at["grpc"])
        return status if status.totals.served >= 16 and sum(outcomes(status).values()) >= 32 else None

    status = await until(counted, "control counts what was served")
    assert status.totals.served == 16
    assert outcomes(status) == {"handoff": 16, "stream_complete": 8, "answer_complete": 8}
    assert (status.totals.failed, status.totals.rejected, status.totals.cancelled) == (0, 0, 0)


@pytest.mark.rule("P6", "P10")
async def test_workers_are_listed_current_and_leave_with_a_goodbye(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"], "--workers", "2", "--id", "edge")
    await stage.ready(proxy.at["admin"])

    async def current() -> bool:
        known = await stage.proxies(control.at["grpc"])
        return len(known) == 2 and all(p.connected and p.lag == 0 and p.acked_version for p in known)

    await until(current, "both workers have acknowledged the newest placement")
    known = await stage.proxies(control.at["grpc"])
    assert [(p.proxy.id, p.proxy.slot, p.address) for p in known] == [
        ("edge", 0, proxy.at["http"]),
        ("edge", 1, proxy.at["http"]),
    ]
    proxy.signal(signal.SIGTERM)
    assert await proxy.ended() == 0

    async def gone() -> bool:
        return not await stage.proxies(control.at["grpc"])

    await until(gone, "no proxy is known any more")


async def test_the_admin_port_speaks_for_all_workers(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"], "--workers", "2")
    await stage.ready(proxy.at["admin"])
    async with load(proxy.at["http"], clients=8) as seen:
        await until(lambda: len(seen.statuses) >= 60, "some load")
    assert set(seen.statuses) == {200}
    samples: dict[str, str] = {}

    async def counted() -> bool:
        """A client may have its answer a moment before the worker has counted it."""
        status, text = await stage.get(proxy.at["admin"], "/metrics")
        assert status == 200
        samples.update(dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")))
        total = samples['narwhal_requests_total{code="200",fleet="test",route="/v1/completions"}']
        return float(total) >= len(seen.statuses)

    await until(counted, "every request is counted")
    assert float(samples['narwhal_requests_total{code="200",fleet="test",route="/v1/completions"}']) == len(
        seen.statuses
    )
    assert float(samples['narwhal_request_seconds_count{fleet="test"}']) == len(seen.statuses)
    decoded = sum(float(n) for key, n in samples.items() if 'result="answer_complete"' in key)
    assert decoded == len(seen.statuses)
    status, text = await stage.get(proxy.at["admin"], "/health")
    assert (status, sorted(json.loads(text)["workers"])) == (200, ["0", "1"])
