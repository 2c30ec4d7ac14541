"""One inference probe: which transfers prove or convict a suspect (spec F6, F7, F8).

Decides: the next transfer to try, and what the transfers tried say of each leg and of each producer. It cannot see: how
a transfer is made, nor what follows from the result. Pure.

A transfer is a prefill leg on one engine and the decode leg that reads its handoff on another, so a probe never leaves
KV behind. A completion without a handoff involves one engine only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from narwhal.control.core.events import LegSeen
from narwhal.vocabulary import Outcome, Phase, Verdict

# Spec F6: what the outcome of a leg says of the engine that ran it.
LEG_VERDICT = {
    Outcome.HANDOFF: Verdict.PASS,
    Outcome.STREAM_COMPLETE: Verdict.PASS,
    Outcome.ANSWER_COMPLETE: Verdict.PASS,
    Outcome.CLIENT_ERROR: Verdict.FAIL,
    Outcome.REFUSED: Verdict.FAIL,
    Outcome.UNREACHABLE: Verdict.FAIL,
    Outcome.RESET: Verdict.FAIL,
    Outcome.TLS_FAILED: Verdict.FAIL,
    Outcome.ANSWER_CUT: Verdict.FAIL,
    Outcome.CONNECT_TIMEOUT: Verdict.FAIL,
    Outcome.PREFILL_TIMEOUT: Verdict.FAIL,
    Outcome.READ_TIMEOUT: Verdict.FAIL,
    Outcome.FIRST_TOKEN_TIMEOUT: Verdict.FAIL,
    Outcome.STREAM_SILENT: Verdict.FAIL,
    Outcome.STREAM_CUT: Verdict.FAIL,
    Outcome.MARKER_WITHOUT_TOKEN: Verdict.FAIL,
    Outcome.ERROR_EVENT: Verdict.FAIL,
    Outcome.STREAM_MALFORMED: Verdict.FAIL,
    Outcome.STALLED: Verdict.FAIL,
    Outcome.HTTP_5XX: Verdict.FAIL,
    Outcome.WRONG_IDENTITY: Verdict.FAIL,
    Outcome.HANDOFF_UNUSABLE: Verdict.FAIL,
    Outcome.HTTP_408: Verdict.INCONCLUSIVE,
    Outcome.HTTP_429: Verdict.INCONCLUSIVE,
    Outcome.CANCELLED: Verdict.INCONCLUSIVE,
    Outcome.LOCAL: Verdict.INCONCLUSIVE,
    Outcome.DEADLINE: Verdict.INCONCLUSIVE,
}
# A reader that failed like this never came to read: that is no word about the producer.
NEVER_READ = frozenset(
    {Outcome.REFUSED, Outcome.UNREACHABLE, Outcome.TLS_FAILED, Outcome.CONNECT_TIMEOUT, Outcome.RESET}
)
CONVICTS = 2  # transfers with two peers that failed (spec F6)
PATIENCE = 3  # peers that failed by themselves before the leg is given up as inconclusive

Peers = Callable[[Phase], Sequence[str]]  # healthy engines that may run a phase, best first


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One transfer, or one completion without a handoff (`producer` None)."""

    producer: str | None
    consumer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeen:
    """What came of a step. A leg that was not begun is None."""

    produced: LegSeen | None
    consumed: LegSeen | None


def verdict_of(leg: LegSeen | None) -> Verdict:
    """What a leg says of the engine that ran it; one that was not begun says nothing."""
    return Verdict.INCONCLUSIVE if leg is None else LEG_VERDICT[leg.outcome]


def words(leg: LegSeen | None) -> str:
    """A leg's end, for people."""
    return "not begun" if leg is None else leg.detail or leg.outcome.replace("_", " ")


