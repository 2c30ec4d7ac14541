"""The request log keeps facts, and not more than it may."""

import json
from typing import Any, cast

from narwhal.sim.records import Outcome, RequestLog, RequestPhase
from narwhal.sim.wire import HttpConnection, Request


def request(body: Any = None, **headers: str) -> Request:
    made = Request(cast(HttpConnection, object()))
    made.method, made.path = "POST", "/v1/completions"
    made.headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    made.body = b"" if body is None else json.dumps(body).encode()
    return made


def test_what_was_asked_and_how_it_ended() -> None:
    log = RequestLog()
    record = log.begin(request({"prompt": "x"}, x_request_id="r-1", cookie="a"), RequestPhase.DECODE, 10.0)
    (running,) = log.view()
    assert (running["outcome"], running["ended_at"], running["duration_s"]) == ("running", None, None)
    record.end(Outcome.DISCONNECTED, 12.5)
    record.end(Outcome.ANSWERED, 13.0)  # too late: it has ended
    (seen,) = log.view(phase="decode")
    assert (seen["outcome"], seen["duration_s"], seen["request_id"]) == ("disconnected", 2.5, "r-1")
    assert (seen["body"], seen["headers"]["cookie"]) == ({"prompt": "x"}, "a")
    assert log.view(phase="prefill") == log.view(after=1) == []


def test_long_bodies_are_shown_without_their_prompt() -> None:
    log = RequestLog()
    log.begin(request({"prompt": "x" * 20_000, "max_tokens": 4}), RequestPhase.LOCAL, 0.0)
    (seen,) = log.view()
    assert seen["body"] == {"max_tokens": 4}
    assert seen["body_bytes"] > 20_000


def test_memory_is_bounded_by_number_and_by_bytes() -> None:
    log = RequestLog(keep=5, keep_bytes=10_000)
    for _ in range(20):
        log.begin(request(), RequestPhase.HEALTH, 0.0)
    assert [seen["number"] for seen in log.view()] == [16, 17, 18, 19, 20]
    log.begin(request({"prompt": "x" * 50_000}), RequestPhase.LOCAL, 0.0)
    log.begin(request(), RequestPhase.HEALTH, 0.0)
    assert [seen["number"] for seen in log.view()] == [22]
    assert (log.total, log.by_phase[RequestPhase.HEALTH]) == (22, 21)
