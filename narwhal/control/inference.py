"""One inference through the control pool: a prefill leg on one engine whose KV handoff a decode leg on another reads,
or a completion on one engine alone (spec F6, F8).

Decides: what each leg came to, in the words of the outcomes. What that says of an engine is the core's to judge. Every
probe has a prompt of its own: an engine that has a prompt in its cache reads no handoff.
"""

import asyncio
import secrets
from urllib.parse import urlsplit

import aiohttp
import orjson

from narwhal.clock import Clock
from narwhal.connectors.base import ClientRequest, Connector, Handoff, HandoffUnusable, Route
from narwhal.connectors.said import said
from narwhal.connectors.sse import Event, classify, find_end
from narwhal.connectors.vllm_nixl import VllmNixl
from narwhal.control.core.effects import ProbeInference, RunTransfer, Target
from narwhal.control.core.events import InferenceAnswered, LegSeen, TransferAnswered
from narwhal.control.engine_client import LARGEST_ANSWER, EngineClient, NoAnswer, whole
from narwhal.vocabulary import Outcome

# Long enough to fill KV blocks of any usual size, short enough for any context.
PROMPT_NUMBERS = 64

_STATUSES = {
    401: Outcome.WRONG_IDENTITY,
    403: Outcome.WRONG_IDENTITY,
    404: Outcome.WRONG_IDENTITY,
    408: Outcome.HTTP_408,
    429: Outcome.HTTP_429,
}

CONNECTOR: Connector = VllmNixl()


class _Leg:
    """One leg under way: its words and its time."""

    def __init__(self, what: str, clock: Clock) -> None:
        self.what = what
        self._clock = clock
        self._began = clock.monotonic()

    def seen(self, outcome: Outcome, detail: str = "", *, status: int = 0, pace: "_Pace | None" = None) -> LegSeen:
        """How it ended, and at which pace its tokens had come."""
        elapsed_s = self._clock.monotonic() - self._began
        step_s, steps = pace.seen() if pace is not None else (0.0, 0)
        return LegSeen(outcome=outcome, status=status, detail=detail, elapsed_s=elapsed_s, step_s=step_s, steps=steps)

    def refused(self, status: int, body: bytes) -> LegSeen:
        """It was answered with another status than 200."""
        outcome = _STATUSES.get(status)
        if outcome is None:
            outcome = Outcome.CLIENT_ERROR if 400 <= status < 500 else Outcome.HTTP_5XX
        return self.seen(outcome, f"{self.what} answered {status}: {said(body)}", status=status)


async def probe_inference(client: EngineClient, request: ProbeInference, clock: Clock) -> InferenceAnswered:
    """One inference probe."""
    transfer = await _made(client, request, clock, "inference probe")
    return InferenceAnswered(
        engine=request.engine,
        incarnation=request.incarnation,
        number=request.number,
        produced=transfer.produced,
        consumed=transfer.consumed,
    )


async def run_transfer(client: EngineClient, request: RunTransfer, clock: Clock) -> TransferAnswered:
    """One KV transfer of a gate."""
    transfer = await _made(client, request, clock, "KV transfer")
    return TransferAnswered(
        engine=request.engine,
        incarnation=request.incarnation,
        number=request.number,
        produced=transfer.produced,
        consumed=transfer.consumed,
    )


async def _made(client: EngineClient, request: ProbeInference | RunTransfer, clock: Clock, what: str) -> "_Transfer":
    """Its legs, run. One seat of the control pool is enough: one leg runs after the other."""
    transfer = _Transfer(client, request, clock)
    try:
        async with client.seat(what):
            await transfer.run()
    except NoAnswer as nothing:
        transfer.consumed = LegSeen(outcome=nothing.outcome, detail=str(nothing))
    return transfer


