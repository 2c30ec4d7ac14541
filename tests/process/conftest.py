"""A stage for each test, cleared afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Where a test's programs run."""
    stage = Stage(tmp_path)
    try:
        yield stage
    finally:
        stage.close()
