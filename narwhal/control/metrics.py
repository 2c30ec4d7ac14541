"""The control service's metrics, rendered from the fleet's view at each scrape (prefix `narwhal_`, label `fleet`).

Nothing is kept here: engines and proxies that are gone leave no series.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from narwhal.clock import Clock
from narwhal.control.core.proxies import lag
from narwhal.control.core.view import FleetView
from narwhal.control.leader import Leader
from narwhal.control.observe import Observer
from narwhal.control.publisher import Publisher
from narwhal.vocabulary import FailureClass, Hold, Phase

Samples = Iterable[tuple[tuple[str, ...], float]]


class ControlMetrics(Collector):
    """Everything that a scrape of a control process shows."""

    def __init__(self, leader: Leader, publisher: Publisher, observer: Observer, clock: Clock) -> None:
        self._leader = leader
        self._publisher = publisher
        self._observer = observer
        self._clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: registering must not take a view."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        loop = self._leader.loop
        yield from self._process()
        if loop is not None:
            view = loop.view()
            yield from self._monitor(view)
            yield from self._engines(view)
            yield from self._counted(view)
            yield from self._placement(view)

    def _process(self) -> Iterator[Metric]:
        leader, lease = self._leader, self._leader.lease
        readiness = leader.readiness()
        yield self._gauge("lease_held", "Whether this process holds the lease.", [((), float(lease is not None))])
        yield self._gauge("lease_epoch", "Epoch of the lease, as far as known.", [((), readiness.epoch)])
        remaining = lease.remaining_s(self._clock.boottime()) if lease is not None else 0.0
        words = "Seconds for which this process may act without a renewal; +Inf for as long as it lives."
        yield self._gauge("lease_valid_seconds", words, [((), remaining)])
        yield self._counter("takeovers_total", "Leases taken over from another holder.", [((), leader.takeovers)])
        words = "Proxies that had seen a higher epoch than that of this active."
        yield self._counter("stale_epoch_refusals_total", words, [((), leader.stale_refusals)])
        writes: Samples = [((result,), leader.writes[result]) for result in ("ok", "failed")]
        yield self._counter("handoff_writes_total", "Writes of the state handoff.", writes, ("result",))
        if (journal := leader.journal) is not None:
            words = "Bytes of the event journal that were written."
            yield self._counter("journal_bytes_total", words, [((), journal.written)])
            lost: Samples = [((cause,), journal.lost[cause]) for cause in ("disk", "queue")]
            words = "Steps of the core that the event journal lacks: the disk failed, or was too slow."
            yield self._counter("journal_lost_steps_total", words, lost, ("cause",))
        subscribers = len(self._publisher.proxies) + self._publisher.observers
        words = "Open placement streams; those to a standby wait for it to lead."
        yield self._gauge("placement_subscribers", words, [((), subscribers)])
        summary = SummaryMetricFamily("narwhal_monitor_pass_seconds", "Monitor passes.", labels=("fleet",))
        summary.add_metric((self._fleet,), count_value=leader.passes, sum_value=leader.passes_s)
        yield summary

    def _monitor(self, view: FleetView) -> Iterator[Metric]:
        monitor = view.monitor
        errors: Samples = [((str(e.stage), e.error_class), e.count) for e in monitor.errors]
        words = "Exceptions of monitor stages since this term began."
        yield self._counter("monitor_stage_errors_total", words, errors, ("stage", "class"))
        words = "Consecutive monitor passes with a failed stage."
        yield self._gauge("monitor_failure_streak", words, [((), monitor.streak)])
        words = "Whether admission is closed for failing monitor passes."
        yield self._gauge("monitor_degraded", words, [((), float(bool(monitor.degraded)))])

    def _engines(self, view: FleetView) -> Iterator[Metric]:
        engines = view.engines
        eligible: Samples = [((e.id, str(p)), float(p in e.phases)) for e in engines for p in Phase]
        words = "Whether the engine may be given legs of the phase."
        yield self._gauge("engine_eligible", words, eligible, ("engine", "phase"))
        carried = {e.id: {h.kind for h in e.holds} for e in engines}
        holds: Samples = [((e.id, str(h)), float(h in carried[e.id])) for e in engines for h in Hold]
        yield self._gauge("engine_hold", "Whether the engine carries the hold.", holds, ("engine", "hold"))
        streaks: Samples = [((e.id, str(c)), e.streaks.get(c, 0)) for e in engines for c in FailureClass]
        yield self._gauge("evidence_streak", "Consecutive failures by class.", streaks, ("engine", "class"))
        totals: Samples = [((e.id, str(k.failure)), k.total) for e in engines for k in e.evidence]
        words = "Failures counted as evidence since this term began."
        yield self._counter("evidence_total", words, totals, ("engine", "class"))
        gates: Samples = [((e.id, str(v), check), n) for e in engines for (v, check), n in e.gates.items()]
        words = "Tries of the gate since this term began, by the check that decided; none where all passed."
        yield self._counter("readmissions_total", words, gates, ("engine", "result", "check"))

    def _counted(self, view: FleetView) -> Iterator[Metric]:
        """What was counted as it was told, of the engines that the fleet still has."""
        known = {e.id for e in view.engines}
        for name, words, labels in _COUNTED:
            counts: Mapping[tuple[str, ...], int] = self._observer.counted(name)
            yield self._counter(name, words, [(k, n) for k, n in counts.items() if k[0] in known], labels)

    def _placement(self, view: FleetView) -> Iterator[Metric]:
        placement = self._publisher.placement
        published = placement.order if placement is not None else (0, 0)
        yield self._gauge("placement_version", "Newest placement version of the epoch.", [((), published[1])])
        lags: Samples = [((str(p.key),), lag(p.acked, published)) for p in view.proxies]
        words = "Versions by which the proxy is behind."
        yield self._gauge("placement_lag_versions", words, lags, ("proxy",))

    @property
    def _fleet(self) -> str:
        return self._leader.plan.core.name

    def _gauge(self, name: str, words: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
        return self._filled(GaugeMetricFamily(f"narwhal_{name}", words, labels=("fleet", *labels)), samples)

    def _counter(self, name: str, words: str, samples: Samples, labels: tuple[str, ...] = ()) -> Metric:
        return self._filled(CounterMetricFamily(f"narwhal_{name}", words, labels=("fleet", *labels)), samples)

    def _filled(self, family: Any, samples: Samples) -> Metric:
        for labels, value in samples:
            family.add_metric((self._fleet, *labels), value)
        assert isinstance(family, Metric)
        return family


# Counters that the observer keeps: name, meaning, labels beside the fleet's; the engine comes first.
_COUNTED = (
    ("ejections_total", "Engines taken out of placement.", ("engine", "cause")),
    ("probes_total", "Checks and probes that were answered.", ("engine", "kind", "result")),
)
