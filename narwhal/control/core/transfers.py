"""KV transfers of engines at the gate: with whom, and who came through (spec R2, B1, B3, F8).

Decides: which transfers of one trial come next, and which of its candidates may go on. It cannot see: who is at the
gate, who is eligible, or how a transfer is made. Pure.

A transfer is a prefill leg on one engine and the decode leg that reads its handoff on another, so none leaves KV behind
that nobody has read. A trial tries each pair of engines once, and once more when that failed: engines shake hands at
their first transfer, and some fail it. What the gate has seen work, no client waits for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from narwhal.control.core.events import CheckResult, LegSeen
from narwhal.control.core.probing import NEVER_READ, verdict_of, words
from narwhal.vocabulary import Phase, Verdict

TRIES = 2  # spec R2: a first failure is tried once more
NAMED = 8  # engines or pairs that a check's words name; of the others they say how many


class Fault(StrEnum):
    """Whose failure a transfer's end is."""

    NONE = "none"  # it worked
    PAIR = "pair"  # both work, or seem to, and not with each other
    PRODUCER = "producer"  # it gave no handoff
    CONSUMER = "consumer"  # it never came to read
    UNKNOWN = "unknown"  # nothing was learnt


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction between two engines."""

    producer: str
    consumer: str

    def __str__(self) -> str:
        return f"{self.producer}→{self.consumer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a transfer came to."""

    fault: Fault
    words: str


def judged(produced: LegSeen | None, consumed: LegSeen | None) -> Seen:
    """What the two legs say of the two engines. A leg that was not begun is None."""
    of_producer, of_consumer = verdict_of(produced), verdict_of(consumed)
    if produced is None:
        # The consumer's connection comes first: it was not reached, or nobody could be asked.
        return Seen(fault=Fault.CONSUMER if of_consumer is Verdict.FAIL else Fault.UNKNOWN, words=words(consumed))
    if of_producer is not Verdict.PASS:
        return Seen(fault=Fault.PRODUCER if of_producer is Verdict.FAIL else Fault.UNKNOWN, words=words(produced))
    if of_consumer is Verdict.PASS:
        return Seen(fault=Fault.NONE, words="worked")
    if consumed is None or of_consumer is Verdict.INCONCLUSIVE:
        return Seen(fault=Fault.UNKNOWN, words=words(consumed))
    return Seen(fault=Fault.CONSUMER if consumed.outcome in NEVER_READ else Fault.PAIR, words=words(consumed))


