"""Placement as the proxies are told it, and what differs from one to the next.

Plain values, by the rules of `model`.
"""

from dataclasses import dataclass, fields
from typing import Any

from narwhal.cli.plain import plain


@dataclass(frozen=True, kw_only=True)
class PlacedEngine:
    """One engine as placement tells the proxies."""

    id: str
    url: str
    role: str
    phases: tuple[str, ...]
    incarnation: int
    weight: float
    pinned: bool
    holds: tuple[str, ...]
    quarantine_remaining_s: float | None
    phases_after_quarantine: tuple[str, ...]
    max_inflight: int  # soft cap on legs, 0 for none
    max_inflight_tokens: int  # soft cap on prompt tokens, 0 for none


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One published placement."""

    epoch: int
    version: int
    closed: str  # why admission is closed; empty when it is open
    engines: tuple[PlacedEngine, ...]

    @property
    def order(self) -> str:
        """What placements are named by."""
        return f"{self.epoch}.{self.version}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One fact that differs between two placements. `engine` is empty for admission (`closed`) and for the epoch."""

    engine: str
    field: str
    before: Any  # None: was not there
    after: Any  # None: is gone


@dataclass(frozen=True, kw_only=True)
class PlacementStep:
    """From one placement seen to the next."""

    epoch: int
    version: int
    closed: str
    changes: tuple[Difference, ...]


# Remaining time differs in every message that carries it and is no news; that a quarantine begins or ends is in holds.
_NO_NEWS = frozenset({"id", "quarantine_remaining_s"})


def step(before: Placement, after: Placement) -> PlacementStep:
    """What changed from `before` to `after`, engines in the order of `after`, gone ones last."""
    old = {engine.id: engine for engine in before.engines}
    new = {engine.id: engine for engine in after.engines}
    changes: list[Difference] = []
    if before.epoch != after.epoch:
        changes.append(Difference(engine="", field="epoch", before=before.epoch, after=after.epoch))
    if before.closed != after.closed:
        changes.append(Difference(engine="", field="closed", before=before.closed, after=after.closed))
    for engine in after.engines:
        was = old.get(engine.id)
        if was is None:
            changes.append(Difference(engine=engine.id, field="engine", before=None, after=plain(engine)))
            continue
        changes += [
            Difference(engine=engine.id, field=f.name, before=plain(a), after=plain(b))
            for f in fields(PlacedEngine)
            if f.name not in _NO_NEWS and (a := getattr(was, f.name)) != (b := getattr(engine, f.name))
        ]
    changes += [
        Difference(engine=engine.id, field="engine", before=plain(engine), after=None)
        for engine in before.engines
        if engine.id not in new
    ]
    return PlacementStep(epoch=after.epoch, version=after.version, closed=after.closed, changes=tuple(changes))
