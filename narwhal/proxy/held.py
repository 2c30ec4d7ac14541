"""The placement that a proxy holds: what it applies, what it refuses and why, how old it is, and why it is not ready.

Decides (spec P5, P7, M10). It cannot see: connections, clocks, the wire; messages arrive here as values. A refused
placement changes nothing but the highest epoch that was seen.
"""

import math
from urllib.parse import urlsplit

from narwhal.placement import HIGHEST_EPOCH, Placement
from narwhal.vocabulary import NotReady, Phase

LONGEST_REASON = 1000  # characters


class Refused(ValueError):
    """The placement offered is not applied; the text is the reason that control is told, bounded whatever it sent."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:LONGEST_REASON])


class Outdated(Refused):
    """It comes from a control process that is not the newest this proxy has seen."""


class Held:
    """The newest good placement and how long it may still be believed."""

    def __init__(self) -> None:
        self.placement: Placement | None = None
        self.highest_epoch = 0
        self._confirmed_at: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """(epoch, version) in force; (0, 0) for none."""
        return self.placement.order if self.placement else (0, 0)

    def meet(self, epoch: int) -> None:
        """An active control process of `epoch` spoke. Raises `Outdated` when a newer one has been seen (spec P5).

        An epoch that nothing could ever lead above is refused: believed once, it would shut out every other for good.
        """
        if epoch > HIGHEST_EPOCH:
            raise Refused(f"epoch {epoch} is above {HIGHEST_EPOCH}")
        if epoch < self.highest_epoch:
            raise Outdated(f"epoch {epoch} is below {self.highest_epoch}, seen before")
        self.highest_epoch = epoch

    def offer(self, placement: Placement, *, now: float) -> None:
        """Apply `placement`, or raise `Refused` and keep the one held.

        The same version again is welcome: it comes first on every new stream, with its remaining times as of now.
        """
        self.meet(placement.epoch)
        if placement.order < self.order:
            raise Refused(f"version {placement.version} is older than {self.order[1]}, held since before")
        fault = strange(placement)
        if fault:
            raise Refused(fault)
        self.placement = placement
        self._confirmed_at = now

    def confirm(self, order: tuple[int, int], *, now: float) -> None:
        """The control process that is followed said that `order` is its newest. Only word that what is held is current
        keeps it fresh: a proxy that refused a newer placement grows stale like one that heard nothing."""
        if self.placement is not None and order == self.placement.order:
            self._confirmed_at = now

    def age(self, now: float) -> float:
        """Seconds since the placement held was last known to be current; infinite without one."""
        return math.inf if self._confirmed_at is None else max(0.0, now - self._confirmed_at)

    def not_ready(self, *, now: float, max_age_s: float) -> str:
        """The first reason of spec M10 why no request may start; empty when ready. `max_age_s` 0 believes for ever."""
        if self.placement is None:
            return NotReady.NO_PLACEMENT
        if max_age_s and self.age(now) > max_age_s:
            return NotReady.PLACEMENT_STALE
        if self.placement.closed:
            return self.placement.closed
        if not all(self.placement.candidates(phase, now=now) for phase in Phase):
            return NotReady.NO_ENGINES
        return ""


def strange(placement: Placement) -> str:
    """Why no correct control process would publish this; empty when it may well have.

    An empty fleet is meant only when admission is closed with it: open to nothing makes no sense, and is what a message
    that lost its engines looks like.
    """
    if not placement.epoch or not placement.version:
        return f"epoch and version must be at least 1, got {placement.epoch}.{placement.version}"
    if not placement.engines and not placement.closed:
        return "no engines, although admission is open"
    for entry in placement.engines.values():
        fault = _bad_address(entry.url)
        if fault:
            return f"engine {entry.id}: {fault}"
        if entry.quarantine_due is not None and not math.isfinite(entry.quarantine_due):
            return f"engine {entry.id}: its quarantine never ends"
    return ""


def _bad_address(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    return "" if usable else "its url is not an http address"
