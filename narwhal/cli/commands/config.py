"""`narwhalctl config`: check a fleet file, show it with its defaults, print its schema. Needs no control service."""

import json
import os
from collections import Counter
from typing import Any

import click
import yaml

from narwhal.cli.options import Output, Settings, UsageProblem, pass_settings
from narwhal.config import FleetConfig, FleetFileError, fleet_schema, load_fleet
from narwhal.config.relations import advice


@click.group()
def config() -> None:
    """Check, show and describe fleet files."""


def _loaded(file: str) -> FleetConfig:
    try:
        return load_fleet(file, os.environ)
    except FleetFileError as error:
        raise UsageProblem(str(error)) from None


def _print(value: dict[str, Any], output: Output) -> None:
    if output is Output.JSON:
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        click.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), nl=False)


@config.command()
@click.argument("file")
def check(file: str) -> None:
    """Check FILE and print every problem, one a line; exits 2 when there is one. A file that is fine may get advice."""
    fleet = _loaded(file)
    roles = Counter(engine.role for engine in fleet.engines)
    count = len(fleet.engines)
    parts = ", ".join(f"{roles[role]} {role}" for role in sorted(roles, reverse=True))
    click.echo(
        f"{file}: ok: fleet {fleet.name} serves {fleet.model} on {count} engine{'s' * (count > 1)} ({parts}), "
        f"{fleet.store.kind} store"
    )
    for found in advice(fleet):
        click.echo(f"{file}: advice: {found.path}: {found.sentence}", err=True)


@config.command()
@click.argument("file")
@pass_settings
def show(settings: Settings, file: str) -> None:
    """Print FILE with its defaults filled in and its secrets masked; YAML, or JSON by `-o json`."""
    _print(_loaded(file).masked(), settings.output or Output.YAML)


@config.command()
@pass_settings
def schema(settings: Settings) -> None:
    """Print the JSON Schema of fleet files; JSON, or YAML by `-o yaml`."""
    _print(fleet_schema(), settings.output or Output.JSON)
