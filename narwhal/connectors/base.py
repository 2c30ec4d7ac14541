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


@dataclass(slots=True)
class ClientRequest:
    """A client's body, parsed once. Nobody changes `fields` after the parsing."""

    route: Route
    model: str
    stream: bool
    fields: dict[str, Any]
    raw: bytes  # the body that decode legs get, but for the handoff: the client's own bytes where that is possible


Handoff = NewType("Handoff", bytes)  # a checked KV handoff: the descriptor as JSON, whole


class Connector(Protocol):
    """One engine protocol. Pure functions of bytes."""

    def parse(self, route: Route, body: bytes) -> ClientRequest:
        """Read a client's body. Raises BadRequest."""

    def prefill_body(self, request: ClientRequest) -> bytes:
        """The body of a prefill leg. Raises BadRequest when it cannot be written as JSON."""

    def handoff(self, answer: bytes) -> Handoff:
        """The KV handoff in the body of a prefill's 200. Raises HandoffUnusable."""

    def decode_body(self, request: ClientRequest, handoff: Handoff) -> bytes:
        """The body of the decode leg that uses `handoff`."""
