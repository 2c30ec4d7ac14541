"""The placement client of one proxy worker: a stream to every control process listed, kept up for ever (spec P).

Whichever of them streams the highest epoch is followed; the others are standbys and stay connected, so that a takeover
needs no new connection. What a placement means is `held.py`'s to decide; this file moves messages.

Not guaranteed: that the placement held is the newest that exists. Guaranteed: it is one that control published, none
older replaces it, and every leg that starts after an acknowledgement was sent follows the placement it names.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NoReturn

import grpc
import structlog

from narwhal._pb import placement_pb2, placement_pb2_grpc
from narwhal.clock import Clock
from narwhal.config import FleetFileError, ProxySettings
from narwhal.placement import Placement
from narwhal.proxy.held import Held, Outdated, Refused
from narwhal.proxy.pace import RETRY_CAP_S, backoff_s
from narwhal.proxy.seams import Inflight
from narwhal.reports import ProxyKey
from narwhal.vocabulary import NotReady
from narwhal.wire import (
    WireError,
    apply_change,
    proxy_to_wire,
    residency_from_wire,
    residency_to_wire,
    snapshot_from_wire,
)

SILENCE_S = 5.0  # spec P10: a proxy that hears nothing for this long looks elsewhere

Dial = Callable[[str], grpc.aio.Channel]
_log = structlog.get_logger()


class _Ended(Exception):
    """The stream is over; the text says why, for the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Introduction:
    """What a worker says of itself."""

    proxy: ProxyKey
    fleet: str  # empty accepts any
    address: str  # where clients reach it
    pid: int


@dataclass(eq=False, slots=True)
class Lead:
    """The control process that is followed, for as long as it is. `lost` is set when that ends."""

    channel: grpc.aio.Channel
    address: str
    epoch: int
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class PlacementView:
    """The fleet as this worker knows it; the data path's `Feed`. Run `run()` as a task, end with `close()`."""

    def __init__(
        self,
        *,
        addresses: Sequence[str],
        dial: Dial,
        introduction: Introduction,
        inflight: Inflight,
        clock: Clock,
        rng: Random,
        settings: ProxySettings | None = None,
    ) -> None:
        self.introduction = introduction
        self.inflight = inflight
        self.clock = clock
        self.rng = rng
        self.dial = dial
        self.held = Held()
        self.lead: Lead | None = None
        self.load: Mapping[str, int] = {}
        self.placed = asyncio.Event()  # set once, when the first placement is applied
        self.configured = asyncio.Event()  # set once, when settings are known
        self._file_settings = settings
        self._control_settings: ProxySettings | None = None
        self._lead_changed = asyncio.Event()
        self._links = [_Link(self, address) for address in dict.fromkeys(addresses)]
        if settings is not None:
            self.configured.set()
        inflight.on_idle = self._engine_idle

    # --- what the data path reads -----------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement | None:
        """The newest placement, or None before the first."""
        return self.held.placement

    @property
    def settings(self) -> ProxySettings:
        """What control said last, else the fleet file. Raises RuntimeError before `configured` is set."""
        settings = self._control_settings or self._file_settings
        if settings is None:
            raise RuntimeError("no settings yet: wait for `configured`")
        return settings

    def not_ready(self) -> str:
        """Why nothing may be admitted now (spec M10); empty when admission is open and fresh."""
        if not self.configured.is_set():
            return NotReady.NO_PLACEMENT
        return self.held.not_ready(now=self.clock.monotonic(), max_age_s=self.settings.proxy.placement_max_age_s)

    def placement_age_s(self) -> float:
        """Seconds since the placement held was last known to be current; infinite without one."""
        return self.held.age(self.clock.monotonic())

    # --- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a stream to every address, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.run())

    async def close(self, reason: str) -> None:
        """Say goodbye on every stream and wait, at most as long as for any word of control, until it was heard."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.leave(reason))

    async def wait_lead(self) -> Lead:
        """The control process followed, as soon as there is one."""
        while self.lead is None:
            self._lead_changed.clear()
            await self._lead_changed.wait()
        return self.lead

    def set_file_settings(self, settings: ProxySettings) -> bool:
        """The fleet file was read anew. False when control's word stands above it."""
        self._file_settings = settings
        self.configured.set()
        return self._control_settings is None

    # --- what links tell --------------------------------------------------------------------------------------------

    def apply(self, message: placement_pb2.PlacementMessage) -> None:
        """Apply a snapshot or a change, or raise `Refused` or `WireError` and keep what is held."""
        now = self.clock.monotonic()
        before = self.held.placement
        if message.HasField("snapshot"):
            placement = snapshot_from_wire(message.snapshot, now=now)
        else:
            placement = apply_change(before, message.change, now=now)
        self.held.offer(placement, now=now)
        if before is None or before.closed != placement.closed:
            _log.info("placement", epoch=placement.epoch, version=placement.version, closed=placement.closed)
        self.placed.set()

    def follow(self, link: "_Link", epoch: int) -> None:
        """`link` streams placement of an epoch that nobody has surpassed."""
        lead = self.lead
        if lead is not None and lead is link.lead and lead.epoch == epoch:
            return
        if lead is not None:
            lead.lost.set()
        self.lead = link.lead = Lead(channel=link.channel, address=link.address, epoch=epoch)
        self._lead_changed.set()
        _log.info("following control", control=link.address, epoch=epoch)

    def unfollow(self, link: "_Link") -> None:
        """`link` is gone."""
        if link.lead is None:
            return
        link.lead.lost.set()
        if self.lead is link.lead:
            self.lead = None
            self.load = {}  # a picture that nobody renews would mislead for as long as control is away
            self._lead_changed.set()
        link.lead = None

    def adopt(self, settings: ProxySettings) -> None:
        """Settings of the control process that is followed."""
        if settings == self._control_settings:
            return
        if self._control_settings is not None:
            _log.info("settings changed")
        self._control_settings = settings
        self.configured.set()

    def _engine_idle(self, engine: str) -> None:
        """Drains wait for the last leg of an engine that is out of placement: control hears of it at once."""
        placement = self.held.placement
        entry = placement.engines.get(engine) if placement is not None else None
        if entry is not None and entry.phases:
            return
        for link in self._links:
            link.ask_ack()


