"""Replacing a file as a whole: process-unique temporary file, complete and synced, renamed over the destination.

Whoever reads the destination sees one complete document, whichever writer's. A temporary file is locked by its writer
for as long as it lives, so that leftovers of killed writers can be told from the files of living ones, on whichever
side of a container border they run. All calls block.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path

_PREFIX = ".tmp-"


def replace_file(path: Path, data: bytes) -> None:
    """Writes `data` to `path`. After a return it survives a crash of the machine.

    Raises OSError. The temporary file is gone then, and the destination holds the old document, or the new one when
    only the last step, syncing the directory, failed.
    """
    temporary, descriptor = _create(path)
    try:
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
            os.rename(temporary, path)
        except BaseException:
            # Removed while still locked: a sweeper that gets the lock afterwards finds nothing under the name.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes renames and new names in `directory` survive a crash of the machine. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(directory: Path) -> list[str]:
    """Removes the temporary files of writers that are dead. Returns their names. Raises OSError."""
    removed = []
    for entry in sorted(os.listdir(directory)):
        if entry.startswith(_PREFIX) and _abandoned(directory / entry):
            removed.append(entry)
    return removed


def _create(path: Path) -> tuple[Path, int]:
    """A new temporary file beside `path`, locked."""
    while True:
        temporary = path.with_name(f"{_PREFIX}{path.name}-{os.getpid()}-{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # A sweeper may come between creating and locking. It removes the file then, and this one starts again.
            if _locked(descriptor) and os.fstat(descriptor).st_nlink:
                return temporary, descriptor
        except BaseException:
            _discard(temporary, descriptor)
            raise
        _discard(temporary, descriptor)


def _discard(temporary: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)
    os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    write: Callable[[int, memoryview], int] = os.write
    while view:
        view = view[write(descriptor, view) :]


def _abandoned(path: Path) -> bool:
    """Removes the file at `path` unless its writer lives."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not _locked(descriptor):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return False
    finally:
        os.close(descriptor)
    return True
