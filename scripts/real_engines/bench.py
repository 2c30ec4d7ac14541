"""What a situation may do: speak to a producer and a consumer, and hurt them.

A situation is written once and runs against two benches: the real engines (`record.py`), whose answers become the
recordings, and the simulated ones (the contract tests), whose answers are held to them. A bench keeps every exchange it
was asked to make, in order, as a JSON document.
"""

import contextlib
import json
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from scripts.real_engines.rawhttp import LINGER_S, Exchange, Request, send

MODEL = "tiny"
PRODUCE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Who(StrEnum):
    """The engine that makes a KV handoff, and the one that uses it."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class Fault(StrEnum):
    """What can be done to an engine's processes. A core fault leaves the HTTP process alone."""

    TERMINATE = "terminate"
    # How an engine that is asked to end ends its streams; a real one decides that by chance.
    TERMINATE_ABORTING = "terminate-aborting"
    TERMINATE_SILENTLY = "terminate-silently"
    KILL = "kill"
    FREEZE = "freeze"
    THAW = "thaw"
    FREEZE_CORE = "freeze-core"
    THAW_CORE = "thaw-core"
    KILL_CORE = "kill-core"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Durations in seconds of the engines behind a bench; the simulated ones may be quicker."""

    kv_lease_s: float = 30.0
    frozen_s: float = 12.0
    hang_s: float = 8.0
    leave_s: float = 1.0
    answer_s: float = 60.0
    linger_s: float = LINGER_S


def describe(exchange: Exchange) -> dict[str, Any]:
    """The exchange as JSON; times in seconds since the request, to the hundredth."""
    document: dict[str, Any] = {"status": exchange.status, "end": exchange.end}
    if exchange.status is None:
        return document
    document["headers"] = {name.lower(): value for name, value in exchange.headers}
    document["framing"] = exchange.framing
    document["connection"] = exchange.connection
    timing = {"headers_s": exchange.headers_s, "end_s": exchange.end_s}
    if exchange.is_stream:
        timed = exchange.timed_events()
        document["events"] = [parsed(data) for _, data in timed]
        if timed:
            timing["first_event_s"] = timed[0][0]
    elif exchange.body:
        text = exchange.body.decode("utf-8", "replace")
        value = parsed(text)
        document["text" if isinstance(value, str) else "json"] = value
    document["timing"] = {name: round(value, 2) for name, value in timing.items() if value is not None}
    return document


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Bench(ABC):
    """A producer and a consumer, and the record of what was asked of them."""

    pace = Pace()

    def __init__(self) -> None:
        self.name = ""
        self.steps: list[dict[str, Any]] = []

    @abstractmethod
    def url(self, who: Who) -> str: ...

    @abstractmethod
    def fault(self, who: Who, fault: Fault) -> None:
        """Returns when the signal is sent; for a kill, when the process is gone."""

    @abstractmethod
    def restart(self, who: Who) -> None:
        """Ends the engine where it lives and starts it again at the same address; returns when it is ready."""

    @contextlib.contextmanager
    def later(self, delay_s: float, act: Callable[[], None]) -> Iterator[None]:
        """Does something after a delay, beside the block; at the end of the block at the latest."""
        timer = threading.Timer(delay_s, act)
        timer.start()
        try:
            yield
        finally:
            if timer.is_alive():
                timer.cancel()
                act()
            timer.join()

    def begin(self, name: str) -> None:
        self.name, self.steps = name, []

    def ask(
        self,
        who: Who,
        step: str,
        request: Request,
        *,
        timeout_s: float | None = None,
        enough: Callable[[Exchange], bool] = lambda _: False,
        on_piece: Callable[[Exchange], None] | None = None,
    ) -> Exchange:
        """Makes one exchange and keeps it under the name of the step."""
        pace = self.pace
        exchange = send(
            self.url(who),
            request,
            timeout_s=timeout_s or pace.answer_s,
            linger_s=pace.linger_s,
            enough=enough,
            on_piece=on_piece,
        )
        self.note(who, step, request, describe(exchange))
        return exchange

    def note(self, who: Who, step: str, request: Request, response: dict[str, Any]) -> None:
        body = request.body.decode() if isinstance(request.body, bytes) else request.body
        asked = {"method": request.method, "path": request.path, "headers": dict(request.headers), "body": body}
        self.steps.append({"step": step, "to": str(who), "request": asked, "response": response})

    def get(self, who: Who, path: str, step: str = "", method: str = "GET", **options: Any) -> Exchange:
        return self.ask(who, step or f"{method} {path}", Request(method=method, path=path), **options)

    def post(self, who: Who, step: str, path: str, body: Any, **options: Any) -> Exchange:
        """Posts a body with a request id that names the situation and the step, as Narwhal's legs carry one."""
        names = (("X-Request-Id", f"{self.name}.{re.sub('[^a-z0-9]+', '-', step.lower())}"),)
        return self.ask(who, step, Request(method="POST", path=path, body=body, headers=names), **options)

    def prefill(self, path: str, body: dict[str, Any], step: str = "prefill leg") -> dict[str, Any]:
        """Runs a prefill leg on the producer as Narwhal does and returns the KV handoff."""
        leg = {k: v for k, v in body.items() if k not in {"stream", "stream_options", "min_tokens"}}
        leg |= {"max_tokens": 1, "stream": False, "kv_transfer_params": PRODUCE}
        if "max_completion_tokens" in body:
            leg["max_completion_tokens"] = 1
        answer = self.post(Who.PRODUCER, step, path, leg)
        handoff = json.loads(answer.body).get("kv_transfer_params") if answer.status == 200 else None
        if not isinstance(handoff, dict):
            raise AssertionError(f"{self.name}: no KV handoff, status {answer.status}: {answer.body[:300]!r}")
        return handoff

    def decode(
        self, path: str, body: dict[str, Any], handoff: Any, step: str = "decode leg", **options: Any
    ) -> Exchange:
        return self.post(Who.CONSUMER, step, path, {**body, "kv_transfer_params": handoff}, **options)

    def both_legs(self, path: str, body: dict[str, Any]) -> Exchange:
        return self.decode(path, body, self.prefill(path, body))

    def serves(self, who: Who, step: str = "serves afterwards") -> bool:
        """Whether the engine still computes: one short local completion."""
        body = {"model": MODEL, "prompt": "still there?", "max_tokens": 2, "temperature": 0}
        return self.post(who, step, COMPLETIONS, body, timeout_s=self.pace.answer_s).status == 200

    def until_health(self, who: Who, step: str, wanted: Callable[[Exchange], bool], timeout_s: float) -> bool:
        """Asks for health until the answer is as wanted; keeps the last answer only."""
        due = time.monotonic() + timeout_s
        request = Request(method="GET", path="/health")
        while True:
            exchange = send(self.url(who), request, timeout_s=2.0)
            if wanted(exchange) or time.monotonic() > due:
                self.note(who, step, request, describe(exchange))
                return wanted(exchange)
            time.sleep(0.05)

    def running(self, who: Who) -> float:
        """How many requests the engine says it is running or holding back."""
        text = send(self.url(who), Request(method="GET", path="/metrics"), timeout_s=5.0).body.decode()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        lines = (line for line in text.splitlines() if line.startswith(tuple(f"{n}{{" for n in names)))
        return sum(float(line.rpartition(" ")[2]) for line in lines)
