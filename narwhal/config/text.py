"""YAML or JSON text → plain values: mappings, lists, text, numbers, booleans, None.

Stricter than YAML where YAML surprises, by the core schema of YAML 1.2 (`no` is text, `1e3` a number, `012` twelve),
which also makes every JSON document mean what it says. Refuses, each with its line and column: duplicate keys, keys
that are not text, tags, merge keys, references to an enclosing node. Notes (keys that start with `_`) are dropped
unread. Knows nothing of fleets.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import yaml

from narwhal.config.problems import FleetFileError, shown

_LARGEST_TEXT = 4 * 1024 * 1024
_MOST_NODES = 200_000  # after references are followed: a small file can name one list a billion times


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a text holds: its value, and what had to be left out of it, one `line L, column C: sentence` each."""

    value: Any
    problems: list[str]


class _TwiceError(ValueError):
    """A JSON object names a key twice."""


def _whole(text: str) -> int | float:
    # Python refuses to convert very long ones; fields refuse infinity, which they are as good as.
    return int(text) if len(text) <= 40 else math.inf


# What a plain (unquoted) scalar is, first match first; anything else is text.
_SCALARS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"|~|null|Null|NULL"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]+"), _whole),
    (re.compile(r"0x[0-9a-fA-F]{1,16}"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
)


def read(text: str) -> Document:
    """The one document in `text`, without its notes. Raises FleetFileError when it cannot be read as a whole."""
    if len(text) > _LARGEST_TEXT:
        raise FleetFileError([f"file: must be at most {_LARGEST_TEXT} characters, got {len(text)}"])
    text = text.removeprefix("\ufeff")
    twice = ""
    if text.lstrip().startswith("{"):
        # PyYAML does not read all JSON: not tabs as indentation, nor characters written as surrogate pairs.
        try:
            return Document(value=json.loads(text, object_pairs_hook=_pairs, parse_int=_whole), problems=[])
        except _TwiceError as error:
            twice = f"file: {error}"
        except (ValueError, RecursionError):
            pass  # a YAML flow mapping, or an error that the YAML reader can place
    try:
        return _read_yaml(text)
    except FleetFileError as error:
        raise FleetFileError([twice] if twice else error.problems) from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _TwiceError(f"the key {shown(key)} is given twice")
        if not key.startswith("_"):
            result[key] = value
    return result


class _Loader(yaml.SafeLoader):
    """Composes nodes. Its resolution of scalars is not used; tags, which would ask for another, are refused."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = cast(yaml.Event, self.peek_event())  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if tag:
            mark = cast(yaml.error.Mark, event.start_mark)
            raise yaml.MarkedYAMLError(problem=f"tags such as {tag} are not supported", problem_mark=mark)
        return super().compose_node(parent, index)


def _read_yaml(text: str) -> Document:
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
        if root is None:
            raise FleetFileError(["file: is empty"])
        reader = _Reader()
        return Document(value=reader.value(root), problems=reader.problems)
    except FleetFileError:
        raise
    except yaml.MarkedYAMLError as error:
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise FleetFileError([f"{_at(error.problem_mark or error.context_mark)}: {what}"]) from None
    except yaml.YAMLError as error:
        raise FleetFileError([f"file: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise FleetFileError(["file: is nested too deeply"]) from None
    except (ValueError, IndexError):  # PyYAML on some malformed escapes and directives
        raise FleetFileError(["file: is not YAML"]) from None


def _at(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "file"


class _Reader:
    """Nodes to values, collecting problems as it goes."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._open: set[int] = set()
        self._nodes = 0

    def value(self, node: yaml.Node) -> Any:
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise FleetFileError([f"file: must hold at most {_MOST_NODES} values"])
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if id(node) in self._open:
            self._problem(node, "holds itself")
            return {} if isinstance(node, yaml.MappingNode) else []
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node)
            return [self.value(item) for item in node.value]
        finally:
            self._open.discard(id(node))

    def _problem(self, node: yaml.Node, sentence: str) -> None:
        self.problems.append(f"{_at(node.start_mark)}: {sentence}")

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else [key_node]
            if not isinstance(key, str):
                found = "a list or a mapping" if isinstance(key, list) else shown(key)
                self._problem(key_node, f"a key must be text, got {found}")
            elif key.startswith("_"):
                continue
            elif key == "<<":
                self._problem(key_node, "merge keys (<<) are not supported")
            elif key in result:
                self._problem(key_node, f"the key {shown(key)} was given before, on line {lines[key]}")
            else:
                lines[key] = key_node.start_mark.line + 1
                result[key] = self.value(value_node)
        return result


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.style is None:  # neither quoted nor a block
        for pattern, build in _SCALARS:
            if pattern.fullmatch(text):
                return build(text)
    return text
