"""The event journals of a run: what the core of each term was given and made of it, in files as control has them."""

from pathlib import Path

from narwhal.control.core.effects import Effect
from narwhal.control.core.events import Input
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import SavedFleet
from narwhal.control.core.journal import Head, head_line, step_line
from narwhal.control.core.settings import CoreSettings
from narwhal.control.journal import encoded
from narwhal.control.snapshot import pack, text
from narwhal.vocabulary import Stage
from tests.simulation.invariants import Watch
from tests.simulation.run import Simulation

STEPS = 100  # in a file


class Kept(Fleet):
    """A core that writes down what it is given. Each file begins as one of a control process does."""

    def __init__(
        self, settings: CoreSettings, *, now: float, epoch: int, saved: SavedFleet | None, directory: Path, term: int
    ) -> None:
        super().__init__(settings, now=now, epoch=epoch, saved=saved)
        self._directory, self._term = directory, term
        self._start = Head(
            kind="start",
            release="0",
            fleet=settings.name,
            holder="simulated",
            epoch=epoch,
            step=0,
            wall=0.0,
            now=now,
            settings=settings,
            saved=saved,
            core="",
        )
        self._steps = 0
        self._lines = [encoded(head_line(self._start))]
        self._file = 1

    def handle(self, event: Input, *, now: float) -> tuple[Effect, ...]:
        try:
            effects = super().handle(event, now=now)
        except Exception as error:
            self._note(event, (), f"{type(error).__name__}: {error}", now)
            raise
        self._note(event, effects, "", now)
        return effects

    def tick(self, stage: Stage, *, now: float) -> tuple[Effect, ...]:
        effects = super().tick(stage, now=now)
        self._note(stage, effects, "", now)
        return effects

    def _note(self, what: Input | Stage, effects: tuple[Effect, ...], raised: str, now: float) -> None:
        self._steps += 1
        self._lines.append(encoded(step_line(self._steps, what, effects, raised, now=now)))
        if len(self._lines) > STEPS:
            self.write()
            self._file += 1
            self._lines = [encoded(head_line(self._snapshot(now)))]

    def _snapshot(self, now: float) -> Head:
        ours = {"_directory", "_term", "_start", "_steps", "_lines", "_file"}
        core = Fleet.__new__(Fleet)
        core.__dict__.update({name: value for name, value in self.__dict__.items() if name not in ours})
        start = self._start
        return Head(
            kind="snapshot",
            release=start.release,
            fleet=start.fleet,
            holder=start.holder,
            epoch=start.epoch,
            step=self._steps,
            wall=0.0,
            now=now,
            settings=start.settings,
            saved=None,
            core=text(pack(core)),
        )

    def write(self) -> None:
        """What is not yet in a file."""
        name = f"journal-{self._term:010}-{self._file:06}.jsonl"
        (self._directory / name).write_bytes(b"".join(line + b"\n" for line in self._lines))


def journals_of(seed: int, directory: Path) -> dict[int, list[Path]]:
    """Runs a seed to its end; the files of each term, in order."""
    kept: list[Kept] = []

    class Watching(Watch):
        def fleet(self, settings: CoreSettings, *, now: float, epoch: int, saved: SavedFleet | None) -> Fleet:
            core = Kept(settings, now=now, epoch=epoch, saved=saved, directory=directory, term=len(kept) + 1)
            kept.append(core)
            return core

    class Journaled(Simulation):
        def make_watch(self) -> Watch:
            return Watching(self.world, self.engines, self.ledger, self.store)

    Journaled(seed).run()
    for core in kept:
        core.write()
    return {number: sorted(directory.glob(f"journal-{number:010}-*.jsonl")) for number, _ in enumerate(kept, 1)}
