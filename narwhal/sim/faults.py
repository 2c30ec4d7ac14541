"""The faults a simulated engine can show: one table, and which of them are active.

A row says where a fault takes hold and what it is; `misbehave.py` (answers), `engine.py` (the process) and
`transfer.py` (KV transfers) act on it. `narwhal-sim faults` prints the table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from narwhal.sim.records import GENERATION, Ending, RequestPhase


class Hook(StrEnum):
    """Where a fault takes hold."""

    ACCEPT = "accept"  # a connection came
    ANSWER = "answer"  # before the answer's headers
    BODY = "body"  # in a non-streaming answer
    STREAM = "stream"  # in a streaming answer
    HANDOFF = "handoff"  # in the handoff of a prefill's answer
    PULL = "pull"  # where this engine reads another's KV
    SERVE = "serve"  # where another engine reads this one's KV
    STATE = "state"  # as long as it is active
    ACT = "act"  # once, at once


Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of fault. `main` is the parameter that `NAME=value` sets."""

    name: str
    hooks: frozenset[Hook]
    what: str
    params: Mapping[str, Value] = field(default_factory=dict)
    main: str | None = None
    phases: frozenset[RequestPhase] = GENERATION
    once_per_peer: bool = False


_ACCEPT, _ANSWER, _BODY, _STREAM, _HANDOFF, _PULL, _SERVE, _STATE, _ACT = (frozenset({hook}) for hook in Hook)
_ANY_BODY = _BODY | _STREAM
_HEALTH = frozenset({RequestPhase.HEALTH})
_PREFILL = frozenset({RequestPhase.PREFILL})
_ALL = frozenset(RequestPhase)

BAD_HANDOFFS = (
    *("missing", "null", "not-an-object", "empty", "not-json", "only-flag", "wrong-flags", "push"),
    *(
        "no-engine-id",
        "empty-engine-id",
        "no-request-id",
        "wrong-request-id",
        "no-host",
        "no-port",
        "port-not-a-number",
    ),
    *("no-blocks", "blocks-not-lists", "negative-block", "few-blocks"),
)


def _row(
    name: str,
    hooks: frozenset[Hook],
    what: str,
    *,
    main: str | None = None,
    phases: frozenset[RequestPhase] = GENERATION,
    once_per_peer: bool = False,
    **params: Value,
) -> Row:
    """A row; its parameters and their defaults are the keywords left."""
    return Row(name=name, hooks=hooks, what=what, main=main, phases=phases, once_per_peer=once_per_peer, params=params)


