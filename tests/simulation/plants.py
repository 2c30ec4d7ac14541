"""What planted bugs do: small patches of the real parts, or of the shell around them."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from narwhal.control.core import coverage, persistence, roles, roster
from narwhal.control.core.answers import AS_ANOTHER
from narwhal.control.core.drain import Drains
from narwhal.control.core.engine import Engine
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import SavedEngine, SavedFleet
from narwhal.control.core.probing import InferenceProbe
from narwhal.control.core.readmission import Readmission
from narwhal.control.core.suspicion import Suspicions
from narwhal.control.core.tallies import Tallies
from narwhal.placement import Placement
from narwhal.proxy.attempt import Attempt, LegEnd, StartLeg, Step
from narwhal.proxy.held import Held
from narwhal.vocabulary import Hold, Outcome, Phase, RequestResult, Verdict
from tests.simulation import term
from tests.simulation.control import Control
from tests.simulation.links import Link
from tests.simulation.prober import Transfer
from tests.simulation.proxies import Proxy
from tests.simulation.publisher import Publisher
from tests.simulation.requests import Request
from tests.simulation.store import BOOT_MARGIN_S, Failed, Lease


def swap(owner: Any, name: str, value: Any) -> Callable[[ExitStack], None]:
    def plant(stack: ExitStack) -> None:
        stack.enter_context(patch.object(owner, name, value))

    return plant


def items(table: dict[Any, Any], **changes: Any) -> Callable[[ExitStack], None]:
    def plant(stack: ExitStack) -> None:
        stack.enter_context(patch.dict(table, {Outcome[k]: v for k, v in changes.items()}))

    return plant


def both(*plants: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
    def plant(stack: ExitStack) -> None:
        for one in plants:
            one(stack)

    return plant


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def no_decisions(*_: Any, **__: Any) -> list[Any]:
    return []


_look_into = Suspicions.look_into


def unless_as_another(self: Suspicions, engine: Any, why: str, *, now: float) -> list[Any]:
    """No probe of an engine that refused the model to a leg."""
    return [] if why == AS_ANOTHER else _look_into(self, engine, why, now=now)


def waits_for_nothing(*_: Any, **__: Any) -> Iterator[str]:
    return iter(())


def yes(*_: Any, **__: Any) -> bool:
    return True


# --- proxies ----------------------------------------------------------------------------------------------------------


def choose_any(proxy: Proxy, _step: StartLeg) -> Any:
    placement = proxy.held.placement
    return proxy.world.rng.choice(list(placement.engines.values())) if placement is not None else None


class RetriesAfterOutput(Attempt):
    __slots__ = ()

    def leg_failed(self, engine: str, end: LegEnd, *, output: bool, now: float, wait_s: float) -> Step:
        del output
        return super().leg_failed(engine, end, output=False, now=now, wait_s=wait_s)


def cancel_halfway(request: Request) -> None:
    """The client is gone, and the leg goes on."""
    request.ends += 1
    request.proxy.tell_request(RequestResult.CANCELLED, 0)
    request.done(RequestResult.CANCELLED)


class RetriesAtOnce(Attempt):
    """Prefills again without looking at what the client has got."""

    __slots__ = ()

    def leg_failed(self, engine: str, end: LegEnd, *, output: bool, now: float, wait_s: float) -> Step:
        del engine, end, output, now, wait_s
        return self._prefill()


class ResumesWithDecode(Attempt):
    """After a backoff it goes on where it was."""

    __slots__ = ()

    def resume(self) -> StartLeg:
        return super().resume()._replace(phase=Phase.DECODE)


def cancel_without_the_leg(request: Request) -> None:
    """The client is gone, and the leg stays where it was."""
    if not request.ends:
        request._finish(RequestResult.CANCELLED)


def cancel_twice(request: Request) -> None:
    """The client's going away is told by its socket and by its task."""
    leg, request.leg = request.leg, None
    if leg is not None:
        leg.close()
        request.proxy.leg_over(leg)
        request.proxy.tell(leg.entry, leg.phase, Outcome.CANCELLED)
    for _ in range(2):
        request._finish(RequestResult.CANCELLED)


def prefill_once(stack: ExitStack) -> None:
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


def meet_any(held: Held, epoch: int) -> None:
    held.highest_epoch = epoch


def offer_any(held: Held, placement: Placement, *, now: float) -> None:
    held.placement = placement
    held._confirmed_at = now


