"""What happened on a leg → the outcome that is reported (left column of spec F2 and F4, and F5). Pure.

Decides: one word for one leg. It cannot see: classes, streaks or who is to blame; only the control plane judges.
"""

from enum import StrEnum

from narwhal.vocabulary import Outcome


class LegKind(StrEnum):
    """What a leg was waiting for when something happened."""

    PREFILL = "prefill"
    COUNT = "count"  # of a prompt's tokens, on a prefill engine
    LOAD = "load"  # the one token with which a decode engine has read a handoff for several choices
    ANSWER = "answer"  # a non-streaming decode answer
    FIRST_TOKEN = "first_token"  # a decode stream before its first token
    STREAM = "stream"  # a decode stream after its first token


class Seen(StrEnum):
    """What the engine-side client saw once a connection was there."""

    CLOSED_BEFORE = "closed before a response began"
    CLOSED_DURING = "closed inside the response"
    LATE = "nothing for as long as the engine is given"
    BROKEN = "broken framing"


OUTCOMES: dict[Seen, dict[LegKind, Outcome]] = {
    Seen.CLOSED_BEFORE: dict.fromkeys(LegKind, Outcome.RESET),
    Seen.CLOSED_DURING: {
        LegKind.PREFILL: Outcome.ANSWER_CUT,
        LegKind.COUNT: Outcome.ANSWER_CUT,
        LegKind.LOAD: Outcome.ANSWER_CUT,
        LegKind.ANSWER: Outcome.ANSWER_CUT,
        LegKind.FIRST_TOKEN: Outcome.STREAM_CUT,
        LegKind.STREAM: Outcome.STREAM_CUT,
    },
    Seen.LATE: {
        LegKind.PREFILL: Outcome.PREFILL_TIMEOUT,
        LegKind.COUNT: Outcome.READ_TIMEOUT,
        LegKind.LOAD: Outcome.FIRST_TOKEN_TIMEOUT,
        LegKind.ANSWER: Outcome.READ_TIMEOUT,
        LegKind.FIRST_TOKEN: Outcome.FIRST_TOKEN_TIMEOUT,
        LegKind.STREAM: Outcome.STREAM_SILENT,
    },
    Seen.BROKEN: dict.fromkeys(LegKind, Outcome.STREAM_MALFORMED),
}

STATUS_OUTCOMES: dict[int, Outcome] = {
    401: Outcome.WRONG_IDENTITY,
    403: Outcome.WRONG_IDENTITY,
    404: Outcome.WRONG_IDENTITY,  # only the configured model is ever asked for (spec R9)
    408: Outcome.HTTP_408,
    429: Outcome.HTTP_429,
}

SUCCESSES = frozenset({Outcome.HANDOFF, Outcome.STREAM_COMPLETE, Outcome.ANSWER_COMPLETE, Outcome.CLIENT_ERROR})
NEUTRALS = frozenset({Outcome.CANCELLED, Outcome.LOCAL, Outcome.DEADLINE})


def of_status(status: int) -> Outcome:
    """The outcome of an answer whose status is not 200.

    What is neither 200 nor 4xx (a redirect, say) is no answer an engine gives: it counts like a 5xx.
    """
    named = STATUS_OUTCOMES.get(status)
    if named is not None:
        return named
    return Outcome.CLIENT_ERROR if 400 <= status < 500 else Outcome.HTTP_5XX
