"""Operators' calls over real gRPC: what they answer, when, and what they leave behind."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from narwhal._pb import fleet_pb2, outcome_pb2, placement_pb2
from narwhal.control.core.effects import ProbeInference
from narwhal.control.core.events import InferenceAnswered, LegSeen
from narwhal.control.probes import Probes
from narwhal.vocabulary import Outcome, Phase
from tests.contract.control_kit import Control, Engines, Proxy, control, identity, plan_of, soon, until, until_answer
from tests.contract.model_store import Medium

FLEET = {"p0": Phase.PREFILL, "d0": Phase.DECODE, "d1": Phase.DECODE}
REFUSED = "decode leg: refused (connecting: nobody listens), on edge/0, handoff of p0, request r-3"
Probing = grpc.aio.UnaryUnaryCall[fleet_pb2.ProbeEngineRequest, fleet_pb2.ProbeEngineResponse]
Explain, Eject, Probe = fleet_pb2.ExplainEngineRequest, fleet_pb2.EjectEngineRequest, fleet_pb2.ProbeEngineRequest


class Asked:
    """Inference probes that the core asked for; answered by hand."""

    def __init__(self) -> None:
        self.effects: list[ProbeInference] = []

    async def next(self, process: Control, consumed: Outcome, detail: str = "") -> None:
        """Answers the oldest that is open: the prefill leg worked, the decode leg came to `consumed`."""
        await until(lambda: self.effects, what="an inference probe")
        effect = self.effects.pop(0)
        produced = LegSeen(outcome=Outcome.HANDOFF) if effect.producer is not None else None
        loop = process.leader.loop
        assert loop is not None
        loop.post(
            InferenceAnswered(
                engine=effect.engine,
                incarnation=effect.incarnation,
                number=effect.number,
                produced=produced,
                consumed=LegSeen(outcome=consumed, detail=detail),
            )
        )

    async def until_done(self, process: Control, call: Probing, consumed: Callable[[ProbeInference], Outcome]) -> None:
        """Answers every probe until the call is."""
        while await until(lambda: self.effects or call.done()) and not call.done():
            await self.next(process, consumed(self.effects[0]), "cut after 1 token")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    probes, start = Asked(), Probes.start

    def intercept(self: Probes, request: Any) -> None:
        if isinstance(request, ProbeInference):
            probes.effects.append(request)
        else:
            start(self, request)

    monkeypatch.setattr(Probes, "start", intercept)
    return probes


def running(served: Engines, medium: Medium, **core: Any) -> AbstractAsyncContextManager[Control]:
    """A control process of three engines whose gates are tried once, then not again of themselves."""
    plan = plan_of(served, FLEET)
    return control(served, medium=medium, plan=replace(plan, core=replace(plan.core, readmit_every=10_000, **core)))


@pytest_asyncio.fixture
async def process(served: Engines, medium: Medium, asked: Asked) -> AsyncIterator[Control]:
    async with running(served, medium) as made:
        await until(lambda: made.serving() == set(FLEET))
        yield made


async def refused(call: Awaitable[object]) -> tuple[grpc.StatusCode, str, str]:
    """How a call was refused: code, words, and the reason in the details."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await soon(call)
    info = error_details_pb2.ErrorInfo()
    for key, value in error.value.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            assert status_pb2.Status.FromString(value).details[0].Unpack(info)
    return error.value.code(), error.value.details() or "", info.reason


async def report(process: Control, engine: str, outcome: outcome_pb2.LegOutcome, detail: str, count: int = 3) -> None:
    """A proxy reports failed decode legs, and is acknowledged."""
    runs = [
        outcome_pb2.OutcomeRun(
            engine_id=engine,
            phase=placement_pb2.PHASE_DECODE,
            incarnation=1,
            outcome=outcome,
            count=1,
            failure=outcome_pb2.LegFailure(
                producer_id="p0", producer_incarnation=1, detail=detail, request_id=f"r-{number}", elapsed_s=0.1
            ),
        )
        for number in range(1, count + 1)
    ]
    call = process.outcomes.ReportOutcomes()
    await soon(call.write(outcome_pb2.ReportBatch(proxy=identity("edge"), sequence=1, runs=runs)))
    assert isinstance(await soon(call.read()), outcome_pb2.ReportAck)
    call.cancel()