def deaf_after_a_while(stack: ExitStack) -> None:
    """A proxy that takes no placement any more once the fleet is up."""
    placement = Link._placement

    def take(link: Link, stream: Any, message: Any) -> None:
        if link.proxy.world.now < 12.0:
            placement(link, stream, message)

    stack.enter_context(patch.object(Link, "_placement", take))


# --- control ----------------------------------------------------------------------------------------------------------


def never_hard(stack: ExitStack) -> None:
    candidate = Engine.candidate

    def soft(engine: Engine, **kwargs: Any) -> coverage.Candidate:
        return replace(candidate(engine, **kwargs), hard=Hold.JOINING in engine.holds)

    stack.enter_context(patch.object(Engine, "candidate", soft))


def no_protection(stack: ExitStack) -> None:
    servers = coverage.servers

    def unprotected(candidates: Any, phase: Any) -> tuple[str, ...]:
        return servers([c for c in candidates if c.free], phase)

    stack.enter_context(patch.object(coverage, "servers", unprotected))


def loading(change: Callable[[SavedEngine], SavedEngine]) -> Callable[[ExitStack], None]:
    def plant(stack: ExitStack) -> None:
        load = persistence.load_engine

        def changed(spec: Any, saved: SavedEngine, settings: Any, *, now: float) -> Engine:
            return load(spec, change(saved), settings, now=now)

        stack.enter_context(patch.object(roster, "load_engine", changed))

    return plant


def without_ejection(saved: SavedEngine) -> SavedEngine:
    return replace(saved, holds=tuple(h for h in saved.holds if h.kind is not Hold.EJECTED))


def without_soft_holds(saved: SavedEngine) -> SavedEngine:
    kept = (Hold.EJECTED, Hold.JOINING)
    return replace(saved, holds=tuple(h for h in saved.holds if h.kind in kept))


def without_streaks(saved: SavedEngine) -> SavedEngine:
    """Its failures in a row forgotten."""
    return replace(saved, streaks={}, producers={}, stalls=0, timeout_is_stream=False)


def without_counters(saved: SavedEngine) -> SavedEngine:
    return replace(saved, outcomes={})


def never_back(stack: ExitStack) -> None:
    """An ejected engine never has its turn at the gate."""
    ejected = Readmission.ejected

    def put_off(readmission: Readmission, engine: Engine, *, now: float) -> None:
        ejected(readmission, engine, now=now)
        readmission.gates[engine.id].due = now + 1e6

    stack.enter_context(patch.object(Readmission, "ejected", put_off))


def unread_unsaid(stack: ExitStack) -> None:
    """Acknowledgements that do not say which handoffs are still to be read."""
    acked = Publisher._acked

    def without(publisher: Publisher, side: Any, epoch: Any, version: Any, resident: Any, _unread: Any) -> None:
        acked(publisher, side, epoch, version, resident, {})

    stack.enter_context(patch.object(Publisher, "_acked", without))


def probe_again(stack: ExitStack) -> None:
    """Each failure at the threshold starts a probe, whether or not one runs."""
    reconsider = Suspicions._reconsider

    def again(suspicions: Suspicions, engine: Engine, *, now: float) -> Any:
        known = suspicions.known.get(engine.id)
        if known is not None and known.held:
            return suspicions._try(engine, known, told=known.reason, now=now)
        return reconsider(suspicions, engine, now=now)

    stack.enter_context(patch.object(Suspicions, "_reconsider", again))


def eject_again(stack: ExitStack) -> None:
    """An ejection that is decided twice: the second is no legal transition."""
    eject = Fleet._eject

    def twice(fleet: Fleet, decision: Any, now: float) -> Any:
        return [*eject(fleet, decision, now), *eject(fleet, decision, now)]

    stack.enter_context(patch.object(Fleet, "_eject", twice))


def unread(stack: ExitStack) -> None:
    """A probe that takes a handoff for proof enough."""
    consume = Transfer._consume

    def skip(transfer: Transfer, handoff: Any) -> None:
        if handoff is None:
            consume(transfer, handoff)
        else:
            transfer._answer(transfer.produced)

    stack.enter_context(patch.object(Transfer, "_consume", skip))


def report_at_once(stack: ExitStack) -> None:
    report = term.Term.report

    def early(self: term.Term, batch: Any, durable: Callable[[], None]) -> None:
        report(self, batch, nothing)
        durable()

    stack.enter_context(patch.object(term.Term, "report", early))


