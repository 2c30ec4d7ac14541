"""Drains and maintenance: out by an operator's word, and ready to stop when nobody works there any more (spec R4–R6).

Decides: when an engine's drain has settled, what it waits for, when it is overdue. It cannot see: how an engine comes
back (`readmission`), or what goes over the wire. Pure.

A drain settles when all of this is so; each has its words in `waits_for`:

| what | why |
|---|---|
| a placement without the engine is published | |
| its process identity has been read, or is not to be had | read later it could be that of the process after it |
| every proxy that counts has acknowledged that placement, or a later one | until then it may start legs there |
| no proxy has a leg on it | |
| no proxy has a KV handoff of it that nobody has read | the decode leg would find nobody to read from |

Maintenance of the whole fleet closes admission first, so that requests under way find engines for their decode legs; it
takes the engines out once every proxy knows and nothing has run for `QUIET_S`, or at the deadline.
"""

from collections.abc import Iterable, Iterator, Mapping

from narwhal.control.core import telling
from narwhal.control.core.decisions import Decision, Settled
from narwhal.control.core.effects import CaptureIdentity
from narwhal.control.core.engine import Drain, Engine
from narwhal.control.core.events import CommandRefusedError, DrainCommand, IdentityCaptured, Published, Refusal
from narwhal.control.core.proxies import Proxies, Proxy
from narwhal.control.core.settings import CoreSettings
from narwhal.vocabulary import Hold

# Proxies say what runs with every heartbeat, once a second; between two legs of one request nothing does.
QUIET_S = 2.0
ANSWER_MARGIN_S = 10.0  # for each of two requests, beyond the shell's own time-outs
CAPTURE_REQUESTS = 2


