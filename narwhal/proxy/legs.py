"""Engine HTTP: the data pool, its keep-alive rule, connecting, and the one watchdog of the process.

Everything that a socket, the resolver or TLS can raise becomes a `LegEnd` here and nowhere else (spec F2, F5).
"""

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple
from urllib.parse import urlsplit

from pydantic import SecretStr

from narwhal.clock import Clock
from narwhal.config import ProxySettings
from narwhal.placement import EngineEntry
from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.connection import EngineConnection
from narwhal.proxy.outcome import LegKind
from narwhal.vocabulary import Outcome

# How often the watchdog looks. Not a time limit: it bounds how late any of them is noticed.
WATCH_EVERY_S = 0.05
# A look that comes so late says that this process did not run: it was stopped, or its machine was.
STOPPED_S = 1.0

# What an error number of a connection attempt means, first match first; others are `unreachable`. The first row has the
# proxy's own causes (spec F5): no descriptor, no memory, no local port.
CONNECT_ERRNOS: tuple[tuple[Outcome, frozenset[int]], ...] = (
    (
        Outcome.LOCAL,
        frozenset(
            {
                errno.EMFILE,
                errno.ENFILE,
                errno.EADDRNOTAVAIL,
                errno.EADDRINUSE,
                errno.ENOBUFS,
                errno.ENOMEM,
                errno.EAGAIN,
            }
        ),
    ),
    (Outcome.REFUSED, frozenset({errno.ECONNREFUSED})),
    (Outcome.RESET, frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})),
    (Outcome.CONNECT_TIMEOUT, frozenset({errno.ETIMEDOUT})),
)
# The resolver is broken, as opposed to the name being unknown.
LOCAL_RESOLVER = frozenset({socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_MEMORY, socket.EAI_SYSTEM})


def connect_outcome(error: OSError) -> Outcome:
    """What a failed connection attempt means."""
    if isinstance(error, ssl.SSLError):
        return Outcome.TLS_FAILED
    if isinstance(error, socket.gaierror):
        return Outcome.LOCAL if error.errno in LOCAL_RESOLVER else Outcome.UNREACHABLE
    # A name with several addresses: the loop tells all their errors in one text.
    numbers = {error.errno} if error.errno else {int(found) for found in re.findall(r"\[Errno (\d+)\]", str(error))}
    for outcome, meant in CONNECT_ERRNOS:
        if numbers & meant:
            return outcome
    return Outcome.RESET if isinstance(error, ConnectionError) else Outcome.UNREACHABLE


class Origin(NamedTuple):
    """Where an engine listens, from its URL."""

    host: str
    port: int
    tls: bool
    base: str  # path before the API's, without a slash at its end
    authority: str  # for the Host header


def origin_of(url: str) -> Origin:
    """The parts of an engine's URL; IPv6 hosts stand in brackets there. Raises ValueError for what is no http URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"no http address: {url}")
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    base = parts.path.rstrip("/")
    if not all("!" <= character <= "~" for character in parts.netloc + base):
        raise ValueError(f"an address with characters that HTTP cannot carry: {url!a}")
    return Origin(parts.hostname, port, tls, base, parts.netloc.rpartition("@")[2])


class Pairs:
    """Which transfers between two engines this process has seen since either's incarnation began (spec V13)."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}

    def first(self, producer: EngineEntry, consumer: EngineEntry) -> bool:
        """Whether the next transfer is the first that the two will be seen doing."""
        return self._seen.get((producer.id, consumer.id)) != (producer.incarnation, consumer.incarnation)

    def saw(self, producer: EngineEntry, consumer: EngineEntry) -> None:
        """A transfer between the two has ended, well or not."""
        self._seen[producer.id, consumer.id] = (producer.incarnation, consumer.incarnation)


