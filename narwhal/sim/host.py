"""Several engines in one operating-system process."""

import asyncio
from collections.abc import Callable, Sequence

from narwhal.clock import Clock
from narwhal.sim.engine import Engine
from narwhal.sim.options import EngineOptions


class Host:
    """Engines that share a process and know each other by id. Raises ValueError where two have the same id."""

    def __init__(
        self,
        options: Sequence[EngineOptions],
        *,
        clock: Clock,
        log: Callable[[str, str], None],
        on_exit: Callable[[Engine, int], None] | None = None,
    ) -> None:
        self.engines = {
            each.id: Engine(each, clock=clock, log=log, on_exit=on_exit if on_exit is not None else _nothing)
            for each in options
        }
        if len(self.engines) != len(options):
            raise ValueError("id: two engines have the same id")
        for engine in self.engines.values():
            engine.siblings = self.engines

    async def start(self) -> None:
        """Start every engine. Raises OSError, having stopped those that ran, where a port is taken."""
        try:
            for engine in self.engines.values():
                await engine.start()
        except OSError:
            await self.stop()
            raise

    async def terminate(self) -> None:
        """End every engine as on SIGTERM."""
        await asyncio.gather(*(engine.terminate() for engine in self.engines.values()))

    async def stop(self) -> None:
        """End every engine without a trace."""
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))


def _nothing(engine: Engine, code: int) -> None:
    """An engine that shares its process with others ends alone."""
