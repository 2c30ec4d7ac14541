"""The event journal's writer: files that rotate within their bound, a disk that fails, what a reader accepts."""

import asyncio
import json
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from click.testing import CliRunner

from narwhal.cli.main import cli
from narwhal.clock import RealClock
from narwhal.control import journal as writing
from narwhal.control.core.events import EjectCommand, Input, ProbeCommand, ProxyConnected, Reloaded, Reported
from narwhal.control.core.journal import Head
from narwhal.control.core.records import EventKind, Record
from narwhal.control.journal import Journal, journal_files
from narwhal.control.replay import AsItWas, Reading, ReplayError, files_of, lines_of
from narwhal.control.snapshot import SnapshotError, pack, text, unpack
from narwhal.reports import Batch
from narwhal.vocabulary import Outcome, Stage
from tests.contract.control_kit import until
from tests.core.rig import EDGE, Rig, decode, prefill

SMALL = 64 * 1024


@dataclass(kw_only=True)
class Driven:
    """A core and its journal, driven as the loop drives them."""

    rig: Rig
    journal: Journal
    told: list[Record] = field(default_factory=list)
    reports: int = 0

    def give(self, what: Input | Stage) -> None:
        """One step."""
        rig = self.rig
        try:
            effects = rig.tick(what) if isinstance(what, Stage) else rig.send(what)
        except Exception as error:
            self.journal.note(what, (), now=rig.now, raised=f"{type(error).__name__}: {error}")
        else:
            self.journal.note(what, effects, now=rig.now)

    def passes(self, count: int) -> None:
        """Monitor passes, with a report between them."""
        for _ in range(count):
            self.rig.now += 1.0
            self.reports += 1
            run = self.rig.run("d", Outcome.STREAM_COMPLETE)
            self.give(Reported(batch=Batch(proxy=EDGE, sequence=self.reports, runs=(run,))))
            for stage in Stage:
                self.give(stage)


@asynccontextmanager
async def driven(directory: Path, *, max_bytes: int = SMALL) -> AsyncIterator[Driven]:
    """Begun, and closed at the end."""
    told: list[Record] = []
    journal = Journal(directory, max_bytes=max_bytes, clock=RealClock(), holder="a", tell=told.append)
    rig = Rig(prefill("p"), decode("d"), joined=False)
    journal.begin(rig.settings, saved=None, epoch=1, now=rig.now, pack=partial(pack, rig.fleet))
    try:
        yield Driven(rig=rig, journal=journal, told=told)
    finally:
        await journal.close()


def replayed(*files: Path) -> tuple[AsItWas, Reading]:
    """These files again."""
    reading = Reading()
    lines = lines_of(files, reading)
    head = next(lines)
    assert isinstance(head, Head)
    was = AsItWas(head)
    for line in lines:
        if isinstance(line, Head):
            was.begin_anew(line)
        else:
            was.take(line)
    return was, reading


async def test_files_rotate_within_the_bound_and_each_replays_alone(tmp_path: Path) -> None:
    async with driven(tmp_path) as core:
        for _ in range(60):
            core.passes(10)
            # As in a process, where steps come more slowly than they are written: files are asked for by the writer.
            await until(core.journal.idle, what="what was handed over is written")
        core.give(ProxyConnected(proxy=EDGE, address="10.0.0.1:1", pid=1, highest_epoch=1))
    files = journal_files(tmp_path)
    assert len(files) > 3
    assert sum(file.stat().st_size for file in files) <= SMALL * 9 / 8
    assert not (tmp_path / f"journal-{1:010}-000001.jsonl").exists(), "the oldest went first"
    was, reading = replayed(*files)
    assert (was.first, reading.missing, reading.cut) == (None, 0, 0)
    assert was.course.told[-1].record.kind is EventKind.PROXY_CONNECTED
    assert sum(replayed(file)[0].steps for file in files) == was.steps


async def test_refused_commands_and_reloads_replay_too(tmp_path: Path) -> None:
    async with driven(tmp_path) as core:
        core.give(EjectCommand(engine="nobody", reason="x"))
        core.give(Reloaded(settings=Rig(prefill("p"), decode("d"), decode("e"), joined=False).settings))
        core.give(ProbeCommand(engine="e"))
        core.passes(3)
    was, _ = replayed(*journal_files(tmp_path))
    assert was.first is None
    assert set(was.course.engines) == {"p", "d", "e"}


