"""Control processes that follow one another: what the tests of handovers share."""

from dataclasses import replace
from typing import Any

import grpc
import pytest

from narwhal._pb import fleet_pb2
from narwhal.control.standing import Standing
from tests.contract.control_kit import ROLES, Control, Engines, plan_of, soon, until, until_answer


def messages(process: Control, kind: str) -> list[str]:
    return [e.record.message for e in process.observer.after(0) if e.record.kind == kind]


async def settled(process: Control) -> None:
    await until(lambda: process.serving() == {"p0", "d0"})


async def followed(active: Control, *standbys: Control) -> None:
    """The active knows these standbys, and each has its handoff."""
    for process in standbys:
        await until(lambda: process.leader.standing is Standing.STANDBY)  # noqa: B023 - awaited at once

    def fit(status: fleet_pb2.FleetStatus) -> bool:
        found = {s.holder for s in status.standbys if s.copy_epoch == status.epoch and not s.problem}
        return found == {process.leader.holder for process in standbys}

    await until_answer(lambda: active.fleet.GetStatus(fleet_pb2.GetStatusRequest()), fit)


async def epochs(process: Control) -> list[fleet_pb2.EpochEntry]:
    return list((await soon(process.fleet.GetHistory(fleet_pb2.GetHistoryRequest()))).epochs)


def patient(served: Engines, **changes: Any) -> Any:
    """A plan whose standbys wait long enough for an answer on a busy machine."""
    return replace(plan_of(served, ROLES), poll_s=0.1, **changes)


async def switch(process: Control, **fields: Any) -> fleet_pb2.YieldResponse:
    return await soon(process.fleet.Yield(fleet_pb2.YieldRequest(operator=True, **fields)))


async def refused(process: Control, **fields: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await switch(process, **fields)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return caught.value.details() or ""