TABLE: tuple[Row, ...] = (
    # -- answers
    _row("status", _ANSWER, "answer this HTTP status instead; with `everything` on all routes",
         main="status", status=500, retry_after="", everything=False, message=""),
    _row("delay", _ANSWER, "wait so many seconds before the headers", main="seconds", seconds=1.0),
    _row("hang", _ANSWER, "accept the request and never answer"),
    _row("close-before-answer", _ANSWER, "close the connection instead of answering: `how` is clean or reset",
         main="how", how="clean"),
    _row("hang-headers", _ANY_BODY, "send the headers, then nothing"),
    _row("slow-first-token", _ANY_BODY, "headers at once, the first token so many seconds later",
         main="seconds", seconds=1.0),
    _row("cut-answer", _BODY, "cut a non-streaming answer after so many bytes: `how` is clean or reset",
         main="after", after=20, how="clean"),
    _row("dribble", _ANY_BODY, "TCP segments of `segment` bytes, `gap_ms` apart; chunks of `chunk` bytes (0: events)",
         main="segment", segment=1, chunk=0, gap_ms=0.0),
    # -- streams
    _row("stall", _STREAM, "go silent after so many tokens, for so many seconds (0: for ever)",
         main="after", after=3, seconds=0.0),
    _row("cut", _STREAM, "end the connection after so many tokens, no final chunk: `how` is clean or reset",
         main="after", after=3, how="clean"),
    _row("no-done", _STREAM, "end the stream properly, without [DONE]; after so many tokens (-1: all)",
         main="after", after=-1),
    _row("finish-silence", _STREAM, "send the finish reason, then nothing, not even [DONE]"),
    _row("error-event", _STREAM, "an error event after so many tokens, then [DONE] unless `done` is false",
         main="after", after=0, code=500, done=True),
    _row("done-without-tokens", _STREAM, "[DONE] at once, without a token"),
    _row("bad-framing", _STREAM, "a chunk size that is no number, after so many tokens", main="after", after=3),
    _row("slow-tokens", _STATE, "multiply the time per output token", main="factor", factor=4.0),
    # -- handoffs and transfers
    _row("bad-handoff", _HANDOFF, "an unusable handoff in the prefill's answer: " + ", ".join(BAD_HANDOFFS),
         main="variant", phases=_PREFILL, variant="missing"),
    _row("first-transfer-fails", _PULL, "the first KV transfer from each peer fails, later ones work",
         once_per_peer=True),
    _row("first-transfer-slow", _PULL, "the first KV transfer from each peer takes so many seconds",
         main="seconds", once_per_peer=True, seconds=8.0),
    _row("transfer-fails", _PULL, "every KV transfer from this peer (empty: from any) fails", main="peer", peer=""),
    _row("serve-fails", _SERVE, "every KV transfer to this peer (empty: to any) fails", main="peer", peer=""),
    # -- health and identity
    _row("health-hang", _ANSWER, "`/health` never answers", phases=_HEALTH),
    _row("health-slow", _ANSWER, "`/health` takes so many seconds", main="seconds", phases=_HEALTH, seconds=8.0),
    _row("health-status", _ANSWER, "`/health` answers this status", main="status", phases=_HEALTH, status=503),
    _row("wrong-model", _STATE, "serve another model: it is listed, and the configured one is 404",
         main="model", model="another-model"),
    # -- the process
    _row("core-stopped", _STATE, "engine core stopped: health is green, streams give headers and nothing"),
    _row("core-killed", _ACT, "engine core killed: errors, half a second of 503, then the process exits"),
    _row("frozen", _STATE, "the whole engine stopped: connections are accepted, nothing is answered"),
    _row("killed", _ACT, "the process dies as by SIGKILL: streams are cut, connections refused"),
    _row("terminated", _ACT, "the process ends as by SIGTERM, then refuses; answers under way: error, abort, silent",
         main="ending", ending="error"),
    _row("restart", _ACT, "killed, and after so many seconds a new process at the same address",
         main="down_s", down_s=0.0),
    # -- connections
    _row("refuse", _STATE, "refuse connections (idle ones are closed; running requests go on)"),
    _row("reset-on-accept", _ACCEPT, "reset every connection as soon as it is accepted"),
    _row("idle-close", _STATE, "close idle connections after so many seconds", main="seconds", seconds=1.0),
)  # fmt: skip
ROWS: dict[str, Row] = {row.name: row for row in TABLE}
_CHOICES = {"how": ("clean", "reset"), "variant": BAD_HANDOFFS, "ending": tuple(Ending)}


@dataclass(kw_only=True, eq=False)
class Fault:
    """One active fault."""

    row: Row
    params: dict[str, Any]
    phases: frozenset[RequestPhase]
    left: int | None = None
    """How often it still applies; None for always."""
    for_s: float | None = None
    """Seconds after which it ends by itself."""
    applied: int = 0
    peers: set[str] = field(default_factory=set)
    """Peers that a once-per-peer fault has already hit."""

    def view(self) -> dict[str, Any]:
        """This fault as JSON values."""
        phases = sorted(phase.value for phase in self.phases)
        return {
            "mode": self.row.name,
            **self.params,
            "phases": phases,
            "left": self.left,
            "for_s": self.for_s,
            "applied": self.applied,
        }


def make(mode: str, given: Mapping[str, Any]) -> Fault:
    """A fault from its name and parameters (`count`, `phase` and `for_s` beside the row's own). Raises ValueError."""
    row = ROWS.get(mode)
    if row is None:
        raise ValueError(f"mode: no fault is named {mode!r}; known are {', '.join(ROWS)}")
    params = dict(row.params)
    common: dict[str, Any] = {"count": None, "phase": None, "for_s": None}
    for key, value in given.items():
        if key in params:
            params[key] = _typed(key, value, type(row.params[key]))
        elif key in common:
            common[key] = value
        else:
            known = ", ".join([*params, *common])
            raise ValueError(f"{key}: fault {mode} has no such parameter; it has {known}")
    left = None if common["count"] is None else int(_typed("count", common["count"], int))
    if left is not None and left < 1:
        raise ValueError(f"count: must be at least 1, got {left}")
    for_s = None if common["for_s"] is None else float(_typed("for_s", common["for_s"], float))
    phases = row.phases if common["phase"] is None else _phases(str(common["phase"]))
    if row.name == "status" and params["everything"]:
        phases = _ALL
    return Fault(row=row, params=params, phases=phases, left=left, for_s=for_s)


