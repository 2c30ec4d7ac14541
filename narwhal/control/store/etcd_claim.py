"""Who leads, as etcd's keys say it: taking the lease, moving it to a higher epoch, and losing it. In one thread.

Everything here is one try. An answer that was lost is found out by the next one, which begins with reading.
"""

import contextlib
import json
from dataclasses import dataclass, replace
from operator import methodcaller

from narwhal.clock import Clock
from narwhal.control.store.base import Lease, LeaseLost, NotYet, Owner, StoreError, read_owner
from narwhal.control.store.etcd_client import (
    Connection,
    Entry,
    EtcdSettings,
    Keys,
    NotThere,
    State,
    Unanswered,
    created,
    delete,
    modified,
    put,
    read_state,
    transact,
    valued,
)
from narwhal.control.store.etcd_lease import LeaseKeeper


class Changed(Unanswered):
    """The keys are not what they were when they were read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The value of the keys `lease` and `epoch`."""

    owner: Owner
    token: str  # of one acquisition: in a wiped store revisions begin anew, and might match by chance
    released: bool = False  # the holder has let go, and acts no more

    @property
    def value(self) -> bytes:
        """As it is stored."""
        owner = self.owner
        words = {"epoch": owner.epoch, "holder": owner.holder, "address": owner.address, "token": self.token}
        return json.dumps({**words, "released": True} if self.released else words).encode()


def read_claim(entry: Entry, key: bytes) -> Claim:
    """What is stored. Raises StoreError: without the last epoch a new one could go back."""
    try:
        owner, value = read_owner(entry.value)
        token = value.get("token")
        if not isinstance(token, str):
            raise ValueError("has no token")
        return Claim(owner=owner, token=token, released=value.get("released") is True)
    except ValueError:
        raise StoreError(
            f"etcd's key {key.decode()} is not readable as a lease; restore it, or delete it to start from epoch 1"
        ) from None


@dataclass(kw_only=True, slots=True)
class Held:
    """A lease of ours."""

    lease: Lease
    claim: Claim
    etcd_id: int
    created: int  # revision at which the lease key came to be
    since: int  # revision of its value
    handoff_at: int  # revision of the handoff, which the next write replaces; 0: there is none
    keeper: LeaseKeeper


@dataclass(kw_only=True, slots=True)
class Bid:
    """One wish to lead, over all its tries."""

    holder: str
    address: str
    above: int
    token: str
    etcd_id: int = 0  # 0: no lease was granted yet
    ttl_s: int = 0
    sent_at: float = 0.0  # when the grant was asked for, seconds of CLOCK_BOOTTIME

    def claim(self, last: int, token: str) -> Claim:
        """What to write when the last epoch was `last`."""
        epoch = max(last, self.above) + 1
        return Claim(owner=Owner(holder=self.holder, address=self.address, epoch=epoch), token=token)


