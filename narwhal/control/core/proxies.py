"""The proxies that hold placement: who is connected, what each applies, who lags, who is gone (spec P6, R4).

Decides: which process stands for a (proxy, slot), and how long a lost one counts. It cannot see: streams, or what is
published. Pure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from narwhal.control.core.events import (
    CommandRefusedError,
    ForgetCommand,
    ProxyAcked,
    ProxyConnected,
    ProxyLeft,
    ProxyLost,
    ProxyNacked,
    Refusal,
)
from narwhal.control.core.records import EventKind, Record
from narwhal.control.core.view import ProxyView
from narwhal.reports import ProxyKey


@dataclass(kw_only=True, slots=True)
class Proxy:
    """One proxy process that may be placing legs."""

    key: ProxyKey
    heard_at: float
    address: str = ""
    pid: int = 0
    stream: int = 0
    connected: bool = True
    counts_until: float | None = None  # when a lost one has stopped placing for certain; None: connected, or never
    acked: tuple[int, int] = (0, 0)
    refused: tuple[int, int] | None = None
    refused_reason: str = ""
    resident: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[str, int] = field(default_factory=dict)  # its KV handoffs of each engine that nobody has read


def lag(acked: tuple[int, int], published: tuple[int, int]) -> int:
    """Versions that a proxy is behind the published (epoch, version); all of them when it holds another epoch's."""
    if acked[0] != published[0]:
        return published[1]
    return max(0, published[1] - acked[1])


