"""Which readings of an engine's identity keep a document up, and which take it away."""

from typing import Any

import pytest

from narwhal.attest.contract import Contract
from narwhal.attest.standing import Standing
from narwhal.control.core.events import ProcessIdentity

CONTRACT = Contract(fields={"image": "a1"}, digest="sha256:0")
OLD = ProcessIdentity(version="0.32.0", started_at=1000.0)
ROUNDED = ProcessIdentity(version="0.32.0", started_at=1000.2)  # another reading of the same process
NEW = ProcessIdentity(version="0.32.0", started_at=1060.0)
UPGRADED = ProcessIdentity(version="0.33.0", started_at=1000.0)
SILENT = "GET /version: connection refused"


@pytest.mark.rule("R7")
@pytest.mark.parametrize(
    ("readings", "status", "code"),
    [
        ([], 503, "not_verified"),
        ([SILENT], 503, "not_verified"),
        ([OLD], 200, None),
        ([SILENT, OLD], 200, None),
        ([OLD, ROUNDED], 200, None),
        ([OLD, SILENT], 503, "not_verified"),
        ([OLD, SILENT, OLD], 200, None),
        ([OLD, NEW], 503, "process_changed"),
        ([OLD, SILENT, NEW], 503, "process_changed"),
        ([OLD, UPGRADED], 503, "process_changed"),
        # For good: whatever comes later, somebody has to vouch for it.
        ([OLD, NEW, NEW], 503, "process_changed"),
        ([OLD, NEW, OLD], 503, "process_changed"),
        ([OLD, NEW, SILENT], 503, "process_changed"),
    ],
)
def test_a_document_holds_for_the_process_that_was_seen_first(
    readings: list[ProcessIdentity | str], status: int, code: str | None
) -> None:
    standing = Standing()
    for reading in readings:
        if isinstance(reading, str):
            standing.could_not(reading)
        else:
            standing.saw(reading)
    answered, body = standing.answer(CONTRACT)
    assert answered == status
    if code is None:
        assert body == {
            "image": "a1",
            "process": {"version": "0.32.0", "started_at": 1000.0},
            "digest": "sha256:0",
        }
    else:
        assert "image" not in body
        assert body["error"]["code"] == code


@pytest.mark.rule("R7")
def test_a_refusal_says_what_to_do_before_it_says_what_was_seen() -> None:
    standing = Standing()
    standing.saw(OLD)
    standing.could_not(SILENT)
    assert message(standing) == f"the engine's process is not verified: {SILENT}"
    standing.saw(NEW)
    assert message(standing) == (
        "the engine's process has changed, restart narwhal-attest beside the new one: "
        "attested is version 0.32.0 started at 1000.000, version 0.32.0 started at 1060.000 runs"
    )
    _, body = standing.answer(CONTRACT)
    assert body["attested"] == {"version": "0.32.0", "started_at": 1000.0}
    assert body["running"] == {"version": "0.32.0", "started_at": 1060.0}


def message(standing: Standing) -> Any:
    return standing.answer(CONTRACT)[1]["error"]["message"]