@dataclass(kw_only=True, slots=True)
class Leg:
    """One leg of the suspect that has to be proven: in `phase`, with peers that run the other phase."""

    suspect: str
    phase: Phase
    verdict: Verdict | None = None
    detail: str = ""
    failed_with: list[str] = field(default_factory=list)  # peers with which the transfer failed
    failed_peers: list[str] = field(default_factory=list)  # peers that failed by themselves
    proven: list[str] = field(default_factory=list)  # peers with which the transfer worked

    def next(self, peers: Sequence[str]) -> Step | None:
        """The step that decides most now; None when the leg has its verdict."""
        if self.verdict is not None:
            return None
        tried = {*self.failed_with, *self.failed_peers}
        fresh = [p for p in peers if p not in tried]
        if fresh and len(self.failed_peers) < PATIENCE:
            return self._with(fresh[0])
        if self.failed_with:
            # Only one peer to be had: a completion without a handoff tells whether its reader works at all.
            return Step(producer=None, consumer=self.reader)
        if self.failed_peers:
            self._end(Verdict.INCONCLUSIVE, f"the peers failed themselves: {', '.join(self.failed_peers)}")
            return None
        return Step(producer=None, consumer=self.suspect)

    @property
    def reader(self) -> str:
        """Who read in the transfer that failed."""
        return self.suspect if self.phase is Phase.DECODE else self.failed_with[0]

    def _with(self, peer: str) -> Step:
        if self.phase is Phase.PREFILL:
            return Step(producer=self.suspect, consumer=peer)
        return Step(producer=peer, consumer=self.suspect)

    def answered(self, step: Step, seen: StepSeen) -> None:
        """The step came back."""
        if step.producer is None:
            self._completed(step, seen)
        elif self.phase is Phase.PREFILL:
            self._was_read(step.consumer, seen)
        else:
            self._read(step.producer, seen)

    def _completed(self, step: Step, seen: StepSeen) -> None:
        """A completion without a handoff."""
        verdict = verdict_of(seen.consumed)
        if step.consumer == self.suspect:
            self._end(verdict, f"a completion without a handoff: {words(seen.consumed)}")
        elif verdict is Verdict.PASS:
            # The only reader works, and cannot read from the suspect.
            self._end(Verdict.FAIL, f"{step.consumer} works and cannot read its handoff ({self.detail})")
        else:
            self._end(Verdict.INCONCLUSIVE, f"{step.consumer} failed itself: {words(seen.consumed)}")

    def _was_read(self, peer: str, seen: StepSeen) -> None:
        """The suspect produced for `peer`."""
        produced, consumed = verdict_of(seen.produced), verdict_of(seen.consumed)
        if seen.produced is not None and produced is not Verdict.PASS:
            self._end(produced, words(seen.produced))
        elif seen.produced is not None and consumed is Verdict.PASS:
            self._end(Verdict.PASS, f"{peer} read its handoff", peer)
        elif consumed is Verdict.FAIL and seen.produced is not None and not self._never_read(seen):
            self._failed_with(peer, words(seen.consumed))
        else:
            self.failed_peers.append(peer)

    def _read(self, peer: str, seen: StepSeen) -> None:
        """The suspect read a handoff of `peer`."""
        consumed = verdict_of(seen.consumed)
        if seen.produced is None and seen.consumed is not None and consumed is not Verdict.PASS:
            # It could not even be reached, so no producer can be to blame.
            self._end(consumed, words(seen.consumed))
        elif verdict_of(seen.produced) is not Verdict.PASS:
            self.failed_peers.append(peer)
        elif consumed is Verdict.PASS:
            self._end(Verdict.PASS, f"read a handoff of {peer}", peer)
        elif consumed is Verdict.INCONCLUSIVE:
            self._end(consumed, words(seen.consumed))
        else:
            self._failed_with(peer, words(seen.consumed))

    @staticmethod
    def _never_read(seen: StepSeen) -> bool:
        return seen.consumed is not None and seen.consumed.outcome in NEVER_READ

    def _failed_with(self, peer: str, why: str) -> None:
        self.failed_with.append(peer)
        self.detail = f"{self.detail}; {why}" if self.detail not in ("", why) else why
        if len(self.failed_with) >= CONVICTS:
            peers = " and ".join(self.failed_with)
            reads = f"{peers} cannot read its handoff"
            self._end(
                Verdict.FAIL,
                f"{reads if self.phase is Phase.PREFILL else f'it cannot read handoffs of {peers}'} ({self.detail})",
            )

    def _end(self, verdict: Verdict, detail: str, peer: str = "") -> None:
        self.verdict, self.detail = verdict, detail
        if peer:
            self.proven.append(peer)

    def blamed(self) -> list[tuple[str, str]]:
        """Producers whose handoff the suspect could not read although it turned out to work (spec F6, F7)."""
        if self.phase is Phase.DECODE and self.verdict is Verdict.PASS:
            return [(peer, f"{self.suspect} works and cannot read its handoff") for peer in self.failed_with]
        return []


