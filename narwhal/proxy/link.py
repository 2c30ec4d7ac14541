"""One stream to one control process: connect, introduce, read, answer, and again, for ever (spec P5, P6, P10).

Moves messages between the wire and the placement view; decides nothing about placements.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NoReturn, Protocol

import grpc
import structlog

from narwhal._pb import placement_pb2, placement_pb2_grpc
from narwhal.clock import Clock
from narwhal.config import FleetFileError, ProxySettings
from narwhal.placement import Placement
from narwhal.proxy.held import Held, Outdated, Refused
from narwhal.proxy.pace import RETRY_CAP_S, backoff_s
from narwhal.proxy.seams import Inflight, Picture
from narwhal.reports import ProxyKey
from narwhal.wire import (
    WireError,
    apply_change,
    proxy_to_wire,
    residency_from_wire,
    residency_to_wire,
    snapshot_from_wire,
    tokens_from_wire,
)

SILENCE_S = 5.0  # spec P10: a proxy that hears nothing for this long looks elsewhere

Dial = Callable[[str], grpc.aio.Channel]
_Call = grpc.aio.StreamStreamCall[placement_pb2.ProxyMessage, placement_pb2.PlacementMessage]
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


class Owner(Protocol):
    """What a link needs of the placement view."""

    introduction: Introduction
    inflight: Inflight
    held: Held
    lead: Lead | None
    picture: Picture
    configured: asyncio.Event
    dial: Dial
    clock: Clock
    rng: Random

    def apply(self, placement: Placement) -> None:
        """Hold it, or raise `Refused`."""

    def follow(self, link: "Link", epoch: int) -> None:
        """The link streams placement of an epoch that nobody has surpassed."""

    def unfollow(self, link: "Link") -> None:
        """The link is gone."""

    def adopt(self, settings: ProxySettings) -> None:
        """Work by these from now on."""


class Link:
    """One control address: connect, introduce, read, answer, and again."""

    def __init__(self, view: Owner, address: str) -> None:
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
        self._acked_tokens: dict[str, int] = {}
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
                self._picture(message.residency)
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
            now = view.clock.monotonic()
            if message.HasField("snapshot"):
                view.apply(snapshot_from_wire(message.snapshot, now=now))
            else:
                view.apply(apply_change(view.held.placement, message.change, now=now))
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

    def _picture(self, everywhere: placement_pb2.FleetResidency) -> None:
        """What runs on other proxies: the fleet's picture without what this worker itself said last."""
        legs, tokens = residency_from_wire(list(everywhere.resident)), tokens_from_wire(list(everywhere.resident))
        own_legs, own_tokens = self._acked_legs, self._acked_tokens
        self.view.picture = Picture(
            legs={e: n - own_legs.get(e, 0) for e, n in legs.items() if n > own_legs.get(e, 0)},
            tokens={e: n - own_tokens.get(e, 0) for e, n in tokens.items() if n > own_tokens.get(e, 0)},
            own_legs=own_legs,
            own_tokens=own_tokens,
            proxies=max(everywhere.proxies, 1),
        )

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
        self._acked_tokens = dict(self.view.inflight.tokens)
        return placement_pb2.ProxyMessage(
            ack=placement_pb2.Ack(
                epoch=epoch,
                version=version,
                resident=residency_to_wire(self._acked_legs, self._acked_tokens),
                unread=residency_to_wire(dict(self.view.inflight.unread)),
            )
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


async def say_goodbye(dial: Dial, address: str, proxy: ProxyKey, reason: str) -> bool:
    """Tell one control process that `proxy` died (spec P6). Needs no hello. False when it was not heard."""
    goodbye = placement_pb2.Goodbye(reason=reason, proxy=proxy_to_wire(proxy))
    channel = dial(address)
    call = placement_pb2_grpc.PlacementServiceStub(channel).StreamPlacement()
    try:
        async with asyncio.timeout(SILENCE_S):
            await call.write(placement_pb2.ProxyMessage(goodbye=goodbye))
            await call.done_writing()
            return await call.code() is grpc.StatusCode.OK
    except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return False
    finally:
        call.cancel()
        await channel.close()
