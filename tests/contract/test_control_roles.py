"""Role control through a running control process: an operator's word, reports that move an engine, what is shown."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from narwhal._pb import fleet_pb2, outcome_pb2, placement_pb2
from narwhal.control.core.settings import RoleMode, RoleSettings
from narwhal.measures import bucket
from narwhal.vocabulary import Phase
from tests.contract.control_kit import Control, Engines, Proxy, control, identity, plan_of, soon, until
from tests.contract.model_store import Medium

FLEET = {"p0": Phase.PREFILL, "p1": Phase.PREFILL, "d0": Phase.DECODE}
PREFILL, DECODE = placement_pb2.PHASE_PREFILL, placement_pb2.PHASE_DECODE
MOVED = "engine p1 now has the role decode (operator: asked for by an operator)"


@pytest_asyncio.fixture
async def process(served: Engines, medium: Medium) -> AsyncIterator[Control]:
    plan = plan_of(served, FLEET)
    roles = RoleSettings(mode=RoleMode.AUTO, cooldown_s=0.0)
    plan = replace(plan, core=replace(plan.core, readmit_every=10_000, roles=roles))
    async with control(served, medium=medium, plan=plan) as made:
        await until(lambda: made.serving() == set(FLEET))
        yield made


def roles(process: Control) -> dict[str, Phase]:
    placement = process.publisher.placement
    return {e.id: e.role for e in placement.engines.values()} if placement is not None else {}


def set_role(engine: str, role: placement_pb2.Phase, *, dry_run: bool = False) -> fleet_pb2.SetRoleRequest:
    return fleet_pb2.SetRoleRequest(engine_id=engine, role=role, dry_run=dry_run)


@pytest.mark.rule("C1")
async def test_an_operators_role_is_stored_and_placed(process: Control, medium: Medium) -> None:
    async with Proxy(process) as proxy:
        await proxy.next("snapshot")
        answer = await soon(process.fleet.SetRole(set_role("p1", DECODE)))
        assert list(answer.told) == [MOVED]
        change = (await proxy.next("change")).change
    assert [(e.id, e.role, list(e.phases)) for e in change.engines] == [("p1", DECODE, [DECODE])]
    assert change.engines[0].incarnation == 1
    document = process.leader.loop.writer.document if process.leader.loop is not None else b""
    assert document is not None
    assert b'"role":"decode","role_age_s":' in document
    text = process.metrics.render().decode()
    assert 'narwhal_role_moves_total{cause="operator",fleet="fleet",to="decode"} 1.0' in text
    assert 'narwhal_role_load{fleet="fleet",role="prefill"} 0.0' in text


@pytest.mark.rule("C1")
async def test_a_dry_run_changes_nothing(process: Control) -> None:
    answer = await soon(process.fleet.SetRole(set_role("p1", DECODE, dry_run=True)))
    assert list(answer.told) == [MOVED]
    assert roles(process) == FLEET


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (set_role("x", DECODE), grpc.StatusCode.NOT_FOUND, "no engine x"),
        (set_role("p1", placement_pb2.PHASE_UNSPECIFIED), grpc.StatusCode.INVALID_ARGUMENT, "unknown phase 0"),
        (set_role("p1", PREFILL), grpc.StatusCode.FAILED_PRECONDITION, "has the role prefill already"),
        (set_role("d0", PREFILL), grpc.StatusCode.FAILED_PRECONDITION, "its floor is 1"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    process: Control, request_: fleet_pb2.SetRoleRequest, code: grpc.StatusCode, says: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=says) as refused:
        await soon(process.fleet.SetRole(request_))
    assert refused.value.code() is code
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        status = status_pb2.Status()
        for key, value in refused.value.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                status.ParseFromString(value if isinstance(value, bytes) else value.encode())
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.reason == "PRECONDITION"  # not NOT_ACTIVE: a client must not look for another control process
    assert roles(process) == FLEET


def measured(sequence: int) -> outcome_pb2.ReportBatch:
    """A second in which decode took three times its target, and prefill next to nothing."""

    def of(engine: str, phase: placement_pb2.Phase, **values: float) -> outcome_pb2.LegMeasures:
        sketches = {name: outcome_pb2.Sketch(buckets=[bucket(v)], counts=[50]) for name, v in values.items()}
        return outcome_pb2.LegMeasures(engine_id=engine, phase=phase, incarnation=1, **sketches)  # type: ignore[arg-type]

    measures = [of("p0", PREFILL, first_s=0.1), of("p1", PREFILL, first_s=0.1), of("d0", DECODE, step_s=0.3)]
    return outcome_pb2.ReportBatch(proxy=identity(), sequence=sequence, measures=measures, measured_s=1.0)


@pytest.mark.rule("C1", "C3")
async def test_what_proxies_measure_moves_an_engine_and_is_shown(process: Control) -> None:
    async with Proxy(process):
        call = process.outcomes.ReportOutcomes()
        for sequence in range(1, 200):
            await soon(call.write(measured(sequence)))
            if roles(process)["p0"] is Phase.DECODE:
                break
            await asyncio.sleep(0.02)
        call.cancel()
    assert roles(process) == {"p0": Phase.DECODE, "p1": Phase.PREFILL, "d0": Phase.DECODE}
    status = await soon(process.fleet.GetStatus(fleet_pb2.GetStatusRequest()))
    assert status.roles.mode == "auto"
    assert [r.role for r in status.roles.roles] == [PREFILL, DECODE]
    assert [r.engines for r in status.roles.roles] == [1, 2]
    moved = next(e for e in status.engines if e.id == "p0")
    assert moved.HasField("role_age_s")
    assert moved.stays.startswith("moved lately, stays for ")
    assert not next(e for e in status.engines if e.id == "p1").HasField("role_age_s")
    assert "role_moved" in process.told()
    text = process.metrics.render().decode()
    assert 'narwhal_role_moves_total{cause="load",fleet="fleet",to="decode"} 1.0' in text


def late(sequence: int) -> outcome_pb2.ReportBatch:
    """A prefill leg on p0 gave nothing in time."""
    run = outcome_pb2.OutcomeRun(
        engine_id="p0",
        phase=PREFILL,
        incarnation=1,
        outcome=outcome_pb2.LEG_OUTCOME_PREFILL_TIMEOUT,
        count=1,
        failure=outcome_pb2.LegFailure(detail="nothing came for 120.0 s"),
    )
    return outcome_pb2.ReportBatch(proxy=identity(), sequence=sequence, runs=[run])


@pytest.mark.rule("C4", "S1")
async def test_roles_and_risks_are_the_successors_too(served: Engines, medium: Medium) -> None:
    plan = plan_of(served, FLEET)
    plan = replace(plan, core=replace(plan.core, readmit_every=10_000))
    async with control(served, medium=medium, plan=plan) as first:
        await until(lambda: first.serving() == set(FLEET))
        await soon(first.fleet.SetRole(set_role("p1", DECODE)))
        call = first.outcomes.ReportOutcomes()
        await soon(call.write(late(1)))
        assert isinstance(await soon(call.read()), outcome_pb2.ReportAck)  # by now it is stored
        call.cancel()
        before = (await soon(first.fleet.GetStatus(fleet_pb2.GetStatusRequest()))).roles.roles[0]
        assert [(r.kind, r.count) for r in before.risks] == [("first token late", 1)]
    async with control(served, medium=medium, plan=plan, holder="b", resume=True) as second:
        await until(lambda: second.serving() == set(FLEET))
        assert roles(second) == {**FLEET, "p1": Phase.DECODE}
        after = (await soon(second.fleet.GetStatus(fleet_pb2.GetStatusRequest()))).roles.roles[0]
    assert [(r.kind, r.count) for r in after.risks] == [("first token late", 1)]
    assert after.risks[0].age_s >= before.risks[0].age_s
    assert after.risks[0].age_s + after.risks[0].blocks_s == pytest.approx(60.0)
    assert after.gave_age_s >= before.gave_age_s
