"""The history of epochs: what is written of each, what is kept, what is read back."""

from typing import Any

import pytest

from narwhal.control.core.history import Ending, Epoch, History, HistoryError, from_document, to_document


def epoch(number: int, holder: str = "a", began_at: float | None = 100.0) -> Epoch:
    return Epoch(epoch=number, holder=holder, address=f"{holder}:1", began_at=began_at)


def test_an_epoch_lasts_until_its_end_is_told() -> None:
    history = History().began(epoch(1))
    assert [(e.ending, e.ended_at) for e in history.epochs] == [(Ending.LASTS, None)]
    history = history.ended(1, at=150.0, ending=Ending.STOPPED, reason="stopped")
    assert [(e.ending, e.ended_at, e.reason) for e in history.epochs] == [(Ending.STOPPED, 150.0, "stopped")]


def test_the_end_of_a_holder_that_died_is_one_that_nobody_told() -> None:
    history = History().began(epoch(1)).began(epoch(2, "b", 200.0))
    first, second = history.epochs
    assert (first.ending, first.ended_at) == (Ending.UNTOLD, None)
    assert "did not say" in first.reason
    assert second.ending is Ending.LASTS


def test_a_holder_that_comes_back_may_tell_what_nobody_knew_and_changes_nothing_that_was_known() -> None:
    history = History().began(epoch(1)).began(epoch(2, "b", 200.0))
    told = history.ended(1, at=120.0, ending=Ending.FENCED, reason="fenced: not renewed")
    assert (told.epochs[0].ending, told.epochs[0].ended_at) == (Ending.FENCED, 120.0)
    again = told.ended(1, at=999.0, ending=Ending.STOPPED, reason="another story")
    assert again == told
    assert told.ended(7, at=1.0, ending=Ending.STOPPED, reason="of an epoch that is not known") == told


def test_who_led_before_is_written_down_where_it_is_missing() -> None:
    history = History().began(epoch(1)).began(epoch(3, "c", 300.0), before=epoch(2, "b", None))
    assert [(e.epoch, e.holder, e.began_at, e.ending) for e in history.epochs] == [
        (1, "a", 100.0, Ending.UNTOLD),
        (2, "b", None, Ending.UNTOLD),
        (3, "c", 300.0, Ending.LASTS),
    ]
    known = History().began(epoch(2, "b")).ended(2, at=1.0, ending=Ending.STOPPED, reason="x")
    assert known.began(epoch(3), before=epoch(2, "b", None)).epochs[0].ending is Ending.STOPPED


def test_the_last_hundred_are_kept() -> None:
    history = History()
    for number in range(1, 251):
        history = history.began(epoch(number))
    assert [e.epoch for e in history.epochs] == list(range(151, 251))


def test_a_store_that_was_set_back_loses_the_epochs_that_come_again() -> None:
    history = History().began(epoch(1)).began(epoch(5)).began(epoch(3, "b"))
    assert [(e.epoch, e.holder) for e in history.epochs] == [(1, "a"), (3, "b")]


@pytest.mark.rule("M8")
def test_the_time_since_the_newest_yield_is_known_across_holders() -> None:
    history = History().began(epoch(1)).ended(1, at=150.0, ending=Ending.YIELDED, reason="degraded")
    history = history.began(epoch(2, "b", 150.1)).ended(2, at=170.0, ending=Ending.SWITCHED, reason="by hand")
    assert history.since_yield_s(wall=180.0) == 30.0
    assert history.since_yield_s(wall=140.0) == 0.0, "another machine's clock is a little off"
    assert History().began(epoch(1)).since_yield_s(wall=180.0) is None


def test_a_document_is_read_back_as_it_was_written() -> None:
    history = History().began(epoch(1)).began(epoch(2, "b", None))
    assert from_document(to_document(history)) == history


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "must be an object"),
        ({"schema": "narwhal.history", "schema_version": 2, "epochs": []}, "version 2"),
        ({"schema": "other", "schema_version": 1, "epochs": []}, "unknown schema 'other'"),
        ({"schema": "narwhal.history", "schema_version": 1}, "missing field epochs"),
        ({"schema": "narwhal.history", "schema_version": 1, "epochs": [], "more": 1}, "unknown field more"),
    ],
)
def test_anything_else_is_refused_with_the_reason(document: Any, words: str) -> None:
    with pytest.raises(HistoryError, match=words):
        from_document(document)


def test_epochs_out_of_order_are_no_history() -> None:
    document = dict(to_document(History().began(epoch(1)).began(epoch(2))))
    document["epochs"] = list(reversed(document["epochs"]))
    with pytest.raises(HistoryError, match="epochs must rise"):
        from_document(document)
