"""A decode stream on its way to the client: an engine's bytes in, the same bytes out, watched for how they end.

Decides: when output begins, and how a stream has ended. Output begins with the first token, never before; a chat's
first event that only names the role waits for the next one, since engines send it before they know whether the KV
arrives, and until then the request may be tried again (spec V4). Other events are held back until they are whole,
nothing longer. It cannot see: engines, retries, reports.
"""

import asyncio
from typing import Protocol

from narwhal.connectors.said import said
from narwhal.connectors.sse import ERROR_KEY, GIVEN_UP, Event, classify, find_end, opens_only
from narwhal.proxy.attempt import LegEnd
from narwhal.proxy.outcome import OUTCOMES, LegKind, Seen
from narwhal.vocabulary import Outcome

MAX_EVENT_BYTES = 4_194_304  # one event, or all that comes before output begins

_FAST_START = b"data: {"
_END = b"\n\n"
_LF = b"\n"
_EOL = b"\r\n"
_EVENT_AND_CHUNK_END = _END + _EOL
_LONGEST_SIZE = 10  # bytes of a chunk's size line: eight digits and its end
_LAST = frozenset({Event.MARKER, Event.ERROR, Event.GIVEN_UP})
LAST_CHUNK = b"0\r\n\r\n"


def _is_plain_event(data: bytes) -> bool:
    """Whether this is one whole event that is neither an error nor the marker.

    By `find`, not by `in`: that would first try whether it was asked for a number, and cost half as much again.
    """
    return (
        data.startswith(_FAST_START)
        and data.find(_LF) == len(data) - 2
        and data.endswith(_END)
        and data.find(ERROR_KEY) < 0
        and data.find(GIVEN_UP) < 0
    )


def _whole_chunk(data: bytes, at: int) -> int:
    """The size of the chunk at `at`, framing included, if all of it is there and it is one plain event; else 0."""
    start = data.find(_EOL, at, at + _LONGEST_SIZE) + 2
    if start < 2:
        return 0
    try:
        content = int(data[at : start - 2], 16)
    except ValueError:
        return 0
    end = start + content
    whole = content > 0 and data.startswith(b"%x\r\n" % content, at) and data.startswith(_EOL, end)
    return end + 2 - at if whole and _is_plain_event(data[start:end]) else 0


def _one_event_start(size: int) -> bytes:
    """How a chunk of `size` bytes begins, framing included, when it is one event."""
    digits = next((d for d in range(1, 9) if len(b"%x" % max(size - d - 4, 0)) == d), 0)
    return b"%x\r\n%b" % (max(size - digits - 4, 0), _FAST_START)


# By the chunk's size: comparing costs less than making the size line for every token.
_KNOWN_STARTS = 4096
_STARTS = [_one_event_start(size) for size in range(_KNOWN_STARTS)]


class Source(Protocol):
    """The engine's connection, as far as a stream steers it."""

    def settle(self, end: LegEnd, *, abort: bool) -> None:
        """The leg has ended so."""


class Listener(Protocol):
    """Hears of what begins before its bytes are written."""

    def first_token(self) -> None:
        """The first token has come."""

    def output(self) -> None:
        """The client gets its first bytes."""


