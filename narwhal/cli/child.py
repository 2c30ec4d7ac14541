"""Runs one daemon as a child of narwhal-serve: `python -m narwhal.cli.child PARENT PROGRAM ARGUMENTS…`.

The child is told by the kernel when its parent is gone, and then ends in good order like on any SIGTERM.
"""

import ctypes
import importlib
import os
import signal
import sys

PROGRAMS = {"narwhal-control": "narwhal.control.app", "narwhal-proxy": "narwhal.proxy.app"}

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the program named."""
    _, parent, program, *arguments = sys.argv
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(0)  # it was gone before the kernel could be asked
    sys.argv = [program, *arguments]
    importlib.import_module(PROGRAMS[program]).main(prog_name=program)


if __name__ == "__main__":
    main()
