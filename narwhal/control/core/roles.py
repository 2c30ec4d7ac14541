"""Role control: which engine changes its role, and when none may (spec C). Pure.

Decides: one move at a time, from floors and loads, or by an operator's word. It cannot see: what an engine does with
the work that it has; a role change is for new placements only.

| a role | gets an engine of the other |
|---|---|
| has fewer engines than its floor | at once, when the other stays at its own |
| is at `expand` or above for `sustained_intervals` passes | when no guard of `GUARDS` speaks against it |
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from narwhal.control.core import telling
from narwhal.control.core.decisions import Decision, MoveCause, RoleMove
from narwhal.control.core.engine import Engine, Standing
from narwhal.control.core.events import CommandRefusedError, Refusal
from narwhal.control.core.handoff import SavedRisk, SavedRoles
from narwhal.control.core.loads import Load, measured
from narwhal.control.core.proxies import Proxies
from narwhal.control.core.records import Record
from narwhal.control.core.settings import CoreSettings, RoleMode
from narwhal.control.core.signals import Signals
from narwhal.control.core.view import RiskView, RolesView, RoleView
from narwhal.reports import Run
from narwhal.vocabulary import HARD_HOLDS, Hold, Outcome, Phase, RiskKind

# A first token that did not come in time, by the phase of the leg that waited for it.
FIRST_TOKEN_LATE = {Phase.PREFILL: Outcome.PREFILL_TIMEOUT, Phase.DECODE: Outcome.FIRST_TOKEN_TIMEOUT}


@dataclass(kw_only=True, slots=True)
class Risk:
    """A role has given up an engine, and then was short of it (spec C4)."""

    role: Phase
    kind: RiskKind
    at: float  # newest
    count: int  # passes that missed the target, or first tokens that came too late


class Roles:
    """The roles of all engines."""

    def __init__(
        self,
        settings: CoreSettings,
        engines: Mapping[str, Engine],
        signals: Signals,
        proxies: Proxies,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._signals = signals
        self._proxies = proxies
        self._loads = dict.fromkeys(Phase, Load())
        self._above = dict.fromkeys(Phase, 0)  # passes in a row at or above `expand`
        self._gave: dict[Phase, float] = {}  # when a role gave up an engine last
        self._risks: dict[tuple[Phase, RiskKind], Risk] = {}
        self._proposal: RoleMove | None = None
        # What was advised last, and until when people know it.
        self._advised: tuple[tuple[Phase, MoveCause] | None, float] = (None, 0.0)
        self._why_not = "no monitor pass has looked yet"
        self.changed = 0  # rises with what the next pass may store

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed."""
        self._settings = settings

    # --- a pass -------------------------------------------------------------------------------------------------------

    def tick(self, *, now: float) -> list[Decision]:
        """Measure, note what consolidation has cost, and decide at most one move."""
        for role in Phase:
            self._loads[role] = measured(role, self._settings, self._signals, now=now)
            above = self._loads[role].load >= self._settings.roles.expand
            self._above[role] = self._above[role] + 1 if above else 0
        decisions: list[Decision] = [*self._target_missed(now=now)]
        if self._settings.roles.mode is RoleMode.OFF:
            self._proposal, self._why_not = None, "role control is off"
            return decisions
        move, self._why_not = self._decide(now=now)
        self._proposal = move
        if move is None:
            return decisions
        if self._settings.roles.mode is RoleMode.AUTO:
            return [*decisions, *self._moved(move, now=now)]
        return [*decisions, *self._advise(move, now=now)]

    def _advise(self, move: RoleMove, *, now: float) -> list[Record]:
        """Tell of a move that nobody makes; not again for as long as it would be made, nor soon after that."""
        advice, (before, until) = (move.to, move.cause), self._advised
        self._advised = advice, now + self._settings.roles.risk_window_s
        return [] if advice == before and now < until else [telling.role_proposed(move)]

    def _decide(self, *, now: float) -> tuple[RoleMove | None, str]:
        """The move that is due, or why there is none."""
        for role in Phase:
            move = self._repair(role, now=now)
            if move is not None:
                return move, ""
        reasons = []
        for role in Phase:
            against = next((why for guard in GUARDS if (why := guard(self, role, now))), "")
            if not against:
                load, other = self._loads[role].load, self._loads[role.other].load
                reason = f"load of {role} {load:.2f} for {self._above[role]} passes, of {role.other} {other:.2f}"
                return self._move(role, MoveCause.LOAD, reason, now=now), ""
            reasons.append(f"{role}: {against}")
        return None, "; ".join(reasons)

    def _repair(self, role: Phase, *, now: float) -> RoleMove | None:
        """A shortfall of the floor, made good from the other role when that stays at its own (spec C2)."""
        have, floor = len(self._counted(role, now=now)), self._settings.roles.floor(role)
        if have >= floor or self._risky(role.other, now=now) or self._lacks(role, now) or self._immovable(role, now):
            return None
        return self._move(role, MoveCause.FLOOR, f"{role} has {have} of at least {_engines(floor)}", now=now)

    def _move(self, to: Phase, cause: MoveCause, reason: str, *, now: float) -> RoleMove:
        """Whoever came from there goes first, then who was named in the pass before, then who has the least work."""
        legs, named = self._proxies.resident(), self._proposal.engine if self._proposal is not None else ""
        movers = [e for e in self._counted(to.other, now=now) if not self.stays(e, now=now)]
        engine = min(movers, key=lambda e: (e.spec.role is not to, e.id != named, legs.get(e.id, 0)))
        return RoleMove(engine=engine.id, to=to, cause=cause, reason=reason)

    def _counted(self, role: Phase, *, now: float) -> list[Engine]:
        """The engines that a floor counts: those that can serve, and those that only have to join yet, as long as an
        engine that moves has to stay."""
        return [e for e in self._engines.values() if e.role is role and self._counts(e, now=now)]

    def _counts(self, engine: Engine, *, now: float) -> bool:
        hard = [h for h in engine.carried(now=now) if h.kind in HARD_HOLDS]
        return all(h.kind is Hold.JOINING and now - h.since < self._settings.roles.dwell_s for h in hard)

    def stays(self, engine: Engine, *, now: float) -> str:
        """Why the engine keeps its role, whatever loads are (spec C2); empty when it may move."""
        if engine.spec.pinned:
            return "pinned"
        if engine.standing is not Standing.IN_SERVICE or engine.carried(now=now):
            return "held"
        left_s = 0.0 if engine.role_since is None else engine.role_since + self._settings.roles.dwell_s - now
        return f"moved lately, stays for {left_s:.0f} s" if left_s > 0 else ""

    # --- what speaks against a move -----------------------------------------------------------------------------------

    def _calm(self, role: Phase, now: float) -> str:
        del now
        load, passes, settings = self._loads[role].load, self._above[role], self._settings.roles
        if not passes:
            return f"load {load:.2f}, wants an engine from {settings.expand:.2f}"
        wanted = settings.sustained_intervals
        return f"load {load:.2f} for {passes} of {wanted} passes" if passes < wanted else ""

    def _occupied(self, role: Phase, now: float) -> str:
        del now
        other, shrink = self._loads[role.other], self._settings.roles.shrink
        if other.load > shrink:
            return f"{role.other} gives none up, its load {other.load:.2f} is above {shrink:.2f}"
        if other.occupied > shrink:
            return f"{role.other} gives none up, it is busy for {other.busy:.0%} of the time, more than {shrink:.0%}"
        return ""

    def _cooling(self, role: Phase, now: float) -> str:
        del role
        left_s = max(self._gave.values(), default=-math.inf) + self._settings.roles.cooldown_s - now
        return f"the move before was lately, {left_s:.0f} s of cooldown are left" if left_s > 0 else ""

    def _reverses(self, role: Phase, now: float) -> str:
        left_s = self._gave.get(role, -math.inf) + self._settings.roles.risk_window_s - now
        return f"it gave an engine up lately, none comes back for {left_s:.0f} s" if left_s > 0 else ""

    def _risks_more(self, role: Phase, now: float) -> str:
        return self._risky(role.other, now=now)

    def _risky(self, role: Phase, *, now: float) -> str:
        for risk in self._risks.values():
            left_s = risk.at + self._settings.roles.risk_window_s - now
            if risk.role is role and left_s > 0:
                return f"{role} gives none up for {left_s:.0f} s: {risk.kind} after it gave up an engine"
        return ""

    def _lacks(self, role: Phase, now: float) -> str:
        have, floor = len(self._counted(role.other, now=now)), self._settings.roles.floor(role.other)
        return f"{role.other} has {_engines(have)}, its floor is {floor}" if have <= floor else ""

    def _immovable(self, role: Phase, now: float) -> str:
        stays = {e.id: self.stays(e, now=now) for e in self._counted(role.other, now=now)}
        if not all(stays.values()):
            return ""
        return f"no engine of {role.other} may move: " + ", ".join(f"{e} {why}" for e, why in stays.items())

    # --- moves --------------------------------------------------------------------------------------------------------

    def _moved(self, move: RoleMove, *, now: float) -> list[Decision]:
        engine = self._engines[move.engine]
        self._gave[engine.role] = now
        engine.assume(move.to, now=now)
        self._above = dict.fromkeys(Phase, 0)
        return [move]

    def command(self, engine: Engine, role: Phase, *, now: float) -> list[Decision]:
        """An operator's word (spec C1, C2). Raises `CommandRefusedError`; then nothing was changed."""
        if engine.role is role:
            raise CommandRefusedError(Refusal.PRECONDITION, f"engine {engine.id} has the role {engine.role} already")
        if engine.spec.pinned:
            words = f"engine {engine.id} is pinned to {engine.role} in the fleet file"
            raise CommandRefusedError(Refusal.PRECONDITION, words)
        against = self._lacks(role, now)
        if self._counts(engine, now=now) and against:
            raise CommandRefusedError(Refusal.PRECONDITION, f"{against} (controller.min_{engine.role})")
        move = RoleMove(engine=engine.id, to=role, cause=MoveCause.OPERATOR, reason="asked for by an operator")
        return self._moved(move, now=now)

    # --- consolidation risk -------------------------------------------------------------------------------------------

    def timed_out(self, run: Run, *, now: float) -> list[Record]:
        """A failed leg of an engine as it is now: a first token that came too late is a risk (spec C4)."""
        if run.outcome is not FIRST_TOKEN_LATE[run.phase]:
            return []
        return self._note(run.phase, RiskKind.FIRST_TOKEN_LATE, run.count, now=now)

    def _target_missed(self, *, now: float) -> list[Record]:
        decisions: list[Record] = []
        for role in Phase:
            if self._loads[role].latency >= 1.0:
                decisions += self._note(role, RiskKind.TARGET_MISSED, 1, now=now)
        for key, risk in list(self._risks.items()):
            if now >= risk.at + self._settings.roles.risk_window_s:
                del self._risks[key]
                self.changed += 1
        return decisions

    def _note(self, role: Phase, kind: RiskKind, count: int, *, now: float) -> list[Record]:
        gave = self._gave.get(role)
        if gave is None or now >= gave + self._settings.roles.risk_window_s:
            return []
        risk = self._risks.get((role, kind))
        self.changed += 1
        if risk is not None:
            risk.at, risk.count = now, risk.count + count
            return []
        self._risks[role, kind] = Risk(role=role, kind=kind, at=now, count=count)
        return [telling.role_risk(role, kind, now - gave, self._settings.roles.risk_window_s)]

    # --- what a takeover must know ------------------------------------------------------------------------------------

    def save(self, *, now: float) -> SavedRoles:
        """What of it goes into the handoff (spec S1)."""
        return SavedRoles(
            gave_age_s={role: max(0.0, now - at) for role, at in self._gave.items()},
            risks=tuple(
                SavedRisk(role=r.role, kind=r.kind, age_s=max(0.0, now - r.at), count=r.count)
                for r in self._risks.values()
            ),
        )

    def load(self, saved: SavedRoles, *, now: float) -> None:
        """Go on where another left off."""
        self._gave = {role: now - age_s for role, age_s in saved.gave_age_s.items()}
        self._risks = {
            (r.role, r.kind): Risk(role=r.role, kind=r.kind, at=now - r.age_s, count=r.count) for r in saved.risks
        }

    # --- to be seen ---------------------------------------------------------------------------------------------------

    def view(self, *, now: float) -> RolesView:
        """Loads, the proposal, and why there is none."""
        return RolesView(
            mode=self._settings.roles.mode,
            roles=tuple(self._role_view(role, now) for role in Phase),
            proposal=self._proposal,
            why_not=self._why_not,
        )

    def _role_view(self, role: Phase, now: float) -> RoleView:
        window_s = self._settings.roles.risk_window_s
        return RoleView(
            role=role,
            engines=len(self._counted(role, now=now)),
            floor=self._settings.roles.floor(role),
            load=self._loads[role],
            above=self._above[role],
            gave_age_s=None if role not in self._gave else now - self._gave[role],
            risks=tuple(
                RiskView(kind=r.kind, count=r.count, age_s=now - r.at, blocks_s=r.at + window_s - now)
                for r in self._risks.values()
                if r.role is role and now < r.at + window_s
            ),
        )


# What speaks against a move to a role because of its load, in the order in which people are told (spec C2–C4).
GUARDS: tuple[Callable[[Roles, Phase, float], str], ...] = (
    Roles._calm,
    Roles._occupied,
    Roles._cooling,
    Roles._reverses,
    Roles._risks_more,
    Roles._lacks,
    Roles._immovable,
)


def _engines(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"
