"""Faults that are several things going wrong at once, as the common ones (`faults.py`) would seldom fall together."""

from random import Random
from typing import TYPE_CHECKING

from tests.simulation.operators import Operator

if TYPE_CHECKING:
    from tests.simulation.faults import Faults

SHARE = 0.5  # of the seeds have one


def held_up(faults: "Faults", lasts_s: float) -> None:
    """What the active process asks of the store stays in the network while its lease runs out, and arrives when another
    process has the lease, or is about to: renewals, and a write of what it knew. The store is slow, so the other has
    hardly begun."""
    sim = faults.sim
    control, slow_s = sim.active(), Random(f"slow while held up {sim.world.seed}").choice((0.3, 1.5, 1.5))
    if control is None or sim.store.slow_s:
        return
    sim.store.hold_up(control.name)
    sim.store.slow_s = slow_s
    faults.around_control(True)

    def end() -> None:
        faults.around_control(False)
        sim.store.slow_s = 0.0
        sim.store.let_go(control.name)

    faults.last(lasts_s, f"{control.name}: held up on its way to the store ({slow_s:g} s slow)", end)


def drained_unseen(faults: "Faults", lasts_s: float) -> None:
    """An operator drains an engine of which a proxy does not hear, that goes on using it: it is cut from control."""
    sim = faults.sim
    draw = Random(f"unseen {sim.world.seed}")
    proxy, name = draw.choice(sim.proxies), draw.choice(sorted(sim.engines))
    for control in sim.controls:
        sim.network.sever(proxy.name, control.name)
    operator = Operator(sim, (name,), give_up_s=lasts_s, restart=draw.random() < 0.5)

    def end() -> None:
        for control in sim.controls:
            sim.network.mend(proxy.name, control.name)
        operator.stop()

    faults.last(lasts_s, f"{name}: drained, and {proxy.name} cut from control", end)
    operator.begin()


ANYWHERE = (drained_unseen,)
LEASED = (held_up, held_up, drained_unseen)  # where the lease runs out by itself
LASTING_S = {held_up: (3.5, 6.0), drained_unseen: (15.0, 40.0)}
