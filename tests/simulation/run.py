"""One run of a seed: things go well, go wrong, are put right; then everything must come to rest as it should."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from narwhal.vocabulary import Phase
from tests.simulation.control import Control
from tests.simulation.engines import Engine
from tests.simulation.engines import Shape as Timing
from tests.simulation.faults import Faults
from tests.simulation.invariants import Watch
from tests.simulation.ledger import Ledger
from tests.simulation.plan import Plan, draw
from tests.simulation.proxies import Proxy
from tests.simulation.store import Store
from tests.simulation.world import Invariant, Network, Violation, World

# After the last fault every healthy engine is eligible and every proxy current within this many seconds: the longest
# back-off of a gate, and the longest relapse hold, are 300 s each and may follow one another.
RECOVERY_S = 660.0
# After that nothing is under way any more within: a request's longest deadline, then its report.
REST_S = 120.0

Tell = Callable[[float, str, str], None]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to."""

    seed: int
    violation: str = ""
    rule: Invariant | None = None
    events: int = 0
    virtual_s: float = 0.0
    recovered_s: float = 0.0  # from the last fault's end until everything was well
    resumes: int = 0
    faults: tuple[str, ...] = ()


class Simulation:
    """A fleet, its proxies and its control, in one world."""

    def __init__(self, seed: int, *, tell: Tell | None = None, plan: Plan | None = None) -> None:
        self.plan = plan = plan or draw(seed)
        self.world = world = World(seed, tell)
        self.network = Network(world)
        self.ledger = Ledger()
        self.store = Store(world, self.network, plan.lease_ttl_s)
        self.engines = {
            spec.id: Engine(world, self.network, self.ledger, spec.id, spec.role) for spec in plan.core.engines
        }
        for engine in self.engines.values():
            engine.peers = self.engines
        self.watch = self.make_watch()
        self.controls = [self.make_control(f"control-{n + 1}") for n in range(plan.controls)]
        self.proxies = [self.make_proxy(f"proxy-{n + 1}") for n in range(plan.proxies)]
        self.watch.proxies, self.watch.controls = self.proxies, self.controls
        self.control_troubles = 0
        self.faults = Faults(self, Random(f"faults {seed}"))
        self.recovered_at = 0.0
        self._arrivals = Random(f"arrivals {seed}")
        self._rate = plan.rate
        self._well_until = -1

    def make_watch(self) -> Watch:
        """For planted bugs to replace."""
        return Watch(self.world, self.engines, self.ledger, self.store)

    def make_control(self, name: str) -> Control:
        """For planted bugs to replace."""
        return Control(
            name,
            network=self.network,
            plan=self.plan,
            store=self.store,
            engines=self.engines,
            watch=self.watch,
        )

    def make_proxy(self, name: str) -> Proxy:
        """For planted bugs to replace."""
        return Proxy(name, network=self.network, plan=self.plan, fleet=self.engines, watch=self.watch)

    def active(self) -> Control | None:
        """The control process that leads."""
        return next((c for c in self.controls if c.term is not None), None)

    # --- traffic --------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self._arrivals
        gap_s = rng.expovariate(self._rate)
        proxy = rng.choice(self.proxies)
        timing = Timing(
            prefill_s=rng.uniform(0.02, 0.4),
            first_s=rng.uniform(0.02, 0.3),
            chunks=rng.randint(2, 5),
            gap_s=rng.uniform(0.05, 0.6),
        )
        stream, idle_closed = rng.random() < 0.8, rng.random() < 0.01
        leaves_after_s = rng.uniform(0.0, 4.0) if rng.random() < 0.04 else None
        if proxy.alive and self._rate > 0.001:
            proxy.deliver(self._ask, proxy, stream, timing, idle_closed, leaves_after_s)
        self.world.after(gap_s, self._arrive)

    @staticmethod
    def _ask(proxy: Proxy, stream: bool, timing: Timing, idle_closed: bool, leaves_after_s: float | None) -> None:
        proxy.arrive(stream=stream, timing=timing, idle_closed=idle_closed, leaves_after_s=leaves_after_s)

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises `Violation`."""
        world = self.world
        for control in self.controls:
            control.boot()
        for proxy in self.proxies:
            proxy.controls = self.controls
            proxy.boot()
        self.world.after(1.0, self._arrive)
        self.faults.plan()
        world.run(10_000.0, lambda: self.faults.over)
        ended_at = world.now
        world.say("world", "nothing is wrong any more")
        self._rate = min(self._rate, 1.0)
        if not world.run(ended_at + RECOVERY_S, self._well):
            raise Violation(Invariant.RECOVERY, f"not well {RECOVERY_S:g} s after the last fault: {self._unwell()}")
        self.recovered_at = world.now - ended_at
        world.say("world", "all is well")
        self._rate = 1e-6
        if not world.run(world.now + REST_S, self._at_rest):
            raise Violation(Invariant.LEGS_END, f"not at rest {REST_S:g} s after the last request")
        active = self.active()
        if active is not None and active.term is not None:
            self.watch.at_rest(active.term)

    def _well(self) -> bool:
        """Looked at once a second: it is not cheap."""
        if int(self.world.now) == self._well_until:
            return False
        self._well_until = int(self.world.now)
        return not self._unwell()

    def _unwell(self) -> str:
        active = self.active()
        placement = active.publisher.placement if active is not None else None
        if placement is None:
            return "nobody leads"
        for entry in placement.engines.values():
            if entry.holds or not entry.phases:
                return f"{entry.id} is held by {', '.join(entry.holds)}, serves {sorted(entry.phases)}"
        for phase in Phase:
            if not placement.candidates(phase, now=0.0):
                return f"nobody serves {phase}"
        for proxy in self.proxies:
            if proxy.held.order != placement.order:
                return f"{proxy.name} holds {proxy.held.order}, published is {placement.order}"
            if proxy.not_ready():
                return f"{proxy.name} is not ready: {proxy.not_ready()}"
        return ""

    def _at_rest(self) -> bool:
        if any(p.running or p.backlog.sent or p.backlog.waiting for p in self.proxies):
            return False
        return not any(c.term is not None and c.term.prober.running for c in self.controls)


def run_seed(seed: int, *, tell: Tell | None = None, plan: Plan | None = None) -> Result:
    """Run one seed to its end or to its first violation."""
    simulation = Simulation(seed, tell=tell, plan=plan)
    violation, rule = "", None
    try:
        simulation.run()
    except Violation as found:
        violation, rule = str(found), found.rule
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        rule = Invariant.NOTHING_RAISES
        violation = f"{rule}: {type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        if tell is not None:
            tell(simulation.world.now, "world", "".join(traceback.format_exception(error)))
    return Result(
        seed=seed,
        violation=violation,
        rule=rule,
        events=simulation.world.events,
        virtual_s=simulation.world.now,
        recovered_s=simulation.recovered_at,
        resumes=simulation.watch.resumes,
        faults=tuple(simulation.faults.told),
    )
