"""What faults do to answers: to the time before the headers, to a handoff, to a stream's script, to a whole body."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from narwhal.sim.faults import Fault
from narwhal.sim.openai_api import ApiError, Json, error_event
from narwhal.sim.stream import DONE, Do, Script, Step
from narwhal.sim.wire import JSON, LAST_CHUNK, HttpConnection, chunk, head

_Edit = Callable[[Script, Mapping[str, Any]], Script]


async def before_answer(faults: list[Fault], conn: HttpConnection) -> ApiError | str | None:
    """Let the faults act before the headers: an error to answer, `hang` or `closed` if nothing follows, or None."""
    for fault in faults:
        name, params = fault.row.name, fault.params
        if name in ("delay", "health-slow"):
            await asyncio.sleep(params["seconds"])
        elif name in ("hang", "health-hang"):
            return "hang"
        elif name == "close-before-answer":
            end(conn, params["how"])
            return "closed"
        else:
            return _status(params)
    return None


def _status(params: Mapping[str, Any]) -> ApiError:
    status: int = params["status"]
    kinds = {401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError", 429: "RateLimitError"}
    kind = kinds.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    error = ApiError(status, params.get("message") or f"injected status {status}", kind)
    if params.get("retry_after"):
        error.headers = ((b"retry-after", params["retry_after"].encode()),)
    return error


def end(conn: HttpConnection, how: str) -> None:
    """End a connection in the middle: with FIN, or with RST."""
    if how == "reset":
        conn.reset()
    else:
        conn.close()


# -- handoffs


def bad_handoff(body: Json, variant: str) -> bytes:
    """A prefill's answer whose handoff is unusable in this way."""
    if variant == "not-json":
        return b"<html>it works</html>"
    if variant == "missing":
        body.pop("kv_transfer_params")
    else:
        body["kv_transfer_params"] = _bad_params(body["kv_transfer_params"], variant)
    return orjson.dumps(body)


def _bad_params(params: Json, variant: str) -> Any:
    whole: dict[str, Any] = {
        "null": None,
        "not-an-object": "garbage",
        "empty": {},
        "only-flag": {"do_remote_prefill": True},
    }
    if variant in whole:
        return whole[variant]
    left_out = {
        "no-engine-id": "remote_engine_id",
        "no-request-id": "remote_request_id",
        "no-host": "remote_host",
        "no-port": "remote_port",
        "no-blocks": "remote_block_ids",
    }
    if variant in left_out:
        return {key: value for key, value in params.items() if key != left_out[variant]}
    blocks = params["remote_block_ids"]
    changed: dict[str, Json] = {
        "empty-engine-id": {"remote_engine_id": ""},
        "port-not-a-number": {"remote_port": "http"},
        "blocks-not-lists": {"remote_block_ids": [5, 6]},
        "negative-block": {"remote_block_ids": [[-1]]},
        "few-blocks": {"remote_block_ids": [group[:-1] for group in blocks]},
        "wrong-flags": {"do_remote_prefill": False, "do_remote_decode": True},
        "wrong-request-id": {"remote_request_id": "cmpl-nobody-0-00000000"},
        "push": {"transfer_mode": "push"},
    }
    return {**params, **changed[variant]}


# -- streams


def bend(script: Script, faults: list[Fault]) -> Script:
    """A stream's script as these faults leave it. The one that looks at single bytes goes last."""
    for fault in sorted(faults, key=lambda fault: fault.row.name == "dribble"):
        script = STREAM_EDITS[fault.row.name](script, fault.params)
    return script


def _until(script: Script, tokens: int) -> Iterator[Step]:
    """The steps up to that many tokens (a step may carry several) or to the last; the rest stays in `script`."""
    sent = 0
    while sent < tokens or tokens < 0:
        step = next(script, None)
        if step is None or step.data == DONE or step.do is not Do.EVENT:
            return
        yield step
        sent += step.tokens


def _hang_headers(script: Script, params: Mapping[str, Any]) -> Script:
    yield Step(Do.SILENCE)


