"""What legs take: seconds and tokens as counts over one fixed logarithmic scale. Shared values of both sides. Pure.

Proxies fill sketches, control reads them. A sketch of a thousand legs is as large as one of ten million, and sketches
add up in any order: what several proxies, or one that was cut off for a while, have measured needs no more room.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from narwhal.vocabulary import Phase

STEPS = 8  # buckets to a doubling: a value is known to within 4.5 %
# 61 microseconds to 16.8 million: seconds and token counts alike.
LOWEST, HIGHEST = -14 * STEPS, 24 * STEPS
SMALLEST = 2.0 ** (LOWEST / STEPS)


class Measure(StrEnum):
    """What is measured of a leg."""

    FIRST = "first"  # seconds from the leg's start to its first token; a prefill leg's is its answer
    STEP = "step"  # seconds for each stream event after the first
    WAIT = "wait"  # seconds from the request's arrival to its first leg's start
    PROMPT = "prompt"  # tokens
    OUTPUT = "output"  # tokens, as stream events


def bucket(value: float) -> int:
    """The bucket that a value falls into."""
    if value < SMALLEST:
        return LOWEST
    number = math.floor(math.log2(value) * STEPS)
    return number if number < HIGHEST else HIGHEST


def middle(number: int) -> float:
    """The value that a bucket stands for: its geometric middle."""
    return float(2.0 ** ((number + 0.5) / STEPS))


@dataclass(slots=True)
class Sketch:
    """Counts by bucket. Mutable; buckets without a count are left out."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, count: int = 1) -> None:
        """Count a value."""
        number = bucket(value)
        self.counts[number] = self.counts.get(number, 0) + count

    def merge(self, other: "Sketch") -> None:
        """Count everything that `other` has counted."""
        for number, count in other.counts.items():
            self.counts[number] = self.counts.get(number, 0) + count

    @property
    def total(self) -> int:
        """How many values were counted."""
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """The least value that `share` of the values (0 to 1) do not exceed; None where there are none."""
        total = self.total
        if not total:
            return None
        wanted, seen = max(1, math.ceil(share * total)), 0
        for number in sorted(self.counts):
            seen += self.counts[number]
            if seen >= wanted:
                return middle(number)
        raise AssertionError("the counts are their own total")


def together(sketches: Iterable[Sketch]) -> Sketch:
    """All of them as one."""
    whole = Sketch()
    for sketch in sketches:
        whole.merge(sketch)
    return whole


@dataclass(frozen=True, kw_only=True, slots=True)
class LegMeasures:
    """What legs of one engine, phase and incarnation took. Measures without a value are left out."""

    engine: str
    phase: Phase
    incarnation: int
    sketches: Mapping[Measure, Sketch] = field(default_factory=dict)
    waiting: int = 0  # legs without their first token at the end of the span

    def __post_init__(self) -> None:
        if self.waiting < 0:
            raise ValueError(f"waiting must not be negative, got {self.waiting}")
        for measure, sketch in self.sketches.items():
            if any(count < 1 for count in sketch.counts.values()):
                raise ValueError(f"{measure} counts less than one")
            if any(not LOWEST <= number <= HIGHEST for number in sketch.counts):
                raise ValueError(f"{measure} has a bucket outside the scale")
