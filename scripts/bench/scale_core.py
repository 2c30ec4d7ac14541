#!/usr/bin/env python3
"""What a large fleet costs the decision core alone: no sockets, no clock, one thread; CPU time of this process.

Half of the fleet are prefill and half decode engines, none pinned; proxies report on engines in turn. Each event is
followed by what the control loop does after it: publish what is new. `--engines` and `--proxies` set other sizes.
About a minute.

| line | what was done |
|---|---|
| joining | a start without saved state: every engine passes every check; its transfers, and the longest single step |
| joining, a quarter refuses KV | the same where every second decode engine fails to read what others prefilled |
| report | a proxy's second: twenty runs of successes on twenty engines; each run ends on another engine |
| acknowledgement | a proxy says what it applies and what runs on twenty engines |
| monitor pass | all stages of one, with nothing to do |
| per second, all proxies | the three above as often as they come, in percent of a core |
| ramp | all have returned, one after the other in half a minute: CPU for each placement version, versions a second |
| decision | an operator ejects an engine: up to the placement with it; then that placement as a message |
| refused connections | every proxy reports one on each of twenty engines |
| suspects | a quarter of the fleet fails three streams each at once: holds, probes, all of which pass |
| sweep | liveness answers of everybody; then of half, and the others are ejected |
| view, state handoff, rehearsal | what others look at, what is stored, a copy of the core for `--dry-run` |
"""

import argparse
import copy
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from narwhal.control.core.effects import Effect, ProbeHealth, ProbeInference, RunCheck, RunTransfer
from narwhal.control.core.events import (
    CheckAnswered,
    CheckResult,
    EjectCommand,
    HealthAnswered,
    InferenceAnswered,
    Input,
    LegSeen,
    PassEnded,
    ProcessIdentity,
    ProxyAcked,
    ProxyConnected,
    Published,
    Reported,
    TransferAnswered,
    Woke,
)
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import SavedEngine, SavedFleet, SavedRelapses, SavedRoles, to_document
from narwhal.control.core.publication import PlacementContent, publishable
from narwhal.control.core.settings import CoreSettings, EngineSpec
from narwhal.placement import Placement
from narwhal.reports import Batch, LegFailure, ProxyKey, RequestCounts, Run
from narwhal.vocabulary import Outcome, Phase, Stage, Verdict
from narwhal.wire import change_to_wire, snapshot_to_wire

PROCESS = ProcessIdentity(version="0.32.0", started_at=1_700_000_000.25)
CHECKED = CheckResult(verdict=Verdict.PASS, detail="GET /health answered 200", latency_s=0.002, identity=PROCESS)
PRODUCED = LegSeen(outcome=Outcome.HANDOFF)
CONSUMED = LegSeen(outcome=Outcome.STREAM_COMPLETE)
UNREAD = LegSeen(outcome=Outcome.HTTP_5XX)
BEGIN = 1000.0
LONG_AGO_S = 3600.0
RUNS = 20  # in a proxy's report
SECONDS = 5  # of steady state
T = TypeVar("T")
Line = tuple[str, float, str]  # what, how much, unit


def settings(engines: int) -> CoreSettings:
    """A fleet of that many engines; everything else as in a minimal fleet file."""
    specs = []
    for number in range(engines):
        role = Phase.PREFILL if number < engines // 2 else Phase.DECODE
        name = f"{role}-{number:04}"
        specs.append(EngineSpec(id=name, url=f"http://{name}.engines.internal:8000", role=role))
    return CoreSettings(name="scale", model="tiny", engines=tuple(specs))


def saved(fleet: CoreSettings, *, over_s: float) -> SavedFleet:
    """The state of that fleet after everybody came in: long ago, or one after the other in the last `over_s`."""
    count = len(fleet.engines)
    engines = {
        spec.id: SavedEngine(
            url=spec.url,
            role=spec.role,
            role_age_s=None,
            incarnation=1,
            holds=(),
            identity=PROCESS,
            drain=None,
            admitted_age_s=over_s * number / count if over_s else LONG_AGO_S,
            gate_in_s=None,
            backoff_s=0.0,
            streaks={},
            stalls=0,
            timeout_is_stream=False,
            producers={},
            relapses=SavedRelapses(),
            misses=0,
            outcomes={Outcome.HANDOFF: 123_456, Outcome.STREAM_COMPLETE: 123_400, Outcome.CANCELLED: 56},
        )
        for number, spec in enumerate(fleet.engines)
    }
    return SavedFleet(
        fleet=fleet.name,
        model=fleet.model,
        engine_set=tuple(engines),
        engines=engines,
        requests=RequestCounts(served=1),
        unknown_outcomes={},
        proxies=(),
        cursors=(),
        roles=SavedRoles(),
    )


