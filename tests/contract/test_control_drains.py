"""Drains and returns over real gRPC: what they tell, when they end, and what survives."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from narwhal._pb import fleet_pb2, placement_pb2
from narwhal.control.drains import LOOK_S
from narwhal.vocabulary import Phase
from tests.contract.control_kit import (
    Control,
    Engines,
    Proxy,
    control,
    identity,
    plan_of,
    soon,
    until,
    until_answer,
)
from tests.contract.model_store import Medium

FLEET = {"p0": Phase.PREFILL, "d0": Phase.DECODE, "d1": Phase.DECODE}
Drain, Undrain, Forget = fleet_pb2.DrainEnginesRequest, fleet_pb2.UndrainEnginesRequest, fleet_pb2.ForgetProxyRequest
Messages = list[Any]


def running(
    served: Engines, medium: Medium, *, resume: bool = False, **core: Any
) -> AbstractAsyncContextManager[Control]:
    plan = plan_of(served, FLEET)
    plan = replace(plan, core=replace(plan.core, liveness_every=0, **core))
    return control(served, medium=medium, plan=plan, resume=resume)


@pytest_asyncio.fixture
async def process(served: Engines, medium: Medium) -> AsyncIterator[Control]:
    async with running(served, medium) as made:
        await until(lambda: made.serving() == set(FLEET))
        yield made


async def all_of(call: Any) -> Messages:
    """The messages of a stream that ends well."""

    async def read() -> Messages:
        return [message async for message in call]

    return await soon(read())


async def refused(call: Any) -> tuple[grpc.StatusCode, str, str, list[tuple[str, str, str]]]:
    """How a stream ended: code, words, reason, and the violations as (engine, check, words)."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await all_of(call)
    reason, violations = "", []
    for key, value in error.value.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                info, failed = error_details_pb2.ErrorInfo(), error_details_pb2.PreconditionFailure()
                if detail.Unpack(info):
                    reason = info.reason
                elif detail.Unpack(failed):
                    violations = [(v.subject, v.type, v.description) for v in failed.violations]
    return error.value.code(), error.value.details() or "", reason, violations


def stored(medium: Medium, engine: str) -> dict[str, Any]:
    assert medium.document is not None
    saved: dict[str, Any] = json.loads(medium.document)["engines"][engine]
    return saved


async def status_of(process: Control, engine: str) -> fleet_pb2.EngineStatus:
    status = await soon(process.fleet.GetStatus(fleet_pb2.GetStatusRequest()))
    return next(e for e in status.engines if e.id == engine)


async def settled(process: Control, engine: str) -> fleet_pb2.EngineStatus:
    return await until_answer(lambda: status_of(process, engine), lambda e: e.drain.settled)


async def newest(proxy: Proxy, *, without: str) -> tuple[int, int]:
    """The placement that has been sent once it gives `without` nothing to do."""
    while True:
        message = await proxy.next("snapshot", "change")
        placed = message.snapshot if message.HasField("snapshot") else message.change
        if any(e.id == without and not e.phases for e in placed.engines):
            return placed.epoch, placed.version


# --- drain ------------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R4")
async def test_a_drain_is_answered_when_it_is_stored_and_says_what_it_waits_for(
    process: Control, medium: Medium
) -> None:
    async with Proxy(process, identity("edge")) as edge:
        await edge.next("snapshot")
        medium.gate = asyncio.Event()
        call = process.fleet.DrainEngines(Drain(engine_ids=["d0"], deadline_s=300, reason="new driver"))
        await until(lambda: process.serving() == {"p0", "d1"})  # out at once, whatever the store does
        assert not call.done()
        medium.gate.set()
        (message,) = await all_of(call)
        assert stored(medium, "d0")["drain"]["reason"] == "new driver"
        assert message.told[0] == (
            "engine d0: drain (new driver), to settle within 300 s; a newer process is asked for when it returns"
        )
        (engine,) = message.engines
        assert [h.kind for h in engine.holds] == ["drain"]
        drain = engine.drain
        assert (drain.reason, drain.planned, drain.settled, drain.overdue) == ("new driver", True, False, False)
        assert 290 < drain.remaining_s <= 300


