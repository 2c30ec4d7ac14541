"""etcd as one thread talks to it: one member at a time, the next one after a failure; foreign errors end here.

Every call is bounded. Whether it may have been done although it failed is in the error's type.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import etcd3
import grpc
from etcd3 import etcdrpc
from etcd3.exceptions import Etcd3Exception

from narwhal.control.store.base import StoreError

T = TypeVar("T")

# gRPC's own pauses between attempts to connect grow to two minutes, and one attempt may take twenty seconds: far beyond
# any lease. Pings find a peer that is gone; etcd closes connections that ping more often than every five seconds.
_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),  # threads must not share a broken connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_000),
)
_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
# The token was made before etcd restarted, or has run out, or users have changed since: a new one is asked for.
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "revision in header is old")
_FULL = "database space exceeded"
_BUSY = "too many requests"


class Unanswered(StoreError):
    """No usable answer. What was asked may have been done, or be done later; asking again may help."""


class NotThere(StoreError):
    """etcd does not know the lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdSettings:
    """What an etcd store is told. Times in seconds."""

    endpoints: tuple[str, ...]  # http(s)://host:port
    prefix: str
    fleet: str
    ttl_s: int
    safety_margin_s: float
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def renewal_s(self) -> float:
        """Between two renewals."""
        return self.ttl_s / 3

    @property
    def attempt_s(self) -> float:
        """How long one renewal may take: short enough that a second and a third fit in what is left of the lease."""
        return min(1.0, self.ttl_s / 6)

    @property
    def call_s(self) -> float:
        """How long one try of any other call may take."""
        return min(1.0, self.ttl_s / 3)

    @property
    def bound_s(self) -> float:
        """How long a call may go on being tried again. After this, and the try that is under way, it fails."""
        return self.ttl_s * 2 / 3


class Connection:
    """A connection to one member of the cluster, of one thread; the next member's after a failure. Connects when it
    is first used. Only `close` may be called from elsewhere.

    The library keeps several endpoints in one client, but then asks only one of them for the token, and one that
    failed is out for a time that is either too long for a lone member or so short that two dead ones hide the third.
    """

    def __init__(self, settings: EtcdSettings, *, timeout_s: float, first: int = 0) -> None:
        """`timeout_s` bounds each call; `first` is the endpoint to begin with."""
        self._settings = settings
        self._timeout_s = timeout_s
        self._next = first
        self._lock = threading.Lock()
        self._client: Any = None
        self._endpoint = ""
        self._troubles: dict[str, str] = {}  # of each member since the last answer of any
        self._closed = False

    def call(self, ask: Callable[[Any], T]) -> T:
        """What `ask` makes of the client. Raises Unanswered, NotThere or another StoreError."""
        try:
            answer = ask(self._connected())
        except (grpc.RpcError, Etcd3Exception, ValueError) as error:
            raise self._understood(error) from error
        self._troubles.clear()
        return answer

    @property
    def endpoint(self) -> int:
        """Number of the endpoint in use, for another connection to begin with."""
        return self._next

    def watch(self, first: bytes, last: bytes, revision: int, *, for_s: float) -> Iterator[Any]:
        """Answers of a watch on the keys from `first` to before `last`, from `revision` on, for `for_s` seconds.

        The library's own watcher is left aside: it never notices that its stream has stopped, and has no end to it.
        """
        ended = threading.Event()
        request = etcdrpc.WatchRequest(
            create_request=etcdrpc.WatchCreateRequest(key=first, range_end=last, start_revision=revision)
        )

        def requests() -> Iterator[Any]:
            yield request
            ended.wait()  # etcd ends the watch when the requests end

        answers: Any = None
        try:
            client = self._connected()
            answers = etcdrpc.WatchStub(client.channel).Watch(requests(), for_s, metadata=client.metadata)
            yield from answers
        except (grpc.RpcError, Etcd3Exception, ValueError) as error:
            if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return
            raise self._understood(error) from error
        finally:
            ended.set()
            if answers is not None:
                answers.cancel()  # a stream that is merely dropped stays on the server

    def drop(self) -> None:
        """The next call connects anew, to the next member."""
        with self._lock:
            client, self._client = self._client, None
            self._next += 1
        if client is not None:
            client.close()

    def close(self) -> None:
        """Ends the call that is under way, and refuses the next. From any thread."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        if self._closed:
            raise StoreError("the store is closed")
        if self._client is not None:
            return self._client
        settings = self._settings
        address = settings.endpoints[self._next % len(settings.endpoints)]
        self._endpoint = address
        scheme, _, netloc = address.partition("://")
        host, _, port = netloc.rpartition(":")
        secure = scheme == "https"
        endpoint = etcd3.Endpoint(
            host, port, secure=secure, creds=_credentials(settings) if secure else None, time_retry=0.0, opts=_CHANNEL
        )
        try:
            client = etcd3.MultiEndpointEtcd3Client(
                [endpoint],
                timeout=self._timeout_s,
                user=settings.username,
                password=settings.password,
                failover=True,
            )
        except BaseException:
            endpoint.close()
            raise
        # The token travels as metadata as well; as call credentials a plain connection refuses it.
        client.call_credentials = None
        with self._lock:
            if not self._closed:
                self._client = client
                return client
        client.close()
        raise StoreError("the store is closed")

    def _understood(self, error: Exception) -> StoreError:
        """What the error means. Leaves a member that is no use."""
        if self._closed:
            return StoreError("the store is closed")
        # The library's own errors say nothing; what gRPC said is behind them.
        cause = error if isinstance(error, grpc.RpcError) else error.__context__
        code = cause.code() if isinstance(cause, grpc.RpcError) else None
        details = (cause.details() or "") if isinstance(cause, grpc.RpcError) else str(error)
        details = details or type(error).__name__
        words = f"etcd at {self._endpoint}: {details}"
        if code is grpc.StatusCode.NOT_FOUND:
            return NotThere(words)
        if _FULL in details:
            return StoreError(
                f"etcd at {self._endpoint} is full and refuses every write (NOSPACE): compact and defragment it, then "
                f"disarm the alarm"
            )
        if code in _REFUSALS and not any(passing in details for passing in (*_STALE_TOKEN, _BUSY)):
            return StoreError(words)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no answer within {self._timeout_s:.2g} s"
        self._troubles[self._endpoint] = details
        self.drop()
        # Of every member that was tried: the same words for as long as nothing changes.
        return Unanswered("; ".join(f"etcd at {member}: {self._troubles[member]}" for member in sorted(self._troubles)))


def check_files(settings: EtcdSettings) -> None:
    """Raises StoreError when a certificate or key cannot be read."""
    _credentials(settings)


def _credentials(settings: EtcdSettings) -> grpc.ChannelCredentials:
    """Read anew for each connection, so that renewed certificates need no restart. Raises StoreError."""

    def read(path: str | None) -> bytes | None:
        return Path(path).read_bytes() if path else None

    try:
        return grpc.ssl_channel_credentials(read(settings.ca), read(settings.key), read(settings.cert))
    except OSError as error:
        raise StoreError(f"cannot read {error.filename}: {error.strerror}") from error


# --- what is stored ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A key's value."""

    value: bytes
    created: int  # revision at which the key came to be
    modified: int  # revision of this value


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The three keys at one revision."""

    revision: int
    lease: Entry | None = None
    epoch: Entry | None = None
    handoff: Entry | None = None


class Keys:
    """The keys of one fleet."""

    def __init__(self, settings: EtcdSettings) -> None:
        base = f"{settings.prefix.rstrip('/')}/{settings.fleet}/"
        self.epoch = f"{base}epoch".encode()
        self.handoff = f"{base}handoff".encode()
        self.lease = f"{base}lease".encode()
        # One range holds the three; what is set aside lies before it, what is seldom read behind it.
        self.first, self.last = self.epoch, self.lease + b"\0"
        self.aside = f"{base}aside/".encode()
        self.past = f"{base}past".encode()
        self.proof = f"{base}proof".encode()
        self._names = {self.epoch: "epoch", self.handoff: "handoff", self.lease: "lease"}

    def name(self, key: bytes) -> str | None:
        """The field of `State` that shows this key."""
        return self._names.get(key)


def entry(kv: Any) -> Entry:
    """etcd's key-value as a value."""
    return Entry(value=kv.value, created=kv.create_revision, modified=kv.mod_revision)


