"""The KV ledger: what became of each handoff, as facts."""

from typing import Any

import pytest

from narwhal.sim.kv import Ledger
from narwhal.sim.text import freed_content

LEASE_S = 30.0


def ledger(**more: Any) -> Ledger:
    return Ledger(producer="p", lease_s=LEASE_S, block_size=16, **more)


def issue(book: Ledger, name: str, now: float, *, tokens: int = 40, generation: int = 1) -> None:
    book.issue(name, request_id="r", engine_id="e", generation=generation, tokens=tokens, content="content", now=now)


def entry(book: Ledger, name: str, now: float) -> dict[str, Any]:
    return next(found for found in book.view(now)["handoffs"] if found["id"] == name)


def test_a_handoff_read_once_is_freed() -> None:
    book = ledger()
    issue(book, "h", 100.0)
    assert entry(book, "h", 101.0)["state"] == "open"
    assert book.pull("h", by="d", generation=1, now=102.5) == "content"
    found = entry(book, "h", 110.0)
    assert (found["state"], found["pulled"], found["pulled_by"], found["pull_ages_s"]) == ("freed", 1, ["d"], [2.5])
    assert (found["age_s"], found["held_s"], found["late_pulls"], found["double_pulls"]) == (10.0, 2.5, 0, 0)
    assert book.totals(110.0) == {
        "issued": 1, "open": 0, "pulled": 1, "freed": 1, "expired": 0, "lost": 0,
        "late_pulls": 0, "double_pulls": 0, "unknown_pulls": 0,
    }  # fmt: skip


def test_a_second_reading_is_counted_and_gets_freed_blocks() -> None:
    book = ledger()
    issue(book, "h", 0.0)
    book.pull("h", by="d0", generation=1, now=1.0)
    assert book.pull("h", by="d1", generation=1, now=2.0) == freed_content("h")
    assert entry(book, "h", 3.0)["pulled_by"] == ["d0", "d1"]
    assert (book.totals(3.0)["double_pulls"], book.totals(3.0)["late_pulls"]) == (1, 0)


@pytest.mark.parametrize(("age_s", "late"), [(29.9, False), (30.0, False), (30.1, True)])
def test_a_reading_after_the_lease_is_late_and_gets_freed_blocks(age_s: float, late: bool) -> None:
    book = ledger()
    issue(book, "h", 0.0)
    content = book.pull("h", by="d", generation=1, now=age_s)
    assert (content == freed_content("h")) is late
    totals = book.totals(age_s)
    assert (totals["late_pulls"], totals["expired"], totals["double_pulls"]) == (int(late), int(late), 0)


def test_what_nobody_reads_expires_at_its_lease() -> None:
    book = ledger()
    issue(book, "a", 0.0)
    issue(book, "b", 10.0)
    assert book.totals(35.0)["open"] == 1
    assert entry(book, "a", 35.0)["held_s"] == LEASE_S
    assert book.totals(45.0) | {"issued": 2} == book.totals(45.0)
    assert book.totals(45.0)["expired"] == 2


def test_unknown_handoffs_and_those_of_a_process_before_are_not_read() -> None:
    book = ledger()
    issue(book, "h", 0.0)
    assert book.pull("other", by="d", generation=1, now=1.0) is None
    book.forget(2.0)
    assert book.pull("h", by="d", generation=2, now=3.0) is None
    totals = book.totals(3.0)
    assert (totals["unknown_pulls"], totals["lost"], totals["pulled"]) == (2, 1, 0)
    assert entry(book, "h", 3.0)["state"] == "lost"


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (104, 7)])
def test_blocks_cover_the_tokens(tokens: int, blocks: int) -> None:
    book = ledger()
    issue(book, "h", 0.0, tokens=tokens)
    assert entry(book, "h", 0.0)["blocks"] == blocks


def test_a_short_prompt_may_have_no_blocks() -> None:
    book = ledger(empty_short=True)
    assert (book.blocks_for(15), book.blocks_for(16)) == (0, 1)


def test_memory_is_bounded_and_totals_are_not() -> None:
    book = ledger(keep=10)
    for at in range(1000):
        issue(book, f"h{at}", float(at))
        book.pull(f"h{at}", by="d", generation=1, now=float(at))
    assert len(book.view(1000.0)["handoffs"]) == 10
    assert book.totals(1000.0)["freed"] == 1000
