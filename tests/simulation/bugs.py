"""Planted bugs: for each invariant at least one that breaks it, to prove that the net has no holes.

Each is a small patch of the real parts, or of the shell around them, with a seed that is known to find it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from narwhal.control.core import coverage, evidence, persistence, probing, roster
from narwhal.control.core.drain import Drains
from narwhal.control.core.engine import Engine
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import SavedEngine
from narwhal.control.core.liveness import Liveness
from narwhal.control.core.probing import InferenceProbe
from narwhal.control.core.readmission import Readmission
from narwhal.control.core.suspicion import Suspicions
from narwhal.control.core.tallies import Tallies
from narwhal.placement import Placement
from narwhal.proxy.attempt import Attempt, LegEnd, StartLeg, Step
from narwhal.proxy.held import Held
from narwhal.vocabulary import FailureClass, Hold, Outcome, RequestResult
from tests.simulation import term
from tests.simulation.control import Control
from tests.simulation.links import Link
from tests.simulation.prober import Transfer
from tests.simulation.proxies import Proxy
from tests.simulation.publisher import Publisher
from tests.simulation.requests import Request
from tests.simulation.store import BOOT_MARGIN_S, Failed, Lease, Store
from tests.simulation.world import Invariant


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One planted bug."""

    rule: Invariant  # the invariant that it breaks
    seed: int  # known to find it
    plant: Callable[[ExitStack], None]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """While the bug of this name is in."""
    with ExitStack() as stack:
        if name:
            BUGS[name].plant(stack)
        yield


def _swap(owner: Any, name: str, value: Any) -> Callable[[ExitStack], None]:
    def plant(stack: ExitStack) -> None:
        stack.enter_context(patch.object(owner, name, value))

    return plant


def _items(table: dict[Any, Any], **changes: Any) -> Callable[[ExitStack], None]:
    def plant(stack: ExitStack) -> None:
        stack.enter_context(patch.dict(table, {Outcome[k]: v for k, v in changes.items()}))

    return plant


