"""Ports for what tests start: of this test run's own, so that no other run on the machine takes one in between.

A port that was free a moment ago may be gone by the time its server has started, or while a test has the server down.
So each run of pytest claims a block of ports for as long as it lives, by a name that only one socket can bear, and the
blocks lie outside the ports that the kernel gives to outgoing connections. Within the run a port comes round again only
after all others of the block.
"""

import contextlib
import errno
import random
import socket

_FIRST, _LAST, _BLOCK = 20_000, 32_000, 500


class Ports:
    """A block of ports that nobody else claims."""

    def __init__(self) -> None:
        self._claim: socket.socket | None = None
        self._block = range(0)
        self._next = 0

    def take(self, count: int) -> list[int]:
        """Free ports, all different; never port 0's."""
        if self._claim is None:
            self._claim, self._block = _claimed()
        found: list[int] = []
        with contextlib.ExitStack() as stack:
            for _ in self._block:
                port = self._block[self._next]
                self._next = (self._next + 1) % len(self._block)
                each = stack.enter_context(socket.socket())
                with contextlib.suppress(OSError):
                    each.bind(("127.0.0.1", port))
                    found.append(port)
                if len(found) == count:
                    return found
        raise AssertionError(f"no {count} free ports among {self._block}")


def _claimed() -> tuple[socket.socket, range]:
    """The name of a block, held until this process ends however it ends, and the block."""
    starts = list(range(_FIRST, _LAST, _BLOCK))
    random.shuffle(starts)
    for start in starts:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0narwhal tests: ports from {start}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return claim, range(start, start + _BLOCK)
    raise AssertionError("every block of ports is claimed: too many test runs at once")


_ports = Ports()


def free_ports(count: int) -> list[int]:
    """Ports of this run that nobody listens on, all different."""
    return _ports.take(count)
