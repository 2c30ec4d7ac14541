"""`explain`: the whole answer in words, from the records that decisions are made of."""

import pytest

from narwhal.control.core.effects import ProbeInference
from narwhal.control.core.events import CommandRefusedError, EjectCommand, Refusal
from narwhal.vocabulary import Outcome
from tests.core.rig import Rig, decode, only, prefill


def lines(rig: Rig, engine: str) -> tuple[str, ...]:
    return rig.fleet.explain(engine, now=rig.now).lines


def test_an_engine_that_serves() -> None:
    rig = Rig(prefill("p"), decode("d"))
    assert lines(rig, "d")[:2] == (
        "engine d is eligible: serves decode (role decode, incarnation 1)",
        "evidence: none now",
    )


def test_an_engine_under_suspicion_says_why_since_when_and_what_was_seen() -> None:
    rig = Rig(prefill("p1"), prefill("p2"), decode("d"), decode("e"))
    rig.report("d", Outcome.STREAM_CUT, count=2, producer="p1", detail="closed after 3 tokens")
    rig.now += 1
    rig.report("d", Outcome.ERROR_EVENT, producer="p1", detail="error event: code 500")
    rig.now += 2
    told = lines(rig, "d")
    assert told[0] == "engine d is not eligible: verification hold (role decode, incarnation 1)"
    last = "decode leg: error event: code 500, on edge/0, handoff of p1"
    assert told[1] == "verification hold for 2.0 s: 3 stream failures in a row (error event)"
    assert told[2] == "inference probe under way"
    assert told[3] == f"evidence: 3 stream failures in a row (acted upon at 3), the last 2.0 s ago: {last}"
    assert told[4] == "its failed decode legs read from: p1"
    assert f"2.0 s ago: engine d: verification hold: 3 stream failures in a row, the last: {last}" in told
    assert "2.0 s ago: engine d: inference probe begins" in told


def test_an_ejected_engine_says_by_which_cause_and_when_it_is_tried_again() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"))
    rig.report("d", Outcome.REFUSED, count=3, detail="connection refused")
    rig.now += 4
    told = lines(rig, "d")
    assert told[0] == "engine d is not eligible: ejected (role decode, incarnation 1)"
    assert told[1] == "ejected for 4.0 s: 3 connection failures in a row (refused)"
    event = "engine d ejected (connection): 3 connection failures in a row, the last: decode leg: connection refused, "
    assert f"4.0 s ago: {event}on edge/0" in told
    assert "its gate is tried next in 6.0 s" in told
    assert "check health: pass: seen (4.0 s ago, took 0 ms)" in told
    assert any("engine d joined as incarnation 1" in line for line in told)


def test_a_hold_that_yields_says_so() -> None:
    rig = Rig(prefill("p", pinned=True), decode("d", pinned=True))
    step = only(rig.report("d", Outcome.STREAM_CUT, count=3), ProbeInference)
    told = lines(rig, "d")
    assert told[0] == "engine d is eligible: serves decode (role decode, pinned, incarnation 1)"
    assert "yields: no other engine can serve" in told[1]
    rig.answer_step(step, Outcome.HTTP_429, None)
    assert any("inference probe again in 10.0 s" in line for line in lines(rig, "d"))


def test_what_was_cleared_is_still_told() -> None:
    rig = Rig(prefill("p"), decode("d"))
    rig.report("d", Outcome.HTTP_5XX, detail="HTTP 500")
    rig.report("d", Outcome.STREAM_COMPLETE)
    rig.now += 300
    assert "cleared since: inference_status failure 5 min ago: decode leg: HTTP 500, on edge/0" in lines(rig, "d")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(CommandRefusedError) as refused:
        Rig(decode("d")).fleet.explain("x", now=0.0)
    assert refused.value.refusal is Refusal.NOT_FOUND


def test_the_history_is_bounded() -> None:
    rig = Rig(prefill("p"), decode("d"), decode("e"), liveness_every=0)
    for _ in range(100):
        rig.send(EjectCommand(engine="d", reason="again"))
        rig.now += 1000
        rig.readmit("d")
    assert len(rig.fleet._history["d"]) == 50
    assert len(lines(rig, "d")) < 40
