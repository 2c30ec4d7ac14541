"""What is known of one engine's time per output token, and one window of it to be judged (spec H5). Pure.

Decides: nothing; `drift` does. What proxies tell and what probes tell are kept apart: an engine that has no other work
is quicker to a probe than under load, and the one must not pass for a part of the other.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from narwhal.control.core.engine import Engine
from narwhal.measures import Sketch
from narwhal.vocabulary import Hold

BASELINE_WINDOWS = 10  # good windows that the baseline is the median of
# Nobody is judged by less: one odd window, such as tokens that lay in a buffer and came at once, would otherwise be
# what is normal for as long as the engine lives, and the engine on probation for as long.
LEARNT_WINDOWS = 3


@dataclass(kw_only=True, slots=True)
class Pace:
    """What is known of one engine's time per output token. Mutable."""

    samples: Sketch = field(default_factory=Sketch)  # of the open window, as proxies told
    probed: Sketch = field(default_factory=Sketch)  # of the open window, by probes on probation
    baseline: deque[float] = field(default_factory=lambda: deque(maxlen=BASELINE_WINDOWS))
    drifting: int = 0  # windows in a row
    good: int = 0  # windows in a row
    unproven: int = 0  # good windows that its work is to show yet since its probation ended
    sampled: bool = False  # a probe was asked for in the open window
    last: "Scored | None" = None  # the newest scored window

    def learn_anew(self, values: Iterable[float] = ()) -> None:
        """What was normal is so no longer; `values` are, where there are any."""
        self.baseline.clear()
        self.baseline.extend(values)
        self.drifting = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One engine's closed window: enough samples of either kind."""

    value_s: float
    samples: int
    by_probe: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One engine's closed window, and something to judge it by."""

    engine: Engine
    window: Window
    reference_s: float
    drifts: bool

    @property
    def held(self) -> bool:
        """Whether the engine is on probation: it then says nothing of the others, nor they of it."""
        return Hold.DRIFT in self.engine.holds

    def words(self) -> str:
        """What it took, for people."""
        took = f"{self.window.value_s * 1000:.1f} ms a token"
        took += " in a probe" if self.window.by_probe else ""
        return f"{took} where {self.reference_s * 1000:.1f} ms are usual"


def window_of(samples: Sketch, probed: Sketch, *, held: bool, least: int) -> Window | None:
    """The window to judge an engine by: what proxies told, or, on probation and where that is too little, its probes;
    None for fewer than `least` samples of the one kind."""
    for sketch, by_probe in ((samples, False), (probed, True)):
        value = sketch.quantile(0.5)
        if value is not None and sketch.total >= least and (held or not by_probe):
            return Window(value_s=value, samples=sketch.total, by_probe=by_probe)
    return None


def median(values: Iterable[float]) -> float:
    """The middle one; of an even number the lower."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