class InferenceProbe:
    """The legs of one suspect, one after the other, then the producers remembered from its failures.

    `remembered`: producers of the decode legs that failed on the suspect; others are asked before them.
    """

    def __init__(self, suspect: str, phases: Sequence[Phase], remembered: Sequence[str]) -> None:
        self.suspect = suspect
        self.legs = tuple(Leg(suspect=suspect, phase=phase) for phase in Phase if phase in phases)
        self.remembered = tuple(remembered)
        self.step: Step | None = None
        self.last: StepSeen | None = None  # the newest step that came back
        self._alone: StepSeen | None = None  # what a completion on the suspect came to; once is enough

    def next(self, peers: Peers) -> Step | None:
        """The next step; None when every leg has its verdict, or one has failed."""
        self.step = None
        for leg in self.legs:
            if leg.verdict is Verdict.FAIL:
                return None
            step = leg.next(self._order(leg, peers(leg.phase.other)))
            if step is not None and step == Step(producer=None, consumer=self.suspect) and self._alone is not None:
                leg.answered(step, self._alone)
                step = None
            if step is not None:
                self.step = step
                return step
        return None

    def _order(self, leg: Leg, peers: Sequence[str]) -> list[str]:
        others = [p for p in peers if p != self.suspect]
        if leg.phase is Phase.DECODE:
            others.sort(key=lambda p: p in self.remembered)
        return others

    def answered(self, seen: StepSeen) -> None:
        """The step that `next` gave came back."""
        step = self.step
        leg = next((x for x in self.legs if x.verdict is None), None)
        if step is None or leg is None:
            raise ValueError("no step is open")
        self.last = seen
        if step == Step(producer=None, consumer=self.suspect):
            self._alone = seen
        leg.answered(step, seen)

    @property
    def verdict(self) -> Verdict:
        """Fail when a leg failed, pass when all passed, else inconclusive."""
        verdicts = {leg.verdict for leg in self.legs}
        if Verdict.FAIL in verdicts:
            return Verdict.FAIL
        return Verdict.PASS if verdicts == {Verdict.PASS} else Verdict.INCONCLUSIVE

    @property
    def detail(self) -> str:
        """What was seen of each leg, for people; of a failed one only that."""
        failed = [leg for leg in self.legs if leg.verdict is Verdict.FAIL]
        told = dict.fromkeys(leg.detail for leg in failed or self.legs if leg.detail)
        return "; ".join(told)

    @property
    def failed_peers(self) -> frozenset[str]:
        """Peers that failed by themselves."""
        return frozenset(p for leg in self.legs for p in leg.failed_peers)

    def blamed(self) -> list[tuple[str, str]]:
        """Producers to suspect, each with the reason: of failed transfers of a suspect that works, and those that it
        had remembered and that failed by themselves as its peers."""
        found = [pair for leg in self.legs for pair in leg.blamed()]
        for leg in self.legs:
            if leg.phase is Phase.DECODE:
                found += [(p, "it gave no handoff for a probe") for p in leg.failed_peers if p in self.remembered]
        return found

    def to_check(self) -> list[str]:
        """Remembered producers that no transfer of this probe spoke about, newest first: probed next, read by the
        suspect, when its decode leg passed (spec F7)."""
        decode = next((leg for leg in self.legs if leg.phase is Phase.DECODE), None)
        if decode is None or decode.verdict is not Verdict.PASS:
            return []
        spoken = {*decode.proven, *decode.failed_with, *decode.failed_peers}
        return [p for p in reversed(self.remembered) if p not in spoken]
