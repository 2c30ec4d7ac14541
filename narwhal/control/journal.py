"""Writes the event journal (`core/journal.py` says what it holds): JSON lines, rotated, bounded in size.

The loop only hands over what happened; a thread of its own makes text of it and writes. A disk that is full or slow
costs entries, which are counted and told, and never a decision: what follows a gap begins with a snapshot, so that it
replays. What was handed over to the kernel outlives `kill -9`, not the machine. Nothing here decides anything.
"""

import asyncio
import contextlib
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import orjson

from narwhal.clock import Clock
from narwhal.control.core.effects import Effect
from narwhal.control.core.events import Input, Reloaded
from narwhal.control.core.handoff import SavedFleet
from narwhal.control.core.journal import Head, head_line, step_line
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.settings import CoreSettings
from narwhal.control.snapshot import text
from narwhal.vocabulary import Stage

FILES = 8  # that the bound on all files is for, the one being written included
WAITING = 10_000  # steps handed over and not yet written, beyond which further ones are lost
RETRY_S = 10.0  # after a disk failed
CLOSE_S = 2.0

# A step with its arguments, or a first line with the core that belongs to it; None ends the thread.
_Step = tuple[int, Input | Stage, tuple[Effect, ...], str, float]
_First = tuple[Head, bytes]


