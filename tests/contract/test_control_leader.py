"""What a control process is and becomes: start, resume, refusal, standby, takeover, fence, clean end."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from narwhal.control.candidate import ResumeRefusedError
from narwhal.control.standing import Standing
from narwhal.control.store.base import Store
from narwhal.control.store.file import FileStore
from narwhal.vocabulary import Phase
from tests.contract.control_kit import (
    ROLES,
    Control,
    Engines,
    Proxy,
    batch,
    control,
    plan_of,
    soon,
    until,
)
from tests.contract.model_store import Medium, ModelStore


async def ready(process: Control) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{process.http}/ready") as response:
        return response.status, await response.json()


async def settle(process: Control) -> None:
    await until(lambda: process.serving() == {"p0", "d0"})


def messages(process: Control, kind: str) -> list[str]:
    return [e.record.message for e in process.observer.after(0) if e.record.kind == kind]


async def saved_document(served: Engines) -> bytes:
    """A handoff with two admitted engines and one report."""
    medium = Medium()
    async with control(served, medium=medium) as process:
        await settle(process)
        call = process.outcomes.ReportOutcomes()
        await soon(call.write(batch(1, served=4)))
        await soon(call.read())
        call.cancel()
    assert medium.document is not None
    return medium.document


def changed(document: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(document)
    change(value)
    return json.dumps(value).encode()


# --- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("S2", "R8")
async def test_resume_applies_a_matching_handoff_and_its_engines_serve_at_once(served: Engines) -> None:
    medium = Medium(document=await saved_document(served))
    served.status = {"p0": 503, "d0": 503}
    async with control(served, medium=medium, resume=True, holder="b") as process:
        await settle(process)
        loop = process.leader.loop
        assert loop is not None
        assert loop.view().totals.served == 4
        assert "resumed the handoff of a, epoch 1" in messages(process, "handoff_resumed")[0]
        lease = process.leader.lease
        assert lease is not None
        assert lease.epoch == 2, "above the handoff's epoch, though the store had none"
        assert not [path for engine, path in served.asked[2:] if engine == "p0" and path == "/v1/models"][1:]


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a newer version": (lambda d: d.update(schema_version=2), "unknown schema_version 2"),
    "another schema": (lambda d: d.update(schema="narwhal.other"), "unknown schema"),
    "an unknown field": (lambda d: d.update(surprise=1), "unknown field surprise"),
    "an unknown field inside": (lambda d: d["engines"]["p0"].update(surprise=1), "unknown field engines.p0.surprise"),
    "a missing field": (lambda d: d.pop("requests"), "missing field requests"),
    "another fleet": (lambda d: d.update(fleet="other"), "the handoff is of fleet 'other', not of 'fleet'"),
}


async def refusal(served: Engines, medium: Medium) -> str:
    async with control(served, medium=medium, resume=True) as process:
        task = next(t for t in asyncio.all_tasks() if "Leader.run" in repr(t.get_coro()))
        with pytest.raises(ResumeRefusedError) as caught:
            await soon(asyncio.shield(task))
        assert process.publisher.placement is None
    return str(caught.value)


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
@pytest.mark.parametrize("name", REFUSED)
async def test_resume_refuses_what_it_cannot_apply_whole_and_keeps_the_file(name: str, served: Engines) -> None:
    change, words = REFUSED[name]
    document = changed(await saved_document(served), change)
    medium = Medium(document=document)
    assert words in await refusal(served, medium)
    assert medium.document == document
    assert medium.held is None, "and lets others lead"


@pytest.mark.rule("S2")
@pytest.mark.case("K5")
async def test_resume_refuses_a_handoff_that_was_cut_short_wherever(served: Engines) -> None:
    document = await saved_document(served)
    for length in (0, 1, len(document) // 3, len(document) - 1):
        medium = Medium(document=document[:length])
        assert "the saved handoff is not JSON" in await refusal(served, medium)
        assert medium.document == document[:length]


def drained(document: dict[str, Any]) -> None:
    hold = {"kind": "drain", "reason": "maintenance", "age_s": 1.0, "remaining_s": None}
    document["engines"]["d0"]["holds"].append(hold)
    document["engines"]["d0"]["drain"] = {
        "reason": "maintenance", "url": "http://d0", "age_s": 1.0, "remaining_s": 9.0, "wall": 5.0, "restart": True,
        "whole": False, "captured": False, "identity": None, "settled": False, "overdue": False,
    }  # fmt: skip


@pytest.mark.rule("S2")
async def test_another_set_of_engines_starts_fresh_says_so_and_keeps_the_old_document(served: Engines) -> None:
    document = changed(await saved_document(served), drained)
    medium = Medium(document=document)
    plan = plan_of(served, {"p0": Phase.PREFILL, "d1": Phase.DECODE})
    async with control(served, medium=medium, plan=plan, resume=True) as process:
        await until(lambda: process.serving() == {"p0", "d1"})
        (words,) = messages(process, "handoff_not_resumed")
        assert "added: d1" in words
        assert "removed: d0" in words
        assert "drains forgotten: d0" in words
        assert "kept as aside-" in words
        assert list(medium.documents_aside.values()) == [document]
        loop = process.leader.loop
        assert loop is not None
        assert loop.view().totals.served == 0


@pytest.mark.rule("S2", "R8")
async def test_with_another_model_engines_come_in_by_their_gates(served: Engines) -> None:
    medium = Medium(document=changed(await saved_document(served), drained))
    plan = plan_of(served, ROLES)
    served.models = {"p0": ["large"]}
    plan = replace(plan, core=replace(plan.core, model="large"))
    async with control(served, medium=medium, plan=plan, resume=True) as process:
        await until(lambda: messages(process, "engine_check_failed"))
        (words,) = messages(process, "handoff_not_resumed")
        assert words.startswith("the handoff is of model 'tiny', not of 'large' (drains forgotten: d0); starting fresh")
        await until(lambda: process.serving() == {"p0"})
        assert "engine d0 is kept from joining: check model: fail" in "".join(messages(process, "engine_check_failed"))


@pytest.mark.rule("S2")
async def test_starting_without_resume_beside_a_handoff_says_so(served: Engines) -> None:
    document = await saved_document(served)
    medium = Medium(document=document)
    async with control(served, medium=medium) as process:
        await settle(process)
        (words,) = messages(process, "handoff_not_resumed")
        assert words.startswith("started without --resume beside a saved handoff")
        assert list(medium.documents_aside.values()) == [document]
        loop = process.leader.loop
        assert loop is not None
        assert loop.view().totals.served == 0
        assert "drains" not in words


@pytest.mark.rule("S2")
@pytest.mark.parametrize(
    ("readable", "says"),
    [
        (True, "; drains forgotten: d0; it is kept"),
        (False, "; it cannot be read: drains that it may have are forgotten"),
    ],
)
async def test_starting_without_resume_names_the_drains_that_are_forgotten(
    served: Engines, readable: bool, says: str
) -> None:
    document = changed(await saved_document(served), drained)
    async with control(served, medium=Medium(document=document if readable else b"{")) as process:
        await until(lambda: process.serving() == {"p0", "d0"})
        (words,) = messages(process, "handoff_not_resumed")
        assert words.startswith("started without --resume beside a saved handoff, which is not applied; ")
        assert says in words


@pytest.mark.rule("S2")
async def test_a_start_that_meets_a_store_in_trouble_is_the_same_start_once_it_is_over(served: Engines) -> None:
    document = await saved_document(served)
    medium = Medium(document=document, failing="no route to the store")
    async with control(served, medium=medium) as process:
        await until(lambda: messages(process, "store_failed"))
        medium.failing = ""
        medium.tell()
        await settle(process)
        (words,) = messages(process, "handoff_not_resumed")
        assert words.startswith("started without --resume beside a saved handoff")
        assert process.leader.takeovers == 0


async def test_a_fresh_start_beside_nothing_says_nothing(served: Engines) -> None:
    async with control(served) as process:
        await settle(process)
        assert not messages(process, "handoff_not_resumed")
        assert process.told()[0] == "control_active"


# --- standby and takeover ---------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(params=["model", "file"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Makes stores of one fleet."""
    medium = Medium()

    async def make() -> Store:
        return ModelStore(medium) if request.param == "model" else await FileStore.open(tmp_path / "run")

    return make


