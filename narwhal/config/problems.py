"""What is wrong with a fleet file, in sentences of the form `path: sentence`.

Decides the words only. Paths are written as in the file: `recovery.eject_after`, `engines[2].url`.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_LONGEST_SHOWN = 60
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,60}")


class FleetFileError(ValueError):
    """A fleet file that cannot be used; `problems` holds every reason, one `path: sentence` each."""

    def __init__(self, problems: Iterable[str], source: str = "") -> None:
        self.problems: list[str] = list(problems)
        self.source = source
        prefix = f"{source}: " if source else ""
        super().__init__("\n".join(prefix + problem for problem in self.problems))


def shown(value: Any) -> str:
    """`value` as a file would have it, short enough for a sentence."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    text = json.dumps(value, ensure_ascii=True) if isinstance(value, str | bool) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def written(location: Sequence[str | int]) -> str:
    """A pydantic location as the path that the file's reader knows."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            key = part if _PLAIN_KEY.fullmatch(part) else shown(part)
            path += f".{key}" if path else key
    return path or "file"


_Context = Mapping[str, Any]
# pydantic's kind of error → the sentence, but for what was found instead.
_SENTENCES: dict[str, Callable[[_Context], str]] = {
    "greater_than_equal": lambda ctx: f"must be at least {shown(ctx['ge'])}",
    "greater_than": lambda ctx: f"must be more than {shown(ctx['gt'])}",
    "less_than_equal": lambda ctx: f"must be at most {shown(ctx['le'])}",
    "int_type": lambda ctx: "must be a whole number",
    "float_type": lambda ctx: "must be a number",
    "finite_number": lambda ctx: "must be a finite number",
    "bool_type": lambda ctx: "must be true or false",
    "string_type": lambda ctx: "must be text",
    "literal_error": lambda ctx: f"must be {ctx['expected']}".replace("'", ""),
    "enum": lambda ctx: f"must be {ctx['expected']}".replace("'", ""),
    "tuple_type": lambda ctx: "must be a list",
    "model_type": lambda ctx: "must be a mapping of keys",
    "mapping_type": lambda ctx: "must be a mapping of keys",
}


def sentences(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Every problem in `error`, which came from validating `model`, as `path: sentence`."""
    return [f"{written(item['loc'])}: {_sentence(model, item)}" for item in error.errors()]


def _sentence(model: type[BaseModel], item: ErrorDetails) -> str:
    kind = item["type"]
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return _unknown(model, item["loc"])
    if kind in _SENTENCES:
        found = item["input"]
        if found is None:  # as when a file was cut short
            return "has no value"
        # "must be a whole number, got 1" would puzzle the writer of 1.0
        got = str(found) if kind == "int_type" and isinstance(found, float) else shown(found)
        return f"{_SENTENCES[kind](item.get('ctx', {}))}, got {got}"
    return item["msg"]


def _unknown(model: type[BaseModel], location: Sequence[str | int]) -> str:
    names = _keys(model, location[:-1])
    close = get_close_matches(str(location[-1]), names, n=1)
    return f"unknown key; did you mean {close[0]}?" if close else "unknown key"


def _keys(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The keys that the mapping at `location` of a `model` may have."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    steps = [part for part in location if isinstance(part, str)]
    if not steps:
        return list(fields)
    inner = section_of(fields[steps[0]].annotation)
    return _keys(inner, steps[1:]) if inner else []


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as `Section` or `tuple[Section, ...]`, None where there is none."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
