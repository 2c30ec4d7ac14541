"""What is being found out about one engine (spec F3, F6). Pure.

Decides: nothing; it is what `suspicion` knows of one of its open questions. It cannot see: engines or settings.
"""

from dataclasses import dataclass, field

from narwhal.control.core.evidence import Action
from narwhal.control.core.probing import InferenceProbe
from narwhal.vocabulary import FailureClass


@dataclass(kw_only=True, slots=True)
class Suspicion:
    """What is being found out about one engine."""

    action: Action  # the probe that decides
    reason: str
    classes: set[FailureClass] = field(default_factory=set)  # that reached the threshold
    unfounded: bool = False  # no failure made it: a look at an engine that something other than failures spoke of
    silent: bool = False  # the engine gave nothing to a leg: silence to a step of the probe brings the hold (spec F10)
    held: bool = False  # the verification hold is on for it; an operator's probe goes without
    due: float | None = None  # next try; None while an answer is waited for
    number: int = 0
    asked_at: float = 0.0
    answer_due: float = 0.0
    probe: InferenceProbe | None = None
    checking: str = ""  # the remembered producer that the open step asks about, after the suspect passed
    to_check: dict[str, int] = field(default_factory=dict)  # remembered producers still to ask about → incarnation
    blocked_by: frozenset[str] = frozenset()  # peers whose own failure made the last try inconclusive

    @property
    def open(self) -> bool:
        """Whether an answer is waited for."""
        return self.due is None

    @property
    def unheld(self) -> bool:
        """Whether an inference probe of the engine is under way without the verification hold."""
        return self.open and self.action is Action.INFERENCE_PROBE and not self.held and not self.checking

    def words(self, *, now: float) -> str:
        """What is being found out, for people."""
        if self.checking:
            return f"reading from {self.checking}, a producer of its failures"
        # The hold that is on for it says why.
        why = "" if self.held else f": {self.reason}"
        if self.due is None:
            return f"{self.action} under way{why}"
        return f"{self.action} again in {max(0.0, self.due - now):.1f} s{why}"
