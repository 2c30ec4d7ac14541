"""The checks of the readmission gate that are asked of one engine (spec R1, R7).

Decides: pass, fail or inconclusive of one check. Inconclusive is whatever says nothing about the engine: no free
control connection, no descriptor, no resolver; or an engine that has no time (408, 429). What follows is the core's.
"""

import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import orjson

from narwhal.clock import Clock
from narwhal.connectors.base import Route
from narwhal.connectors.said import said
from narwhal.control.core.effects import CaptureIdentity, RunCheck
from narwhal.control.core.events import CheckAnswered, CheckResult, IdentityCaptured, ProcessIdentity
from narwhal.control.core.process import process_words, same_process
from narwhal.control.engine_client import EngineClient, NoAnswer
from narwhal.vocabulary import Check, Outcome, Verdict

BUSY = frozenset({408, 429})
SHOWN = 200  # bytes of an engine's own words, to operators
LONGEST_DETAIL = 1000  # characters of what a check says, however much the engine did
LONGEST_VERSION = 200  # characters; it is part of every state handoff


class Failed(Exception):
    """The engine answered wrongly."""


class Busy(Exception):
    """The engine has no time for the question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What was seen, and which process it was seen of, where that was asked."""

    detail: str
    identity: ProcessIdentity | None = None


CheckRunner = Callable[[EngineClient, RunCheck], Awaitable[Passed]]


async def check_health(client: EngineClient, request: RunCheck) -> Passed:
    """GET /health answers 200. Says too which process that was, where it can be known: a gate is about one process."""
    detail = await _healthy(client, request)
    return Passed(detail=detail, identity=await read_identity(client, request.url, timeout_s=request.timeout_s))


async def check_attestation(client: EngineClient, request: RunCheck) -> Passed:
    """The attestation document matches the contract field by field, and names the process that runs (spec R7).

    The document is a JSON object with the contract's fields, and `process`: an object with `version` and `started_at`
    (seconds since the Unix epoch) as the engine itself says them. Further fields, such as the `digest` that
    `narwhal-attest` adds, count where the contract names them.
    """
    document = await _document(client, request)
    if wrong := list(_differences(client.settings.contract or {}, document)):
        raise Failed(f"the document does not match the contract: {'; '.join(wrong)}")
    named = _named_process(document)
    running = await identify(client, request.url, timeout_s=request.timeout_s)
    if not same_process(named, running):
        raise Failed(f"the document names {process_words(named)}, {process_words(running)} runs")
    return Passed(detail=f"matches the contract, names {process_words(running)}", identity=running)


async def check_model(client: EngineClient, request: RunCheck) -> Passed:
    """GET /v1/models lists the configured model."""
    answer = await client.get(request.url, "/v1/models", timeout_s=request.timeout_s)
    if answer.status != 200:
        raise Failed(f"GET /v1/models answered {answer.status}")
    served = _models(answer.body)
    if request.model not in served:
        raise Failed(f"serves {', '.join(sorted(served)) or 'no model'}, not {request.model}")
    return Passed(detail=f"serves {request.model}")


async def check_generation(client: EngineClient, request: RunCheck) -> Passed:
    """The engine says which process it is, and completes one token by itself, no KV transfer involved."""
    identity = await identify(client, request.url, timeout_s=request.timeout_s)
    body = {
        "model": request.model,
        "prompt": " ".join(str(100 + secrets.randbelow(900)) for _ in range(8)),
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
    }
    answer = await client.post(
        request.url,
        Route.COMPLETIONS,
        orjson.dumps(body),
        request_id=f"gate-{request.engine}-{request.number}",
        timeout_s=request.timeout_s,
    )
    what = f"POST {Route.COMPLETIONS}"
    if answer.status in BUSY:
        raise Busy(f"{what} answered {answer.status}")
    if answer.status != 200:
        raise Failed(f"{what} answered {answer.status}: {said(answer.body)}")
    if not _completed(answer.body):
        raise Failed(f"{what} answered something else than a completion: {said(answer.body)}")
    return Passed(detail=f"completed one token, {process_words(identity)}", identity=identity)


async def check_final_health(client: EngineClient, request: RunCheck) -> Passed:
    """GET /health answers 200 again; says which process that was."""
    detail = await _healthy(client, request)
    identity = await identify(client, request.url, timeout_s=request.timeout_s)
    return Passed(detail=f"{detail}, {process_words(identity)}", identity=identity)


CHECKS: Mapping[Check, CheckRunner] = {
    Check.HEALTH: check_health,
    Check.ATTESTATION: check_attestation,
    Check.MODEL: check_model,
    Check.GENERATION: check_generation,
    Check.FINAL_HEALTH: check_final_health,
}


async def run_check(client: EngineClient, request: RunCheck, clock: Clock) -> CheckAnswered:
    """One check of a gate."""
    began = clock.monotonic()
    passed = Passed(detail="")
    verdict = Verdict.PASS
    try:
        passed = await CHECKS[request.check](client, request)
        detail = passed.detail
    except Failed as failed:
        verdict, detail = Verdict.FAIL, str(failed)
    except Busy as busy:
        verdict, detail = Verdict.INCONCLUSIVE, str(busy)
    except NoAnswer as nothing:
        verdict = Verdict.INCONCLUSIVE if nothing.outcome is Outcome.LOCAL else Verdict.FAIL
        detail = str(nothing)
    latency_s = clock.monotonic() - began
    return CheckAnswered(
        engine=request.engine,
        incarnation=request.incarnation,
        number=request.number,
        check=request.check,
        result=CheckResult(
            verdict=verdict, detail=detail[:LONGEST_DETAIL], latency_s=latency_s, identity=passed.identity
        ),
    )


