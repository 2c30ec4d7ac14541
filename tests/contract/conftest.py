"""What tests of control processes share: engines that answer, and the medium that model stores keep things in."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.contract.control_kit import Engines, engines
from tests.contract.model_store import Medium


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Engines]:
    """Engines of every kind, until the test ends."""
    async with engines() as made:
        yield made


@pytest.fixture
def medium() -> Medium:
    """A store's medium without anything on it."""
    return Medium()
