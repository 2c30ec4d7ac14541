"""What goes wrong, when and for how long, drawn from the seed; and how each of it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from narwhal.control.core.events import EjectCommand, ProbeCommand
from narwhal.vocabulary import Stage
from tests.simulation import rare
from tests.simulation.engines import Engine, Trouble
from tests.simulation.operators import Operator

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

# After a fault between others that nobody can tell from an engine's own.
UNSURE_S = 90.0
LASTING_S = (5.0, 40.0)
LOST_SHARE = 0.3  # of the seeds have an engine, or all of a role, that answer 404
LATE_S = 1.5  # an answer of the store, at the worst
GONE = (Trouble.DOWN, Trouble.HANG)
UNREAD = (Trouble.UNREADABLE, Trouble.MUTE_KV)
# Drawn apart from the others.
APART = (Trouble.NOT_FOUND,)
SHARED = frozenset({Trouble.RESET, Trouble.HTTP_500, Trouble.HTTP_503, Trouble.BUSY, Trouble.CUT, Trouble.SILENT})


@dataclass
class Faults:
    """Begins and ends them; knows when the last one is over."""

    sim: "Simulation"
    rng: Random
    open: int = 0
    planned: int = 0
    told: list[str] = field(default_factory=list)

    def plan(self) -> None:
        """Draw what will go wrong."""
        plan, rng, at = self.sim.plan, self.rng, rng_start(self.rng)
        for _ in range(plan.troubles):
            lasts_s = rng.uniform(*LASTING_S)
            kind = rng.choice(KINDS)
            self.planned += 1
            self.sim.world.after(at, self._begin, kind, lasts_s)
            at += rng.uniform(0.0, 15.0) if plan.overlap else lasts_s + rng.uniform(0.0, 40.0)
        slowly = Random(f"slow {plan.seed}")
        for _ in range(slowly.choice((0, 1, 1, 2))):
            self.planned += 1
            kind = slowly.choice((slowed, slowed_alone))
            self.sim.world.after(slowly.uniform(10.0, 40.0), self._begin, kind, slowly.uniform(20.0, 60.0))
        lost = Random(f"lost {plan.seed}")
        if lost.random() < LOST_SHARE:
            self.planned += 1
            self.sim.world.after(lost.uniform(10.0, 60.0), self._begin, model_lost, lost.uniform(*LASTING_S))
        # Drawn apart as well, and mostly after everything else, so that a seed is the run it was up to then.
        rarely = Random(f"rare {plan.seed}")
        if rarely.random() < rare.SHARE:
            self.planned += 1
            kind = rarely.choice(rare.LEASED if plan.lease_ttl_s else rare.ANYWHERE)
            at = rarely.choice((at, at, rarely.uniform(10.0, 40.0)))
            self.sim.world.after(at, self._begin, kind, rarely.uniform(*rare.LASTING_S[kind]))

    @property
    def over(self) -> bool:
        """Whether nothing is wrong any more, and nothing will be."""
        return not self.planned and not self.open

    def _begin(self, kind: Callable[["Faults", float], None], lasts_s: float) -> None:
        self.planned -= 1
        kind(self, lasts_s)

    def last(self, seconds: float, what: str, end: Callable[[], None]) -> None:
        """It lasts so long, and then `end` puts it right."""
        self.open += 1
        self.told.append(what)
        self.sim.world.say("world", f"{what} for {seconds:.1f} s")

        def over() -> None:
            self.open -= 1
            self.sim.world.say("world", f"over: {what}")
            end()

        self.sim.world.after(seconds, over)

    def around_control(self, begun: bool) -> None:
        """Something is wrong between control and what it needs, or is not any more."""
        watch = self.sim.watch
        self.sim.control_troubles += 1 if begun else -1
        watch.trouble_at = None if self.sim.control_troubles else self.sim.world.now

    def an_engine(self) -> Engine:
        """One that nothing is wrong with, where there is one."""
        engines = list(self.sim.engines.values())
        return self.rng.choice([e for e in engines if not e.sick] or engines)


def rng_start(rng: Random) -> float:
    """Things go well first."""
    return rng.uniform(8.0, 15.0)


# --- engines ----------------------------------------------------------------------------------------------------------


def engine_trouble(faults: Faults, lasts_s: float) -> None:
    """One engine has one trouble."""
    rng, engine = faults.rng, faults.an_engine()
    kind = rng.choice((*(t for t in Trouble if t not in APART), *(*GONE, *UNREAD) * 2))
    if engine.sick:
        return
    share = rng.choice((1.0, 1.0, 0.6)) if kind in SHARED else 1.0
    if kind in GONE and rng.random() < 0.6:
        lasts_s += 50.0  # long enough for sweeps to find it out alone
    if kind is Trouble.SLOW:
        engine.slow_factor = rng.choice((5.0, 30.0, 300.0))
    engine.trouble(kind, share)
    faults.last(lasts_s, f"{engine.name}: {kind} ({share:g})", lambda: engine.relieve(kind))


def slowed(faults: Faults, lasts_s: float) -> None:
    """One engine takes three times as long for everything, and nothing fails (spec H5)."""
    engine = faults.an_engine()
    if not engine.sick:
        engine.slow_factor = 3.0
        engine.trouble(Trouble.SLOW)
        faults.last(lasts_s, f"{engine.name}: three times as slow", lambda: engine.relieve(Trouble.SLOW))


def slowed_alone(faults: Faults, lasts_s: float) -> None:
    """The same, and when it may have been found out the others of its role go: it is better than none (spec H2)."""
    slowed(faults, lasts_s)
    sim = faults.sim
    slow = [e.name for e in sim.engines.values() if e.slow_factor == 3.0 and Trouble.SLOW in e.troubles]

    def others() -> None:
        for engine in sim.engines.values():
            if engine.name not in slow and not engine.sick and any(engine.role is sim.engines[s].role for s in slow):
                engine.trouble(Trouble.DOWN)
                faults.last(lasts_s / 3, f"{engine.name}: down", _relief(engine))
        faults.planned -= 1

    faults.planned += 1
    sim.world.after(lasts_s / 2, others)


def model_lost(faults: Faults, lasts_s: float) -> None:
    """One engine, or now and then each of its role, answers 404 to whatever is to be generated, and lists the model."""
    draw, engines = Random(f"lost by {faults.sim.plan.seed}"), list(faults.sim.engines.values())
    engine = draw.choice(engines)
    alike = [e for e in engines if e.role is engine.role] if draw.random() < 0.3 else [engine]
    for one in alike:
        if not one.sick:
            one.trouble(Trouble.NOT_FOUND)
            faults.last(lasts_s, f"{one.name}: {Trouble.NOT_FOUND}", _found(one))


def _found(engine: Engine) -> Callable[[], None]:
    return lambda: engine.relieve(Trouble.NOT_FOUND)


def engine_restart(faults: Faults, lasts_s: float) -> None:
    """One engine is restarted in place, sometimes with its fixed id: then old readers cannot read from it."""
    rng, engine = faults.rng, faults.an_engine()
    if engine.sick:
        return
    keep_id = rng.random() < 0.4
    engine.restart(rng.uniform(0.05, 6.0), keep_id=keep_id)

    def end() -> None:
        if engine.alive:
            engine.poisoned = set()
            engine.sick_at = faults.sim.world.now

    faults.last(max(7.0, lasts_s), f"{engine.name}: restarted{' with its old id' if keep_id else ''}", end)


def every_engine_down(faults: Faults, lasts_s: float) -> None:
    """All engines go at once."""
    for engine in faults.sim.engines.values():
        if not engine.sick:
            engine.trouble(Trouble.DOWN)
            faults.last(lasts_s * faults.rng.uniform(0.5, 1.0), f"{engine.name}: down", _relief(engine))


def _relief(engine: Engine) -> Callable[[], None]:
    return lambda: engine.relieve(Trouble.DOWN)


def pair_cut(faults: Faults, lasts_s: float) -> None:
    """Two engines cannot reach each other: nobody can tell which of them is the fault."""
    rng, network = faults.rng, faults.sim.network
    if len(faults.sim.engines) < 2:
        return
    one, other = rng.sample(sorted(faults.sim.engines), 2)
    network.sever(one, other)
    for name in (one, other):
        faults.sim.watch.blame.excuse(name, lasts_s + UNSURE_S)
    faults.last(lasts_s, f"{one} and {other} cut", lambda: network.mend(one, other))


# --- operators --------------------------------------------------------------------------------------------------------


def drained(faults: Faults, lasts_s: float) -> None:
    """An operator drains one engine, or all; restarts what is ready to stop, or what is late; undrains it."""
    rng, sim = faults.rng, faults.sim
    names = sorted(sim.engines) if rng.random() < 0.2 else [rng.choice(sorted(sim.engines))]
    operator = Operator(sim, tuple(names), give_up_s=lasts_s, restart=rng.random() < 0.7)
    faults.last(lasts_s, f"{' and '.join(names)}: drained", operator.stop)
    operator.begin()


def ejected_by_hand(faults: Faults, _lasts_s: float) -> None:
    """An operator ejects an engine, or has it probed."""
    sim, engine = faults.sim, faults.rng.choice(sorted(faults.sim.engines))
    command = faults.rng.choice((EjectCommand(engine=engine, reason="by hand"), ProbeCommand(engine=engine)))
    active = sim.active()
    if active is not None and active.term is not None:
        active.term.command(command)
    faults.last(1.0, f"{engine}: {type(command).__name__}", lambda: None)


def _apart(faults: Faults) -> bool:
    """A coin of its own, so that whatever else a seed draws is what it was."""
    return Random(f"apart {faults.sim.world.seed} {len(faults.told)}").random() < 0.5


# --- control and store ------------------------------------------------------------------------------------------------


def control_killed(faults: Faults, lasts_s: float) -> None:
    """The active control process dies, and comes back."""
    sim = faults.sim
    control = sim.active() or sim.controls[0]
    if not control.alive:
        return
    control.kill()
    faults.around_control(True)

    def end() -> None:
        faults.around_control(False)
        control.restart()

    faults.last(faults.rng.choice((0.1, lasts_s)), f"{control.name}: killed", end)


def takeover_behind_a_cut(faults: Faults, lasts_s: float) -> None:
    """Proxies are cut from the active process for less than they would notice; meanwhile it decides, and dies.

    What it had sent reaches them after its successor has spoken.
    """
    sim, rng = faults.sim, faults.rng
    control = sim.active()
    if control is None or control.term is None or not control.alive or control.paused:
        return
    for proxy in sim.proxies:
        sim.network.sever(proxy.name, control.name)
    control.term.command(EjectCommand(engine=rng.choice(sorted(sim.engines)), reason="by hand"))
    faults.around_control(True)
    sim.world.after(0.1, control.kill)

    def mend() -> None:
        for proxy in sim.proxies:
            sim.network.mend(proxy.name, control.name)

    sim.world.after(4.5, mend)

    def end() -> None:
        faults.around_control(False)
        control.restart()

    faults.last(max(6.0, lasts_s), f"{control.name}: decides behind a cut and is killed", end)


def control_frozen(faults: Faults, lasts_s: float) -> None:
    """The active control process is stopped and continued."""
    sim = faults.sim
    control = sim.active() or sim.controls[0]
    if not control.alive or control.paused:
        return
    control.pause()
    faults.around_control(True)

    def end() -> None:
        faults.around_control(False)
        control.resume()

    faults.last(lasts_s / 2, f"{control.name}: stopped", end)


def control_cut_from_engines(faults: Faults, lasts_s: float) -> None:
    """Control reaches no engine, proxies do."""
    sim = faults.sim
    for control in sim.controls:
        for engine in sim.engines:
            sim.network.sever(control.name, engine)
    faults.around_control(True)

    def end() -> None:
        faults.around_control(False)
        for control in sim.controls:
            for engine in sim.engines:
                sim.network.mend(control.name, engine)

    faults.last(lasts_s, "control cut from engines", end)


def control_cut_from_store(faults: Faults, lasts_s: float) -> None:
    """The active control process cannot reach the store. Sometimes what it hears at last of it is late."""
    sim = faults.sim
    control = sim.active() or sim.controls[0]
    late = _apart(faults)
    sim.store.late = {control.name: LATE_S} if late else {}
    lead_s = 2 * LATE_S if late else 0.0
    sim.world.after(lead_s, sim.network.sever, control.name, sim.store.name)
    faults.around_control(True)

    def end() -> None:
        faults.around_control(False)
        sim.store.late = {}
        sim.network.mend(control.name, sim.store.name)

    faults.last(lead_s + lasts_s, f"{control.name} cut from the store{', after late answers' if late else ''}", end)


def store_failing(faults: Faults, lasts_s: float) -> None:
    """The store answers with errors, though it may have done what it was asked."""
    sim = faults.sim
    if sim.store.failing:
        return
    sim.store.failing = True
    faults.around_control(True)

    def end() -> None:
        faults.around_control(False)
        sim.store.failing = False

    faults.last(lasts_s, "store failing", end)


def store_slow(faults: Faults, lasts_s: float) -> None:
    """The store takes its time; beyond a call's bound what was asked is done all the same, and nobody hears of it."""
    sim = faults.sim
    sim.store.slow_s = faults.rng.choice((0.3, 1.5, 2.5))
    faults.around_control(True)

    def end() -> None:
        faults.around_control(False)
        sim.store.slow_s = 0.0

    faults.last(lasts_s, f"store slow ({sim.store.slow_s:g} s)", end)


