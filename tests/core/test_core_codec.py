"""The codec of every document: what is written is what is read, and what does not fit is named with its path."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from narwhal.control.core.codec import CodecError, decode, encode


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    name: str
    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must not be negative, got {self.size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """One field of each kind that the codec knows."""

    flag: bool
    count: int
    ratio: float
    text: str
    colour: Colour
    maybe: float | None
    leaf: Leaf
    leaves: tuple[Leaf, ...]
    colours: frozenset[Colour]
    by_colour: Mapping[Colour, int]
    by_number: dict[int, Leaf]
    by_text: Mapping[str, float]


TREE = Tree(
    flag=True,
    count=3,
    ratio=0.5,
    text="bark",
    colour=Colour.RED,
    maybe=None,
    leaf=Leaf(name="a", size=0),
    leaves=(Leaf(name="b", size=1), Leaf(name="c", size=2)),
    colours=frozenset({Colour.RED, Colour.BLUE}),
    by_colour={Colour.BLUE: 4},
    by_number={7: Leaf(name="d", size=3)},
    by_text={"x": 1.5},
)
DOCUMENT: dict[str, Any] = {
    "flag": True,
    "count": 3,
    "ratio": 0.5,
    "text": "bark",
    "colour": "red",
    "maybe": None,
    "leaf": {"name": "a", "size": 0},
    "leaves": [{"name": "b", "size": 1}, {"name": "c", "size": 2}],
    "colours": ["blue", "red"],
    "by_colour": {"blue": 4},
    "by_number": {"7": {"name": "d", "size": 3}},
    "by_text": {"x": 1.5},
}


def kinds(value: Any) -> Any:
    """The classes of a JSON value and of all that is in it: an enumeration would pass for its string."""
    if isinstance(value, dict):
        return {(type(k), k): kinds(v) for k, v in value.items()}
    return [kinds(v) for v in value] if isinstance(value, list) else type(value)


def test_what_is_written_is_plain_json_in_the_order_of_the_class() -> None:
    written = encode(TREE)
    assert written == DOCUMENT
    assert list(written) == list(DOCUMENT)
    assert kinds(written) == kinds(DOCUMENT)


def test_what_is_read_is_what_was_written_and_of_its_class() -> None:
    read = decode(Tree, DOCUMENT)
    assert read == TREE
    assert type(read.colour) is Colour
    assert {type(key) for key in (*read.colours, *read.by_colour)} == {Colour}
    assert type(read.leaves) is tuple
    assert type(read.colours) is frozenset


def test_a_whole_number_is_a_number_and_what_may_be_missing_may_be_there() -> None:
    read = decode(Tree, {**DOCUMENT, "ratio": 2, "maybe": 3, "by_text": {"x": 1}})
    assert (read.ratio, read.maybe, read.by_text) == (2.0, 3.0, {"x": 1.0})
    assert {type(read.ratio), type(read.maybe), type(read.by_text["x"])} == {float}


@pytest.mark.case("K5")
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("flag", 1, "flag: must be true or false, got int"),
        ("flag", None, "flag: must be true or false, got NoneType"),
        ("count", True, "count: must be an integer, got bool"),
        ("count", 3.0, "count: must be an integer, got float"),
        ("ratio", "1", "ratio: must be a number, got str"),
        ("ratio", False, "ratio: must be a number, got bool"),
        ("ratio", float("nan"), "ratio: must be finite, got nan"),
        ("ratio", float("-inf"), "ratio: must be finite, got -inf"),
        ("ratio", 10**400, "ratio: must be finite, got inf"),
        ("ratio", -(10**400), "ratio: must be finite, got -inf"),
        ("text", None, "text: must be a string, got NoneType"),
        ("text", ["bark"], "text: must be a string, got list"),
        ("colour", "green", "colour: unknown Colour 'green'"),
        ("colour", 3, "colour: must be a string, got int"),
        ("maybe", "x", "maybe: must be a number, got str"),
        ("leaf", [], "leaf: must be an object, got list"),
        ("leaf", {"name": "a"}, "missing field leaf.size"),
        ("leaf", {"name": "a", "size": 0, "vein": 1, "stem": 1}, "unknown field leaf.stem"),
        ("leaf", {"name": "a", "size": "0"}, "leaf.size: must be an integer, got str"),
        ("leaf", {"name": "a", "size": -1}, "leaf: size must not be negative, got -1"),
        ("leaves", {}, "leaves: must be a list, got dict"),
        ("leaves", [{"name": "b", "size": 1}, 3], "leaves[1]: must be an object, got int"),
        ("leaves", [{"name": "b", "size": -2}], "leaves[0]: size must not be negative, got -2"),
        ("leaves", [{"name": 1, "size": 1}], "leaves[0].name: must be a string, got int"),
        ("colours", "red", "colours: must be a list, got str"),
        ("colours", ["red", "green"], "colours[1]: unknown Colour 'green'"),
        ("by_colour", [], "by_colour: must be an object, got list"),
        ("by_colour", {"green": 1}, "by_colour.green: unknown Colour 'green'"),
        ("by_colour", {"red": "1"}, "by_colour.red: must be an integer, got str"),
        ("by_number", {"x": {"name": "d", "size": 3}}, "by_number.x: must be an integer"),
        ("by_number", {"7": {"name": "d"}}, "missing field by_number.7.size"),
        ("by_text", {"x": None}, "by_text.x: must be a number, got NoneType"),
    ],
)
def test_what_does_not_fit_is_named_with_its_path(field: str, value: object, words: str) -> None:
    with pytest.raises(CodecError) as refused:
        decode(Tree, {**DOCUMENT, field: value})
    assert str(refused.value) == words


@pytest.mark.case("K5")
@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "must be an object, got list"),
        (None, "must be an object, got NoneType"),
        ({"name": "a"}, "missing field size"),
        ({}, "missing field name"),
        ({"name": "a", "size": 1, "vein": 1}, "unknown field vein"),
        ({"name": "a", "size": -1}, "size must not be negative, got -1"),
    ],
)
def test_what_is_wrong_with_the_whole_has_no_path(document: object, words: str) -> None:
    with pytest.raises(CodecError) as refused:
        decode(Leaf, document)
    assert str(refused.value) == words


@pytest.mark.parametrize(("given", "words"), [("7", "n: must be an integer, got str"), (7.5, "n: must be an integer")])
def test_a_scalar_by_itself_has_the_path_that_was_given(given: object, words: str) -> None:
    assert decode(int, 7, "n") == 7
    with pytest.raises(CodecError, match=words):
        decode(int, given, "n")