def stored(medium: Medium) -> dict[str, Any]:
    assert medium.document is not None
    document: dict[str, Any] = json.loads(medium.document)
    return document


def traces(process: Control, medium: Medium) -> tuple[object, ...]:
    """Everything that a command could leave behind."""
    placement = process.publisher.placement
    assert placement is not None
    durable = stored(medium)
    loop = process.leader.loop
    assert loop is not None
    states = tuple((e.id, e.incarnation, e.phases, tuple(h.kind for h in e.holds)) for e in loop.view().engines)
    return placement.order, placement.engines, durable["engines"].keys(), states, process.observer.sequence


# --- explain ----------------------------------------------------------------------------------------------------------


async def test_an_engine_that_serves_explains_itself(process: Control) -> None:
    answer = await soon(process.fleet.ExplainEngine(Explain(engine_id="d0")))
    assert answer.lines[:2] == [
        "engine d0 is eligible: serves decode (role decode, incarnation 1)",
        "evidence: none now",
    ]
    assert answer.engine.id == "d0"
    assert list(answer.engine.phases) == [placement_pb2.PHASE_DECODE]
    assert [told.message for told in answer.history] == ["engine d0 joined as incarnation 1"]


@pytest.mark.rule("F3")
async def test_an_ejection_is_explained_by_what_the_proxy_saw(process: Control) -> None:
    await report(process, "d0", outcome_pb2.LEG_OUTCOME_REFUSED, "connecting: nobody listens")
    answer = await soon(process.fleet.ExplainEngine(Explain(engine_id="d0")))
    why = "3 connection failures in a row (refused)"
    assert answer.lines[0] == "engine d0 is not eligible: ejected (role decode, incarnation 1)"
    assert answer.lines[1].startswith("ejected for 0.")
    assert answer.lines[1].endswith(f" s: {why}")
    assert answer.lines[2].startswith("its gate is tried next in ")
    assert answer.lines[3].startswith("evidence: 3 connection failures in a row (acted upon at 3), the last 0.")
    assert answer.lines[3].endswith(f" s ago: {REFUSED}")
    told = f"engine d0 ejected (connection): 3 connection failures in a row, the last: {REFUSED}"
    assert answer.history[0].message == told

    engine = answer.engine
    assert not engine.phases
    assert [(hold.kind, hold.reason) for hold in engine.holds] == [("ejected", why)]
    (evidence,) = engine.evidence
    assert (evidence.failure_class, evidence.streak, evidence.limit, evidence.total) == ("connection", 3, 3, 3)
    last = evidence.last
    assert (last.words, last.outcome, last.detail) == (REFUSED, "refused", "connecting: nobody listens")
    assert (last.phase, last.proxy, last.producer_id, last.request_id) == (
        placement_pb2.PHASE_DECODE, "edge/0", "p0", "r-3",
    )  # fmt: skip
    assert 0 <= last.age_s < 10
    assert engine.HasField("gate_in_s")


@pytest.mark.rule("F6")
async def test_a_suspicion_is_explained_with_the_probe_that_is_under_way(process: Control, asked: Asked) -> None:
    await report(process, "d0", outcome_pb2.LEG_OUTCOME_STREAM_CUT, "closed after 3 tokens")
    engine = (await soon(process.fleet.ExplainEngine(Explain(engine_id="d0")))).engine
    assert [hold.kind for hold in engine.holds] == ["verification"]
    assert engine.suspicion == "inference probe under way"
    assert list(engine.producer_ids) == ["p0"]
    assert not engine.HasField("gate_in_s")


@pytest.mark.case("C8")
async def test_the_health_that_was_measured_is_shown(served: Engines, medium: Medium) -> None:
    async with running(served, medium, liveness_every=1) as process:
        await until(lambda: process.serving() == set(FLEET))
        served.status["d1"] = 404

        async def explained() -> fleet_pb2.Explanation:
            return await process.fleet.ExplainEngine(Explain(engine_id="d1"))

        answer = await until_answer(explained, lambda a: sum(bool(h.outcome) for h in a.engine.health) > 1)
        newest = answer.engine.health[0]
        assert (newest.detail, newest.outcome) == ("GET /health answered 404", "client_error")
        assert 0 < newest.latency_s < 5
        (line,) = [line for line in answer.lines if line.startswith("health, newest first: ")]
        assert line.startswith("health, newest first: GET /health answered 404 after ")
        # Every probe was shown, and only the first of them was news.
        assert [told.message for told in answer.history].count("engine d1: GET /health answered 404") == 1


