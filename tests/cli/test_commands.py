"""explain, eject and probe: what they ask, print and exit with."""

import signal
from collections.abc import Callable

import grpc
import pytest

from tests.cli import fleets
from tests.cli.conftest import Run, Running
from tests.cli.fake_control import FakeControl

OUT = "engine decode-1 ejected (operator): smells of smoke"
BEGUN = "engine decode-1: inference probe begins (asked for by an operator)"
PASSED = "engine decode-1: inference probe: pass: read a handoff of prefill-0"


@pytest.fixture(autouse=True)
def fleet(control: FakeControl) -> None:
    control.status = fleets.wounded()
    control.explanation = fleets.explanation()


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_prints_the_words_of_control_and_exits_0(run: Run) -> None:
    ran = run("explain", "decode-0")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "engine decode-0 is not eligible: ejected (role decode, incarnation 4)\n1 line more\nand a third\n"
    )


def test_explain_wide_adds_what_was_measured(run: Run) -> None:
    out = run("explain", "decode-0", "-o", "wide").out
    assert out.startswith(run("explain", "decode-0").out + "\nENGINE ")
    assert "decode-0  read_timeout  2m20s  5.0s   GET /health: no answer within 5 s\n" in out
    assert "decode-0  connection  3 of 4  5      2m11s  refused   -       decode leg: refused (connecting)" in out


def test_explain_json_has_the_words_and_the_facts(run: Run) -> None:
    facts = run("explain", "decode-0", "-o", "json").json
    (engine,) = [e for e in run("engines", "-o", "json").json["engines"] if e["id"] == "decode-0"]
    assert facts == {
        "engine": engine,
        "lines": [
            "engine decode-0 is not eligible: ejected (role decode, incarnation 4)",
            "1 line more",
            "and a third",
        ],
        "history": [{"age_s": 130.7, "message": "1 line more"}],
    }


def test_explaining_an_unknown_engine_is_a_no(run: Run) -> None:
    ran = run("explain", "decode-9")
    assert (ran.code, ran.out, ran.err) == (1, "", "narwhalctl: no engine decode-9 in this fleet\n")


# --- eject ------------------------------------------------------------------------------------------------------------


def test_eject_says_what_it_brought_about(run: Run, control: FakeControl) -> None:
    control.told = [OUT, "not ready: no eligible engines"]
    ran = run("eject", "decode-1", "--reason", "smells of smoke")
    assert (ran.code, ran.out, ran.err) == (0, f"{OUT}\nnot ready: no eligible engines\n", "")
    (asked,) = control.ejections
    assert (asked.engine_id, asked.reason, asked.dry_run) == ("decode-1", "smells of smoke", False)


def test_a_dry_run_says_that_nothing_was_changed(run: Run, control: FakeControl) -> None:
    control.told = [OUT]
    ran = run("eject", "decode-1", "--dry-run")
    assert (ran.code, ran.out) == (0, f"nothing was changed; without --dry-run:\n{OUT}\n")
    (asked,) = control.ejections
    assert asked.dry_run


def test_eject_json(run: Run, control: FakeControl) -> None:
    control.told = [OUT]
    assert run("eject", "decode-1", "-o", "json").json == {"engine": "decode-1", "dry_run": False, "told": [OUT]}


# --- probe ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 1), ("inconclusive", 1)])
def test_probe_exits_with_the_verdict(run: Run, control: FakeControl, verdict: str, code: int) -> None:
    control.told, control.verdict = [BEGUN, PASSED], verdict
    ran = run("probe", "decode-1")
    assert (ran.code, ran.out, ran.err) == (code, f"{BEGUN}\n{PASSED}\n", "")


def test_a_dry_run_of_a_probe_exits_0(run: Run, control: FakeControl) -> None:
    control.told = [BEGUN]
    ran = run("probe", "decode-1", "--dry-run", "-o", "json")
    assert (ran.code, ran.json) == (0, {"engine": "decode-1", "dry_run": True, "told": [BEGUN], "verdict": ""})