@pytest.mark.rule("R4", "R5")
async def test_whoever_waits_is_told_ready_to_stop_once_a_takeover_could_not_forget_it(
    process: Control, medium: Medium
) -> None:
    async with Proxy(process, identity("edge")) as edge:
        first = (await edge.next("snapshot")).snapshot
        await edge.ack(first.epoch, first.version)
        call = process.fleet.DrainEngines(Drain(engine_ids=["d0"], deadline_s=300, wait=True))
        order = await newest(edge, without="d0")
        medium.gate = asyncio.Event()
        await edge.ack(*order)
        await until(lambda: "drain_settled" in process.told())
        reading = asyncio.create_task(all_of(call))
        await asyncio.sleep(5 * LOOK_S)  # it has had the time to look
        assert not reading.done()
        assert not stored(medium, "d0")["drain"]["settled"]
        medium.gate.set()
        messages = await soon(reading)
        assert messages[-1].engines[0].drain.settled
        drain = stored(medium, "d0")["drain"]
        assert (drain["settled"], drain["identity"]["started_at"]) == (True, 1000.0)


@pytest.mark.rule("R4")
@pytest.mark.case("H1", "H3")
async def test_it_is_ready_to_stop_when_every_proxy_knows_and_nothing_runs_there(process: Control) -> None:
    async with Proxy(process, identity("edge")) as edge, Proxy(process, identity("late")) as late:
        for proxy in (edge, late):
            first = (await proxy.next("snapshot")).snapshot
            await proxy.ack(first.epoch, first.version, d0=2)
        call = process.fleet.DrainEngines(Drain(engine_ids=["d0"], deadline_s=300, wait=True))
        order = await newest(edge, without="d0")
        await edge.ack(*order, d0=1)

        async def waits() -> list[str]:
            return list((await status_of(process, "d0")).drain.waits_for)

        words = await until_answer(waits, lambda w: any("late/0 to acknowledge" in x for x in w))
        assert "1 leg of proxy edge/0" in words
        await edge.ack(*order)
        assert not (await status_of(process, "d0")).drain.settled  # the other has not acknowledged
        await newest(late, without="d0")
        await late.ack(*order, d0=1)
        await until_answer(waits, lambda w: w == ["1 leg of proxy late/0"])
        assert not call.done()
        await late.ack(*order)
        messages = await all_of(call)
        assert messages[-1].told[-1] == "engine d0 is ready to stop"
        assert messages[-1].engines[0].drain.settled
        assert (await status_of(process, "d0")).drain.process.started_at == 1000.0


@pytest.mark.rule("R4")
async def test_a_producer_is_not_ready_to_stop_while_its_handoffs_are_to_be_read(process: Control) -> None:
    async with Proxy(process, identity("edge")) as edge:
        await edge.next("snapshot")
        await all_of(process.fleet.DrainEngines(Drain(engine_ids=["p0"], deadline_s=300)))
        epoch, version = await newest(edge, without="p0")
        unread = [placement_pb2.Residency(engine_id="p0", legs=2)]
        ack = placement_pb2.Ack(epoch=epoch, version=version, unread=unread)
        await soon(edge.call.write(placement_pb2.ProxyMessage(ack=ack)))

        async def waits() -> list[str]:
            return list((await status_of(process, "p0")).drain.waits_for)

        await until_answer(waits, lambda w: w == ["2 KV handoffs of proxy edge/0 to be read"])
        await edge.ack(epoch, version)
        await settled(process, "p0")


