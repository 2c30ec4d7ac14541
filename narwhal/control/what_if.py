"""What the core would have decided with other settings, given what engines and proxies did.

It is given what the journal's own core was given, at the same instants, in its own terms:

| the journal has | the other core gets |
|---|---|
| what proxies report, and where they are | the same, of the incarnations and placement versions that it has itself |
| an answer of an engine | for each question of its own, what that engine answered to such a question nearest in time |
| an operator's command, a pass of the monitor | the same |
| a wake-up, a published placement | its own, at its own instants |
| the fleet file read again | nothing: its settings stay |

What it cannot know: what clients would have met elsewhere. Work goes where it went.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from narwhal.control.core.effects import CaptureIdentity, Effect, ProbeHealth, ProbeInference, RunCheck, RunTransfer
from narwhal.control.core.events import (
    Answer,
    CheckAnswered,
    HealthAnswered,
    IdentityCaptured,
    InferenceAnswered,
    Input,
    ProxyAcked,
    ProxyNacked,
    Published,
    Reloaded,
    Reported,
    TransferAnswered,
    Woke,
)
from narwhal.control.core.journal import Head
from narwhal.control.core.publication import PlacementContent, publishable
from narwhal.control.core.records import Record
from narwhal.control.core.settings import CoreSettings
from narwhal.control.replay import Course, Told, core_of, give
from narwhal.reports import Batch, Run
from narwhal.vocabulary import Stage

Question = RunCheck | ProbeHealth | ProbeInference | RunTransfer | CaptureIdentity
NEAR_S = 1.0  # further away the answer is one to another question

_ANSWERS = CheckAnswered | HealthAnswered | InferenceAnswered | TransferAnswered | IdentityCaptured
_OWN = Woke | Published | Reloaded
_MOST_AT_ONCE = 1000  # wake-ups of one instant; more is a core that does not come to rest


def _kinds(question: Question) -> tuple[tuple[str, ...], ...]:
    """What makes two questions alike, closest first."""
    name = type(question).__name__
    match question:
        case RunCheck():
            return ((name, question.engine, question.check),)
        case ProbeInference() | RunTransfer():
            producer = question.producer.engine if question.producer is not None else ""
            ends = ("transfer" if producer else "completion", producer, question.consumer.engine)
            return (ends, (name, question.engine))
        case _:
            return ((name, question.engine),)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """A question that was answered."""

    asked_at: float
    took_s: float
    answer: Answer


class Answers:
    """What engines answered, as the journal has it."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], tuple[float, Question]] = {}
        self._given: dict[tuple[str, ...], list[_Given]] = {}

    def asked(self, effects: Iterable[Effect], *, now: float) -> None:
        """The journal's own core asked."""
        for effect in effects:
            if not isinstance(effect, Record):
                self._open[effect.engine, effect.number] = (now, effect)

    def answered(self, answer: Answer, *, now: float) -> None:
        """An engine answered."""
        asked_at, question = self._open.pop((answer.engine, answer.number), (now, None))
        if question is not None:
            given = _Given(asked_at=asked_at, took_s=now - asked_at, answer=answer)
            for kind in _kinds(question):
                self._given.setdefault(kind, []).append(given)

    def nearest(self, question: Question, *, now: float) -> _Given | None:
        """What was answered to such a question nearest to `now`."""
        for kind in _kinds(question):
            if known := self._given.get(kind):
                return min(known, key=lambda given: abs(given.asked_at - now))
        return None


def _as_answer(question: Question, answer: Answer) -> Answer | None:
    """The answer, as one to this question."""
    about = {"engine": question.engine, "incarnation": question.incarnation, "number": question.number}
    match question, answer:
        case RunTransfer(), InferenceAnswered():
            return TransferAnswered(**about, produced=answer.produced, consumed=answer.consumed)  # type: ignore[arg-type]
        case ProbeInference(), TransferAnswered():
            return InferenceAnswered(**about, produced=answer.produced, consumed=answer.consumed)  # type: ignore[arg-type]
    return replace(answer, **about)  # type: ignore[arg-type]


