"""Streams that outlive their connection: what `-f` prints goes on over a restart or a takeover of the control service.

Decides when a connection is given up and when the next is tried. It cannot see what the stream carries: a command whose
stream starts anew after a reconnect has to know itself what it has shown already.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from narwhal.cli import model
from narwhal.cli.client import Control, cancelled
from narwhal.cli.failures import Lost, Refused, Unreachable
from narwhal.cli.options import Where
from narwhal.cli.reach import connect

T = TypeVar("T")

GUARD_INTERVAL_S = 2.0  # how often it asks whether the process behind the stream still leads
RETRY_S = (0.2, 2.0)  # first and longest pause between two searches for the active process


async def follow(
    where: Where,
    stream: Callable[[Control, model.Status], AsyncGenerator[T]],
    *,
    notice: Callable[[str], None],
) -> AsyncGenerator[T]:
    """What `stream` yields from the active process, over reconnects and takeovers, for ever.

    `stream` is called anew for each connection, with the status found there. `notice` is told in one line when the
    connection is lost and found. Raises `Unreachable` or `Refused` only when there never was one.
    """
    pause_s = RETRY_S[0]
    said: str | None = None  # None until connected for the first time
    while True:
        try:
            async with connect(where) as control:
                status = await control.status(proxies=False)
                if said:
                    notice(f"following {control.address}, epoch {status.control.epoch}")
                said, pause_s = "", RETRY_S[0]
                async with aclosing(_while_it_leads(control, stream(control, status))) as items:
                    async for item in items:
                        yield item
        except (Unreachable, Refused) as error:
            if said is None:
                raise
            if str(error) != said:
                notice(str(error))
            said = str(error)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, RETRY_S[1])


async def _while_it_leads(control: Control, stream: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """The stream, until it ends or its process stops answering or leading: a stopped process keeps its streams open."""
    guard = asyncio.create_task(_leads_no_more(control))
    read: asyncio.Task[T] | None = None
    try:
        while True:
            read = asyncio.create_task(_next(control, stream))
            await asyncio.wait({read, guard}, return_when=asyncio.FIRST_COMPLETED)
            if read.done():
                yield read.result()
            if guard.done():
                raise guard.result()
    finally:
        await cancelled(task for task in (guard, read) if task is not None)
        await stream.aclose()


async def _next(control: Control, stream: AsyncGenerator[T]) -> T:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise Lost(f"{control.address}: ended the stream") from None


async def _leads_no_more(control: Control) -> Unreachable | Refused:
    while True:
        await asyncio.sleep(GUARD_INTERVAL_S)
        try:
            await control.status(proxies=False)
        except (Unreachable, Refused) as error:
            return error