def answers_lost(faults: Faults, lasts_s: float) -> None:
    """Answers to probes come late, twice or never."""
    sim = faults.sim
    for control in sim.controls:
        control.answers_in_trouble = True
    faults.around_control(True)

    def end() -> None:
        faults.around_control(False)
        for control in sim.controls:
            control.answers_in_trouble = False

    faults.last(lasts_s, "answers to probes in trouble", end)


def stage_failing(faults: Faults, lasts_s: float) -> None:
    """One stage of the monitor raises in every pass."""
    sim, stage = faults.sim, faults.rng.choice([s for s in Stage if s is not Stage.HANDOFF])
    for control in sim.controls:
        control.failing_stage = stage
    faults.around_control(True)

    def end() -> None:
        faults.around_control(False)
        for control in sim.controls:
            control.failing_stage = None

    faults.last(lasts_s, f"stage {stage} raises", end)


# --- proxies ----------------------------------------------------------------------------------------------------------


def proxy_killed(faults: Faults, lasts_s: float) -> None:
    """A proxy dies, and is started again as a newer boot."""
    proxy = faults.rng.choice(faults.sim.proxies)
    if not proxy.alive:
        return
    proxy.kill()
    faults.last(min(lasts_s, 10.0), f"{proxy.name}: killed", proxy.restart)