def valid_from_the_answer(control: Control, _asked_at: float) -> float:
    """As if the store began to count when it was heard."""
    return control.boottime() + control.store.ttl_s - BOOT_MARGIN_S if control.store.ttl_s else math.inf


def renewed_in_any_case(control: Control, lease: Lease, _asked_at: float, _error: Failed | None) -> None:
    """An answer that never came is taken for a yes."""
    lease.valid_until = valid_from_the_answer(control, 0.0)


def settle_for_ever(stack: ExitStack) -> None:
    settle = term.Term._settle

    def again(self: term.Term) -> None:
        settle(self)
        self._settle_soon()

    stack.enter_context(patch.object(term.Term, "_settle", again))


def as_they_come(_probe: InferenceProbe, leg: Any, peers: Any) -> list[str]:
    return sorted((p for p in peers if p != leg.suspect), key=lambda p: p not in _probe.remembered)


def publish_all(content: Any, _stored: Any) -> Any:
    return content


def accept_all(stack: ExitStack) -> None:
    accept = Tallies.accept

    def always(tallies: Tallies, batch: Any, *, connected: bool, now: float) -> bool:
        if not accept(tallies, batch, connected=connected, now=now):
            tallies.requests = tallies.requests.plus(batch.requests)
        return True

    stack.enter_context(patch.object(Tallies, "accept", always))


def without(guard: Any) -> Callable[[ExitStack], None]:
    """Role control that does not ask this one."""
    return swap(roles, "GUARDS", tuple(g for g in roles.GUARDS if g is not guard))


def old_one_last(stack: ExitStack) -> None:
    """Control sends the placement before after the new one."""
    publish = Publisher.publish

    def backwards(publisher: Publisher, placement: Placement) -> None:
        before = publisher.placement
        publish(publisher, placement)
        if before is not None:
            publisher.placement = before
            for subscriber in publisher.proxies.values():
                publisher.snapshot(subscriber)
            publisher.placement = placement

    stack.enter_context(patch.object(Publisher, "publish", backwards))


def lost_is_gone(stack: ExitStack) -> None:
    """A drain that does not wait for a proxy which has lost its connection, and places legs all the same."""
    waits = Drains._proxy_waits

    def of_the_connected(engine: str, proxy: Any, out: Any, now: float) -> Iterator[str]:
        return waits(engine, proxy, out, now) if proxy.connected else iter(())

    stack.enter_context(patch.object(Drains, "_proxy_waits", staticmethod(of_the_connected)))


def itself_first(probe: InferenceProbe, _leg: Any, peers: Any) -> list[str]:
    """A suspect among its own peers."""
    return [probe.suspect, *peers]


def saving(change: Callable[[SavedFleet], SavedFleet]) -> Callable[[ExitStack], None]:
    """A state handoff that is written otherwise."""

    def plant(stack: ExitStack) -> None:
        save = Fleet.save
        stack.enter_context(patch.object(Fleet, "save", lambda fleet, *, now: change(save(fleet, now=now))))

    return plant


def unsaid_ejections(state: SavedFleet) -> SavedFleet:
    """Without its ejections."""
    return replace(state, engines={name: without_ejection(saved) for name, saved in state.engines.items()})


def resuming(change: Callable[[SavedFleet], SavedFleet]) -> Callable[[ExitStack], None]:
    """A core that takes up something else than was saved."""

    def plant(stack: ExitStack) -> None:
        load = Fleet._load
        stack.enter_context(patch.object(Fleet, "_load", lambda fleet, saved, now: load(fleet, change(saved), now)))

    return plant


def retries_uncounted(stack: ExitStack) -> None:
    """Requests by how they ended, and no word of what that took."""
    accept = Tallies.accept

    def fewer(tallies: Tallies, batch: Any, *, connected: bool, now: float) -> bool:
        return accept(
            tallies, replace(batch, requests=replace(batch.requests, retried=0)), connected=connected, now=now
        )

    stack.enter_context(patch.object(Tallies, "accept", fewer))


def unfenced(self: term.Term) -> bool:
    """Does not look at the lease."""
    return not self.over


def proves_nothing(probe: InferenceProbe) -> Verdict:
    """A probe that may convict, and never acquits."""
    return Verdict.FAIL if Verdict.FAIL in {leg.verdict for leg in probe.legs} else Verdict.INCONCLUSIVE
