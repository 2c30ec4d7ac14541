"""A streamed answer as a script of steps, and the player that performs it.

A script is written beforehand (`openai_stream.py`), bent by faults (`misbehave.py`), and played without a task, with
one timer that waits for the next step. Instants are absolute, so that a late step does not delay those after it.
"""

import asyncio
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

from narwhal.sim.wire import EVENT_STREAM, LAST_CHUNK, HttpConnection, chunk, head

_BURST = 64  # steps without a pause, so that an engine without token times does not hold the loop


class Do(IntEnum):
    """What a step does."""

    EVENT = 0  # send these bytes as one chunk
    RAW = 1  # send these bytes as they are, in a segment of their own
    END = 2  # send the last chunk: the answer is complete
    CLOSE = 3  # close the connection without it
    RESET = 4  # reset the connection
    SILENCE = 5  # send nothing more, ever
    ENDED = 6  # the last chunk was sent already, byte by byte


class Step(NamedTuple):
    """One step, so many seconds after the one before."""

    do: Do
    wait_s: float = 0.0
    data: bytes = b""
    tokens: int = 0


Script = Iterator[Step]
DONE = b"data: [DONE]\n\n"


class Player:
    """Plays one script on one connection. `ended` is called once, with whether the answer was sent whole."""

    def __init__(self, conn: HttpConnection, *, running: Callable[[], bool], ended: Callable[[bool], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._conn = conn
        self._script: Script = iter(())
        self._running = running
        self._ended = ended
        self._timer: asyncio.Handle | None = None
        self._step: Step | None = None
        self._due = 0.0
        self._over = False
        self.tokens = 0
        """Output tokens sent so far."""

    def headers(self) -> None:
        """Send the head: 200, before anything is known about the answer."""
        self._conn.on_writable = self.resume
        self._conn.write(head(200, EVENT_STREAM, None))

    def start(self, script: Script) -> None:
        """Begin with the first step of a script."""
        self._script = script
        self._due = self._loop.time()
        if self._advance():
            self._run()

    def resume(self) -> None:
        """The engine runs again or the peer reads again: go on where the script stands."""
        if self._timer is None and self._step is not None and not self._over:
            self._due = max(self._due, self._loop.time())
            self._run()

    def finish_with_error(self, event: bytes) -> None:
        """The engine ends: an error event and, as the engine does it, the marker."""
        if not self._over:
            self.abandon(event)
            self._end(True)

    def abandon(self, event: bytes) -> None:
        """Write that end; the caller sees to the rest."""
        self._conn.write(chunk(event) + chunk(DONE) + LAST_CHUNK)

    def cancel(self) -> None:
        """Play no further; nothing is sent."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _advance(self) -> bool:
        """Take the next step; True when it is due now."""
        self._step = next(self._script, None)
        if self._step is None:
            return False
        wait_s = self._step.wait_s
        if wait_s > 0:
            self._due += wait_s
            if self._due > self._loop.time():
                self._timer = self._loop.call_at(self._due, self._run)
                return False
        if self._timer is None and self._step.do is Do.RAW:
            self._timer = self._loop.call_soon(self._run)
            return False
        return True

    def _run(self) -> None:
        self._timer = None
        for _ in range(_BURST):
            step = self._step
            if self._over or step is None:
                return
            if not self._running() or not self._conn.writable:
                return  # resume() goes on
            if not self._perform(step) or not self._advance():
                return
        self._timer = self._loop.call_soon(self._run)

    def _perform(self, step: Step) -> bool:
        """Do one step; False when nothing follows."""
        do = step.do
        if do is Do.EVENT:
            self._conn.write(chunk(step.data))
            self.tokens += step.tokens
            return True
        if do is Do.RAW:
            self._conn.write(step.data)
            self.tokens += step.tokens
            return True
        if do is Do.END:
            self._conn.write(LAST_CHUNK)
            self._end(True)
        elif do is Do.ENDED:
            self._end(True)
        elif do is Do.CLOSE:
            self._end(False)
            self._conn.close()
        elif do is Do.RESET:
            self._end(False)
            self._conn.reset()
        return False

    def _end(self, whole: bool) -> None:
        self.cancel()
        self._ended(whole)
