"""Server-sent events in bytes: where an event ends, and what one says.

Events are told apart by the bytes alone, however the network cut them. Lines may end in LF or CRLF.
"""

import re
from enum import Enum, auto
from typing import Any

import orjson

MARKER = b"[DONE]"
EVENT_END = re.compile(rb"\n\r?\n")
LONGEST_END = 3  # bytes of "\n\r\n"

_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:", b"event", b"id", b"retry")


class Event(Enum):
    """What one event of an engine's stream is."""

    TOKEN = auto()  # non-empty `choices` and no `error`, whatever its text; told from OTHER before the first one only
    OTHER = auto()  # usage, a comment, anything harmless
    MARKER = auto()  # the terminal marker
    ERROR = auto()
    BROKEN = auto()  # not an event


def find_end(buffer: bytes, start: int, scanned: int) -> int:
    """The index after the event that begins at `start`, or -1; the bytes before `scanned` are known to hold no end."""
    match = EVENT_END.search(buffer, max(start, scanned - LONGEST_END + 1))
    return match.end() if match else -1


def classify(event: bytes, *, token_seen: bool) -> Event:
    """What `event`, a block of lines, is. After the first token only what may be an error is parsed."""
    payload = _payload(event)
    if payload is None:
        return Event.BROKEN
    if not payload or (token_seen and b'"error"' not in payload and payload.strip() != MARKER):
        return Event.OTHER
    if payload.strip() == MARKER:
        return Event.MARKER
    try:
        value: Any = orjson.loads(payload)
    except (orjson.JSONDecodeError, RecursionError):
        return Event.BROKEN
    return _said(value)


def _said(value: Any) -> Event:
    """What an event's JSON is."""
    if not isinstance(value, dict):
        return Event.BROKEN
    if value.get("error") is not None:
        return Event.ERROR
    choices = value.get("choices")
    return Event.TOKEN if isinstance(choices, list) and choices else Event.OTHER


def _payload(event: bytes) -> bytes | None:
    """The data of an event's lines joined; None when a line is no field of an event."""
    data = []
    for line in event.splitlines():
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line and not line.startswith(_OTHER_FIELDS):
            return None
    return b"\n".join(data)