async def test_a_full_disk_costs_entries_and_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = writing._new_file, True

    def new_file(directory: Path, epoch: int) -> BinaryIO:
        return open("/dev/full", "wb") if full else real(directory, epoch)

    monkeypatch.setattr(writing, "_new_file", new_file)
    monkeypatch.setattr(writing, "RETRY_S", 0.0)
    async with driven(tmp_path) as core:
        await until(lambda: core.told, what="the failure is told")
        core.rig.now = RealClock().monotonic() + 1.0
        for _ in range(20):
            core.passes(1)
            await asyncio.sleep(0.01)
        assert core.journal.lost["disk"] > 0
        assert [record.kind for record in core.told] == [EventKind.JOURNAL_FAILED]
        assert "No space left" in core.told[0].message
        full = False

        def again() -> bool:
            core.passes(1)
            return len(core.told) > 1

        await until(again, what="it is written again")
        core.passes(5)
    assert [record.kind for record in core.told][-1] is EventKind.JOURNAL_RECOVERED
    was, _ = replayed(*journal_files(tmp_path))
    assert was.first is None
    assert was.steps >= 5 * len(Stage)


async def test_a_writer_that_is_slow_costs_entries_and_never_a_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gate = writing.encoded, threading.Event()

    def slow(value: object) -> bytes:
        assert gate.wait(60)
        return real(value)

    monkeypatch.setattr(writing, "encoded", slow)
    monkeypatch.setattr(writing, "WAITING", 50)
    async with driven(tmp_path) as core:
        core.passes(20)  # returns though nothing is written
        lost = core.journal.lost["queue"]
        assert lost > 0
        gate.set()
        await until(core.journal._queue.empty, what="the writer has caught up")
        core.passes(2)
    was, reading = replayed(*journal_files(tmp_path))
    assert was.first is None
    assert reading.missing == core.journal.lost["queue"]
    assert was.steps + reading.missing == 22 * (len(Stage) + 1)


# --- what a reader accepts --------------------------------------------------------------------------------------------


async def written(directory: Path) -> Path:
    """One file of a few passes."""
    async with driven(directory) as core:
        core.passes(3)
    (file,) = journal_files(directory)
    return file


async def test_a_last_line_that_was_cut_off_ends_the_file(tmp_path: Path) -> None:
    file = await written(tmp_path)
    whole, _ = replayed(file)
    data = file.read_bytes()
    for length in (1, 20, len(data.splitlines()[-1])):
        file.write_bytes(data[:-length])
        was, reading = replayed(file)
        assert (was.first, was.steps, reading.cut) == (None, whole.steps - (length > 1), int(length > 1))


async def test_a_line_in_the_middle_that_is_damaged_is_refused(tmp_path: Path) -> None:
    file = await written(tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], b'{"n": 3, \n', *lines[4:]]))
    with pytest.raises(ReplayError, match="line 4: not JSON"):
        replayed(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, "unknown schema_version 2, this release reads 1"),
        ({"schema_version": True}, "unknown schema_version True"),
        ({"schema": "narwhal.handoff"}, "is not an event journal"),
        ({"more": 1}, "unknown field more"),
        ({"kind": "middle"}, "unknown kind of first line 'middle'"),
        ({"kind": "snapshot", "core": "AAAA"}, "cannot be taken up: damaged"),
    ],
)
async def test_an_unknown_first_line_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = await written(tmp_path)
    first, *steps = file.read_text().splitlines(keepends=True)
    file.write_text("".join([json.dumps({**json.loads(first), **change}) + "\n", *steps]))
    answer = CliRunner().invoke(cli, ["replay", str(file)])
    assert answer.exit_code == 2
    assert words in answer.output