def parse(text: str) -> Fault:
    """A fault written `NAME`, `NAME=value` or `NAME=value,key=value,…`. Raises ValueError."""
    first, *rest = text.split(",")
    mode, given, value = first.partition("=")
    row = ROWS.get(mode)
    pairs: dict[str, Any] = {}
    if given:
        if row is not None and row.main is None:
            raise ValueError(f"fault {mode} takes no value, got {value!r}")
        if row is not None and row.main is not None:
            pairs[row.main] = value
    for item in rest:
        key, equals, item_value = item.partition("=")
        if not equals:
            raise ValueError(f"fault {mode}: expected key=value, got {item!r}")
        pairs[key] = item_value
    return make(mode, pairs)


def _typed(key: str, value: Any, kind: type) -> Any:
    """A parameter's value as its default's type, from JSON or from a command line."""
    if kind is bool:
        known = {"true": True, "1": True, "false": False, "0": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() in known:
            return known[str(value).lower()]
        raise ValueError(f"{key}: must be true or false, got {value!r}")
    try:
        typed = kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key}: must be {'a number' if kind is not str else 'text'}, got {value!r}") from None
    if key in _CHOICES and typed not in _CHOICES[key]:
        raise ValueError(f"{key}: must be one of {', '.join(_CHOICES[key])}, got {typed!r}")
    return typed


def _phases(text: str) -> frozenset[RequestPhase]:
    """`generation`, `any`, or one phase's name."""
    if text == "any":
        return _ALL
    if text == "generation":
        return GENERATION
    try:
        return frozenset({RequestPhase(text)})
    except ValueError:
        known = ", ".join(["any", "generation", *RequestPhase])
        raise ValueError(f"phase: must be one of {known}, got {text!r}") from None


class FaultSet:
    """The active faults of one engine, newest last."""

    def __init__(self) -> None:
        self.active: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Make a fault active; it replaces one of the same kind and phases."""
        self.active = [
            old
            for old in self.active
            if old.row is not fault.row or old.phases != fault.phases or self._distinct(old, fault)
        ]
        self.active.append(fault)

    @staticmethod
    def _distinct(old: Fault, new: Fault) -> bool:
        """Faults that name different peers stand side by side."""
        return old.params.get("peer") != new.params.get("peer")

    def remove(self, gone: Iterable[Fault]) -> None:
        """Make these faults inactive."""
        names = set(map(id, gone))
        self.active = [fault for fault in self.active if id(fault) not in names]

    def state(self, mode: str) -> Fault | None:
        """The active fault of that name, without using it up."""
        return next((fault for fault in self.active if fault.row.name == mode), None)

    def take(self, hook: Hook, phase: RequestPhase | None = None, peer: str | None = None) -> list[Fault]:
        """The faults that apply here, each used once."""
        if not self.active:
            return []
        taken = [
            fault
            for fault in self.active
            if hook in fault.row.hooks
            and (phase is None or phase in fault.phases)
            and (peer is None or fault.params.get("peer", "") in ("", peer))
            and not (fault.row.once_per_peer and peer in fault.peers)
        ]
        for fault in taken:
            fault.applied += 1
            if fault.row.once_per_peer and peer is not None:
                fault.peers.add(peer)
            if fault.left is not None:
                fault.left -= 1
                if fault.left <= 0:
                    self.remove([fault])
        return taken


def lines(form: str = "text") -> list[str]:
    """The table for people: one line a fault, as text or as Markdown table rows."""
    out = ["| fault | parameters | what the engine does |", "|---|---|---|"] if form == "markdown" else []
    for row in TABLE:
        shown = ", ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in row.params.items()
        )
        if form == "markdown":
            out.append(f"| `{row.name}` | {f'`{shown}`' if shown else ''} | {row.what} |")
        else:
            out.append(f"{row.name:22} {row.what}{f' [{shown}]' if shown else ''}")
    return out
