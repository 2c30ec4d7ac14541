"""The file store: a directory on one machine. The lease is a lock that the kernel frees with its process.

`lease.lock` is locked by the holder; `lease.json` beside it says who took the lease last and under which epoch;
`handoff.json` is the document, `history.json` tells of the epochs before. The directory must be on a local file system:
the lock is what keeps two control processes apart.
"""

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from narwhal.control.store.atomic import replace_file, sweep, sync_directory
from narwhal.control.store.base import Lease, LeaseLost, Owner, StoreError, read_owner
from narwhal.control.store.thread import BlockingThread

T = TypeVar("T")

_KEPT_ASIDE = 5
_LONGEST_CLOSE_S = 0.5


class FileStore:
    """A `Store` in a directory. Use `open`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._handoff = directory / "handoff.json"
        self._owner = directory / "lease.json"
        self._lock = directory / "lease.lock"
        self._history = directory / "history.json"
        self._proof = directory / "proof"
        self._descriptor: int | None = None  # of the lock file, while the lock is ours
        self._lease: Lease | None = None
        self._thread = BlockingThread("narwhal-file-store")
        self._closed = False

    @classmethod
    async def open(cls, directory: Path) -> "FileStore":
        """The store in `directory`, made when missing. Sweeps what killed writers left. Raises StoreError."""
        store = cls(directory)
        try:
            await store._run("open", store._prepare)
        except StoreError:
            await store.close()
            raise
        return store

    async def load(self) -> bytes | None:
        return await self._run("read", lambda: _read(self._handoff))

    async def save(self, lease: Lease, document: bytes) -> None:
        await self._run("write", lambda: self._replace(self._handoff, lease, document))

    async def set_aside(self, lease: Lease, document: bytes) -> str:
        path = self._directory / f"handoff.{lease.epoch:08}.aside.json"

        def keep() -> None:
            self._check(lease)
            replace_file(path, document)
            for old in sorted(self._directory.glob("handoff.*.aside.json"))[:-_KEPT_ASIDE]:
                old.unlink()

        await self._run("keep a handoff aside in", keep)
        return str(path)

    async def history(self) -> bytes | None:
        return await self._run("read", lambda: _read(self._history))

    async def keep_history(self, lease: Lease, document: bytes) -> None:
        await self._run("write", lambda: self._replace(self._history, lease, document))

    async def prove(self, proof: str) -> None:
        await self._run("write", lambda: replace_file(self._proof, proof.encode()))

    async def proof(self) -> str:
        return (await self._run("read", lambda: _read(self._proof)) or b"").decode(errors="replace")

    async def acquire(self, holder: str, address: str, *, above: int = 0) -> Lease | None:
        return await self._run("take the lease in", lambda: self._acquire(holder, address, above))

    async def release(self, lease: Lease) -> None:
        await self._run("release the lease in", lambda: self._release(lease))

    async def owner(self) -> Owner | None:
        return await self._run("read", self._read_owner)

    async def changed(self, timeout_s: float) -> None:
        # A lock that becomes free tells nobody.
        await asyncio.sleep(timeout_s)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # In the thread, after whatever it is at: a lock that is freed in the middle of a write would let another
        # process lead before that write is over. When the medium hangs, the end of the process frees it.
        with contextlib.suppress(TimeoutError, StoreError):
            await asyncio.wait_for(self._thread.run(lambda: self._free("the store is closed")), _LONGEST_CLOSE_S)
        self._thread.close()

    async def _run(self, what: str, call: Callable[[], T]) -> T:
        try:
            return await self._thread.run(call)
        except OSError as error:
            raise StoreError(f"cannot {what} {self._directory}: {error.strerror or error}") from error

    def _prepare(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        sweep(self._directory)

    def _replace(self, path: Path, lease: Lease, document: bytes) -> None:
        self._check(lease)
        replace_file(path, document)

    def _acquire(self, holder: str, address: str, above: int) -> Lease | None:
        self._directory.mkdir(parents=True, exist_ok=True)  # again, when somebody wiped it
        if self._descriptor is not None and not self._intact(self._descriptor):
            self._free("the lock file was replaced")
        fresh = self._descriptor is None
        if fresh:
            self._descriptor = self._take_lock()
        if self._descriptor is None:
            return None
        try:
            last = self._read_owner()
            owner = Owner(holder=holder, address=address, epoch=max(last.epoch if last else 0, above) + 1)
            document = {"epoch": owner.epoch, "holder": owner.holder, "address": owner.address}
            replace_file(self._owner, json.dumps(document).encode())
        except BaseException:
            # A lease that was held goes on; one that was not is not left half taken.
            if fresh:
                self._free("not taken")
            raise
        self._lease = Lease(owner=owner)
        return self._lease

    def _take_lock(self) -> int | None:
        """A descriptor of the lock file, locked; None while another process has it."""
        while True:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._intact(descriptor):
                    sync_directory(self._directory)
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the file was replaced meanwhile: lock the new one

    def _intact(self, descriptor: int) -> bool:
        """Whether the file that is locked is still the one that others would lock."""
        try:
            named, held = os.stat(self._lock), os.fstat(descriptor)
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def _check(self, lease: Lease) -> None:
        """Raises LeaseLost unless `lease` is the one that this store holds."""
        if lease is self._lease and not lease.lost and self._descriptor is not None:
            if self._intact(self._descriptor):
                return
            self._free("the lock file was removed or replaced")
        raise LeaseLost(f"epoch {lease.epoch} holds the lease no more: {lease.lost or 'released'}")

    def _release(self, lease: Lease) -> None:
        if lease is self._lease:
            self._free("released")
        lease.lost = lease.lost or "released"

    def _free(self, why: str) -> None:
        descriptor, self._descriptor = self._descriptor, None
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.lost = lease.lost or why
        if descriptor is not None:
            os.close(descriptor)

    def _read_owner(self) -> Owner | None:
        text = _read(self._owner)
        if text is None:
            return None
        try:
            return read_owner(text)[0]
        except ValueError:
            # Without the last epoch a new one could go back: better nobody leads until a person has looked.
            raise StoreError(
                f"{self._owner} is not readable as a lease; restore it, or remove it to start from epoch 1"
            ) from None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