async def test_status_carries_the_same_facts(process: Control) -> None:
    await report(process, "d0", outcome_pb2.LEG_OUTCOME_REFUSED, "connecting: nobody listens")
    status = await soon(process.fleet.GetStatus(fleet_pb2.GetStatusRequest()))
    (engine,) = [engine for engine in status.engines if engine.id == "d0"]
    assert engine.evidence[0].last.words == REFUSED
    assert engine.gate_in_s > 0


# --- eject ------------------------------------------------------------------------------------------------------------


async def test_an_ejection_is_answered_when_it_is_stored(process: Control, medium: Medium) -> None:
    medium.gate = asyncio.Event()
    call = process.fleet.EjectEngine(Eject(engine_id="d0", reason="smells of smoke"))
    # Taking an engine out is published at once, whatever the store does.
    await until(lambda: process.serving() == {"p0", "d1"})
    assert not call.done()
    assert not [h for h in stored(medium)["engines"]["d0"]["holds"] if h["kind"] == "ejected"]
    medium.gate.set()
    answer = await soon(call)
    assert list(answer.told) == ["engine d0 ejected (operator): smells of smoke"]
    assert [h["kind"] for h in stored(medium)["engines"]["d0"]["holds"]] == ["ejected"]
    assert process.observer.after(0)[-1].record.message == answer.told[0]


