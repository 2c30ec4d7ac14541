"""A scene in the life of engines long in service: what is told and asked of them, as lines, in order."""

from collections.abc import Iterable
from typing import Any

from narwhal.control.core.effects import Effect, ProbeHealth, ProbeInference
from narwhal.control.core.events import InferenceAnswered, LegSeen
from narwhal.control.core.records import Record
from narwhal.control.core.settings import EngineSpec
from narwhal.vocabulary import Outcome
from tests.core.rig import Rig, decode, only, prefill

FOUR = (
    prefill("p1", pinned=True),
    prefill("p2", pinned=True),
    decode("d", pinned=True),
    decode("e", pinned=True),
)
GOT, OK = Outcome.HANDOFF, Outcome.STREAM_COMPLETE


class Scene(Rig):
    """A fleet long in service; nothing but what a test does is told."""

    def __init__(self, *engines: EngineSpec, **settings: Any) -> None:
        super().__init__(*(engines or FOUR), liveness_every=0, **settings)
        self.now += 1000.0
        self.effects.clear()

    def story(self) -> list[str]:
        """What was told and asked since it was looked at last."""
        told, self.effects = self.effects, []
        return story(told)

    def doing(self, engine: str) -> str:
        return self.engine(engine).suspicion

    def answer(self, step: ProbeInference, produced: LegSeen | None, consumed: LegSeen | None) -> tuple[Effect, ...]:
        """The step comes back with all that was seen."""
        name = {"engine": step.engine, "incarnation": step.incarnation, "number": step.number}
        return self.send(InferenceAnswered(**name, produced=produced, consumed=consumed))  # type: ignore[arg-type]

    def health(self, effects: Iterable[Effect]) -> ProbeHealth:
        return only(effects, ProbeHealth)

    def step(self, effects: Iterable[Effect]) -> ProbeInference:
        return only(effects, ProbeInference)


def story(effects: Iterable[Effect]) -> list[str]:
    lines = []
    for effect in effects:
        match effect:
            case Record():
                lines.append(effect.message)
            case ProbeHealth():
                lines.append(f"? health of {effect.engine}")
            case ProbeInference():
                producer = "" if effect.producer is None else effect.producer.engine
                lines.append(f"? {producer}→{effect.consumer.engine} for {effect.engine}")
            case _:
                lines.append(f"? {type(effect).__name__} of {effect.engine}")
    return lines


TIMED_OUT = "3 timeout failures in a row, the last: decode leg: read timeout (no header in 30 s), on edge/0"


def timed_out(scene: Scene) -> ProbeHealth:
    """Three time-outs of d, and what is told of them."""
    probe = scene.health(scene.report("d", Outcome.READ_TIMEOUT, count=3, detail="no header in 30 s"))
    assert scene.story() == [f"engine d: health probe begins ({TIMED_OUT})", "? health of d"]
    assert scene.doing("d") == "health probe under way: 3 timeout failures in a row (read timeout)"
    return probe


HELD = "engine d: verification hold: 3 stream failures in a row, the last: decode leg: stream cut, on edge/0"


def cut(scene: Scene, producer: str = "") -> ProbeInference:
    """Three streams of d are cut; nothing was remembered, so p1 or p2 is the first to produce."""
    return scene.step(scene.report("d", Outcome.STREAM_CUT, count=3, producer=producer))
