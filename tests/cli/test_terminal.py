"""Colour and rules belong to a terminal; start-up time to everybody."""

import ast
import os
import pty
import re
import resource
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from narwhal.cli.main import COMMANDS
from tests.cli import fleets
from tests.cli.conftest import WAIT_S, Run
from tests.cli.fake_control import FakeControl

ESCAPE = "\x1b["


@pytest.fixture(autouse=True)
def fleet(control: FakeControl) -> None:
    control.status = fleets.wounded()


def on_a_terminal(control: FakeControl, *args: str, **environment: str) -> str:
    """What a command prints on a terminal of 120 columns."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from narwhal.cli.main import main; main()", "--control", control.address, *args],
        stdout=follower,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8", "COLUMNS": "120", **environment},
    )
    os.close(follower)
    read = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # what Linux says when the last writer has closed
            break
        if not block:
            break
        read += block
    os.close(leader)
    process.wait(WAIT_S)
    return read.decode().replace("\r\n", "\n")


def test_colour_on_a_terminal(control: FakeControl) -> None:
    printed = on_a_terminal(control, "status")
    assert ESCAPE + "32mREADY" in printed
    assert "────" in printed


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_colour_gets_none(control: FakeControl, environment: dict[str, str]) -> None:
    printed = on_a_terminal(control, "status", **environment)
    assert printed.startswith("READY  demo: 2 of 3 engines serve")
    assert ESCAPE not in printed


def test_an_empty_no_color_means_nothing(control: FakeControl) -> None:
    assert ESCAPE in on_a_terminal(control, "engines", NO_COLOR="")


def test_json_is_never_coloured(control: FakeControl) -> None:
    assert ESCAPE not in on_a_terminal(control, "engines", "-o", "json")


@pytest.mark.parametrize("output", ["table", "wide"])
@pytest.mark.parametrize("columns", [40, 120, 200])
def test_no_terminal_loses_a_letter(control: FakeControl, columns: int, output: str) -> None:
    control.status.engines[1].holds[0].reason = "word" * 60
    printed = on_a_terminal(control, "engines", "-o", output, NO_COLOR="1", COLUMNS=str(columns))
    if output == "wide":
        assert "http://127.0.0.1:9001  no      4            refused 3, stream_complete 800" in printed
    assert re.sub(r"\s", "", printed).count("word") == 60


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"CLICOLOR_FORCE": "1"}])
def test_a_pipe_gets_neither_colour_nor_rules(
    run: Run, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    printed = run("status").out
    assert printed.isascii()
    assert ESCAPE not in printed


def test_an_output_that_knows_only_ascii_is_no_crash(control: FakeControl) -> None:
    control.status.engines[1].holds[0].reason = "größer → 大"
    script = "from narwhal.cli.main import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", script, "--control", control.address, "engines"],
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii"},
        timeout=WAIT_S,
        check=True,
    )
    assert rb"gr\xf6\xdfer \u2192 \u5927" in ran.stdout


def test_help_starts_in_under_two_fifths_of_a_second() -> None:
    """CPU time, not wall time: what else this machine does is not the command's affair."""
    script = "from narwhal.cli.main import main; main()"
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", script, "--help"], stdout=subprocess.DEVNULL, timeout=WAIT_S, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.4


def test_help_loads_no_command() -> None:
    script = (
        "import sys; from narwhal.cli.main import cli; cli.main(['--help'], standalone_mode=False); "
        "print([m for m in ('grpc', 'rich', 'yaml', 'pydantic', 'asyncio') if m in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert ran.stderr == "[]\n"


def test_the_groups_help_says_what_each_command_says() -> None:
    for name, (where, words) in COMMANDS.items():
        module, _, attribute = where.partition(":")
        command = getattr(import_module(module), attribute)
        assert command.help.partition("\n")[0] == words, name
        assert command.name == name


def test_a_command_is_a_file_of_its_name() -> None:
    folder = Path(__file__).resolve().parents[2] / "narwhal" / "cli" / "commands"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files | {"completion"} == set(COMMANDS)
    for path in folder.glob("*.py"):
        assert path.stem == "__init__" or ast.get_docstring(ast.parse(path.read_text())), path


def offered(words: str, **environment: str) -> list[str]:
    """What the shell offers for the last word."""
    ran = subprocess.run(
        [sys.executable, "-c", "from narwhal.cli.main import main; main()"],
        env={
            **os.environ,
            "_NARWHALCTL_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ran.stderr == ""
    return [line.rpartition(",")[2] for line in ran.stdout.splitlines() if line]


def test_completion_offers_commands() -> None:
    assert offered("narwhalctl e") == ["eject", "engines", "events", "explain"]


@pytest.mark.parametrize("environment", [True, False])
def test_completion_offers_the_fleets_engines(control: FakeControl, environment: bool) -> None:
    if environment:
        names = offered("narwhalctl events --engine de", NARWHAL_CONTROL=control.address)
    else:
        names = offered(f"narwhalctl --control {control.address} events --engine de")
    assert names == ["decode-0", "decode-1"]


def test_completion_offers_nothing_when_control_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert offered("narwhalctl events --engine de", NARWHAL_CONTROL=address) == []
