"""What an engine itself said, for operators: the message of its error, or the beginning of what else it sent. Pure."""

import json

LONGEST = 200  # characters
LONGEST_READ = 65_536  # bytes


def said(data: bytes) -> str:
    """The words in an error's body or event, in one line of at most `LONGEST` characters; never fails."""
    text = data[:LONGEST_READ].decode("utf-8", "replace").strip().removeprefix("data:")
    words = " ".join((_message(text) or text).split())
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."


def _message(text: str) -> str:
    """The message of `{"error": {"message": …}}`, `{"message": …}` or `{"detail": …}`; empty for anything else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        document = document["error"]
    if not isinstance(document, dict):
        return ""
    return next((document[key] for key in ("message", "detail") if isinstance(document.get(key), str)), "")
