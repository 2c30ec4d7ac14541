"""Server-sent events in bytes: where an event ends, and what one says.

Events are told apart by the bytes alone, however the network cut them. Lines may end in LF or CRLF.
"""

import re
from enum import Enum, auto
from typing import Any

import orjson

MARKER = b"[DONE]"
ERROR_KEY = b'"error"'
ROLE_KEY = b'"role"'
GIVEN_UP = b'"abort"'  # the finish reason with which an engine that is being stopped ends an answer, [DONE] included
EVENT_END = re.compile(rb"\n\r?\n")
LONGEST_END = 3  # bytes of "\n\r\n"
_SPACE = b" \t\n"  # around the marker; a CR there is another line to many readers

_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:", b"event", b"id", b"retry")


class Event(Enum):
    """What one event of an engine's stream is."""

    TOKEN = auto()  # non-empty `choices` and no `error`, whatever its text; told from OTHER before the first one only
    OTHER = auto()  # usage, a comment, anything harmless
    MARKER = auto()  # the terminal marker
    ERROR = auto()
    GIVEN_UP = auto()  # its finish reason says that the engine gave the answer up: what follows, [DONE] too, is void
    BROKEN = auto()  # not an event


def find_end(buffer: bytes, start: int, scanned: int) -> int:
    """The index after the event that begins at `start`, or -1; the bytes before `scanned` are known to hold no end."""
    match = EVENT_END.search(buffer, max(start, scanned - LONGEST_END + 1))
    return match.end() if match else -1


def classify(event: bytes, *, token_seen: bool) -> Event:
    """What `event`, a block of lines, is. After the first token only what may be a failure is parsed."""
    payload = _payload(event)
    if payload is None:
        return Event.BROKEN
    if not payload:
        return Event.OTHER
    if token_seen and ERROR_KEY not in payload and GIVEN_UP not in payload and payload.strip(_SPACE) != MARKER:
        return Event.OTHER
    if payload.strip(_SPACE) == MARKER:
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
    if not isinstance(choices, list) or not choices:
        return Event.OTHER
    return Event.GIVEN_UP if _given_up(choices) else Event.TOKEN


def opens_only(event: bytes) -> bool:
    """Whether `event`, a TOKEN, only says who speaks: a chat's first event, whose content is empty. An engine sends it
    before it knows whether the KV arrives."""
    if ROLE_KEY not in event:
        return False
    choices = orjson.loads(_payload(event) or b"")["choices"]
    return all(isinstance(choice, dict) and _says_nothing(choice) for choice in choices)


def _says_nothing(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")


def _given_up(choices: list[Any]) -> bool:
    return any(isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices)


def answer_given_up(body: bytes) -> bool:
    """Whether a whole answer's finish reason says that the engine gave it up: it is cut short, though it is 200."""
    if GIVEN_UP not in body:
        return False
    try:
        value: Any = orjson.loads(body)
    except (orjson.JSONDecodeError, RecursionError):
        return False
    choices = value.get("choices") if isinstance(value, dict) else None
    return isinstance(choices, list) and _given_up(choices)


def _payload(event: bytes) -> bytes | None:
    """The data of an event's lines joined; None when a line is no field of an event."""
    data = []
    for ended in event.split(b"\n"):  # a CR alone ends no line: relays that take events whole do not look for one
        line = ended.removesuffix(b"\r")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line and not line.startswith(_OTHER_FIELDS):
            return None
    return b"\n".join(data)