class WhatIf:
    """A core with other settings beside the journal's own."""

    def __init__(self, head: Head, settings: CoreSettings, answers: Answers) -> None:
        """`answers`: those of the whole journal. Raises ReplayError."""
        self.course = Course()
        self.assumed = 0  # questions answered by what the engine said at another time
        self.unanswered = 0  # questions that nobody knows an answer to
        self._settings = settings
        self._answers = answers
        self._coming: list[tuple[float, int, Answer]] = []
        self._order = count()
        self._placements: dict[tuple[int, int], int] = {}  # one that was followed → our version then
        self._version = 0
        self.begin_anew(head)

    def begin_anew(self, head: Head) -> None:
        """From this line on: steps before it are missing, or there were none."""
        self._now = head.now
        self._epoch = head.epoch
        self._newest = (head.epoch, 0)  # that was published
        self._looked_at: tuple[PlacementContent, int] | None = None
        self._content: PlacementContent | None = None
        self._coming.clear()
        if head.kind == "start":
            self.core = core_of(replace(head, settings=self._settings))
        else:
            self.core = core_of(head)
            self._give(Reloaded(settings=self._settings), now=head.now)
        self._settle(head.now)

    # --- what the journal has ---------------------------------------------------------------------------------------

    def take(self, what: Input | Stage, *, now: float, was: Mapping[str, int]) -> None:
        """A step of the journal. `was`: the incarnations that its own core had before it."""
        self.advance(now)
        match what:
            case Published():
                self._placements[self._newest] = self._version
                self._newest, self._epoch = (what.epoch, what.version), what.epoch
            case _ if isinstance(what, _OWN | _ANSWERS):
                pass
            case Reported():
                self._give(Reported(batch=self._batch(what.batch, was)), now=now)
            case ProxyAcked() | ProxyNacked():
                self._give(replace(what, version=self._version_of(what.epoch, what.version)), now=now)
            case _:
                self._give(what, now=now)
        self._settle(now)

    def advance(self, now: float) -> None:
        """Time passes up to `now`: wake-ups of its own, and answers."""
        for _ in range(_MOST_AT_ONCE):
            due = self.core.next_due()
            coming = self._coming[0][0] if self._coming else None
            at = min((instant for instant in (due, coming) if instant is not None), default=None)
            if at is None or at > now:
                break
            at = max(at, self._now)
            if coming is not None and coming <= at:
                self._give(heapq.heappop(self._coming)[2], now=at)
            else:
                self._give(Woke(), now=at)
            self._settle(at)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _give(self, what: Input | Stage, *, now: float) -> None:
        self._now = now
        effects, _ = give(self.core, what, now=now)
        self.course.add(effects, now=now)
        for effect in effects:
            if not isinstance(effect, Record):
                self._ask(effect, now)

    def _ask(self, question: Question, now: float) -> None:
        given = self._answers.nearest(question, now=now)
        answer = None if given is None else _as_answer(question, given.answer)
        if given is None or answer is None:
            self.unanswered += 1
            return
        self.assumed += abs(given.asked_at - now) > NEAR_S
        heapq.heappush(self._coming, (now + given.took_s, next(self._order), answer))

    def _settle(self, now: float) -> None:
        """What it decided is stored at once, and published."""
        revision = self.core.revision
        decided = self.core.placement(now=now)
        self.course.look(self.core, now=now)
        if self._looked_at is not None and decided is self._looked_at[0] and revision == self._looked_at[1]:
            return
        self._looked_at = decided, revision
        content = publishable(decided, self.core.incarnations())
        if content == self._content:
            return
        self._content = content
        self._version += 1
        serving = frozenset(e.id for e in content.engines.values() if e.phases or e.phases_after_quarantine)
        told = Published(epoch=self._epoch, version=self._version, serving=serving, closed=content.closed)
        self._give(told, now=now)

    def _version_of(self, epoch: int, version: int) -> int:
        """The version that a proxy would have which has that one of the journal."""
        return self._version if (epoch, version) >= self._newest else self._placements.get((epoch, version), 0)

    def _batch(self, batch: Batch, was: Mapping[str, int]) -> Batch:
        ours = self.core.incarnations()

        def same(engine: str, incarnation: int) -> int:
            return max(0, ours.get(engine, incarnation) - was.get(engine, incarnation) + incarnation)

        def run(seen: Run) -> Run:
            failure = seen.failure
            if failure is not None:
                producer = same(failure.producer, failure.producer_incarnation)
                failure = replace(failure, producer_incarnation=producer)
            return replace(seen, incarnation=same(seen.engine, seen.incarnation), failure=failure)

        return replace(batch, runs=tuple(run(seen) for seen in batch.runs))


# --- side by side -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One event of both courses, or of one of them."""

    at: float
    was: Record | None
    other: Record | None

    @property
    def same(self) -> bool:
        """Whether both have it, in the same words."""
        return self.was == self.other


def side_by_side(was: Course, other: Course) -> list[Pair]:
    """The events of both in the order of time: the same ones beside each other where they happened about then, else
    those of one kind about one engine."""
    left: dict[tuple[str, ...], list[Told]] = {}
    for told in other.told:
        left.setdefault(_about(told.record), []).append(told)
    beside: dict[int, Record] = {}
    for equal in (True, False):
        for index, told in enumerate(was.told):
            if index in beside:
                continue
            alike = left.get(_about(told.record), [])
            near = (t for t in alike if abs(t.at - told.at) <= NEAR_S and (not equal or t.record == told.record))
            if (found := next(near, None)) is not None:
                alike.remove(found)
                beside[index] = found.record
    rows = [Pair(at=told.at, was=told.record, other=beside.get(index)) for index, told in enumerate(was.told)]
    rows += [Pair(at=told.at, was=None, other=told.record) for alike in left.values() for told in alike]
    return sorted(rows, key=lambda row: row.at)


def _about(record: Record) -> tuple[str, ...]:
    return (record.kind, record.engine, record.proxy)
