"""Who is tried with whom at the gate's transfer check: eligible peers, or the candidates each other (spec R2).

Decides: when a candidate's trial begins, and with which partners. It cannot see: the other checks of the gate, nor what
a trial's transfers say (`transfers`). Pure.

| the candidate has, for each phase that it may run | it is tried with |
|---|---|
| an eligible peer whose own transfers have worked | such peers, at once |
| none | the other candidates that come through the checks before, and eligible engines that nobody could test yet |
| nobody of these either | nobody: `not tested: no peer` |

With all of them in a small fleet, with `PEERS` in each direction in a large one: a fleet that starts makes as many
transfers as it has engines, times a number, instead of their square.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from narwhal.control.core.asking import Asker
from narwhal.control.core.effects import RunTransfer
from narwhal.control.core.engine import Checked, Engine
from narwhal.control.core.events import CheckResult, TransferAnswered
from narwhal.control.core.settings import CoreSettings
from narwhal.control.core.transfers import Candidate, Fault, Link, Seen, Trial, judged
from narwhal.vocabulary import Check, Phase, Verdict

PEERS = 8
LOST = Seen(fault=Fault.UNKNOWN, words="no answer came back")


class Rounds:
    """The candidates at the transfer check, and the trials under way."""

    def __init__(self, settings: CoreSettings, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._asker = Asker(settings, engines)
        self._waiting: dict[str, None] = {}  # at the check and in no trial, first come first
        self._awaited: set[str] | None = None  # whose gates those wait for that lack a peer; None: nobody waits
        self._trials: list[Trial] = []
        self._open: dict[tuple[str, int], tuple[Trial, Link, float]] = {}  # account, number → when it is lost

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed. Trials under way go on as they were asked."""
        self._asker.settings = settings

    # --- candidates come and go ---------------------------------------------------------------------------------------

    def arrive(self, engine: str) -> None:
        """The candidate has passed the checks before."""
        self._waiting[engine] = None

    def leave(self, engine: str) -> None:
        """The engine is no candidate, and no peer, any more."""
        self._waiting.pop(engine, None)
        for trial in self._trials:
            trial.gone(engine)
        self._open = {
            key: asked for key, asked in self._open.items() if key[0] != engine and engine not in _ends(asked[1])
        }

    def alone(self, engine: Engine, *, now: float) -> bool:
        """Whether a phase that it may run has no eligible peer whose own transfers have worked."""
        return not all(self._partners(engine, self._firm(now)).values())

    # --- trials -------------------------------------------------------------------------------------------------------

    def step(self, arriving: Callable[[str], bool], *, now: float) -> tuple[list[RunTransfer], dict[str, CheckResult]]:
        """Begin what can begin; returns the transfers to make, and the checks that are over.

        `arriving`: whether an engine's gate is open at a check before this one.
        """
        self._begin(arriving, now=now)
        effects: list[RunTransfer] = []
        results: dict[str, CheckResult] = {}
        for trial in list(self._trials):
            effects += [self._ask(trial, link, now=now) for link in trial.next()]
            if trial.over:
                self._trials.remove(trial)
                took_s = now - trial.began_at
                results |= {name: replace(result, latency_s=took_s) for name, result in trial.results().items()}
                self._credit(trial, now=now)
        return effects, results

    def _begin(self, arriving: Callable[[str], bool], *, now: float) -> None:
        lacking = []
        firm = self._firm(now) if self._waiting else []
        for name in list(self._waiting):
            engine = self._engines[name]
            partners = self._partners(engine, firm)
            if not all(partners.values()):
                lacking.append(engine)
                continue
            del self._waiting[name]
            self._trials.append(Trial([Candidate(id=name, partners=partners)], proven=_all(partners), began_at=now))
        if not lacking:
            self._awaited = None
            return
        if self._awaited is None:
            # Those whose gates are open now, and nobody who comes later: else one that hangs after the other would
            # keep everybody waiting.
            self._awaited = {e for e in self._engines if arriving(e)}
        self._awaited = {e for e in self._awaited if e in self._engines and arriving(e)}
        if not self._awaited:
            self._awaited = None
            self._together(lacking, firm, now=now)

    def _together(self, lacking: Sequence[Engine], firm: Sequence[Engine], *, now: float) -> None:
        """One trial of all that lack a peer, with each other and with whom nobody could test yet."""
        unproven = [e for e in self._engines.values() if e.free(now=now) and not _proven(e)]
        candidates, proven = [], set()
        for engine in lacking:
            del self._waiting[engine.id]
            partners = self._partners(engine, firm)
            proven.update(_all(partners))
            others = self._partners(engine, [*lacking, *unproven])
            partners = {phase: partners[phase] or others[phase] for phase in partners}
            candidates.append(Candidate(id=engine.id, partners=partners))
        self._trials.append(Trial(candidates, proven=proven, began_at=now))

    def _firm(self, now: float) -> list[Engine]:
        """Eligible engines whose own transfers have worked."""
        return [e for e in self._engines.values() if e.free(now=now) and _proven(e)]

    def _partners(self, engine: Engine, among: Sequence[Engine]) -> dict[Phase, list[str]]:
        """For each phase that it may run, those to run the other one with."""
        return {
            phase: self._some(engine, phase, _able(engine, phase.other, among)) for phase in Phase if engine.able(phase)
        }

    def _some(self, engine: Engine, phase: Phase, able: list[str]) -> list[str]:
        """`PEERS` of them: for each candidate those that stand where it stands in the fleet, so that no peer has much
        more to do than another, and the same at each try. Where both of a pair are tried, one looks ahead and the other
        back, so that they mean each other."""
        if len(able) <= PEERS:
            return able
        place = [e.id for e in self._engines.values() if e.role is engine.role].index(engine.id)
        first = place if phase is Phase.PREFILL else place - PEERS + 1
        return [able[(first + n) % len(able)] for n in range(PEERS)]

    def _ask(self, trial: Trial, link: Link, *, now: float) -> RunTransfer:
        account = self._engines[trial.owner(link)]
        effect, due = self._asker.transfer(account, link.producer, link.consumer, now=now)
        self._open[account.id, effect.number] = (trial, link, due)
        return effect

    def _credit(self, trial: Trial, *, now: float) -> None:
        """An engine in service that nobody could test has been a peer of transfers that worked."""
        for name in sorted(trial.proved() - trial.candidates.keys()):
            engine = self._engines[name]
            if not _proven(engine):
                result = CheckResult(verdict=Verdict.PASS, detail="as a peer of those that came later")
                engine.checks[Check.KV_TRANSFER] = Checked(result=result, at=now)

    # --- answers ------------------------------------------------------------------------------------------------------

    def expects(self, event: TransferAnswered) -> bool:
        """Whether this is an answer that a trial waits for."""
        return (event.engine, event.number) in self._open

    def answered(self, event: TransferAnswered) -> Link | None:
        """A transfer came back; returns it when it worked. Only for an answer that `expects` accepts; `step` says what
        follows."""
        trial, link, _ = self._open.pop((event.engine, event.number))
        seen = judged(event.produced, event.consumed)
        trial.answered(link, seen)
        return link if seen.fault is Fault.NONE else None

    def give_up(self, *, now: float) -> None:
        """Answers that never came say nothing."""
        for key, (trial, link, due) in list(self._open.items()):
            if now >= due:
                del self._open[key]
                trial.answered(link, LOST)

    def words(self, engine: str) -> str:
        """What the candidate waits for, for people."""
        links = [str(link) for trial, link, _ in self._open.values() if engine in trial.candidates]
        if links:
            return f"transfers under way: {', '.join(links)}"
        if engine in self._waiting and self._awaited:
            return f"no eligible peer: waiting for the gates of {', '.join(sorted(self._awaited))}"
        return ""


def _ends(link: Link) -> tuple[str, str]:
    return link.producer, link.consumer


def _all(partners: Mapping[Phase, Sequence[str]]) -> set[str]:
    return {peer for peers in partners.values() for peer in peers}


def _proven(engine: Engine) -> bool:
    """Whether its own transfers have worked, as far as this process knows: a takeover hands on no checks."""
    check = engine.checks.get(Check.KV_TRANSFER)
    return check is None or check.result.verdict is not Verdict.NOT_TESTED


def _able(engine: Engine, phase: Phase, among: Iterable[Engine]) -> list[str]:
    """Engines that may run `phase`: those of that role, or where there is none those that may stand in."""
    able = [e for e in among if e.id != engine.id and e.able(phase)]
    return [e.id for e in able if e.role is phase] or [e.id for e in able]