@pytest.mark.rule("S7", "M9")
async def test_a_second_control_stands_by_says_so_and_takes_over_with_the_newest_handoff(
    stores: Callable[[], Any], served: Engines
) -> None:
    async with control(served, store=await stores(), holder="a") as active:
        await settle(active)
        async with control(served, store=await stores(), holder="b") as standby:
            await until(lambda: standby.leader.standing is Standing.STANDBY)
            assert await ready(standby) == (
                503,
                {"status": "not ready", "reason": "standby", "control_ready": False, "epoch": 1, "holder": "a"},
            )
            assert messages(standby, "control_standby") == [f"standby: a at {active.address} leads under epoch 1"]
            call = active.outcomes.ReportOutcomes()
            await soon(call.write(batch(1, served=9)))
            await soon(call.read())
            call.cancel()
            began = asyncio.get_running_loop().time()
            await active.leader.stop()
            await settle(standby)
            assert asyncio.get_running_loop().time() - began < 1.0
            loop = standby.leader.loop
            assert loop is not None
            assert loop.view().totals.served == 9
            assert loop.lease.epoch == 2
            assert (await ready(standby))[0] == 200
            assert standby.leader.takeovers == 1
            assert "handoff_resumed" in standby.told()
            assert standby.told().count("control_standby") == 1, "one line for a change of state"


