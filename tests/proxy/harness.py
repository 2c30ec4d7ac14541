"""A data path on a real socket, engines that send exactly what a test says, a feed that stands still, a reporter that
writes down."""

import asyncio
import functools
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import aiohttp
import orjson
import uvloop

from narwhal.clock import RealClock
from narwhal.config import ProxySettings
from narwhal.connectors.vllm_nixl import VllmNixl
from narwhal.placement import EngineEntry, Placement
from narwhal.proxy.endpoints import DataPath
from narwhal.proxy.seams import Picture
from narwhal.reports import Run
from narwhal.vocabulary import Outcome, Phase, RequestResult

WAIT_S = 10.0
MODEL = "sim-model"
P = ParamSpec("P")


def on_uvloop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an asynchronous test on the loop of production, in bounded time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60.0):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bounded())

    return run


async def until(condition: Callable[[], object], what: str = "", within_s: float = WAIT_S) -> None:
    """Wait until `condition` holds; fail when it does not in time."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110  any fact may be waited for
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {within_s} s: {what or condition}") from None


def settings(**sections: Mapping[str, Any]) -> ProxySettings:
    """Proxy settings with some keys of some sections changed."""
    return ProxySettings.model_validate({"name": "test", "model": MODEL, **sections})


@dataclass
class FixedFeed:
    """A fleet that changes only when the test changes it."""

    placement: Placement | None
    settings: ProxySettings
    picture: Picture = field(default_factory=Picture)
    reason: str = ""
    controlled: bool = True

    def not_ready(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Seen:
    """One leg as it was reported."""

    engine: str
    phase: Phase
    outcome: Outcome
    run: Run | None = None


class RecordingReporter:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.legs: list[Seen] = []
        self.requests: list[tuple[RequestResult, int]] = []

    def success(self, engine: str, phase: Phase, incarnation: int, outcome: Outcome) -> None:
        self.legs.append(Seen(engine, phase, outcome))

    def failure(self, run: Run) -> None:
        self.legs.append(Seen(run.engine, run.phase, run.outcome, run))

    def neutral(self, engine: str, phase: Phase, incarnation: int, outcome: Outcome) -> None:
        self.legs.append(Seen(engine, phase, outcome))

    def request(self, result: RequestResult, retries: int) -> None:
        self.requests.append((result, retries))

    @property
    def outcomes(self) -> list[Outcome]:
        return [seen.outcome for seen in self.legs]

    @property
    def results(self) -> list[RequestResult]:
        return [result for result, _ in self.requests]


def entry(name: str, url: str, role: Phase, **changes: Any) -> EngineEntry:
    """An eligible engine."""
    values: dict[str, Any] = {"id": name, "url": url, "role": role, "phases": frozenset({role}), "incarnation": 1}
    return EngineEntry(**(values | changes))


def placed(prefill: Mapping[str, str], decode: Mapping[str, str]) -> Placement:
    """A placement from engine ids to addresses."""
    entries = [entry(name, url, Phase.PREFILL) for name, url in prefill.items()]
    entries += [entry(name, url, Phase.DECODE) for name, url in decode.items()]
    return Placement(epoch=1, version=1, engines={e.id: e for e in entries})


@dataclass
class Path:
    """A running data path and what a test may look at."""

    data: DataPath
    feed: FixedFeed
    reporter: RecordingReporter
    session: aiohttp.ClientSession
    port: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)  # of raw clients; closed at the end

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(
        self,
        body: Any = None,
        *,
        route: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> "Got":
        """Send a completion and read all of its answer."""
        if body is None:
            body = {"model": MODEL, "prompt": "the narwhal dives " * 8, "max_tokens": 4, **fields}
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        head = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.url + route, data=data, headers=head) as answer:
            return Got(answer.status, dict(answer.headers), await answer.read())

    async def raw(self, data: bytes, *, eof: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client's connection on which `data` has been written."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(data)
        if eof:
            writer.write_eof()
        return reader, writer

    async def one_more(self, done: int) -> None:
        """More than `done` requests have ended."""
        await until(lambda: len(self.reporter.results) > done, "another request has ended")

    async def at_rest(self) -> None:
        """No request runs and no leg is in flight."""
        await until(lambda: not self.data.admission.taken and not self.data.inflight.legs, "at rest")


@dataclass(frozen=True)
class Got:
    """A client's whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[bytes]:
        """The data of a stream's events."""
        return [event.removeprefix(b"data: ") for event in self.body.split(b"\n\n") if event]


