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


def test_an_epoch_is_written_whole_and_its_end_changes_nothing_but_the_end() -> None:
    history = History().began(epoch(4)).ended(4, at=150.0, ending=Ending.MOVED, reason="epoch 9 was seen")
    assert to_document(history) == {
        "schema": "narwhal.history",
        "schema_version": 1,
        "epochs": [
            {
                "epoch": 4,
                "holder": "a",
                "address": "a:1",
                "began_at": 100.0,
                "ended_at": 150.0,
                "ending": "moved",
                "reason": "epoch 9 was seen",
            }
        ],
    }


def test_what_nobody_told_says_so_and_only_a_known_end_is_kept() -> None:
    words = "its holder did not say; the lease ran out, or was freed with the process"
    history = History().began(epoch(1)).ended(1, at=150.0, ending=Ending.SWITCHED, reason="by hand")
    history = history.began(epoch(2, "b")).began(epoch(5, "c"), before=epoch(4, "d", None))
    assert [(e.epoch, e.ending, e.reason) for e in history.epochs] == [
        (1, Ending.SWITCHED, "by hand"),
        (2, Ending.UNTOLD, words),
        (4, Ending.UNTOLD, words),
        (5, Ending.LASTS, ""),
    ]
    # Who led last, as the lease says, is of no use when it is not between what is known and what begins.
    for other in (1, 5, 6, 9):
        assert history.began(epoch(6), before=epoch(other, "x")).epochs == history.began(epoch(6)).epochs


def test_the_newest_yield_is_the_one_that_counts() -> None:
    history = History().began(epoch(1)).ended(1, at=100.0, ending=Ending.YIELDED, reason="degraded")
    history = history.began(epoch(2)).ended(2, at=160.0, ending=Ending.YIELDED, reason="degraded")
    assert history.began(epoch(3)).since_yield_s(wall=200.0) == 40.0


@pytest.mark.parametrize("number", [0, -1])
def test_epochs_begin_at_one(number: int) -> None:
    with pytest.raises(ValueError, match=f"^epoch must be at least 1, got {number}$"):
        epoch(number)
    document = dict(to_document(History().began(epoch(1))))
    document["epochs"][0]["epoch"] = number
    with pytest.raises(HistoryError, match=rf"^epochs\[0\]: epoch must be at least 1, got {number}$"):
        from_document(document)


@pytest.mark.parametrize("schema", ["narwhal.history", "other"])
@pytest.mark.parametrize("version", [1, 2])
def test_both_the_schema_and_its_version_must_be_known(schema: str, version: int) -> None:
    document = {"schema": schema, "schema_version": version, "epochs": []}
    if (schema, version) == ("narwhal.history", 1):
        assert from_document(document) == History()
        return
    with pytest.raises(HistoryError) as refused:
        from_document(document)
    assert str(refused.value) == f"unknown schema {schema!r}, version {version}"
