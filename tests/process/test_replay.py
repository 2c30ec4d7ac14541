"""The event journal of real processes, replayed: the same decisions, and others with other settings."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.users import Users
from tests.process.faults import behave, ejected, misbehave, serving, short, told
from tests.process.harness import BIN, Stage, until

SMALLEST = 1024 * 1024


def replay(*arguments: object, code: int = 0) -> dict[str, Any]:
    """What narwhalctl says, in a process whose sets have another order."""
    done = subprocess.run(
        [BIN / "narwhalctl", "replay", *map(str, arguments), "-o", "json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        timeout=90,
        check=False,
    )
    assert done.returncode == code, done.stdout[:2000] + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def files(stage: Stage, epoch: int) -> list[Path]:
    return sorted((stage.directory / "run" / "journal").glob(f"journal-{epoch:010}-*.jsonl"))


def kinds(answer: dict[str, Any], side: str = "was") -> dict[str, int]:
    found: dict[str, int] = {}
    for event in answer["events"]:
        found[event["kind"]] = found.get(event["kind"], 0) + bool(event[side])
    return found


@pytest.mark.rule("F3", "R3", "S6")
async def test_what_real_processes_lived_through_is_decided_again(stage: Stage) -> None:
    """Users, an engine that fails and returns, an operator, kill -9 of control; small files, so that they rotate."""
    stage.write_fleet(**short(journal={"max_bytes": SMALLEST}, recovery={"stall_s": 0}))
    await stage.engines()
    address = stage.address()
    control = await stage.control("--id", "first", "--grpc", address)
    proxy = await stage.proxy("--control", control.at["grpc"])
    await serving(stage, control.at["grpc"], "p1", "p2", "d1", "d2")
    async with Users(addresses=[proxy.at["http"]], patience_s=60).asking():
        await misbehave(stage, "d1", "status", status=500)
        await ejected(control, "d1")
        await behave(stage, "d1")
        await until(lambda: told(control, "engine_readmitted", "d1"), "d1 is back")
        await until(lambda: len(files(stage, 1)) > 1, "the journal is rotated", within_s=300)
        await until(lambda: files(stage, 1)[-1].read_bytes().count(b"\n") > 10, "the newest file holds steps")
        control.signal(signal.SIGKILL)
        await control.ended()
        again = await stage.control("--id", "second", "--resume", "--grpc", address)
        await serving(stage, again.at["grpc"], "p1", "p2", "d1", "d2")
        drain = stage.run("narwhalctl", "--control", again.at["grpc"], "drain", "p2", "--wait")
        assert await drain.ended() == 0
    again.signal(signal.SIGTERM)
    assert await again.ended() == 0

    first = replay(*files(stage, 1))
    assert (first["holder"], first["epoch"], first["differing"], first["missing"]) == ("first", 1, 0, 0)
    assert first["steps"] > 100
    assert kinds(first)["engine_ejected"] == len(told(control, "engine_ejected"))
    assert kinds(first)["engine_readmitted"] == len(told(control, "engine_readmitted"))
    for file in files(stage, 1):
        alone = replay(file)
        assert alone["differing"] == 0, "a rotated file replays alone"
        assert alone["steps"] >= 10
    second = replay(stage.directory / "run" / "journal")
    assert (second["holder"], second["epoch"], second["differing"]) == ("second", 2, 0)
    assert kinds(second)["drain_settled"] == 1
    total = sum(file.stat().st_size for file in (*files(stage, 1), *files(stage, 2)))
    assert total <= SMALLEST * 9 / 8


@pytest.mark.rule("F3")
async def test_other_settings_show_what_would_have_been(stage: Stage) -> None:
    # Without sweeps: who is ejected for its failures here must not be, there, for its silence in a sweep.
    recovery = {"stall_s": 0, "readmit_every": 10, "liveness_every": 0}
    stage.write_fleet(**short(recovery=recovery))
    await stage.engines()
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"])
    await serving(stage, control.at["grpc"], "p1", "p2", "d1", "d2")
    async with Users(addresses=[proxy.at["http"]], patience_s=60).asking():
        await misbehave(stage, "d1", "refuse")
        out = await ejected(control, "d1")
    assert "3 connection failures in a row" in out["event"]
    control.signal(signal.SIGTERM)
    assert await control.ended() == 0

    journal = stage.directory / "run" / "journal"
    same = replay(journal, "--fleet", stage.fleet_file)
    assert same["changed"] == {}
    assert kinds(same) == kinds(same, "other")
    assert all(event["same"] for event in same["events"] if event["kind"] == "engine_ejected")

    stage.write_fleet(**short(recovery=recovery | {"eject_after": 1}))
    sooner = replay(journal, "--fleet", stage.fleet_file)
    assert sooner["changed"] == {"eject_after": ["3", "1"]}
    words = {e["other"] for e in sooner["events"] if e["kind"] == "engine_ejected" and e["engine"] == "d1"}
    assert any("1 connection failure" in each for each in words), words
    stage.write_fleet(**short(recovery=recovery | {"eject_after": 1000}))
    later = replay(journal, "--fleet", stage.fleet_file)
    assert kinds(later).get("engine_ejected", 0) >= 1
    assert kinds(later, "other").get("engine_ejected", 0) == 0
    ends = {engine["id"]: engine for engine in later["other_engines"]}
    assert ends["d1"]["ejections"] == 0
    assert ends["d1"]["phases"]
