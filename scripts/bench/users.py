"""Users of a fleet: the official client, many at once, and what became of each of their requests."""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import httpx2
import openai

from narwhal.sim.text import expected_text

MODEL = "sim-model"


class End(StrEnum):
    """How a request ended, as its user saw it."""

    WHOLE = "whole"  # the right answer
    BEFORE = "before first byte"  # an error instead of an answer
    MIDWAY = "mid-stream"  # an error after a part of the answer
    UNTRUE = "looked whole but was not"  # no error, and not the right answer
    HUNG = "hung"  # nothing for so long that the user gave up


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request. Instants are seconds of the machine's monotonic clock."""

    began_at: float
    ended_at: float
    end: End
    status: int = 0  # HTTP status of a failed one; 0: none came
    words: str = ""


@dataclass(kw_only=True)
class Users:
    """Ask until `stop`, three streamed requests to each that is not: each user one after the other, or, with a `rate`,
    at fixed instants, whatever became of those before."""

    addresses: Sequence[str]  # of the proxies, taken in turn
    count: int = 8
    rate: float = 0.0  # streamed requests a second; 0: as many as the users come to
    tokens: int = 24
    patience_s: float = 45.0  # a user who has had nothing for so long gives up, and calls it hung
    asked: list[Asked] = field(default_factory=list)

    def failed(self, *, since: float, until: float = float("inf")) -> list[Asked]:
        """The requests that ended badly in this time."""
        return [a for a in self.asked if a.end is not End.WHOLE and since <= a.ended_at < until]

    def ends(self, *, since: float, until: float = float("inf")) -> Counter[End]:
        """How many of those that ended in this time ended how."""
        return Counter(a.end for a in self.asked if since <= a.ended_at < until)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator["Users"]:
        """They ask until the block ends; what is under way then ends by itself."""
        stop = asyncio.Event()
        clients = [
            openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="any", max_retries=0, timeout=self.patience_s)
            for address in self.addresses
        ]
        if self.rate:
            tasks = [asyncio.create_task(self._arrivals(clients, stop))]
        else:
            tasks = [
                asyncio.create_task(self._user(number, clients[number % len(clients)], stop))
                for number in range(self.count)
            ]
        try:
            yield self
        finally:
            stop.set()
            await asyncio.gather(*tasks)
            for client in clients:
                await client.close()

    async def _arrivals(self, clients: Sequence[openai.AsyncOpenAI], stop: asyncio.Event) -> None:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                due_s = began + number / self.rate - time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), max(0.0, due_s))
                if stop.is_set():
                    return
                client = clients[number % len(clients)]
                group.create_task(self._ask(client, f"the {number}th request", streamed=True))

    async def _user(self, number: int, client: openai.AsyncOpenAI, stop: asyncio.Event) -> None:
        for turn in itertools.count(number):
            if stop.is_set():
                return
            await self._ask(client, f"user {number} asks for the {turn}th time", streamed=turn % 4 != 0)
            if self.asked[-1].end is End.BEFORE:
                # Refusals come fast: a user who asks again at once would be a flood.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 0.05)

    async def _ask(self, client: openai.AsyncOpenAI, prompt: str, *, streamed: bool) -> None:
        began_at = time.monotonic()
        parts: list[str] = []
        end, status, words = End.WHOLE, 0, ""
        try:
            async with asyncio.timeout(self.patience_s):
                await self._answer(client, prompt, parts, streamed=streamed)
            if "".join(parts) != expected_text(prompt, self.tokens):
                end, words = End.UNTRUE, f"{len(''.join(parts))} characters"
        except (TimeoutError, openai.APITimeoutError):
            end = End.HUNG
        except openai.APIStatusError as error:
            end, status, words = End.BEFORE, error.status_code, error.message
        except (openai.APIError, httpx2.HTTPError) as error:
            end, words = End.MIDWAY if parts else End.BEFORE, str(error) or type(error).__name__
        ended_at = time.monotonic()
        self.asked.append(Asked(began_at=began_at, ended_at=ended_at, end=end, status=status, words=words))

    async def _answer(self, client: openai.AsyncOpenAI, prompt: str, parts: list[str], *, streamed: bool) -> None:
        if not streamed:
            whole = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=self.tokens)
            parts.append(whole.choices[0].text)
            return
        stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=self.tokens, stream=True)
        async with stream:
            async for event in stream:
                parts += [choice.text for choice in event.choices]
