"""`narwhalctl`: the group of commands, each loaded when it is asked for.

A command lives in `narwhal/cli/commands/` and is named in `COMMANDS`; it gets the global options without doing anything
for it, takes what they say by `@pass_settings`, and raises an exception of `narwhal.cli.options` for every answer but
"done".
"""

import os
import sys
from importlib import import_module

import click
from click.shell_completion import CompletionItem, get_completion_class

from narwhal.cli.options import Settings, global_options

# name → module:attribute, and the first line of its help. Not imported before use: a command starts in the time of what
# it needs itself, and `narwhalctl --help` needs none of them.
COMMANDS: dict[str, tuple[str, str]] = {
    "completion": ("narwhal.cli.main:completion", "Print the completion script of a shell."),
    "config": ("narwhal.cli.commands.config:config", "Check, show and describe fleet files."),
    "drain": ("narwhal.cli.commands.drain:drain", "Take engines out of placement, until they are undrained."),
    "eject": ("narwhal.cli.commands.eject:eject", "Take an engine out of placement, until its gate passes."),
    "engines": (
        "narwhal.cli.commands.engines:engines",
        "Show every engine: what it serves and what keeps work off it.",
    ),
    "events": ("narwhal.cli.commands.events:events", "Show what happened, oldest first, one line an event."),
    "explain": ("narwhal.cli.commands.explain:explain", "Say why an engine is, or is not, eligible."),
    "history": ("narwhal.cli.commands.history:history", "Show who led when, and why each epoch ended."),
    "placement": ("narwhal.cli.commands.placement:placement", "Show the placement that proxies work by."),
    "probe": ("narwhal.cli.commands.probe:probe", "Probe an engine now and wait for the answer."),
    "proxies": (
        "narwhal.cli.commands.proxies:proxies",
        "Show every proxy worker: its placement, lag and legs in flight.",
    ),
    "replay": ("narwhal.cli.commands.replay:replay", "Show what an event journal holds, or what would have been."),
    "role": ("narwhal.cli.commands.role:role", "Give an engine a role, for new placements."),
    "roles": ("narwhal.cli.commands.roles:roles", "Show the loads of both roles, and who should change."),
    "undrain": (
        "narwhal.cli.commands.undrain:undrain",
        "Have the gates of drained engines tried now, and say how that ended.",
    ),
    "switchover": (
        "narwhal.cli.commands.switchover:switchover",
        "Have a standby lead instead of the active control process.",
    ),
    "status": ("narwhal.cli.commands.status:status", "Say whether the fleet is ready, and what needs a look."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported on demand and get the global options."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            module, _, attribute = COMMANDS[cmd_name][0].partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            _accept_global_options(command)
            self.add_command(command, cmd_name)
        return self.commands[cmd_name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name, help=COMMANDS[name][1]) for name in self.list_commands(ctx)]
        return [item for item in names if item.value.startswith(incomplete)] + click.Command.shell_complete(
            self, ctx, incomplete
        )


def _accept_global_options(command: click.Command) -> None:
    """Lets `narwhalctl status -o json` mean what `narwhalctl -o json status` does."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _accept_global_options(inner)
        if not command.invoke_without_command:
            return
    taken = {name for param in command.params for name in param.opts}
    command.params += [option for option in global_options() if not taken.intersection(option.opts)]


@click.group(
    cls=LazyGroup,
    params=[*global_options(environment=True)],
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
    # gRPC tells stderr of connections that come and go; what an operator has to know of them, the commands say.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        code = cli.main(prog_name="narwhalctl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
