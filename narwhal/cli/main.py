"""`narwhalctl`: the group of commands, each loaded when it is asked for.

A command lives in `narwhal/cli/commands/` and is named in `COMMANDS`; it gets the global options without doing anything
for it, takes what they say by `@pass_settings`, and raises an exception of `narwhal.cli.options` for every answer but
"done".
"""

import sys
from importlib import import_module

import click
from click.shell_completion import get_completion_class

from narwhal.cli.options import Settings, global_options

# name → module:attribute. Not imported before use: a command starts in the time of what it needs itself.
COMMANDS: dict[str, str] = {
    "completion": "narwhal.cli.main:completion",
    "config": "narwhal.cli.commands.config:config",
}


class LazyGroup(click.Group):
    """A group whose commands are imported on demand and get the global options."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            module, _, attribute = COMMANDS[cmd_name].partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            _accept_global_options(command)
            self.add_command(command, cmd_name)
        return self.commands[cmd_name]


def _accept_global_options(command: click.Command) -> None:
    """Lets `narwhalctl status -o json` mean what `narwhalctl -o json status` does."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _accept_global_options(inner)
        return
    taken = {name for param in command.params for name in param.opts}
    command.params += [option for option in global_options() if not taken.intersection(option.opts)]


@click.group(
    cls=LazyGroup,
    params=[*global_options(envvar="NARWHAL_CONTROL")],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="narwhal", prog_name="narwhalctl", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Look at and operate a Narwhal fleet through its control service.

    Exit codes: 0 done; 1 the answer is no; 2 usage or configuration; 3 control cannot be reached.
    """
    ctx.ensure_object(Settings)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    Load it with `eval "$(narwhalctl completion bash)"`, or `narwhalctl completion fish | source`.
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(cli, {}, "narwhalctl", "_NARWHALCTL_COMPLETE").source())


def main() -> None:
    """Entry point: runs one command and exits with its code."""
    try:
        code = cli.main(prog_name="narwhalctl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
