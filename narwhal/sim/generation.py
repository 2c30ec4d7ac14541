"""One completion on a simulated engine, from the parsed body to the last byte."""

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

from narwhal.sim import misbehave, text
from narwhal.sim.faults import Hook
from narwhal.sim.kv import Handoff
from narwhal.sim.openai_answer import aborted_answer, answer, fingerprint
from narwhal.sim.openai_api import INTERNAL, ApiError, Ask, Json, error_event, parse, refused_late
from narwhal.sim.openai_stream import Naming, Timing, aborted_events, roles, script
from narwhal.sim.records import Ending, Outcome, Record, RequestPhase
from narwhal.sim.stream import Player
from narwhal.sim.transfer import TransferFailed
from narwhal.sim.wire import JSON, Request, chunk, head

if TYPE_CHECKING:
    from narwhal.sim.engine import Engine

_CORE_ERROR = error_event("EngineCore encountered an issue. See stack trace (above) for the root cause.")


def _hex(bits: int) -> str:
    """A name that nobody else has; no secret, so the system's random source, a system call, is not asked."""
    return f"{random.getrandbits(bits):0{bits // 4}x}"


class _CoreDies(Exception):
    """What this request carries kills the engine core."""


class Generation:
    """A completion in flight. It ends once: answered, disconnected, by a fault, or with the engine."""

    def __init__(self, engine: "Engine", request: Request, record: Record, fields: Json) -> None:
        self._engine = engine
        self._request = request
        self._conn = request.conn
        self._record = record
        self._fields = fields
        self._player: Player | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadly = False
        """The engine dies when this request's client leaves."""
        self._over = False
        self._aborted: Callable[[], bytes] | None = None
        """What the answer ends with when it is aborted: the last events of a stream, or the whole body."""

    def start(self) -> None:
        """Begin, as a task of its own."""
        self._request.on_disconnect = self._disconnected
        self._engine.live.add(self)
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ran)

    def _ran(self, task: asyncio.Task[None]) -> None:
        """An error of the simulation itself is told and ends the request; it does not become a hang."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._engine.say(f"error in the simulation: {error!r}")
            self.interrupt(Ending.ERROR)

    # -- ends

    def _end(self, outcome: Outcome) -> None:
        self._over = True
        self._request.on_disconnect = None
        if self._player is not None:
            self._player.cancel()
            self._record.tokens = self._player.tokens
        self._record.end(outcome, self._engine.now())
        self._engine.live.discard(self)

    def _disconnected(self) -> None:
        self._end(Outcome.DISCONNECTED)
        if self._task is not None:
            self._task.cancel()
        if self._deadly:
            self._engine.core_died()

    def _streamed(self, whole: bool) -> None:
        """The player has come to an end of its own."""
        self._end(Outcome.ANSWERED if whole else Outcome.FAULTED)
        if whole:
            self._conn.finished()

    def interrupt(self, ending: Ending) -> None:
        """The engine ends. An abort before there is anything to abort is an error."""
        if self._over:
            return
        if self._player is not None:
            self._player.cancel()
        if ending is not Ending.SILENT:
            self._break_off(self._aborted if ending is Ending.ABORT else None)
        self._end(Outcome.TERMINATED)
        if ending is not Ending.SILENT:
            self._conn.finished()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _break_off(self, aborted: Callable[[], bytes] | None) -> None:
        if self._player is not None:
            self._player.abandon(_CORE_ERROR if aborted is None else aborted())
        elif aborted is None:
            self._send_error(INTERNAL)
        else:
            body = aborted()
            self._record.status = 200
            self._conn.write(head(200, JSON, len(body)) + body)

    def resume(self) -> None:
        """The engine runs again after a stop."""
        if self._player is not None:
            self._player.resume()

    def _send_error(self, error: ApiError) -> None:
        self._record.status = error.status
        self._conn.write(head(error.status, JSON, len(error.body), extra=error.headers) + error.body)

    def _refuse(self, error: ApiError) -> None:
        """Answer an error: in the body, or where a stream has its headers as an event of it."""
        if self._player is not None:
            self._player.finish_with_error(b"data: " + error.body + b"\n\n")
            return
        self._send_error(error)
        self._end(Outcome.ANSWERED)
        self._conn.finished()

    # -- the work

    async def _run(self) -> None:
        engine = self._engine
        try:
            ask = parse(self._fields, chat="chat" in self._request.path, options=engine.options, model=engine.model)
        except ApiError as error:
            return self._refuse(error)
        if ask.stream:
            self._open_stream()
        refusal = refused_late(ask)
        if refusal is not None:
            return self._refuse(refusal)
        request_id = self._request.header(b"x-request-id") or _hex(128)
        ident = ("chatcmpl-" if ask.chat else "cmpl-") + request_id
        mark = fingerprint(engine.options.version, ask.model)
        naming = Naming(ident=ident, created=int(engine.clock.wall()), fingerprint=mark)
        try:
            await self._generate(ask, naming, request_id)
        except TransferFailed as failure:
            engine.say(f"transfer failed: {failure}")
            if not self._over:
                self._fail(ask, naming)
        except _CoreDies:
            engine.core_died()

    def _open_stream(self) -> None:
        """The headers go out before anything else happens."""
        self._record.status = 200
        self._player = Player(self._conn, running=self._engine.running, ended=self._streamed)
        self._player.headers()

    def _fail(self, ask: Ask, naming: Naming) -> None:
        """The request failed in the engine core; a chat's role is said all the same."""
        if self._player is None:
            self._refuse(INTERNAL)
        else:
            said = b"".join(chunk(step.data) for step in roles(ask, naming, ("",) * (len(ask.prompts) * ask.n)))
            self._conn.write(said)
            self._player.finish_with_error(error_event("Internal server error"))

    async def _generate(self, ask: Ask, naming: Naming, request_id: str) -> None:
        engine = self._engine
        await engine.until_running()
        timing = Timing(engine.options, self._record.number, engine.slowed())
        contents, wait_s = await self._contents(ask, timing)
        if self._player is not None:
            await self._wait(wait_s)
            self._aborted = lambda: aborted_events(ask, naming, contents)
            written = script(ask, naming, contents, timing)
            faults = engine.faults.take(Hook.STREAM, self._record.phase)
            self._player.start(misbehave.bend(written, faults) if faults else written)
            return
        body, tokens = answer(ask, naming.ident, naming.created, contents, naming.fingerprint)
        self._aborted = lambda: orjson.dumps(aborted_answer(body))
        steps = max(0, tokens // len(contents) - 1)
        await self._wait(wait_s + sum(timing.step_s() for _ in range(steps)))
        self._record.tokens = tokens
        await self._answer(body, self._handoff(ask, naming.ident, request_id, contents[0]))

    async def _wait(self, seconds: float) -> None:
        """The engine works so long; a stop of the engine comes on top."""
        if seconds > 0:
            await asyncio.sleep(seconds)
        if not self._engine.running():
            await self._engine.until_running()

    async def _contents(self, ask: Ask, timing: Timing) -> tuple[tuple[str, ...], float]:
        """The KV content of each choice, and the seconds from here to the first token."""
        local = tuple(content for raw in ask.prompts for content in [text.content_of(ask.model, raw)] * ask.n)
        prefill_s = timing.prefill_s(sum(map(text.count_tokens, ask.prompts)))
        if self._record.phase is not RequestPhase.DECODE or ask.kv is None:
            return local, prefill_s
        await self._judge(ask, ask.kv)
        if ask.kv["remote_engine_id"] == self._engine.engine_id:  # the handoff stays pinned either way
            if self._engine.options.home_handoffs == "fail":
                raise TransferFailed("the producer is this engine")
            return local, timing.step_s()  # from the prefix cache
        try:
            # Each choice reads for itself, and the producer frees the blocks after the first reading.
            pulled = [await self._engine.transfers.pull(ask.kv) for _ in range(ask.n)]
        except TransferFailed:
            if self._engine.options.kv_load_failure_policy == "fail":
                raise
            return local, prefill_s
        return (*pulled, *local[ask.n :]), timing.step_s()

    async def _judge(self, ask: Ask, kv: Json) -> None:
        """What a handoff that is not as it must be does to the engine. Raises _CoreDies, or never returns."""
        blocks = kv.get("remote_block_ids")
        well_formed = (
            isinstance(kv.get("remote_engine_id"), str)
            and kv["remote_engine_id"] != ""
            and isinstance(kv.get("remote_host"), str)
            and isinstance(kv.get("remote_port"), int)
            and isinstance(blocks, list)
            and all(
                isinstance(group, list) and all(isinstance(block, int) and block >= 0 for block in group)
                for group in blocks
            )
        )
        needed = self._engine.ledger.blocks_for(text.count_tokens(ask.prompts[0]))
        if not well_formed or not isinstance(blocks, list) or any(len(group) < needed for group in blocks or [[]]):
            raise _CoreDies
        if not isinstance(kv.get("remote_request_id"), str):
            self._deadly = True
            await asyncio.get_running_loop().create_future()

    def _handoff(self, ask: Ask, ident: str, request_id: str, content: str) -> Json | None:
        """Pin the KV of a prefill leg and describe it."""
        if self._record.phase is not RequestPhase.PREFILL:
            return None
        engine = self._engine

        def issue() -> Handoff:
            return engine.ledger.issue(
                f"{ident}-{_hex(32)}" if ask.chat else f"{ident}-0-{_hex(32)}",
                request_id=request_id,
                engine_id=engine.engine_id,
                generation=engine.generation,
                tokens=text.count_tokens(ask.prompts[0]),
                content=content,
                now=engine.now(),
            )

        # Each choice pins KV of its own, and only one of them is told of: the others stay until their leases end.
        issued, *_ = [issue() for _ in range(ask.n)]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [issued.blocks] if issued.blocks else [],
            "remote_engine_id": engine.engine_id,
            "remote_request_id": issued.id,
            "remote_host": engine.options.host,
            "remote_port": engine.side.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": issued.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    async def _answer(self, body: Json, handoff: Json | None) -> None:
        """Send an answer that is not streamed."""
        engine, record = self._engine, self._record
        record.status = 200
        body["kv_transfer_params"] = handoff
        bad = engine.faults.take(Hook.HANDOFF, record.phase) if handoff is not None else []
        raw = misbehave.bad_handoff(body, bad[0].params["variant"]) if bad else orjson.dumps(body)
        faults = engine.faults.take(Hook.BODY, record.phase)
        if not faults:
            self._conn.write(head(200, JSON, len(raw)) + raw)
        else:
            sent = await misbehave.send_bent(self._conn, raw, faults)
            if sent == "hang":
                await asyncio.get_running_loop().create_future()
            if sent == "cut":
                return self._end(Outcome.FAULTED)
        self._end(Outcome.ANSWERED)
        self._conn.finished()
        return None