@pytest.mark.parametrize("output", ["table", "wide", "json", "yaml"])
@pytest.mark.parametrize("more", [[], ["--fleet", "FLEET"]])
async def test_every_output_shows_it(tmp_path: Path, output: str, more: list[str]) -> None:
    file, fleet = await written(tmp_path), tmp_path / "fleet.yaml"
    engines = [
        {"id": name, "url": f"http://{name}", "role": role} for name, role in (("p", "prefill"), ("d", "decode"))
    ]
    fleet.write_text(json.dumps({"name": "fleet", "model": "tiny", "engines": engines, "recovery": {"eject_after": 9}}))
    answer = CliRunner().invoke(
        cli, ["replay", str(file), "-o", output, *(str(fleet) if m == "FLEET" else m for m in more)]
    )
    assert answer.exit_code == 0, answer.output
    assert "eject_after" in answer.output or not more


async def test_beside_other_settings_each_difference_is_named_and_that_reloads_are_left_out(tmp_path: Path) -> None:
    async with driven(tmp_path) as core:
        core.give(Reloaded(settings=replace(core.rig.settings, eject_after=5)))
        core.passes(3)
    fleet = tmp_path / "fleet.yaml"
    engines = [
        {"id": "p", "url": "http://p", "role": "prefill"},
        {"id": "d", "url": "http://d", "role": "decode", "pinned": True},
    ]
    sections = {
        "controller": {"mode": "auto"},
        "recovery": {"ramp_s": 0, "silent_leg_s": 20, "health": {"window_s": 7}},
    }
    fleet.write_text(json.dumps({"name": "fleet", "model": "tiny", "engines": engines, **sections}))
    command = ["replay", *map(str, journal_files(tmp_path)), "--fleet", str(fleet)]
    facts = json.loads(CliRunner().invoke(cli, [*command, "-o", "json"]).output)
    assert facts["changed"] == {
        "d.pinned": ["false", "true"], "mode": ["advisory", "auto"], "window_s": ["30", "7"],
    }  # fmt: skip
    assert facts["reloads"] == 1
    answer = CliRunner().invoke(cli, command)
    assert "d.pinned true instead of false, window_s 7 instead of 30, mode auto instead of advisory" in answer.output
    assert "1 reload of the fleet file is left out beside it" in answer.output
    alone = CliRunner().invoke(cli, ["replay", *map(str, journal_files(tmp_path))])
    assert "left out" not in alone.output


async def test_a_step_that_is_decided_otherwise_is_named_and_the_answer_is_no(tmp_path: Path) -> None:
    file = await written(tmp_path)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    step = next(line for line in lines[1:] if line["out"])
    step["out"][0][1]["engine"] = "another"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = CliRunner().invoke(cli, ["replay", str(file)])
    assert answer.exit_code == 1
    assert f"1 step decided otherwise than then, the first is step {step['n']}" in answer.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "others"}, "is of fleet others, the journal of fleet"),
        (
            {"engines": [{"id": "x", "url": "http://x", "role": "decode"}]},
            "has other engines than the journal: d, p, x",
        ),
        ({"recovery": {"eject_after": 0}}, "recovery.eject_after"),
    ],
)
async def test_a_fleet_file_that_cannot_stand_beside_it_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    file, fleet = await written(tmp_path), tmp_path / "fleet.yaml"
    engines = [
        {"id": name, "url": f"http://{name}", "role": role} for name, role in (("p", "prefill"), ("d", "decode"))
    ]
    fleet.write_text(json.dumps({"name": "fleet", "model": "tiny", "engines": engines, **change}))
    answer = CliRunner().invoke(cli, ["replay", str(file), "--fleet", str(fleet)])
    assert answer.exit_code == 2
    assert words in answer.output


class Hostile:
    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        self._reduced = (make, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._reduced


def test_a_snapshot_runs_nothing_but_the_records_of_the_core(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for hostile in (Hostile(Path.touch, mark), Hostile(eval, f"open({str(mark)!r}, 'w')"), Hostile(getattr, mark, "x")):
        with pytest.raises(SnapshotError):
            unpack(text(pickle.dumps(hostile)))
    assert not mark.exists()
    rig = Rig(prefill("p"), decode("d"))
    again = unpack(text(pack(rig.fleet)))
    assert again.save(now=rig.now) == rig.fleet.save(now=rig.now)  # type: ignore[attr-defined]


def test_what_is_no_journal_is_said(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "holds no event journal"), (tmp_path / "x", "no such file")):
        with pytest.raises(ReplayError, match=words):
            files_of(path)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with pytest.raises(ReplayError, match="holds no whole line"):
        replayed(empty)
