"""The fleet as one proxy worker knows it: the data path's `Feed`, kept current by a link to every control process.

Whichever of them streams the highest epoch is followed; the others are standbys and stay connected, so that a takeover
needs no new connection. What a placement means is `held.py`'s to decide, what goes over the wire is `link.py`'s.

Not guaranteed: that the placement held is the newest that exists. Guaranteed: it is one that control published, none
older replaces it, and every leg that starts after an acknowledgement was sent follows the placement it names.
"""

import asyncio
from collections.abc import Sequence
from random import Random

import structlog

from narwhal.clock import Clock
from narwhal.config import ProxySettings
from narwhal.placement import Placement
from narwhal.proxy.held import Held
from narwhal.proxy.link import Dial, Introduction, Lead, Link
from narwhal.proxy.seams import Inflight, Picture
from narwhal.vocabulary import NotReady

_log = structlog.get_logger()


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
        self.picture = Picture()
        self.placed = asyncio.Event()  # set once, when the first placement is applied
        self.configured = asyncio.Event()  # set once, when settings are known
        self._file_settings = settings
        self._control_settings: ProxySettings | None = None
        self._lead_changed = asyncio.Event()
        self._links = [Link(self, address) for address in dict.fromkeys(addresses)]
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

    @property
    def controlled(self) -> bool:
        """Whether a control process is followed."""
        return self.lead is not None

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

    def apply(self, placement: Placement) -> None:
        """Hold `placement` from now on, or raise `Refused` and keep what is held."""
        before = self.held.placement
        self.held.offer(placement, now=self.clock.monotonic())
        if before is None or before.closed != placement.closed:
            _log.info("placement", epoch=placement.epoch, version=placement.version, closed=placement.closed)
        self.placed.set()

    def follow(self, link: Link, epoch: int) -> None:
        """`link` streams placement of an epoch that nobody has surpassed."""
        lead = self.lead
        if lead is not None and lead is link.lead and lead.epoch == epoch:
            return
        if lead is not None:
            lead.lost.set()
        self.lead = link.lead = Lead(channel=link.channel, address=link.address, epoch=epoch)
        self._lead_changed.set()
        _log.info("following control", control=link.address, epoch=epoch)

    def unfollow(self, link: Link) -> None:
        """`link` is gone."""
        if link.lead is None:
            return
        link.lead.lost.set()
        if self.lead is link.lead:
            self.lead = None
            # A picture that nobody renews would mislead for as long as control is away; how many share does not.
            self.picture = Picture(proxies=self.picture.proxies)
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
