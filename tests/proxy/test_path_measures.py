"""What a worker measures of its legs, on simulated engines whose times are known, and what of it the report carries."""

import asyncio

import pytest

from narwhal.connectors.usage import OUTPUT_TOKENS, PROMPT_TOKENS, tokens_said
from narwhal.measures import LegMeasures, Measure, Sketch
from narwhal.proxy import measuring as measuring_module
from narwhal.proxy.backlog import Backlog
from narwhal.proxy.measuring import Measuring
from narwhal.proxy.outcome import LegKind
from narwhal.proxy.stream import StreamRelay
from narwhal.proxy.witness import Leg
from narwhal.reports import ProxyKey
from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import sim_engines
from narwhal.vocabulary import Outcome, Phase, RequestResult
from tests.proxy.harness import MODEL, Path, data_path, entry, on_uvloop, placed, until

MEASURED = [
    EngineOptions(id=name, prefill_base_ms=60.0, prefill_ms_per_token=0.0, tpot_ms=20.0, first_pull_s=0.0)
    for name in ("p", "d")
]
PROMPT = "ten words of a prompt that is no longer than"
ME = ProxyKey(id="p", slot=0, boot=1)


def taken(path: Path) -> dict[str, LegMeasures]:
    now = asyncio.get_running_loop().time()
    return {m.engine: m for m in path.data.measuring.take(now)[0]}


def only(measures: LegMeasures, measure: Measure) -> float:
    """The one value that was counted."""
    sketch = measures.sketches[measure]
    assert sketch.total == 1
    value = sketch.quantile(0.5)
    assert value is not None
    return value


@on_uvloop
async def test_a_stream_is_measured_on_both_its_engines() -> None:
    async with sim_engines(*MEASURED) as (p, d), data_path(placed({"p": p.url}, {"d": d.url})) as path:
        response = await path.post(prompt=PROMPT, max_tokens=11, stream=True)
        assert response.status == 200
        await until(lambda: path.reporter.results == [RequestResult.SERVED])
        measures = taken(path)
    prefill, decode = measures["p"], measures["d"]
    assert (prefill.phase, decode.phase) == (Phase.PREFILL, Phase.DECODE)
    assert 0.055 <= only(prefill, Measure.FIRST) <= 0.5
    assert only(prefill, Measure.WAIT) <= 0.05
    assert only(prefill, Measure.PROMPT) == pytest.approx(10, abs=2)
    assert 0.018 <= only(decode, Measure.FIRST) <= 0.4
    assert 0.018 <= only(decode, Measure.STEP) <= 0.05
    assert only(decode, Measure.OUTPUT) == pytest.approx(11, abs=0.6)
    assert (prefill.waiting, decode.waiting) == (0, 0)


@on_uvloop
async def test_an_answer_at_once_is_measured_by_its_usage() -> None:
    async with sim_engines(*MEASURED) as (p, d), data_path(placed({"p": p.url}, {"d": d.url})) as path:
        assert (await path.post(prompt=PROMPT, max_tokens=11)).status == 200
        decode = taken(path)["d"]
    assert 0.018 <= only(decode, Measure.STEP) <= 0.05
    assert only(decode, Measure.OUTPUT) == pytest.approx(11, abs=0.6)
    assert Measure.FIRST not in decode.sketches


@pytest.mark.rule("H5")
@pytest.mark.parametrize("stream", [False, True])
@on_uvloop
async def test_choices_that_come_side_by_side_are_no_measure_of_a_token(stream: bool) -> None:
    """They would make the engine look as many times faster, and the next single choices as many times slower."""
    async with sim_engines(*MEASURED) as (p, d), data_path(placed({"p": p.url}, {"d": d.url})) as path:
        assert (await path.post(prompt=PROMPT, max_tokens=11, n=4, stream=stream)).status == 200
        await until(lambda: path.reporter.results == [RequestResult.SERVED])
        assert path.data.metrics.tpot_seconds.total == 0
        assert set(taken(path)) == {"p"}


@on_uvloop
async def test_legs_that_wait_for_their_first_token_are_counted() -> None:
    slow = [EngineOptions(id=name, prefill_base_ms=5000.0) for name in ("p", "d")]
    async with sim_engines(*slow) as (p, d), data_path(placed({"p": p.url}, {"d": d.url})) as path:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        clients = [asyncio.create_task(path.session.post(f"{path.url}/v1/completions", json=body)) for _ in range(3)]
        await until(lambda: path.data.vigil.running == 3)
        measures = taken(path)
        assert (measures["p"].waiting, measures["p"].sketches) == (3, {})
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await until(lambda: path.data.vigil.running == 0)
        assert taken(path) == {}