@asynccontextmanager
async def data_path(
    placement: Placement | None, chosen: ProxySettings | None = None, **options: Any
) -> AsyncIterator[Path]:
    """A data path that listens on a free port of loopback."""
    feed = FixedFeed(placement, chosen or settings())
    reporter = RecordingReporter()
    data = DataPath(feed, reporter, RealClock(), VllmNixl(), draws=random.Random(1), **options)
    data.start()
    server = await asyncio.get_running_loop().create_server(data.handler, "127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0)) as session:
            path = Path(data, feed, reporter, session, server.sockets[0].getsockname()[1])
            writers = path.writers
            yield path
    finally:
        for writer in writers:
            writer.close()
        server.close()
        await data.stop(0.0)
        await server.wait_closed()


def request_bytes(body: Any, *, headers: str = "", route: str = "/v1/completions") -> bytes:
    """A whole client request."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    head = f"POST {route} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def full_listener() -> Iterator[str]:
    """The address of a listener whose queue is full: connection attempts get no answer."""
    with socket.socket() as full, ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}"


# --- engines that send exactly what a test says ---

HANDOFF: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[5, 6, 7]],
    "remote_engine_id": "prefill-0",
    "remote_request_id": "cmpl-1-0-a85d803b",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 41,
    "transfer_mode": "pull",
}


def answer(body: bytes, status: str = "200 OK", headers: str = "content-type: application/json\r\n") -> bytes:
    """A whole HTTP answer."""
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


def prefill_answer(**changes: Any) -> bytes:
    """What a prefill engine answers."""
    return answer(orjson.dumps({"id": "x", "choices": [{"text": "a"}], "kv_transfer_params": HANDOFF | changes}))


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(text: str = "a") -> bytes:
    """One event with a token."""
    return (
        b"data: " + orjson.dumps({"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": None}]}) + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


@dataclass
class Asked:
    """One request as an engine received it, and the way to answer it."""

    head: bytes
    body: bytes
    writer: asyncio.StreamWriter
    connection: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)

    async def send_slowly(self, data: bytes, size: int) -> None:
        """Every `size` bytes in a segment of their own."""
        for at in range(0, len(data), size):
            self.writer.write(data[at : at + size])
            await asyncio.sleep(0)


Script = Callable[[Asked], Awaitable[None]]


class ScriptedEngine:
    """Reads well-formed requests and lets `script` answer them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.connections = 0
        self.closed_at: list[float] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        running: asyncio.Task[None] | None = None
        last: Asked | None = None
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                last = Asked(head, await reader.readexactly(length), writer, number)
                self.asked.append(last)
                running = asyncio.create_task(self.script(last))  # type: ignore[arg-type]
                self._tasks.add(running)
                running.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            if last is not None:
                last.gone.set()
            self.closed_at.append(asyncio.get_running_loop().time())
        finally:
            if running is not None and not running.done():
                running.cancel()
            writer.close()

    async def start(self, **options: Any) -> None:
        """Listens: on `port` of the options, on its port of before, on any."""
        self.port = options.pop("port", self.port)
        self._server = await asyncio.start_server(self._serve, options.pop("host", "127.0.0.1"), self.port, **options)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()


@asynccontextmanager
async def scripted(script: Script, **options: Any) -> AsyncIterator[ScriptedEngine]:
    """An engine that answers as `script` says."""
    engine = ScriptedEngine(script)
    await engine.start(**options)
    try:
        yield engine
    finally:
        await engine.stop()


async def prefills(asked: Asked) -> None:
    """The script of a prefill engine in good health."""
    asked.send(prefill_answer())


@asynccontextmanager
async def before(
    decode: Script, prefill: Script = prefills, chosen: ProxySettings | None = None
) -> AsyncIterator[tuple[Path, ScriptedEngine, ScriptedEngine]]:
    """A data path before one scripted engine of each phase, `p` and `d`."""
    async with (
        scripted(prefill) as p,
        scripted(decode) as d,
        data_path(placed({"p": p.url}, {"d": d.url}), chosen) as path,
    ):
        yield path, p, d


WHOLE = answer(b'{"id": "x", "choices": [{"text": "b"}]}')


async def answers(asked: Asked) -> None:
    """A decode engine in good health."""
    if b'"stream":true' in asked.body.replace(b" ", b""):
        asked.send(STREAM_HEAD, chunk(token()), chunk(DONE), LAST)
    else:
        asked.send(WHOLE)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """(status, head, body) of one answer with a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), head, await reader.readexactly(length)
