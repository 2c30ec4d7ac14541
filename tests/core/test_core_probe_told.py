"""What an inference probe says of its legs, its peers and the producers it remembered, in words (spec F6, F7)."""

from collections.abc import Sequence

import pytest

from narwhal.control.core.events import LegSeen
from narwhal.control.core.probing import InferenceProbe, Step, StepSeen, verdict_of, words
from narwhal.vocabulary import Outcome, Phase, Verdict
from tests.core.rig import leg

P, D = Phase.PREFILL, Phase.DECODE
GOT = leg(Outcome.HANDOFF)
OK = leg(Outcome.STREAM_COMPLETE)
CODE_500 = leg(Outcome.ERROR_EVENT, "error event: code 500")
CUT = leg(Outcome.STREAM_CUT)
HTTP_500 = leg(Outcome.HTTP_5XX, "answered 500")
BUSY = leg(Outcome.HTTP_429, "answered 429")
REFUSED = leg(Outcome.REFUSED, "connection refused")
PASS, FAIL, OPEN = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE
Ends = tuple[LegSeen | None, LegSeen | None]


class Probe:
    """One probe of `s`: its peers by phase; the steps that it asked for."""

    def __init__(self, phases: Sequence[Phase], producers: str, consumers: str, remembered: str = "") -> None:
        self.machine = InferenceProbe("s", phases, remembered.split())
        self.peers = {P: producers.split(), D: consumers.split()}
        self.steps: list[str] = []

    def next(self) -> Step | None:
        return self.machine.next(lambda phase: self.peers[phase])

    def run(self, *answers: Ends) -> "Probe":
        """Answer its steps, all of them."""
        for produced, consumed in answers:
            step = self.next()
            assert step is not None, "it has its verdict already"
            self.steps.append(f"{step.producer or ''}→{step.consumer}")
            self.machine.answered(StepSeen(produced=produced, consumed=consumed))
        assert self.next() is None, "it asks on"
        return self


@pytest.mark.rule("F6")
@pytest.mark.parametrize(
    ("producers", "answers", "steps", "verdict", "detail"),
    [
        ("p q", [(GOT, OK)], ["p→s"], PASS, "read a handoff of p"),
        (
            "p q r",
            [(GOT, CODE_500), (GOT, CUT)],
            ["p→s", "q→s"],
            FAIL,
            "it cannot read handoffs of p and q (error event: code 500; stream cut)",
        ),
        # What both times was the same is said once.
        (
            "p q",
            [(GOT, CODE_500), (GOT, CODE_500)],
            ["p→s", "q→s"],
            FAIL,
            "it cannot read handoffs of p and q (error event: code 500)",
        ),
        # With one producer a completion without a handoff decides.
        ("p", [(GOT, CODE_500), (None, OK)], ["p→s", "→s"], PASS, "a completion without a handoff: stream complete"),
        ("p", [(GOT, CODE_500), (None, CUT)], ["p→s", "→s"], FAIL, "a completion without a handoff: stream cut"),
        ("p", [(GOT, CODE_500), (None, BUSY)], ["p→s", "→s"], OPEN, "a completion without a handoff: answered 429"),
        ("", [(None, OK)], ["→s"], PASS, "a completion without a handoff: stream complete"),
        # It could not even be reached: no producer is to blame.
        ("p q", [(None, REFUSED)], ["p→s"], FAIL, "connection refused"),
        ("p q", [(None, leg(Outcome.LOCAL, "no connection"))], ["p→s"], OPEN, "no connection"),
        ("p q", [(GOT, BUSY)], ["p→s"], OPEN, "answered 429"),
        # A producer that failed itself is passed over, three of them at most.
        ("p q", [(HTTP_500, None), (GOT, OK)], ["p→s", "q→s"], PASS, "read a handoff of q"),
        ("p q", [(None, None), (GOT, OK)], ["p→s", "q→s"], PASS, "read a handoff of q"),
        (
            "p q",
            [(HTTP_500, None), (BUSY, None)],
            ["p→s", "q→s"],
            OPEN,
            "the peers failed themselves: p, q",
        ),
        (
            "p q r t",
            [(HTTP_500, None)] * 3,
            ["p→s", "q→s", "r→s"],
            OPEN,
            "the peers failed themselves: p, q, r",
        ),
        # One that failed, and then nobody but peers that fail themselves: a completion tells.
        (
            "p q",
            [(GOT, CODE_500), (HTTP_500, None), (None, OK)],
            ["p→s", "q→s", "→s"],
            PASS,
            "a completion without a handoff: stream complete",
        ),
    ],
)
def test_the_decode_leg(producers: str, answers: list[Ends], steps: list[str], verdict: Verdict, detail: str) -> None:
    probe = Probe([D], producers, "").run(*answers)
    assert (probe.steps, probe.machine.verdict, probe.machine.detail) == (steps, verdict, detail)


