"""When a standby asks the active to yield, and when an active does (spec M8). Pure.

Decides nothing about leases: an active that does not answer is replaced when its lease expires, never earlier. It
cannot see: the store, in which a standby proves that it can write; the shell looks, and says what it found.
"""

from dataclasses import dataclass

YIELD_EVERY_S = 60.0  # at most one yield of the fleet in this time


class Misses:
    """The active's answers in a row that were none, or said that it is not control-ready."""

    def __init__(self, *, takeover_after: int) -> None:
        self.takeover_after = takeover_after
        self.count = 0

    def heard(self, *, control_ready: bool) -> bool:
        """One answer more, or its absence (not control-ready). Whether to ask the active to yield now; the count then
        begins anew, so that an active that refuses is asked again as late as the first time."""
        self.count = 0 if control_ready else self.count + 1
        if self.count < self.takeover_after:
            return False
        self.count = 0
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Heir:
    """What is known of a standby that might lead next."""

    holder: str
    problem: str  # why it would not take over, in its own words; empty when it would
    copy_epoch: int  # epoch under which its copy of the state handoff was written; 0: it has none
    copy_age_s: float  # from then until now, on the active's own clock; it stamped the document itself
    proven: bool  # a write of its own was found in the store, made for this


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The active that is asked."""

    epoch: int
    degraded: str  # why it is not control-ready; empty when it is
    since_yield_s: float | None  # since anybody of this fleet yielded; None: nobody did
    max_copy_age_s: float


def refusal(active: Holder, heir: Heir, *, by_operator: bool = False) -> str:
    """Why the active does not yield to this standby; empty when it does, provided that it can still persist.

    An operator may have a healthy active yield, and as often as wanted, but only to a standby that is fit to lead.
    """
    return ("" if by_operator else _unwilling(active)) or _unfit(active, heir)


def _unwilling(active: Holder) -> str:
    if not active.degraded:
        return "it is control-ready"
    if active.since_yield_s is not None and active.since_yield_s < YIELD_EVERY_S:
        return f"the lease was yielded {active.since_yield_s:.0f} s ago, and is at most once in {YIELD_EVERY_S:g} s"
    return ""


def _unfit(active: Holder, heir: Heir) -> str:
    facts = (
        (bool(heir.problem), f"would not take over: {heir.problem}"),
        (not heir.copy_epoch, "has no copy of the state handoff"),
        (heir.copy_epoch != active.epoch, f"has the state handoff of epoch {heir.copy_epoch}, not of {active.epoch}"),
        (
            heir.copy_age_s > active.max_copy_age_s,
            f"has a state handoff that is {heir.copy_age_s:.1f} s old, more than the {active.max_copy_age_s:g} s of "
            f"standby.max_handoff_age_s",
        ),
        (not heir.proven, "has not proven that it can write to the store"),
    )
    return next((f"{heir.holder} {words}" for is_so, words in facts if is_so), "")
