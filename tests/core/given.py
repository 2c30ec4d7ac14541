"""Signals that a test gives as it wants them: exact loads without proxies that measure."""

from collections.abc import Mapping

from narwhal.control.core.signals import Signals
from narwhal.measures import Measure, Sketch
from narwhal.vocabulary import Phase


class Given(Signals):
    """Tells what a test sets: legs that wait (a tenth of the load each), a share of busy time, sketches."""

    def __init__(self) -> None:
        super().__init__({})
        self.legs = dict.fromkeys(Phase, 0)
        self.share = dict.fromkeys(Phase, 0.0)
        self.sketches: dict[Phase, dict[Measure, Sketch]] = {phase: {} for phase in Phase}
        self.windows = 5

    @property
    def intervals(self) -> int:
        return self.windows

    def measured(self, phase: Phase) -> Mapping[Measure, Sketch]:
        return {m: self.sketches[phase].get(m, Sketch()) for m in Measure}

    def waiting(self, phase: Phase, *, now: float) -> int:
        del now
        return self.legs[phase]

    def busy(self, phase: Phase) -> float:
        return self.share[phase]


def sketch(**counts: int) -> Sketch:
    """`b3=2`: two values in bucket 3."""
    return Sketch({int(name[1:]): count for name, count in counts.items()})
