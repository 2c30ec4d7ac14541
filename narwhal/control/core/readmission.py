"""The gate between an engine and placement: joining, readmission, the way back from a drain (spec R1–R3, R5–R8).

Decides: which check comes next, when a gate is tried, and whether it passed. It cannot see: how a check is made (the
shell makes it), nor which transfers prove what (`rounds`, `transfers`). Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from narwhal.control.core import telling
from narwhal.control.core.decisions import Admission, Decision
from narwhal.control.core.effects import RunCheck
from narwhal.control.core.engine import Checked, Engine, Move, Standing
from narwhal.control.core.events import CheckAnswered, CheckResult, ProcessIdentity, TransferAnswered
from narwhal.control.core.process import not_restarted, process_words, same_process
from narwhal.control.core.rounds import Rounds
from narwhal.control.core.settings import CoreSettings
from narwhal.vocabulary import Check, Verdict

BACKOFF_LONGEST_S = 300.0  # spec R3
ANSWER_MARGIN_S = 10.0  # beyond the shell's own time-outs, for each request; an answer later than this is lost
NO_IDENTITY = "the engine does not say which process it is: GET /version and GET /metrics must"


class How(StrEnum):
    """Who answers a check."""

    ENGINE = "engine"  # the shell asks the engine: `RunCheck`
    CONTRACT = "contract"  # the attestation document, where one is configured
    PEERS = "peers"  # KV transfers with other engines: `RunTransfer`


# Spec R1, in its order.
GATE = (
    (Check.HEALTH, How.ENGINE),
    (Check.ATTESTATION, How.CONTRACT),
    (Check.MODEL, How.ENGINE),
    (Check.GENERATION, How.ENGINE),
    (Check.KV_TRANSFER, How.PEERS),
    (Check.FINAL_HEALTH, How.ENGINE),
)
TRANSFER_ROW = next(row for row, (_, how) in enumerate(GATE) if how is How.PEERS)
# What a verdict does to the gate: go on to the next check, or stop until the next try.
GOES_ON = {
    Verdict.PASS: True,
    Verdict.NOT_CONFIGURED: True,
    Verdict.NOT_TESTED: True,
    Verdict.FAIL: False,
    Verdict.INCONCLUSIVE: False,
}
# Requests to the engine that a check takes, one after the other.
REQUESTS = {
    Check.HEALTH: 3,
    Check.ATTESTATION: 3,
    Check.MODEL: 1,
    Check.GENERATION: 3,
    Check.FINAL_HEALTH: 3,
}
# Checks that pass only when the engine says which process it is; every other may be told so too.
IDENTIFIES = frozenset({Check.GENERATION, Check.FINAL_HEALTH})


@dataclass(kw_only=True, slots=True)
class Return:
    """Engines that an operator wants back. `whole`: all of them or none (spec R6)."""

    members: set[str]
    whole: bool
    passed: set[str] = field(default_factory=set)  # of a whole one: who waits for the others


@dataclass(kw_only=True, slots=True)
class Gate:
    """One engine's way back."""

    due: float  # next try
    interval_s: float  # between tries
    prompt: bool = False  # tried at its instant, without waiting for the monitor's pass
    at: int | None = None  # row of GATE that is being answered, beyond the last: waits for others; None: not open
    number: int = 0
    answer_due: float | None = None  # None while other gates or transfers are waited for
    identity: ProcessIdentity | None = None  # as seen by this try
    met: set[tuple[str, str]] = field(default_factory=set)  # who this try saw exchange KV: producer, consumer
    told: tuple[Check, Verdict, str] | None = None  # the failure told last: the same one again is not news
    back: Return | None = None  # the operator's wish that this try serves; it may be tried in spite of a drain


