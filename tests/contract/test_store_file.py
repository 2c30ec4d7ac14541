"""The file store against what files, disks and killed processes do."""

import asyncio
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narwhal.control.store import atomic
from narwhal.control.store.atomic import replace_file, sweep
from narwhal.control.store.base import LeaseLost, StoreError
from narwhal.control.store.file import FileStore
from narwhal.control.store.thread import BlockingThread
from tests.contract.damaged import NO_LEASES

SYSTEM: Any = atomic  # whose system calls are made to fail
OLD = b'{"old": true}'
NEW = b'{"new": "' + b"x" * 200_000 + b'"}'


def files(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()}


# --- the atomic write -------------------------------------------------------------------------------------------------

STEPS = ["open", "flock", "fstat", "write", "fsync", "rename"]


@pytest.mark.rule("S3")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_write_that_fails_leaves_the_old_document_and_no_temporary_file(
    step: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "handoff.json"
    replace_file(target, OLD)
    module: Any = SYSTEM.fcntl if step == "flock" else SYSTEM.os

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, step, fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        replace_file(target, NEW)
    monkeypatch.undo()
    assert target.read_bytes() == OLD
    assert files(tmp_path) == {"handoff.json"}


@pytest.mark.rule("S3")
def test_a_disk_that_fills_up_in_the_middle_leaves_the_old_document(tmp_path: Path) -> None:
    target = tmp_path / "handoff.json"
    replace_file(target, OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(NEW) // 2, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_file(target, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert target.read_bytes() == OLD
    assert files(tmp_path) == {"handoff.json"}


@pytest.mark.rule("S3")
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(SYSTEM.os, "write", lambda fd, data: real(fd, bytes(data[:1000])))
    replace_file(tmp_path / "handoff.json", NEW)
    assert (tmp_path / "handoff.json").read_bytes() == NEW


@pytest.mark.rule("S3")
def test_the_file_is_synced_before_it_is_renamed_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name[:5]}")
        fsync(descriptor)

    def noted_rename(source: Path, target: Path) -> None:
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(SYSTEM.os, "fsync", noted_fsync)
    monkeypatch.setattr(SYSTEM.os, "rename", noted_rename)
    replace_file(tmp_path / "handoff.json", NEW)
    assert calls == ["fsync .tmp-", "rename", f"fsync {tmp_path.name[:5]}"]


KILLED_WRITER = """
import fcntl, os, signal, sys
from pathlib import Path
from narwhal.control.store import atomic

after, target = int(sys.argv[1]), Path(sys.argv[2])
calls = 0

def killing(real):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == after:
            os.kill(os.getpid(), signal.SIGKILL)
        if real is os_write:
            args = (args[0], bytes(args[1][:70_000]))  # several writes, so that some are in the middle
        return real(*args, **kwargs)
    return call

os_write = os.write
for module, names in ((atomic.os, ["open", "fstat", "write", "fsync", "rename", "close"]), (atomic.fcntl, ["flock"])):
    for name in names:
        setattr(module, name, killing(getattr(module, name)))
atomic.replace_file(target, b'{"new": "' + b"x" * 200_000 + b'"}')
print(calls)
"""


@pytest.mark.rule("S3")
def test_a_writer_killed_at_any_system_call_leaves_a_whole_document_and_its_leftover_is_swept(tmp_path: Path) -> None:
    target = tmp_path / "handoff.json"

    def run(after: int) -> "subprocess.CompletedProcess[str]":
        replace_file(target, OLD)
        command = [sys.executable, "-c", KILLED_WRITER, str(after), str(target)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    calls = int(run(0).stdout)
    assert calls >= 11
    seen = set()
    for after in range(1, calls + 1):
        assert run(after).returncode == -signal.SIGKILL
        seen.add(target.read_bytes())
        assert target.read_bytes() in (OLD, NEW)
        sweep(tmp_path)
        assert files(tmp_path) == {"handoff.json"}
    assert seen == {OLD, NEW}


CONCURRENT_WRITER = """
import sys
from pathlib import Path
from narwhal.control.store.atomic import replace_file, sweep

letter, target = sys.argv[1], Path(sys.argv[2])
for _ in range(60):
    replace_file(target, letter.encode() * 100_000)
    sweep(target.parent)
"""


@pytest.mark.rule("S3")
def test_concurrent_writers_leave_one_complete_document_and_sweep_nobody_elses_file(tmp_path: Path) -> None:
    target = tmp_path / "handoff.json"
    replace_file(target, b"z" * 100_000)
    writers = [
        subprocess.Popen([sys.executable, "-c", CONCURRENT_WRITER, letter, str(target)], stderr=subprocess.PIPE)
        for letter in "abc"
    ]
    reads = 0
    while any(w.poll() is None for w in writers):
        document = target.read_bytes()
        reads += 1
        assert len(document) == 100_000
        assert len(set(document)) == 1
    for writer in writers:
        _, errors = writer.communicate(timeout=30)
        assert writer.returncode == 0, errors.decode()
    assert reads > 20
    assert files(tmp_path) == {"handoff.json"}


@pytest.mark.rule("S3")
def test_a_sweeper_between_creating_and_locking_costs_the_writer_one_more_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = atomic._locked
    sweeps: list[list[str]] = []

    def swept_first(descriptor: int) -> bool:
        if not sweeps:
            monkeypatch.setattr(atomic, "_locked", real)
            sweeps.append(sweep(tmp_path))
            return real(descriptor)
        raise AssertionError("unreachable")

    monkeypatch.setattr(atomic, "_locked", swept_first)
    replace_file(tmp_path / "handoff.json", NEW)
    assert [len(s) for s in sweeps] == [1]
    assert (tmp_path / "handoff.json").read_bytes() == NEW
    assert files(tmp_path) == {"handoff.json"}


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.mark.rule("S3")
async def test_leftovers_of_killed_writers_are_swept_at_start(tmp_path: Path) -> None:
    (tmp_path / ".tmp-handoff.json-1-00").write_bytes(b"{")
    (tmp_path / "notes.txt").write_bytes(b"of an operator")
    store = await FileStore.open(tmp_path)
    await store.close()
    assert files(tmp_path) == {"notes.txt"}


async def failure(store: FileStore, call: Callable[[], Any]) -> str:
    with pytest.raises(StoreError) as caught:
        await call()
    assert not isinstance(caught.value, LeaseLost)
    return str(caught.value)


@pytest.mark.rule("S3")
async def test_a_full_disk_is_said_and_the_next_write_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await FileStore.open(tmp_path)
    lease = await store.acquire("a", "h:1")
    assert lease is not None
    await store.save(lease, OLD)

    def full(_descriptor: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(SYSTEM.os, "write", full)
        words = await failure(store, lambda: store.save(lease, NEW))
    assert words == f"cannot write {tmp_path}: No space left on device"
    assert await store.load() == OLD
    await store.save(lease, NEW)
    assert await store.load() == NEW
    await store.close()


@pytest.mark.rule("S3")
async def test_a_read_only_directory_is_said(tmp_path: Path) -> None:
    # Permission bits do not stop a superuser, so the directory is one in which nobody can create a file.
    store = await FileStore.open(tmp_path)
    await store.close()
    with pytest.raises(StoreError, match="cannot open /proc/self/fdinfo/run"):
        await FileStore.open(Path("/proc/self/fdinfo/run"))


async def test_the_lease_is_lost_with_its_lock_file(tmp_path: Path) -> None:
    mine, other = await FileStore.open(tmp_path), await FileStore.open(tmp_path)
    lease = await mine.acquire("a", "h:1")
    assert lease is not None
    await mine.save(lease, OLD)
    (tmp_path / "lease.lock").unlink()
    taken = await other.acquire("b", "h:2")
    assert taken is not None
    with pytest.raises(LeaseLost, match="lock file was removed or replaced"):
        await mine.save(lease, NEW)
    assert not lease.may_act(0.0)
    assert await mine.load() == OLD
    await other.save(taken, NEW)
    await mine.close()
    await other.close()


@pytest.mark.rule("S5")
async def test_the_kernel_frees_the_lease_of_a_killed_process(tmp_path: Path) -> None:
    holder = subprocess.Popen(  # noqa: ASYNC220 - starting it does not block
        [
            sys.executable,
            "-c",
            "import asyncio, sys\nfrom pathlib import Path\nfrom narwhal.control.store.file import FileStore\n"
            "async def main():\n"
            "    store = await FileStore.open(Path(sys.argv[1]))\n"
            "    lease = await store.acquire('victim', 'h:1')\n"
            "    print(lease.epoch, flush=True)\n"
            "    await asyncio.sleep(60)\n"
            "asyncio.run(main())",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"1\n"
    store = await FileStore.open(tmp_path)
    assert await store.acquire("b", "h:2") is None
    holder.kill()
    holder.wait(timeout=10)
    holder.stdout.close()
    lease = await store.acquire("b", "h:2")
    assert lease is not None
    assert lease.epoch == 2
    await store.close()


@pytest.mark.parametrize("text", NO_LEASES, ids=range(len(NO_LEASES)))
async def test_a_lease_file_that_cannot_be_read_lets_nobody_lead(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_bytes(text)
    store = await FileStore.open(tmp_path)
    assert "not readable as a lease" in await failure(store, lambda: store.acquire("a", "h:1"))
    (tmp_path / "lease.json").write_text(json.dumps({"epoch": 7, "holder": "x", "address": "h:1"}))
    lease = await store.acquire("a", "h:1")  # and the failed try left no lock behind
    assert lease is not None
    assert lease.epoch == 8
    await store.close()


async def test_a_failed_move_to_a_higher_epoch_keeps_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await FileStore.open(tmp_path)
    lease = await store.acquire("a", "h:1")
    assert lease is not None

    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(SYSTEM.os, "fsync", fail)
        await failure(store, lambda: store.acquire("a", "h:1", above=5))
    assert lease.may_act(0.0)
    await store.save(lease, OLD)
    await store.close()


@pytest.mark.rule("S2")
async def test_the_newest_documents_that_were_set_aside_are_kept(tmp_path: Path) -> None:
    store = await FileStore.open(tmp_path)
    kept = []
    for number in range(7):
        lease = await store.acquire("a", "h:1")
        assert lease is not None
        kept.append(await store.set_aside(lease, f"document {number}".encode()))
    await store.close()
    assert sorted(str(tmp_path / name) for name in files(tmp_path) if ".aside." in name) == kept[-5:]
    assert (tmp_path / kept[-1]).read_bytes() == b"document 6"


async def test_a_wiped_directory_is_made_again(tmp_path: Path) -> None:
    store = await FileStore.open(tmp_path / "run")
    lease = await store.acquire("a", "h:1")
    assert lease is not None
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(LeaseLost):
        await store.save(lease, OLD)
    again = await store.acquire("a", "h:1", above=lease.epoch)
    assert again is not None
    assert again.epoch == 2
    await store.save(again, NEW)
    assert await store.load() == NEW
    await store.close()


# --- a medium that hangs ----------------------------------------------------------------------------------------------


async def test_a_hung_call_blocks_neither_the_loop_nor_the_end_and_collects_no_backlog() -> None:
    thread = BlockingThread("test")
    free = threading.Event()
    order: list[str] = []

    def hang() -> None:
        free.wait(30)
        order.append("hung")

    first = asyncio.create_task(thread.run(hang))
    second = asyncio.create_task(thread.run(lambda: order.append("given up")))
    await asyncio.sleep(0)
    for task in (first, second):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.02)
    third = asyncio.create_task(thread.run(lambda: order.append("newest")))
    free.set()
    await asyncio.wait_for(third, 10)
    assert order == ["hung", "newest"]
    thread.close()


async def test_what_a_blocking_call_raises_belongs_to_its_caller() -> None:
    thread = BlockingThread("test")

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await thread.run(fail)
    assert await thread.run(lambda: 5) == 5
    thread.close()


async def test_calls_after_the_end_fail_and_do_not_wait_for_ever(tmp_path: Path) -> None:
    free = threading.Event()
    thread = BlockingThread("test")
    hung = asyncio.create_task(thread.run(lambda: free.wait(30)))
    waiting = asyncio.create_task(thread.run(lambda: None))
    await asyncio.sleep(0)
    thread.close()
    free.set()
    await asyncio.wait_for(hung, 10)
    with pytest.raises(StoreError, match="closed"):
        await asyncio.wait_for(waiting, 10)
    store = await FileStore.open(tmp_path)
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.load()