def _slow_first_token(script: Script, params: Mapping[str, Any]) -> Script:
    first = next(script)
    yield first._replace(wait_s=first.wait_s + params["seconds"])
    yield from script


def _stall(script: Script, params: Mapping[str, Any]) -> Script:
    yield from _until(script, params["after"])
    if params["seconds"]:
        yield from _slow_first_token(script, params)
    else:
        yield Step(Do.SILENCE)


def _cut(script: Script, params: Mapping[str, Any]) -> Script:
    yield from _until(script, params["after"])
    yield Step(Do.RESET if params["how"] == "reset" else Do.CLOSE, next(script, Step(Do.END)).wait_s)


def _no_done(script: Script, params: Mapping[str, Any]) -> Script:
    yield from _until(script, params["after"])
    yield Step(Do.END)


def _finish_silence(script: Script, params: Mapping[str, Any]) -> Script:
    for step in script:
        yield step
        if b'"finish_reason":"' in step.data:
            break
    yield Step(Do.SILENCE)


def _error_event(script: Script, params: Mapping[str, Any]) -> Script:
    yield from _until(script, params["after"])
    wait_s = next(script, Step(Do.END)).wait_s
    yield Step(
        Do.EVENT, wait_s, error_event("EngineCore encountered an issue. See stack trace (above).", params["code"])
    )
    if params["done"]:
        yield Step(Do.EVENT, 0.0, DONE)
    yield Step(Do.END)


def _done_without_tokens(script: Script, params: Mapping[str, Any]) -> Script:
    yield Step(Do.EVENT, 0.0, DONE)
    yield Step(Do.END)


def _bad_framing(script: Script, params: Mapping[str, Any]) -> Script:
    yield from _until(script, params["after"])
    for step in script:
        yield Step(Do.RAW, step.wait_s, b"zz\r\n" + step.data + b"\r\n")


def _dribble(script: Script, params: Mapping[str, Any]) -> Script:
    gap_s = params["gap_ms"] / 1000
    for step in script:
        if step.do not in (Do.EVENT, Do.RAW, Do.END):
            yield step
            continue
        framed = (
            LAST_CHUNK if step.do is Do.END else step.data if step.do is Do.RAW else _framed(step.data, params["chunk"])
        )
        wait_s, tokens = step.wait_s, step.tokens
        for piece in _split(framed, params["segment"]):
            yield Step(Do.RAW, wait_s, piece, tokens)
            wait_s, tokens = gap_s, 0
        if step.do is Do.END:
            yield Step(Do.ENDED)


def _framed(data: bytes, size: int) -> bytes:
    return b"".join(chunk(piece) for piece in _split(data, size))


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)] if size > 0 else [data]


STREAM_EDITS: dict[str, _Edit] = {
    "hang-headers": _hang_headers,
    "slow-first-token": _slow_first_token,
    "stall": _stall,
    "cut": _cut,
    "no-done": _no_done,
    "finish-silence": _finish_silence,
    "error-event": _error_event,
    "done-without-tokens": _done_without_tokens,
    "bad-framing": _bad_framing,
    "dribble": _dribble,
}


# -- whole bodies


async def send_bent(conn: HttpConnection, body: bytes, faults: list[Fault]) -> str:
    """Send a 200 with this JSON body as these faults leave it: `whole`, `cut`, or `hang` when nothing is to follow."""
    top = head(200, JSON, len(body))
    for fault in faults:
        name, params = fault.row.name, fault.params
        if name == "hang-headers":
            conn.write(top)
            return "hang"
        if name == "slow-first-token":
            conn.write(top)
            top = b""
            await asyncio.sleep(params["seconds"])
        elif name == "cut-answer":
            conn.write(top + body[: params["after"]])
            await conn.drained()
            end(conn, params["how"])
            return "cut"
        elif name == "dribble":
            for piece in _split(top + body, params["segment"]):
                conn.write(piece)
                await asyncio.sleep(params["gap_ms"] / 1000)
            return "whole"
    conn.write(top + body)
    return "whole"
