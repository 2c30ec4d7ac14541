"""The gate between an engine and placement: joining and readmission (spec R1, R3, R8).

Decides: which check comes next, when a gate is tried, and whether it passed. It cannot see: how a check is made (the
shell makes it), nor the fleet beside the engine at the gate. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from narwhal.control.core.decisions import Admission, Decision
from narwhal.control.core.engine import Checked, Engine, Move, Standing
from narwhal.control.core.events import CheckAnswered, CheckResult, EventKind, ProcessIdentity, Record, RunCheck
from narwhal.control.core.settings import CoreSettings
from narwhal.vocabulary import Check, Hold, Verdict

BACKOFF_LONGEST_S = 300.0  # spec R3
ANSWER_MARGIN_S = 10.0  # beyond the shell's own time-outs; an answer later than this is lost


class How(StrEnum):
    """Who answers a check."""

    ENGINE = "engine"  # the shell asks the engine: `RunCheck`
    CONTRACT = "contract"  # the attestation document, where one is configured
    LATER = "later"  # no part of this gate yet; shown as not tested, and never as passed


# Spec R1, in its order.
GATE = (
    (Check.HEALTH, How.ENGINE),
    (Check.ATTESTATION, How.CONTRACT),
    (Check.MODEL, How.ENGINE),
    (Check.GENERATION, How.LATER),
    (Check.KV_TRANSFER, How.LATER),
    (Check.FINAL_HEALTH, How.LATER),
)
# What a verdict does to the gate: go on to the next check, or stop until the next try.
GOES_ON = {
    Verdict.PASS: True,
    Verdict.NOT_CONFIGURED: True,
    Verdict.NOT_TESTED: True,
    Verdict.FAIL: False,
    Verdict.INCONCLUSIVE: False,
}
# An engine under one of these stays out whatever a gate would say; only an operator's command lifts them (spec R5).
SHUT = frozenset({Hold.DRAIN, Hold.MAINTENANCE})


@dataclass(kw_only=True, slots=True)
class Gate:
    """One engine's way back."""

    due: float  # next try
    interval_s: float  # between tries
    prompt: bool = False  # tried at its instant, without waiting for the monitor's pass
    at: int | None = None  # row of GATE that is being answered; None: not open
    number: int = 0
    answer_due: float = 0.0
    identity: ProcessIdentity | None = None  # as seen by this try
    told: tuple[Check, Verdict, str] | None = None  # the failure told last: the same one again is not news


