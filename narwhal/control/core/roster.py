"""Which engines there are: from the fleet file, from a saved handoff, and across a reload (spec S2, R8).

Decides: what of an engine's record survives when its entry in the fleet file changes. It cannot see: gates, probes or
suspicions; the caller tells those who keep something about an engine. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from narwhal.control.core.changes import Changes
from narwhal.control.core.engine import Engine, joining
from narwhal.control.core.handoff import SavedEngine
from narwhal.control.core.persistence import load_engine, moved
from narwhal.control.core.records import EventKind
from narwhal.control.core.settings import CoreSettings, EngineSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What a reload did to one engine. `anew`: nothing that was known or asked of it speaks about what it is now."""

    kind: EventKind
    engine: str
    words: str
    anew: bool
    gone: Engine | None = None  # the record that is no longer kept
    url: str = ""  # its new address, where that has changed
    role: bool = False  # whether it has another role now


class Roster:
    """The engines in the fleet file's order. `engines` is one object for good, so others may keep it."""

    def __init__(self, *, numbers: int) -> None:
        """`numbers`: where the numbers of checks and probes begin."""
        self.engines: dict[str, Engine] = {}
        self.changes = Changes()
        self._numbers = numbers
        self._incarnations: dict[str, int] = {}  # of engines that are gone, should they come back
        self._forgotten: dict[str, str] = {}  # drains of engines that are gone: engine → reason

    def load(self, settings: CoreSettings, saved: Mapping[str, SavedEngine], *, now: float) -> None:
        """The engines at the start: as `saved`, or joining."""
        for spec in settings.engines:
            known = saved.get(spec.id)
            engine = joining(spec, now=now) if known is None else load_engine(spec, known, settings, now=now)
            engine.numbers = self._numbers
            self._keep(engine)

    def _keep(self, engine: Engine) -> None:
        engine.changes = self.changes
        self.engines[engine.id] = engine

    def reload(self, settings: CoreSettings, *, now: float) -> list[Change]:
        """The fleet file was read again. Returns what changed, removals first."""
        before = dict(self.engines)
        wanted = {spec.id: spec for spec in settings.engines}
        changes = [self._remove(e) for e in before.values() if e.id not in wanted]
        self.engines.clear()
        for spec in settings.engines:
            known = before.get(spec.id)
            if known is None:
                changes.append(self._add(spec, now))
                continue
            self.engines[spec.id] = known
            if known.spec != spec:
                changes.append(self._change(known, spec, now))
        self.changes.renew()
        return changes

    def _add(self, spec: EngineSpec, now: float) -> Change:
        # Outcomes of the engine that had this id before must not speak about this one.
        incarnation = self._incarnations.pop(spec.id, 0)
        engine = joining(spec, "added to the fleet again", now=now) if incarnation else joining(spec, now=now)
        engine.numbers, engine.incarnation = self._numbers, incarnation
        self._keep(engine)
        words, drained = "added to the fleet", self._forgotten.pop(spec.id, "")
        if drained:
            words += f" again; the drain that it had when it was removed ({drained}) is forgotten"
        return Change(kind=EventKind.ENGINE_ADDED, engine=spec.id, words=words, anew=True)

    def _remove(self, engine: Engine) -> Change:
        self._retire(engine)
        self._incarnations[engine.id] = engine.incarnation
        words = "removed from the fleet"
        if engine.drain is not None:
            # Spec S2: whoever adds it again does not find it drained, and no newer process is asked for.
            self._forgotten[engine.id] = engine.drain.reason
            words += f", and its drain ({engine.drain.reason}) is forgotten"
        return Change(kind=EventKind.ENGINE_REMOVED, engine=engine.id, words=words, anew=True, gone=engine)

    def _change(self, engine: Engine, spec: EngineSpec, now: float) -> Change:
        """The same engine with other properties; at another address it is another engine (spec R8)."""
        before = engine.spec
        if spec.url != before.url:
            other = moved(engine, spec, now=now)
            if other is not engine:
                other.numbers = engine.numbers
                self._retire(engine)
            self._keep(other)
            words = f"its address changed from {before.url}"
            return Change(kind=EventKind.ENGINE_CHANGED, engine=spec.id, words=words, anew=True, url=spec.url)
        engine.spec = spec
        words, role = "its entry in the fleet file changed", engine.role
        if (spec.role is not before.role or spec.pinned) and spec.role is not role:
            engine.role, engine.role_since = spec.role, now
            words += f", its role is {spec.role} now"
        engine.decide()
        moved_role = engine.role is not role
        return Change(kind=EventKind.ENGINE_CHANGED, engine=spec.id, words=words, anew=False, role=moved_role)

    def _retire(self, engine: Engine) -> None:
        self._numbers = max(self._numbers, engine.numbers)
