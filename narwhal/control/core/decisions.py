"""Decisions that one machine of the core takes and another must act on: values that stay inside the core. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from narwhal.control.core.effects import Effect
from narwhal.control.core.events import ProcessIdentity
from narwhal.vocabulary import Phase


class Cause(StrEnum):
    """Why an engine was ejected: the closed set behind `ejections_total{cause}`."""

    CONNECTION = "connection"  # refused, reset, cut before an answer (spec F3)
    HEALTH_PROBE = "health probe"  # asked after time-outs or overload (spec F3)
    INFERENCE_PROBE = "inference probe"  # a failed leg (spec F6)
    LIVENESS = "liveness"  # silent sweeps (spec L2)
    PROCESS_CHANGED = "process changed"  # another process answers (spec R8)
    MODEL = "model"  # does not serve the configured model (spec R9)
    OPERATOR = "operator"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ejection:
    """Take the engine out of placement."""

    engine: str
    cause: Cause
    reason: str
    told: str = ""  # the event says this instead, with everything that was seen; empty: the reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The engine passed its gate: put it into placement."""

    engine: str
    identity: ProcessIdentity | None
    met: tuple[tuple[str, str], ...] = ()  # producers and consumers between which its gate saw a transfer work


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The engine's drain has settled: nothing is to be found out about it any more."""

    engine: str


class MoveCause(StrEnum):
    """Why an engine changed its role: the closed set behind `role_moves_total{cause}`."""

    FLOOR = "floor"
    LOAD = "load"
    OPERATOR = "operator"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleMove:
    """The engine changes its role, or should."""

    engine: str
    to: Phase
    cause: MoveCause
    reason: str


Decision = Effect | Ejection | Admission | Settled | RoleMove
