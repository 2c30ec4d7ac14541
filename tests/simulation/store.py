"""The model of a store: one document and one lease, reached over links that may be slow, cut or lossy.

A call that failed may still have done what it was asked. The lease expires by the store's own clock, or, with a
lifetime of 0, is freed with its holder's process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from narwhal.control.core.handoff import SavedFleet
from narwhal.reports import ProxyKey
from tests.simulation.world import Network, Node, World

CALL_S = 2.0  # after which a call that got no answer counts as failed
BOOT_MARGIN_S = 0.5  # spec: lease.safety_margin_s


@dataclass(frozen=True, kw_only=True)
class Document:
    """A state handoff. It is encoded only when somebody reads it."""

    state: SavedFleet
    written_at: float  # wall time of its writer
    taken_at: float  # the world's time
    epoch: int
    holder: str

    def cursors(self) -> dict[ProxyKey, int]:
        """The reports that it holds."""
        return {ProxyKey(id=c.id, slot=c.slot, boot=c.boot): c.sequence for c in self.state.cursors}


@dataclass(kw_only=True)
class Lease:
    """The right to act, as its holder knows it."""

    holder: str
    epoch: int
    valid_until: float  # on the holder's own clock
    lost: str = ""

    def may_act(self, now: float) -> bool:
        """Whether the holder may act at `now` of its own clock."""
        return not self.lost and now < self.valid_until


class Failed(Exception):
    """The store did not do what it was asked, or did not say so."""


class LeaseLost(Failed):
    """The lease is over."""


Done = Callable[[Any, Failed | None], None]


class Store(Node):
    """The store itself, a process that never dies but may be cut off or fail."""

    def __init__(self, world: World, network: Network, ttl_s: float) -> None:
        super().__init__(world, "store")
        self.network = network
        self.ttl_s = ttl_s
        self.failing = False
        self.slow_s = 0.0  # on the way there
        self.late: dict[str, float] = {}  # on the way back, of some processes
        self._held_up: dict[str, list[tuple[Any, ...]]] = {}  # what some processes ask, and the network keeps for now
        self.document: Document | None = None
        self.epoch = 0
        self.holder = ""
        self.expires_at = 0.0  # of the lease, 0: nobody holds it
        self.stored: Callable[[Document], None] = lambda _: None

    @property
    def held(self) -> bool:
        """Whether somebody holds the lease."""
        return bool(self.holder) and (not self.ttl_s or self.world.now < self.expires_at)

    def call(self, node: Node, act: Callable[[], Any], done: Done) -> None:
        """Have `act` done here; `done` is told its value, or that it failed. Later in either case."""
        answered = [False]

        def answer(value: Any, error: Failed | None) -> None:
            if not answered[0]:
                answered[0] = True
                done(value, error)

        node.after(CALL_S, answer, None, Failed("no answer"))
        if self.network.cut(node.name, self.name):
            return
        asked = (node, act, answer, node.life)
        if node.name in self._held_up:
            self._held_up[node.name].append(asked)
            return
        self.world.after(self.network.delay() + self.slow_s, self._act, *asked)

    def hold_up(self, name: str) -> None:
        """What this process asks from now on is on its way until `let_go`, however long ago it gave up waiting."""
        self._held_up.setdefault(name, [])

    def let_go(self, name: str) -> None:
        """All of that arrives now, in its order."""
        delay_s = self.network.delay()
        for asked in self._held_up.pop(name, ()):
            self.world.after(delay_s, self._act, *asked)

    def _act(self, node: Node, act: Callable[[], Any], answer: Done, life: int) -> None:
        rng = self.world.rng
        lossy = self.failing or self.network.cut(node.name, self.name)
        if lossy and rng.random() < 0.7:
            if self.failing:
                node.after(self.network.delay(), answer, None, Failed("the store is in trouble"))
            return
        value, error = None, None
        try:
            value = act()
        except Failed as failed:
            error = failed
        if life == node.life and not lossy:
            node.after(self.network.delay() + self.late.get(node.name, 0.0), answer, value, error)

    # --- what can be asked ----------------------------------------------------------------------------------------

    def acquire(self, holder: str, above: int) -> int | None:
        """The epoch of a lease taken anew, None when somebody else holds it."""
        if self.held and self.holder != holder:
            return None
        self.epoch = max(self.epoch, above) + 1
        self.holder = holder
        self.expires_at = self.world.now + self.ttl_s
        return self.epoch

    def renew(self, holder: str, epoch: int) -> None:
        """Keep the lease."""
        self._check(holder, epoch)
        self.expires_at = self.world.now + self.ttl_s

    def release(self, holder: str) -> None:
        """End the lease, if it is this holder's."""
        if self.holder == holder:
            self.holder = ""

    def save(self, lease: Lease, document: Document) -> None:
        """Replace the document."""
        self._check(lease.holder, lease.epoch)
        if self.document is not None and self.document.taken_at > document.taken_at:
            raise Failed("a newer document is stored")  # this one was given up as unanswered, and comes late
        self.document = document
        self.stored(document)

    def _check(self, holder: str, epoch: int) -> None:
        if not self.held or (self.holder, self.epoch) != (holder, epoch):
            raise LeaseLost(f"the lease of {holder} under epoch {epoch} is over")
