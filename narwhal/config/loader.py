"""A fleet file's text → `FleetConfig`, or everything that is wrong with it.

A wrong value hides the relations between fields from pydantic. So that they are reported in the same run, each wrong
value is replaced by its default, or by a stand-in where there is none, and the rest is checked again; what that says
about a replaced value is dropped.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from narwhal.config.fleet import FleetConfig
from narwhal.config.problems import FleetFileError, sentences, written
from narwhal.config.relations import Conflict
from narwhal.config.text import read

_Location = tuple[int | str, ...]


def load_fleet(path: str | Path, environ: Mapping[str, str]) -> FleetConfig:
    """The fleet in the file at `path`; `${NAME}` is looked up in `environ`. Blocks while it reads.

    Raises FleetFileError with every problem, also when the file cannot be read.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise FleetFileError([f"file: cannot be read: {error.strerror or error}"], str(path)) from None
    except ValueError as error:  # not UTF-8; or a NUL in the path
        raise FleetFileError([f"file: cannot be read: {error}"], str(path)) from None
    try:
        return parse_fleet(text, environ)
    except FleetFileError as error:
        raise FleetFileError(error.problems, str(path)) from None


def parse_fleet(text: str, environ: Mapping[str, str]) -> FleetConfig:
    """The fleet that `text` (YAML or JSON) describes. Raises FleetFileError with every problem."""
    document = read(text)
    data = document.value
    if not isinstance(data, dict):
        raise FleetFileError(["file: must be a mapping of keys such as name, model and engines"])
    problems = list(document.problems)
    replaced: list[_Location] = []
    while True:
        try:
            fleet = FleetConfig.model_validate(data, context={"environ": environ})
        except ValidationError as error:
            found = _relations(error)
            if found is not None:
                paths = [written(location) for location in replaced]
                problems += [f"{item.path}: {item.sentence}" for item in found if not item.involves(paths)]
                break
            # A stand-in is valid, so each round replaces something new, and there is an end of rounds.
            problems += sentences(FleetConfig, error)
            for item in error.errors():
                _replace(data, item["loc"])
                replaced.append(item["loc"])
        else:
            break
    if problems:
        raise FleetFileError(problems)
    return fleet


def _relations(error: ValidationError) -> list[Conflict] | None:
    """The broken relations, when `error` is about those; pydantic looks at them only once each field is right."""
    for item in error.errors():
        if item["type"] == "fleet_relations":
            found: list[Conflict] = item["ctx"]["conflicts"]
            return found
    return None


def _stand_in(location: _Location) -> Any:
    """A valid value for what has no default, different from every other; None where there is a default."""
    value: Any = None
    match location:
        case ("name",) | ("model",):
            value = "stand-in"
        case ("engines",):
            value = [_stand_in(("engines", 0))]
        case ("engines", index):
            value = {key: _stand_in(("engines", index, key)) for key in ("id", "url", "role")}
        case ("engines", index, "id"):
            value = f"stand-in-{index}"
        case ("engines", index, "url") | ("store", "endpoints", index):
            value = f"http://stand-in-{index}:1"
        case ("engines", _, "role"):
            value = "prefill"
    return value


def _replace(data: Any, location: _Location) -> None:
    """Puts the default, or a stand-in, where `location` points to in `data`."""
    for part in location[:-1]:
        data = data[part]
    stand_in = _stand_in(location)
    if stand_in is None:
        data.pop(location[-1], None)
    else:
        data[location[-1]] = stand_in
