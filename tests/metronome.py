"""How long the machine kept this process from running: a bound in real time can hold no better than that.

Tests run beside one another on machines that have other work, and those stop a process for a second now and then. A
test of how soon something happens allows for what its own process was kept waiting meanwhile, and for no more: on a
machine that is idle its bound is the bound that it names. Never take it into account where something must not happen
too soon.
"""

import threading
import time

TICK_S = 0.01


class Metronome:
    """Measures while its block runs, in a thread of its own: a loop that is blocked is not the machine's doing."""

    def __init__(self) -> None:
        self.worst_s = 0.0  # the longest time for which this process did not run when it should have
        self.total_s = 0.0  # all such times together
        self.took_s = 0.0  # how long the block took
        self._began = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="metronome", daemon=True)

    @property
    def ran_s(self) -> float:
        """How long the block took, once it is over, without the time for which the machine kept it waiting."""
        return self.took_s - self.total_s

    def __enter__(self) -> "Metronome":
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.took_s = time.monotonic() - self._began
        self._done.set()
        self._thread.join()

    def _tick(self) -> None:
        over, before = False, time.monotonic()
        while not over:
            over = self._done.wait(TICK_S)
            now = time.monotonic()
            late_s = max(0.0, now - before - TICK_S)
            self.worst_s, self.total_s, before = max(self.worst_s, late_s), self.total_s + late_s, now
