"""The faults of the tour: what happens to which engine, and what must come of it."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.scene import Layout, Scene

Act = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the tour."""

    name: str
    victim: str  # the engine that is at fault; empty: no engine is
    begin: Act
    end: Act
    out: bool = True  # whether the victim must be taken out
    within_s: float = 60.0  # in which it must be out; or for how long it is watched, when nobody must be
    layout: Layout = field(default_factory=Layout)
    proxy: str = ""  # the proxy that must be shown as the fault
    event: str = ""  # a kind of event that must be told
    killed: bool = False  # the victim's own records are lost
    users: int = 8


def shows(name: str, victim: str, mode: str, *, out: bool = True, within_s: float = 60.0, **params: Any) -> Fault:
    """A fault of the simulator in one engine."""

    async def begin(scene: Scene) -> None:
        await scene.misbehave(victim, mode, **params)

    async def end(scene: Scene) -> None:
        await scene.behave(victim)

    return Fault(name=name, victim=victim, begin=begin, end=end, out=out, within_s=within_s)


def killed(name: str, victim: str, layout: Layout | None = None) -> Fault:
    """SIGKILL; its end is a new process at the same address."""

    async def begin(scene: Scene) -> None:
        await scene.kill(victim)

    async def end(scene: Scene) -> None:
        await scene.start_engine(victim)

    return Fault(name=name, victim=victim, begin=begin, end=end, layout=layout or Layout(), killed=True)


def core_killed(name: str, victim: str) -> Fault:
    """The engine's core is killed, and the process ends with it; the fault's end is a new process at the address."""

    async def begin(scene: Scene) -> None:
        await scene.misbehave(victim, "core-killed")

    async def end(scene: Scene) -> None:
        await scene.kill(victim)  # what is left of it
        await scene.start_engine(victim)

    return Fault(name=name, victim=victim, begin=begin, end=end, killed=True)


def restarted(name: str, victim: str) -> Fault:
    """SIGKILL, and a new process at the same address as soon as it starts."""

    async def begin(scene: Scene) -> None:
        await scene.kill(victim)
        await scene.start_engine(victim)

    return Fault(name=name, victim=victim, begin=begin, end=_nothing, killed=True)


def stopped(name: str, victim: str) -> Fault:
    """SIGSTOP; its end is SIGCONT."""

    async def begin(scene: Scene) -> None:
        scene.engines[victim].signal(signal.SIGSTOP)

    async def end(scene: Scene) -> None:
        scene.engines[victim].signal(signal.SIGCONT)

    return Fault(name=name, victim=victim, begin=begin, end=end, killed=True)


def dead_producer(name: str) -> Fault:
    """A prefill engine is killed while many of its handoffs are still to be read: decode engines take half a second
    to come to each."""

    async def begin(scene: Scene) -> None:
        for reader in ("d1", "d2"):
            await scene.misbehave(reader, "delay", seconds=0.5, phase="decode")
        await asyncio.sleep(2)  # until users wait for such answers
        await scene.kill("p1")

    async def end(scene: Scene) -> None:
        for reader in ("d1", "d2"):
            await scene.behave(reader)
        await scene.start_engine("p1")

    return Fault(name=name, victim="p1", begin=begin, end=end, killed=True, users=24)


def cut_off(name: str, *, silent: bool) -> Fault:
    """Control does not reach the engines, and proxies do."""

    async def begin(scene: Scene) -> None:
        for gate in scene.gates.values():
            gate.shut(scene.control.pid, silent=silent)

    async def end(scene: Scene) -> None:
        for gate in scene.gates.values():
            gate.open()

    return Fault(
        name=name,
        victim="",
        begin=begin,
        end=end,
        out=False,
        within_s=40.0,
        layout=Layout(gated=True),
        event="control_cut_off",
    )


def starved(name: str) -> Fault:
    """A proxy has no file descriptor left."""
    fed: list[Callable[[], None]] = []

    async def begin(scene: Scene) -> None:
        pid, limits = await scene.starve(0)
        fed.append(lambda: scene.feed(pid, limits))

    async def end(scene: Scene) -> None:
        fed.pop()()

    return Fault(name=name, victim="", begin=begin, end=end, out=False, within_s=15.0, proxy="proxy-1")


async def _nothing(scene: Scene) -> None:
    pass


def _in(layout: Layout, fault: Fault) -> Fault:
    return Fault(**{**vars(fault), "layout": layout})


PAIR = Layout(engines=("p1", "d1"))
PINNED_PAIR = Layout(engines=("p1", "d1"), pinned=True)
ONE = Layout(engines=("d1",))
# Users wait for a prefill that hangs as long as it may take; two minutes would be longer than they are watched.
SOON_LATE = Layout(sections={"serving": {"prefill_timeout_s": 40}})

FAULTS: tuple[Fault, ...] = (
    killed("SIGKILL, decode", "d1"),
    killed("SIGKILL, prefill", "p1"),
    restarted("SIGKILL and restart in place", "d1"),
    stopped("SIGSTOP, SIGCONT, decode", "d1"),
    stopped("SIGSTOP, SIGCONT, prefill", "p1"),
    shows("health green, generation dead", "d1", "core-stopped"),
    shows("500s, decode", "d1", "status", status=500),
    shows("500s, prefill", "p1", "status", status=500),
    shows("429s, decode", "d1", "status", status=429, out=False, within_s=10.0),
    shows("stall mid-stream", "d1", "stall", after=3),
    shows("cut mid-stream", "d1", "cut", after=3),
    shows("error event, then the marker", "d1", "error-event", after=3),
    shows("marker without tokens", "d1", "done-without-tokens"),
    shows("unreadable handoff", "p1", "bad-handoff", variant="no-engine-id"),
    shows("slow first token", "d1", "slow-first-token", seconds=30.0),
    dead_producer("producer dead while decode pulls"),
    shows("producer alive, its KV unreadable", "p1", "serve-fails"),
    _in(SOON_LATE, shows("hung prefill, health green", "p1", "hang", phase="prefill", within_s=90.0)),
    cut_off("control cut off, silent", silent=True),
    cut_off("control cut off, reset", silent=False),
    starved("a proxy without descriptors"),
    killed("one of each, decode killed", "d1", PAIR),
    _in(PAIR, shows("one of each, decode 500s", "d1", "status", status=500)),
    killed("one of each, pinned, decode killed", "d1", PINNED_PAIR),
    killed("a fleet of one, killed", "d1", ONE),
    _in(ONE, shows("a fleet of one, 500s", "d1", "status", status=500)),
    _in(ONE, shows("a fleet of one, generation dead", "d1", "core-stopped")),
)