@pytest.mark.rule("S7")
async def test_a_standby_with_another_set_of_engines_does_not_take_over_and_says_why(served: Engines) -> None:
    medium = Medium()
    async with control(served, medium=medium) as active:
        await settle(active)
        plan = plan_of(served, {"p0": Phase.PREFILL, "d1": Phase.DECODE})
        async with control(served, medium=medium, plan=plan, holder="b") as standby:
            await until(lambda: "handoff_not_resumed" in standby.told())
            await active.leader.stop()
            await asyncio.sleep(0.2)
            assert medium.held is None
            assert (await ready(standby))[1]["reason"] == "standby"
            (words,) = messages(standby, "handoff_not_resumed")
            assert words.startswith("does not take over: the handoff has another set of engines")
            standby.leader.plan = plan_of(served, ROLES)  # its file was mended
            await settle(standby)


@pytest.mark.rule("S5", "M9")
async def test_a_fenced_control_says_so_and_does_nothing(served: Engines) -> None:
    medium = Medium()
    async with control(served, medium=medium) as process:
        await settle(process)
        medium.failing = "unreachable"
        lease = process.leader.lease
        assert lease is not None
        lease.valid_until = process.clock.boottime()
        await until(lambda: process.leader.standing is Standing.FENCED)
        status, body = await ready(process)
        assert (status, body["reason"], body["control_ready"]) == (503, "fenced", False)
        assert process.publisher.placement is None
        saves = medium.saves
        async with Proxy(process) as proxy:
            message = await proxy.next("heartbeat", "snapshot")
            assert message.heartbeat.epoch == 0, "it streams nothing"
        assert medium.saves == saves
        assert messages(process, "control_fenced") == ["fenced: the lease was not renewed in time"]
        medium.failing = ""
        await settle(process)
        assert process.leader.owner is not None
        assert process.leader.owner.epoch == 2


@pytest.mark.rule("S8")
async def test_when_the_store_is_back_the_stored_handoff_counts_not_memory(served: Engines) -> None:
    medium = Medium()
    async with control(served, medium=medium) as process:
        await settle(process)
        stored = medium.document
        medium.failing = "unreachable"
        call = process.outcomes.ReportOutcomes()
        await soon(call.write(batch(1, served=3)))
        await until(lambda: process.leader.loop is not None and process.leader.loop.view().totals.served == 3)
        lease = process.leader.lease
        assert lease is not None
        lease.valid_until = process.clock.boottime()
        await until(lambda: process.leader.standing is Standing.FENCED)
        call.cancel()
        medium.document, medium.failing = stored, ""
        await settle(process)
        loop = process.leader.loop
        assert loop is not None
        assert loop.view().totals.served == 0, "it was never acknowledged: the proxy sends it again"
        call = process.outcomes.ReportOutcomes()
        await soon(call.write(batch(1, served=3)))
        await soon(call.read())
        assert loop.view().totals.served == 3
        call.cancel()


@pytest.mark.case("I18")
@pytest.mark.rule("S5")
async def test_a_wiped_store_readmits_nothing_by_accident_and_the_epoch_goes_up(
    tmp_path: Path, served: Engines
) -> None:
    def wipe() -> None:
        for path in (tmp_path / "run").iterdir():
            path.unlink()

    async with control(served, store=await FileStore.open(tmp_path / "run")) as process:
        await settle(process)
        served.status = {"d0": 503, "p0": 503}
        await asyncio.to_thread(wipe)
        await until(lambda: process.leader.lease is not None and process.leader.lease.epoch == 2)
        loop = process.leader.loop
        assert loop is not None
        assert process.serving() == {"p0", "d0"}, "what it had stored itself is newer than nothing"
        assert {e.id: e.incarnation for e in loop.view().engines} == {"p0": 1, "d0": 1}


async def test_a_store_that_is_set_back_does_not_undo_what_was_stored_since(served: Engines) -> None:
    old = await saved_document(served)
    medium = Medium(document=old)
    async with control(served, medium=medium, resume=True) as process:
        await settle(process)
        call = process.outcomes.ReportOutcomes()
        await soon(call.write(batch(2, served=6)))
        await soon(call.read())
        call.cancel()
        lease = process.leader.lease
        assert lease is not None
        medium.document = old
        medium.gate = asyncio.Event()
        medium.expire()
        lease.valid_until = process.clock.boottime()
        await until(lambda: process.leader.lease not in (None, lease))
        medium.gate.set()
        loop = process.leader.loop
        assert loop is not None
        assert loop.view().totals.served == 10