async def test_an_ejection_that_cannot_be_stored_is_not_answered_with_done(process: Control, medium: Medium) -> None:
    medium.gate = asyncio.Event()
    call = process.fleet.EjectEngine(Eject(engine_id="d0"))
    await until(lambda: process.serving() == {"p0", "d1"})
    medium.expire()
    medium.gate.set()
    code, words, _ = await refused(call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert words.endswith("whether what was asked was done is not known")


async def test_a_dry_run_says_what_the_command_says_and_changes_nothing(process: Control, medium: Medium) -> None:
    await soon(process.fleet.EjectEngine(Eject(engine_id="d1", reason="first")))
    before = traces(process, medium)
    rehearsed = await soon(process.fleet.EjectEngine(Eject(engine_id="d0", reason="last", dry_run=True)))
    assert list(rehearsed.told) == ["engine d0 ejected (operator): last"]
    assert traces(process, medium) == before
    done = await soon(process.fleet.EjectEngine(Eject(engine_id="d0", reason="last")))
    assert done == rehearsed


@pytest.mark.rule("H3")
async def test_a_dry_run_shows_what_follows(process: Control) -> None:
    for engine in ("p0", "d1"):
        await soon(process.fleet.EjectEngine(Eject(engine_id=engine)))
    answer = await soon(process.fleet.EjectEngine(Eject(engine_id="d0", dry_run=True)))
    assert list(answer.told) == ["engine d0 ejected (operator): no reason given", "not ready: no eligible engines"]
    assert process.leader.readiness().reason == ""


# --- probe ------------------------------------------------------------------------------------------------------------


async def test_a_probe_is_answered_when_it_has_ended(process: Control, asked: Asked) -> None:
    call = process.fleet.ProbeEngine(Probe(engine_id="d0"))
    await asked.next(process, Outcome.STREAM_COMPLETE)
    assert not call.done()  # an engine that may do both is asked for both
    await asked.next(process, Outcome.STREAM_COMPLETE)
    answer = await soon(call)
    assert answer.verdict == "pass"
    assert answer.told[0] == "engine d0: inference probe begins (asked for by an operator)"
    assert answer.told[-1].startswith("engine d0: inference probe: pass: ")
    assert process.serving() == set(FLEET)


@pytest.mark.rule("F6")
async def test_a_failed_probe_ejects_and_says_so(process: Control, asked: Asked) -> None:
    call = process.fleet.ProbeEngine(Probe(engine_id="d0"))
    await asked.until_done(
        process, call, lambda p: Outcome.STREAM_CUT if p.consumer.engine == "d0" else Outcome.STREAM_COMPLETE
    )
    answer = await soon(call)
    assert answer.verdict == "fail"
    assert [words.partition("(")[0] for words in answer.told[-1:]] == ["engine d0 ejected "]
    assert "cut after 1 token" in answer.told[-1]
    assert process.serving() == {"p0", "d1"}


async def test_an_inconclusive_probe_is_no_pass(process: Control, asked: Asked) -> None:
    call = process.fleet.ProbeEngine(Probe(engine_id="d0"))
    await asked.until_done(process, call, lambda _: Outcome.HTTP_429)
    assert (await soon(call)).verdict == "inconclusive"
    assert process.serving() == set(FLEET)


async def test_an_engine_that_other_evidence_takes_out_meanwhile_has_failed(process: Control, asked: Asked) -> None:
    call = process.fleet.ProbeEngine(Probe(engine_id="d0"))
    await until(lambda: asked.effects)
    await report(process, "d0", outcome_pb2.LEG_OUTCOME_REFUSED, "connecting: nobody listens")
    answer = await soon(call)
    assert answer.verdict == "fail"
    assert answer.told[-1].startswith("engine d0 ejected (connection): 3 connection failures in a row")


@pytest.mark.rule("R1")
async def test_a_probe_of_an_engine_that_is_out_tries_its_gate(process: Control, served: Engines) -> None:
    await soon(process.fleet.EjectEngine(Eject(engine_id="d0")))
    served.status["d0"] = 503
    for _ in range(2):  # the same failure again is told again to who asked
        answer = await soon(process.fleet.ProbeEngine(Probe(engine_id="d0")))
        assert answer.verdict == "fail"
        assert list(answer.told) == [
            "engine d0: its gate is tried now (asked for by an operator)",
            "engine d0 is kept from coming back: check health: fail: GET /health answered 503",
        ]
    del served.status["d0"]
    answer = await soon(process.fleet.ProbeEngine(Probe(engine_id="d0")))
    assert (answer.verdict, answer.told[-1]) == ("pass", "engine d0 is back as incarnation 2")
    await until(lambda: process.serving() == set(FLEET))


async def test_a_dry_run_of_a_probe_begins_nothing(process: Control, medium: Medium, asked: Asked) -> None:
    before = traces(process, medium)
    answer = await soon(process.fleet.ProbeEngine(Probe(engine_id="d0", dry_run=True)))
    assert (answer.verdict, list(answer.told)) == (
        "",
        ["engine d0: inference probe begins (asked for by an operator)"],
    )
    assert traces(process, medium) == before
    assert not asked.effects


async def test_a_caller_that_leaves_does_not_end_the_probe(process: Control, asked: Asked) -> None:
    call = process.fleet.ProbeEngine(Probe(engine_id="d0"))
    await until(lambda: asked.effects)
    call.cancel()
    for _ in range(2):
        await asked.next(process, Outcome.STREAM_COMPLETE)
    await until(lambda: "probe_ended" in process.told())


async def test_the_end_of_the_term_ends_the_wait(process: Control, asked: Asked, medium: Medium) -> None:
    call = process.fleet.ProbeEngine(Probe(engine_id="d0"))
    await until(lambda: asked.effects)
    loop = process.leader.loop
    assert loop is not None
    loop.fence("the lease was lost")
    code, words, _ = await refused(call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "the lease was lost" in words


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dry_run", [False, True])
async def test_refusals_change_nothing(process: Control, medium: Medium, asked: Asked, dry_run: bool) -> None:
    await soon(process.fleet.EjectEngine(Eject(engine_id="d1")))
    probing = process.fleet.ProbeEngine(Probe(engine_id="d0"))
    await until(lambda: asked.effects)
    before = traces(process, medium)
    missing = (grpc.StatusCode.NOT_FOUND, "no engine d9 in this fleet", "NOT_FOUND")
    assert await refused(process.fleet.ExplainEngine(Explain(engine_id="d9"))) == missing
    assert await refused(process.fleet.EjectEngine(Eject(engine_id="d9", dry_run=dry_run))) == missing
    assert await refused(process.fleet.ProbeEngine(Probe(engine_id="d9", dry_run=dry_run))) == missing
    state = grpc.StatusCode.FAILED_PRECONDITION
    again = await refused(process.fleet.EjectEngine(Eject(engine_id="d1", dry_run=dry_run)))
    assert again == (state, "engine d1 is ejected", "PRECONDITION")
    again = await refused(process.fleet.ProbeEngine(Probe(engine_id="d0", dry_run=dry_run)))
    assert again == (state, "a probe of engine d0 is under way", "PRECONDITION")
    assert traces(process, medium) == before
    assert len(asked.effects) == 1
    probing.cancel()


async def test_a_standby_names_the_active(process: Control, served: Engines, medium: Medium) -> None:
    async with control(served, medium=medium, plan=process.leader.plan, holder="b") as standby:
        await until(lambda: standby.leader.owner)
        for call in (
            standby.fleet.ExplainEngine(Explain(engine_id="d0")),
            standby.fleet.EjectEngine(Eject(engine_id="d0")),
            standby.fleet.ProbeEngine(Probe(engine_id="d0")),
        ):
            code, words, reason = await refused(call)
            assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_ACTIVE")
            assert process.address in words
    assert process.serving() == set(FLEET)


async def test_nonsense_is_refused(process: Control) -> None:
    for call in ("ExplainEngine", "EjectEngine", "ProbeEngine"):
        raw: Any = process.channel.unary_unary(f"/narwhal.v1.FleetService/{call}")
        assert (await refused(raw(b"\xff\xff")))[0] is grpc.StatusCode.INVALID_ARGUMENT


# --- proxies and metrics ----------------------------------------------------------------------------------------------


@pytest.mark.rule("F12", "P6")
async def test_a_proxy_shows_what_it_refused_and_that_it_is_suspect(process: Control) -> None:
    async with Proxy(process, identity("edge")) as proxy:
        snapshot = (await proxy.next("snapshot")).snapshot
        await proxy.nack(snapshot.epoch, snapshot.version, "engine listed twice")
        own = outcome_pb2.OutcomeRun(
            engine_id="d0",
            phase=placement_pb2.PHASE_DECODE,
            incarnation=1,
            outcome=outcome_pb2.LEG_OUTCOME_LOCAL,
            count=1,
        )
        call = process.outcomes.ReportOutcomes()
        await soon(call.write(outcome_pb2.ReportBatch(proxy=identity("edge"), sequence=1, runs=[own])))
        await soon(call.read())
        call.cancel()
        await until(lambda: "placement_refused" in process.told())
        (shown,) = (await soon(process.fleet.ListProxies(fleet_pb2.ListProxiesRequest()))).proxies
        assert (shown.refused_epoch, shown.refused_version) == (snapshot.epoch, snapshot.version)
        assert shown.suspect == "its legs fail by causes of its own"


@pytest.mark.rule("F1", "F6")
async def test_what_evidence_and_probes_bring_is_counted(process: Control, served: Engines, asked: Asked) -> None:
    await report(process, "d0", outcome_pb2.LEG_OUTCOME_REFUSED, "connecting: nobody listens")
    served.status["d0"] = 503
    await soon(process.fleet.ProbeEngine(Probe(engine_id="d0")))
    call = process.fleet.ProbeEngine(Probe(engine_id="d1"))
    await asked.until_done(process, call, lambda _: Outcome.STREAM_COMPLETE)
    lines = process.metrics.render().decode().splitlines()
    for line in (
        'narwhal_evidence_streak{class="connection",engine="d0",fleet="fleet"} 3.0',
        'narwhal_evidence_streak{class="stream",engine="d0",fleet="fleet"} 0.0',
        'narwhal_evidence_streak{class="connection",engine="d1",fleet="fleet"} 0.0',
        'narwhal_evidence_total{class="connection",engine="d0",fleet="fleet"} 3.0',
        'narwhal_ejections_total{cause="connection",engine="d0",fleet="fleet"} 1.0',
        'narwhal_engine_hold{engine="d0",fleet="fleet",hold="ejected"} 1.0',
        'narwhal_engine_hold{engine="d1",fleet="fleet",hold="ejected"} 0.0',
        'narwhal_engine_eligible{engine="d0",fleet="fleet",phase="decode"} 0.0',
        'narwhal_probes_total{engine="d0",fleet="fleet",kind="health",result="pass"} 1.0',
        'narwhal_probes_total{engine="d0",fleet="fleet",kind="health",result="fail"} 1.0',
        'narwhal_probes_total{engine="d1",fleet="fleet",kind="inference probe",result="pass"} 1.0',
        'narwhal_readmissions_total{check="",engine="d0",fleet="fleet",result="pass"} 1.0',
        'narwhal_readmissions_total{check="health",engine="d0",fleet="fleet",result="fail"} 1.0',
    ):
        assert line in lines, line
