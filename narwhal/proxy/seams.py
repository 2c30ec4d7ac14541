"""Where the data path touches the rest of a proxy: what it reads of the fleet, what it tells, and its own residency.

Protocols and one small record; no behaviour. `view.py` is the real `Feed`, `reporter.py` the real `Reporter`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from narwhal.config import ProxySettings
from narwhal.placement import Placement
from narwhal.reports import Run
from narwhal.vocabulary import Outcome, Phase, RequestResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """What runs in the fleet as control last told it, some time ago: per engine, the other proxies' and what this one
    had said of itself by then."""

    legs: Mapping[str, int] = field(default_factory=dict)  # in flight on the others
    tokens: Mapping[str, int] = field(default_factory=dict)  # their prompt tokens
    own_legs: Mapping[str, int] = field(default_factory=dict)
    own_tokens: Mapping[str, int] = field(default_factory=dict)
    proxies: int = 1  # that share the engines, this one included


class Feed(Protocol):
    """The fleet as this proxy knows it now. Read anew at every decision, never kept."""

    @property
    def placement(self) -> Placement | None:
        """The newest placement, or None before the first."""

    @property
    def settings(self) -> ProxySettings:
        """What the proxy works by; another value after a reload."""

    @property
    def picture(self) -> Picture:
        """What the other proxies have in flight, as last heard."""

    @property
    def controlled(self) -> bool:
        """Whether control is there, and judges what is reported to it."""

    def not_ready(self) -> str:
        """Why nothing may be admitted now, in the words of `NotReady`; empty when admission is open and fresh."""


class Reporter(Protocol):
    """Takes what was seen, in the order it happened. Never blocks, never raises."""

    def success(self, engine: str, phase: Phase, incarnation: int, outcome: Outcome) -> None:
        """A leg ended well, or the engine judged the request (4xx)."""

    def failure(self, run: Run) -> None:
        """A leg failed; `run.failure` has the details."""

    def neutral(self, engine: str, phase: Phase, incarnation: int, outcome: Outcome) -> None:
        """A leg ended for a reason that is no evidence: `cancelled`, `local`, `deadline`."""

    def request(self, result: RequestResult, retries: int) -> None:
        """A client request ended, after so many retries."""


def _ignore(_engine: str) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class Inflight:
    """This process's own legs in flight per engine: exact residency. Engines without a leg are absent."""

    legs: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # prompt tokens of legs whose tokens somebody counted
    # KV handoffs of each engine that no decode leg has read yet, as far as can be seen: the engine must live on for
    # them, though no leg runs there.
    unread: dict[str, int] = field(default_factory=dict)
    on_idle: Callable[[str], None] = _ignore  # called with an engine's id when nothing needs it any more

    def begin(self, engine: str, tokens: int = 0) -> None:
        """A leg starts on `engine`, with so many prompt tokens where that matters."""
        self.legs[engine] = self.legs.get(engine, 0) + 1
        if tokens:
            self.tokens[engine] = self.tokens.get(engine, 0) + tokens

    def end(self, engine: str, tokens: int = 0) -> None:
        """A leg that had begun on `engine`, with so many tokens, has ended."""
        if tokens:
            self._less(engine, tokens)
        left = self.legs[engine] - 1
        if left:
            self.legs[engine] = left
        else:
            del self.legs[engine]
            if engine not in self.unread:
                self.on_idle(engine)

    def _less(self, engine: str, tokens: int) -> None:
        left = self.tokens[engine] - tokens
        if left:
            self.tokens[engine] = left
        else:
            del self.tokens[engine]

    def produced(self, engine: str) -> None:
        """`engine` gave a KV handoff that is to be read."""
        self.unread[engine] = self.unread.get(engine, 0) + 1

    def read(self, engine: str) -> None:
        """It has been read, or will not be any more."""
        left = self.unread[engine] - 1
        if left:
            self.unread[engine] = left
        else:
            del self.unread[engine]
            if engine not in self.legs:
                self.on_idle(engine)
