"""One trial of KV transfers by itself: whose failure, who comes through, and the words of the check (spec R2)."""

from collections.abc import Callable, Iterable

import pytest

from narwhal.control.core.events import CheckResult, LegSeen
from narwhal.control.core.transfers import Candidate, Fault, Link, Seen, Trial, judged
from narwhal.vocabulary import Outcome, Phase, Verdict
from tests.core.rig import leg

P, D = Phase.PREFILL, Phase.DECODE
WORKED = Seen(fault=Fault.NONE, words="worked")
NO_KV = Seen(fault=Fault.PAIR, words="error event: code 500")
DEAD_PRODUCER = Seen(fault=Fault.PRODUCER, words="HTTP 500")
DEAD_CONSUMER = Seen(fault=Fault.CONSUMER, words="connection refused")
UNKNOWN = Seen(fault=Fault.UNKNOWN, words="no answer came back")
Ends = Callable[[str, str], Seen]


def works(_producer: str, _consumer: str) -> Seen:
    return WORKED


def producer(name: str, *readers: str) -> Candidate:
    return Candidate(id=name, partners={P: readers})


def reader(name: str, *producers: str) -> Candidate:
    return Candidate(id=name, partners={D: producers})


def both(name: str, readers: Iterable[str], producers: Iterable[str]) -> Candidate:
    return Candidate(id=name, partners={P: tuple(readers), D: tuple(producers)})


def run(trial: Trial, ends: Ends = works) -> tuple[dict[str, CheckResult], list[tuple[str, str]]]:
    """Answer every transfer until it is over; the results, and the transfers in the order in which they were begun."""
    begun: list[tuple[str, str]] = []
    while links := trial.next():
        ended = [end for link in links for end in (link.producer, link.consumer)]
        assert len(ended) == len(set(ended)), "an engine is in two transfers at once"
        for link in links:
            begun.append((link.producer, link.consumer))
            trial.answered(link, ends(link.producer, link.consumer))
    assert trial.over
    return trial.results(), begun


def told(trial: Trial, ends: Ends = works) -> dict[str, tuple[Verdict, str]]:
    return {name: (result.verdict, result.detail) for name, result in run(trial, ends)[0].items()}


def passed(words: str) -> tuple[Verdict, str]:
    return Verdict.PASS, words


def failed(words: str) -> tuple[Verdict, str]:
    return Verdict.FAIL, words


def unclear(words: str) -> tuple[Verdict, str]:
    return Verdict.INCONCLUSIVE, words


RESTART = "if the process before this one had the same engine id, restart"


@pytest.mark.rule("R2")
@pytest.mark.parametrize(
    ("candidate", "ends", "result"),
    [
        (producer("p", "d1", "d2"), works, passed("d1, d2 read its handoff")),
        (reader("d", "p1", "p2"), works, passed("it read handoffs of p1, p2")),
        (both("p", ["d1"], ["q"]), works, passed("d1 read its handoff; it read handoffs of q")),
        # A direction for which there was nobody is said not to have been tested, and never to have passed.
        (both("p", ["d1"], []), works, passed("d1 read its handoff; decode not tested: no peer")),
        (both("p", [], ["q"]), works, passed("prefill not tested: no peer; it read handoffs of q")),
        (both("p", [], []), works, (Verdict.NOT_TESTED, "no peer")),
        # One proven peer with which it does not work keeps it out.
        (
            producer("p", "d1", "d2"),
            lambda _p, d: NO_KV if d == "d1" else WORKED,
            failed(f"p→d1: error event: code 500; {RESTART} d1"),
        ),
        (
            producer("p", "d1", "d2"),
            lambda _p, _d: NO_KV,
            failed(f"p→d1: error event: code 500; p→d2: error event: code 500; {RESTART} d1, d2"),
        ),
        # Its own failure is all that is told of it, whoever the other was.
        (producer("p", "d1", "d2"), lambda _p, _d: DEAD_PRODUCER, failed("p→d1: HTTP 500; p→d2: HTTP 500")),
        (reader("d", "p1"), lambda _p, _d: DEAD_CONSUMER, failed("p1→d: connection refused")),
        (
            both("p", ["d1"], ["q"]),
            lambda p, _d: DEAD_PRODUCER if p == "p" else NO_KV,
            failed("p→d1: HTTP 500"),
        ),
        # The failure of the other end, or an answer that says nothing, leaves the question open.
        (reader("d", "p1"), lambda _p, _d: DEAD_PRODUCER, unclear("p1→d: HTTP 500")),
        (producer("p", "d1"), lambda _p, _d: DEAD_CONSUMER, unclear("p→d1: connection refused")),
        (producer("p", "d1"), lambda _p, _d: UNKNOWN, unclear("p→d1: no answer came back")),
        # One peer that works is enough where the others only say nothing.
        (
            reader("d", "p1", "p2"),
            lambda p, _d: DEAD_PRODUCER if p == "p1" else WORKED,
            passed("it read handoffs of p2"),
        ),
    ],
)
def test_what_is_said_of_one_candidate(candidate: Candidate, ends: Ends, result: tuple[Verdict, str]) -> None:
    peers = {peer for peers in candidate.partners.values() for peer in peers}
    assert told(Trial([candidate], proven=peers), ends) == {candidate.id: result}