class Claims:
    """This process's claims to one fleet's lease."""

    def __init__(
        self,
        settings: EtcdSettings,
        keys: Keys,
        clock: Clock,
        connection: Connection,
        *,
        patience_s: float | None = None,
    ) -> None:
        """`patience_s`: how long a lease may still be believed in of which etcd knows nothing when this process first
        looks; a TTL unless told otherwise."""
        self._settings = settings
        self._patience_s = settings.ttl_s if patience_s is None else patience_s
        self._first_look_at: float | None = None  # seconds of CLOCK_BOOTTIME
        self._doubt = ""  # why a lease may be held of which etcd knows nothing, in words
        self._keys = keys
        self._clock = clock
        self._connection = connection
        self._left: set[int] = set()  # etcd leases that are of no use and not revoked yet
        self._highest: Claim | None = None  # ever seen here
        self._token = ""  # of our newest claim
        self._set_back_at: float | None = None  # when etcd was seen to have forgotten it, seconds of CLOCK_BOOTTIME
        self.held: Held | None = None

    def read(self) -> State:
        """The keys. Raises StoreError."""
        state = read_state(self._connection, self._keys)
        last, highest = self._last(state), self._highest
        if self._first_look_at is None:
            self._first_look_at = self._clock.boottime()
            if state.lease is None and not (last is not None and last.released):
                self._doubt = "does not know how the last lease ended" if last is not None else "knows no epoch"
        elif state.lease is not None:
            self._doubt = ""  # what etcd knows is what is so
        if highest is None or (last is not None and last.owner.epoch >= highest.owner.epoch):
            self._highest, self._set_back_at = last, None
        elif self._set_back_at is None:
            self._set_back_at = self._clock.boottime()
        return state

    def acquire(self, bid: Bid) -> Held | None:
        """Takes the lease, or moves on when it is held; None when it is somebody else's. Raises StoreError; to be
        called again after Unanswered."""
        held = self._acting()
        if held is None and not bid.etcd_id:
            self.revoke_left()  # it may be our own past that stands in the way
        state = self.read()
        there = read_claim(state.lease, self._keys.lease) if state.lease is not None else None
        if held is not None:
            if state.lease is not None and there is not None and there.token == held.claim.token:
                return self._moved(held, state, there, state.lease.modified, bid)
            self.lose(held, "the lease key is gone or another process's")
        if state.lease is None:
            self._wait_for_forgotten_leases()
            return self._take(state, bid)
        if there is not None and there.token == bid.token:
            return self._hold(there, state.lease.created, state, bid)
        return None

    def check(self, lease: Lease) -> Held:
        """What is held by this lease. Raises LeaseLost when it is over."""
        held = self.held
        if held is not None and held.lease is lease:
            if lease.may_act(self._clock.boottime()):
                return held
            self.lose(held, "the lease was not renewed in time")
        raise LeaseLost(f"epoch {lease.epoch} holds the lease no more: {lease.lost or 'released'}")

    def lose(self, held: Held, why: str) -> None:
        """The lease is over. What is left of it in etcd is revoked with the next occasion."""
        held.lease.lost = held.lease.lost or why
        held.keeper.stop()
        self._left.add(held.etcd_id)
        self.held = None

    def let_go(self, held: Held, why: str) -> None:
        """The holder acts no more: the lease is free at once, and whoever finds it free may know why."""
        self.lose(held, why)
        released = replace(held.claim, released=True)
        writes = [put(self._keys.epoch, released.value), delete(self._keys.lease)]
        # Without it the next holder may have to wait; the lease is revoked in any case.
        with contextlib.suppress(StoreError):
            transact(self._connection, self.guards(held), writes)

    def guards(self, held: Held) -> list[object]:
        """What must be so in etcd while the lease is ours."""
        # The value holds the epoch and the acquisition's token beside what the revision says.
        return [created(self._keys.lease, held.created), valued(self._keys.lease, held.claim.value)]

    def revoke_left(self) -> None:
        """Revokes what is of no use any more. Raises StoreError."""
        for etcd_id in tuple(self._left):
            with contextlib.suppress(NotThere):  # it ran out by itself
                self._connection.call(methodcaller("revoke_lease", etcd_id))
            self._left.discard(etcd_id)

    def _acting(self) -> Held | None:
        held = self.held
        if held is not None and not held.lease.may_act(self._clock.boottime()):
            self.lose(held, "the lease was not renewed in time")
        return self.held

    def _last(self, state: State) -> Claim | None:
        return read_claim(state.epoch, self._keys.epoch) if state.epoch is not None else None

    def _last_epoch(self, state: State) -> int:
        """The highest that is known, here or in etcd."""
        return max((claim.owner.epoch for claim in (self._last(state), self._highest) if claim is not None), default=0)

    def _wait_for_forgotten_leases(self) -> None:
        """Raises NotYet while one that etcd has forgotten may still be believed in by its holder.

        etcd was wiped, or restored to an older state: that nobody holds the lease there says nothing then. A process
        that has just started cannot tell whether it was, unless the last holder is known to have let go.
        """
        now, looked_at = self._clock.boottime(), self._first_look_at
        if self._doubt and looked_at is not None and now < looked_at + self._patience_s:
            raise NotYet(
                f"etcd {self._doubt}: it is new, or was wiped, or restored to an older state, or the holder died; "
                f"waiting {self._patience_s:g} s, until a lease that it may have forgotten is over"
            )
        highest, since = self._highest, self._set_back_at
        if highest is None or since is None or highest.token == self._token:
            return
        if now < since + self._settings.ttl_s:
            raise NotYet(
                f"etcd has forgotten epoch {highest.owner.epoch} (wiped, or restored to an older state): waiting until "
                f"leases that it has forgotten too are over"
            )

    def _take(self, state: State, bid: Bid) -> Held:
        if not bid.etcd_id:
            bid.sent_at = self._clock.boottime()
            granted = self._connection.call(lambda client: client.lease(self._settings.ttl_s))
            bid.etcd_id, bid.ttl_s = int(granted.id), int(granted.ttl)
            self._left.add(bid.etcd_id)  # until it is seen to be of use
        claim = bid.claim(self._last_epoch(state), bid.token)
        guards = [created(self._keys.lease, 0), modified(self._keys.epoch, _modified(state.epoch))]
        revision = self._put(claim, guards, bid.etcd_id)
        return self._hold(claim, revision, state, bid)

    def _put(self, claim: Claim, guards: list[object], etcd_id: int) -> int:
        writes = [put(self._keys.lease, claim.value, etcd_lease=etcd_id), put(self._keys.epoch, claim.value)]
        done = transact(self._connection, guards, writes)
        if not done.revision:
            raise Changed("somebody else wrote at the same time")
        return done.revision

    def _hold(self, claim: Claim, revision: int, state: State, bid: Bid) -> Held:
        """Begins to keep a lease. `state`: the handoff in it is the newest, for nobody else led since it was read."""
        # Counted from before the grant was asked for: etcd cannot have begun to count earlier.
        valid_until = bid.sent_at + min(bid.ttl_s, self._settings.ttl_s) - self._settings.safety_margin_s
        if self._clock.boottime() >= valid_until:
            raise StoreError("taking the lease took longer than it is valid")
        lease = Lease(owner=claim.owner, valid_until=valid_until)
        self._left.discard(bid.etcd_id)
        self._highest, self._token, self._set_back_at, self._doubt = claim, claim.token, None, ""
        keeper = LeaseKeeper(
            self._settings, self._clock, lease=lease, etcd_id=bid.etcd_id, first=self._connection.endpoint
        )
        self.held = Held(
            lease=lease,
            claim=claim,
            etcd_id=bid.etcd_id,
            created=revision,
            since=revision,
            handoff_at=_modified(state.handoff),
            keeper=keeper,
        )
        return self.held

    def _moved(self, held: Held, state: State, there: Claim, there_at: int, bid: Bid) -> Held:
        """The lease under a higher epoch, on the same etcd lease."""
        claim, since = there, there_at
        # A move whose answer was lost is there already.
        if there.owner.epoch == held.claim.owner.epoch or there.owner.epoch <= bid.above:
            claim = bid.claim(self._last_epoch(state), held.claim.token)
            guards = [modified(self._keys.lease, there_at), modified(self._keys.epoch, _modified(state.epoch))]
            since = self._put(claim, guards, held.etcd_id)
        lease = Lease(owner=claim.owner, valid_until=held.lease.valid_until)
        held.keeper.follow(lease)
        held.lease, held.claim, held.since = lease, claim, since
        self._highest, self._set_back_at = claim, None
        return held


def _modified(entry: Entry | None) -> int:
    return entry.modified if entry is not None else 0
