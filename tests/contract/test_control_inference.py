"""Inference probes against simulated engines: every end of a leg, and no KV left behind."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from narwhal.clock import RealClock
from narwhal.control.core.effects import ProbeInference, Target
from narwhal.control.core.events import InferenceAnswered, LegSeen
from narwhal.control.engine_client import EngineClient, ProbeSettings
from narwhal.control.inference import ProbedStream, probe_inference
from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import SimEngine, sim_engines
from narwhal.vocabulary import Outcome

SETTINGS = ProbeSettings(connections=1, connect_timeout_s=0.5, pool_timeout_s=0.2, keepalive_s=4.0)
Pair = tuple[SimEngine, SimEngine]


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with sim_engines(EngineOptions(id="p0"), EngineOptions(id="d0")) as (producer, consumer):
        yield producer, consumer


@pytest_asyncio.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient(SETTINGS)
    yield made
    await made.close()


async def probe(
    client: EngineClient, consumer: SimEngine, producer: SimEngine | None = None, *, silence_s: float = 0.4
) -> InferenceAnswered:
    def target(engine: SimEngine) -> Target:
        return Target(engine=engine.id, url=engine.url, incarnation=1)

    request = ProbeInference(
        engine="suspect",
        incarnation=4,
        number=9,
        model="sim-model",
        tokens=16,
        producer=target(producer) if producer is not None else None,
        consumer=target(consumer),
        silence_s=silence_s,
    )
    answer = await asyncio.wait_for(probe_inference(client, request, RealClock()), 20)
    assert (answer.engine, answer.incarnation, answer.number) == ("suspect", 4, 9)
    return answer


def ended(leg: LegSeen | None) -> Outcome | None:
    return leg.outcome if leg is not None else None


@pytest.mark.rule("F6", "F8")
async def test_a_transfer_reads_the_handoff_it_made_and_streams_sixteen_tokens(
    client: EngineClient, pair: Pair
) -> None:
    producer, consumer = pair
    for number in range(1, 4):
        answer = await probe(client, consumer, producer)
        assert (ended(answer.produced), ended(answer.consumed)) == (Outcome.HANDOFF, Outcome.STREAM_COMPLETE)
        totals = producer.totals()
        assert (totals["issued"], totals["pulled"]) == (number, number)
    assert consumer.requests()[-1]["tokens"] == 16
    prompts = {h["tokens"] for h in producer.ledger()["handoffs"]}
    assert min(prompts) > 16, "a prompt shorter than a block proves no transfer"


@pytest.mark.rule("H5")
async def test_a_probe_measures_the_pace_of_its_tokens_not_the_wait_for_the_first(
    client: EngineClient, pair: Pair
) -> None:
    producer, consumer = pair
    usual = await probe(client, consumer, producer, silence_s=3.0)
    await consumer.set_fault("slow-tokens", factor=6.0)
    await consumer.set_fault("slow-first-token", seconds=0.5)
    slow = await probe(client, consumer, producer, silence_s=3.0)
    assert usual.consumed is not None
    assert slow.consumed is not None
    # The simulated engine takes 5 ms for a token; several may come in one piece of the stream.
    assert 0.004 <= usual.consumed.step_s <= 0.02
    assert 0.027 <= slow.consumed.step_s <= 0.06
    assert slow.consumed.steps >= 10


@pytest.mark.rule("F6")
async def test_without_a_producer_one_engine_completes_alone(client: EngineClient, pair: Pair) -> None:
    producer, consumer = pair
    answer = await probe(client, consumer)
    assert (answer.produced, ended(answer.consumed)) == (None, Outcome.STREAM_COMPLETE)
    assert producer.requests() == []


@pytest.mark.rule("F6")
@pytest.mark.parametrize(("end", "outcome"), [(b"data: [DONE]", "stream_complete"), (b"data: [DO", "stream_cut")])
def test_a_probe_judges_the_end_of_a_stream_as_proxies_do(end: bytes, outcome: str) -> None:
    stream = ProbedStream()
    assert not stream.feed(b'data: {"choices": [{"text": "a"}]}\n\n' + end)
    stream.complete()  # nothing can follow: a marker needs no blank line
    assert stream.outcome == outcome


PREFILL = [
    ("status", {"status": 500}, Outcome.HTTP_5XX),
    ("status", {"status": 429}, Outcome.HTTP_429),
    ("status", {"status": 408}, Outcome.HTTP_408),
    ("status", {"status": 400}, Outcome.CLIENT_ERROR),
    ("wrong-model", {}, Outcome.WRONG_IDENTITY),
    ("hang", {}, Outcome.PREFILL_TIMEOUT),
    ("close-before-answer", {}, Outcome.RESET),
    ("cut-answer", {}, Outcome.ANSWER_CUT),
    ("bad-handoff", {}, Outcome.HANDOFF_UNUSABLE),
    ("refuse", {}, Outcome.REFUSED),
    ("frozen", {}, Outcome.PREFILL_TIMEOUT),
]


@pytest.mark.rule("F6")
@pytest.mark.parametrize(("fault", "params", "outcome"), PREFILL)
async def test_a_prefill_leg_that_fails_is_told_and_nobody_decodes(
    fault: str, params: dict[str, int], outcome: Outcome, client: EngineClient, pair: Pair
) -> None:
    producer, consumer = pair
    await producer.set_fault(fault, **params)
    answer = await probe(client, consumer, producer)
    assert (ended(answer.produced), answer.consumed) == (outcome, None)
    assert answer.produced is not None
    assert answer.produced.detail.startswith("prefill")
    assert consumer.requests() == []


DECODE = [
    ("status", {"status": 500}, Outcome.HTTP_5XX),
    ("status", {"status": 429}, Outcome.HTTP_429),
    ("hang-headers", {}, Outcome.FIRST_TOKEN_TIMEOUT),
    ("core-stopped", {}, Outcome.FIRST_TOKEN_TIMEOUT),
    ("hang", {}, Outcome.FIRST_TOKEN_TIMEOUT),
    ("stall", {}, Outcome.STREAM_SILENT),
    ("cut", {}, Outcome.STREAM_CUT),
    ("cut", {"how": "reset"}, Outcome.STREAM_CUT),
    ("no-done", {}, Outcome.STREAM_CUT),
    ("finish-silence", {}, Outcome.STREAM_SILENT),
    ("error-event", {}, Outcome.ERROR_EVENT),
    ("error-event", {"after": 3}, Outcome.ERROR_EVENT),
    ("done-without-tokens", {}, Outcome.MARKER_WITHOUT_TOKEN),
    ("bad-framing", {}, Outcome.STREAM_SILENT),  # the client library drops it and waits for more: the same class
    ("transfer-fails", {}, Outcome.ERROR_EVENT),
    ("close-before-answer", {}, Outcome.RESET),
    ("frozen", {}, Outcome.FIRST_TOKEN_TIMEOUT),
]


@pytest.mark.rule("F6")
@pytest.mark.case("C1", "C4")
@pytest.mark.parametrize(("fault", "params", "outcome"), DECODE)
async def test_a_decode_leg_that_fails_is_told(
    fault: str, params: dict[str, object], outcome: Outcome, client: EngineClient, pair: Pair
) -> None:
    producer, consumer = pair
    await consumer.set_fault(fault, **params)
    answer = await probe(client, consumer, producer)
    assert (ended(answer.produced), ended(answer.consumed)) == (Outcome.HANDOFF, outcome)
    assert answer.consumed is not None
    assert answer.consumed.detail.startswith("decode")


@pytest.mark.rule("F8")
@pytest.mark.parametrize(("fault", "outcome"), [("refuse", Outcome.REFUSED), ("killed", Outcome.REFUSED)])
async def test_a_consumer_that_cannot_be_reached_leaves_no_kv_behind(
    fault: str, outcome: Outcome, client: EngineClient, pair: Pair
) -> None:
    producer, consumer = pair
    await consumer.set_fault(fault)
    answer = await probe(client, consumer, producer)
    assert (answer.produced, ended(answer.consumed)) == (None, outcome)
    assert producer.totals()["issued"] == 0


@pytest.mark.rule("F6")
async def test_a_slow_but_steady_stream_passes(client: EngineClient, pair: Pair) -> None:
    producer, consumer = pair
    await consumer.set_fault("dribble", segment=8, gap_ms=5)
    answer = await probe(client, consumer, producer, silence_s=1.0)
    assert ended(answer.consumed) is Outcome.STREAM_COMPLETE


@pytest.mark.rule("F6", "V1", "L3")
async def test_without_a_control_connection_a_probe_is_inconclusive(client: EngineClient, pair: Pair) -> None:
    producer, consumer = pair
    async with client.seat("somebody else's"):
        answer = await probe(client, consumer, producer)
    assert (answer.produced, ended(answer.consumed)) == (None, Outcome.LOCAL)
    assert producer.requests() == []


@pytest.mark.rule("V9")
async def test_an_idle_connection_that_the_engine_closes_fails_no_probe(client: EngineClient, pair: Pair) -> None:
    producer, consumer = pair
    for engine in pair:
        await engine.set_fault("idle-close", seconds=0.05)
    for pause in (0.0, 0.045, 0.05, 0.055, 0.06, 0.2):
        assert (await client.get(consumer.url, "/health", timeout_s=2.0)).status == 200
        await asyncio.sleep(pause)
        assert ended((await probe(client, consumer, producer)).consumed) is Outcome.STREAM_COMPLETE