class Core:
    """A fleet, driven as the control loop drives it. `fresh`: nobody has come in; `over_s`: see `saved`."""

    def __init__(self, engines: int, *, fresh: bool = False, over_s: float = 0.0, proxies: int = 0) -> None:
        self.settings = settings(engines)
        self.now = BEGIN
        state = None if fresh else saved(self.settings, over_s=over_s)
        self.fleet = Fleet(self.settings, now=self.now, saved=state)
        self.names = [spec.id for spec in self.settings.engines]
        self.proxies = [ProxyKey(id=f"proxy-{n:03}", slot=0, boot=1) for n in range(proxies)]
        self.stored: Mapping[str, int] = self.fleet.incarnations()
        self.looked_at: tuple[PlacementContent, Mapping[str, int]] | None = None
        self.content: PlacementContent | None = None
        self.version = 0
        self.transfers = 0
        self.longest_s = 0.0
        self._sequence = 0
        for key in self.proxies:
            self.handle(ProxyConnected(proxy=key, address="10.0.0.1:1", pid=1, highest_epoch=1, stream=1))
        self.settle()

    def handle(self, event: Input) -> tuple[Effect, ...]:
        """One event, and what the loop does after it."""
        effects, took = cost(lambda: self.fleet.handle(event, now=self.now))
        self.longest_s = max(self.longest_s, took)
        self.settle()
        return effects

    def settle(self) -> None:
        """Publishes when there is something new, as the loop does."""
        decided = self.fleet.placement(now=self.now)
        _ = self.fleet.revision, self.fleet.next_due()
        if self.looked_at is not None and decided is self.looked_at[0] and self.stored is self.looked_at[1]:
            return
        self.looked_at = decided, self.stored
        content = publishable(decided, self.stored)
        if content == self.content:
            return
        self.content = content
        self.version += 1
        serving = frozenset(e.id for e in content.engines.values() if e.phases or e.phases_after_quarantine)
        event = Published(epoch=1, version=self.version, serving=serving, closed=content.closed)
        self.fleet.handle(event, now=self.now)

    def store(self) -> None:
        """What is decided has been stored."""
        self.stored = self.fleet.incarnations()
        self.settle()

    def run_pass(self) -> list[Effect]:
        """One monitor pass, an interval later."""
        self.now += self.settings.monitor_interval_s
        effects: list[Effect] = []
        for stage in Stage:
            effects += self.fleet.tick(stage, now=self.now)
            self.settle()
        effects += self.handle(PassEnded(failures=()))
        return effects

    def report(self, key: ProxyKey, outcome: Outcome, *, second: int) -> None:
        """A report of `RUNS` runs, each on another engine."""
        self._sequence += 1
        at = int(key.id.rpartition("-")[2]) * 37 + second * 101
        failure = LegFailure(outcome=outcome, producer=self.names[0], producer_incarnation=1)
        runs = tuple(
            Run(
                engine=self.names[(at + n * 7) % len(self.names)],
                phase=Phase.DECODE,
                incarnation=1,
                outcome=outcome,
                count=1 if outcome is Outcome.REFUSED else 5,
                failure=failure if outcome is Outcome.REFUSED else None,
            )
            for n in range(RUNS)
        )
        batch = Batch(proxy=key, sequence=self._sequence, runs=runs, requests=RequestCounts(served=50))
        self.handle(Reported(batch=batch))

    def acknowledge(self, key: ProxyKey) -> None:
        """The proxy says what it applies and what runs."""
        resident = dict.fromkeys(self.names[:RUNS], 3)
        self.handle(ProxyAcked(proxy=key, epoch=1, version=self.version, resident=resident, unread={}))

    def answer_all(self, effects: Iterable[Effect], *, bad: Collection[str] = ()) -> None:
        """Answers every question, first asked first, until nothing more is asked. `bad` engines read no handoff."""
        waiting = deque(effects)
        while waiting:
            asked = waiting.popleft()
            event = answer(asked)
            if isinstance(asked, RunTransfer) and isinstance(event, TransferAnswered):
                self.transfers += 1
                if asked.consumer.engine in bad:
                    event = replace(event, consumed=UNREAD)
            if event is not None:
                waiting += self.handle(event)

    def sweep(self) -> list[ProbeHealth]:
        """Monitor passes up to the next liveness sweep; its probes."""
        while True:
            effects = self.run_pass()
            if probes := [e for e in effects if isinstance(e, ProbeHealth)]:
                return probes