def test_a_long_probe_says_on_stderr_what_it_waits_for(
    run: Run, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narwhal.cli.client.LOOK_S", 0.05)
    monkeypatch.setattr("narwhal.cli.client.CALL_TIMEOUT_S", 5.0)
    control.told = [PASSED]
    control.probing.set()
    said: list[str] = []

    def heard(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            control.status.engines[2].suspicion = "reading from prefill-0, a producer of its failures"
        else:
            control.probing.clear()

    monkeypatch.setattr("narwhal.cli.commands.probe.notice", heard)
    ran = run("probe", "decode-1")
    assert said == ["inference probe again in 4.0 s", "reading from prefill-0, a producer of its failures"]
    assert (ran.code, ran.out) == (0, f"{PASSED}\n")


def test_a_control_that_stops_answering_ends_the_wait(
    run: Run, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narwhal.cli.client.LOOK_S", 0.05)
    monkeypatch.setattr("narwhal.cli.client.CALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr("narwhal.cli.commands.probe.notice", lambda _: control.silent.set())
    control.probing.set()
    ran = run("probe", "decode-1")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == (
        f"narwhalctl: {control.address}: no answer within 1 s, while the probe was waited for; it may go on: "
        "see narwhalctl events\n"
    )


def test_a_lease_lost_while_it_waits_begins_no_second_probe(
    run: Run, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narwhal.cli.client.LOOK_S", 0.05)
    # It leads again at once: whoever asked anew would find it active.
    monkeypatch.setattr("narwhal.cli.commands.probe.notice", lambda _: setattr(control, "blinks", 1))
    control.probing.set()
    ran = run("probe", "decode-1")
    assert (ran.code, control.blinks) == (3, 0)
    assert "not active, knows no active, while the probe was waited for; it may go on" in ran.err
    assert len(control.probes) == 1


def test_ctrl_c_ends_the_wait(control: FakeControl, start: Callable[..., Running]) -> None:
    control.probing.set()
    running = start("probe", "decode-1", "--control", control.address)
    assert running.next("err") == "narwhalctl: inference probe again in 4.0 s"
    assert running.end(signal.SIGINT) == 130


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["eject", "probe"])
@pytest.mark.parametrize("code", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND])
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_refusal_is_a_no_in_the_words_of_control(
    run: Run, control: FakeControl, command: str, code: grpc.StatusCode, more: tuple[str, ...]
) -> None:
    control.command_error, control.told = code, ["engine decode-1 is joining"]
    ran = run(command, "decode-1", *more)
    assert (ran.code, ran.out, ran.err) == (1, "", "narwhalctl: engine decode-1 is joining\n")


@pytest.mark.parametrize("command", ["eject", "probe"])
def test_a_command_is_made_again_only_when_nothing_was_done(run: Run, control: FakeControl, command: str) -> None:
    control.leads_no_more, control.told = 1, [OUT]
    assert run(command, "decode-1").code == 0
    assert len(control.ejections) + len(control.probes) == 2


@pytest.mark.parametrize("command", ["eject", "probe"])
def test_a_command_whose_fate_is_not_known_is_not_made_again(run: Run, control: FakeControl, command: str) -> None:
    control.command_error, control.told = grpc.StatusCode.UNAVAILABLE, ["leads no more"]
    ran = run(command, "decode-1")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == (
        f"narwhalctl: {control.address}: leads no more; it may have been done all the same: see narwhalctl events\n"
    )
    assert len(control.ejections) + len(control.probes) == 1


@pytest.mark.parametrize("command", ["explain", "eject", "probe"])
def test_no_control_is_no_answer(run: Run, control: FakeControl, command: str) -> None:
    control.stop()
    ran = run(command, "decode-1")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == f"narwhalctl: no active control process: {control.address}: connection refused\n"


@pytest.mark.parametrize("command", ["explain", "eject", "probe"])
def test_an_engine_has_to_be_named(run: Run, command: str) -> None:
    assert run(command).code == 2
    assert run(command, "decode-0", "decode-1").code == 2


@pytest.mark.rule("F12")
def test_a_proxy_that_is_the_fault_is_shown_as_such(run: Run, control: FakeControl) -> None:
    control.proxies = fleets.proxies()
    out = run("proxies").out
    assert "edge/1 is suspect: its legs fail on 2 of 3 engines that serve other proxies" in out
    assert "\nedge/1  suspect " in out
