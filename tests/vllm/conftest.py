"""Real engines and the real `narwhal-serve` in front of them, once for the whole run (`make test-vllm`).

Plain `make test` does not come here: `norecursedirs` in pyproject.toml names this directory, because the environment
takes 2.7 GB and the engines a minute or two to start. See docs/real-engines.md.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.real_engines import engines
from tests.vllm.stack import SETTINGS, Stack


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[engines.Engine, engines.Engine, Path]]:
    """A prefill and a decode engine, fresh: they have never shaken hands."""
    run = tmp_path_factory.mktemp("engines")
    started, seconds = engines.start([("prefill", 0), ("decode", 0)], settings=SETTINGS, run=run)
    print(f"real engines ready after {seconds:.0f} s", file=sys.stderr)
    try:
        yield started[0], started[1], run
    finally:
        for engine in engines.running(run):
            engines.stop(engine, run)


@pytest.fixture(scope="session")
def stack(pair: tuple[engines.Engine, engines.Engine, Path]) -> Iterator[Stack]:
    """`narwhal-serve` on the pair, ready; ended by SIGTERM, which must be clean."""
    prefill, decode, run = pair
    stack = Stack(run, {prefill.name: prefill, decode.name: decode})
    try:
        stack.serve()
        yield stack
        assert stack.end() == 0
    finally:
        stack.kill()


@pytest.fixture(scope="session")
def three(stack: Stack) -> Stack:
    """The same with a second decode engine, which joined while the others served."""
    stack.add("decode-1", "decode")
    return stack


@pytest.fixture
def healed(three: Stack) -> Stack:
    """Three engines that all serve, whatever the test before did to them."""
    three.heal()
    return three
