"""A fleet whose engines are drained and come back: what the tests of drains, returns and maintenance share."""

from collections.abc import Iterable
from typing import Any

import pytest

from narwhal.control.core.effects import CaptureIdentity, Effect
from narwhal.control.core.events import (
    CommandRefusedError,
    DrainCommand,
    ProcessIdentity,
    ProxyAcked,
    ProxyConnected,
    Refusal,
    UndrainCommand,
)
from narwhal.reports import ProxyKey
from narwhal.vocabulary import Check, Verdict
from tests.core.rig import EDGE, PROCESS, Rig, decode, of, prefill

NEWER = ProcessIdentity(version=PROCESS.version, started_at=PROCESS.started_at + 60)
WALL = PROCESS.started_at + 30  # of the commands: after the process that runs, before the one that comes
FLEET = (prefill("p"), decode("d"), decode("e"))


class Ops(Rig):
    """A fleet with its proxies and its operator."""

    def drain(self, *engines: str, deadline_s: float = 300.0, restart: bool = True) -> tuple[Effect, ...]:
        command = DrainCommand(engines=engines, reason="disk", deadline_s=deadline_s, restart=restart, wall=WALL)
        return self.send(command)

    def undrain(self, *engines: str) -> list[Effect]:
        effects = self.send(UndrainCommand(engines=engines))
        return [*effects, *self.pass_gate(effects)]

    def hello(self, *proxies: ProxyKey) -> None:
        for proxy in proxies:
            self.send(ProxyConnected(proxy=proxy, address="x:1", pid=1, highest_epoch=0))

    def ack(self, proxy: ProxyKey = EDGE, *, unread: dict[str, int] | None = None, **legs: int) -> tuple[Effect, ...]:
        """It applies the newest placement, and has these legs."""
        return self.send(ProxyAcked(proxy=proxy, epoch=1, version=self.version, resident=legs, unread=unread or {}))

    def out(self, identity: ProcessIdentity | None = PROCESS) -> None:
        """What is decided is published, and who was asked for an identity gives it."""
        for capture in of(self.publish(), CaptureIdentity):
            self.answer_capture(capture, identity)

    def settle(self, *engines: str, restart: bool = True, identity: ProcessIdentity | None = PROCESS) -> None:
        self.drain(*engines, restart=restart)
        self.out(identity)
        for engine in engines:
            assert self.settled(engine)

    def settled(self, engine: str) -> bool:
        drain = self.engine(engine).drain
        return drain is not None and drain.settled

    def waits(self, engine: str) -> tuple[str, ...]:
        drain = self.engine(engine).drain
        assert drain is not None
        return drain.waits_for

    def check(self, engine: str, check: Check) -> tuple[Verdict, str]:
        found = next(c for c in self.engine(engine).checks if c.check is check)
        return found.verdict, found.detail


def refusal(rig: Ops, command: Any) -> tuple[Refusal, str]:
    before, effects = rig.saved(), len(rig.effects)
    with pytest.raises(CommandRefusedError) as refused:
        rig.send(command)
    assert rig.saved() == before
    assert len(rig.effects) == effects
    return refused.value.refusal, str(refused.value)


def serving(rig: Ops) -> set[str]:
    return {e.id for e in rig.fleet.placement(now=rig.now).engines.values() if e.phases}


def not_ready(rig: Ops) -> str:
    return rig.fleet.view(now=rig.now).not_ready


def captured(rig: Ops, effects: Iterable[Effect]) -> None:
    for capture in of(effects, CaptureIdentity):
        rig.answer_capture(capture)