def proxy_frozen(faults: Faults, lasts_s: float) -> None:
    """A proxy is stopped and continued."""
    proxy = faults.rng.choice(faults.sim.proxies)
    if not proxy.alive or proxy.paused:
        return
    proxy.pause()
    faults.last(lasts_s, f"{proxy.name}: stopped", proxy.resume)


def proxy_cut_from_control(faults: Faults, lasts_s: float) -> None:
    """A proxy does not reach control, but engines."""
    sim = faults.sim
    proxy = faults.rng.choice(sim.proxies)
    for control in sim.controls:
        sim.network.sever(proxy.name, control.name)

    def end() -> None:
        for control in sim.controls:
            sim.network.mend(proxy.name, control.name)

    faults.last(lasts_s, f"{proxy.name} cut from control", end)


def proxy_cut_from_engines(faults: Faults, lasts_s: float) -> None:
    """A proxy reaches control, but no engine.

    Three failures on the first engine it tries come before anybody can tell that it fails on most (spec F12), so
    what is said of engines meanwhile is excused.
    """
    sim = faults.sim
    proxy = faults.rng.choice(sim.proxies)
    for engine in sim.engines:
        sim.network.sever(proxy.name, engine)
        sim.watch.blame.excuse(engine, lasts_s + UNSURE_S)

    def end() -> None:
        for engine in sim.engines:
            sim.network.mend(proxy.name, engine)

    faults.last(lasts_s, f"{proxy.name} cut from engines", end)