class Journal:
    """The journal of one control process. All methods run on the event loop and return at once, but `close`."""

    def __init__(
        self, directory: Path, *, max_bytes: int, clock: Clock, holder: str, tell: Callable[[Record], None]
    ) -> None:
        """`max_bytes`: of all files in `directory`, those of earlier terms included. `tell` hears, on the event loop,
        when writing fails and when it works again."""
        self.lost: Counter[str] = Counter()  # steps that were not written: by cause, `disk` or `queue`
        self.written = 0  # bytes
        self._directory = directory
        self._max_bytes = max_bytes
        self._clock = clock
        self._holder = holder
        self._release = version("narwhal")
        self._tell = tell
        self._queue: queue.SimpleQueue[_Step | _First | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pack: Callable[[], bytes] | None = None
        self._head: Head | None = None  # of the term
        self._steps = 0  # of the term
        self._gap = False
        self._wanted_at: float | None = None  # when a file that begins with a snapshot is wanted; written by the thread
        # What follows belongs to the thread.
        self._file: BinaryIO | None = None
        self._bytes = 0  # in that file
        self._full = False  # it is, and another was asked for
        self._trouble = ""

    # --- on the event loop ------------------------------------------------------------------------------------------

    def begin(
        self,
        settings: CoreSettings,
        *,
        saved: SavedFleet | None,
        epoch: int,
        now: float,
        pack: Callable[[], bytes],
    ) -> None:
        """A term of leadership begins, with a core made at `now` of `settings` and `saved`. `pack`: the whole of that
        core, as it is when called (`snapshot.pack`)."""
        self._pack, self._steps, self._gap, self._wanted_at = pack, 0, False, None
        self._head = Head(
            kind="start",
            release=self._release,
            fleet=settings.name,
            holder=self._holder,
            epoch=epoch,
            step=0,
            wall=self._clock.wall(),
            now=now,
            settings=settings,
            saved=saved,
            core="",
        )
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        self._queue.put((self._head, b""))

    def note(self, what: Input | Stage, effects: tuple[Effect, ...], *, now: float, raised: str = "") -> None:
        """The core was given `what` at `now`, and has done what it did."""
        if self._head is None:
            return
        self._steps += 1
        if isinstance(what, Reloaded):
            self._head = replace(self._head, settings=what.settings)
        if self._queue.qsize() >= WAITING:
            self.lost["queue"] += 1
            self._gap = True
            return
        if self._gap:
            # What was lost is in this snapshot, and so is this step.
            self._gap = False
            self.lost["queue"] += 1
            self._snapshot(now)
            return
        self._queue.put((self._steps, what, effects, raised, now))
        if self._wanted_at is not None and now >= self._wanted_at:
            self._snapshot(now)

    def _snapshot(self, now: float) -> None:
        head, pack = self._head, self._pack
        assert head is not None
        assert pack is not None
        self._wanted_at = None
        first = replace(head, kind="snapshot", step=self._steps, wall=self._clock.wall(), now=now, saved=None)
        self._queue.put((first, pack()))

    def idle(self) -> bool:
        """Whether the thread has taken all that was handed over, and is at most at its last piece."""
        return self._queue.empty()

    async def close(self) -> None:
        """Writes what was handed over, for a bounded time, and ends."""
        self._head = None
        if self._thread is not None:
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_S)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write(item)
            except Exception as error:  # whatever it is, no decision waits for it
                self._failed(error)
        self._shut()

    def _write(self, item: _Step | _First) -> None:
        if len(item) == 2:
            self._open(*item)
        elif self._file is None:
            self.lost["disk"] += 1
        else:
            number, what, effects, raised, now = item
            self._put(encoded(step_line(number, what, effects, raised, now=now)))
            if self._bytes >= self._max_bytes // FILES and not self._full:
                self._full, self._wanted_at = True, now
        if self._file is not None and self._queue.empty():
            self._file.flush()

    def _put(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(line + b"\n")
        self._bytes += len(line) + 1
        self.written += len(line) + 1

    def _open(self, head: Head, packed: bytes) -> None:
        """Goes on in a new file that begins with this line."""
        self._shut()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._make_room()
        self._file = _new_file(self._directory, head.epoch)
        self._bytes, self._full = 0, False
        self._put(encoded(head_line(replace(head, core=text(packed) if packed else ""))))
        self._file.flush()
        if self._trouble:
            over, self._trouble = self._trouble, ""
            self._say(EventKind.JOURNAL_RECOVERED, f"the event journal is written again; over: {over}")

    def _make_room(self) -> None:
        """The oldest files go, so that all with the next one stay within the bound."""
        files = journal_files(self._directory)
        sizes = {file: file.stat().st_size for file in files}
        for file in files:
            if sum(sizes.values()) <= self._max_bytes - self._max_bytes // FILES:
                return
            file.unlink(missing_ok=True)
            del sizes[file]

    def _failed(self, error: Exception) -> None:
        """What is handed over is lost until a file that begins with a snapshot can be made."""
        with contextlib.suppress(OSError):
            self._shut()
        self._file = None
        self.lost["disk"] += 1
        self._wanted_at = self._clock.monotonic() + RETRY_S
        words = f"the event journal cannot be written: {error}"
        if words != self._trouble:
            self._trouble = words
            self._say(EventKind.JOURNAL_FAILED, f"{words}; decisions go on without it")

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _say(self, kind: EventKind, words: str) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the process ends
            self._loop.call_soon_threadsafe(self._tell, Record(kind=kind, message=words))


def encoded(value: object) -> bytes:
    """One line of a journal, without its end."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)  # keys may be enumerations


def _plain(value: object) -> object:
    """What the encoder does not know."""
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} in the journal")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _new_file(directory: Path, epoch: int) -> BinaryIO:
    for number in _numbers(directory, epoch):
        with contextlib.suppress(FileExistsError):
            return open(directory / f"journal-{epoch:010}-{number:06}.jsonl", "xb", opener=_private)
    raise AssertionError("numbers do not end")


def _numbers(directory: Path, epoch: int) -> Iterator[int]:
    """Numbers for the next file of an epoch, above those that are taken."""
    taken = [int(file.stem.rpartition("-")[2]) for file in directory.glob(f"journal-{epoch:010}-*.jsonl")]
    number = max(taken, default=0)
    while True:
        number += 1
        yield number


def journal_files(directory: Path) -> list[Path]:
    """The journal's files in a directory, oldest first."""
    return sorted(directory.glob("journal-" + "[0-9]" * 10 + "-" + "[0-9]" * 6 + ".jsonl"))