class Legs:
    """The data pool of one worker: connections to engines, the idle ones by address, and the watchdog over the rest."""

    def __init__(self, settings: Callable[[], ProxySettings], clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._idle: dict[str, list[EngineConnection]] = {}
        self._origins: dict[str, Origin] = {}
        self._heads: dict[tuple[str, str], tuple[SecretStr | None, bytes]] = {}
        self._all: set[EngineConnection] = set()
        self._connecting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._look_due = 0.0
        self._closed = False
        self.pairs = Pairs()
        # When an engine last made progress, by its URL, as the watchdog saw it.
        self.heard_at: dict[str, float] = {}
        self.on_tick: Callable[[float], bool] | None = None  # says whether it wants to be called again

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._all)

    def origin(self, url: str) -> Origin:
        """The parsed form of `url`. Raises ValueError."""
        origin = self._origins.get(url)
        if origin is None:
            origin = self._origins[url] = origin_of(url)
        return origin

    def reuse(self, url: str) -> EngineConnection | None:
        """The connection to `url` that became idle last, when there is one young enough."""
        idle = self._idle.get(url)
        if not idle:
            return None
        oldest = self._clock.monotonic() - self._settings().engine.keepalive_s
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since > oldest:
                connection.reused = True
                return connection
            connection.abort()
        return None

    async def connect(self, url: str, deadline: float) -> EngineConnection | LegEnd:
        """A new connection to `url`, by the request's `deadline` at the latest."""
        settings = self._settings()
        self._make_room(settings.serving.max_connections)
        now = self._clock.monotonic()
        limit = min(settings.engine.connect_timeout_s, deadline - now)
        late = Outcome.DEADLINE if deadline - now < settings.engine.connect_timeout_s else Outcome.CONNECT_TIMEOUT
        self._connecting += 1
        ours: asyncio.Timeout | None = None
        try:
            origin = self.origin(url)
            async with asyncio.timeout(limit) as ours:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: EngineConnection(url, self._freed, self._gone),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except TimeoutError as error:
            if ours is not None and ours.expired():
                return LegEnd(late, detail="no connection in time")
            return LegEnd(connect_outcome(error), detail=f"connecting: {error}")
        except OSError as error:
            return LegEnd(connect_outcome(error), detail=f"connecting: {error}")
        except ValueError as error:  # an address that nobody can reach
            return LegEnd(Outcome.UNREACHABLE, detail=str(error))
        finally:
            self._connecting -= 1
        if connection.usable:  # it may be gone already; then whoever uses it is told so
            self._all.add(connection)
            self.watch()
        return connection

    def head(self, url: str, path: str, api_key: SecretStr | None) -> bytes:
        """The constant part of a request's head: only what is ours, nothing of the client's (field case F17)."""
        known = self._heads.get((url, path))
        if known is not None and known[0] is api_key:
            return known[1]
        origin = self.origin(url)
        credential = f"Authorization: Bearer {api_key.get_secret_value()}\r\n" if api_key is not None else ""
        head = (
            f"POST {origin.base}{path} HTTP/1.1\r\nHost: {origin.authority}\r\n{credential}"
            "Content-Type: application/json\r\n"
        ).encode()
        self._heads[url, path] = (api_key, head)
        return head

    def drop_idle(self, url: str) -> None:
        """An idle connection to `url` had been closed by the engine: the older ones will be, too."""
        for connection in self._idle.pop(url, []):
            connection.abort()

    def close(self) -> None:
        """End every connection and the watchdog."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self._all):
            connection.abort()

    def _freed(self, connection: EngineConnection) -> None:
        connection.idle_since = self._clock.monotonic()
        self._idle.setdefault(connection.url, []).append(connection)

    def _gone(self, connection: EngineConnection) -> None:
        self._all.discard(connection)
        idle = self._idle.get(connection.url)
        if idle and connection in idle:
            idle.remove(connection)

    def _make_room(self, limit: int) -> None:
        """Keep the pool within its bound: the connection that has been idle longest gives way."""
        while len(self._all) + self._connecting >= limit:
            oldest = min((idle[0] for idle in self._idle.values() if idle), key=lambda c: c.idle_since, default=None)
            if oldest is None:
                return  # all are busy, and each belongs to a request that has its seat
            self._gone(oldest)
            oldest.abort()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def watch(self) -> None:
        """Have the watchdog look again soon, if it is not about to anyway."""
        if self._timer is None and not self._closed:
            self._look_due = self._clock.monotonic() + WATCH_EVERY_S
            self._timer = asyncio.get_running_loop().call_later(WATCH_EVERY_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        if now - self._look_due >= STOPPED_S:
            self._excuse(now - self._look_due)
        oldest = now - self._settings().engine.keepalive_s
        for idle in self._idle.values():
            while idle and idle[0].idle_since <= oldest:
                idle.pop(0).abort()
        for connection in list(self._all):
            # Before its first token a stream has given nothing: an engine whose core is dead goes on sending heads.
            if connection.heard and (connection.idle_since or connection.kind is not LegKind.FIRST_TOKEN):
                self.heard_at[connection.url] = now
            if connection.idle_since:
                connection.heard = False
            else:
                connection.check(now)
        again = self.on_tick is not None and self.on_tick(now)
        if again or self._all:
            self.watch()

    def _excuse(self, stopped_s: float) -> None:
        """Time in which nothing was read is not the engines' (spec F5); what came meanwhile is still to be read."""
        for connection in self._all:
            connection.excuse(stopped_s)
        for url in self.heard_at:
            self.heard_at[url] += stopped_s
