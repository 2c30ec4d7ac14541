"""Every error that a client of the proxy can get, in one closed table: status, type, code, text.

Texts never name engines, addresses or internals; the log line with the same request id does.
"""

from enum import StrEnum
from typing import NamedTuple

import orjson

from narwhal.proxy.attempt import Fault
from narwhal.vocabulary import Phase

RETRY_AFTER = "1"


class Refusal(StrEnum):
    """Why a request ends before it is one that engines could serve."""

    BAD_REQUEST = "bad_request"
    MODEL_NOT_FOUND = "model_not_found"
    TOO_LARGE = "too_large"
    NO_ROUTE = "no_route"
    NO_METHOD = "no_method"
    NO_HTTP = "no_http"
    HEAD_TOO_LARGE = "head_too_large"
    HEAD_LATE = "head_late"
    BODY_LATE = "body_late"
    NO_CODING = "no_coding"
    INTERNAL = "internal"


class Row(NamedTuple):
    """One line of the table. Empty `code`: null in the body, unless the condition brings its own."""

    status: int
    type: str
    code: str = ""
    retry_after: bool = False
    message: str = ""  # unless the condition brings its own


TABLE: dict[Refusal | Fault, Row] = {
    Refusal.BAD_REQUEST: Row(400, "invalid_request_error"),
    Refusal.MODEL_NOT_FOUND: Row(404, "invalid_request_error", "model_not_found"),
    Refusal.TOO_LARGE: Row(413, "request_too_large"),
    Refusal.NO_ROUTE: Row(404, "invalid_request_error", "not_found", message="There is nothing at this path"),
    Refusal.NO_METHOD: Row(405, "invalid_request_error", "method_not_allowed"),
    Refusal.NO_HTTP: Row(400, "invalid_request_error", message="The request is not well-formed HTTP"),
    Refusal.HEAD_TOO_LARGE: Row(431, "request_too_large", message="The request's head is too large"),
    Refusal.HEAD_LATE: Row(408, "timeout", "head", message="The request's head did not arrive in time"),
    Refusal.NO_CODING: Row(
        501, "invalid_request_error", "transfer_encoding", message="The only transfer coding that is known is chunked"
    ),
    Refusal.BODY_LATE: Row(408, "timeout", "body", message="The request's body did not arrive in time"),
    Refusal.INTERNAL: Row(500, "internal_error", message="The proxy failed to handle this request"),
    Fault.SATURATED: Row(429, "server_overloaded_error", "", True, "The server is at its capacity; try again later"),
    Fault.ENGINE_BUSY: Row(429, "server_overloaded_error", "", True, "The engines are overloaded; try again later"),
    Fault.CLOSED: Row(503, "service_unavailable", "", True),
    Fault.NO_ENGINES: Row(503, "service_unavailable", "no eligible engines", True),
    Fault.UPSTREAM: Row(502, "upstream_error"),
    Fault.UPSTREAM_TIMEOUT: Row(504, "upstream_error"),
    Fault.ENGINE_IDENTITY: Row(502, "upstream_error", "engine_identity", message="An engine is not the one configured"),
    Fault.QUEUE: Row(504, "timeout", "queue", message="No capacity became free in the time allowed for waiting"),
    Fault.DEADLINE: Row(504, "timeout", "deadline", message="The request's deadline has passed"),
}


class Reply(NamedTuple):
    """An error for a client: an HTTP answer before any output, an event of the stream after it."""

    status: int
    body: bytes
    retry_after: str = ""

    @property
    def event(self) -> bytes:
        """The same as an event of a stream."""
        return b"data: %b\n\n" % self.body


def reply(
    condition: Refusal | Fault,
    *,
    message: str = "",
    code: str = "",
    param: str | None = None,
    phase: Phase | None = None,
    retry_after: str = "",
) -> Reply:
    """The error of `condition`. `phase`: which leg ended an `upstream_error`; `retry_after`: the engine's own."""
    row = TABLE[condition]
    if row.type == "upstream_error" and phase is not None:
        code = row.code or phase.value
        late = "did not answer in time" if row.status == 504 else "failed"
        message = row.message or f"The {phase.value} engine {late}"
    elif condition in (Fault.CLOSED, Fault.NO_ENGINES):
        code = code or row.code
        message = f"The service is unavailable: {code}"
    error = {
        "message": message or row.message,
        "type": row.type,
        "param": param,
        "code": code or row.code or None,
    }
    wait = (retry_after or RETRY_AFTER) if row.retry_after else ""
    return Reply(row.status, orjson.dumps({"error": error}), wait)
