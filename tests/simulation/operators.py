"""An operator with a runbook: drain, wait until it is ready to stop, restart, undrain until it is back."""

from typing import TYPE_CHECKING

from narwhal.control.core.events import DrainCommand, UndrainCommand
from narwhal.control.core.view import EngineView

if TYPE_CHECKING:
    from tests.simulation.run import Simulation
    from tests.simulation.term import Term

LOOKS_S = 0.5
DOWN_S = 1.0


class Operator:
    """One drain of some engines."""

    def __init__(self, sim: "Simulation", names: tuple[str, ...], *, give_up_s: float, restart: bool) -> None:
        self.sim = sim
        self.names = names
        self.give_up_at = sim.world.now + give_up_s
        self.restart = restart
        self._accepted = False
        self._stopped: set[str] = set()

    def begin(self) -> None:
        """Ask until the command is taken; then look after it."""
        if self.sim.world.now >= self.give_up_at:
            return
        term = self._term()
        if term is not None and not self._accepted:
            command = DrainCommand(
                engines=self.names,
                reason="maintenance",
                deadline_s=self.give_up_at - self.sim.world.now,
                restart=self.restart,
                wall=term.control.wall(),
            )
            self._accepted = term.command(command)
            if not self._accepted:
                return  # drained by somebody else
        self.sim.world.after(LOOKS_S, self._look if self._accepted else self.begin)

    def _look(self) -> None:
        """Restart what is ready to stop: which an operator is told once it is stored."""
        if self.sim.world.now >= self.give_up_at:
            return
        document = self.sim.store.document
        for view in self._views():
            saved = document.state.engines[view.id].drain if document is not None else None
            if view.drain is not None and view.drain.settled and saved is not None and saved.settled:
                self._restart(view.id)
        self.sim.world.after(LOOKS_S, self._look)

    def _restart(self, name: str) -> None:
        engine = self.sim.engines[name]
        if self.restart and name not in self._stopped and engine.alive and not engine.troubles:
            self._stopped.add(name)
            engine.restart(DOWN_S, keep_id=False)

    def stop(self) -> None:
        """Time is up: restart what has not been, and have all of them back."""
        if self._accepted:
            for name in self.names:
                self._restart(name)
            self._undrain()

    def _undrain(self) -> None:
        """Until none is drained any more, and that is stored: before, an operator is not told that they are back."""
        out = [view.id for view in self._views() if view.drain is not None]
        term, document = self._term(), self.sim.store.document
        if term is not None and not out:
            kept = document.state.engines if document is not None else {}
            if not any(name in kept and kept[name].drain is not None for name in self.names):
                return
            self.sim.world.after(3.0, self._undrain)
            return
        if term is not None:
            for name in self.names:
                self._restart(name)
            term.command(UndrainCommand(engines=tuple(out)))
        self.sim.world.after(3.0, self._undrain)

    def _term(self) -> "Term | None":
        active = self.sim.active()
        return active.term if active is not None else None

    def _views(self) -> list[EngineView]:
        term = self._term()
        if term is None:
            return []
        view = term.fleet.view(now=term.control.now())
        return [e for e in view.engines if e.id in self.names]