def proxy_out_of_descriptors(faults: Faults, lasts_s: float) -> None:
    """A proxy cannot open connections."""
    proxy = faults.rng.choice(faults.sim.proxies)
    proxy.out_of_descriptors = True

    def end() -> None:
        proxy.out_of_descriptors = False

    faults.last(lasts_s, f"{proxy.name}: no descriptors", end)


def streams_reset(faults: Faults, _lasts_s: float) -> None:
    """Connections between proxies and control break, again and again."""
    sim = faults.sim

    def once() -> None:
        for proxy in sim.proxies:
            for stream in (proxy.reporting.stream, *(link.stream for link in proxy.links)):
                if stream is not None and faults.rng.random() < 0.5:
                    stream.reset()

    for number in range(faults.rng.randint(1, 6)):
        sim.world.after(number * faults.rng.uniform(0.1, 3.0), once)
    faults.last(18.0, "streams break", lambda: None)


KINDS: tuple[Callable[[Faults, float], None], ...] = (
    *(engine_trouble,) * 12,
    *(engine_restart,) * 3,
    every_engine_down,
    pair_cut,
    control_killed,
    control_killed,
    takeover_behind_a_cut,
    control_frozen,
    control_cut_from_engines,
    control_cut_from_engines,
    control_cut_from_store,
    drained,
    drained,
    ejected_by_hand,
    store_failing,
    store_slow,
    answers_lost,
    stage_failing,
    proxy_killed,
    proxy_frozen,
    proxy_cut_from_control,
    proxy_cut_from_engines,
    proxy_out_of_descriptors,
    streams_reset,
)