@pytest.mark.rule("R4")
async def test_a_deadline_ends_the_waiting_and_not_the_drain(process: Control) -> None:
    async with Proxy(process, identity("edge")) as edge:
        await edge.next("snapshot")
        messages = await all_of(process.fleet.DrainEngines(Drain(engine_ids=["d0"], deadline_s=0.2, wait=True)))
        assert messages[-1].engines[0].drain.overdue
        (words,) = [w for w in messages[-1].told if "overdue" in w]
        assert "waits for proxy edge/0 to acknowledge placement" in words
        assert process.serving() == {"p0", "d1"}
        await edge.ack(*await newest(edge, without="d0"))
        engine = await settled(process, "d0")
        assert not engine.drain.overdue


@pytest.mark.rule("R4", "S7")
@pytest.mark.case("H3")
async def test_a_lost_proxy_counts_until_it_is_forgotten_and_a_connected_one_cannot_be(process: Control) -> None:
    async with Proxy(process, identity("edge")) as edge:
        await edge.next("snapshot")
        code, words, reason, _ = await refused_unary(process.fleet.ForgetProxy(Forget(id="edge")))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PRECONDITION")
        assert words == "proxy edge/0 is connected: stop it, then it says goodbye by itself"
    await until(lambda: "proxy_lost" in process.told())
    await all_of(process.fleet.DrainEngines(Drain(engine_ids=["d0"], deadline_s=300)))
    waits = (await status_of(process, "d0")).drain.waits_for
    assert any("proxy edge/0 (lost, counts for 600 s more or until it is forgotten)" in w for w in waits)
    rehearsed = await soon(process.fleet.ForgetProxy(Forget(id="edge", dry_run=True)))
    assert not (await status_of(process, "d0")).drain.settled
    answer = await soon(process.fleet.ForgetProxy(Forget(id="edge", slot=0)))
    assert answer.told[0] == rehearsed.told[0] == "proxy edge/0 is forgotten (an operator says that it is gone)"
    await settled(process, "d0")
    code, words, *_ = await refused_unary(process.fleet.ForgetProxy(Forget(id="edge")))
    assert (code, words) == (grpc.StatusCode.NOT_FOUND, "no proxy edge is known")


async def refused_unary(call: Any) -> tuple[grpc.StatusCode, str, str, list[Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await soon(call)
    for key, value in error.value.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            info = error_details_pb2.ErrorInfo()
            assert status_pb2.Status.FromString(value).details[0].Unpack(info)
            return error.value.code(), error.value.details() or "", info.reason, []
    return error.value.code(), error.value.details() or "", "", []


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (Drain(engine_ids=["x"], deadline_s=1), grpc.StatusCode.NOT_FOUND, "no engine x in this fleet"),
        (Drain(engine_ids=["d1"], deadline_s=1), grpc.StatusCode.FAILED_PRECONDITION, "already drained: d1"),
        (Drain(deadline_s=1), grpc.StatusCode.INVALID_ARGUMENT, "name engines, or ask for all of them"),
        (Drain(engine_ids=["d0"], all=True, deadline_s=1), grpc.StatusCode.INVALID_ARGUMENT, "all leaves none to name"),
        (Drain(engine_ids=["d0"]), grpc.StatusCode.INVALID_ARGUMENT, "deadline_s must be above 0 and finite, got 0"),
    ],
)
async def test_a_drain_that_cannot_be_begun_changes_nothing(
    process: Control, request_: fleet_pb2.DrainEnginesRequest, code: grpc.StatusCode, words: str
) -> None:
    await all_of(process.fleet.DrainEngines(Drain(engine_ids=["d1"], deadline_s=300)))
    await settled(process, "d1")
    before = process.observer.sequence
    assert (await refused(process.fleet.DrainEngines(request_)))[:2] == (code, words)
    assert process.observer.sequence == before
    assert process.serving() == {"p0", "d0"}