def read_state(connection: Connection, keys: Keys) -> State:
    """The three keys as the whole cluster agrees on them. Raises StoreError."""
    answer = connection.call(lambda client: client.get_response(keys.first, range_end=keys.last))
    found = {name: entry(kv) for kv in answer.kvs if (name := keys.name(kv.key)) is not None}
    return State(revision=answer.header.revision, **found)


def read_value(connection: Connection, key: bytes) -> bytes | None:
    """The value of one key as the whole cluster agrees on it; None when there is none. Raises StoreError."""
    answer = connection.call(lambda client: client.get_response(key))
    return next((kv.value for kv in answer.kvs), None)


def database_bytes(connection: Connection) -> int:
    """Size of the database on the member that is asked. Raises StoreError."""

    def ask(client: Any) -> int:
        # The library's `status` lists the members too, which a user may not be allowed to.
        answer = client.maintenancestub.Status(etcdrpc.StatusRequest(), client.timeout, metadata=client.metadata)
        return int(answer.dbSize)

    return connection.call(ask)


# --- transactions -----------------------------------------------------------------------------------------------------


def created(key: bytes, revision: int) -> Any:
    """Requires that the key came to be at this revision; 0: that there is none."""
    return etcd3.transactions.Create(key) == revision


def modified(key: bytes, revision: int) -> Any:
    """Requires that the key has the value of this revision; 0: that there is none."""
    return etcd3.transactions.Mod(key) == revision


def valued(key: bytes, value: bytes) -> Any:
    """Requires that the key has this value."""
    return etcd3.transactions.Value(key) == value


def put(key: bytes, value: bytes, *, etcd_lease: int | None = None) -> Any:
    """Writes a key, which ends with `etcd_lease` when there is one."""
    return etcd3.transactions.Put(key, value, etcd_lease)


def delete(key: bytes) -> Any:
    """Removes a key."""
    return etcd3.transactions.Delete(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transacted:
    """What a transaction came to."""

    revision: int = 0  # of its writes; 0 when a guard did not hold
    instead: tuple[Entry | None, ...] = ()  # what was read then


def transact(
    connection: Connection, guards: list[Any], writes: list[Any], *, otherwise: tuple[bytes, ...] = ()
) -> Transacted:
    """Does the writes, the first of which is a `put`, if every guard holds; else reads the keys of `otherwise`.

    Raises StoreError. After Unanswered the writes may have been done, or be done later.
    """
    reads = [etcd3.transactions.Get(key) for key in otherwise]
    done, answers = connection.call(lambda client: client.transaction(guards, writes, reads))
    if done:
        return Transacted(revision=answers[0].response_put.header.revision)
    return Transacted(instead=tuple(_read_entry(answer) for answer in answers))


def _read_entry(answer: list[Any]) -> Entry | None:
    if not answer:
        return None
    value, known = answer[0]
    return Entry(value=value, created=known.create_revision, modified=known.mod_revision)
