"""Asks the engine which process it is, when the document is asked for and from time to time, and says what changed."""

import asyncio
from dataclasses import dataclass

import structlog

from narwhal.attest.contract import Contract
from narwhal.attest.standing import Standing, State
from narwhal.control.checks import Failed, identify
from narwhal.control.engine_client import EngineClient, NoAnswer, ProbeSettings

_CONNECTIONS = 2  # the two questions of one verification; there is one verification at a time
_KEEPALIVE_S = 0.0  # a connection that outlives the engine would hide that its address is somebody else's

log = structlog.get_logger()


@dataclass(kw_only=True)
class Counts:
    """Verifications by how they ended."""

    same: int = 0
    changed: int = 0
    failed: int = 0


class Sidecar:
    """One engine's sidecar. The gate and this read the identity by the same code, so they cannot differ on it."""

    def __init__(self, engine: str, contract: Contract, *, timeout_s: float, interval_s: float) -> None:
        """`timeout_s` bounds one verification; `interval_s` lies between two that nobody asked for."""
        self.engine = engine
        self.contract = contract
        self.standing = Standing()
        self.counts = Counts()
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Looks from time to time, until cancelled, so that the log and the metrics tell without being asked."""
        while True:
            await self.verify()
            await asyncio.sleep(self._interval_s)

    async def verify(self) -> None:
        """Brings the standing up to date. Whoever asks meanwhile shares the answer. Raises nothing."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._verify())
        await asyncio.shield(self._running)  # one client that leaves does not end it for the others

    async def close(self) -> None:
        """Ends what is under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _verify(self) -> None:
        before = self.standing.state, self.standing.attested
        timeout_s = self._timeout_s
        settings = ProbeSettings(
            connections=_CONNECTIONS,
            connect_timeout_s=timeout_s,
            pool_timeout_s=timeout_s,
            keepalive_s=_KEEPALIVE_S,
        )
        client = EngineClient(settings)
        try:
            # The bound is on both questions together; the client's own, on each, must not come first.
            async with asyncio.timeout(timeout_s):
                process = await identify(client, self.engine, timeout_s=2 * timeout_s)
        except TimeoutError:
            self._could_not(f"it did not say which process it is within {timeout_s:g} s")
        except (Failed, NoAnswer) as error:
            self._could_not(str(error))
        else:
            self.standing.saw(process)
            if self.standing.state is State.VALID:
                self.counts.same += 1
            else:
                self.counts.changed += 1
        finally:
            await client.close()
        if (self.standing.state, self.standing.attested) != before:
            self._say()

    def _could_not(self, words: str) -> None:
        self.counts.failed += 1
        self.standing.could_not(words)

    def _say(self) -> None:
        """One line for each change, not for each look."""
        standing = self.standing
        if standing.state is State.VALID and standing.attested is not None:
            log.info(
                "the document holds",
                engine=self.engine,
                version=standing.attested.version,
                started_at=standing.attested.started_at,
                digest=self.contract.digest,
            )
        elif standing.state is not State.WAITING:
            log.error("the document does not hold", engine=self.engine, state=standing.state, reason=standing.reason)
