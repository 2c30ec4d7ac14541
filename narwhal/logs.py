"""Logs of every daemon: one line an event, on standard error, as readable text or as JSON.

The words of an event and its fields are the caller's. Libraries that log through the standard library end up in the
same stream and format.
"""

import json
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

LogFormat = Literal["text", "json"]

# Fields that stand first, because people look for them.
_FIRST = ("engine", "proxy", "request_id")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:@+%,[]")


def setup_logging(
    log_format: LogFormat = "text", *, level: int = logging.INFO, stream: TextIO | None = None, **fields: str
) -> None:
    """Set up logging for this process; called once, first thing, by each program's main.

    `fields` are put on every line (such as `proxy`). `stream` is standard error unless told otherwise.
    """
    out = stream if stream is not None else sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer() if log_format == "json" else render_text
    structlog.contextvars.clear_contextvars()
    structlog.configure(
        processors=[_with(fields), *shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_with(fields), *shared, _library],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))  # what a library says below a warning is not an operator's business


def _with(fields: dict[str, str]) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for name, value in fields.items():
            event.setdefault(name, value)
        return event

    return add


def _library(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Name the library that spoke."""
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        event["library"] = record.name
    return event


def render_text(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    """`time level event key=value …`, always one line: whatever would break it is quoted as JSON."""
    event.pop("boottime", None)  # for programs that compare processes
    at = event.pop("timestamp", "")
    level = event.pop("level", "info")
    words = " ".join(str(event.pop("event", "")).split())
    names = [name for name in _FIRST if name in event] + sorted(name for name in event if name not in _FIRST)
    pairs = [f"{name}={_shown(event[name])}" for name in names]
    return " ".join([f"{at} {level:<7} {words}", *pairs])


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text, ensure_ascii=False)
