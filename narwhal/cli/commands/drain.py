"""`narwhalctl drain`: engines out of placement until they are undrained, and when they may be stopped."""

import asyncio
import math
from collections.abc import Callable, Sequence

import click

from narwhal.cli import engine_model, model, outcomes
from narwhal.cli.client import Control, Drain, drained, waits_for
from narwhal.cli.complete import engine_names
from narwhal.cli.failures import Lost, NotActive, Refused, Unreachable
from narwhal.cli.options import AnswerIsNo, Settings, UsageProblem, Where, pass_settings
from narwhal.cli.reach import connect
from narwhal.cli.render import Printer, done, notice

LOOK_S = 0.5  # between two looks at a drain that another process goes on with


@click.command()
@click.argument("engines", nargs=-1, metavar="ENGINE...", shell_complete=engine_names)
@click.option("--all", "everybody", is_flag=True, help="Every engine: maintenance of the whole fleet.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True, max=1e9),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="After it a drain that is not ready to stop is overdue; it goes on.",
)
@click.option("--reason", metavar="TEXT", default="", help="Why; holds, events and `explain` say it.")
@click.option("--no-restart", is_flag=True, help="Not planned maintenance: the same process may return.")
@click.option("--wait", is_flag=True, help="Return when the engines are ready to stop; exit 1 at the deadline.")
@click.option("--dry-run", is_flag=True, help="Only say what would happen.")
@pass_settings
def drain(  # noqa: PLR0917 - click passes them by name
    settings: Settings,
    engines: tuple[str, ...],
    everybody: bool,
    deadline: float,
    reason: str,
    no_restart: bool,
    wait: bool,
    dry_run: bool,
) -> None:
    """Take engines out of placement, until they are undrained.

    Legs that run there run on. An engine is ready to stop when every proxy knows and nothing runs there any more; to
    return it must have been restarted, unless told otherwise.
    """
    if bool(engines) == everybody:
        raise UsageProblem("name engines, or --all of them")
    if math.isnan(deadline):
        raise UsageProblem("--deadline must be a number")
    request = Drain(
        engines=tuple(dict.fromkeys(engines)),
        everybody=everybody,
        deadline_s=deadline,
        reason=reason,
        restart=not no_restart,
        wait=wait,
        dry_run=dry_run,
    )
    answer = asyncio.run(_drain(settings.control, request, notice))
    Printer(settings).show(answer, lambda _: done(answer.told, dry_run=dry_run))
    if wait and not dry_run and answer.waits_for:
        late = "; ".join(f"{name} waits for {', '.join(words)}" for name, words in answer.waits_for.items())
        raise AnswerIsNo(f"not ready to stop within {deadline:g} s: {late}")


async def _drain(where: Where, request: Drain, progress: Callable[[str], None]) -> outcomes.Drained:
    """Drains, and waits when asked to, over restarts and takeovers of control."""
    told: list[str] = []
    while True:
        try:
            async with connect(where) as control:
                return await control.drain(request, told=told, progress=progress)
        except NotActive:
            await asyncio.sleep(LOOK_S)  # nothing was done; whoever leads by then is asked
        except Refused:
            if not request.wait or request.dry_run or not await _all_drained(where, request):
                raise
            progress("drained already: that drain goes on as it was asked for, and is waited for")
            return await _wait_again(where, request, progress)
        except Lost as error:
            if not (request.wait and told):
                raise
            progress(str(error))
            return await _wait(where, request, told, progress, lambda d: d.settled or d.overdue)


async def _all_drained(where: Where, request: Drain) -> bool:
    """Whether each of the engines named is drained, so that there is something to wait for."""
    async with connect(where) as control:
        engines = _of(await control.status(proxies=False), request)
    return len(engines) >= max(1, len(request.engines)) and all(e.drain is not None for e in engines)


def _of(status: model.Status, request: Drain) -> list[engine_model.Engine]:
    return [e for e in status.engines if request.everybody or e.id in request.engines]


async def _wait_again(where: Where, request: Drain, progress: Callable[[str], None]) -> outcomes.Drained:
    """The drain was begun before: its own deadline may have passed long ago, so the one given now ends the waiting."""
    try:
        async with asyncio.timeout(request.deadline_s):
            return await _wait(where, request, [], progress, lambda d: d.settled)
    except TimeoutError:
        async with connect(where) as control:
            return drained(_of(await control.status(proxies=False), request), told=[])


Over = Callable[[engine_model.Drain], bool]


async def _wait(
    where: Where, request: Drain, told: Sequence[str], progress: Callable[[str], None], over: Over
) -> outcomes.Drained:
    """The drain has been stored: whoever leads goes on with it. Returns when it is `over` for every engine."""
    said = ""
    while True:
        try:
            async with connect(where) as control:
                progress(f"following {control.address}")
                return await _look(control, request, told, progress, over)
        except (Unreachable, Refused) as error:
            if str(error) != said:
                progress(str(error))
            said = str(error)
        await asyncio.sleep(LOOK_S)


async def _look(
    control: Control, request: Drain, told: Sequence[str], progress: Callable[[str], None], over: Over
) -> outcomes.Drained:
    said = ""
    while True:
        engines = _of(await control.status(proxies=False), request)
        if all(e.drain is None or over(e.drain) for e in engines):
            settled = [f"engine {e.id} is ready to stop" for e in engines if e.drain is not None and e.drain.settled]
            return drained(engines, told=[*told, *(words for words in settled if words not in told)])
        waiting = "; ".join(f"{name}: {', '.join(words)}" for name, words in waits_for(engines).items())
        if waiting not in ("", said):
            progress(f"waits for {waiting}")
        said = waiting
        await asyncio.sleep(LOOK_S)
