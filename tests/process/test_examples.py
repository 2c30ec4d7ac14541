"""The programs of examples/, run as a reader would."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.process.harness import WAIT_S, Stage

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "watch_placement.py"


@pytest.mark.rule("P8")
async def test_a_subscriber_written_against_the_protos_alone_sees_every_change(stage: Stage) -> None:
    stage.write_fleet(recovery={"liveness_every": 1, "liveness_misses": 1})
    engines = await stage.engines()
    control = await stage.control()
    await stage.ready(control.at["http"])
    watcher = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), control.at["grpc"], stdout=asyncio.subprocess.PIPE, cwd=stage.directory
    )
    lines: list[str] = []

    async def until_said(words: str) -> None:
        assert watcher.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while not (lines and words in lines[-1]):
                line = (await watcher.stdout.readline()).decode()
                assert line, lines
                lines.append(line.rstrip())

    try:
        await until_said("serves decode")
        assert lines[0].startswith("snapshot 1.")
        assert lines[0].endswith("admission open")
        engines.signal(signal.SIGKILL)
        await until_said("serves nothing (ejected)")
        assert any(line.startswith("change 1.") for line in lines)
        control.signal(signal.SIGTERM)
        await until_said("goodbye: shutting down")
    finally:
        if watcher.returncode is None:
            watcher.kill()
        await watcher.wait()
