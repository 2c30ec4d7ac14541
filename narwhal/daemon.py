"""What the daemons share: addresses on the command line, listening sockets, and the one line of a start that failed."""

import contextlib
import socket
import stat
import sys
from pathlib import Path
from typing import NoReturn

import click

BACKLOG = 4096  # the kernel cuts it to net.core.somaxconn
UNIX = "unix:"  # before the path of a Unix socket


class StartError(Exception):
    """The process cannot start, or cannot go on. The message is for the operator; `code` is the exit status."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Address(click.ParamType[tuple[str, int]]):
    """HOST:PORT; an IPv6 host stands in brackets. Port 0 takes any free one."""

    name = "HOST:PORT"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """The host and the port."""
        if isinstance(value, tuple):
            return value
        host, colon, port = value.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        if not colon or not bare or not port.isdecimal() or int(port) > 65535 or (":" in bare) != host.startswith("["):
            self.fail(f"must be HOST:PORT, got {value!r}", param, ctx)
        return bare, int(port)


class Listening(Address):
    """HOST:PORT, or `unix:PATH` for a Unix socket; that is told by a host with its prefix, and port 0."""

    name = "HOST:PORT|unix:PATH"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """The host and the port, or the path with its prefix and 0."""
        if isinstance(value, str) and value.startswith(UNIX):
            if value == UNIX:
                self.fail(f"{value!r} names no path", param, ctx)
            return value, 0
        return super().convert(value, param, ctx)


class Addresses(click.ParamType[tuple[str, ...]]):
    """HOST:PORT[,HOST:PORT…], as strings."""

    name = "HOST:PORT[,…]"

    def convert(
        self, value: str | tuple[str, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Each of them, checked."""
        if isinstance(value, tuple):
            return value
        return tuple(joined(*Address().convert(part.strip(), param, ctx)) for part in value.split(","))


def joined(host: str, port: int) -> str:
    """HOST:PORT of an address, or `unix:PATH`."""
    if host.startswith(UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: tuple[str, int], what: str) -> socket.socket:
    """A listening socket that does not block. Raises StartError."""
    host, port = address
    listener = None
    try:
        if host.startswith(UNIX):
            listener = _listen_at(host.removeprefix(UNIX))
        else:
            family, kind, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(resolved)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = (error.strerror or str(error)).lower()
        raise StartError(f"cannot listen on {joined(host, port)} ({what}): {reason}") from error
    return listener


def _listen_at(path: str) -> socket.socket:
    """A Unix socket bound at `path`. A socket that a process left there gives way when nobody listens on it; anything
    else does not. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(Path(path).lstat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    return listener


def unlisten(listener: socket.socket) -> None:
    """Close a listening socket for good: the path of a Unix socket goes with it. For the process that made it."""
    path = listener.getsockname() if listener.family == socket.AF_UNIX else ""
    listener.close()
    if path:
        Path(path).unlink(missing_ok=True)


def bound(listener: socket.socket) -> tuple[str, int]:
    """Where a socket listens, as it is asked for."""
    if listener.family == socket.AF_UNIX:
        return f"{UNIX}{listener.getsockname()}", 0
    host, port = listener.getsockname()[:2]
    return host, port


def give_up(program: str, error: StartError) -> NoReturn:
    """Say why on standard error and end the process."""
    for line in str(error).splitlines():
        click.echo(f"{program}: {line}", err=True)
    sys.exit(error.code)