@dataclass(kw_only=True, slots=True)
class _Progress:
    tries: int = 0
    open: bool = False
    seen: Seen | None = None  # the last try's; final when it worked or no try is left

    @property
    def over(self) -> bool:
        return not self.open and self.seen is not None and (self.seen.fault is Fault.NONE or self.tries >= TRIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One engine at the gate. `partners`: for each phase that it may run, the engines to run the other one with;
    empty where there is none."""

    id: str
    partners: Mapping[Phase, Sequence[str]]

    def links(self, phase: Phase) -> tuple[Link, ...]:
        """The transfers that prove it in one phase."""
        if phase is Phase.PREFILL:
            return tuple(Link(producer=self.id, consumer=peer) for peer in self.partners[phase])
        return tuple(Link(producer=peer, consumer=self.id) for peer in self.partners[phase])


class Trial:
    """The transfers of one candidate, or of several that are each other's peers.

    `proven`: engines in service whose own transfers have worked: a pair with one of them that fails keeps the candidate
    out. Every other engine is on trial as the candidates are.
    """

    def __init__(self, candidates: Iterable[Candidate], *, proven: Iterable[str], began_at: float = 0.0) -> None:
        """`began_at`: the instant at which it begins; kept for whoever tells how long it took."""
        self.began_at = began_at
        self.candidates = {c.id: c for c in candidates}
        self.proven = frozenset(proven)
        self._links: dict[Link, _Progress] = {}
        for candidate in self.candidates.values():
            for phase in candidate.partners:
                for link in candidate.links(phase):
                    self._links.setdefault(link, _Progress())
        # What follows from the links. A large fleet that starts has thousands: none of them may be looked at more often
        # than it is tried.
        self._to_begin: dict[str, dict[Link, None]] = {}  # by engine, in the order of the links
        for link in self._links:
            for engine in (link.producer, link.consumer):
                self._to_begin.setdefault(engine, {})[link] = None
        self._busy: set[str] = set()
        self._idle: dict[str, None] = dict.fromkeys(self._to_begin)  # who may begin something since `next` looked last
        self._left = len(self._links)  # that are not over

    # --- one transfer after the other ---------------------------------------------------------------------------------

    def next(self) -> list[Link]:
        """The transfers to begin now: no engine is in two of a trial at once."""
        idle, self._idle = self._idle, {}
        begun = []
        for engine in idle:
            link = self._beginnable(engine)
            if link is not None:
                self._begin(link)
                begun.append(link)
        return begun

    def _beginnable(self, engine: str) -> Link | None:
        """The first transfer of the engine whose other end is not in one either."""
        if engine in self._busy:
            return None
        to_begin = self._to_begin.get(engine, {})
        return next((link for link in to_begin if _peer(engine, link) not in self._busy), None)

    def _begin(self, link: Link) -> None:
        progress = self._links[link]
        progress.open = True
        progress.tries += 1
        for engine in (link.producer, link.consumer):
            self._busy.add(engine)
            del self._to_begin[engine][link]

    def answered(self, link: Link, seen: Seen) -> None:
        """A transfer that `next` gave has ended. One that the trial has given up meanwhile is no error."""
        progress = self._links.get(link)
        if progress is None or not progress.open:
            return
        progress.open, progress.seen = False, seen
        self._left -= progress.over
        for engine in (link.producer, link.consumer):
            self._free(engine)
            if not progress.over:
                self._to_begin[engine] = {link: None, **self._to_begin[engine]}

    def _free(self, engine: str) -> None:
        self._busy.discard(engine)
        self._idle[engine] = None

    def gone(self, engine: str) -> None:
        """The engine is no candidate and no peer any more."""
        self.candidates.pop(engine, None)
        for link in [x for x in self._links if engine in (x.producer, x.consumer)]:
            progress = self._links.pop(link)
            self._left -= not progress.over
            peer = _peer(engine, link)
            self._to_begin[peer].pop(link, None)
            if progress.open:
                self._free(peer)
        self._to_begin.pop(engine, None)
        self._busy.discard(engine)

    @property
    def over(self) -> bool:
        """Whether nothing is left to try."""
        return not self._left

    def owner(self, link: Link) -> str:
        """The candidate on whose account the transfer is made."""
        return link.producer if link.producer in self.candidates else link.consumer

    # --- what it amounts to -------------------------------------------------------------------------------------------

    def results(self) -> dict[str, CheckResult]:
        """The check of each candidate, once the trial is over.

        Who remains works with everybody who remains: while a pair among them fails, the engine with most failed pairs
        is dropped, so that one bad candidate does not keep the others out; who has nobody left in a direction goes too.
        """
        found: dict[str, CheckResult] = {}
        # In service and unproven, or a candidate: may be dropped. Of equals, the one named last.
        trusted = [e for link in self._links for e in (link.producer, link.consumer) if e not in self.proven]
        trusted = [*self.candidates, *(e for e in dict.fromkeys(trusted) if e not in self.candidates)]
        at_fault = self._at_fault()
        trusted = [e for e in trusted if e not in at_fault]
        pairs = self._pairs()
        while dropped := self._unfit(trusted, pairs):
            trusted.remove(dropped)
        for candidate in self.candidates.values():
            passed = candidate.id in trusted
            found[candidate.id] = self._passed(candidate) if passed else self._failed(candidate)
        return found

    def proved(self) -> set[str]:
        """Engines of at least one transfer that worked and of no pair that failed."""
        good = {e for link, p in self._links.items() if _fault(p) is Fault.NONE for e in (link.producer, link.consumer)}
        return good - {e for link in self._pairs() for e in (link.producer, link.consumer)}

    def _pairs(self) -> list[Link]:
        return [link for link, progress in self._links.items() if _fault(progress) is Fault.PAIR]

    def _at_fault(self) -> set[str]:
        """The engines that failed by themselves, whoever the other was."""
        ends = [(link, _fault(progress)) for link, progress in self._links.items()]
        producers = {link.producer for link, fault in ends if fault is Fault.PRODUCER}
        return producers | {link.consumer for link, fault in ends if fault is Fault.CONSUMER}

    def _unfit(self, trusted: Sequence[str], pairs: Sequence[Link]) -> str | None:
        """Whom to drop next. `pairs`: that failed."""
        known = {*trusted, *self.proven}
        failed = dict.fromkeys(trusted, 0)
        for link in pairs:
            if {link.producer, link.consumer} <= known:
                for engine in (link.producer, link.consumer):
                    if engine in failed:
                        # A pair with a proven engine is the candidate's failure, however few they are.
                        firm = self.proven & {link.producer, link.consumer}
                        failed[engine] += len(self._links) if firm else 1
        worst = max(reversed(trusted), key=lambda e: failed[e], default=None)
        if worst is not None and failed[worst]:
            return worst
        return next((e for e in reversed(trusted) if e in self.candidates and self._lonely(e, known)), None)

    def _lonely(self, engine: str, known: set[str]) -> bool:
        """Whether it could be tried in a direction, and with nobody who is left it works."""
        candidate = self.candidates[engine]
        for phase in candidate.partners:
            tried = [link for link in candidate.links(phase) if link in self._links]
            works = [link for link in tried if _fault(self._links[link]) is Fault.NONE]
            if tried and not any({link.producer, link.consumer} <= known for link in works):
                return True
        return False

    def _passed(self, candidate: Candidate) -> CheckResult:
        parts, tested = [], False
        for phase in candidate.partners:
            peers = [
                _peer(candidate.id, link)
                for link in candidate.links(phase)
                if link in self._links and _fault(self._links[link]) is Fault.NONE
            ]
            tested = tested or bool(peers)
            done = "read its handoff" if phase is Phase.PREFILL else "it read handoffs of"
            if not peers:
                parts.append(f"{phase} not tested: no peer")
            else:
                named = ", ".join(peers)
                parts.append(f"{named} {done}" if phase is Phase.PREFILL else f"{done} {named}")
        if not tested:
            return CheckResult(verdict=Verdict.NOT_TESTED, detail="no peer")
        return CheckResult(verdict=Verdict.PASS, detail="; ".join(parts))

    def _failed(self, candidate: Candidate) -> CheckResult:
        links = [
            (link, progress.seen)
            for link, progress in self._links.items()
            if candidate.id in (link.producer, link.consumer) and progress.seen is not None
        ]
        own = Fault.PRODUCER, Fault.CONSUMER
        mine = [
            (x, s) for x, s in links if s.fault in own and (s.fault is Fault.PRODUCER) == (x.producer == candidate.id)
        ]
        pairs = [(x, s) for x, s in links if s.fault is Fault.PAIR]
        if mine or pairs:
            told = _named([f"{link}: {seen.words}" for link, seen in (mine or pairs)], "; ")
            if not mine:
                peers = _named([_peer(candidate.id, link) for link, _ in pairs])
                told += f"; if the process before this one had the same engine id, restart {peers}"
            return CheckResult(verdict=Verdict.FAIL, detail=told)
        told = _named([f"{link}: {seen.words}" for link, seen in links if seen.fault is not Fault.NONE], "; ")
        detail = told or "its peers did not come through"
        return CheckResult(verdict=Verdict.INCONCLUSIVE, detail=detail)


def _fault(progress: _Progress) -> Fault:
    return Fault.UNKNOWN if progress.seen is None else progress.seen.fault


def _peer(engine: str, link: Link) -> str:
    return link.consumer if link.producer == engine else link.producer


def _named(words: Sequence[str], between: str = ", ") -> str:
    more = len(words) - NAMED
    return between.join(words[:NAMED]) + (f" and {more} more" if more > 0 else "")
