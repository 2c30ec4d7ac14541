"""Loaded into every Python process of the real engines' environment: waiting loops sleep instead of yielding.

vLLM's processes wait for one another in loops of `os.sched_yield`, and an engine whose KV is waiting to be fetched
keeps three processes in such loops. On Linux kernels whose scheduler moves the deadline of a yielding task (seen on
6.18) a task that yielded often is then passed over for seconds, and a transfer outlives its KV lease. A sleep of 0.2 ms
does not have this effect and leaves the cores to others. See `calm` in install.py.
"""

import os
import time

PAUSE_S = 0.0002


def _pause() -> None:
    time.sleep(PAUSE_S)


os.sched_yield = _pause