class Drains:
    """The drains of all engines; each is kept in its engine's record."""

    def __init__(self, settings: CoreSettings, engines: Mapping[str, Engine], proxies: Proxies) -> None:
        self._settings = settings
        self._engines = engines
        self._proxies = proxies
        self._published: Published | None = None
        self._closed: tuple[int, int] | None = None  # the first placement published that admits nothing
        self._quiet_since: float | None = None  # while maintenance closes: since when nothing has run

    def configure(self, settings: CoreSettings) -> None:
        """The fleet file changed."""
        self._settings = settings

    def restore(self, *, now: float) -> None:
        """Drains of a saved handoff go on where they were."""
        for engine, drain in self._drained():
            if engine.shut and not drain.captured:
                drain.capture_due = now

    # --- begin --------------------------------------------------------------------------------------------------------

    def begin(self, command: DrainCommand, *, now: float) -> list[Decision]:
        """Take engines out. Raises `CommandRefusedError`, and then nothing was changed."""
        chosen = [self._engines[name] for name in dict.fromkeys(command.engines)]
        whole = len(chosen) == len(self._engines)
        # Maintenance takes in what was drained by itself before.
        before = [e.id for e in chosen if e.drain is not None and (e.drain.whole or not whole)]
        if before:
            named = ", ".join(before)
            raise CommandRefusedError(Refusal.PRECONDITION, f"already drained: {named}")
        decisions: list[Decision] = []
        for engine in chosen:
            decisions += self._begin_one(engine, command, whole=whole, now=now)
        self._quiet_since = None
        self._closed = self._published_closed()
        return decisions + self.progress(now=now)

    def _begin_one(self, engine: Engine, command: DrainCommand, *, whole: bool, now: float) -> list[Decision]:
        drain = engine.drain
        if drain is not None:  # of this engine alone until now
            drain.whole = True
            engine.lift(Hold.DRAIN)
            engine.place(Hold.MAINTENANCE, drain.reason, now=now)
            return []
        drain = Drain(
            reason=command.reason or "no reason given",
            url=engine.spec.url,
            since=now,
            due=now + command.deadline_s,
            wall=command.wall,
            restart=command.restart,
            whole=whole,
        )
        engine.drain = drain
        engine.decide()
        decisions: list[Decision] = [telling.drain_begun(engine.id, drain, command.deadline_s)]
        if not whole:
            self._take_out(engine, drain, now=now)
        return decisions

    def _take_out(self, engine: Engine, drain: Drain, *, now: float) -> None:
        """Out of placement first; then, when that has gone out, its identity is read (spec R4)."""
        engine.place(Hold.MAINTENANCE if drain.whole else Hold.DRAIN, drain.reason, now=now)
        if not drain.captured:
            drain.capture_due = now

    def follow_suit(self, engine: Engine, *, now: float) -> list[Decision]:
        """An engine has been added to a fleet in maintenance: it is out like the others, and returns like them."""
        like = next((d for e, d in self._drained() if e is not engine and d.whole), None)
        if like is None or engine.drain is not None:
            return []
        engine.drain = Drain(
            reason=like.reason,
            url=engine.spec.url,
            since=now,
            due=like.due,
            wall=like.wall,
            restart=False,
            whole=True,
            captured=True,
        )
        engine.place(Hold.MAINTENANCE, like.reason, now=now)
        return [telling.drain_changed(engine.id, "the fleet is in maintenance, so it is out too")]

    def split(self, *, now: float) -> list[Decision]:
        """An engine has returned: what was maintenance of the whole fleet are drains of those that stay (spec R6)."""
        decisions: list[Decision] = []
        if all(e.drain is not None and e.drain.whole for e in self._engines.values()):
            return decisions
        for engine, drain in self._drained():
            if drain.whole:
                drain.whole = False
                if engine.shut:
                    engine.lift(Hold.MAINTENANCE)
                    engine.place(Hold.DRAIN, drain.reason, now=now)
                else:  # maintenance had yet to take it out
                    self._take_out(engine, drain, now=now)
                decisions.append(telling.drain_changed(engine.id, "stays drained, the fleet's maintenance is over"))
        return decisions

    def out_now(self, engine: Engine, *, now: float) -> None:
        """It is to come back before maintenance has taken it out: take it out, so that it comes in by the gate."""
        if engine.drain is not None and not engine.shut:
            self._take_out(engine, engine.drain, now=now)

    # --- go on --------------------------------------------------------------------------------------------------------

    def published(self, event: Published, *, now: float) -> list[Decision]:
        """A placement has gone out."""
        self._published = event
        self._closed = (self._closed or self._published_closed()) if event.closed else None
        for engine, drain in self._drained():
            if engine.shut and drain.out is None and engine.id not in event.serving:
                drain.out = (event.epoch, event.version)
        return self.progress(now=now)

    def _published_closed(self) -> tuple[int, int] | None:
        known = self._published
        return (known.epoch, known.version) if known is not None and known.closed else None

    def tick(self, *, now: float) -> list[Decision]:
        """Look at the clock: deadlines, questions without an answer."""
        for _, drain in self._drained():
            if drain.answer_due is not None and now >= drain.answer_due:
                drain.answer_due, drain.capture_due = None, now
        decisions = self.progress(now=now)
        for engine, drain in self._drained():
            if now >= drain.due and not drain.settled and not drain.overdue:
                drain.overdue = True
                engine.decide()
                decisions.append(telling.drain_overdue(engine.id, self.waits_for(engine, now=now)))
        return decisions

    def progress(self, *, now: float) -> list[Decision]:
        """Something has happened that a drain may have waited for."""
        decisions = self._close(now=now)
        for engine, drain in self._drained():
            if drain.capture_due is not None and drain.out is not None and now >= drain.capture_due:
                decisions.append(self._capture(engine, drain, now=now))
            if not drain.settled and next(self._waits(engine, drain, now), None) is None:
                drain.settled = True
                engine.decide()
                decisions += [telling.drain_settled(engine.id), Settled(engine=engine.id)]
        return decisions

    def _close(self, *, now: float) -> list[Decision]:
        """Maintenance takes the engines out once nothing runs any more."""
        closing = [(e, d) for e, d in self._drained() if d.whole and not e.shut]
        if not closing:
            self._quiet_since = None
            return []
        if any(self._busy(p) for p in self._proxies.known()) or self._closed is None:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        quiet = self._quiet_since is not None and (now >= self._quiet_since + QUIET_S or not self._proxies.known())
        if not quiet and now < max(d.due for _, d in closing):
            return []
        self._quiet_since = None
        decisions: list[Decision] = []
        for engine, drain in closing:
            self._take_out(engine, drain, now=now)
            decisions.append(telling.hold_placed(engine, Hold.MAINTENANCE))
        return decisions

    def _busy(self, proxy: Proxy) -> bool:
        """Whether it may admit requests, or has some under way."""
        return self._closed is None or proxy.acked < self._closed or bool(proxy.resident) or bool(proxy.unread)

    def next_due(self) -> float | None:
        """When something has to be done without waiting for a pass."""
        dues = [d.capture_due for _, d in self._drained() if d.capture_due is not None and d.out is not None]
        if self._quiet_since is not None:
            dues.append(self._quiet_since + QUIET_S)
        return min(dues, default=None)

    # --- the process that is drained ----------------------------------------------------------------------------------

    def _capture(self, engine: Engine, drain: Drain, *, now: float) -> CaptureIdentity:
        timeout = self._settings.health_timeout_s
        drain.capture_due, drain.number = None, engine.next_number()
        drain.answer_due = now + CAPTURE_REQUESTS * (timeout + ANSWER_MARGIN_S)
        return CaptureIdentity(
            engine=engine.id,
            url=engine.spec.url,
            incarnation=engine.incarnation,
            number=drain.number,
            timeout_s=timeout,
        )

    def expects(self, event: IdentityCaptured) -> bool:
        """Whether this is the answer that a drain waits for."""
        engine = self._engines.get(event.engine)
        drain = engine.drain if engine is not None else None
        return drain is not None and drain.answer_due is not None and drain.number == event.number

    def captured(self, engine: Engine, event: IdentityCaptured, *, now: float) -> list[Decision]:
        """The engine said who it is, or did not. Only for an answer that `expects` accepts."""
        drain = engine.drain
        if drain is None:
            return []
        drain.answer_due = None
        if event.local:
            drain.capture_due = now + self._settings.monitor_interval_s
            return []
        drain.captured, drain.identity = True, event.identity
        engine.decide()
        return [telling.identity_captured(engine.id, drain), *self.progress(now=now)]

    # --- what it waits for --------------------------------------------------------------------------------------------

    def waits_for(self, engine: Engine, *, now: float) -> tuple[str, ...]:
        """Why the engine is not ready to stop, in words; nothing when it is, or is not drained."""
        drain = engine.drain
        return () if drain is None or drain.settled else tuple(self._waits(engine, drain, now))

    def _waits(self, engine: Engine, drain: Drain, now: float) -> Iterator[str]:
        if not engine.shut:
            yield "the fleet to come to rest, admission closed"
            yield from self._closing_waits(now)
            return
        if drain.out is None:
            yield "a placement without it to be published"
            return
        for proxy in self._proxies.known():
            yield from self._proxy_waits(engine.id, proxy, drain.out, now)
        if not drain.captured:
            yield "its process identity to be read"

    def _closing_waits(self, now: float) -> Iterator[str]:
        for proxy in self._proxies.known():
            if self._closed is None or proxy.acked < self._closed:
                yield f"proxy {proxy.key.id}/{proxy.key.slot} to acknowledge that{_lost(proxy, now)}"
            elif legs := sum(proxy.resident.values()):
                yield f"{_some(legs, 'leg')} of proxy {proxy.key.id}/{proxy.key.slot}{_lost(proxy, now)}"

    @staticmethod
    def _proxy_waits(engine: str, proxy: Proxy, out: tuple[int, int], now: float) -> Iterator[str]:
        name = f"proxy {proxy.key.id}/{proxy.key.slot}{_lost(proxy, now)}"
        legs, unread = proxy.resident.get(engine, 0), proxy.unread.get(engine, 0)
        if proxy.acked < out:
            has = f"{proxy.acked[0]}.{proxy.acked[1]}" if proxy.acked[1] else "none"
            yield f"{name} to acknowledge placement {out[0]}.{out[1]} or a later one, it has {has}"
        if legs:
            yield f"{_some(legs, 'leg')} of {name}"
        if unread:
            yield f"{_some(unread, 'KV handoff')} of {name} to be read"

    def _drained(self) -> Iterable[tuple[Engine, Drain]]:
        return [(e, e.drain) for e in self._engines.values() if e.drain is not None]


def _lost(proxy: Proxy, now: float) -> str:
    """A proxy that is lost counts for its bound, or until an operator says otherwise (spec R4)."""
    if proxy.connected:
        return ""
    bound = "for ever" if proxy.counts_until is None else f"for {max(0.0, proxy.counts_until - now):.0f} s more"
    return f" (lost, counts {bound} or until it is forgotten)"


def _some(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