@on_uvloop
async def test_a_stream_is_sampled_while_it_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has grown slow is told of before its long answers are over."""
    monkeypatch.setattr(measuring_module, "SAMPLE_S", 0.1)
    async with sim_engines(*MEASURED) as (p, d), data_path(placed({"p": p.url}, {"d": d.url})) as path:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "stream": True}
        async with path.session.post(f"{path.url}/v1/completions", json=body) as response:
            assert await response.content.readany()
            steps = Sketch()

            def sampled() -> bool:
                decode = taken(path).get("d")
                steps.merge(decode.sketches.get(Measure.STEP, Sketch()) if decode is not None else Sketch())
                return steps.total >= 3

            await until(sampled)
            assert path.reporter.results == []
            assert 0.018 <= (steps.quantile(0.5) or 0.0) <= 0.05


class _Nobody:
    """Takes whatever a stream relay says."""

    def settle(self, *_: object, **__: object) -> None: ...
    def first_token(self) -> None: ...
    def write(self, data: bytes) -> None: ...


def stream() -> StreamRelay:
    nobody = _Nobody()
    return StreamRelay(nobody, nobody, nobody, b"", chunked=True)  # type: ignore[arg-type]


def leg(engine: str = "d", *, incarnation: int = 1, at: float = 0.0) -> Leg:
    placed_at = entry(engine, f"http://{engine}", Phase.DECODE, incarnation=incarnation)
    return Leg(placed_at, Phase.DECODE, LegKind.FIRST_TOKEN, at)


def steps(measuring: Measuring, now: float) -> list[float]:
    """The middles of the buckets of the time per token that was measured until now."""
    measures, _ = measuring.take(now)
    found = [m.sketches[Measure.STEP] for m in measures if Measure.STEP in m.sketches]
    return [Sketch({number: 1}).quantile(1.0) or 0.0 for sketch in found for number in sketch.counts]


def test_a_client_that_does_not_read_makes_no_slow_engine() -> None:
    measuring, relay = Measuring(0.0), stream()
    flow = measuring.first_token(leg(), relay, 1.0)
    relay.events = 11
    flow.slow = True
    assert steps(measuring, 7.0) == []
    relay.events = 61
    assert steps(measuring, 12.0) == [pytest.approx(0.1, rel=0.05)]


def test_a_stream_that_gives_nothing_is_sampled_as_slow() -> None:
    measuring, relay = Measuring(0.0), stream()
    flow = measuring.first_token(leg(), relay, 1.0)
    assert steps(measuring, 6.0) == [pytest.approx(5.0, rel=0.05)]
    measuring.ended(flow, 9.0)
    assert steps(measuring, 10.0) == []
    assert steps(measuring, 20.0) == []


def test_only_the_newest_incarnation_is_measured() -> None:
    """What waits for control stays bounded, and speaks of the engine as it is."""
    measuring = Measuring(0.0)
    for incarnation in (1, 2, 1):
        measuring.answered(leg(incarnation=incarnation), 1.0, 10)
    (measures,), span_s = measuring.take(3.0)
    assert (measures.incarnation, measures.sketches[Measure.STEP].total, span_s) == (2, 1, 3.0)


def test_what_was_measured_while_control_was_away_needs_no_more_room() -> None:
    measuring = Measuring(0.0)
    for n in range(100_000):
        measuring.answered(leg(f"d{n % 3}"), 0.5 + n % 7, 10)
    measures, span_s = measuring.take(600.0)
    assert (len(measures), span_s) == (3, 600.0)
    assert sum(m.sketches[Measure.STEP].total for m in measures) == 100_000


@pytest.mark.rule("S6")
def test_measures_go_with_a_report_and_are_not_repeated_with_it() -> None:
    backlog = Backlog(ME)
    measures = (LegMeasures(engine="d", phase=Phase.DECODE, incarnation=1, waiting=2),)
    backlog.merge("d", Phase.DECODE, 1, Outcome.STREAM_COMPLETE)
    batch = backlog.cut(measures, 1.5)
    assert batch is not None
    assert (batch.measures, batch.measured_s) == (measures, 1.5)
    (kept,) = backlog.sent
    assert (kept.sequence, kept.runs) == (batch.sequence, batch.runs)
    assert (kept.measures, kept.measured_s) == ((), 0.0)


def test_measures_alone_make_a_report() -> None:
    backlog = Backlog(ME)
    assert backlog.cut((), 1.0) is None
    assert backlog.cut((LegMeasures(engine="d", phase=Phase.DECODE, incarnation=1, waiting=2),), 1.0) is not None


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"usage":{"prompt_tokens":7,"total_tokens":18,"completion_tokens":11}}', 11),
        (b'{"usage": {"completion_tokens": 1234, "prompt_tokens": 7}}', 1234),
        (b'{"choices":[{"text":"\\"completion_tokens\\":5"}],"usage":null}', 0),
        (b'{"usage":{"completion_tokens":null}}', 0),
        (b"", 0),
    ],
)
def test_tokens_are_found_where_the_engine_says_them(answer: bytes, tokens: int) -> None:
    assert tokens_said(answer, OUTPUT_TOKENS) == tokens
    assert tokens_said(answer.replace(b"completion", b"prompt", 1), PROMPT_TOKENS) in (tokens, 7)
