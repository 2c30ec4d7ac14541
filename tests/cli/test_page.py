"""docs/narwhalctl.md and the commands say the same."""

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import click
import pytest

from narwhal.cli import engine_model, model, outcomes, placement_model
from narwhal.cli.commands import replay
from narwhal.cli.main import COMMANDS, cli

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "narwhalctl.md").read_text()
LOOKS = (
    "status", "engines", "proxies", "placement", "events", "explain", "eject", "probe", "drain", "undrain",
    "history", "switchover", "replay", "role", "roles",
)  # fmt: skip
WORDS = set(re.findall(r"`([a-z_]+)(?:\[\])?`", PAGE))


@pytest.mark.parametrize(
    "value",
    [
        model.Status, model.ControlProcess, model.Monitor, model.StageError, model.Totals, model.Proxy, model.Event,
        model.Role, model.Roles, model.Risk, model.Proposal, model.Standby, model.Epoch,
        engine_model.Engine, engine_model.Hold, engine_model.Check, engine_model.Evidence, engine_model.Failure,
        engine_model.Health, engine_model.Told, engine_model.Explanation, engine_model.Process, engine_model.Drain,
        engine_model.Drift,
        placement_model.Placement, placement_model.PlacedEngine, placement_model.PlacementStep,
        placement_model.Difference,
        outcomes.Done, outcomes.Probed, outcomes.Drained, outcomes.Returned, outcomes.Forgotten, outcomes.Switched,
        replay.Replayed, replay.Event, replay.EngineCourse,
    ],
)  # fmt: skip
def test_every_key_is_documented(value: type) -> None:
    nested = {
        "control",
        "monitor",
        "totals",
        "holds",
        "checks",
        "errors",
        "engines",
        "proxies",
        "changes",
        "evidence",
        "last",
        "health",
        "engine",
        "history",
        "drain",
        "process",
        "drift",
        "roles",
        "proposal",
        "risks",
        "standbys",
    }
    assert {field.name for field in fields(value)} - nested <= WORDS, value
    for name in {field.name for field in fields(value)} & nested:
        assert re.search(rf"`(\w+\.)?{name}(\[\])?\.?`", PAGE), name


@pytest.mark.parametrize("name", LOOKS)
def test_every_look_has_a_section_with_an_example(name: str) -> None:
    section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert f"$ narwhalctl {name}" in section


def test_every_example_is_a_command_that_parses() -> None:
    for line in re.findall(r"^\$ narwhalctl (.+)$", PAGE, re.MULTILINE):
        args = line.split()
        module, _, attribute = COMMANDS[args[0]][0].partition(":")
        assert isinstance(getattr(import_module(module), attribute), click.Command)
        context = click.Context(cli)
        command = cli.get_command(context, args[0])
        assert command is not None
        command.make_context(args[0], args[1:], parent=context)


@pytest.mark.parametrize("name", LOOKS)
def test_every_option_is_documented(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for param in command.params:
        for option in param.opts:
            assert f"`{option}" in PAGE or f" {option}" in PAGE, option


def test_every_command_is_in_the_list() -> None:
    for name in COMMANDS:
        assert re.search(rf"^\| \[?`{name}\b", PAGE, re.MULTILINE), name
