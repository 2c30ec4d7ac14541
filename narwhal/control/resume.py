"""A stored document → whether this process may go on from it (spec S2, S7). The words are the core's."""

from dataclasses import dataclass

import orjson

from narwhal.control.core.handoff import Handoff, HandoffError, Resume, compare, from_document
from narwhal.control.core.settings import CoreSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What a document is to a configured fleet."""

    handoff: Handoff | None = None  # None when it cannot be read, or there is none
    resume: Resume = Resume.APPLY
    problem: str = ""  # why it may not be applied; empty when it may, or there is none


def judge(document: bytes | None, core: CoreSettings) -> Judged:
    """Whether `document` may be applied to the fleet that `core` describes."""
    if document is None:
        return Judged()
    try:
        handoff = from_document(orjson.loads(document))
    except orjson.JSONDecodeError as error:
        return Judged(resume=Resume.REFUSE, problem=f"the saved handoff is not JSON: {error}")
    except HandoffError as error:
        return Judged(resume=Resume.REFUSE, problem=f"the saved handoff cannot be applied: {error}")
    comparison = compare(handoff.state, fleet=core.name, engines=[e.id for e in core.engines])
    applies = comparison.resume is Resume.APPLY
    return Judged(handoff=handoff, resume=comparison.resume, problem="" if applies else comparison.message)


def newer(stored: bytes | None, mine: bytes | None) -> bytes | None:
    """What is stored, or what this process stored itself where the store was wiped or set back since (spec S5)."""
    if mine is None or stored == mine:
        return stored
    ours = from_document(orjson.loads(mine))
    if stored is None:
        return mine
    try:
        theirs = from_document(orjson.loads(stored))
    except (orjson.JSONDecodeError, HandoffError):
        return stored
    older = (theirs.lease.epoch, theirs.written_at) < (ours.lease.epoch, ours.written_at)
    return mine if older else stored
