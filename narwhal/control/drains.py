"""The operators' calls that last: drain and undrain, told as they go (spec R4–R6). No decision.

Both do what is asked first, stored like every command, and then watch. What they watch goes on without them.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence

import grpc
from google.rpc import error_details_pb2

from narwhal._pb import fleet_pb2
from narwhal.clock import Clock
from narwhal.control.core.commands import returned
from narwhal.control.core.events import CommandRefusedError, DrainCommand, Refusal, UndrainCommand
from narwhal.control.core.records import Record
from narwhal.control.core.view import EngineView
from narwhal.control.fleet_messages import engine_message, words_of
from narwhal.control.loop import ControlLoop
from narwhal.control.observe import Observer
from narwhal.control.publisher import Publisher
from narwhal.control.service import Context, refuse
from narwhal.control.writer import NotLeading

LOOK_S = 0.1  # between two looks at what is waited for
# An error's details travel in the trailers, of which peers take a few kilobytes.
MOST_VIOLATIONS = 10
LONGEST_WORDS = 300


class _Watching:
    """What happens to some engines from now on."""

    def __init__(self, loop: ControlLoop, observer: Observer, engines: Iterable[str]) -> None:
        self._loop = loop
        self._observer = observer
        self._names = frozenset(engines)
        self._sequence = observer.sequence

    def told(self) -> list[Record]:
        """What was told of them since the last call. Raises NotLeading when this process leads no more."""
        if self._loop.over:
            raise NotLeading(self._loop.over)
        entries = self._observer.after(self._sequence)
        self._sequence = entries[-1].sequence if entries else self._sequence
        return [entry.record for entry in entries if entry.record.engine in self._names]

    def engines(self) -> list[EngineView]:
        """As they are now."""
        return [engine for engine in self._loop.view().engines if engine.id in self._names]


class Drains:
    """`FleetService.DrainEngines`."""

    def __init__(self, observer: Observer, clock: Clock) -> None:
        self._observer = observer
        self._clock = clock

    async def run(
        self, loop: ControlLoop, request: fleet_pb2.DrainEnginesRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.DrainProgress]:
        """Drains, and watches when asked to."""
        names = await _named(loop, request.engine_ids, request.all, context)
        if not 0 < request.deadline_s < math.inf:
            await _invalid(context, f"deadline_s must be above 0 and finite, got {request.deadline_s:g}")
        command = DrainCommand(
            engines=tuple(names),
            reason=request.reason,
            deadline_s=request.deadline_s,
            restart=not request.no_restart,
            wall=self._clock.wall(),
        )
        if request.dry_run:
            yield fleet_pb2.DrainProgress(told=words_of(loop.rehearse(command)))
            return
        watching = _Watching(loop, self._observer, names)
        await loop.ask(command)
        said: object = None
        while True:
            told, engines = watching.told(), watching.engines()
            drains = [engine.drain for engine in engines if engine.drain is not None]
            if any(drain.settled for drain in drains):
                # Who is told stops the engine: after a takeover the next one must know it, and which process it was.
                await loop.stored()
            over = all(drain.settled or drain.overdue for drain in drains)
            waits_for = [drain.waits_for for drain in drains]
            if told or over or waits_for != said:
                yield fleet_pb2.DrainProgress(
                    told=[record.message for record in told], engines=[engine_message(e) for e in engines]
                )
                said = waits_for
            if over or not request.wait:
                return
            await asyncio.sleep(LOOK_S)


class Undrains:
    """`FleetService.UndrainEngines`."""

    def __init__(self, observer: Observer, publisher: Publisher) -> None:
        self._observer = observer
        self._publisher = publisher

    async def run(
        self, loop: ControlLoop, request: fleet_pb2.UndrainEnginesRequest, context: Context
    ) -> AsyncIterator[fleet_pb2.UndrainProgress]:
        """Has the gates tried, and watches to their end; asked to, until the proxies know."""
        names = await self._chosen(loop, request, context)
        command = UndrainCommand(engines=tuple(names))
        if request.dry_run:
            yield fleet_pb2.UndrainProgress(told=words_of(loop.rehearse(command)))
            return
        watching = _Watching(loop, self._observer, names)
        await loop.ask(command)
        pending, failed = set(names), list[Record]()
        said: object = None
        while True:
            told, engines = watching.told(), watching.engines()
            for record in told:
                back = returned(record)
                if back is not None and record.engine in pending:
                    pending.discard(record.engine)
                    failed += [] if back else [record]
            waits_for = [f"{e.id}: {e.suspicion}" for e in engines if e.id in pending and e.suspicion]
            if not pending and not failed and request.wait:
                waits_for = self._proxies_to_wait_for(loop, engines)
            over = not pending and not waits_for
            if told or over or waits_for != said:
                yield fleet_pb2.UndrainProgress(
                    told=[record.message for record in told],
                    engines=[engine_message(e) for e in engines],
                    waits_for=waits_for,
                )
                said = waits_for
            if over:
                break
            await asyncio.sleep(LOOK_S)
        if failed:
            await _gate_failed(context, failed)

    @staticmethod
    async def _chosen(loop: ControlLoop, request: fleet_pb2.UndrainEnginesRequest, context: Context) -> Sequence[str]:
        if request.except_ids and not request.all:
            await _invalid(context, "except_ids needs all")
        if not request.all:
            return await _named(loop, request.engine_ids, False, context)
        await _named(loop, request.engine_ids, True, context)
        engines = loop.view().engines
        for name in request.except_ids:
            if all(engine.id != name for engine in engines):
                raise CommandRefusedError(Refusal.NOT_FOUND, f"no engine {name} in this fleet")
        names = [e.id for e in engines if e.drain is not None and e.id not in request.except_ids]
        if not names:
            raise CommandRefusedError(Refusal.PRECONDITION, "no other engine is drained")
        return names

    def _proxies_to_wait_for(self, loop: ControlLoop, engines: Sequence[EngineView]) -> list[str]:
        """The connected proxies that do not know of the engines' return yet, in words."""
        placement = self._publisher.placement
        for engine in engines:
            entry = placement.engines.get(engine.id) if placement is not None else None
            stored = loop.writer.incarnations.get(engine.id) == engine.incarnation
            if engine.drain is None and (not stored or entry is None or entry.phases != engine.phases):
                return [f"{engine.id}: its return to be stored and published"]
        order = placement.order if placement is not None else (0, 0)
        return [
            f"proxy {proxy.key} to acknowledge placement {order[0]}.{order[1]}"
            for proxy in loop.view().proxies
            if proxy.connected and proxy.acked < order
        ]


async def _named(loop: ControlLoop, names: Iterable[str], everybody: bool, context: Context) -> list[str]:
    chosen = list(dict.fromkeys(names))
    if bool(chosen) == everybody:
        await _invalid(context, "name engines, or ask for all of them" if not everybody else "all leaves none to name")
    return [engine.id for engine in loop.view().engines] if everybody else chosen


async def _invalid(context: Context, words: str) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, words)


async def _gate_failed(context: Context, failed: Sequence[Record]) -> None:
    """Ends the call with what failed, for programs: a violation for each engine that stays drained."""
    details = error_details_pb2.PreconditionFailure(
        violations=[
            error_details_pb2.PreconditionFailure.Violation(
                type=record.fields.get("check", ""), subject=record.engine, description=record.message[:LONGEST_WORDS]
            )
            for record in failed[:MOST_VIOLATIONS]
        ]
    )
    first = failed[0]
    await refuse(
        context,
        grpc.StatusCode.FAILED_PRECONDITION,
        "; ".join(record.message[:LONGEST_WORDS] for record in failed[:MOST_VIOLATIONS]),
        reason="GATE_FAILED",
        metadata={"engine": first.fields.get("failed", first.engine), "check": first.fields.get("check", "")},
        more=(details,),
    )
