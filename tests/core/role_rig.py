"""A fleet whose roles are loaded: what the tests of role control share."""

from typing import Any

from narwhal.control.core.events import RoleCommand
from narwhal.control.core.handoff import SavedFleet
from narwhal.control.core.records import EventKind
from narwhal.control.core.settings import EngineSpec, RoleMode, RoleSettings
from narwhal.control.core.view import RolesView, RoleView
from narwhal.reports import ProxyKey
from narwhal.vocabulary import Phase
from tests.core.rig import Rig, decode, prefill

TTFT, TPOT = 2.0, 0.1  # targets, seconds
P, D = Phase.PREFILL, Phase.DECODE
THIRD = ProxyKey(id="third", slot=0, boot=1)
FOUR = (prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
SIX = (prefill("p1"), prefill("p2"), prefill("p3"), decode("d1"), decode("d2"), decode("d3"))


class Fleet(Rig):
    """Whose roles have the loads that a test gives them, told by a proxy every second."""

    def __init__(self, *engines: EngineSpec, saved: SavedFleet | None = None, **roles: Any) -> None:
        fields = {"mode": RoleMode.AUTO, **roles}
        super().__init__(*engines, saved=saved, liveness_every=0, roles=RoleSettings(**fields))

    def loaded(self, p: float, d: float, passes: int = 1) -> None:
        """So many passes in which nine of ten legs took `p` and `d` times their target."""
        for _ in range(passes):
            for engine in self.engines():
                if engine.role is P:
                    self.measure(engine.id, first=p * TTFT * 1.03)
                else:
                    self.measure(engine.id, step=d * TPOT * 1.03)
            self.run_pass()

    def roles(self) -> dict[str, Phase]:
        return {e.id: e.role for e in self.engines()}

    def moves(self) -> list[tuple[str, str, str]]:
        return [(r.engine, r.fields["to"], r.fields["cause"]) for r in self.records(EventKind.ROLE_MOVED)]

    def control(self) -> RolesView:
        return self.fleet.view(now=self.now).roles

    def role(self, phase: Phase) -> RoleView:
        return next(r for r in self.control().roles if r.role is phase)

    def why_not(self) -> str:
        return self.control().why_not

    def order(self, engine: str, role: Phase) -> None:
        self.send(RoleCommand(engine=engine, role=role))


def count(rig: Fleet, phase: Phase) -> int:
    return sum(role is phase for role in rig.roles().values())
