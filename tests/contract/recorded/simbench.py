"""The bench on which simulated engines go through the recorded situations: quick ones, on a loop of their own."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from narwhal.clock import RealClock
from narwhal.sim.engine import Engine
from narwhal.sim.host import Host
from narwhal.sim.options import EngineOptions
from scripts.real_engines.bench import MODEL, Bench, Fault, Pace, Who
from scripts.real_engines.engines import Settings

# Everything that takes long on real engines is short here; the situations ask their bench how long to wait.
PACE = Pace(kv_lease_s=1.0, frozen_s=0.6, hang_s=0.6, leave_s=0.2, answer_s=15.0, linger_s=0.03)
STATES = {Fault.FREEZE: "frozen", Fault.FREEZE_CORE: "core-stopped"}
ENDS = {Fault.THAW: "frozen", Fault.THAW_CORE: "core-stopped"}
ACTS = {Fault.TERMINATE: "terminated", Fault.KILL: "killed", Fault.KILL_CORE: "core-killed"}
ENDINGS = {Fault.TERMINATE_ABORTING: "abort", Fault.TERMINATE_SILENTLY: "silent"}


class SimBench(Bench):
    """Two simulated engines on the loop of another thread, since situations are written for a blocking client."""

    pace = PACE

    def __init__(self, engines: dict[str, Engine], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.engines, self.loop = engines, loop

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def url(self, who: Who) -> str:
        return self.engines[who].url

    def fault(self, who: Who, fault: Fault) -> None:
        engine = self.engines[who]
        if fault in ENDS:
            self.call(engine.clear_faults(ENDS[fault]))
        elif fault in ENDINGS:
            self.call(engine.set_fault("terminated", ending=ENDINGS[fault]))
        else:
            self.call(engine.set_fault(STATES.get(fault) or ACTS[fault]))

    def restart(self, who: Who) -> None:
        self.call(self.engines[who].restart())


@contextmanager
def sim_bench(settings: Settings) -> Iterator[SimBench]:
    """A fresh pair, started as the recorded engines were."""
    shared: dict[str, Any] = {
        "model": MODEL,
        "block_size": settings.block_size,
        "max_model_len": settings.max_model_len,
        "kv_load_failure_policy": settings.kv_load_failure_policy,
        "kv_lease_s": PACE.kv_lease_s,
        "tpot_ms": 2.0,
        "home_handoffs": "fail",
        "handshake_timeout_s": 0.5,
        "resolve_timeout_s": 0.5,
    }
    options = [
        EngineOptions(id=who, engine_id=f"{who}-fixed" if settings.fixed_engine_id else None, **shared) for who in Who
    ]
    loop = asyncio.new_event_loop()
    host = Host(options, clock=RealClock(), log=lambda engine, what: None)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    bench = SimBench(host.engines, loop)
    try:
        bench.call(host.start())
        yield bench
    finally:
        bench.call(host.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