@pytest.mark.rule("R2")
def test_of_many_peers_eight_are_named() -> None:
    readers = [f"d{n}" for n in range(10)]
    candidate = producer("p", *readers)
    (result,) = told(Trial([candidate], proven=readers), lambda _p, _d: NO_KV).values()
    pairs = "; ".join(f"p→d{n}: error event: code 500" for n in range(8))
    named = ", ".join(f"d{n}" for n in range(8))
    assert result == failed(f"{pairs} and 2 more; {RESTART} {named} and 2 more")
    (result,) = told(Trial([producer("p", *readers[:9])], proven=readers), lambda _p, _d: NO_KV).values()
    assert result == failed(f"{pairs} and 1 more; {RESTART} {named} and 1 more")
    (result,) = told(Trial([producer("p", *readers[:8])], proven=readers), lambda _p, _d: NO_KV).values()
    assert result == failed(f"{pairs}; {RESTART} {named}")


@pytest.mark.rule("R2")
@pytest.mark.case("B3")
@pytest.mark.parametrize(
    ("answers", "tries", "verdict"),
    [
        ([WORKED], 1, Verdict.PASS),
        ([NO_KV, WORKED], 2, Verdict.PASS),
        ([NO_KV, NO_KV], 2, Verdict.FAIL),
        ([UNKNOWN, WORKED], 2, Verdict.PASS),
        ([DEAD_PRODUCER, NO_KV], 2, Verdict.FAIL),
    ],
)
def test_a_pair_is_tried_once_and_once_more_when_that_failed(answers: list[Seen], tries: int, verdict: Verdict) -> None:
    waiting = list(answers)
    results, begun = run(Trial([producer("p", "d")], proven=["d"]), lambda _p, _d: waiting.pop(0))
    assert begun == [("p", "d")] * tries
    assert results["p"].verdict is verdict


@pytest.mark.rule("R2")
def test_the_second_try_of_a_pair_comes_before_pairs_that_were_not_tried_yet() -> None:
    seen: list[str] = []

    def first_fails(_p: str, consumer: str) -> Seen:
        seen.append(consumer)
        return NO_KV if len(seen) == 1 else WORKED

    _, begun = run(Trial([producer("p", "d1", "d2")], proven=["d1", "d2"]), first_fails)
    assert begun == [("p", "d1"), ("p", "d1"), ("p", "d2")]


@pytest.mark.rule("R2")
def test_pairs_that_share_no_engine_are_tried_at_the_same_time() -> None:
    trial = Trial([producer("p1", "d1", "d2"), producer("p2", "d1", "d2")], proven=["d1", "d2"])
    first = trial.next()
    assert first == [Link(producer="p1", consumer="d1"), Link(producer="p2", consumer="d2")]
    assert trial.next() == []
    trial.answered(first[0], WORKED)
    assert trial.next() == []  # both that are free now have only the busy ones left
    trial.answered(first[1], WORKED)
    second = trial.next()
    assert set(second) == {Link(producer="p1", consumer="d2"), Link(producer="p2", consumer="d1")}
    assert not trial.over
    for link in second:
        trial.answered(link, WORKED)
    assert trial.over


# --- several candidates that are each other's peers -------------------------------------------------------------------