@pytest.mark.rule("F6")
@pytest.mark.parametrize(
    ("consumers", "answers", "steps", "verdict", "detail"),
    [
        ("d e", [(GOT, OK)], ["s→d"], PASS, "d read its handoff"),
        ("d e", [(HTTP_500, None)], ["s→d"], FAIL, "answered 500"),
        ("d e", [(BUSY, None)], ["s→d"], OPEN, "answered 429"),
        (
            "d e",
            [(GOT, CODE_500), (GOT, CUT)],
            ["s→d", "s→e"],
            FAIL,
            "d and e cannot read its handoff (error event: code 500; stream cut)",
        ),
        # Its only reader works without it, or does not.
        (
            "d",
            [(GOT, CODE_500), (None, OK)],
            ["s→d", "→d"],
            FAIL,
            "d works and cannot read its handoff (error event: code 500)",
        ),
        ("d", [(GOT, CODE_500), (None, CUT)], ["s→d", "→d"], OPEN, "d failed itself: stream cut"),
        ("d", [(GOT, CODE_500), (None, None)], ["s→d", "→d"], OPEN, "d failed itself: not begun"),
        # A reader that never came to read says nothing of it.
        ("d e", [(GOT, REFUSED), (GOT, OK)], ["s→d", "s→e"], PASS, "e read its handoff"),
        ("d e", [(None, REFUSED), (GOT, OK)], ["s→d", "s→e"], PASS, "e read its handoff"),
        ("d e", [(GOT, BUSY), (GOT, OK)], ["s→d", "s→e"], PASS, "e read its handoff"),
        ("d", [(GOT, REFUSED)], ["s→d"], OPEN, "the peers failed themselves: d"),
        ("d", [(None, REFUSED)], ["s→d"], OPEN, "the peers failed themselves: d"),
        ("", [(None, CUT)], ["→s"], FAIL, "a completion without a handoff: stream cut"),
    ],
)
def test_the_prefill_leg(consumers: str, answers: list[Ends], steps: list[str], verdict: Verdict, detail: str) -> None:
    probe = Probe([P], "", consumers).run(*answers)
    assert (probe.steps, probe.machine.verdict, probe.machine.detail) == (steps, verdict, detail)


@pytest.mark.rule("F6")
@pytest.mark.parametrize(
    ("peers", "answers", "steps", "verdict", "detail"),
    [
        (("p", "d"), [(GOT, OK), (GOT, OK)], ["s→d", "p→s"], PASS, "d read its handoff; read a handoff of p"),
        # Of a failed leg only that, and nothing is asked after it.
        (("p", "d"), [(HTTP_500, None)], ["s→d"], FAIL, "answered 500"),
        (("p", "d"), [(GOT, OK), (None, REFUSED)], ["s→d", "p→s"], FAIL, "connection refused"),
        (("p", "d"), [(BUSY, None), (GOT, OK)], ["s→d", "p→s"], OPEN, "answered 429; read a handoff of p"),
        # Alone one completion speaks for both.
        (("", ""), [(None, OK)], ["→s"], PASS, "a completion without a handoff: stream complete"),
        (
            ("p", ""),
            [(None, OK), (GOT, CODE_500)],
            ["→s", "p→s"],
            PASS,
            "a completion without a handoff: stream complete",
        ),
        # An engine is no peer of itself.
        (("s", "s"), [(None, OK)], ["→s"], PASS, "a completion without a handoff: stream complete"),
    ],
)
def test_both_legs_of_an_unpinned_engine(
    peers: tuple[str, str], answers: list[Ends], steps: list[str], verdict: Verdict, detail: str
) -> None:
    probe = Probe([P, D], *peers).run(*answers)
    assert (probe.steps, probe.machine.verdict, probe.machine.detail) == (steps, verdict, detail)


@pytest.mark.rule("F7")
@pytest.mark.parametrize(
    ("answers", "blamed", "to_check"),
    [
        # Another producer than those it remembers goes first; these are looked at next, newest first.
        ([(GOT, OK)], [], ["q", "p"]),
        # Three have failed by themselves, the two that it remembered among them: nothing is left to ask.
        (
            [(HTTP_500, None)] * 3,
            [("p", "it gave no handoff for a probe"), ("q", "it gave no handoff for a probe")],
            [],
        ),
        ([(HTTP_500, None), (GOT, OK)], [], ["q"]),
        # One of them it cannot read, another it can: the producer is to blame.
        ([(GOT, CODE_500), (GOT, OK)], [("r", "s works and cannot read its handoff")], ["q"]),
        ([(GOT, CODE_500), (GOT, CODE_500)], [], []),
    ],
)
def test_the_producers_of_its_failures(answers: list[Ends], blamed: list[tuple[str, str]], to_check: list[str]) -> None:
    probe = Probe([D], "p q r", "", remembered="p q").run(*answers)
    assert (probe.machine.blamed(), probe.machine.to_check()) == (blamed, to_check)


@pytest.mark.rule("F7")
def test_a_peer_that_fails_and_was_not_remembered_is_not_blamed() -> None:
    probe = Probe([P, D], "p", "d", remembered="p").run((None, REFUSED), (GOT, OK))
    assert probe.machine.failed_peers == {"d"}
    assert probe.machine.blamed() == []
    assert probe.machine.to_check() == []  # p has just been read from
    # Nor does a prefill leg say anything of producers.
    probe = Probe([P], "", "d", remembered="p").run((GOT, OK))
    assert probe.machine.to_check() == []


def test_what_came_back_last_is_kept() -> None:
    probe = Probe([D], "p", "").run((GOT, CODE_500), (None, OK))
    assert probe.machine.last == StepSeen(produced=None, consumed=OK)
    assert probe.machine.step is None
    with pytest.raises(ValueError, match="no step is open"):
        probe.machine.answered(StepSeen(produced=GOT, consumed=OK))


def test_a_leg_that_was_not_begun_says_nothing() -> None:
    assert [verdict_of(None), verdict_of(GOT), verdict_of(CUT)] == [OPEN, PASS, FAIL]
    assert [words(None), words(CUT), words(CODE_500)] == ["not begun", "stream cut", "error event: code 500"]
