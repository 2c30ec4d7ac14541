"""What the shell offers where a command wants a name that only control knows."""

import asyncio

import click
from click.shell_completion import CompletionItem

from narwhal.cli.options import CommandError, Settings, Where
from narwhal.cli.reach import connect

PATIENCE_S = 1.0  # who presses Tab does not wait for a dead machine


def engine_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`shell_complete` of an option or argument that takes an engine: the fleet's engines, or nothing when control is
    not to be reached at once."""
    settings = ctx.find_object(Settings) or Settings()
    try:
        engines = asyncio.run(_engines(settings.control))
    except (CommandError, TimeoutError):
        return []
    return [CompletionItem(name, help=serves) for name, serves in engines if name.startswith(incomplete)]


async def _engines(where: Where) -> list[tuple[str, str]]:
    async with asyncio.timeout(PATIENCE_S), connect(where) as control:
        status = await control.status(proxies=False)
    return [(engine.id, f"serves {'+'.join(engine.phases) or 'nothing'}") for engine in status.engines]
