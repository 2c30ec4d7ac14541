"""What an engine was asked, and how each request ended: facts for tests, in bounded memory."""

from collections import deque
from enum import StrEnum
from typing import Any

import orjson

from narwhal.sim.wire import Request

_BODY_KEPT_BYTES = 16_384
_LONG_FIELDS = ("prompt", "messages")


class RequestPhase(StrEnum):
    """What a request is to the engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"  # a completion without a KV handoff
    TOKENIZE = "tokenize"
    MODELS = "models"
    HEALTH = "health"
    VERSION = "version"
    METRICS = "metrics"
    OTHER = "other"


GENERATION = frozenset({RequestPhase.PREFILL, RequestPhase.DECODE, RequestPhase.LOCAL})


class Ending(StrEnum):
    """How an engine that ends leaves the requests that it runs; a real one picks the first three by chance."""

    ERROR = "error"  # an error event and the marker; 500
    ABORT = "abort"  # what there is, with the finish reason `abort`, as if it were whole
    SILENT = "silent"  # nothing, on an open connection


class Outcome(StrEnum):
    """How a request ended, as the engine saw it."""

    RUNNING = "running"
    ANSWERED = "answered"  # the answer was sent whole, whatever its status
    DISCONNECTED = "disconnected"  # the peer closed the connection first
    FAULTED = "faulted"  # a fault ended it
    TERMINATED = "terminated"  # the engine ended first


class Record:
    """One request. Instants are seconds of the machine's monotonic clock."""

    __slots__ = (
        "body",
        "ended_at",
        "headers",
        "number",
        "outcome",
        "peer",
        "phase",
        "request",
        "started_at",
        "status",
        "tokens",
    )

    def __init__(self, number: int, request: Request, phase: RequestPhase, now: float) -> None:
        self.number = number
        self.request = (request.method, request.path)
        self.phase = phase
        self.headers = request.headers
        self.body = request.body
        self.peer = id(request.conn)
        self.started_at = now
        self.ended_at: float | None = None
        self.outcome = Outcome.RUNNING
        self.status: int | None = None
        self.tokens = 0

    def end(self, outcome: Outcome, now: float) -> None:
        """The request is over; only the first end counts."""
        if self.ended_at is None:
            self.outcome = outcome
            self.ended_at = now

    def view(self) -> dict[str, Any]:
        """This request as JSON values."""
        return {
            "number": self.number,
            "method": self.request[0],
            "path": self.request[1],
            "phase": self.phase.value,
            "request_id": next((v.decode("latin-1") for k, v in self.headers if k == b"x-request-id"), None),
            "connection": self.peer,
            "headers": _joined(self.headers),
            "body_bytes": len(self.body),
            "body": _fields(self.body),
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "duration_s": None if self.ended_at is None else self.ended_at - self.started_at,
            "outcome": self.outcome.value,
            "status": self.status,
            "tokens": self.tokens,
        }


def _joined(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by lower-case name; the values of a repeated one joined with a comma."""
    joined: dict[str, str] = {}
    for key, value in headers:
        name, text = key.decode("latin-1"), value.decode("latin-1")
        joined[name] = f"{joined[name]}, {text}" if name in joined else text
    return joined


def _fields(body: bytes) -> Any:
    """The body as sent; of a long one everything but the prompt; None where it is no JSON."""
    if not body:
        return None
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if len(body) > _BODY_KEPT_BYTES and isinstance(fields, dict):
        return {key: value for key, value in fields.items() if key not in _LONG_FIELDS}
    return fields


class RequestLog:
    """The newest requests, and how many came in each phase and ended in each way."""

    def __init__(self, keep: int = 2_000, keep_bytes: int = 32 << 20) -> None:
        self._records: deque[Record] = deque()
        self._keep = keep
        self._keep_bytes = keep_bytes
        self._bytes = 0
        self.total = 0
        self.by_phase: dict[RequestPhase, int] = dict.fromkeys(RequestPhase, 0)

    def begin(self, request: Request, phase: RequestPhase, now: float) -> Record:
        """A request arrived whole."""
        self.total += 1
        self.by_phase[phase] += 1
        record = Record(self.total, request, phase, now)
        self._records.append(record)
        self._bytes += len(record.body)
        while len(self._records) > self._keep or (self._bytes > self._keep_bytes and len(self._records) > 1):
            self._bytes -= len(self._records.popleft().body)
        return record

    def view(self, *, phase: str | None = None, after: int = 0) -> list[dict[str, Any]]:
        """The kept requests, oldest first; of one phase, or with a number above `after`."""
        return [
            record.view()
            for record in self._records
            if record.number > after and (phase is None or record.phase.value == phase)
        ]
