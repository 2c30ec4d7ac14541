"""`narwhalctl`'s frame and its `config` and `completion` commands, run as an operator does."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import yaml
from click.testing import CliRunner

from narwhal.cli import main as program
from narwhal.cli.main import COMMANDS, cli
from narwhal.cli.options import (
    AnswerIsNo,
    ControlUnreachable,
    Output,
    Settings,
    UsageProblem,
    addresses,
    pass_settings,
)
from narwhal.config import parse_fleet

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "fleet.yaml")
MINIMAL = "name: f\nmodel: m\nengines: [{id: e, url: 'http://h:1', role: decode}]\n"


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    code = "from narwhal.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_check_says_that_a_file_is_fine() -> None:
    done = run("config", "check", EXAMPLE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{EXAMPLE}: ok: fleet example serves tiny on 4 engines (2 prefill, 2 decode), file store\n"


def test_check_gives_advice_on_a_file_that_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(MINIMAL + "recovery: {silent_leg_s: 60}\n")
    done = run("config", "check", str(file))
    assert done.returncode == 0
    assert done.stdout.startswith(f"{file}: ok: ")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{file}: advice: recovery.silent_leg_s: should be more than 0 and at most 22, what ")
    assert line.endswith(", got 60")


def test_check_names_every_problem_on_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(MINIMAL + "recovery: {eject_after: 0}\nsolo: 1\n")
    done = run("config", "check", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"narwhalctl: {file}: recovery.eject_after: must be at least 1, got 0",
        f"narwhalctl: {file}: solo: unknown key; did you mean slo?",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "check", "/nowhere/fleet.yaml"),
        ("config", "show", "/nowhere/fleet.yaml"),
        ("config", "check"),
        ("config", "weigh"),
        ("nonsense",),
        ("-o", "xml", "config", "schema"),
        ("--control", "here", "config", "schema"),
        ("--control", "h:0", "config", "schema"),
        ("--control", ",", "config", "schema"),
        ("completion", "tcsh"),
        ("--nonsense",),
    ],
)
def test_a_wrong_command_line_exits_2_and_prints_no_data(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr


def test_show_fills_in_defaults_and_masks_secrets(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(MINIMAL + "engine: {api_key: '${KEY}'}\n")
    done = run("config", "show", str(file), KEY="s3cret")
    assert done.returncode == 0
    shown = yaml.safe_load(done.stdout)
    assert shown["recovery"]["eject_after"] == 3
    assert shown["engine"]["api_key"] == "***"
    assert "s3cret" not in done.stdout + done.stderr
    assert parse_fleet(done.stdout, {}).engine_set() == {"e"}
    for arguments in (("-o", "json", "config", "show", str(file)), ("config", "show", str(file), "-o", "json")):
        assert json.loads(run(*arguments, KEY="s3cret").stdout) == shown


def test_schema_is_json_unless_told_otherwise() -> None:
    schema = json.loads(CliRunner().invoke(cli, ["config", "schema"]).stdout)
    assert schema["properties"]["recovery"]["$ref"] == "#/$defs/RecoveryConfig"
    assert yaml.safe_load(CliRunner().invoke(cli, ["-o", "yaml", "config", "schema"]).stdout) == schema


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_the_program(shell: str) -> None:
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0
    assert "_NARWHALCTL_COMPLETE" in done.stdout


def test_completion_completes() -> None:
    done = run(_NARWHALCTL_COMPLETE="bash_complete", COMP_WORDS="narwhalctl config ", COMP_CWORD="2")
    assert sorted(done.stdout.split()) == ["plain,check", "plain,schema", "plain,show"]


def test_no_command_is_loaded_before_it_is_asked_for() -> None:
    heavy = ("narwhal.cli.commands.", "grpc", "rich", "pydantic")
    code = f"import sys, narwhal.cli.main; print([name for name in sys.modules if name.startswith({heavy})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_named_command_exists_and_takes_the_global_options() -> None:
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        assert command.help is not None
        assert command.help.partition("\n")[0] == COMMANDS[name][1]
        leaves = [command] if not isinstance(command, click.Group) else list(command.commands.values())
        for leaf in leaves:
            assert {"--control", "--output"} <= {option for param in leaf.params for option in param.opts}


@click.command()
@pass_settings
def echo(settings: Settings) -> None:
    click.echo(f"{','.join(settings.control.addresses)} {settings.output} {settings.colour}")


@pytest.fixture
def with_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "COMMANDS", {**COMMANDS, "echo": ("echo_for_a_test:echo", "Say it.")})
    monkeypatch.setitem(sys.modules, "echo_for_a_test", SimpleNamespace(echo=echo))
    monkeypatch.setattr(cli, "commands", dict(cli.commands))


@pytest.mark.usefixtures("with_echo")
@pytest.mark.parametrize(
    ("arguments", "environ", "control", "output"),
    [
        ([], {}, "127.0.0.1:7400", None),
        ([], {"NARWHAL_CONTROL": "a:1, b:2"}, "a:1,b:2", None),
        (["--control", "c:3"], {"NARWHAL_CONTROL": "a:1"}, "c:3", None),
        (["-o", "wide"], {}, "127.0.0.1:7400", Output.WIDE),
        (["--control", "[::1]:4,c:3,c:3", "-o", "json"], {}, "[::1]:4,c:3", Output.JSON),
    ],
)
def test_global_options_reach_a_command_from_either_side(
    arguments: list[str], environ: dict[str, str], control: str, output: Output | None
) -> None:
    for line in ([*arguments, "echo"], ["echo", *arguments]):
        done = CliRunner().invoke(cli, line, env=environ)
        assert (done.exit_code, done.stdout) == (0, f"{control} {output} False\n")


def test_a_command_s_own_option_wins_over_the_group_s() -> None:
    done = CliRunner().invoke(cli, ["-o", "yaml", "config", "schema", "-o", "json"])
    assert json.loads(done.stdout)


def test_addresses_are_taken_apart() -> None:
    assert addresses("a:1,[::1]:2,a:1") == ("a:1", "[::1]:2")


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (AnswerIsNo("not ready"), 1, "narwhalctl: not ready\n"),
        (AnswerIsNo(""), 1, ""),
        (UsageProblem("one\ntwo"), 2, "narwhalctl: one\nnarwhalctl: two\n"),
        (ControlUnreachable("nobody answers"), 3, "narwhalctl: nobody answers\n"),
        (click.Abort(), 130, ""),
    ],
)
def test_an_answer_is_an_exit_code(
    error: Exception,
    code: int,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == code
    assert capsys.readouterr() == ("", printed)


@pytest.mark.parametrize(
    ("terminal", "environ", "coloured"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_colour_only_on_a_terminal(
    terminal: bool, environ: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", type("Stream", (), {"isatty": lambda self: terminal})())
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert Settings().colour is coloured
