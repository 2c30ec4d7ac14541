"""What is wrong with a fleet file, in sentences of the form `path: sentence`.

Decides the words only. Paths are written as in the file: `recovery.eject_after`, `engines[2].url`.
"""

import json
from collections.abc import Sequence
from typing import Any

_LONGEST_SHOWN = 60


class FleetFileError(ValueError):
    """A fleet file that cannot be used; `problems` holds every reason, one `path: sentence` each."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems: list[str] = list(problems)
        self.source = source
        prefix = f"{source}: " if source else ""
        super().__init__("\n".join(prefix + problem for problem in self.problems))


def shown(value: Any) -> str:
    """`value` as a file would have it, short enough for a sentence."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    text = json.dumps(value, ensure_ascii=True) if isinstance(value, str | bool) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."
