"""What narwhal-serve makes of a daemon that ends: by its exit status, whatever it answered before."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from narwhal.cli.serve import Child
from narwhal.clock import RealClock
from narwhal.daemon import StartError


class Lives(Child):
    """A daemon that lives so often, each time to be seen, and ends with these statuses; then it lives on."""

    def __init__(self, statuses: Sequence[int], *, up: bool = True) -> None:
        super().__init__("narwhal-control", lambda again: [], "127.0.0.1:1", RealClock(), random.Random(1))
        self.statuses = list(statuses)
        self.seen = up

    async def _live(self) -> int:
        if self.seen:
            self.up.set()
        if self.statuses:
            return self.statuses.pop(0)
        self.stopping.set()
        return 0


@pytest.mark.rule("S2")
@pytest.mark.parametrize("up", [True, False])
async def test_a_daemon_that_refuses_to_start_ends_the_start_whether_it_was_seen_or_not(up: bool) -> None:
    with pytest.raises(StartError) as refused:
        await asyncio.wait_for(Lives([2, 0], up=up).run(), 30)
    assert (refused.value.code, str(refused.value)) == (2, "")  # it has said why itself


@pytest.mark.parametrize("statuses", [[-9], [1], [-9, 2], [1, 2, 2]])
async def test_a_daemon_that_was_up_is_started_again_whatever_happens_later(statuses: list[int]) -> None:
    """Proxies serve on meanwhile; a fleet file that is broken by now can be mended."""
    child = Lives(statuses)
    await asyncio.wait_for(child.run(), 30)
    assert child.statuses == []


@pytest.mark.parametrize(("status", "code", "words"), [(1, 1, ""), (-9, 1, "narwhal-control did not start: signal 9")])
async def test_a_daemon_that_ends_before_it_was_seen_ends_the_start(status: int, code: int, words: str) -> None:
    with pytest.raises(StartError) as refused:
        await asyncio.wait_for(Lives([status, 0], up=False).run(), 30)
    assert (refused.value.code, str(refused.value)) == (code, words)