_Call = grpc.aio.StreamStreamCall[placement_pb2.ProxyMessage, placement_pb2.PlacementMessage]


class _Link:
    """One control address: connect, introduce, read, answer, and again."""

    def __init__(self, view: PlacementView, address: str) -> None:
        self.view = view
        self.address = address
        self.lead: Lead | None = None
        self._channel: grpc.aio.Channel | None = None
        self._outbox: deque[placement_pb2.ProxyMessage] = deque()
        self._ack_due = False
        self._finish = False  # say what is in the outbox and nothing after it
        self._wake = asyncio.Event()
        self._heard = False
        self._leaving = False
        self._over = asyncio.Event()
        self._settings: ProxySettings | None = None
        self._acked_legs: dict[str, int] = {}
        self._said = ""

    @property
    def channel(self) -> grpc.aio.Channel:
        """The connection in use. Only while a stream runs."""
        if self._channel is None:
            raise RuntimeError("not connected")
        return self._channel

    @property
    def leads(self) -> bool:
        """Whether this is the control process that is followed."""
        return self.lead is not None and self.lead is self.view.lead

    async def run(self) -> None:
        """Connect for ever. The first retry comes at once; streams that end soon after one another wait longer."""
        clock = self.view.clock
        failures = 0
        while not self._leaving:
            began = clock.monotonic()
            reason = await self._connection()
            if self._leaving:
                return
            self._say(reason)
            lasted = self._heard and clock.monotonic() - began > RETRY_CAP_S
            failures = 1 if lasted else failures + 1
            await asyncio.sleep(backoff_s(failures, self.view.rng))

    async def leave(self, reason: str) -> None:
        """Say goodbye, and wait until control has ended the stream for it."""
        self._leaving = True
        if self._channel is None:
            return
        self._post(placement_pb2.ProxyMessage(goodbye=placement_pb2.Goodbye(reason=reason)))
        self._finish = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await self._over.wait()

    def ask_ack(self) -> None:
        """Acknowledge what is in force, with the residency of the moment it is sent."""
        self._ack_due = True
        self._wake.set()

    # --- one stream -------------------------------------------------------------------------------------------------

    async def _connection(self) -> str:
        """Connect once and serve the stream to its end. Returns why it ended."""
        self._outbox.clear()
        self._heard = self._ack_due = self._finish = False
        self._over = asyncio.Event()
        # A channel of its own for every try: gRPC's own reconnection waits longer than we may, and a connection to a
        # stopped process never fails by itself.
        self._channel = self.view.dial(self.address)
        call = placement_pb2_grpc.PlacementServiceStub(self._channel).StreamPlacement()
        writer = asyncio.create_task(self._write(call))
        try:
            await self._read(call)
        except TimeoutError:
            return f"nothing heard for {SILENCE_S:g} s"
        except _Ended as ended:
            await self._last_words(call, writer)
            return str(ended)
        except grpc.aio.AioRpcError as error:
            return _words(error.code(), error.details())
        finally:
            self.view.unfollow(self)
            writer.cancel()
            call.cancel()  # a call that is merely dropped leaves its handler behind on the server
            channel, self._channel = self._channel, None
            self._over.set()
            await channel.close()

    async def _read(self, call: _Call) -> NoReturn:
        while True:
            async with asyncio.timeout(SILENCE_S):
                message = await call.read()
                if not isinstance(message, placement_pb2.PlacementMessage):
                    raise _Ended(_words(await call.code(), await call.details()))
            if not self._heard:
                self._heard = True
                self._said = ""
            self._handle(message)

    async def _write(self, call: _Call) -> None:
        """Say hello, then what is due. A stream that ends under it ends the reader too, and that one tells why."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(self._hello())
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outbox:
                    await call.write(self._outbox.popleft())
                if self._finish:
                    await call.done_writing()
                    return
                if self._ack_due:
                    self._ack_due = False
                    await call.write(self._ack())

    async def _last_words(self, call: _Call, writer: "asyncio.Task[None]") -> None:
        """Let the refusal that ends this stream arrive: a cancelled call may take unread messages with it."""
        if not self._outbox:
            return
        self._finish = True
        self._wake.set()
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(RETRY_CAP_S):
                await writer
                while isinstance(await call.read(), placement_pb2.PlacementMessage):
                    pass

    # --- messages in ------------------------------------------------------------------------------------------------

    def _handle(self, message: placement_pb2.PlacementMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "heartbeat":
            if self.leads:
                order = (message.heartbeat.epoch, message.heartbeat.version)
                self.view.held.confirm(order, now=self.view.clock.monotonic())
            self.ask_ack()
        elif kind == "residency":
            if self.leads:
                self._picture(residency_from_wire(list(message.residency.resident)))
        elif kind in ("snapshot", "change"):
            self._placement(message)
        elif kind == "settings":
            self._take_settings(message.settings)
        elif kind == "farewell":
            raise _Ended(f"farewell: {message.farewell.reason}")
        # Anything else is of a newer control, which knows that older proxies ignore it.

    def _placement(self, message: placement_pb2.PlacementMessage) -> None:
        view = self.view
        named = message.snapshot if message.HasField("snapshot") else message.change
        try:
            view.held.meet(named.epoch)
            if named.epoch:
                view.follow(self, named.epoch)
            view.apply(message)
        except Outdated as refusal:
            self._nack(named.epoch, named.version, str(refusal))
            # The next hello says the highest epoch seen, so that an active below it can acquire anew.
            raise _Ended(f"refused: {refusal}") from refusal
        except (Refused, WireError) as refusal:
            self._nack(named.epoch, named.version, str(refusal))
            return
        if self._settings is not None:
            view.adopt(self._settings)
        self.ask_ack()

    def _take_settings(self, message: placement_pb2.Settings) -> None:
        fleet = self.view.introduction.fleet
        if fleet and message.fleet != fleet:
            raise _Ended(f"serves fleet {message.fleet}, this proxy is of {fleet}")
        try:
            self._settings = ProxySettings.from_json(message.json)
        except FleetFileError as error:
            _log.error("settings of control are not usable", control=self.address, reason=str(error))
            return
        # Settings come before the placement they belong to. A standby's wait until it leads, unless there are none.
        if self.leads or not self.view.configured.is_set():
            self.view.adopt(self._settings)

    def _picture(self, everywhere: Mapping[str, int]) -> None:
        """Legs on other proxies: the fleet's picture without what this worker itself said last."""
        own = self._acked_legs
        self.view.load = {e: n - own.get(e, 0) for e, n in everywhere.items() if n > own.get(e, 0)}

    # --- messages out -----------------------------------------------------------------------------------------------

    def _post(self, message: placement_pb2.ProxyMessage) -> None:
        self._outbox.append(message)
        self._wake.set()

    def _hello(self) -> placement_pb2.ProxyMessage:
        me = self.view.introduction
        return placement_pb2.ProxyMessage(
            hello=placement_pb2.Hello(
                proxy=proxy_to_wire(me.proxy),
                fleet=me.fleet,
                highest_epoch=self.view.held.highest_epoch,
                address=me.address,
                pid=me.pid,
            )
        )

    def _ack(self) -> placement_pb2.ProxyMessage:
        epoch, version = self.view.held.order
        self._acked_legs = dict(self.view.inflight.legs)
        return placement_pb2.ProxyMessage(
            ack=placement_pb2.Ack(epoch=epoch, version=version, resident=residency_to_wire(self._acked_legs))
        )

    def _nack(self, epoch: int, version: int, reason: str) -> None:
        _log.warning("placement refused", control=self.address, epoch=epoch, version=version, reason=reason)
        self._post(placement_pb2.ProxyMessage(nack=placement_pb2.Nack(epoch=epoch, version=version, reason=reason)))

    def _say(self, reason: str) -> None:
        """One line for each new reason, not for each try."""
        if reason != self._said:
            self._said = reason
            _log.warning("control stream lost", control=self.address, reason=reason)


def _words(code: grpc.StatusCode, details: str | None) -> str:
    word = code.name.lower().replace("_", " ")
    return f"{word}: {details}" if details else word