async def test_a_dry_run_says_what_the_command_says_and_changes_nothing(process: Control) -> None:
    before = process.observer.sequence
    (rehearsed,) = await all_of(process.fleet.DrainEngines(Drain(engine_ids=["d0"], deadline_s=9, dry_run=True)))
    assert process.observer.sequence == before
    assert process.serving() == set(FLEET)
    (done,) = await all_of(process.fleet.DrainEngines(Drain(engine_ids=["d0"], deadline_s=9)))
    assert rehearsed.told[:1] == done.told[:1] != []


# --- undrain ----------------------------------------------------------------------------------------------------------


async def drained(process: Control, *names: str, restart: bool = True) -> None:
    request = Drain(engine_ids=names, deadline_s=300, no_restart=not restart)
    await all_of(process.fleet.DrainEngines(request))
    for name in names:
        await settled(process, name)


@pytest.mark.rule("R1", "R4", "R5")
async def test_planned_maintenance_asks_for_a_newer_process(process: Control, served: Engines) -> None:
    await drained(process, "d0")
    code, words, reason, violations = await refused(process.fleet.UndrainEngines(Undrain(engine_ids=["d0"])))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "GATE_FAILED")
    assert [(engine, check) for engine, check, _ in violations] == [("d0", "generation")]
    assert "d0 stays drained: its check generation: fail: not restarted: version 1 started at 1000.000" in words
    assert process.serving() == {"p0", "d1"}
    assert [h.kind for h in (await status_of(process, "d0")).holds] == ["drain"]
    served.started_at["d0"] = 2000.0
    messages = await all_of(process.fleet.UndrainEngines(Undrain(engine_ids=["d0"])))
    assert messages[-1].told[-1] == "engine d0 is back as incarnation 2"
    await until(lambda: process.serving() == set(FLEET))
    checks = {c.check: c.verdict for c in messages[-1].engines[0].checks}
    assert checks == {
        "health": "pass", "attestation": "not configured", "model": "pass", "generation": "pass",
        "kv_transfer": "pass", "final_health": "pass",
    }  # fmt: skip


@pytest.mark.rule("R4")
async def test_without_maintenance_the_same_process_returns_and_proxies_are_waited_for(process: Control) -> None:
    async with Proxy(process, identity("edge")) as edge:
        await edge.next("snapshot")
        request = Drain(engine_ids=["d0"], deadline_s=300, no_restart=True)
        await all_of(process.fleet.DrainEngines(request))
        await edge.ack(*await newest(edge, without="d0"))
        await settled(process, "d0")
        call = process.fleet.UndrainEngines(Undrain(engine_ids=["d0"], wait=True))
        progress = aiter(call)
        while not any("proxy edge/0 to acknowledge placement" in w for w in (await soon(anext(progress))).waits_for):
            pass
        placement = process.publisher.placement
        assert placement is not None
        assert process.serving() == set(FLEET)
        await edge.ack(*placement.order)
        assert not (await all_of(progress))[-1].waits_for


@pytest.mark.rule("R1", "R2", "R5")
@pytest.mark.case("B1")
async def test_a_pair_that_cannot_transfer_is_named_and_traffic_flows_on_others(
    process: Control, served: Engines
) -> None:
    await drained(process, "d0")
    served.started_at["d0"] = 2000.0
    served.strangers.add(("p0", "d0"))
    code, words, _, violations = await refused(process.fleet.UndrainEngines(Undrain(engine_ids=["d0"])))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert [(engine, check) for engine, check, _ in violations] == [("d0", "kv_transfer")]
    assert "p0→d0: decode answered 500: no KV came" in words
    assert "restart p0" in words
    assert served.transfers.count(("p0", "d0")) >= 2  # a first failure is tried once more
    assert process.serving() == {"p0", "d1"}
    explained = await soon(process.fleet.ExplainEngine(fleet_pb2.ExplainEngineRequest(engine_id="d0")))
    (line,) = [x for x in explained.lines if x.startswith("check kv_transfer: fail: ")]
    assert "p0→d0" in line
    served.strangers.clear()
    await all_of(process.fleet.UndrainEngines(Undrain(engine_ids=["d0"])))
    await until(lambda: process.serving() == set(FLEET))


