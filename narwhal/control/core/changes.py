"""What has changed in the records of a fleet, so that nobody has to look at all of them to know. Pure.

Decides nothing. All records of a fleet share one `Changes`; whoever keeps something computed from the records compares
numbers, or takes the engines that he has not looked at since.
"""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Changes:
    """Mutable; changed by the records (`engine.Engine`) and by their roster."""

    decided: int = 0  # rises with every change that must be stored at once
    counted: int = 0  # rises with every change that the next pass may store
    # Engines whose record changed since it was last looked at; dictionaries, since sets have no order of their own.
    unseen: dict[str, None] = field(default_factory=dict)  # by the picture
    unchecked: dict[str, None] = field(default_factory=dict)  # by the invariants
    anew: bool = True  # there are other engines than the picture has seen, or they stand in another order

    def decide(self, engine: str) -> None:
        """A durable decision about the engine."""
        self.decided += 1
        self.look(engine)

    def look(self, engine: str) -> None:
        """The engine's record says something else than before, if nothing that has to be stored at once."""
        self.unseen[engine] = None
        self.unchecked[engine] = None

    def renew(self) -> None:
        """Engines have come or gone."""
        self.decided += 1
        self.anew = True