class Proxies:
    """The roster: one process for each (proxy, slot). A method that tells something returns what it tells."""

    def __init__(self, *, max_age_s: float) -> None:
        self._max_age_s = max_age_s  # how long a proxy without control goes on placing, 0 = for ever (spec P7)
        self._slots: dict[tuple[str, int], Proxy] = {}
        self.changed = 0  # rises when the set of processes, or who of them is connected, does

    def configure(self, *, max_age_s: float) -> None:
        """The fleet file changed. Proxies that are lost already count as long as was said when they were."""
        self._max_age_s = max_age_s

    def find(self, key: ProxyKey) -> Proxy | None:
        """The proxy of exactly this boot."""
        proxy = self._slots.get((key.id, key.slot))
        return proxy if proxy is not None and proxy.key == key else None

    def known(self) -> tuple[Proxy, ...]:
        """Everybody who may be placing legs, by id and slot."""
        return tuple(self._slots[slot] for slot in sorted(self._slots))

    def restore(self, key: ProxyKey, *, counts_for_s: float | None, now: float) -> None:
        """A proxy that the control process before knew: lost until it says hello (spec S7)."""
        due = None if counts_for_s is None else now + counts_for_s
        self._slots[key.id, key.slot] = Proxy(key=key, heard_at=now, connected=False, counts_until=due)

    def connected(self, event: ProxyConnected, *, now: float) -> tuple[list[Record], ProxyKey | None]:
        """A hello. Returns also the process that it retires: an older boot of its slot, itself when it is the older."""
        slot = (event.proxy.id, event.proxy.slot)
        before = self._slots.get(slot)
        if before is not None and before.key.boot > event.proxy.boot:
            message = f"proxy {event.proxy} connected from a process older than the one known, and does not count"
            if not before.connected:
                message += "; if it is the newer one, the clock there went back: it counts after "
                message += f"`narwhalctl proxies forget {event.proxy.id}/{event.proxy.slot}`"
            return [Record(kind=EventKind.PROXY_RETIRED, message=message, proxy=str(event.proxy))], event.proxy
        records = []
        retired = before.key if before is not None and before.key != event.proxy else None
        if retired is not None:
            message = f"proxy {retired} was restarted; its process before counts no longer"
            records.append(Record(kind=EventKind.PROXY_RETIRED, message=message, proxy=str(retired)))
        proxy = Proxy(key=event.proxy, heard_at=now, address=event.address, pid=event.pid, stream=event.stream)
        if before is not None and retired is None:
            # The same process on a new stream: what it applies and carries is true until it says otherwise.
            proxy.acked, proxy.resident, proxy.unread = before.acked, before.resident, before.unread
        self._slots[slot] = proxy
        self.changed += 1
        message = f"proxy {event.proxy} connected from {event.address} (pid {event.pid})"
        records.append(Record(kind=EventKind.PROXY_CONNECTED, message=message, proxy=str(event.proxy)))
        return records, retired

    def acked(self, event: ProxyAcked, *, now: float) -> None:
        """It applies this placement. Said of a process that is not known (any more), it changes nothing."""
        proxy = self.find(event.proxy)
        if proxy is None:
            return
        proxy.heard_at = now
        proxy.acked = max(proxy.acked, (event.epoch, event.version))
        proxy.resident, proxy.unread = dict(event.resident), dict(event.unread)
        if proxy.refused is not None and proxy.acked >= proxy.refused:
            proxy.refused, proxy.refused_reason = None, ""

    def nacked(self, event: ProxyNacked, *, now: float) -> list[Record]:
        """It refused this placement and keeps the one it has."""
        proxy = self.find(event.proxy)
        if proxy is None:
            return []
        proxy.heard_at = now
        proxy.refused, proxy.refused_reason = (event.epoch, event.version), event.reason
        message = f"proxy {event.proxy} refused placement {event.epoch}.{event.version}: {event.reason}"
        return [Record(kind=EventKind.PLACEMENT_REFUSED, message=message, proxy=str(event.proxy))]

    def lost(self, event: ProxyLost, *, now: float) -> list[Record]:
        """Its stream is gone, but it serves on with the placement it has until that is too old."""
        proxy = self.find(event.proxy)
        if proxy is None or not proxy.connected or event.stream < proxy.stream:
            return []
        proxy.connected = False
        proxy.counts_until = now + self._max_age_s if self._max_age_s else None
        self.changed += 1
        message = f"proxy {event.proxy} lost: {event.reason}"
        return [Record(kind=EventKind.PROXY_LOST, message=message, proxy=str(event.proxy))]

    def left(self, event: ProxyLeft) -> list[Record]:
        """It said goodbye: it places nothing any more."""
        if self.find(event.proxy) is None:
            return []
        del self._slots[event.proxy.id, event.proxy.slot]
        self.changed += 1
        message = f"proxy {event.proxy} left: {event.reason}"
        return [Record(kind=EventKind.PROXY_LEFT, message=message, proxy=str(event.proxy))]

    def forget(self, command: ForgetCommand) -> list[Record]:
        """An operator says that it is gone (spec R4). Raises `CommandRefusedError`."""
        named = command.id if command.slot is None else f"{command.id}/{command.slot}"
        found = [p for p in self.known() if p.key.id == command.id and command.slot in (None, p.key.slot)]
        if not found:
            raise CommandRefusedError(Refusal.NOT_FOUND, f"no proxy {named} is known")
        if alive := [p for p in found if p.connected]:
            names = ", ".join(f"{p.key.id}/{p.key.slot}" for p in alive)
            words = f"proxy {names} is connected: stop it, then it says goodbye by itself"
            raise CommandRefusedError(Refusal.PRECONDITION, words)
        records = []
        for proxy in found:
            del self._slots[proxy.key.id, proxy.key.slot]
            self.changed += 1
            message = f"proxy {proxy.key} is forgotten (an operator says that it is gone)"
            records.append(Record(kind=EventKind.PROXY_FORGOTTEN, message=message, proxy=str(proxy.key)))
        return records

    def drop_old(self, *, now: float) -> None:
        """Forget the lost ones that have stopped placing for certain."""
        old = [s for s, p in self._slots.items() if p.counts_until is not None and now >= p.counts_until]
        for slot in old:
            del self._slots[slot]
        self.changed += bool(old)

    def resident(self) -> Mapping[str, int]:
        """Legs in flight per engine over all proxies, by their last word."""
        legs: dict[str, int] = {}
        for proxy in self._slots.values():
            for engine, count in proxy.resident.items():
                legs[engine] = legs.get(engine, 0) + count
        return legs

    def view(self, *, suspect: Callable[[ProxyKey], str], now: float) -> tuple[ProxyView, ...]:
        """What to show. `suspect` says why a proxy is thought to be the fault itself, or nothing."""
        return tuple(
            ProxyView(
                key=p.key,
                address=p.address,
                pid=p.pid,
                connected=p.connected,
                acked=p.acked,
                refused=p.refused,
                refused_reason=p.refused_reason,
                silent_s=now - p.heard_at,
                resident=p.resident,
                unread=p.unread,
                suspect=suspect(p.key),
            )
            for p in self.known()
        )
