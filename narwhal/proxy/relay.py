"""Performs one request's attempt: places its legs, speaks to the engines, passes the answer on, tells what it saw.

Decides nothing about retries (`attempt.py`), outcomes (`outcome.py`), connections (`exchange.py`) or bytes
(`stream.py`): it carries their answers from one to the other.
"""

import asyncio
import math
import re
from collections.abc import Awaitable

import structlog

from narwhal.config import ProxySettings
from narwhal.connectors.base import ClientRequest, Handoff, HandoffUnusable
from narwhal.connectors.said import said
from narwhal.connectors.sse import answer_given_up
from narwhal.connectors.usage import OUTPUT_TOKENS, PROMPT_TOKENS, tokens_said
from narwhal.placement import EngineEntry
from narwhal.proxy.attempt import Attempt, Backoff, Fail, Fault, LegEnd, Pass, Policy, StartLeg, Step
from narwhal.proxy.client import Client
from narwhal.proxy.connection import Answer, EngineConnection, Result
from narwhal.proxy.counting import count
from narwhal.proxy.errors import Reply, reply
from narwhal.proxy.exchange import Ask, Exchange
from narwhal.proxy.outcome import LegKind, of_status
from narwhal.proxy.pace import attempt_wait_s
from narwhal.proxy.shared import Shared
from narwhal.proxy.stream import StreamRelay
from narwhal.proxy.witness import Leg
from narwhal.vocabulary import NotReady, Outcome, Phase

RETRY_AFTER = re.compile(r"[0-9]{1,6}")

_OK = 200
_UNAVAILABLE = 503
# The result of a decode leg whose handoff grew too old to be sent (spec V6): nothing was, and nobody is to blame.
EXPIRED = LegEnd(Outcome.LOCAL, detail="the KV handoff is too old")
# Where an engine answers as another would (spec R9): so long is enough for control's check and probe.
AS_ANOTHER_S = 5.0
# An answer with status 200 that is none.
GIVEN_UP = LegEnd(Outcome.ANSWER_CUT, detail="the engine gave the answer up (finish reason abort)")

log = structlog.get_logger(__name__)


