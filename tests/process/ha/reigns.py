"""The proof that at no instant two control processes act, from what they and the store tell afterwards.

A reign is the time in which one process may act under one epoch, on the one clock of the machine: from the record that
it leads to the record that it does not, or to the end of its lease where it could say so only later, or to its death.
Three things must hold. Reigns of different processes do not overlap. Whatever a process decided, it decided within a
reign of its own. Every state handoff in etcd was written under the lease that stood there at that revision.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from narwhal.control.store.etcd_client import Connection, EtcdSettings
from tests.etcd import Etcd

# What a process tells of itself, whether or not it leads. Everything else is a decision.
_OF_ITSELF = ("control_", "yield_", "active_", "handoff_", "store_", "reload")
_ENDS = ("control_fenced", "control_yielded", "control_released")
_READ_S = 20.0
PREFIX = b"/narwhal/test/"


@dataclass(frozen=True, kw_only=True)
class Journal:
    """What one process told, oldest first, and when it was dead."""

    name: str
    pid: int
    entries: Sequence[dict[str, Any]]
    dead_at: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Reign:
    """One process under one epoch. Seconds of CLOCK_BOOTTIME."""

    pid: int
    name: str
    epoch: int
    begin: float
    end: float

    def __str__(self) -> str:
        return f"{self.name} ({self.pid}) under epoch {self.epoch} from {self.begin:.3f} to {self.end:.3f}"


def reigns(journal: Journal) -> list[Reign]:
    """Those of one process."""
    found: list[Reign] = []
    open_since: tuple[int, float] | None = None

    def close(at: float) -> None:
        nonlocal open_since
        if open_since is not None:
            epoch, begin = open_since
            found.append(Reign(pid=journal.pid, name=journal.name, epoch=epoch, begin=begin, end=at))
        open_since = None

    for entry in journal.entries:
        if entry.get("kind") == "control_active":
            close(entry["boottime"])  # on to a higher epoch
            open_since = (int(entry["epoch"]), entry["boottime"])
        elif entry.get("kind") in _ENDS:
            close(min(entry["boottime"], float(entry.get("valid_until", "inf"))))
    close(journal.dead_at)
    return found


def overlaps(known: Sequence[Reign]) -> list[str]:
    """Reigns of different processes that share an instant, in words."""
    return [
        f"{one}, and {other}"
        for number, one in enumerate(known)
        for other in known[number + 1 :]
        if one.pid != other.pid and one.begin < other.end and other.begin < one.end
    ]


def decisions(journal: Journal) -> list[dict[str, Any]]:
    """What the process decided, rather than what it is."""
    return [e for e in journal.entries if "kind" in e and not e["kind"].startswith(_OF_ITSELF)]


def strays(journal: Journal) -> list[str]:
    """Decisions outside every reign of the process, in words."""
    own = reigns(journal)
    return [
        f"{journal.name} ({journal.pid}) at {entry['boottime']:.3f}: {entry['event']}"
        for entry in decisions(journal)
        if not any(reign.begin <= entry["boottime"] <= reign.end for reign in own)
    ]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was looked at, and what was found."""

    reigns: list[Reign]
    decisions: int
    faults: list[str]


def proof(journals: Iterable[Journal]) -> Proof:
    """Of everything that these processes told."""
    read = list(journals)
    known = sorted((reign for journal in read for reign in reigns(journal)), key=lambda reign: reign.begin)
    faults = overlaps(known) + [words for journal in read for words in strays(journal)]
    epochs = [reign.epoch for reign in known]
    if epochs != sorted(set(epochs)):
        faults.append(f"epochs do not rise from reign to reign: {epochs}")
    return Proof(reigns=known, decisions=sum(len(decisions(journal)) for journal in read), faults=faults)


# --- what etcd remembers ----------------------------------------------------------------------------------------------


def written(etcd: Etcd) -> list[tuple[int, int, int]]:
    """Every write of the state handoff that etcd has not compacted: (revision, epoch in the document, epoch of the
    lease that stood there, 0 for none). They are equal where only the holder of the lease wrote."""
    lease, found = 0, []
    for revision, key, value in _events(etcd):
        name = key.removeprefix(PREFIX)
        if name == b"lease":
            lease = json.loads(value)["epoch"] if value else 0
        elif name == b"handoff" and value:
            found.append((revision, json.loads(value)["lease"]["epoch"], lease))
    return found


def _events(etcd: Etcd) -> Iterator[tuple[int, bytes, bytes]]:
    """(revision, key, value, empty when it was deleted) of every change of the fleet's keys, in their order; those of
    one revision with the lease first. It begins with the lease at the oldest revision that can be read."""
    settings = EtcdSettings(endpoints=etcd.endpoints, prefix="/narwhal", fleet="test", ttl_s=3, safety_margin_s=0.5)
    connection = Connection(settings, timeout_s=_READ_S)
    key, last = PREFIX + b"lease", PREFIX[:-1] + b"0"
    try:
        with etcd.client() as client:
            newest = max((kv.mod_revision for kv in client.get_prefix_response(PREFIX).kvs), default=0)
            since = _oldest(connection, last)
            if since > 1:
                # What else stands there may have been written under an earlier lease.
                yield from ((since, key, kv.value) for kv in client.get_response(key, revision=since).kvs)
        waiting: list[tuple[int, bytes, bytes]] = []
        for answer in connection.watch(PREFIX, last, since + 1 if since > 1 else 1, for_s=_READ_S):
            for event in answer.events:
                value = event.kv.value if event.type == event.PUT else b""
                waiting.append((event.kv.mod_revision, event.kv.key, value))
            if waiting and waiting[-1][0] >= newest:
                break
        yield from sorted(waiting, key=lambda known: (known[0], not known[1].endswith(b"lease")))
    finally:
        connection.close()


def _oldest(connection: Connection, last: bytes) -> int:
    """The oldest revision that was not compacted; 1 when none was."""
    for answer in connection.watch(PREFIX, last, 1, for_s=_READ_S):
        if answer.compact_revision:
            return int(answer.compact_revision)
        if answer.events:
            break
    return 1
