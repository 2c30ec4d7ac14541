"""A stored document → whether this process may go on from it (spec S2, S7). The words are the core's."""

from dataclasses import dataclass

import orjson

from narwhal.control.core.handoff import Handoff, HandoffError, Resume, compare, from_document
from narwhal.control.core.settings import CoreSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What a document is to a configured fleet."""

    document: bytes | None = None  # None when there is none
    handoff: Handoff | None = None  # None when it cannot be read, or there is none
    resume: Resume = Resume.APPLY
    problem: str = ""  # why it may not be applied; empty when it may, or there is none

    @property
    def order(self) -> tuple[int, float]:
        """Of two documents that can be read the later one has the higher order: epoch, wall time of writing."""
        return (self.handoff.lease.epoch, self.handoff.written_at) if self.handoff is not None else (0, 0.0)


def judge(document: bytes | None, core: CoreSettings) -> Judged:
    """Whether `document` may be applied to the fleet that `core` describes."""
    if document is None:
        return Judged()

    def refused(problem: str) -> Judged:
        return Judged(document=document, resume=Resume.REFUSE, problem=problem)

    try:
        handoff = from_document(orjson.loads(document))
    except orjson.JSONDecodeError as error:
        return refused(f"the saved handoff is not JSON: {error}")
    except HandoffError as error:
        return refused(f"the saved handoff cannot be applied: {error}")
    comparison = compare(handoff.state, fleet=core.name, model=core.model, engines=[e.id for e in core.engines])
    applies = comparison.resume is Resume.APPLY
    problem = "" if applies else comparison.message
    return Judged(document=document, handoff=handoff, resume=comparison.resume, problem=problem)


def newest(stored: Judged, known: Judged) -> Judged:
    """What is stored, or what this process knows where the store was wiped or set back since (spec S5)."""
    if known.handoff is None:
        return stored
    if stored.document is None:
        return known
    unreadable = stored.handoff is None
    return stored if unreadable or stored.order >= known.order else known
