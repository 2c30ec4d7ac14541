"""Which control process is asked, and what is said when none answers."""

import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest

from narwhal.cli import model
from narwhal.cli.client import Control
from narwhal.cli.failures import NotActive
from narwhal.cli.options import Where
from narwhal.cli.reach import ask
from tests.cli import fleets
from tests.cli.conftest import WAIT_S, Run
from tests.cli.fake_control import FakeControl


@pytest.fixture
def nobody() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(autouse=True)
def fleet(control: FakeControl) -> None:
    control.status = fleets.wounded()


def test_unreachable_is_one_line_that_names_every_address(run: Run, nobody: str) -> None:
    ran = run("status", addresses=f"{nobody},no-such-host.invalid:7400")
    assert ran.code == 3
    assert ran.out == ""
    assert ran.err == (
        f"narwhalctl: no active control process: {nobody}: connection refused; "
        "no-such-host.invalid:7400: name does not resolve\n"
    )


@pytest.mark.parametrize("command", ["status", "engines", "proxies", "placement", "events"])
@pytest.mark.parametrize("more", [(), ("-o", "json"), ("-f",)])
def test_every_command_exits_3_when_control_is_away(run: Run, nobody: str, command: str, more: tuple[str, ...]) -> None:
    if more == ("-f",) and command not in ("placement", "events"):
        assert run(command, *more).code == 2
        return
    ran = run(command, *more, addresses=nobody)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.count("\n") == 1


def test_a_process_that_does_not_answer_costs_a_deadline(
    run: Run, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narwhal.cli.client.CALL_TIMEOUT_S", 0.2)
    control.silent.set()
    ran = run("status")
    assert (ran.code, ran.err) == (
        3,
        f"narwhalctl: no active control process: {control.address}: no answer within 0.2 s\n",
    )


def test_a_dead_address_costs_nothing_while_another_answers(run: Run, control: FakeControl, nobody: str) -> None:
    with FakeControl() as silent:
        silent.silent.set()
        # The deadline of the silent one is minutes away: only asking all at once can pass.
        assert run("status", addresses=f"{nobody},{silent.address},{control.address}").code == 0


def test_the_http_port_is_told_from_the_grpc_port(run: Run) -> None:
    class Web(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Web) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        ran = run("status", addresses=f"127.0.0.1:{web.server_port}")
        web.shutdown()
        thread.join()
    assert ran.code == 3
    assert "does not speak gRPC; is it the HTTP port?" in ran.err


def test_a_standby_is_followed_to_the_active(run: Run, control: FakeControl) -> None:
    with FakeControl() as standby:
        standby.standby_of = control.address
        ran = run("status", "-o", "json", addresses=standby.address)
    assert ran.code == 0
    assert ran.json["control"]["address"] == control.address


def test_a_standby_that_names_a_dead_active_says_both(run: Run, control: FakeControl, nobody: str) -> None:
    control.standby_of = nobody
    ran = run("engines")
    assert ran.code == 3
    assert ran.err == (
        f"narwhalctl: no active control process: {control.address}: not active, names {nobody}; "
        f"{nobody}: connection refused\n"
    )


def test_standbys_that_name_each_other_end(run: Run, control: FakeControl) -> None:
    with FakeControl() as other:
        control.standby_of, other.standby_of = other.address, control.address
        assert run("status").code == 3


def test_a_standby_that_knows_no_active(run: Run, control: FakeControl) -> None:
    control.standby_of = ""
    ran = run("status")
    assert (ran.code, ran.err) == (
        3,
        f"narwhalctl: no active control process: {control.address}: not active, knows no active\n",
    )


@pytest.mark.parametrize("reason", ["standby", "fenced"])
def test_a_status_of_one_that_does_not_lead_is_no_status(run: Run, control: FakeControl, reason: str) -> None:
    control.status.ready, control.status.reason = False, reason
    ran = run("status")
    assert (ran.code, ran.out) == (3, "")
    assert reason in ran.err


def test_a_lease_lost_between_two_calls_is_asked_for_again(control: FakeControl) -> None:
    asked = 0

    async def question(process: Control) -> model.Status:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise NotActive("lost it", "")
        return await process.status()

    assert ask(Where(addresses=(control.address,)), question).fleet == "demo"
    assert asked == 2


def test_an_error_that_control_answers_exits_1(run: Run, control: FakeControl) -> None:
    control.refusal = (grpc.StatusCode.PERMISSION_DENIED, "token has no role operator")
    ran = run("status")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"narwhalctl: {control.address}: permission denied: token has no role operator\n"


def test_a_control_that_has_not_published_yet(run: Run, monkeypatch: pytest.MonkeyPatch, control: FakeControl) -> None:
    monkeypatch.setattr("narwhal.cli.client.CALL_TIMEOUT_S", 1.0)
    ran = run("placement")
    assert ran.code == 3
    assert "no answer within 1 s" in ran.err


@pytest.mark.parametrize(
    "args",
    [("status", "extra"), ("events", "--since-seq", "-1"), ("engines", "-o", "csv"), ("proxies", "--nope"), ("nope",)],
)
def test_usage_errors_exit_2(run: Run, args: tuple[str, ...]) -> None:
    assert run(*args).code == 2


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 1)])
def test_the_process_exits_with_the_answer(control: FakeControl, ready: bool, code: int) -> None:
    control.status.ready = ready
    script = "from narwhal.cli.main import main; main()"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, "status", "--control", control.address],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (code, "")