async def _healthy(client: EngineClient, request: RunCheck) -> str:
    answer = await client.get(request.url, "/health", timeout_s=request.timeout_s)
    if answer.status != 200:
        raise Failed(f"GET /health answered {answer.status}")
    return "GET /health answered 200"


def _models(body: bytes) -> set[str]:
    try:
        served = {model["id"] for model in orjson.loads(body)["data"]}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        served = {None}
    if not all(isinstance(name, str) for name in served):
        raise Failed("GET /v1/models answered something else than a list of models")
    return served


def _completed(body: bytes) -> bool:
    try:
        choices = orjson.loads(body)["choices"]
        return isinstance(choices[0]["text"], str)
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return False


# --- the attestation document -----------------------------------------------------------------------------------------


async def _document(client: EngineClient, request: RunCheck) -> dict[str, Any]:
    what = "GET attestation document"
    answer = await client.fetch(request.attestation_url, what=what, timeout_s=request.timeout_s)
    if answer.status != 200:
        words = said(answer.body)  # whoever serves it knows why there is none
        raise Failed(f"{what} answered {answer.status}{f': {words}' if words else ''}")
    try:
        document = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        raise Failed(f"{what} answered something else than JSON") from None
    if not isinstance(document, dict):
        raise Failed(f"{what} answered something else than a JSON object")
    return document


def _differences(contract: Mapping[str, Any], document: Any, above: str = "") -> Iterator[str]:
    """The contract's fields that the document does not have as the contract asks for them."""
    for name, wanted in contract.items():
        path = f"{above}.{name}" if above else str(name)
        if not isinstance(document, dict) or name not in document:
            yield f"{path} is missing"
        elif isinstance(wanted, Mapping) and isinstance(document[name], dict):
            yield from _differences(wanted, document[name], path)
        elif not _equal(wanted, document[name]):
            yield f"{path} is {_json(document[name])}, asked for is {_json(wanted)}"


def _equal(wanted: Any, given: Any) -> bool:
    """Equal as JSON: unlike Python, true is not 1; a list is equal to one of equal values."""
    if isinstance(wanted, bool) or isinstance(given, bool):
        return wanted is given
    if isinstance(wanted, list | tuple) and isinstance(given, list):
        return len(wanted) == len(given) and all(map(_equal, wanted, given))
    if isinstance(wanted, Mapping) and isinstance(given, dict):
        return wanted.keys() == given.keys() and all(_equal(wanted[k], given[k]) for k in wanted)
    return bool(wanted == given)


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value, default=dict).decode()[:SHOWN]
    except orjson.JSONEncodeError:  # lists in lists: read to a depth of 1024, written to one of 254
        return "nested too deeply"


def _named_process(document: Mapping[str, Any]) -> ProcessIdentity:
    process = document.get("process")
    version = process.get("version") if isinstance(process, dict) else None
    started_at = process.get("started_at") if isinstance(process, dict) else None
    if not isinstance(version, str) or isinstance(started_at, bool) or not isinstance(started_at, int | float):
        raise Failed("the document names no process: `process` must have `version` and `started_at`")
    return ProcessIdentity(version=version, started_at=float(started_at))


# --- which process it is ----------------------------------------------------------------------------------------------


async def identify(client: EngineClient, url: str, *, timeout_s: float) -> ProcessIdentity:
    """What tells this engine process from its successor. Raises Failed, NoAnswer."""
    version = await client.get(url, "/version", timeout_s=timeout_s)
    metrics = await client.get(url, "/metrics", timeout_s=timeout_s)
    for path, answer in (("/version", version), ("/metrics", metrics)):
        if answer.status != 200:
            raise Failed(f"GET {path} answered {answer.status}")
    try:
        named = orjson.loads(version.body)["version"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        named = None
    if not isinstance(named, str) or len(named) > LONGEST_VERSION:
        raise Failed("GET /version answered something else than a version")
    return ProcessIdentity(version=named, started_at=_started_at(metrics.body))


def _started_at(metrics: bytes) -> float:
    for line in metrics.split(b"\n"):
        if line.startswith(b"process_start_time_seconds"):
            try:
                started_at = float(line.rsplit(None, 1)[1])
            except (ValueError, IndexError):
                break
            if not isfinite(started_at):  # is no instant, equals nothing, and no document can hold it
                break
            return started_at
    raise Failed("GET /metrics has no process_start_time_seconds")


async def read_identity(client: EngineClient, url: str, *, timeout_s: float) -> ProcessIdentity | None:
    """The same, None when it is not to be had."""
    try:
        return await identify(client, url, timeout_s=timeout_s)
    except (Failed, NoAnswer):
        return None


async def capture_identity(client: EngineClient, request: CaptureIdentity, _clock: Clock) -> IdentityCaptured:
    """Which process a drained engine is."""
    identity, local = None, False
    try:
        identity = await identify(client, request.url, timeout_s=request.timeout_s)
    except Failed:
        pass
    except NoAnswer as nothing:
        local = nothing.outcome is Outcome.LOCAL
    return IdentityCaptured(
        engine=request.engine,
        incarnation=request.incarnation,
        number=request.number,
        identity=identity,
        local=local,
    )