class Readmission:
    """The gates of all engines that are out, and of those that an operator wants back."""

    def __init__(self, settings: CoreSettings, engines: Mapping[str, Engine]) -> None:
        self._settings = settings
        self._engines = engines
        self._rounds = Rounds(settings, engines)
        self.gates: dict[str, Gate] = {}

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed. Gates keep the instant of their next try; those after it follow the new interval,
        unless theirs had been doubled (spec R3)."""
        before, self._settings = self._settings.readmit_interval_s, settings
        for gate in self.gates.values():
            if gate.interval_s == before:
                gate.interval_s = settings.readmit_interval_s
        self._rounds.configure(settings)

    # --- who comes to the gate, and when ------------------------------------------------------------------------------

    def join(self, engine: Engine, *, now: float) -> None:
        """Try at once, then at every interval (spec R8)."""
        self.gates[engine.id] = Gate(due=now, interval_s=self._settings.readmit_interval_s, prompt=True)

    def ejected(self, engine: Engine, *, now: float) -> None:
        """Try an interval later; the interval doubles when the engine had only just come back (spec R3)."""
        for gate in self.gates.values():  # what comes back may be another process
            gate.met = {pair for pair in gate.met if engine.id not in pair}
        base = self._settings.readmit_interval_s
        interval = base
        back = engine.admitted_at
        if back is not None and now < back + self._settings.relapse_window_s:
            interval = min(engine.backoff_s * 2 or base, max(base, BACKOFF_LONGEST_S))
        engine.backoff_s = interval
        open_one = self.gates.get(engine.id)
        if open_one is not None:  # an operator has it tried: what is found out goes on to count
            open_one.due, open_one.interval_s = now + interval, interval
            return
        self._rounds.leave(engine.id)
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

    def bring_back(self, engines: Iterable[Engine], *, whole: bool, now: float) -> list[Decision]:
        """An operator wants drained engines back: try their gates now, once (spec R5, R6)."""
        wanted = list(engines)
        together = Return(members={e.id for e in wanted}, whole=True)
        decisions: list[Decision] = []
        for engine in wanted:
            gate = self.gates.setdefault(engine.id, Gate(due=now, interval_s=self._settings.readmit_interval_s))
            gate.back = together if whole else Return(members={engine.id}, whole=False)
            gate.told = None
            decisions.append(telling.undrain_begun(engine.id))
            decisions += self._open(engine, gate, now=now)
        return decisions + self._advance(now=now)

    def drained(self, engine: str) -> list[Decision]:
        """The engine is being drained: the open try is given up (spec R4), and with it an operator's earlier wish to
        have the engine back. Else its gate would be tried on in spite of the drain."""
        gate = self.gates.get(engine)
        if gate is None or gate.back is None:
            self.cancel(engine)
            return []
        check = GATE[min(gate.at or 0, len(GATE) - 1)][0]
        given_up = CheckResult(verdict=Verdict.INCONCLUSIVE, detail="given up, as it is drained again")
        return self._not_back(gate.back, engine, check, given_up)

    def cancel(self, engine: str) -> None:
        """Give up the open try, if there is one."""
        gate = self.gates.get(engine)
        if gate is not None:
            gate.at, gate.answer_due = None, None
        self._rounds.leave(engine)

    def forget(self, engine: str) -> None:
        """The engine is in placement, or gone."""
        self.gates.pop(engine, None)
        self._rounds.leave(engine)

    # --- what others see ----------------------------------------------------------------------------------------------

    def due(self, engine: str) -> float | None:
        """When the engine's gate is tried next by itself; None when it has none, or a drain keeps it shut."""
        gate = self.gates.get(engine)
        return None if gate is None or self._engines[engine].drain is not None else gate.due

    def saved_due(self, engine: str) -> float | None:
        """When the engine's gate is due, whether or not a drain keeps it shut; None for one in service."""
        gate = self.gates.get(engine)
        return None if gate is None or self._engines[engine].standing is Standing.IN_SERVICE else gate.due

    def trying(self, engine: str) -> bool:
        """Whether the engine's gate is open."""
        gate = self.gates.get(engine)
        return gate is not None and gate.at is not None

    def words(self, engine: str) -> str:
        """What the engine's gate is doing, for people; empty for nothing."""
        gate = self.gates.get(engine)
        if gate is None or gate.at is None:
            return ""
        if gate.at >= len(GATE):
            others = sorted(gate.back.members - gate.back.passed) if gate.back is not None else []
            return f"its gate has passed: waiting for {', '.join(others)}"
        more = self._rounds.words(engine) if gate.at == TRANSFER_ROW else ""
        return f"its gate is being tried: check {GATE[gate.at][0]} under way" + (f" ({more})" if more else "")

    def next_due(self) -> float | None:
        """When a gate must be tried without waiting for a pass."""
        return min((g.due for g in self.gates.values() if g.prompt and g.at is None), default=None)

    # --- one try ------------------------------------------------------------------------------------------------------

    def tick(self, *, now: float, prompt_only: bool = False) -> list[Decision]:
        """Open the gates that are due; give up on answers that never came."""
        decisions: list[Decision] = []
        self._rounds.give_up(now=now)
        for engine_id, gate in list(self.gates.items()):
            engine = self._engines[engine_id]
            if gate.answer_due is not None and now >= gate.answer_due:
                lost = CheckResult(verdict=Verdict.INCONCLUSIVE, detail="no answer came back")
                decisions += self._answer(engine, gate, lost, now=now)
            elif gate.at is None and now >= gate.due and (gate.prompt or not prompt_only):
                decisions += self._open(engine, gate, now=now)
        return decisions + self._advance(now=now)

    def _open(self, engine: Engine, gate: Gate, *, now: float) -> list[Decision]:
        gate.prompt = False
        gate.due = now + gate.interval_s
        if engine.drain is not None and gate.back is None:
            return []
        self._rounds.leave(engine.id)
        gate.identity, gate.met = None, set()
        return self._go(engine, gate, 0, now=now)

    def _go(self, engine: Engine, gate: Gate, row: int, *, now: float) -> list[Decision]:
        """From this row on: record what is not asked, ask the next check that is, or let the engine in."""
        for index in range(row, len(GATE)):
            check, how = GATE[index]
            if how is How.ENGINE or (how is How.CONTRACT and self._attested(engine)):
                return [self._ask(engine, gate, index, now=now)]
            if how is How.PEERS:
                gate.at, gate.answer_due = index, None
                self._rounds.arrive(engine.id)
                return self._call_others(engine, now=now)
            silent = CheckResult(verdict=Verdict.NOT_CONFIGURED, detail="no attestation is configured for this engine")
            engine.checks[check] = Checked(result=silent, at=now)
        return self._passed(engine, gate)

    def _attested(self, engine: Engine) -> bool:
        return bool(engine.spec.attestation_url) and self._settings.attested

    def _call_others(self, engine: Engine, *, now: float) -> list[Decision]:
        """Without an eligible peer, engines that are out too may be its peers: have them tried now, but for those that
        keep coming and going (spec R2, R3)."""
        decisions: list[Decision] = []
        if self._rounds.alone(engine, now=now):
            for name, gate in self.gates.items():
                other = self._engines[name]
                if gate.at is None and other.drain is None and gate.interval_s <= self._settings.readmit_interval_s:
                    decisions += self._open(other, gate, now=now)
        return decisions

    def _ask(self, engine: Engine, gate: Gate, row: int, *, now: float) -> RunCheck:
        check = GATE[row][0]
        timeout = self._settings.health_timeout_s
        if check is Check.GENERATION:
            timeout = max(timeout, self._settings.first_token_timeout_s)
        gate.at, gate.number = row, engine.next_number()
        gate.answer_due = now + REQUESTS[check] * (timeout + ANSWER_MARGIN_S)
        return RunCheck(
            engine=engine.id,
            url=engine.spec.url,
            incarnation=engine.incarnation,
            number=gate.number,
            check=check,
            model=self._settings.model,
            timeout_s=timeout,
            attestation_url=engine.spec.attestation_url if check is Check.ATTESTATION else "",
        )

    # --- answers ------------------------------------------------------------------------------------------------------

    def expects(self, event: CheckAnswered | TransferAnswered) -> bool:
        """Whether this is an answer that a gate waits for."""
        if isinstance(event, TransferAnswered):
            return self._rounds.expects(event)
        gate = self.gates.get(event.engine)
        if gate is None or gate.at is None or gate.answer_due is None:
            return False
        return (gate.number, GATE[gate.at][0]) == (event.number, event.check)

    def answered(self, engine: Engine, event: CheckAnswered, *, now: float) -> list[Decision]:
        """The check came back. Only for an answer that `expects` accepts."""
        return self._answer(engine, self.gates[engine.id], event.result, now=now) + self._advance(now=now)

    def transferred(self, event: TransferAnswered, *, now: float) -> list[Decision]:
        """A transfer came back. Only for an answer that `expects` accepts."""
        link = self._rounds.answered(event)
        if link is not None:
            for name in (link.producer, link.consumer):
                if name in self.gates:
                    self.gates[name].met.add((link.producer, link.consumer))
        return self._advance(now=now)

    def _advance(self, *, now: float) -> list[Decision]:
        """Have trials go on until nothing more follows from what is known."""
        decisions: list[Decision] = []
        while True:
            effects, results = self._rounds.step(self._arriving, now=now)
            decisions += effects
            for name, result in results.items():
                gate = self.gates.get(name)
                if gate is not None:  # else another's failure, a moment ago, has ended what all were to pass
                    decisions += self._answer(self._engines[name], gate, result, now=now)
            if not results:
                return decisions

    def _arriving(self, engine: str) -> bool:
        gate = self.gates.get(engine)
        return gate is not None and gate.at is not None and gate.at < TRANSFER_ROW

    def _answer(self, engine: Engine, gate: Gate, result: CheckResult, *, now: float) -> list[Decision]:
        row, gate.answer_due = gate.at, None
        if row is None or not engine.may(Move.ADMIT):
            gate.at = None
            return []
        check = GATE[row][0]
        result = self._identified(engine, gate, check, result)
        engine.checks[check] = Checked(result=result, at=now)
        gate.identity = gate.identity or result.identity
        if GOES_ON[result.verdict]:
            return self._go(engine, gate, row + 1, now=now)
        return self._failed(engine, gate, check, result)

    def _identified(self, engine: Engine, gate: Gate, check: Check, result: CheckResult) -> CheckResult:
        """A check passes for the process that it was made of: the same one all through, and where a drain asks for it a
        newer one than was drained (spec R1, R4)."""
        seen, drain = result.identity, engine.drain
        if result.verdict is not Verdict.PASS:
            return result
        words = ""
        if seen is None:
            words = NO_IDENTITY if check in IDENTIFIES else ""
        elif gate.identity is not None and not same_process(gate.identity, seen):
            words = f"the process changed while the gate was tried: {process_words(seen)} answers, "
            words += f"it began with {process_words(gate.identity)}"
        elif check is Check.GENERATION and drain is not None and drain.restart:
            words = not_restarted(drain, seen, engine.spec.url)
        return replace(result, verdict=Verdict.FAIL, detail=words) if words else result

    def _failed(self, engine: Engine, gate: Gate, check: Check, result: CheckResult) -> list[Decision]:
        """The try is over. It may be tried again by itself; a drain stays (spec R5)."""
        gate.at = None
        engine.gate_ended(result.verdict, check)
        news = (check, result.verdict, result.detail)
        decisions: list[Decision] = []
        if gate.told != news:
            gate.told = news
            decisions.append(telling.check_failed(engine, check, result))
        if gate.back is not None:
            decisions += self._not_back(gate.back, engine.id, check, result)
        return decisions

    def _not_back(self, back: Return, failed: str, check: Check, result: CheckResult) -> list[Decision]:
        """An operator's wish that does not come true: of this engine, or of all that were to come with it."""
        decisions: list[Decision] = []
        for name in sorted(back.members) if back.whole else [failed]:
            gate = self.gates.get(name)
            if gate is not None:
                gate.back = None
                self.cancel(name)
                if self._engines[name].standing is Standing.IN_SERVICE:
                    del self.gates[name]
                decisions.append(telling.undrain_failed(name, failed, check, result))
        back.members.clear()
        return decisions

    def _passed(self, engine: Engine, gate: Gate) -> list[Decision]:
        """Every check has passed: in, or, of a fleet that comes back as a whole, wait for the others."""
        back = gate.back
        gate.at = None
        if back is None or not back.whole:
            engine.gate_ended(Verdict.PASS, "")
            return [_admission(engine.id, gate)]
        back.passed.add(engine.id)
        gate.at = len(GATE)
        if back.passed < back.members:
            return []
        decisions: list[Decision] = []
        for name in sorted(back.members):
            self._engines[name].gate_ended(Verdict.PASS, "")
            decisions.append(_admission(name, self.gates[name]))
        return decisions

    def removed(self, engine: str) -> list[Decision]:
        """The engine has left the fleet, or is another under its id: nobody waits for it."""
        gate = self.gates.get(engine)
        back = gate.back if gate is not None else None
        self.forget(engine)
        if back is None:
            return []
        gone = CheckResult(verdict=Verdict.INCONCLUSIVE, detail="it is not the engine that was to come back any more")
        decisions = self._not_back(back, engine, Check.HEALTH, gone)
        if engine in self._engines:  # at another address; of one that has left the fleet that is told
            decisions.append(telling.undrain_failed(engine, engine, Check.HEALTH, gone))
        return decisions


def _admission(engine: str, gate: Gate) -> Admission:
    return Admission(engine=engine, identity=gate.identity, met=tuple(sorted(gate.met)))
