"""What two answers must have in common to be the same answer: shapes and the words of the protocol, not texts.

`differences` compares one recorded response with one of a simulated engine and says in words where they part.
"""

import json
from typing import Any

# Keys whose values are words of the protocol; of all others only the type counts.
LITERAL = {
    "object",
    "finish_reason",
    "role",
    "code",
    "type",
    "param",
    "transfer_mode",
    "do_remote_prefill",
    "do_remote_decode",
    "idle",
}
# Objects whose keys are tokens and whose values are numbers.
MAPS = {"top_logprobs"}
# Header names whose values are compared too; of the others that they are there.
HEADER_VALUES = {"content-type", "transfer-encoding", "allow", "server", "connection", "retry-after"}
# What Narwhal reads from an engine's metrics: name, type.
METRICS_READ = {
    "process_start_time_seconds": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:nixl_num_failed_transfers_total": "counter",
    "vllm:nixl_num_kv_expired_reqs_total": "counter",
}


def shape(value: Any, key: str = "") -> Any:
    """The recursive key sets and types; lists become the set of their elements' shapes, in a fixed order."""
    if isinstance(value, dict):
        if key in MAPS and all(isinstance(v, int | float) for v in value.values()):
            return {"a token": "number"}
        return {k: shape(v, k) for k, v in sorted(value.items())}
    if isinstance(value, list) and key != "bytes":
        found = {json.dumps(shape(v, key), sort_keys=True) for v in value}
        return [json.loads(text) for text in sorted(found)]
    return scalar(value, key)


def scalar(value: Any, key: str) -> Any:
    if key in LITERAL:
        return value
    if value is None:
        return "null"
    if key == "bytes":
        return "bytes"
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "string"


def outline(events: list[Any]) -> dict[str, list[Any]]:
    """The shapes of a stream's events, repetitions taken together: how many tokens came is not compared.

    By choice, since the events of several choices come in no fixed order; `all` has the order of choices, of events
    without any (usage, an error) and of the terminal marker.
    """
    found: dict[str, list[Any]] = {"all": []}

    def add(name: str, one: Any) -> None:
        series = found.setdefault(name, [])
        if not series or series[-1] != one:
            series.append(one)

    for event in events:
        choices = event.get("choices") if isinstance(event, dict) else None
        if choices:
            add("all", "choices")
            add(f"choice {choices[0]['index']}", shape(event))
        else:
            add("all", event if isinstance(event, str) else shape(event))
    return found


def differ(path: str, recorded: Any, simulated: Any) -> list[str]:
    """Where two shapes part, one line for each place."""
    if recorded == simulated:
        return []
    if isinstance(recorded, dict) and isinstance(simulated, dict):
        lines = [f"{path}.{key}: only recorded" for key in recorded.keys() - simulated.keys()]
        lines += [f"{path}.{key}: only simulated" for key in simulated.keys() - recorded.keys()]
        for key in recorded.keys() & simulated.keys():
            lines += differ(f"{path}.{key}", recorded[key], simulated[key])
        return sorted(lines)
    if isinstance(recorded, list) and isinstance(simulated, list) and len(recorded) == len(simulated):
        pairs = zip(recorded, simulated, strict=True)
        return [line for at, (one, other) in enumerate(pairs) for line in differ(f"{path}[{at}]", one, other)]
    return [f"{path}: recorded {json.dumps(recorded)}, simulated {json.dumps(simulated)}"]


def headers_differ(recorded: dict[str, str], simulated: dict[str, str]) -> list[str]:
    lines = [f"header {name}: only recorded" for name in recorded.keys() - simulated.keys()]
    lines += [f"header {name}: only simulated" for name in simulated.keys() - recorded.keys()]
    for name in recorded.keys() & simulated.keys() & HEADER_VALUES:
        if recorded[name] != simulated[name]:
            lines.append(f"header {name}: recorded {recorded[name]!r}, simulated {simulated[name]!r}")
    return sorted(lines)


def metrics_differ(recorded: dict[str, Any], simulated: dict[str, Any]) -> list[str]:
    """A simulated engine may have fewer metrics, never ones of another type or with other labels."""
    lines = [f"metric {name}: not in the recording" for name in simulated.keys() - recorded.keys()]
    for name, kind in METRICS_READ.items():
        for where, families in (("recorded", recorded), ("simulated", simulated)):
            if families.get(name, {}).get("type") != kind:
                lines.append(f"metric {name}: not a {kind} as {where}")
    for name in recorded.keys() & simulated.keys():
        if recorded[name] != simulated[name]:
            lines.append(f"metric {name}: recorded {recorded[name]}, simulated {simulated[name]}")
    return sorted(lines)


def differences(recorded: dict[str, Any], simulated: dict[str, Any]) -> list[str]:
    """Where two responses, as `bench.describe` writes them, part."""
    lines = []
    for name in ("status", "end", "framing", "connection", "idle"):
        if recorded.get(name) != simulated.get(name):
            lines.append(f"{name}: recorded {recorded.get(name)!r}, simulated {simulated.get(name)!r}")
    if recorded.get("status") != simulated.get("status"):
        return lines  # everything else follows from it
    lines += headers_differ(recorded.get("headers", {}), simulated.get("headers", {}))
    lines += metrics_differ(recorded["metrics"], simulated.get("metrics", {})) if "metrics" in recorded else []
    lines += differ("json", shape(recorded.get("json")), shape(simulated.get("json")))
    lines += differ("events", outline(recorded.get("events", [])), outline(simulated.get("events", [])))
    if ("text" in recorded) != ("text" in simulated):
        lines.append(f"text: recorded {'text' in recorded}, simulated {'text' in simulated}")
    return lines
