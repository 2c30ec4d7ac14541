"""`narwhal-control` itself, with two faults at hand that no signal of the system's can bring about.

SIGUSR1 blocks its event loop for BLOCK_S seconds, while its other threads run; its log says since when. SIGUSR2 has its
stage `liveness` raise in every pass, until the next SIGUSR2.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from types import FrameType

from narwhal.control.app import main
from narwhal.control.leader import Leader, stage_runners
from narwhal.control.loop import ControlLoop
from narwhal.control.monitor import Runner
from narwhal.vocabulary import Stage

_broken = False


def _block(_number: int, _frame: FrameType | None) -> None:
    since = time.clock_gettime(time.CLOCK_BOOTTIME)
    os.write(2, json.dumps({"event": "blocked", "boottime": since}).encode() + b"\n")
    time.sleep(float(os.environ["BLOCK_S"]))


def _turn(_number: int, _frame: FrameType | None) -> None:
    global _broken  # noqa: PLW0603 - a signal handler has nothing else to tell it to
    _broken = not _broken


def _runners(loop: ControlLoop) -> Mapping[Stage, Runner]:
    real = stage_runners(loop)

    async def liveness() -> None:
        if _broken:
            raise RuntimeError("planted")
        await real[Stage.LIVENESS]()

    return {**real, Stage.LIVENESS: liveness}


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _block)
    signal.signal(signal.SIGUSR2, _turn)
    defaults = Leader.__init__.__kwdefaults__
    assert defaults is not None
    defaults["runners"] = _runners
    main(prog_name="narwhal-control")
