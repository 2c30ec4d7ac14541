"""Each measuring script says how it is used when it is asked; a wrong argument is a usage error, not a traceback."""

import asyncio
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts" / "bench").glob("*.py") if "sys.argv" in path.read_text())
ASKING = sorted(path.stem for path in (ROOT / "scripts" / "bench").glob("*.py") if "argparse" in path.read_text())


def test_arguments_are_read_by_a_parser() -> None:
    assert SCRIPTS == ["demand_picture"]  # it draws, with a library that need not be there
    assert {"repair", "relay", "worker", "client", "engines"} <= set(ASKING)


@pytest.mark.parametrize(("flag", "status", "words"), [("--help", 0, b"usage: "), ("--no-such", 2, b"usage: ")])
@pytest.mark.parametrize("script", ["repair", "relay", "worker", "client", "engines"])
async def test_a_script_that_is_asked_says_how_it_is_used(script: str, flag: str, status: int, words: bytes) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", f"scripts.bench.{script}", flag),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == status
    assert words in out
    assert b"Traceback" not in out
