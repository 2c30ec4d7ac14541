"""The ensemble that the tests of this folder share."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.process.ha.ensemble import Ensemble, ensemble


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """It runs for as long as tests of this folder do."""
    with ensemble(tmp_path_factory.mktemp("ensemble")) as made:
        yield made


@pytest_asyncio.fixture
async def fleet(running: Ensemble) -> AsyncIterator[Ensemble]:
    """Everybody in place before the test; after it, the proof that at no instant two processes acted."""
    await running.restore()
    await running.settled()
    try:
        yield running
    finally:
        await running.restore()  # the proof reads from etcd
    await asyncio.to_thread(running.one_ruler)
