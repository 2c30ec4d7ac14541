"""What a leg's request and answer look like: the interface of an engine protocol."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NewType, Protocol


class Route(StrEnum):
    """The engine API that a client asked for; the value is its path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class BadRequest(Exception):
    """The client's body cannot be served; the message is for the client, `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class HandoffUnusable(Exception):
    """A prefill answered 200 without a KV handoff that may be sent on; says what is wrong with it."""


class CountUnusable(Exception):
    """A tokenizer answered 200 without a count."""


@dataclass(slots=True)
class ClientRequest:
    """A client's body, parsed once. Nobody changes `fields` after the parsing."""

    route: Route
    model: str
    stream: bool
    fields: dict[str, Any]
    raw: bytes  # the body that decode legs get, but for the handoff: the client's own bytes where that is possible
    several: bool = False  # whether more than one choice is asked for


Handoff = NewType("Handoff", bytes)  # a checked KV handoff: the descriptor as JSON, whole


class Connector(Protocol):
    """One engine protocol. Pure functions of bytes."""

    count_path: str  # where an engine counts tokens

    def parse(self, route: Route, body: bytes) -> ClientRequest:
        """Read a client's body. Raises BadRequest."""

    def prefill_body(self, request: ClientRequest) -> bytes:
        """The body of a prefill leg. Raises BadRequest when it cannot be written as JSON."""

    def handoff(self, answer: bytes) -> Handoff:
        """The KV handoff in the body of a prefill's 200. Raises HandoffUnusable."""

    def decode_body(self, request: ClientRequest, handoff: Handoff) -> bytes:
        """The body of the decode leg that uses `handoff`."""

    def load_body(self, request: ClientRequest, handoff: Handoff) -> bytes:
        """The body by which a decode engine reads `handoff` into its own cache and does no more: one choice of one
        token, not streamed."""

    def known_tokens(self, request: ClientRequest) -> int | None:
        """The tokens of the prompt, where the client sent it as tokens."""

    def estimated_tokens(self, request: ClientRequest) -> int:
        """About how many tokens the prompt has, from its bytes."""

    def count_body(self, request: ClientRequest) -> bytes:
        """The body by which an engine is asked for them. Raises BadRequest when it cannot be written as JSON."""

    def counted(self, answer: bytes) -> int:
        """The count in the body of the 200. Raises CountUnusable."""
