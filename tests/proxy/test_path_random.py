"""Random requests against engines that fail at random: every request ends in exactly one way within its deadline, with
the right text or an honest error, and no handoff is pulled twice or late (the engines' own ledgers).

By hand: NARWHAL_RANDOM_REQUESTS=2000, NARWHAL_RANDOM_SEED=…; a failure says its seed.
"""

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from narwhal.sim.options import EngineOptions
from narwhal.sim.testing import SimEngine, sim_engines
from narwhal.sim.text import expected_chat_text, expected_text
from narwhal.vocabulary import RequestResult
from tests.metronome import Metronome
from tests.proxy.harness import MODEL, Path, data_path, placed, settings

REQUESTS = int(os.environ.get("NARWHAL_RANDOM_REQUESTS", "250"))
SEEDS = [int(os.environ["NARWHAL_RANDOM_SEED"])] if "NARWHAL_RANDOM_SEED" in os.environ else [1, 2]
CLIENTS = 16
DEADLINE_S, LATE_S = 4.0, 0.6
# KV lives for 2 s; none is sent on after 1.2 s, and no fault holds an engine up for longer than the rest of it.
LEASE_S, MAX_AGE_S, HELD_S = 2.0, 1.2, 0.4
SETTINGS = settings(
    serving={
        "max_attempts": 3,
        "retry_base_s": 0.02,
        "retry_cap_s": 0.1,
        "retry_budget": 50,
        "request_timeout_s": DEADLINE_S,
        "prefill_timeout_s": 1.0,
        "handoff_max_age_s": MAX_AGE_S,
        "max_connections": 14,
        "queue_capacity": 4,
        "queue_timeout_s": 1.0,
    },
    engine={
        "kv_lease_s": LEASE_S,
        "first_token_timeout_s": 0.6,
        "kv_first_pull_timeout_s": 1.0,
        "decode_read_timeout_s": 0.8,
        "keepalive_s": 0.3,
    },
)
# (fault, its parameters or several to choose from); each is active for a while or for a few requests
FAULTS: list[tuple[str, list[dict[str, Any]]]] = [
    ("status", [{"status": s} for s in (400, 408, 429, 500, 502, 503)] + [{"status": 429, "retry_after": "1"}]),
    ("delay", [{"seconds": HELD_S}]),
    ("hang", [{}]),
    ("close-before-answer", [{"how": "clean"}, {"how": "reset"}]),
    ("hang-headers", [{}]),
    ("slow-first-token", [{"seconds": HELD_S}]),
    ("cut-answer", [{"after": 0}, {"after": 40, "how": "reset"}]),
    ("dribble", [{"segment": 1, "chunk": 3}, {"segment": 7}]),
    ("stall", [{"after": 0}, {"after": 2}]),
    ("cut", [{"after": 0}, {"after": 1}, {"after": 3, "how": "reset"}]),
    ("no-done", [{}, {"after": 1}]),
    ("finish-silence", [{}]),
    ("error-event", [{"after": 0}, {"after": 2}, {"after": 2, "done": False}]),
    ("done-without-tokens", [{}]),
    ("bad-framing", [{"after": 0}, {"after": 2}]),
    ("bad-handoff", [{"variant": "missing"}, {"variant": "no-blocks"}, {"variant": "port-not-a-number"}]),
    ("first-transfer-fails", [{}]),
    ("transfer-fails", [{}]),
    ("serve-fails", [{}]),
    ("refuse", [{}]),
    ("reset-on-accept", [{}]),
    ("idle-close", [{"seconds": 0.05}]),
    ("core-stopped", [{}]),
    ("frozen", [{}]),
]