def _prompt(request: ProbeInference | RunTransfer) -> ClientRequest:
    """A client's request that nobody has made before."""
    words = " ".join(str(100 + secrets.randbelow(900)) for _ in range(PROMPT_NUMBERS))
    body = {
        "model": request.model,
        "prompt": words,
        "max_tokens": request.tokens,
        "min_tokens": request.tokens,
        "temperature": 0,
        "stream": True,
    }
    return CONNECTOR.parse(Route.COMPLETIONS, orjson.dumps(body))


class _Transfer:
    """The legs of one probe."""

    def __init__(self, client: EngineClient, request: ProbeInference | RunTransfer, clock: Clock) -> None:
        self.produced: LegSeen | None = None
        self.consumed: LegSeen | None = None
        self._client = client
        self._request = request
        self._clock = clock
        self._prompt = _prompt(request)

    async def run(self) -> None:
        """Runs what the request asks for."""
        request = self._request
        if request.producer is None:
            self.consumed = await self._decode(request.consumer, self._prompt.raw)
            return
        self.consumed = await self._unreachable(request.consumer)
        if self.consumed is None:
            self.produced, handoff = await self._prefill(request.producer)
            if handoff is not None:
                body = CONNECTOR.decode_body(self._prompt, handoff)
                self.consumed = await self._decode(request.consumer, body)

    async def _unreachable(self, target: Target) -> LegSeen | None:
        """How the consumer cannot be reached; None when it can. Asked before there is KV that it would have to read."""
        leg = _Leg(f"connecting to {target.engine}", self._clock)
        url = urlsplit(target.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        bound_s = self._client.settings.connect_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                _, writer = await asyncio.open_connection(url.hostname, port)
        except TimeoutError:
            return leg.seen(Outcome.CONNECT_TIMEOUT, f"{leg.what}: no connection within {bound_s:g} s")
        except OSError as error:
            nothing = self._client.told(leg.what, error, bound_s)
            return leg.seen(nothing.outcome, str(nothing))
        writer.close()
        return None

    def _post(self, target: Target, body: bytes, leg: str) -> "aiohttp.client._RequestContextManager":
        return self._client.fresh.post(
            target.url.rstrip("/") + Route.COMPLETIONS,
            data=body,
            headers={
                "Content-Type": "application/json",
                "X-Request-Id": f"probe-{self._request.engine}-{self._request.number}-{leg}",
            },
            allow_redirects=False,
        )

    async def _prefill(self, target: Target) -> tuple[LegSeen, Handoff | None]:
        leg = _Leg("prefill", self._clock)
        bound_s = self._request.silence_s
        try:
            async with asyncio.timeout(bound_s):
                async with self._post(target, CONNECTOR.prefill_body(self._prompt), "prefill") as response:
                    body = await whole(response)
        except (aiohttp.ClientError, OSError) as error:
            nothing = self._client.told(leg.what, error, bound_s)
            late = nothing.outcome is Outcome.READ_TIMEOUT
            return leg.seen(Outcome.PREFILL_TIMEOUT if late else nothing.outcome, str(nothing)), None
        if response.status != 200:
            return leg.refused(response.status, body), None
        try:
            handoff = CONNECTOR.handoff(body)
        except HandoffUnusable as error:
            return leg.seen(Outcome.HANDOFF_UNUSABLE, f"{leg.what}: {error}", status=200), None
        return leg.seen(Outcome.HANDOFF, f"{leg.what}: complete", status=200), handoff

    async def _decode(self, target: Target, body: bytes) -> LegSeen:
        """Streams a completion to its end. Each silence is bounded, and all of them together."""
        leg = _Leg("decode", self._clock)
        bound_s = self._request.silence_s
        stream, pace = ProbedStream(), _Pace(self._clock)
        try:
            async with (
                asyncio.timeout(bound_s * (self._request.tokens + 1)),
                asyncio.timeout(bound_s) as silence,
                self._post(target, body, "decode") as response,
            ):
                if response.status != 200:
                    return leg.refused(response.status, await whole(response))
                stream.begun = True
                async for chunk in response.content.iter_any():
                    over = stream.feed(chunk)
                    pace.tokens(stream.tokens)
                    if over:
                        break
                    if stream.token:  # what comes before the first token is no progress
                        silence.reschedule(asyncio.get_running_loop().time() + bound_s)
                stream.complete()
        except (aiohttp.ClientError, OSError) as error:
            return _interrupted(leg, stream, self._client.told(leg.what, error, bound_s))
        return leg.seen(stream.outcome, f"{leg.what}: {stream.words}", status=200, pace=pace)


def _interrupted(leg: _Leg, stream: "ProbedStream", nothing: NoAnswer) -> LegSeen:
    """The stream's end when the connection, or our patience, ended it."""
    outcome = nothing.outcome
    if outcome is Outcome.READ_TIMEOUT:
        outcome = Outcome.STREAM_SILENT if stream.token else Outcome.FIRST_TOKEN_TIMEOUT
    elif stream.begun and outcome is not Outcome.LOCAL:
        outcome = Outcome.STREAM_CUT
    return leg.seen(outcome, str(nothing), status=200 if stream.begun else 0)


class _Pace:
    """When the tokens of a stream came: from the first to the last, those that came with the first apart."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def tokens(self, count: int) -> None:
        """So many have come until now."""
        if count > self._last[1]:
            self._last = (self._clock.monotonic(), count)
            self._first = self._first or self._last

    def seen(self) -> tuple[float, int]:
        """Seconds for each token after the first, and how many those were; nothing where all came at once."""
        if self._first is None or self._last[1] == self._first[1]:
            return 0.0, 0
        steps = self._last[1] - self._first[1]
        return (self._last[0] - self._first[0]) / steps, steps


class ProbedStream:
    """What a stream has come to so far. `outcome` and `words` are how it ended, if nothing follows. It judges as a
    proxy's relay does: an engine must not fail its probes for what it serves clients with."""

    def __init__(self) -> None:
        self.begun = False  # the response's head has come
        self.tokens = 0
        self.outcome = Outcome.STREAM_CUT
        self.words = "closed without its terminal marker"
        self._over = False
        self._buffer = b""
        self._scanned = 0

    @property
    def token(self) -> bool:
        """Whether the first token has come."""
        return self.tokens > 0

    def feed(self, data: bytes) -> bool:
        """Takes bytes; True once nothing that follows can change the outcome."""
        buffer, at = self._buffer + data, 0
        while not self._over and (end := find_end(buffer, at, self._scanned)) != -1:
            self._scanned = 0
            self._take(buffer[at:end])
            at = end
        # Cut once: cut after each event, a piece full of tiny ones would keep the event loop for half a second.
        self._buffer = buffer[at:]
        self._scanned = len(self._buffer)
        if not self._over and len(self._buffer) > LARGEST_ANSWER:
            self._end(Outcome.STREAM_MALFORMED, "an event without an end")
        return self._over

    def complete(self) -> None:
        """The engine has ended its answer. The marker needs no blank line then: nothing can follow it."""
        if not self._over and classify(self._buffer, token_seen=self.token) is Event.MARKER:
            self._take(self._buffer)

    def _take(self, event: bytes) -> None:
        kind = classify(event, token_seen=self.token)
        if kind is Event.TOKEN or (kind is Event.OTHER and self.tokens):  # later ones are not told apart
            self.tokens += 1
        elif kind is Event.MARKER and self.token:
            self._end(Outcome.STREAM_COMPLETE, "complete")
        elif kind is Event.MARKER:
            self._end(Outcome.MARKER_WITHOUT_TOKEN, "the terminal marker came before any token")
        elif kind is Event.ERROR:
            self._end(Outcome.ERROR_EVENT, f"an error event: {said(event)}")
        elif kind is Event.GIVEN_UP:
            self._end(Outcome.ERROR_EVENT, "the engine gave the answer up (finish reason abort)")
        elif kind is Event.BROKEN:
            self._end(Outcome.STREAM_MALFORMED, f"not an event: {said(event)}")

    def _end(self, outcome: Outcome, words: str) -> None:
        self._over, self.outcome, self.words = True, outcome, words
