"""Open load: so many streaming requests a second, whatever becomes of those before, and how each of them ended."""

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from narwhal.sim.text import expected_text
from scripts.bench.users import MODEL, Asked, End


@dataclass(kw_only=True)
class Arrivals:
    """Requests that come one after the other."""

    addresses: Sequence[str]  # of the proxies, taken in turn
    per_s: float = 50.0
    tokens: int = 24
    patience_s: float = 45.0  # after which a user has given up
    asked: list[Asked] = field(default_factory=list)

    def ends(self, *, since: float, until: float = float("inf")) -> Counter[End]:
        """How many of those that began in this time ended how."""
        return Counter(a.end for a in self.asked if since <= a.began_at < until)

    @contextlib.asynccontextmanager
    async def coming(self) -> AsyncIterator["Arrivals"]:
        """They come until the block ends; what is under way then ends by itself."""
        stop = asyncio.Event()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            task = asyncio.create_task(self._come(session, stop))
            try:
                yield self
            finally:
                stop.set()
                await task

    async def _come(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                # By the clock, not by pauses: a machine that falls behind does not ask less.
                with contextlib.suppress(TimeoutError):
                    wait = began + number / self.per_s - time.monotonic()
                    await asyncio.wait_for(stop.wait(), max(0.0, wait))
                if stop.is_set():
                    return
                group.create_task(self._ask(session, number))

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        prompt, began_at = f"request {number} of the open load", time.monotonic()
        body = {"model": MODEL, "prompt": prompt, "max_tokens": self.tokens, "stream": True}
        url = f"http://{self.addresses[number % len(self.addresses)]}/v1/completions"
        got = bytearray()
        status, words, end = 0, "", End.WHOLE
        try:
            async with asyncio.timeout(self.patience_s), session.post(url, json=body) as answer:
                status = answer.status
                async for chunk in answer.content.iter_any():
                    got += chunk
            end, words = _judged(status, bytes(got), expected_text(prompt, self.tokens))
        except TimeoutError:
            end = End.HUNG
        except aiohttp.ClientError as error:
            end, words = End.MIDWAY if got and status == 200 else End.BEFORE, str(error) or type(error).__name__
        self.asked.append(Asked(began_at=began_at, ended_at=time.monotonic(), end=end, status=status, words=words))


def _judged(status: int, answer: bytes, expected: str) -> tuple[End, str]:
    """How an answer ended that came to its end."""
    if status != 200:
        return End.BEFORE, answer[:200].decode(errors="replace")
    text, done, error = "", False, ""
    for line in answer.split(b"\n\n"):
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            done = True
        elif data:
            event = json.loads(data)
            if "error" in event:
                error = str(event["error"].get("message"))
            else:
                text += "".join(choice["text"] for choice in event["choices"])
    if error and not done:
        return (End.MIDWAY if text else End.BEFORE), error
    if done and not error and text == expected:
        return End.WHOLE, ""
    return End.UNTRUE, f"{len(text)} characters, {'with' if done else 'without'} [DONE]{error and ', ' + error}"