@pytest.mark.rule("S7")
async def test_a_clean_end_persists_and_releases(served: Engines) -> None:
    medium = Medium()
    async with control(served, medium=medium) as process:
        await settle(process)
        saves = medium.saves
        await process.leader.stop()
        assert medium.saves > saves
        assert medium.held is None
        assert process.publisher.placement is None
        assert (await ready(process))[0] == 503


async def test_a_clean_end_waits_for_no_store(served: Engines) -> None:
    medium = Medium()
    async with control(served, medium=medium) as process:
        await settle(process)
        medium.gate = asyncio.Event()
        began = asyncio.get_running_loop().time()
        await process.leader.stop()
        assert asyncio.get_running_loop().time() - began < 1.5
        medium.gate.set()


# --- what HTTP shows --------------------------------------------------------------------------------------------------


async def get(process: Control, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(process.http + path) as response:
        return response.status, await response.read()


async def test_http_shows_health_handoff_and_metrics(served: Engines) -> None:
    medium = Medium()
    async with control(served, medium=medium) as active, control(served, medium=medium, holder="b") as standby:
        await settle(active)
        await until(lambda: standby.leader.standing is Standing.STANDBY)
        for process in (active, standby):
            assert (await get(process, "/health"))[0] == 200
            status, document = await get(process, "/handoff")
            assert status == 200
            assert json.loads(document)["fleet"] == "fleet"
        async with Proxy(active) as proxy:
            snapshot = (await proxy.next("snapshot")).snapshot
            await proxy.ack(snapshot.epoch, snapshot.version)
            await until(lambda: b'placement_lag_versions{fleet="fleet",proxy="proxy/0"} 0.0' in active.metrics.render())
            text = (await get(active, "/metrics"))[1].decode()
        version = active.publisher.placement.version if active.publisher.placement else 0
        for line in (
            'narwhal_monitor_failure_streak{fleet="fleet"} 0.0',
            'narwhal_monitor_degraded{fleet="fleet"} 0.0',
            'narwhal_engine_eligible{engine="p0",fleet="fleet",phase="prefill"} 1.0',
            'narwhal_engine_eligible{engine="p0",fleet="fleet",phase="decode"} 0.0',
            'narwhal_engine_hold{engine="p0",fleet="fleet",hold="joining"} 0.0',
            'narwhal_evidence_streak{class="stream",engine="d0",fleet="fleet"} 0.0',
            'narwhal_probes_total{engine="d0",fleet="fleet",kind="model",result="pass"} 1.0',
            'narwhal_readmissions_total{check="",engine="d0",fleet="fleet",result="pass"} 1.0',
            'narwhal_lease_epoch{fleet="fleet"} 1.0',
            'narwhal_lease_held{fleet="fleet"} 1.0',
            'narwhal_lease_valid_seconds{fleet="fleet"} +Inf',
            'narwhal_takeovers_total{fleet="fleet"} 0.0',
            f'narwhal_placement_version{{fleet="fleet"}} {version}.0',
            'narwhal_placement_subscribers{fleet="fleet"} 1.0',
            'narwhal_handoff_writes_total{fleet="fleet",result="failed"} 0.0',
            'narwhal_stale_epoch_refusals_total{fleet="fleet"} 0.0',
        ):
            assert line in text.splitlines()
        assert "narwhal_monitor_pass_seconds_count" in text
        async with Proxy(standby):
            await until(lambda: standby.publisher.proxies)
            text = (await get(standby, "/metrics"))[1].decode()
        assert 'narwhal_lease_held{fleet="fleet"} 0.0' in text.splitlines()
        assert 'narwhal_placement_subscribers{fleet="fleet"} 1.0' in text.splitlines()
        assert "narwhal_engine_eligible{" not in text


async def test_http_says_when_there_is_no_handoff_and_when_the_store_fails(served: Engines) -> None:
    medium = Medium(failing="unreachable")
    async with control(served, medium=medium) as process:
        await until(lambda: "store_failed" in process.told())
        status, body = await get(process, "/handoff")
        assert (status, json.loads(body)) == (503, {"error": "unreachable"})
        assert (await ready(process))[1]["reason"] == "standby"
        medium.failing = ""
        await settle(process)
        assert "store_recovered" in process.told()
        assert process.told().count("store_failed") == 1
