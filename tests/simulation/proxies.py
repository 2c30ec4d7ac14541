"""A proxy made of the pure proxy parts: placement held, attempts, admission, backlog.

The streams around them are kept up as the real shells do: reconnection, silence, acknowledgements, reports resent.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from narwhal.measures import Measure
from narwhal.placement import EngineEntry, Placement
from narwhal.proxy.admission import Admission, RetryBudget, Ticket, Waiting
from narwhal.proxy.attempt import Attempt, Fault, StartLeg
from narwhal.proxy.backlog import Backlog
from narwhal.proxy.held import Held
from narwhal.reports import ProxyKey, Run
from narwhal.vocabulary import Outcome, Phase, RequestResult
from tests.simulation.engines import Engine
from tests.simulation.engines import Shape as Timing
from tests.simulation.links import Link, Reporting
from tests.simulation.paces import Paces, demand
from tests.simulation.plan import Plan
from tests.simulation.requests import Leg, Request
from tests.simulation.world import Network, Node

if TYPE_CHECKING:
    from tests.simulation.control import Control
    from tests.simulation.invariants import Watch

Told = Counter[tuple[str, Outcome]]


class Proxy(Node):
    """One worker process."""

    machine: type[Attempt] = Attempt

    def __init__(self, name: str, *, network: Network, plan: Plan, fleet: dict[str, Engine], watch: "Watch") -> None:
        super().__init__(network.world, name)
        self.network = network
        self.plan = plan
        self.fleet = fleet
        self.watch = watch
        self.controls: list[Control] = []
        self.out_of_descriptors = False
        self.boots = 0
        self.told: Told = Counter()  # outcomes of this life, counted apart from the backlog
        self.ended: Counter[RequestResult] = Counter()
        self.retries = 0
        self.asked = 0
        self._fresh()

    def _fresh(self) -> None:
        """A new process."""
        self.boots += 1
        self.key = ProxyKey(id=self.name, slot=0, boot=self.boots)
        self.held = Held()
        self.backlog = Backlog(self.key)
        self.paces = Paces(self.now())
        self.admission = Admission()
        self.budget = RetryBudget(10.0)
        self.inflight: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()  # engine → its KV handoffs that no decode leg has read yet
        self.heard: dict[str, float] = {}  # engine → when it last gave anything
        self.running: dict[Request, None] = {}
        self.told, self.ended, self.retries = Counter(), Counter(), 0
        self._pairs: dict[tuple[str, str], tuple[int, int]] = {}
        self._waiting: dict[Ticket, Request] = {}
        self.reporting = Reporting(self)
        self.links: list[Link] = []
        self.lead: Link | None = None

    def boot(self) -> None:
        """The process starts: it looks for control at every address."""
        self.links = [Link(self, control) for control in self.controls]
        for link in self.links:
            link.connect()
        self.reporting.beat()

    def kill(self) -> None:
        """kill -9: its connections end, and what it had not sent is lost."""
        self.watch.proxy_killed(self)
        for request in self.running:
            if request.leg is not None:
                request.leg.close()
        for link in self.links:
            if link.stream is not None:
                link.stream.end_at_proxy("killed")
        self.reporting.disconnect()
        self.die()

    def restart(self) -> None:
        """The supervisor starts it again, and says goodbye for the one before only by its newer boot."""
        self.alive = True
        self._fresh()
        self.say(f"starts as boot {self.boots}")
        self.boot()

    # --- placement ------------------------------------------------------------------------------------------------

    def follow(self, link: Link) -> None:
        """This control process streams placement of an epoch that nobody has surpassed."""
        if self.lead is not link or link.followed_epoch != self.held.highest_epoch:
            self.lead = link
            link.followed_epoch = self.held.highest_epoch
            self.reporting.follow(link.control)

    def unfollow(self, link: Link) -> None:
        """It is gone."""
        if self.lead is link:
            self.lead = None
            self.reporting.disconnect()

    def applied(self, placement: Placement) -> None:
        """Another placement is in force."""
        self.watch.applied(self, placement)
        if placement.closed:
            for ticket in self.admission.close():
                self._turned_away(ticket)

    def not_ready(self) -> str:
        """Why nothing may be admitted."""
        return self.held.not_ready(now=self.now(), max_age_s=self.plan.core.placement_max_age_s)

    def choose(self, step: StartLeg) -> EngineEntry | Fault:
        """The engine of the next leg, or why there is none."""
        placement = self.held.placement
        if placement is None:
            return Fault.NO_ENGINES
        now, draw = self.now(), self.world.rng.random
        chosen = placement.choose(step.phase, now=now, load=self.inflight, draws=(draw(), draw()), avoid=step.avoid)
        if chosen is None and step.avoid:
            chosen = placement.choose(step.phase, now=now, load=self.inflight, draws=(draw(), draw()))
        if chosen is not None:
            return chosen
        return Fault.SATURATED if placement.candidates(step.phase, now=now) else Fault.NO_ENGINES

    # --- requests -------------------------------------------------------------------------------------------------

    def arrive(self, *, stream: bool, timing: Timing, idle_closed: bool, leaves_after_s: float | None) -> None:
        """A client asks."""
        self.asked += 1
        if self.not_ready():
            self.tell_request(RequestResult.REJECTED, 0)
            return
        number = f"{self.name}.{self.boots}-{self.asked}"
        request = Request(self, number, stream=stream, timing=timing, idle_closed=idle_closed)
        if self.admission.enter(self.plan.seats):
            self._seated(request)
        else:
            ticket = self.admission.queue(self.plan.queue, self.now() + 2.0)
            if ticket is None:
                self.tell_request(RequestResult.REJECTED, 0)
                return
            self._waiting[ticket] = request
            self.after(2.0, self._late)
        if leaves_after_s is not None:
            self.after(leaves_after_s, self._client_gone, request)

    def _client_gone(self, request: Request) -> None:
        ticket = next((t for t, r in self._waiting.items() if r is request), None)
        if ticket is not None:
            self.admission.forget(ticket)
            del self._waiting[ticket]
            self.tell_request(RequestResult.CANCELLED, 0)
        elif request in self.running:
            request.cancel()

    def _late(self) -> None:
        for ticket in self.admission.expire(self.now()):
            self._turned_away(ticket)

    def _turned_away(self, ticket: Ticket) -> None:
        if self._waiting.pop(ticket, None) is not None:
            self.tell_request(RequestResult.REJECTED, 0)

    def _seated(self, request: Request) -> None:
        self.running[request] = None
        request.done = self._done(request)
        request.begin()

    def _done(self, request: Request) -> Callable[[RequestResult], None]:
        def done(result: RequestResult) -> None:
            self.running.pop(request, None)
            if result is RequestResult.SERVED:
                self.budget.replenish(0.1, 10.0)
            for ticket in self.admission.leave(self.plan.seats):
                next_request = self._waiting.pop(ticket, None)
                if next_request is None or ticket.state is not Waiting.SEATED:
                    raise AssertionError("a ticket was seated that nobody holds")
                if self.not_ready():
                    self.after(0.0, self._seated, next_request)
                else:
                    self._seated(next_request)

        return done

    # --- legs -----------------------------------------------------------------------------------------------------

    def leg_begun(self, leg: Leg) -> None:
        """A leg starts."""
        self.watch.leg_begun(self, leg)
        self.inflight[leg.entry.id] += 1

    def leg_over(self, leg: Leg) -> None:
        """A leg is over."""
        self.inflight[leg.entry.id] -= 1
        if not self.inflight[leg.entry.id]:
            del self.inflight[leg.entry.id]

    def first_pull(self, producer: EngineEntry, consumer: EngineEntry) -> bool:
        """Whether the two have not been seen to exchange KV since either's incarnation began (spec V13)."""
        return self._pairs.get((producer.id, consumer.id)) != (producer.incarnation, consumer.incarnation)

    def saw_pull(self, producer: EngineEntry, consumer: EngineEntry) -> None:
        """A transfer between them has ended, well or not."""
        self._pairs[producer.id, consumer.id] = (producer.incarnation, consumer.incarnation)

    # --- what it tells --------------------------------------------------------------------------------------------

    def tell(self, entry: EngineEntry, phase: Phase, outcome: Outcome) -> None:
        """A leg ended well, or without being evidence."""
        self.told[entry.id, outcome] += 1
        self.backlog.merge(entry.id, phase, entry.incarnation, outcome)

    def measure(self, entry: EngineEntry, phase: Phase, measure: Measure, value: float | None) -> None:
        """A leg took so long, for what it asked."""
        if value is not None:
            self.paces.add(entry, phase, measure, value * demand(self.plan, phase, self.world.now))

    def tell_failure(self, run: Run) -> None:
        """A leg failed; sent at once."""
        self.told[run.engine, run.outcome] += 1
        self.backlog.failure(run)
        self.reporting.hurry()

    def tell_request(self, result: RequestResult, retries: int) -> None:
        """A client request ended."""
        self.ended[result] += 1
        self.retries += retries
        self.backlog.request(result, retries)
