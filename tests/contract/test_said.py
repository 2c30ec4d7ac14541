"""An engine's own words, for operators."""

import pytest

from narwhal.connectors.said import LONGEST, said

ROWS = [
    (b'{"error": {"message": "out of  blocks\\n", "type": "X", "code": 500}}', "out of blocks"),
    (b'data: {"error": {"message": "gone"}}\n\n', "gone"),
    (b'{"object": "error", "message": "older form"}', "older form"),
    (b'{"detail": "Not Found"}', "Not Found"),
    (b'{"detail": [{"loc": 1}]}', '{"detail": [{"loc": 1}]}'),
    (b'{"error": "text"}', '{"error": "text"}'),
    (b"upstream\r\n  is away", "upstream is away"),
    (b"[1]", "[1]"),
    (b"\xff\xfe", "��"),
    (b"[" * 200_000, "[" * (LONGEST - 3) + "..."),
    (b"", ""),
]


@pytest.mark.parametrize(("data", "words"), ROWS, ids=[repr(data[:30]) for data, _ in ROWS])
def test_what_an_engine_said_is_one_short_line(data: bytes, words: str) -> None:
    assert said(data) == words
    assert len(words) <= LONGEST