class Relay:
    """One admitted request. `run` ends it exactly once; then `fault` says what became of it."""

    __slots__ = (
        "_answer",
        "_attempt",
        "_client",
        "_cut",
        "_exchange",
        "_first_pull",
        "_first_token_at",
        "_handoff",
        "_producer",
        "_request",
        "_settings",
        "_shared",
        "_stream",
        "_tokens",
        "_unread",
        "fault",
        "stream_failed",
    )

    def __init__(self, shared: Shared, client: Client, request: ClientRequest) -> None:
        settings = shared.feed.settings
        self._shared = shared
        self._client = client
        self._request = request
        self._settings: ProxySettings = settings
        serving = settings.serving
        policy = Policy(serving.max_attempts, serving.handoff_max_age_s)
        self._attempt = Attempt(policy, shared.budget, client.due)
        self._exchange = Exchange(shared, client, request.route, settings)
        self._stream: StreamRelay | None = None
        self._handoff: Handoff | None = None
        self._producer: EngineEntry | None = None
        self._unread = ""  # the producer whose handoff has not been read yet
        self._answer: Answer | None = None
        self._first_token_at = 0.0
        self._first_pull = False
        self._cut = False
        self._tokens = 0  # of the prompt, where an engine's cap asks for them
        self.fault: Fault | None = None
        self.stream_failed = False  # whether output had begun when it failed

    @property
    def retries(self) -> int:
        """Attempts after the first that its policy allowed."""
        return self._attempt.retries

    @property
    def passed_error(self) -> bool:
        """Whether the client got an engine's own error (4xx)."""
        return self._answer is not None and self._answer.status != _OK

    async def run(self) -> None:
        """Serve the request. The client's disconnect cancels it: then every leg is closed and reported so."""
        self._client.connection.stream = self
        try:
            step: Step = self._attempt.begin()
            while True:
                if isinstance(step, StartLeg):
                    step = await (self._prefill(step) if step.phase is Phase.PREFILL else self._decode(step))
                elif isinstance(step, Backoff):
                    await asyncio.sleep(step.until - self._shared.clock.monotonic())
                    step = self._attempt.resume()
                else:
                    break
            await self._finish(step)
        except asyncio.CancelledError:
            self._attempt.cancelled()
            raise
        finally:
            self._read()
            if self._handoff is not None:
                self._shared.metrics.handoffs_abandoned += 1
            self._client.connection.stream = None
            self._stream = None  # the two refer to each other

    # --- told by the client's connection ---

    def client_slow(self) -> None:
        """The client does not read: stop reading from the engine."""
        self._exchange.pause()

    def client_reads(self) -> None:
        """The client has caught up."""
        self._exchange.resume()

    def client_gone(self) -> None:
        """The connection is lost: the engine sees it now (spec V7)."""
        self._exchange.abort()

    # --- told by a proxy on its way out ---

    def cut(self) -> bool:
        """Grace is over: end what runs. False when no leg runs that could be ended."""
        self._cut = True
        return self._exchange.cut(LegEnd(Outcome.LOCAL, detail="the proxy is stopping"))

    # --- told by the stream ---

    def first_token(self) -> None:
        """From now on silence is what ends the leg, and the first transfer of a pair has been seen."""
        self._read()
        now = self._first_token_at = self._shared.clock.monotonic()
        # Choices come side by side, in one step of the engine: what their events take is no time per token.
        self._exchange.first_token(now, None if self._request.several else self._stream)

    def output(self) -> None:
        """The client gets its first bytes: nothing is tried again any more."""
        self._client.status = _OK
        self._shared.metrics.ttft_seconds.observe(self._shared.clock.monotonic() - self._client.arrived_at)

    # --- legs ---

    async def _prefill(self, step: StartLeg) -> Step:
        if not self._tokens and self._shared.chooser.counts_tokens():
            step = await self._count(step)
        entry = self._shared.chooser.choose(step.phase, step.avoid, self._tokens)
        if isinstance(entry, Fault):
            return self._attempt.unplaced(entry)
        shared = self._shared
        leg = Leg(entry, Phase.PREFILL, LegKind.PREFILL, shared.clock.monotonic())
        result = await self._run(leg, step, shared.connector.prefill_body(self._request))
        if isinstance(result, Answer) and result.status == _OK:
            try:
                handoff = shared.connector.handoff(result.body)
            except HandoffUnusable as error:
                return self._failed(leg, LegEnd(Outcome.HANDOFF_UNUSABLE, detail=str(error)))
            shared.witness.succeeded(leg, Outcome.HANDOFF)
            self._handoff = handoff
            self._producer = entry
            self._unread = entry.id
            shared.inflight.produced(entry.id)
            shared.measuring.prefilled(
                leg,
                shared.clock.monotonic(),
                wait_s=leg.started_at - self._client.arrived_at if step.attempt == 1 else None,
                prompt_tokens=tokens_said(result.body, PROMPT_TOKENS),
            )
            # Counted from before it came: while this process was stopped the engine's lease ran on.
            return self._attempt.prefilled(entry.id, max(leg.started_at, result.not_before))
        return self._other(leg, result)

    async def _count(self, step: StartLeg) -> StartLeg:
        """Find out how long the prompt is. An engine that failed to say so is avoided."""
        shared = self._shared
        counted = await count(
            self._request,
            step,
            ask=self._settings.engine.tokenize,
            connector=shared.connector,
            chooser=shared.chooser,
            clock=shared.clock,
            run=self._run,
        )
        self._tokens = counted.tokens
        if counted.failed is None:
            return step
        leg, end = counted.failed
        shared.witness.failed(leg, end, producer=None, request_id=self._client.request_id, attempt=step.attempt)
        return self._attempt.avoid(step, leg.entry.id)

    async def _decode(self, step: StartLeg) -> Step:
        entry = self._shared.chooser.choose(step.phase, step.avoid, self._tokens)
        if isinstance(entry, Fault):
            return self._attempt.unplaced(entry)
        shared, producer, handoff = self._shared, self._producer, self._handoff
        if producer is None or handoff is None:
            raise RuntimeError("a decode leg without a handoff")
        kind = LegKind.FIRST_TOKEN if self._request.stream else LegKind.ANSWER
        leg = Leg(entry, Phase.DECODE, kind, shared.clock.monotonic())
        self._first_pull = shared.legs.pairs.first(producer, entry)
        if self._request.several:
            load = shared.connector.load_body(self._request, handoff)
            result = await self._run(leg, step, self._request.raw, load)
        else:
            result = await self._run(leg, step, shared.connector.decode_body(self._request, handoff))
        self._read()
        if result is EXPIRED:
            now = shared.clock.monotonic()
            log.warning("handoff_expired", request_id=self._client.request_id, engine=entry.id, producer=producer.id)
            return self._retried(self._attempt.expired(now, self._wait_s()), "handoff_expired")
        if self._handoff is None and not (isinstance(result, LegEnd) and result.idle_closed):
            shared.legs.pairs.saw(producer, entry)
        if isinstance(result, LegEnd) and result.outcome is Outcome.STREAM_COMPLETE:
            shared.witness.succeeded(leg, Outcome.STREAM_COMPLETE)
            self._measure()
            return self._attempt.answered()
        if isinstance(result, Answer) and result.status == _OK and answer_given_up(result.body):
            return self._failed(leg, GIVEN_UP)
        if isinstance(result, Answer) and result.status == _OK:
            shared.witness.succeeded(leg, Outcome.ANSWER_COMPLETE)
            if not self._request.several:
                shared.measuring.answered(leg, shared.clock.monotonic(), tokens_said(result.body, OUTPUT_TOKENS))
            self._answer = result
            return self._attempt.answered()
        return self._other(leg, result)

    def _read(self) -> None:
        """The handoff has been read, or will not be: its producer may go (spec R4)."""
        if self._unread:
            self._shared.inflight.read(self._unread)
            self._unread = ""

    def _other(self, leg: Leg, result: Result) -> Step:
        """A leg that did not do its work: an answer that is not 200, or no answer."""
        if isinstance(result, LegEnd):
            return self._failed(leg, result)
        outcome = of_status(result.status)
        if outcome is Outcome.CLIENT_ERROR:
            self._shared.witness.succeeded(leg, outcome)
            self._answer = result
            self._abandoned(leg)
            return self._attempt.answered()
        wait = result.header(b"retry-after")
        named = RETRY_AFTER.fullmatch(wait)
        if outcome is Outcome.HTTP_429 or (result.status == _UNAVAILABLE and named):
            self._shared.vigil.detour(leg.entry.id, float(wait) if named else 0.0, now=self._shared.clock.monotonic())
        elif outcome is Outcome.WRONG_IDENTITY:
            # Answering at once it has the least in flight, and would be the first choice until control has looked.
            self._shared.vigil.detour(leg.entry.id, AS_ANOTHER_S, now=self._shared.clock.monotonic())
        return self._failed(
            leg,
            LegEnd(
                outcome,
                result.status,
                wait if named else "",
                detail=f"HTTP {result.status}: {said(result.body)}",
            ),
        )

    async def _run(self, leg: Leg, step: StartLeg, body: bytes, load: bytes = b"") -> Result:
        """Run a leg to its end, with its residency around it. `load`: what the engine is asked before, to have the
        handoff in its own cache."""
        shared, engine = self._shared, leg.entry.id
        shared.inflight.begin(engine, self._tokens)
        try:
            if load and (failed := await self._load(leg, step, load)) is not None:
                return failed
            return await self._ask(leg, step, body)
        except asyncio.CancelledError:
            self._exchange.abort()
            shared.witness.neutral(leg, Outcome.LOCAL if self._cut else Outcome.CANCELLED)
            raise
        finally:
            self._exchange.over()
            shared.inflight.end(engine, self._tokens)

    def _ask(self, leg: Leg, step: StartLeg, body: bytes) -> Awaitable[Result]:
        producer = self._producer if leg.phase is Phase.DECODE else None
        due = self._attempt.handoff_due if producer is not None else math.inf
        return self._exchange.ask(Ask(leg, step, body, producer, due, self._first_pull), self)

    async def _load(self, leg: Leg, step: StartLeg, body: bytes) -> Result | None:
        """Have the decode engine read the handoff, once, for all choices that it is asked for next; what went wrong, or
        None. They find the KV in its cache, and what is not there any more it computes itself."""
        result = await self._ask(leg._replace(kind=LegKind.LOAD), step, body)
        if not isinstance(result, Answer) or result.status != _OK:
            return result
        if answer_given_up(result.body):
            return GIVEN_UP
        if self._producer is not None:
            self._shared.legs.pairs.saw(self._producer, leg.entry)
        self._read()
        self._first_pull = False
        self._producer = None
        self._attempt.loaded()
        return None

    def sending(self, leg: Leg, connection: EngineConnection, now: float) -> StreamRelay | LegEnd | None:
        """A leg's request is about to be written: with it goes the handoff, if it is still young enough."""
        if leg.phase is Phase.DECODE and self._handoff is not None:
            if not self._attempt.may_dispatch(now):
                return EXPIRED
            self._attempt.dispatched()
            self._handoff = None
        if leg.kind is not LegKind.FIRST_TOKEN:
            return None
        client = self._client
        if client.transport is None:
            connection.release()
            raise asyncio.CancelledError
        self._stream = StreamRelay(connection, self, client.transport, client.stream_head(), chunked=client.http11)
        return self._stream

    # --- what was seen ---

    def _failed(self, leg: Leg, end: LegEnd) -> Step:
        """A leg failed: ask the machine what follows, and tell."""
        shared, attempt = self._shared, self._attempt
        number, output = attempt.number, self._stream is not None and self._stream.output
        now = shared.clock.monotonic()
        step = attempt.leg_failed(leg.entry.id, end, output=output, now=now, wait_s=self._wait_s())
        if end.idle_closed and isinstance(step, StartLeg):
            return step  # no failure (spec V9): one more attempt follows
        producer = self._producer if leg.phase is Phase.DECODE else None
        shared.witness.failed(leg, end, producer=producer, request_id=self._client.request_id, attempt=number)
        return self._retried(step, end.outcome.value)

    def _wait_s(self) -> float:
        """How long to wait before another attempt."""
        serving = self._settings.serving
        return attempt_wait_s(self._attempt.retries, base_s=serving.retry_base_s, cap_s=serving.retry_cap_s)

    def _retried(self, step: Step, reason: str) -> Step:
        if isinstance(step, Backoff):
            self._shared.metrics.retry(reason)
            self._stream = None
            if self._handoff is not None:
                self._handoff = None
                self._shared.metrics.handoffs_abandoned += 1
        return step

    def _abandoned(self, leg: Leg) -> None:
        """The decode engine refused the request before it read the handoff."""
        if leg.phase is Phase.DECODE and self._producer is not None:
            self._shared.metrics.handoffs_abandoned += 1

    def _measure(self) -> None:
        stream = self._stream
        if stream is not None and stream.events > 1 and not self._request.several:
            spent = self._shared.clock.monotonic() - self._first_token_at
            self._shared.metrics.tpot_seconds.observe(spent / (stream.events - 1))

    # --- the end ---

    async def _finish(self, step: Fail | Pass) -> None:
        client, stream = self._client, self._stream
        if isinstance(step, Fail):
            self.fault = Fault.CLOSED if self._cut else step.fault
            told = self._told(step)
            if stream is None or not stream.output:
                client.refuse(told)
            else:
                self.stream_failed = True
                stream.fail(told.event)
        elif self._answer is not None:
            answer = self._answer
            extra = ""
            if b"content-encoding" in answer.head.lower():
                extra = f"Content-Encoding: {answer.header(b'content-encoding')}\r\n"
            client.send(answer.status, answer.body, answer.header(b"content-type") or "application/json", extra=extra)
        if client.connection.writing_paused:
            await client.connection.drained(0.0 if self._cut else client.due - self._shared.clock.monotonic())

    def _told(self, step: Fail) -> Reply:
        if self._cut:
            return reply(Fault.CLOSED, code=NotReady.DRAINING.value)
        return reply(step.fault, phase=step.phase, retry_after=step.retry_after)
