"""What a proxy counts: plain integers on the hot path, exported by a collector.

A worker counts in a `Metrics`; `snapshot` is its JSON form, `merge` adds those of several workers, `ProxyCollector`
renders one for Prometheus.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

_SEPARATOR = "\t"  # no label value holds one: ids, words and status codes


class Histogram:
    """Counts per bucket (upper bounds, seconds; one more for all above) and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """The counters of one worker."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, ...], int] = {}  # (route, code)
        self.legs: dict[tuple[str, ...], int] = {}  # (engine, phase, result)
        self.retries: dict[tuple[str, ...], int] = {}  # (reason,)
        self.retries_denied = 0
        self.handoffs_abandoned = 0
        self.request_seconds = Histogram(LATENCY_BUCKETS)
        self.ttft_seconds = Histogram(LATENCY_BUCKETS)
        self.tpot_seconds = Histogram(TOKEN_BUCKETS)
        self.gauges: dict[str, Callable[[], float]] = {}  # name without prefix → its value now

    def request(self, route: str, code: str, seconds: float) -> None:
        """A client request ended. `code`: the status sent, 499 when the client went away before one."""
        key = (route, code)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.request_seconds.observe(seconds)

    def leg(self, engine: str, phase: str, result: str) -> None:
        """A leg ended."""
        key = (engine, phase, result)
        self.legs[key] = self.legs.get(key, 0) + 1

    def retry(self, reason: str) -> None:
        """Another attempt follows a leg that failed so."""
        self.retries[(reason,)] = self.retries.get((reason,), 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """All of it, in the form that `merge` and `ProxyCollector` take; JSON can carry it."""
        return {
            "counters": {
                "requests": _joined(self.requests),
                "legs": _joined(self.legs),
                "retries": _joined(self.retries),
                "retries_denied": {"": self.retries_denied},
                "handoffs_abandoned": {"": self.handoffs_abandoned},
            },
            "histograms": {
                name: {"counts": list(histogram.counts), "total": histogram.total}
                for name, histogram in (
                    ("request_seconds", self.request_seconds),
                    ("ttft_seconds", self.ttft_seconds),
                    ("tpot_seconds", self.tpot_seconds),
                )
            },
            "gauges": {name: value() for name, value in self.gauges.items()},
        }


# name → (help, labels)
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Client requests that ended, by route and status sent (499: the client went away)", ("route", "code")),
    "legs": ("Legs that ended, by what the proxy saw", ("engine", "phase", "result")),
    "retries": ("Further attempts, by the outcome of the leg before", ("reason",)),
    "retries_denied": ("Further attempts that the retry budget did not allow", ()),
    "handoffs_abandoned": ("KV handoffs that no decode leg used; the engine frees them after its lease", ()),
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_seconds": ("Seconds from a request's arrival to its end", LATENCY_BUCKETS),
    "ttft_seconds": ("Seconds from a streaming request's arrival to its first token", LATENCY_BUCKETS),
    "tpot_seconds": ("Seconds per stream event after the first, per finished stream", TOKEN_BUCKETS),
}
GAUGES: dict[str, str] = {
    "inflight": "Requests that hold a seat",
    "queue_depth": "Requests that wait for a seat",
    "placement_age_seconds": "Seconds since control was last heard",
    "outcomes_unacknowledged": "Outcomes reported but not yet acknowledged by control",
}
OLDEST_COUNTS = frozenset({"placement_age_seconds"})  # gauges of which several workers show the largest, not the sum


def _joined(counts: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    return {_SEPARATOR.join(key): count for key, count in counts.items()}


def merge(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of several workers' snapshots."""
    merged: dict[str, Any] = {"counters": {}, "histograms": {}, "gauges": {}}
    for snapshot in snapshots:
        for name, counts in snapshot["counters"].items():
            into = merged["counters"].setdefault(name, {})
            for key, count in counts.items():
                into[key] = into.get(key, 0) + count
        for name, histogram in snapshot["histograms"].items():
            sums = merged["histograms"].setdefault(name, {"counts": [0] * len(histogram["counts"]), "total": 0.0})
            sums["counts"] = [a + b for a, b in zip(sums["counts"], histogram["counts"], strict=True)]
            sums["total"] += histogram["total"]
        for name, value in snapshot["gauges"].items():
            before = merged["gauges"].get(name)
            if before is not None:
                value = max(before, value) if name in OLDEST_COUNTS else before + value  # noqa: PLW2901
            merged["gauges"][name] = value
    return merged


class ProxyCollector(Collector):
    """Renders a snapshot, taken at each scrape, with the `fleet` label on every series."""

    def __init__(self, fleet: Callable[[], str], snapshot: Callable[[], Mapping[str, Any]]) -> None:
        self._fleet = fleet
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Every family, those without a sample too."""
        fleet = self._fleet()
        snapshot = self._snapshot()
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(f"narwhal_{name}", text, labels=("fleet", *labels))
            for key, count in snapshot["counters"].get(name, {}).items():
                values = key.split(_SEPARATOR) if labels else ()
                counter.add_metric((fleet, *values), count)
            yield counter
        for name, (text, bounds) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"narwhal_{name}", text, labels=("fleet",))
            counted = snapshot["histograms"].get(name, {"counts": [0] * (len(bounds) + 1), "total": 0.0})
            histogram.add_metric((fleet,), _cumulative(bounds, counted["counts"]), counted["total"])
            yield histogram
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"narwhal_{name}", text, labels=("fleet",))
            if name in snapshot["gauges"]:
                gauge.add_metric((fleet,), snapshot["gauges"][name])
            yield gauge


def _cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    rising, total = [], 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        rising.append((bound, float(total)))
    return rising
