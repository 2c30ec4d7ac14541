"""Planted bugs: for each invariant at least one that breaks it, to prove that the net has no holes.

Each is a small patch of the real parts, or of the shell around them, with a seed that is known to find it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from narwhal.control.core import engine as engine_module
from narwhal.control.core import evidence, probing, roles, tallies
from narwhal.control.core.drain import Drains
from narwhal.control.core.drift import Drift
from narwhal.control.core.liveness import Liveness
from narwhal.control.core.probing import InferenceProbe
from narwhal.control.core.suspicion import Suspicions
from narwhal.proxy.held import Held
from narwhal.reports import RequestCounts
from narwhal.vocabulary import HARD_HOLDS, FailureClass, Hold
from tests.simulation import term
from tests.simulation.control import Control
from tests.simulation.plants import (
    ResumesWithDecode,
    RetriesAfterOutput,
    RetriesAtOnce,
    accept_all,
    as_they_come,
    both,
    cancel_halfway,
    cancel_twice,
    cancel_without_the_leg,
    choose_any,
    deaf_after_a_while,
    eject_again,
    items,
    itself_first,
    loading,
    lost_is_gone,
    meet_any,
    never_back,
    never_hard,
    no_decisions,
    no_protection,
    nothing,
    offer_any,
    old_one_last,
    prefill_once,
    probe_again,
    proves_nothing,
    publish_all,
    renewed_in_any_case,
    report_at_once,
    resuming,
    retries_uncounted,
    saving,
    settle_for_ever,
    swap,
    unfenced,
    unless_as_another,
    unread,
    unread_unsaid,
    unsaid_ejections,
    valid_from_the_answer,
    waits_for_nothing,
    without,
    without_counters,
    without_ejection,
    without_soft_holds,
    without_streaks,
    yes,
)
from tests.simulation.proxies import Proxy
from tests.simulation.requests import Leg, Request
from tests.simulation.store import Lease, Store
from tests.simulation.world import Invariant


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One planted bug."""

    rule: Invariant  # the invariant that it breaks
    seed: int  # known to find it
    says: str  # what a violation says that it leads to: which of the looks at the invariant finds it
    plant: Callable[[ExitStack], None]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """While the bug of this name is in."""
    with ExitStack() as stack:
        if name:
            BUGS[name].plant(stack)
        yield


