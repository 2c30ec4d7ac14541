"""One simulated engine: its process-like life (start, stop, death, restart), what it holds, and which faults are on.

An engine may share its operating-system process with others. "The process dies" then means this engine only: its
listener closes, its connections are cut, its KV and its peers are forgotten. `on_exit` tells the owner, who ends the
real process where it holds but one.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from typing import Any

from narwhal.clock import Clock
from narwhal.sim import faults as fault_table
from narwhal.sim.faults import Fault, FaultSet, Hook
from narwhal.sim.generation import Generation
from narwhal.sim.kv import Ledger
from narwhal.sim.options import EngineOptions
from narwhal.sim.records import Ending, RequestLog
from narwhal.sim.server import Api
from narwhal.sim.transfer import Message, SideServer, Transfers
from narwhal.sim.wire import HttpConnection, Request

KILLED = -9
_BACKLOG = 1024


class Life(StrEnum):
    """Where an engine is between start and end."""

    RUNNING = "running"
    TERMINATING = "terminating"  # after SIGTERM: 500 to everything
    CORE_DEAD = "core-dead"  # 500, health 503, about to exit
    DOWN = "down"  # connections are refused


class Engine:
    """A simulated engine. `start()` it on a running loop; `stop()` it in the end."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        clock: Clock,
        on_exit: Callable[["Engine", int], None],
        log: Callable[[str, str], None],
    ) -> None:
        self.options = options
        self.clock = clock
        self._on_exit = on_exit
        self._log = log
        self.siblings: Mapping[str, Engine] = {options.id: self}
        """The engines of this operating-system process by id."""
        self.faults = FaultSet()
        self.ledger = Ledger(
            producer=options.id,
            lease_s=options.kv_lease_s,
            block_size=options.block_size,
            empty_short=options.empty_short_handoffs,
        )
        self.transfers = Transfers(options, self.faults)
        self.side = SideServer(self._serve_peer, self.running)
        self.requests = RequestLog()
        self.connections: set[HttpConnection] = set()
        self.live: set[Generation] = set()
        self.bad_requests = 0
        self.life = Life.DOWN
        self.generation = 0
        self.engine_id = ""
        self.agent = ""
        self.started_wall = 0.0
        self.port = options.port
        self._api = Api(self)
        self._server: asyncio.Server | None = None
        self._reserved: socket.socket | None = None
        self._go = asyncio.Event()
        self._held: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # -- facts

    @property
    def id(self) -> str:
        """The engine's name."""
        return self.options.id

    @property
    def url(self) -> str:
        """Where it listens, once started."""
        return f"http://{self.options.host}:{self.port}"

    @property
    def model(self) -> str:
        """The model it serves, as things are."""
        wrong = self.faults.state("wrong-model")
        return self.options.model if wrong is None else wrong.params["model"]

    def now(self) -> float:
        """Monotonic seconds."""
        return self.clock.monotonic()

    def say(self, text: str) -> None:
        """One line to the log."""
        self._log(self.id, text)

    def running(self) -> bool:
        """Whether the engine core works."""
        return self._go.is_set()

    def frozen(self) -> bool:
        """Whether the whole engine is stopped."""
        return self.faults.state("frozen") is not None

    async def until_running(self) -> None:
        """Wait while the engine core is stopped."""
        await self._go.wait()

    def slowed(self) -> float:
        """The factor on the time per output token."""
        slow = self.faults.state("slow-tokens")
        return 1.0 if slow is None else slow.params["factor"]

    def keepalive(self) -> float:
        """Seconds after which an idle connection is closed."""
        closing = self.faults.state("idle-close")
        return self.options.keepalive_s if closing is None else closing.params["seconds"]

    # -- life

    async def start(self) -> None:
        """Become a new process: a new generation that knows nothing of the one before."""
        self.generation += 1
        self.engine_id = self.options.engine_id or secrets.token_hex(16)
        self.agent = secrets.token_hex(8)
        self.started_wall = max(self.clock.wall(), self.started_wall + 0.01)
        await self.side.start(self.options.host, self.side.port)
        self.life = Life.RUNNING
        await self._apply()
        self.say(f"generation {self.generation} at {self.url}")

    async def stop(self) -> None:
        """End without a trace, for whoever started it here."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.life is not Life.DOWN:
            await self._down()
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        await asyncio.sleep(0)

    async def _down(self) -> None:
        """What the kernel does for a process that is gone; the port stays reserved, so that connections are refused."""
        self.life = Life.DOWN
        for generation in list(self.live):
            generation.interrupt(Ending.SILENT)
        for connection in list(self.connections):
            connection.abort()
        self._held.clear()
        self.side.stop()
        self.transfers.forget()
        self.ledger.forget(self.now())
        await self._unlisten()

    async def kill(self, code: int = KILLED) -> None:
        """Die at once, as by SIGKILL."""
        if self.life is Life.DOWN:
            return
        self.say("killed")
        await self._down()
        self._on_exit(self, code)

    async def terminate(self, ending: Ending = Ending.ERROR) -> None:
        """End as vLLM does on SIGTERM; with silent answers, when the last of their clients has left."""
        if self.life is not Life.RUNNING:
            return
        self.life = Life.TERMINATING
        self.say("terminating")
        self._interrupt(ending)
        await asyncio.sleep(self.options.shutdown_s)
        await self._close_idle()
        if ending is Ending.SILENT and self.connections:
            await self._unlisten()
            while self.connections and self.life is Life.TERMINATING:  # noqa: ASYNC110  clients leave when they like
                await asyncio.sleep(0.01)
        if self.life is not Life.TERMINATING:
            return
        await self._down()
        self._on_exit(self, 0)

    def core_died(self) -> None:
        """The engine core is gone; the process notices and exits a moment later."""
        if self.life is Life.RUNNING:
            self.life = Life.CORE_DEAD
            self.say("engine core died")
            self._interrupt(Ending.ERROR)
            self.spawn(self._exit_after_core())

    async def _exit_after_core(self) -> None:
        await asyncio.sleep(self.options.core_death_s)
        await self._down()
        self._on_exit(self, 1)

    def _interrupt(self, ending: Ending) -> None:
        for generation in list(self.live):
            generation.interrupt(ending)

    async def restart(self, down_s: float = 0.0) -> None:
        """Die and come back at the same address as a new process."""
        if self.life is not Life.DOWN:
            await self._down()
        await asyncio.sleep(down_s)
        await self.start()

    # -- connections

    async def _listen(self) -> None:
        if self._server is not None:
            return
        await self._reserve()
        sock, self._reserved = self._reserved, None
        assert sock is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: HttpConnection(self), sock=sock, backlog=_BACKLOG)

    async def _unlisten(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            try:
                await self._reserve(patience_s=10.0)  # the old listener may take a moment to close
            except OSError as error:
                self.say(f"port {self.port} could not be kept: {error.strerror}")

    async def _reserve(self, *, patience_s: float = 0.0) -> None:
        """Bind the port without listening. Raises OSError where someone else has it still after so long."""
        deadline = self.now() + patience_s
        while self._reserved is None:
            sock = socket.socket(socket.AF_INET6 if ":" in self.options.host else socket.AF_INET)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setblocking(False)
            try:
                sock.bind((self.options.host, self.port))
            except OSError:
                sock.close()
                if self.now() >= deadline:
                    raise
                await asyncio.sleep(0.005)
            else:
                self._reserved = sock
                self.port = sock.getsockname()[1]

    async def _close_idle(self) -> None:
        """Close connections that carry no request."""
        for connection in list(self.connections):
            if connection.current is None:
                connection.close()

    def accept(self, conn: HttpConnection) -> bool:
        """A connection came; False when it was reset at once."""
        if self.faults.take(Hook.ACCEPT):
            conn.reset()
            return False
        return True

    def dispatch(self, request: Request) -> None:
        """A request came whole."""
        self._api.dispatch(request)

    def hold(self, release: Callable[[], None]) -> None:
        """Keep something for when the engine is no longer frozen."""
        self._held.append(release)

    def _serve_peer(self, message: Message) -> Message:
        """Answer a decode engine on the side channel."""
        if message["op"] == "hello":
            return {"engine_id": self.engine_id, "agent": self.agent, "name": self.id}
        if message["agent"] != self.agent:
            return {"error": "agent metadata of another process"}
        if self.faults.take(Hook.SERVE, peer=message["by"]):
            return {"error": f"transfer to {message['by']} failed"}
        content = self.ledger.pull(message["id"], by=message["by"], generation=self.generation, now=self.now())
        return {"error": f"unknown request {message['id']}"} if content is None else {"content": content}

    # -- faults

    async def set_fault(self, mode: str, **params: Any) -> Fault:
        """Make a fault active, or act at once where it is an act. Raises ValueError."""
        return await self.add_fault(fault_table.make(mode, params))

    async def add_fault(self, fault: Fault) -> Fault:
        """Make this fault active."""
        if Hook.ACT in fault.row.hooks:
            await self._act(fault)
            return fault
        self.faults.add(fault)
        await self._apply()
        if fault.for_s is not None:
            self.spawn(self._remove_later(fault, fault.for_s))
        return fault

    async def _remove_later(self, fault: Fault, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.faults.remove([fault])
        await self._apply()

    async def clear_faults(self, mode: str | None = None) -> int:
        """End the faults of that name, or all; how many there were."""
        gone = [fault for fault in self.faults.active if mode in (None, fault.row.name)]
        self.faults.remove(gone)
        await self._apply()
        return len(gone)

    async def _act(self, fault: Fault) -> None:
        fault.applied = 1
        name = fault.row.name
        if name == "killed":
            await self.kill()
        elif name == "core-killed":
            self.core_died()
        elif name == "terminated":
            self.spawn(self.terminate(Ending(fault.params["ending"])))
        elif name == "restart":
            self.spawn(self.restart(fault.params["down_s"]))

    async def _apply(self) -> None:
        """Bring the engine into the state that its faults and its life say."""
        if self.life is not Life.DOWN:
            if self.faults.state("refuse") is not None:
                await self._unlisten()
                await self._close_idle()
            else:
                await self._listen()
        if not self.frozen():
            held, self._held = self._held, []
            for release in held:
                release()
        for connection in list(self.connections):
            connection.arm_idle()
        was_running = self.running()
        if self.frozen() or self.faults.state("core-stopped") is not None:
            self._go.clear()
        elif not was_running:
            self._go.set()
            self.side.resume()
            for generation in list(self.live):
                generation.resume()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background until the engine is stopped."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
