"""JSON, changed here and there and JSON still: bytes changed at random are none, and a parser in C tells a search
nothing of how near they were."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 1e300, 2**53, 2**63, 2**64 - 1, -(2**63), 65535, 65536),
    *("", "a", "\x00", "\u202e", "x" * 300, [], {}, [[]], [0], [-1], [[0, 1]], {"a": 1}),
)
DEEP = 300


def _copy(value: Any) -> Any:
    """One that nobody else holds: what came to hold itself could not be written."""
    return json.loads(json.dumps(value))


def _nested(inner: Any, depth: int) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place below `value`: what holds it, and its key or index there."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        holder = left.pop()
        inside = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        for key, inner in inside:
            found.append((holder, key))
            if isinstance(inner, dict | list):
                left.append(inner)
    return found


def _change(value: Any, draw: Random, words: list[str]) -> None:
    """One change, in place."""
    places = _places(value)
    if not places:
        return
    holder, key = draw.choice(places)
    other, other_key = draw.choice(places)
    match draw.randrange(7):
        case 0:
            holder[key] = _copy(draw.choice(ODD))
        case 1:
            del holder[key]
        case 2 if isinstance(holder, list):
            holder.append(_copy(holder[key]))
        case 2 | 3 if isinstance(holder, dict):
            holder[draw.choice([*words, str(other_key), "unheard_of"])] = _copy(draw.choice([*ODD, *words]))
        case 4:
            holder[key] = draw.choice(words) if words else str(other_key)
        case 5:
            holder[key] = _copy(other[other_key])
        case _:
            holder[key] = _nested(holder[key], draw.choice((1, 1, 2, DEEP)))


def changed(data: bytes, seed: int, words: tuple[bytes, ...], longest: int) -> bytes | None:
    """`data`, which has JSON documents between line ends or NUL bytes, with one of them changed; None when it has none
    that can be read, or would be longer than `longest` bytes."""
    draw, end = Random(seed), b"\0" if b"\0" in data else b"\n"
    parts = data.split(end)
    documents = [number for number, part in enumerate(parts) if part.startswith((b"{", b"["))]
    if not documents:
        return None
    at = draw.choice(documents)
    try:
        value = json.loads(parts[at])
        for _ in range(draw.choice((1, 1, 2, 3))):
            _change(value, draw, [word.strip(b'"').decode("utf-8", "replace") for word in words])
        parts[at] = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None
    whole = end.join(parts)
    return whole if len(whole) <= longest else None


def spoilt(data: bytes, draw: Random, words: tuple[bytes, ...], longest: int) -> bytes:
    """`data` with some bytes lost, changed, or put in."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randint(0, len(data))
        put = draw.choice((b"", draw.randbytes(draw.randint(1, 4)), *words))
        data = data[:at] + put + data[at + draw.choice((0, 0, 1, len(put), draw.randint(1, 40))) :]
    return data[:longest]


def mutator(words: tuple[bytes, ...]) -> Callable[[bytes, int, int], bytes]:
    """What libFuzzer asks for another input: mostly JSON still."""

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        other = changed(data, seed, words, longest) if seed % 4 else None
        return spoilt(data, Random(seed), words, longest) if other is None else other

    return mutate
