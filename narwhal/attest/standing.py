"""Whether the document holds: which process it speaks for, and what that process was last seen to be.

Decides the standing; sees no engine, only readings of its identity. The first process that answers is the one attested,
for as long as this sidecar runs: a contract speaks for the process that was started with it, and nobody has said
anything of a later one.
"""

from enum import StrEnum
from typing import Any

from narwhal.attest.contract import Contract
from narwhal.control.core.events import ProcessIdentity
from narwhal.control.core.process import process_words, same_process


class State(StrEnum):
    """What a document is worth now."""

    WAITING = "waiting"  # no process has been seen yet
    VALID = "valid"
    NOT_VERIFIED = "not_verified"  # the process that is attested cannot be asked at the moment
    PROCESS_CHANGED = "process_changed"  # for good


# state → what an error's body calls it; a document that waits is one that cannot be verified.
CODES = {
    State.WAITING: "not_verified",
    State.NOT_VERIFIED: "not_verified",
    State.PROCESS_CHANGED: "process_changed",
}


class Standing:
    """One engine's standing."""

    def __init__(self) -> None:
        self.state = State.WAITING
        self.reason = "the engine has not been asked yet"
        self.attested: ProcessIdentity | None = None
        self.running: ProcessIdentity | None = None  # as last seen

    def saw(self, process: ProcessIdentity) -> None:
        """The engine said which process it is."""
        self.running = process
        if self.attested is None:
            self.attested = process
        if self.state is State.PROCESS_CHANGED:
            return
        if same_process(self.attested, process):
            self.state, self.reason = State.VALID, ""
        else:
            self.state = State.PROCESS_CHANGED
            # The advice stands before the details: whoever shows this may cut it.
            self.reason = (
                "the engine's process has changed, restart narwhal-attest beside the new one: "
                f"attested is {process_words(self.attested)}, {process_words(process)} runs"
            )

    def could_not(self, words: str) -> None:
        """The engine did not say it, and why."""
        if self.state is State.PROCESS_CHANGED:
            return
        self.state = State.WAITING if self.attested is None else State.NOT_VERIFIED
        seen = (
            "no engine process has been seen yet" if self.attested is None else "the engine's process is not verified"
        )
        self.reason = f"{seen}: {words}"

    def answer(self, contract: Contract) -> tuple[int, dict[str, Any]]:
        """(HTTP status, body): the document, or why there is none."""
        if self.state is State.VALID and self.attested is not None:
            return 200, {**contract.fields, "process": _process(self.attested), "digest": contract.digest}
        error = {"message": self.reason, "type": "attestation", "param": None, "code": CODES[self.state]}
        return 503, {"error": error, "attested": _process(self.attested), "running": _process(self.running)}


def _process(identity: ProcessIdentity | None) -> dict[str, Any] | None:
    if identity is None:
        return None
    return {"version": identity.version, "started_at": identity.started_at}
