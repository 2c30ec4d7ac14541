"""Finds the active control process, and goes with it when another leads."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from narwhal.cli import model, outcomes
from narwhal.cli.client import CALL_TIMEOUT_S, Control, cancelled
from narwhal.cli.failures import Lost, NotActive, Refused, Unreachable
from narwhal.cli.options import Where
from narwhal.cli.secure import secure

T = TypeVar("T")

NEXT_S = 15.0  # until somebody leads after a switchover
NEXT_LOOK_S = 0.05


def ask(where: Where, question: Callable[[Control], Awaitable[T]]) -> T:
    """The active control process's answer to `question`, from code that is not a coroutine.

    Asks again, from the start, when the process loses its lease between two calls of a question.
    """

    async def once() -> T:
        async with connect(where) as control:
            return await question(control)

    for _ in range(2):
        try:
            return asyncio.run(once())
        except NotActive:
            continue
    return asyncio.run(once())


async def switchover(where: Where, standby: str, *, dry_run: bool) -> outcomes.Switched:
    """Has the active process yield, and waits until another leads; does nothing where `standby` leads already. Raises
    `Lost` when nobody does in time."""
    clock = asyncio.get_running_loop()
    began = clock.time()
    while True:
        try:
            async with connect(where) as control:
                if standby and (now := (await control.status(proxies=False)).control).holder == standby:
                    return outcomes.Switched(
                        dry_run=dry_run,
                        before=now.epoch,
                        epoch=now.epoch,
                        holder=standby,
                        address=control.address,
                        took_s=0.0,
                    )
                begun = await control.switch(standby, dry_run=dry_run)
            break
        except NotActive:
            if clock.time() - began > CALL_TIMEOUT_S:
                raise
    if dry_run:
        return begun
    everybody = replace(where, addresses=tuple(dict.fromkeys([*where.addresses, begun.address])))
    while clock.time() - began < NEXT_S:
        with suppress(Unreachable):
            async with connect(everybody) as control:
                now = (await control.status(proxies=False)).control
                if now.epoch > begun.before:
                    took_s = clock.time() - began
                    return replace(begun, epoch=now.epoch, holder=now.holder, address=control.address, took_s=took_s)
        await asyncio.sleep(NEXT_LOOK_S)
    raise Lost(f"epoch {begun.before} is over, and nobody leads after {NEXT_S:g} s: see narwhalctl status")


@asynccontextmanager
async def connect(where: Where) -> AsyncIterator[Control]:
    """The active control process among those at `where`, or the one that a standby among them names.

    All are asked at once, so that a dead machine costs nothing while another answers. Raises `Unreachable` or, when
    a process answered that it may not or cannot say, `Refused`; `UsageProblem` for TLS files that cannot be used.
    """
    opened: list[Control] = []
    try:
        yield await _first_active(where, opened)
    finally:
        for control in opened:
            await control.close()


async def _first_active(where: Where, opened: list[Control]) -> Control:
    spoken = secure(where.tls)
    asked: dict[asyncio.Task[model.Status], str] = {}
    controls: dict[str, Control] = {}
    failed: dict[str, Unreachable | Refused] = {}

    def start(address: str) -> None:
        opened.append(Control(address, spoken))
        controls[address] = opened[-1]
        asked[asyncio.create_task(controls[address].status(proxies=False))] = address

    for address in where.addresses:
        start(address)
    try:
        while asked:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                address = asked.pop(task)
                try:
                    task.result()
                except (Unreachable, Refused) as error:
                    failed[address] = await controls[address].at_odds(error)
                    named = error.active if isinstance(error, NotActive) else ""
                    if named and named not in controls:
                        start(named)
                else:
                    return controls[address]
    finally:
        await cancelled(asked)
    for refused in failed.values():
        if isinstance(refused, Refused):
            raise refused
    raise Unreachable("no active control process: " + "; ".join(str(failed[a]) for a in controls))