def start(ends: Ends = works, *names: str) -> dict[str, Verdict]:
    """A fleet that starts: every producer with every reader."""
    producers = [n for n in names if n.startswith("p")]
    readers = [n for n in names if n.startswith("d")]
    candidates = [producer(p, *readers) for p in producers] + [reader(d, *producers) for d in readers]
    return {name: result.verdict for name, result in run(Trial(candidates, proven=()), ends)[0].items()}


def apart(*bad: tuple[str, str]) -> Ends:
    return lambda p, d: NO_KV if (p, d) in bad else WORKED


OK, NO, OPEN = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE


@pytest.mark.rule("R2")
@pytest.mark.case("C9")
@pytest.mark.parametrize(
    ("ends", "verdicts"),
    [
        (works, {"p1": OK, "p2": OK, "d1": OK, "d2": OK}),
        # The engine with most failed pairs goes; who works with the rest stays.
        (apart(("p1", "d1"), ("p1", "d2")), {"p1": NO, "p2": OK, "d1": OK, "d2": OK}),
        (apart(("p1", "d2"), ("p2", "d2")), {"p1": OK, "p2": OK, "d1": OK, "d2": NO}),
        # Of equals the one named last.
        (apart(("p1", "d2")), {"p1": OK, "p2": OK, "d1": OK, "d2": NO}),
        # Who has nobody left in a direction goes too.
        (
            apart(("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2")),
            {"p1": NO, "p2": NO, "d1": NO, "d2": NO},
        ),
        # One that gives nothing to anybody is at fault by itself, and nobody else for it.
        (
            lambda p, _d: DEAD_PRODUCER if p == "p1" else WORKED,
            {"p1": NO, "p2": OK, "d1": OK, "d2": OK},
        ),
        (
            lambda _p, d: DEAD_CONSUMER if d == "d1" else WORKED,
            {"p1": OK, "p2": OK, "d1": NO, "d2": OK},
        ),
        # Without any producer that works no reader could be tested.
        (lambda _p, _d: DEAD_PRODUCER, {"p1": NO, "p2": NO, "d1": OPEN, "d2": OPEN}),
    ],
)
def test_one_bad_candidate_does_not_keep_the_others_out(ends: Ends, verdicts: dict[str, Verdict]) -> None:
    assert start(ends, "p1", "p2", "d1", "d2") == verdicts


@pytest.mark.rule("R2")
def test_each_candidate_is_told_of_its_own_pairs() -> None:
    candidates = [producer("p1", "d1", "d2"), producer("p2", "d1", "d2"), reader("d1", "p1", "p2"),
                  reader("d2", "p1", "p2")]  # fmt: skip
    ends = {("p1", "d1"): DEAD_PRODUCER, ("p1", "d2"): DEAD_PRODUCER, ("p2", "d2"): NO_KV}
    assert told(Trial(candidates, proven=()), lambda p, d: ends.get((p, d), WORKED)) == {
        "p1": failed("p1→d1: HTTP 500; p1→d2: HTTP 500"),
        "p2": passed("d1 read its handoff"),
        "d1": passed("it read handoffs of p2"),
        "d2": failed(f"p2→d2: error event: code 500; {RESTART} p2"),
    }
    # Whose peers did all fail by themselves has nothing to be told of but that.
    assert told(Trial([reader("d1", "p1"), producer("p1", "d1")], proven=()), lambda _p, _d: DEAD_PRODUCER) == {
        "d1": unclear("p1→d1: HTTP 500"),
        "p1": failed("p1→d1: HTTP 500"),
    }


@pytest.mark.rule("R2")
def test_a_pair_with_a_proven_engine_is_the_candidates_failure_however_few_they_are() -> None:
    candidates = [producer("p1", "d1", "d2"), reader("d1", "p1", "q"), reader("d2", "p1", "q")]
    # p1 fails with both candidates, d1 with the proven q: d1 goes first, and p1 for its pair with d2.
    ends = apart(("p1", "d1"), ("p1", "d2"), ("q", "d1"))
    results, _ = run(Trial(candidates, proven=["q"]), ends)
    assert {name: result.verdict for name, result in results.items()} == {"p1": NO, "d1": NO, "d2": NO}
    results, _ = run(Trial(candidates, proven=["q"]), apart(("q", "d1")))
    assert {name: result.verdict for name, result in results.items()} == {"p1": OK, "d1": NO, "d2": OK}


