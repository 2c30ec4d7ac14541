"""Runs `narwhalctl` in this process, or as a process of its own, beside a fake control service."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any

import pytest
from click.testing import CliRunner

from narwhal.cli.main import cli
from tests.cli.fake_control import FakeControl

WAIT_S = 120.0  # no outcome here takes more than a fraction of a second on an idle machine


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as one JSON document."""
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def control() -> Iterator[FakeControl]:
    """An active control process."""
    with FakeControl() as fake:
        yield fake


@pytest.fixture
def run(control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command against `control`, or against the `addresses` given."""
    # Wide enough for a machine on which everything else runs too; tests of deadlines set their own.
    monkeypatch.setattr("narwhal.cli.client.CALL_TIMEOUT_S", WAIT_S)

    def call(*args: str, addresses: str = "") -> Ran:
        result = CliRunner().invoke(cli, ["--control", addresses or control.address, *args])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return call


class Running:
    """`narwhalctl` as a process whose lines can be awaited."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from narwhal.cli.main import main; main()", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "error"},
        )
        self._lines: dict[str, Queue[str]] = {"out": Queue(), "err": Queue()}
        self._threads = [
            Thread(target=self._read, args=(name, stream))
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            self._lines[name].put(line.rstrip("\n"))

    def next(self, name: str = "out") -> str:
        """The next line of `out` or `err`."""
        try:
            return self._lines[name].get(timeout=WAIT_S)
        except Empty:
            raise AssertionError(f"no line on std{name} within {WAIT_S:g} s") from None

    def end(self, signal: int) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(signal)
        return self.process.wait(WAIT_S)

    def rest(self, name: str) -> list[str]:
        """The lines that nobody has taken, after the end."""
        for thread in self._threads:
            thread.join(WAIT_S)
        return list(self._lines[name].queue)


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts `narwhalctl` processes and ends those that a test leaves."""
    started: list[Running] = []

    def call(*args: str) -> Running:
        started.append(Running(*args))
        return started[-1]

    yield call
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait(WAIT_S)
        running.rest("out")
        for stream in (running.process.stdout, running.process.stderr):
            assert stream is not None
            stream.close()