def answer(asked: Effect) -> Input | None:
    """What an engine that works answers; None where nothing was asked."""
    match asked:
        case RunCheck(engine=engine, incarnation=incarnation, number=number, check=check):
            return CheckAnswered(engine=engine, incarnation=incarnation, number=number, check=check, result=CHECKED)
        case ProbeHealth():
            return healthy(asked)
        case RunTransfer(engine=engine, incarnation=incarnation, number=number):
            return TransferAnswered(
                engine=engine, incarnation=incarnation, number=number, produced=PRODUCED, consumed=CONSUMED
            )
        case ProbeInference(engine=engine, incarnation=incarnation, number=number):
            produced = None if asked.producer is None else PRODUCED
            return InferenceAnswered(
                engine=engine, incarnation=incarnation, number=number, produced=produced, consumed=CONSUMED
            )
    return None


def healthy(asked: ProbeHealth) -> HealthAnswered:
    """Health 200."""
    return HealthAnswered(
        engine=asked.engine,
        incarnation=asked.incarnation,
        number=asked.number,
        outcome=None,
        status=200,
        identity=PROCESS,
    )


def cost(action: Callable[[], T]) -> tuple[T, float]:
    """What it returned, and the CPU seconds that it took."""
    began = time.process_time()
    result = action()
    return result, time.process_time() - began


def mean(action: Callable[[], object], times: int) -> float:
    """The CPU seconds of one, of so many."""
    return cost(lambda: [action() for _ in range(times)])[1] / times


# --- what is measured -------------------------------------------------------------------------------------------------


