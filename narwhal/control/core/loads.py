"""How loaded a role is: what its legs take against their targets, and who waits (spec C3). Pure.

Decides: one number for each role. It cannot see: floors, moves or what follows from it.

| role | its load is the largest of |
|---|---|
| prefill | time to the first token over `slo.ttft_s`; its queue over `slo.ttft_s` |
| decode | time per output token over `slo.tpot_s`; time to the first token over `slo.ttft_s`; its queue over that |

Times are those that nine of ten legs keep within, of the last intervals. A queue is how long the legs that wait would
take at the pace of these intervals: it shows what finished legs do not tell yet.

What a role could give up is more than its load. Prompts are computed one after the other: prefill keeps well within its
target until it is nearly always busy, and then does not at all. Of prefill `occupied` is therefore at least how much of
the time its engines have a prompt.
"""

from dataclasses import dataclass

from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.signals import Signals
from narwhal.measures import Measure
from narwhal.vocabulary import Phase

SHARE = 0.9  # of the legs that are within the latency


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One role's load. Latencies are None where nothing was measured."""

    load: float = 0.0  # from `expand` on it wants an engine
    occupied: float = 0.0  # up to `shrink` it can give one up
    latency: float = 0.0  # the load without the queue: at or above 1 the role misses its target
    first_s: float | None = None
    step_s: float | None = None
    wait_s: float | None = None  # for a seat, before the first leg
    prompt_tokens: float | None = None  # the median
    output_tokens: float | None = None  # the median
    queue_s: float = 0.0
    waiting: int = 0  # legs without their first token
    busy: float = 0.0  # how much of the time an engine has such legs, 0 to 1


def measured(role: Phase, settings: CoreSettings, signals: Signals, *, now: float) -> Load:
    """The load of `role` now."""
    sketches = signals.measured(role)
    first_s, step_s = sketches[Measure.FIRST].quantile(SHARE), sketches[Measure.STEP].quantile(SHARE)
    waiting = signals.waiting(role, now=now)
    span_s = signals.intervals * settings.monitor_interval_s
    queue_s = waiting * span_s / max(1, sketches[Measure.FIRST].total)
    targets = settings.roles
    latency = (first_s or 0.0) / targets.ttft_s
    if role is Phase.DECODE:
        latency = max(latency, (step_s or 0.0) / targets.tpot_s)
    load, busy = max(latency, queue_s / targets.ttft_s), signals.busy(role)
    return Load(
        load=load,
        occupied=max(load, busy) if role is Phase.PREFILL else load,
        latency=latency,
        first_s=first_s,
        step_s=step_s,
        wait_s=sketches[Measure.WAIT].quantile(SHARE),
        prompt_tokens=sketches[Measure.PROMPT].quantile(0.5),
        output_tokens=sketches[Measure.OUTPUT].quantile(0.5),
        queue_s=queue_s,
        waiting=waiting,
        busy=busy,
    )