@pytest.mark.rule("R6", "M9")
async def test_maintenance_withdraws_ready_first_and_returns_all_or_none(process: Control, served: Engines) -> None:
    async with Proxy(process, identity("edge")) as edge:
        first = (await edge.next("snapshot")).snapshot
        await edge.ack(first.epoch, first.version, p0=1)
        call = process.fleet.DrainEngines(Drain(all=True, deadline_s=300, no_restart=True, wait=True))
        closed = (await edge.next("change")).change
        assert closed.closed == "maintenance"
        assert process.leader.readiness().reason == "maintenance"
        # What was admitted finds engines for its decode legs.
        assert process.serving() == set(FLEET)
        await edge.ack(closed.epoch, closed.version)
        order = await newest(edge, without="d0")
        assert process.serving() == set()
        await edge.ack(*order)
        assert all(e.drain.settled and e.drain.maintenance for e in (await all_of(call))[-1].engines)

        served.status["d1"] = 503
        code, words, _, violations = await refused(process.fleet.UndrainEngines(Undrain(all=True)))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert {(engine, check) for engine, check, _ in violations} == {(e, "health") for e in FLEET}
        assert "engine d0 stays drained: engine d1's check health: fail: GET /health answered 503" in words
        assert process.serving() == set()
        assert process.leader.readiness().reason == "maintenance"

        request = Undrain(all=True, except_ids=["d1"])
        await all_of(process.fleet.UndrainEngines(request))
        await until(lambda: process.serving() == {"p0", "d0"})
        assert process.leader.readiness().reason == ""
        assert [h.kind for h in (await status_of(process, "d1")).holds] == ["drain"]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (Undrain(engine_ids=["x"]), grpc.StatusCode.NOT_FOUND, "no engine x in this fleet"),
        (Undrain(engine_ids=["d0"]), grpc.StatusCode.FAILED_PRECONDITION, "engine d0 is not drained"),
        (Undrain(all=True), grpc.StatusCode.FAILED_PRECONDITION, "no other engine is drained"),
        (Undrain(all=True, except_ids=["x"]), grpc.StatusCode.NOT_FOUND, "no engine x in this fleet"),
        (Undrain(), grpc.StatusCode.INVALID_ARGUMENT, "name engines, or ask for all of them"),
        (Undrain(engine_ids=["d0"], except_ids=["d1"]), grpc.StatusCode.INVALID_ARGUMENT, "except_ids needs all"),
    ],
)
async def test_a_return_that_cannot_be_begun(
    process: Control, request_: fleet_pb2.UndrainEnginesRequest, code: grpc.StatusCode, words: str
) -> None:
    assert (await refused(process.fleet.UndrainEngines(request_)))[:2] == (code, words)


async def test_a_second_wish_for_an_engine_that_is_on_its_way_is_refused(process: Control, served: Engines) -> None:
    await drained(process, "d0", restart=False)
    served.hang.add("d0")
    first = process.fleet.UndrainEngines(Undrain(engine_ids=["d0"]))
    await soon(first.read())
    code, words, *_ = await refused(process.fleet.UndrainEngines(Undrain(engine_ids=["d0"])))
    assert (code, words) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "engine d0 is on its way back already: its gate is being tried",
    )
    first.cancel()