@dataclass
class Run:
    """One run: what is asked, what breaks, what came of it."""

    path: Path
    engines: list[SimEngine]
    seed: int
    metronome: Metronome
    draw: random.Random = field(init=False)
    ends: Counter[str] = field(default_factory=Counter)
    asked: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    # --- engines ---

    async def trouble(self) -> None:
        """Something breaks every few hundredths of a second, and heals."""
        while True:
            await asyncio.sleep(self.draw.uniform(0.01, 0.06))
            engine = self.draw.choice(self.engines)
            if not engine.engine.running():
                await engine.restart()
            elif self.draw.random() < 0.08:
                await engine.restart(self.draw.uniform(0.0, 0.1))
            else:
                mode, variants = self.draw.choice(FAULTS)
                await engine.set_fault(mode, **self.draw.choice(variants), for_s=self.draw.uniform(0.1, HELD_S))
            if self.draw.random() < 0.1:
                self.path.feed.controlled = not self.path.feed.controlled

    # --- clients ---

    async def client(self) -> None:
        """Asks until all has been asked."""
        while self.asked < REQUESTS:
            self.asked += 1
            await self._ask(self.asked)
            await asyncio.sleep(self.draw.uniform(0.0, 0.1))

    async def _ask(self, number: int) -> None:
        draw = self.draw
        chat, stream, tokens = draw.random() < 0.4, draw.random() < 0.6, draw.randrange(1, 8)
        prompt = f"number {number} asks " * draw.randrange(1, 12)
        messages = [{"role": "user", "content": prompt}]
        body: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "stream": stream}
        body |= {"messages": messages} if chat else {"prompt": prompt}
        text = expected_chat_text(messages, tokens) if chat else expected_text(prompt, tokens)
        patience_s = draw.uniform(0.0, 0.3) if draw.random() < 0.1 else 30.0
        began, kept_s = time.monotonic(), self.metronome.total_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s) as patience:
                got = await self.path.post(body, route="/v1/chat/completions" if chat else "/v1/completions")
        if patience.expired():
            assert patience_s < 1.0, f"seed {self.seed}: request {number} hangs"
            self.ends["client left"] += 1
            return
        took_s = time.monotonic() - began - (self.metronome.total_s - kept_s)
        assert took_s < DEADLINE_S + LATE_S, f"seed {self.seed}: request {number} took {took_s:.2f} s"
        self.ends[self._judged(number, got, text, stream=stream)] += 1

    def _judged(self, number: int, got: Any, text: str, *, stream: bool) -> str:
        what = f"seed {self.seed}: request {number}: {got}"
        if got.status != 200:
            assert got.status in {400, 429, 502, 503, 504}, what
            assert got.error["message"], what
            assert ("Retry-After" in got.headers) == (got.status in {429, 503}), what
            return str(got.status)
        if not stream:
            choice = got.json["choices"][0]
            assert (choice["text"] if "text" in choice else choice["message"]["content"]) == text, what
            return "whole"
        *events, last = got.events
        said = ""
        for event in events:
            for choice in json.loads(event)["choices"]:
                said += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if last == b"[DONE]":
            assert said == text, what
            return "whole"
        assert b"[DONE]" not in got.body, what
        assert "error" in json.loads(last), what
        assert text.startswith(said.rstrip("�")), what
        return "error midway"


async def _run(seed: int) -> None:
    options = [
        EngineOptions(id=name, tpot_ms=2.0, kv_lease_s=LEASE_S, first_pull_s=0.005, seed=seed)
        for name in ("p1", "p2", "p3", "d1", "d2", "d3")
    ]
    async with sim_engines(*options) as engines:
        url = {engine.id: engine.url for engine in engines}
        prefill, decode = ({n: u for n, u in url.items() if n.startswith(side)} for side in "pd")
        async with data_path(placed(prefill, decode), SETTINGS) as path:
            with Metronome() as metronome:
                run = Run(path, engines, seed, metronome)
                trouble = asyncio.create_task(run.trouble())
                try:
                    async with asyncio.TaskGroup() as clients:
                        for _ in range(CLIENTS):
                            clients.create_task(run.client())
                finally:
                    trouble.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await trouble
            await path.at_rest()
            results = Counter(path.reporter.results)
            retries = sum(n for _, n in path.reporter.requests)
            print(f"seed {seed}: {dict(run.ends)}, {retries} retries")
            # One outcome each, whatever the client saw of it; who left at once may never have been heard.
            left = run.ends["client left"]
            assert run.asked == sum(run.ends.values())
            assert run.asked - left <= len(path.reporter.results) <= run.asked
            assert 0 <= results[RequestResult.SERVED] - run.ends["whole"] <= left
            assert results[RequestResult.CANCELLED] <= left
            assert sum(path.data.metrics.requests.values()) == len(path.reporter.results)
            assert path.data.vigil.running == 0
            for engine in engines:
                totals = engine.totals()
                assert (totals["double_pulls"], totals["late_pulls"]) == (0, 0), f"seed {seed}: {engine.ledger()}"
            assert run.ends["whole"] > REQUESTS // 3, "something was served"


@pytest.mark.rule("V3", "V4", "V5", "V6", "V8")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_requests_against_random_faults(seed: int) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60.0 + REQUESTS / 4):
            await _run(seed)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())