def _both(*plants: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
    def plant(stack: ExitStack) -> None:
        for one in plants:
            one(stack)

    return plant


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def _no_decisions(*_: Any, **__: Any) -> list[Any]:
    return []


def _waits_for_nothing(*_: Any, **__: Any) -> Iterator[str]:
    return iter(())


def _yes(*_: Any, **__: Any) -> bool:
    return True


# --- proxies ----------------------------------------------------------------------------------------------------------


def _choose_any(proxy: Proxy, _step: StartLeg) -> Any:
    placement = proxy.held.placement
    return proxy.world.rng.choice(list(placement.engines.values())) if placement is not None else None


class _RetriesAfterOutput(Attempt):
    __slots__ = ()

    def leg_failed(self, engine: str, end: LegEnd, *, output: bool, now: float, draw: float) -> Step:
        del output
        return super().leg_failed(engine, end, output=False, now=now, draw=draw)


def _cancel_halfway(request: Request) -> None:
    """The client is gone, and the leg goes on."""
    request.ends += 1
    request.proxy.tell_request(RequestResult.CANCELLED, 0)
    request.done(RequestResult.CANCELLED)


def _prefill_once(stack: ExitStack) -> None:
    """Another attempt reads the handoff of the one before."""
    prefill, decode, kept = Request._prefill, Request._decode, dict[Request, Any]()

    def again(request: Request, step: StartLeg) -> None:
        if request not in kept:
            prefill(request, step)
            return
        request.handoff, request.producer = kept[request]
        request._perform(request.attempt.prefilled(kept[request][1].id, request.proxy.now()))

    def keep(request: Request, step: StartLeg) -> None:
        kept[request] = (request.handoff, request.producer)
        decode(request, step)

    stack.enter_context(patch.object(Request, "_prefill", again))
    stack.enter_context(patch.object(Request, "_decode", keep))


def _meet_any(held: Held, epoch: int) -> None:
    held.highest_epoch = epoch


def _offer_any(held: Held, placement: Placement, *, now: float) -> None:
    held.placement = placement
    held._confirmed_at = now


def _deaf_after_a_while(stack: ExitStack) -> None:
    """A proxy that takes no placement any more once the fleet is up."""
    placement = Link._placement

    def take(link: Link, stream: Any, message: Any) -> None:
        if link.proxy.world.now < 12.0:
            placement(link, stream, message)

    stack.enter_context(patch.object(Link, "_placement", take))


# --- control ----------------------------------------------------------------------------------------------------------


def _never_hard(stack: ExitStack) -> None:
    candidate = Engine.candidate

    def soft(engine: Engine, **kwargs: Any) -> coverage.Candidate:
        return replace(candidate(engine, **kwargs), hard=Hold.JOINING in engine.holds)

    stack.enter_context(patch.object(Engine, "candidate", soft))


def _no_protection(stack: ExitStack) -> None:
    servers = coverage.servers

    def unprotected(candidates: Any, phase: Any) -> tuple[str, ...]:
        return servers([c for c in candidates if c.free], phase)

    stack.enter_context(patch.object(coverage, "servers", unprotected))


def _loading(change: Callable[[SavedEngine], SavedEngine]) -> Callable[[ExitStack], None]:
    def plant(stack: ExitStack) -> None:
        load = persistence.load_engine

        def changed(spec: Any, saved: SavedEngine, settings: Any, *, now: float) -> Engine:
            return load(spec, change(saved), settings, now=now)

        stack.enter_context(patch.object(roster, "load_engine", changed))

    return plant


def _without_ejection(saved: SavedEngine) -> SavedEngine:
    return replace(saved, holds=tuple(h for h in saved.holds if h.kind is not Hold.EJECTED))


def _without_soft_holds(saved: SavedEngine) -> SavedEngine:
    kept = (Hold.EJECTED, Hold.JOINING)
    return replace(saved, holds=tuple(h for h in saved.holds if h.kind in kept))


def _without_counters(saved: SavedEngine) -> SavedEngine:
    return replace(saved, outcomes={})


def _never_back(stack: ExitStack) -> None:
    """An ejected engine never has its turn at the gate."""
    ejected = Readmission.ejected

    def put_off(readmission: Readmission, engine: Engine, *, now: float) -> None:
        ejected(readmission, engine, now=now)
        readmission.gates[engine.id].due = now + 1e6

    stack.enter_context(patch.object(Readmission, "ejected", put_off))


def _unread_unsaid(stack: ExitStack) -> None:
    """Acknowledgements that do not say which handoffs are still to be read."""
    acked = Publisher._acked

    def without(publisher: Publisher, side: Any, epoch: Any, version: Any, resident: Any, _unread: Any) -> None:
        acked(publisher, side, epoch, version, resident, {})

    stack.enter_context(patch.object(Publisher, "_acked", without))


def _probe_again(stack: ExitStack) -> None:
    """Each failure at the threshold starts a probe, whether or not one runs."""
    reconsider = Suspicions._reconsider

    def again(suspicions: Suspicions, engine: Engine, *, now: float) -> Any:
        known = suspicions.known.get(engine.id)
        if known is not None and known.held:
            return suspicions._try(engine, known, told=known.reason, now=now)
        return reconsider(suspicions, engine, now=now)

    stack.enter_context(patch.object(Suspicions, "_reconsider", again))


def _eject_again(stack: ExitStack) -> None:
    """An ejection that is decided twice: the second is no legal transition."""
    eject = Fleet._eject

    def twice(fleet: Fleet, decision: Any, now: float) -> Any:
        return [*eject(fleet, decision, now), *eject(fleet, decision, now)]

    stack.enter_context(patch.object(Fleet, "_eject", twice))


def _unread(stack: ExitStack) -> None:
    """A probe that takes a handoff for proof enough."""
    consume = Transfer._consume

    def skip(transfer: Transfer, handoff: Any) -> None:
        if handoff is None:
            consume(transfer, handoff)
        else:
            transfer._answer(transfer.produced)

    stack.enter_context(patch.object(Transfer, "_consume", skip))


def _report_at_once(stack: ExitStack) -> None:
    report = term.Term.report

    def early(self: term.Term, batch: Any, durable: Callable[[], None]) -> None:
        report(self, batch, _nothing)
        durable()

    stack.enter_context(patch.object(term.Term, "report", early))


def _valid_from_the_answer(control: Control, _asked_at: float) -> float:
    """As if the store began to count when it was heard."""
    return control.boottime() + control.store.ttl_s - BOOT_MARGIN_S if control.store.ttl_s else math.inf


def _renewed_in_any_case(control: Control, lease: Lease, _asked_at: float, _error: Failed | None) -> None:
    """An answer that never came is taken for a yes."""
    lease.valid_until = _valid_from_the_answer(control, 0.0)


def _settle_for_ever(stack: ExitStack) -> None:
    settle = term.Term._settle

    def again(self: term.Term) -> None:
        settle(self)
        self._settle_soon()

    stack.enter_context(patch.object(term.Term, "_settle", again))


def _as_they_come(_probe: InferenceProbe, leg: Any, peers: Any) -> list[str]:
    return sorted((p for p in peers if p != leg.suspect), key=lambda p: p not in _probe.remembered)


def _publish_all(content: Any, _stored: Any) -> Any:
    return content


def _accept_all(stack: ExitStack) -> None:
    accept = Tallies.accept

    def always(tallies: Tallies, batch: Any, *, connected: bool, now: float) -> bool:
        if not accept(tallies, batch, connected=connected, now=now):
            tallies.requests = tallies.requests.plus(batch.requests)
        return True

    stack.enter_context(patch.object(Tallies, "accept", always))


BUGS: dict[str, Bug] = {
    "placement-ignored": Bug(rule=Invariant.LEGS_FOLLOW_PLACEMENT, seed=7, plant=_swap(Proxy, "choose", _choose_any)),
    "retry-after-output": Bug(
        rule=Invariant.NO_RETRY_AFTER_OUTPUT, seed=49, plant=_swap(Proxy, "machine", _RetriesAfterOutput)
    ),
    "cancelled-leg-goes-on": Bug(
        rule=Invariant.REQUEST_ENDS_ONCE, seed=4, plant=_swap(Request, "cancel", _cancel_halfway)
    ),
    "handoff-reused": Bug(rule=Invariant.HANDOFF_USED_ONCE, seed=42, plant=_prefill_once),
    "leg-never-ends": Bug(rule=Invariant.LEGS_END, seed=2, plant=_swap(Proxy, "leg_over", _nothing)),
    "lower-epoch-accepted": Bug(
        rule=Invariant.NO_LOWER_EPOCH,
        seed=47,
        plant=_both(_swap(Held, "meet", _meet_any), _swap(Held, "offer", _offer_any)),
    ),
    "proxy-goes-deaf": Bug(rule=Invariant.RECOVERY, seed=4, plant=_deaf_after_a_while),
    "ejected-placed": Bug(rule=Invariant.EJECTED_IS_OUT, seed=7, plant=_never_hard),
    "published-before-stored": Bug(rule=Invariant.STORED_FIRST, seed=4, plant=_swap(term, "publishable", _publish_all)),
    "last-engine-taken": Bug(rule=Invariant.PHASES_COVERED, seed=4, plant=_no_protection),
    "counted-twice": Bug(rule=Invariant.TOTALS, seed=17, plant=_accept_all),
    "acknowledged-early": Bug(rule=Invariant.ACKNOWLEDGED_STORED, seed=4, plant=_report_at_once),
    "resume-forgets-ejection": Bug(rule=Invariant.RESUME, seed=47, plant=_loading(_without_ejection)),
    "resume-forgets-holds": Bug(rule=Invariant.RESUME, seed=88, plant=_loading(_without_soft_holds)),
    "resume-forgets-counters": Bug(rule=Invariant.RESUME, seed=2, plant=_loading(_without_counters)),
    "fence-ignored": Bug(rule=Invariant.ONE_ACTS, seed=51, plant=_swap(Lease, "may_act", _yes)),
    "lease-counted-from-the-answer": Bug(
        rule=Invariant.ONE_ACTS, seed=61, plant=_swap(Control, "_valid_until", _valid_from_the_answer)
    ),
    "no-answer-is-a-renewal": Bug(
        rule=Invariant.ONE_ACTS, seed=3, plant=_swap(Control, "_renewed", _renewed_in_any_case)
    ),
    "superseded-writer": Bug(rule=Invariant.ONE_ACTS, seed=112, plant=_swap(Store, "_check", _nothing)),
    "reader-blamed": Bug(
        rule=Invariant.BLAME,
        seed=25,
        plant=_both(_swap(probing, "CONVICTS", 1), _swap(InferenceProbe, "_order", _as_they_come)),
    ),
    "own-fault-blamed": Bug(
        rule=Invariant.BLAME,
        seed=69,
        plant=_items(evidence.CLASS_OF, LOCAL=FailureClass.CONNECTION),
    ),
    "cut-off-control-ejects": Bug(rule=Invariant.BLAME, seed=62, plant=_swap(Liveness, "heard", _nothing)),
    "streams-not-evidence": Bug(
        rule=Invariant.DETECTION,
        seed=44,
        plant=_items(evidence.CLASS_OF, STREAM_CUT=FailureClass.OVERLOAD, ERROR_EVENT=FailureClass.OVERLOAD),
    ),
    "no-sweeps": Bug(rule=Invariant.DETECTION, seed=73, plant=_swap(Liveness, "tick", _no_decisions)),
    "gate-stays-shut": Bug(rule=Invariant.RECOVERY, seed=2, plant=_never_back),
    "settled-too-soon": Bug(rule=Invariant.DRAINED, seed=66, plant=_swap(Drains, "_proxy_waits", _waits_for_nothing)),
    "handoffs-forgotten": Bug(rule=Invariant.DRAINED, seed=16, plant=_unread_unsaid),
    "two-probes": Bug(rule=Invariant.ONE_PROBE, seed=4, plant=_probe_again),
    "probe-leaves-kv": Bug(rule=Invariant.NO_KV_LEFT, seed=7, plant=_unread),
    "ejected-twice": Bug(rule=Invariant.NOTHING_RAISES, seed=11, plant=_eject_again),
    "livelock": Bug(rule=Invariant.NO_LIVELOCK, seed=4, plant=_settle_for_ever),
}