class StreamRelay:
    """One client's stream. A fresh one for each decode leg; `started` says whether the first token has come, `output`
    whether the client has got bytes of it."""

    __slots__ = (
        "_chunked",
        "_fast",
        "_head",
        "_held",
        "_listener",
        "_scanned",
        "_source",
        "_tail",
        "_transport",
        "ended",
        "error_passed",
        "events",
        "output",
        "started",
    )

    def __init__(
        self, source: Source, listener: Listener, transport: asyncio.WriteTransport, head: bytes, *, chunked: bool
    ) -> None:
        """`head`: the client's response head, written with the first bytes. Not `chunked`: the connection's end ends
        the body (HTTP/1.0)."""
        self._source = source
        self._listener = listener
        self._transport = transport
        self._head = head
        self._chunked = chunked
        self._held = b""  # whole events before output begins
        self._tail = b""  # the beginning of an event
        self._scanned = 0  # bytes of it that are known to hold no end
        self._fast = False
        self.started = False
        self.output = False
        self.ended = False
        self.error_passed = False
        self.events = 0

    # --- from the engine ---

    def feed_chunks(self, data: bytes) -> int:
        """Pass on whole chunks as they came, as long as each is a single event after the first token, neither an error
        nor the marker. Returns how many bytes that were; the rest comes again by `feed`.

        Only size lines as we would write them ourselves are taken; whatever else is HTTP needs the parser.
        """
        if not self._fast:
            return 0
        size = len(data)
        # Nearly always: one chunk, one event.
        if (
            size < _KNOWN_STARTS
            and data.startswith(_STARTS[size])
            and data.find(_LF, _LONGEST_SIZE) == size - 4
            and data.endswith(_EVENT_AND_CHUNK_END)
            and data.find(ERROR_KEY) < 0
            and data.find(GIVEN_UP) < 0
        ):
            self.events += 1
            self._transport.write(data)
            return size
        taken = 0
        while piece := _whole_chunk(data, taken):
            taken += piece
            self.events += 1
        if taken:
            self._transport.write(data[:taken])
        return taken

    def feed(self, data: bytes) -> None:
        """A piece of the stream, cut anywhere."""
        if self._fast and _is_plain_event(data):
            self.events += 1
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif not self.ended:
            self._scan(self._tail + data if self._tail else data)

    def complete(self) -> None:
        """The engine has ended its answer."""
        if self.ended:
            return
        if self._tail and classify(self._tail, token_seen=self.output) is Event.MARKER:
            self._scan(self._tail + _END)  # the marker without its blank line, which nothing can follow any more
            if self.ended:
                return
        kind = LegKind.STREAM if self.started else LegKind.FIRST_TOKEN
        self._end(OUTCOMES[Seen.CLOSED_DURING][kind], "ended without its terminal marker", abort=False)

    def _scan(self, buffer: bytes) -> None:
        """Take every whole event from `buffer`; what is left stays for the next piece."""
        self._fast = False
        at = 0
        while (end := find_end(buffer, at, self._scanned)) >= 0:
            self._scanned = 0
            event = classify(buffer[at:end], token_seen=self.output)
            if event is Event.BROKEN:
                self._pass_on(buffer[:at])
                self._end(Outcome.STREAM_MALFORMED, "not an event", abort=True)
                return
            if event in _LAST:
                self._last(event, buffer[:end], at)
                return
            if event is Event.TOKEN and not self.started:
                self.started = True
                self._listener.first_token()
            if event is Event.TOKEN and not self.output and not opens_only(buffer[at:end]):
                self._begin_output()
            self.events += self.started
            at = end
        self._pass_on(buffer[:at])
        self._tail = buffer[at:]
        self._scanned = len(self._tail)
        self._fast = self._chunked and self.output and not self._tail
        if len(self._tail) + len(self._held) > MAX_EVENT_BYTES:
            self._end(Outcome.STREAM_MALFORMED, f"more than {MAX_EVENT_BYTES} bytes without an end", abort=True)

    def _last(self, event: Event, data: bytes, start: int) -> None:
        """The event that decides the stream, which begins at `start` and ends with `data`."""
        if event is Event.ERROR:
            if self.output:
                self.error_passed = True
                self._pass_on(data)
            self._end(Outcome.ERROR_EVENT, f"an error event: {said(data[start:])}", abort=True)
        elif event is Event.GIVEN_UP:
            self._pass_on(data[:start])
            self._end(Outcome.ERROR_EVENT, "the engine gave the answer up (finish reason abort)", abort=True)
        elif not self.started:
            self._end(Outcome.MARKER_WITHOUT_TOKEN, "its terminal marker came before any token", abort=True)
        else:
            if not self.output:
                self._begin_output()
            self._write(data, last=True)
            self._end(Outcome.STREAM_COMPLETE, "", abort=False)

    def _end(self, outcome: Outcome, detail: str, *, abort: bool) -> None:
        self.ended = True
        self._fast = False
        self._tail = self._held = b""
        self._source.settle(LegEnd(outcome, detail=detail), abort=abort)

    # --- to the client ---

    def fail(self, event: bytes) -> None:
        """After output: tell of the fault, once, and end the body without a marker."""
        self.ended = True
        self._fast = False
        self._write(b"" if self.error_passed else event, last=True)

    def _begin_output(self) -> None:
        self.output = True
        self._listener.output()

    def _pass_on(self, data: bytes) -> None:
        """Whole events: on to the client, or held until output begins."""
        if self.output:
            self._write(data)
        else:
            self._held += data

    def _write(self, data: bytes, *, last: bool = False) -> None:
        if self._held:
            data = self._held + data
            self._held = b""
        if self._chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if last:
                data += LAST_CHUNK
        if self._head:
            data = self._head + data
            self._head = b""
        if data:
            self._transport.write(data)
