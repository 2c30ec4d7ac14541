"""Signals that have had their effect when the sender goes on."""

import contextlib
import os
import signal
import time
from pathlib import Path

STOPS_S = 60.0  # shared machines stop a process for tens of seconds now and then


def send(pid: int, number: signal.Signals) -> None:
    """Sends a process a signal. After SIGSTOP it has stopped: until then other threads of it go on answering."""
    os.kill(pid, number)
    due = time.monotonic() + STOPS_S
    while number is signal.SIGSTOP and not _stopped(pid):
        assert time.monotonic() < due, f"{pid} does not stop"
        time.sleep(0.001)


def _stopped(pid: int) -> bool:
    """Whether every thread of the process has stopped."""
    states = []
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            states.append(task.read_text().rpartition(")")[2].split()[0])
    return bool(states) and all(state == "T" for state in states)