def joining(engines: int, *, refuse: bool) -> Iterator[Line]:
    """From an empty start to everybody in service who can be."""
    core, made = cost(lambda: Core(engines, fresh=True))
    bad = frozenset(core.names[engines // 2 :: 2] if refuse else ())
    _, spent = cost(lambda: core.answer_all(core.handle(Woke()), bad=bad))
    core.store()
    assert core.content is not None
    assert sum(bool(e.phases) for e in core.content.engines.values()) == engines - len(bad)
    what = "joining, a quarter refuses KV" if refuse else "joining"
    yield what, made + spent, "s"
    yield f"{what}: longest step", core.longest_s * 1000, "ms"
    yield f"{what}: transfers for each engine", core.transfers / engines, ""


def steady(engines: int, proxies: int) -> Iterator[Line]:
    """Reports of successes, acknowledgements and monitor passes, nothing else."""
    core = Core(engines, proxies=proxies)
    core.run_pass()
    parts: dict[str, list[float]] = {"report": [], "acknowledgement": [], "monitor pass": []}
    for second in range(SECONDS):
        for key in core.proxies:
            parts["report"].append(cost(partial(core.report, key, Outcome.STREAM_COMPLETE, second=second))[1])
            parts["acknowledgement"].append(cost(partial(core.acknowledge, key))[1])
        parts["monitor pass"].append(cost(core.run_pass)[1])
    for what, took in parts.items():
        yield what, statistics.fmean(took) * 1e6, "µs"
    yield "per second, all proxies", sum(map(sum, parts.values())) / SECONDS * 100, "%"


def ramp(engines: int) -> Iterator[Line]:
    """Everybody has just returned; weights rise."""
    core = Core(engines, over_s=settings(1).ramp_s)
    version = core.version

    def rise() -> None:
        while (due := core.fleet.next_due()) is not None and due <= BEGIN + core.settings.ramp_s + 1:
            core.now = max(core.now, due)
            core.handle(Woke())

    _, spent = cost(rise)
    assert core.content is not None
    assert all(entry.weight == 1.0 for entry in core.content.engines.values())
    yield "ramp: each placement version", spent / (core.version - version) * 1000, "ms"
    yield "ramp: versions in a second", (core.version - version) / (core.now - BEGIN), ""


def deciding(engines: int) -> Iterator[Line]:
    """An engine is ejected: decided, ready to be published, on the wire."""
    core = Core(engines)
    before, names = core.content, itertools.cycle(core.names)

    def eject() -> None:
        core.now += 0.01
        core.handle(EjectCommand(engine=next(names), reason="measured"))

    yield "decision", mean(eject, 20) * 1000, "ms"
    after = core.content
    assert before is not None
    assert after is not None
    base = Placement(epoch=1, version=1, closed="", engines=before.engines)
    placement = Placement(epoch=1, version=2, closed="", engines=after.engines)
    message, took = cost(lambda: change_to_wire(base, placement, now=core.now).SerializeToString())
    yield "decision: change message", took * 1000, f"ms, {len(message) / 1024:.1f} KiB"
    message, took = cost(lambda: snapshot_to_wire(placement, now=core.now).SerializeToString())
    yield "decision: snapshot message", took * 1000, f"ms, {len(message) / 1024:.1f} KiB"


def failing(engines: int, proxies: int) -> Iterator[Line]:
    """Every proxy reports refused connections of `RUNS` engines once; most are ejected by it."""
    core = Core(engines, proxies=proxies)

    def refused() -> None:
        for key in core.proxies:
            core.report(key, Outcome.REFUSED, second=0)

    _, spent = cost(refused)
    yield "refused connections", spent, "s"


def suspects(engines: int) -> Iterator[Line]:
    """Half of the decode engines fail three streams each at once."""
    core = Core(engines, proxies=1)
    effects: list[Effect] = []

    def fail() -> None:
        for number, name in enumerate(core.names[engines // 2 :: 2]):
            failure = LegFailure(outcome=Outcome.STREAM_CUT, producer=core.names[0], producer_incarnation=1)
            one = Run(engine=name, phase=Phase.DECODE, incarnation=1, outcome=Outcome.STREAM_CUT, failure=failure)
            batch = Batch(proxy=core.proxies[0], sequence=number + 1, runs=(one, one, one))
            effects.extend(core.handle(Reported(batch=batch)))
        core.answer_all(effects)

    yield "suspects", cost(fail)[1], "s"


def sweeping(engines: int) -> Iterator[Line]:
    """A sweep in which everybody answers; then two in which half of the fleet is silent."""
    core = Core(engines)
    probes = core.sweep()
    yield "sweep: all answer", cost(lambda: core.answer_all(probes))[1], "s"

    def half(probes: list[ProbeHealth]) -> None:
        for number, probe in enumerate(probes):
            event = healthy(probe)
            silent = replace(event, outcome=Outcome.READ_TIMEOUT, status=0, identity=None)
            core.handle(silent if number % 2 else event)

    half(core.sweep())
    probes = core.sweep()
    yield "sweep: half is silent again", cost(lambda: half(probes))[1], "s"


def looking(engines: int, proxies: int) -> Iterator[Line]:
    """What others look at: views, the handoff, a rehearsal."""
    core = Core(engines, proxies=proxies)
    for key in core.proxies:
        core.report(key, Outcome.STREAM_COMPLETE, second=0)
        core.acknowledge(key)
    core.run_pass()
    yield "an event that changes nothing", mean(lambda: core.handle(Woke()), 100) * 1e6, "µs"
    yield "view", mean(lambda: core.fleet.view(now=core.now, stored=core.stored), 5) * 1000, "ms"
    document = to_document(core.fleet.save(now=core.now), wall=1.7e9, epoch=1, holder="a")
    size = len(json.dumps(document, separators=(",", ":"))) / 1024
    took = mean(lambda: to_document(core.fleet.save(now=core.now), wall=1.7e9, epoch=1, holder="a"), 5)
    yield "state handoff", took * 1000, f"ms, {size:.0f} KiB"
    yield "rehearsal", mean(lambda: copy.deepcopy(core.fleet), 2) * 1000, "ms"


def measured(engines: int, proxies: int) -> Iterator[Line]:
    """Every line for a fleet of that size."""
    yield from joining(engines, refuse=False)
    yield from joining(engines, refuse=True)
    yield from steady(engines, proxies)
    yield from ramp(engines)
    yield from deciding(engines)
    yield from failing(engines, proxies)
    yield from suspects(engines)
    yield from sweeping(engines)
    yield from looking(engines, proxies)


def main() -> None:
    """Prints a line of the table for each size as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[200, 1000], help="sizes of the fleet")
    parser.add_argument("--proxies", type=int, default=300, help="proxies that report each second (default 300)")
    options = parser.parse_args()
    for engines in options.engines:
        print(f"{engines} engines, {options.proxies} proxies", flush=True)
        for what, much, unit in measured(engines, options.proxies):
            print(f"  {what:45}{much:12.3f} {unit}", flush=True)


if __name__ == "__main__":
    main()