BUGS: dict[str, Bug] = {
    "placement-ignored": Bug(
        rule=Invariant.LEGS_FOLLOW_PLACEMENT, seed=1, says=" leg on ", plant=swap(Proxy, "choose", choose_any)
    ),
    "retry-after-output": Bug(
        rule=Invariant.NO_RETRY_AFTER_OUTPUT,
        seed=10,
        says="is retried after output",
        plant=swap(Proxy, "machine", RetriesAfterOutput),
    ),
    "cancelled-leg-goes-on": Bug(
        rule=Invariant.REQUEST_ENDS_ONCE,
        seed=4,
        says="goes on after its end",
        plant=swap(Request, "cancel", cancel_halfway),
    ),
    "handoff-reused": Bug(rule=Invariant.HANDOFF_USED_ONCE, seed=10, says=" was sent to ", plant=prefill_once),
    "leg-never-ends": Bug(
        rule=Invariant.LEGS_END, seed=1, says="in flight at rest", plant=swap(Proxy, "leg_over", nothing)
    ),
    "lower-epoch-accepted": Bug(
        rule=Invariant.NO_LOWER_EPOCH,
        seed=47,
        says=", believes ",
        plant=both(swap(Held, "meet", meet_any), swap(Held, "offer", offer_any)),
    ),
    "proxy-goes-deaf": Bug(rule=Invariant.RECOVERY, seed=1, says="not well ", plant=deaf_after_a_while),
    "ejected-placed": Bug(rule=Invariant.EJECTED_IS_OUT, seed=2, says=" is to serve ", plant=never_hard),
    "published-before-stored": Bug(
        rule=Invariant.STORED_FIRST, seed=1, says=", stored is ", plant=swap(term, "publishable", publish_all)
    ),
    "last-engine-taken": Bug(rule=Invariant.PHASES_COVERED, seed=4, says="nobody serves ", plant=no_protection),
    "counted-twice": Bug(rule=Invariant.TOTALS, seed=1, says="legs counted too often", plant=accept_all),
    "acknowledged-early": Bug(rule=Invariant.ACKNOWLEDGED_STORED, seed=1, says=", stored is ", plant=report_at_once),
    "resume-forgets-ejection": Bug(rule=Invariant.RESUME, seed=29, says=" holds ", plant=loading(without_ejection)),
    "resume-forgets-holds": Bug(rule=Invariant.RESUME, seed=88, says=" holds ", plant=loading(without_soft_holds)),
    "resume-forgets-counters": Bug(
        rule=Invariant.RESUME, seed=2, says="counters differ", plant=loading(without_counters)
    ),
    "fence-ignored": Bug(rule=Invariant.ONE_ACTS, seed=3, says=" may act at once", plant=swap(Lease, "may_act", yes)),
    "lease-counted-from-the-answer": Bug(
        rule=Invariant.ONE_ACTS,
        seed=61,
        says=" may act at once",
        plant=swap(Control, "_valid_until", valid_from_the_answer),
    ),
    "no-answer-is-a-renewal": Bug(
        rule=Invariant.ONE_ACTS, seed=3, says=" may act at once", plant=swap(Control, "_renewed", renewed_in_any_case)
    ),
    "superseded-writer": Bug(
        rule=Invariant.ONE_ACTS, seed=21, says=" writes under epoch ", plant=swap(Store, "_check", nothing)
    ),
    "reader-blamed": Bug(
        rule=Invariant.BLAME,
        seed=150,
        says="nothing is wrong with it",
        plant=both(swap(probing, "CONVICTS", 1), swap(InferenceProbe, "_order", as_they_come)),
    ),
    "own-fault-blamed": Bug(
        rule=Invariant.BLAME,
        seed=17,
        says="nothing is wrong with it",
        plant=items(evidence.CLASS_OF, LOCAL=FailureClass.CONNECTION),
    ),
    "cut-off-control-ejects": Bug(
        rule=Invariant.BLAME, seed=14, says="nothing is wrong with it", plant=swap(Liveness, "heard", nothing)
    ),
    "streams-not-evidence": Bug(
        rule=Invariant.DETECTION,
        seed=25,
        says=" in a row and no hold",
        plant=items(evidence.CLASS_OF, STREAM_CUT=FailureClass.OVERLOAD, ERROR_EVENT=FailureClass.OVERLOAD),
    ),
    "as-another-engine-not-looked-into": Bug(
        rule=Invariant.DETECTION,
        seed=26,
        says=" answers as another for ",
        plant=swap(Suspicions, "look_into", unless_as_another),
    ),
    "no-sweeps": Bug(
        rule=Invariant.DETECTION, seed=5, says=" answers nobody for ", plant=swap(Liveness, "tick", no_decisions)
    ),
    "gate-stays-shut": Bug(rule=Invariant.RECOVERY, seed=1, says="not well ", plant=never_back),
    "settled-too-soon": Bug(
        rule=Invariant.DRAINED, seed=16, says=" has work there", plant=swap(Drains, "_proxy_waits", waits_for_nothing)
    ),
    "handoffs-forgotten": Bug(rule=Invariant.DRAINED, seed=16, says=" has work there", plant=unread_unsaid),
    "two-probes": Bug(rule=Invariant.ONE_PROBE, seed=1, says="is probed twice at once", plant=probe_again),
    "probe-leaves-kv": Bug(rule=Invariant.NO_KV_LEFT, seed=1, says=" was never read", plant=unread),
    "ejected-twice": Bug(rule=Invariant.NOTHING_RAISES, seed=2, says="IllegalTransitionError", plant=eject_again),
    "floor-given-up": Bug(rule=Invariant.ROLE_FLOORS, seed=5, says=" is left with ", plant=without(roles.Roles._lacks)),
    "move-reversed": Bug(
        rule=Invariant.NO_REVERSAL, seed=68, says="after a move back", plant=without(roles.Roles._reverses)
    ),
    "drift-takes-the-last": Bug(
        rule=Invariant.PHASES_COVERED,
        seed=110,
        says="nobody serves ",
        plant=swap(engine_module, "HARD_HOLDS", HARD_HOLDS | {Hold.DRIFT}),
    ),
    "probation-never-ends": Bug(
        rule=Invariant.RECOVERY, seed=1, says="not well ", plant=swap(Drift, "_good", no_decisions)
    ),
    "livelock": Bug(rule=Invariant.NO_LIVELOCK, seed=1, says=" events at one instant", plant=settle_for_ever),
    "retried-at-once-after-output": Bug(
        rule=Invariant.NO_RETRY_AFTER_OUTPUT,
        seed=1,
        says=" starts a leg after output",
        plant=swap(Proxy, "machine", RetriesAtOnce),
    ),
    "resumed-with-decode": Bug(
        rule=Invariant.HANDOFF_USED_ONCE,
        seed=4,
        says=" decodes without a handoff of its own",
        plant=swap(Proxy, "machine", ResumesWithDecode),
    ),
    "cancelled-without-the-leg": Bug(
        rule=Invariant.REQUEST_ENDS_ONCE,
        seed=1,
        says=" ended while a leg runs",
        plant=swap(Request, "cancel", cancel_without_the_leg),
    ),
    "cancelled-twice": Bug(
        rule=Invariant.REQUEST_ENDS_ONCE, seed=1, says=" times, now ", plant=swap(Request, "cancel", cancel_twice)
    ),
    "nothing-is-late": Bug(rule=Invariant.LEGS_END, seed=22, says="not at rest ", plant=swap(Leg, "_watch", nothing)),
    "older-version-applied": Bug(
        rule=Invariant.NO_LOWER_EPOCH,
        seed=1,
        says=", applies ",
        plant=both(swap(Held, "offer", offer_any), old_one_last),
    ),
    "acts-unfenced": Bug(
        rule=Invariant.ONE_ACTS, seed=41, says=" is published after ", plant=swap(term.Term, "may_act", unfenced)
    ),
    "resume-forgets-streaks": Bug(rule=Invariant.RESUME, seed=29, says=": streaks ", plant=loading(without_streaks)),
    "resume-forgets-requests": Bug(
        rule=Invariant.RESUME,
        seed=2,
        says="requests ",
        plant=resuming(lambda state: replace(state, requests=RequestCounts())),
    ),
    "resume-forgets-reports": Bug(
        rule=Invariant.RESUME,
        seed=2,
        says="the cursors of reports differ",
        plant=resuming(lambda state: replace(state, cursors=())),
    ),
    "ejection-not-written": Bug(
        rule=Invariant.RESUME, seed=2, says="the document does not say that ", plant=saving(unsaid_ejections)
    ),
    "retries-uncounted": Bug(rule=Invariant.TOTALS, seed=4, says=", truth: ", plant=retries_uncounted),
    "cursor-dropped-at-once": Bug(
        rule=Invariant.TOTALS, seed=80, says=" was told that report ", plant=swap(tallies, "CURSOR_KEPT_S", 1.0)
    ),
    "probe-acquits-nobody": Bug(
        rule=Invariant.BLAME,
        seed=19,
        says=" is on a verification hold for ",
        plant=swap(InferenceProbe, "verdict", property(proves_nothing)),
    ),
    "lost-proxy-is-gone": Bug(rule=Invariant.DRAINED, seed=2, says=", which is ready to stop", plant=lost_is_gone),
    "reads-its-own-handoff": Bug(
        rule=Invariant.NO_KV_LEFT,
        seed=1,
        says=" is to read its own handoff",
        plant=swap(InferenceProbe, "_order", itself_first),
    ),
}
