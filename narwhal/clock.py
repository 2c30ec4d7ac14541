"""Time for the shells. Nothing else imports `time`; pure code takes `now` as an argument."""

import time
from typing import Protocol


class Clock(Protocol):
    """The three times Narwhal knows. They never mix: durations come from one of them only."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary instant, never going back; what `now` means everywhere."""

    def wall(self) -> float:
        """Seconds since the Unix epoch; for people and for documents that outlive the process, never for decisions."""

    def boottime(self) -> float:
        """Seconds since boot, counting time in which the machine was suspended; what a lease is measured with."""


class RealClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def boottime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