# --- what survives ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("R5", "S1", "S2")
async def test_a_drain_survives_resume_and_asks_for_the_same_newer_process(served: Engines, medium: Medium) -> None:
    async with running(served, medium) as process:
        await until(lambda: process.serving() == set(FLEET))
        await drained(process, "d0")
    async with running(served, medium, resume=True) as process:
        await until(lambda: process.serving() == {"p0", "d1"})
        engine = await status_of(process, "d0")
        assert (engine.drain.settled, engine.drain.process.started_at) == (True, 1000.0)
        code, *_ = await refused(process.fleet.UndrainEngines(Undrain(engine_ids=["d0"])))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        served.started_at["d0"] = 2000.0
        await all_of(process.fleet.UndrainEngines(Undrain(engine_ids=["d0"])))
        await until(lambda: process.serving() == set(FLEET))


@pytest.mark.rule("R5", "S2")
async def test_a_drain_survives_a_reload_and_healthy_sweeps(served: Engines, medium: Medium) -> None:
    plan = plan_of(served, FLEET)
    plan = replace(plan, core=replace(plan.core, liveness_every=1))
    async with control(served, medium=medium, plan=plan) as process:
        await until(lambda: process.serving() == set(FLEET))
        async with Proxy(process, identity("edge")):  # does not acknowledge: the drain stays unsettled, and is swept
            await all_of(process.fleet.DrainEngines(Drain(engine_ids=["d0"], deadline_s=300)))
            await soon(process.leader.reload(replace(plan, core=replace(plan.core, eject_after=7))))
            asked = len(served.asked)
            await until(lambda: served.asked[asked:].count(("d0", "/health")) >= 3)
            assert [h.kind for h in (await status_of(process, "d0")).holds] == ["drain"]


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    inner: list[Any] = []
    for _ in range(depth - 1):
        inner = [inner]
    return inner


@pytest.mark.rule("R7")
@pytest.mark.parametrize("document", ["right", "other build", "too deep", "other process", "no process", "not there"])
async def test_attestation_is_matched_field_by_field_and_names_the_process(
    served: Engines, medium: Medium, document: str
) -> None:
    contract = {"build": "a1", "flags": {"kv": True}}
    good: dict[str, Any] = {**contract, "process": {"version": "1", "started_at": 1000.0}, "digest": "sha256:1"}
    served.documents = {
        "right": good,
        "other build": {**good, "build": "b2", "flags": {"kv": 1}},
        "too deep": {**good, "build": nested(300)},
        "other process": {**good, "process": {"version": "1", "started_at": 1.0}},
        "no process": contract,
    }
    plan = plan_of(served, FLEET)
    specs = tuple(
        replace(e, attestation_url=f"{served.base}/documents/{document if e.id == 'd0' else 'right'}")
        for e in plan.core.engines
    )
    plan = replace(
        plan,
        core=replace(plan.core, engines=specs, attested=True),
        probes=replace(plan.probes, contract=contract, api_key="secret"),
    )
    async with control(served, medium=medium, plan=plan) as process:

        async def check() -> fleet_pb2.CheckStatus:
            checks = {c.check: c for c in (await status_of(process, "d0")).checks}
            return checks.get("attestation", fleet_pb2.CheckStatus())

        seen = await until_answer(check, lambda c: c.verdict)
        words = {
            "right": "matches the contract, names version 1 started at 1000.000",
            "other build": 'the document does not match the contract: build is "b2", asked for is "a1"; '
            "flags.kv is 1, asked for is true",
            "too deep": 'the document does not match the contract: build is nested too deeply, asked for is "a1"',
            "other process": "the document names version 1 started at 1.000, version 1 started at 1000.000 runs",
            "no process": "the document names no process: `process` must have `version` and `started_at`",
            "not there": "GET attestation document answered 404",
        }
        assert seen.detail == words[document]
        assert seen.verdict == ("pass" if document == "right" else "fail")
        await until(lambda: process.serving() >= {"p0", "d1"})
        if document == "right":
            await until(lambda: process.serving() == set(FLEET))
        else:
            assert "d0" not in process.serving()
    # The engines' credential is not shown to whoever serves documents.
    assert {a for (e, _), a in zip(served.asked, served.authorization, strict=True) if e == "documents"} == {""}