class Readmission:
    """The gates of all engines that are out."""

    def __init__(self, settings: CoreSettings, engines: Mapping[str, Engine]) -> None:
        self._settings = settings
        self._engines = engines
        self.gates: dict[str, Gate] = {}

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed. Gates keep their instants."""
        self._settings = settings

    # --- who comes to the gate, and when ------------------------------------------------------------------------------

    def join(self, engine: Engine, *, now: float) -> None:
        """Try at once, then at every interval (spec R8)."""
        self.gates[engine.id] = Gate(due=now, interval_s=self._settings.readmit_interval_s, prompt=True)

    def ejected(self, engine: Engine, *, now: float) -> None:
        """Try an interval later; the interval doubles when the engine had only just come back (spec R3)."""
        base = self._settings.readmit_interval_s
        interval = base
        back = engine.admitted_at
        if back is not None and now < back + self._settings.relapse_window_s:
            interval = min(engine.backoff_s * 2 or base, max(base, BACKOFF_LONGEST_S))
        engine.backoff_s = interval
        self.gates[engine.id] = Gate(due=now + interval, interval_s=interval)

    def restore(self, engine: Engine, *, due: float) -> None:
        """An engine that a saved handoff holds as ejected."""
        interval = engine.backoff_s or self._settings.readmit_interval_s
        self.gates[engine.id] = Gate(due=due, interval_s=interval)

    def hurry(self, engine: Engine, *, now: float) -> None:
        """An operator asks: try now, and tell what comes of it even if that is no news."""
        gate = self.gates[engine.id]
        if gate.at is None:
            gate.due, gate.prompt, gate.told = now, True, None

    def forget(self, engine: str) -> None:
        """The engine is in placement, or gone."""
        self.gates.pop(engine, None)

    def due(self, engine: str) -> float | None:
        """When the engine's gate is tried next; None when it has none."""
        gate = self.gates.get(engine)
        return None if gate is None else gate.due

    def words(self, engine: str) -> str:
        """What the engine's gate is doing, for people; empty for nothing."""
        gate = self.gates.get(engine)
        return "" if gate is None or gate.at is None else f"its gate is being tried: check {GATE[gate.at][0]} under way"

    def next_due(self) -> float | None:
        """When a gate must be tried without waiting for a pass."""
        return min((g.due for g in self.gates.values() if g.prompt and g.at is None), default=None)

    # --- one try ------------------------------------------------------------------------------------------------------

    def tick(self, *, now: float, prompt_only: bool = False) -> list[Decision]:
        """Open the gates that are due; give up on answers that never came."""
        decisions: list[Decision] = []
        for engine_id, gate in list(self.gates.items()):
            engine = self._engines[engine_id]
            if gate.at is not None and now >= gate.answer_due:
                lost = CheckResult(verdict=Verdict.INCONCLUSIVE, detail="no answer came back")
                decisions += self._answer(engine, gate, lost, now=now)
            elif gate.at is None and now >= gate.due and (gate.prompt or not prompt_only):
                decisions += self._open(engine, gate, now=now)
        return decisions

    def _open(self, engine: Engine, gate: Gate, *, now: float) -> list[Decision]:
        gate.prompt = False
        gate.due = now + gate.interval_s
        if SHUT & engine.holds.keys():
            return []
        gate.identity = None
        return self._go(engine, gate, 0, now=now)

    def _go(self, engine: Engine, gate: Gate, row: int, *, now: float) -> list[Decision]:
        """From this row on: record what is not asked, ask the next check that is, or let the engine in."""
        for index in range(row, len(GATE)):
            check, how = GATE[index]
            silent = self._unasked(engine, check, how)
            if silent is None:
                return [self._ask(engine, gate, index, now=now)]
            engine.checks[check] = Checked(result=silent, at=now)
        gate.at = None
        engine.gate_ended(Verdict.PASS, "")
        return [Admission(engine=engine.id, identity=gate.identity)]

    def _unasked(self, engine: Engine, check: Check, how: How) -> CheckResult | None:
        """The result of a check that nobody is asked for; None when the engine is."""
        if how is How.ENGINE:
            return None
        if how is How.CONTRACT and not (engine.spec.attestation_url and self._settings.attested):
            return CheckResult(verdict=Verdict.NOT_CONFIGURED, detail="no attestation is configured for this engine")
        return CheckResult(verdict=Verdict.NOT_TESTED, detail=f"{check} is not part of this gate")

    def _ask(self, engine: Engine, gate: Gate, row: int, *, now: float) -> RunCheck:
        timeout = self._settings.health_timeout_s
        gate.at, gate.number = row, engine.next_number()
        gate.answer_due = now + timeout + ANSWER_MARGIN_S
        return RunCheck(
            engine=engine.id,
            url=engine.spec.url,
            incarnation=engine.incarnation,
            number=gate.number,
            check=GATE[row][0],
            model=self._settings.model,
            timeout_s=timeout,
        )

    def expects(self, event: CheckAnswered) -> bool:
        """Whether this is the answer that the engine's gate waits for."""
        gate = self.gates.get(event.engine)
        if gate is None or gate.at is None:
            return False
        return (gate.number, GATE[gate.at][0]) == (event.number, event.check)

    def answered(self, engine: Engine, event: CheckAnswered, *, now: float) -> list[Decision]:
        """The check came back. Only for an answer that `expects` accepts."""
        return self._answer(engine, self.gates[engine.id], event.result, now=now)

    def _answer(self, engine: Engine, gate: Gate, result: CheckResult, *, now: float) -> list[Decision]:
        row = gate.at
        if row is None or not engine.may(Move.ADMIT):
            gate.at = None
            return []
        check = GATE[row][0]
        engine.checks[check] = Checked(result=result, at=now)
        gate.identity = result.identity or gate.identity
        if GOES_ON[result.verdict]:
            return self._go(engine, gate, row + 1, now=now)
        gate.at = None
        engine.gate_ended(result.verdict, check)
        news = (check, result.verdict, result.detail)
        if gate.told == news:
            return []
        gate.told = news
        back = "joining" if engine.standing is Standing.JOINING else "coming back"
        return [
            Record(
                kind=EventKind.ENGINE_CHECK_FAILED,
                message=f"engine {engine.id} is kept from {back}: check {check}: {result.verdict}: {result.detail}",
                engine=engine.id,
                fields={"check": check, "result": result.verdict},
            )
        ]