@pytest.mark.rule("R2")
def test_an_engine_in_service_that_nobody_could_test_is_on_trial_too() -> None:
    """It has no result of its own; what it fails with everybody does not keep the candidates out."""
    candidates = [producer("p1", "u", "d"), producer("p2", "u", "d"), reader("d", "p1", "p2")]
    results, _ = run(Trial(candidates, proven=()), lambda _p, d: NO_KV if d == "u" else WORKED)
    assert {name: (r.verdict, r.detail) for name, r in results.items()} == {
        "p1": passed("d read its handoff"),
        "p2": passed("d read its handoff"),
        "d": passed("it read handoffs of p1, p2"),
    }


@pytest.mark.rule("R2")
def test_who_is_proven_by_a_trial() -> None:
    trial = Trial([producer("p1", "u", "d"), producer("p2", "u", "d"), reader("d", "p1", "p2")], proven=())
    run(trial, lambda p, d: NO_KV if (p, d) == ("p2", "u") else WORKED)
    assert trial.proved() == {"p1", "d"}


def test_an_engine_that_is_gone_is_no_candidate_and_no_peer() -> None:
    trial = Trial([producer("p1", "d1", "d2"), producer("p2", "d1", "d2")], proven=["d1", "d2"])
    first, second = trial.next()
    trial.gone("d1")
    trial.answered(first, WORKED)  # too late, and no error
    assert trial.next() == []  # p1 is free again, d2 is not
    trial.answered(second, WORKED)
    (last,) = trial.next()
    assert last == Link(producer="p1", consumer="d2")
    assert not trial.over
    trial.gone("p1")
    assert trial.over
    assert {name: result.detail for name, result in trial.results().items()} == {"p2": "d2 read its handoff"}
    trial = Trial([producer("p1", "d1", "d2")], proven=["d1", "d2"])
    trial.gone("d1")  # before anything was begun
    assert trial.next() == [Link(producer="p1", consumer="d2")]
    trial = Trial([producer("p", "d")], proven=["d"])
    trial.next()
    trial.gone("d")
    assert trial.over
    assert trial.results()["p"].verdict is Verdict.NOT_TESTED


def test_a_transfer_is_made_on_the_account_of_a_candidate() -> None:
    trial = Trial([producer("p", "d"), reader("e", "q")], proven=["d", "q"])
    assert trial.owner(Link(producer="p", consumer="d")) == "p"
    assert trial.owner(Link(producer="q", consumer="e")) == "e"
    assert Trial([producer("p", "d"), reader("d", "p")], proven=()).owner(Link(producer="p", consumer="d")) == "p"


@pytest.mark.parametrize(
    ("produced", "consumed", "seen"),
    [
        (leg(Outcome.HANDOFF), leg(Outcome.STREAM_COMPLETE), WORKED),
        (leg(Outcome.HANDOFF), leg(Outcome.ERROR_EVENT, "error event: code 500"), NO_KV),
        (leg(Outcome.HTTP_5XX, "HTTP 500"), None, DEAD_PRODUCER),
        (leg(Outcome.HTTP_429), leg(Outcome.STREAM_COMPLETE, "fine"), Seen(fault=Fault.UNKNOWN, words="http 429")),
        (leg(Outcome.HANDOFF), leg(Outcome.REFUSED, "connection refused"), DEAD_CONSUMER),
        (leg(Outcome.HANDOFF), leg(Outcome.HTTP_429, "busy"), Seen(fault=Fault.UNKNOWN, words="busy")),
        (leg(Outcome.HANDOFF), None, Seen(fault=Fault.UNKNOWN, words="not begun")),
        (None, leg(Outcome.REFUSED, "connection refused"), DEAD_CONSUMER),
        (None, leg(Outcome.LOCAL, "no connection"), Seen(fault=Fault.UNKNOWN, words="no connection")),
        (None, None, Seen(fault=Fault.UNKNOWN, words="not begun")),
    ],
)
def test_a_transfer_says_whose_failure_it_is_in_the_words_of_that_leg(
    produced: LegSeen | None, consumed: LegSeen | None, seen: Seen
) -> None:
    assert judged(produced, consumed) == seen
