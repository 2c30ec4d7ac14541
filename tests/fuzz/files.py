"""What must hold of whatever bytes a file, or a key of the store, has: properties, each of one kind. Shared as
`engines.py` is."""

import io
import json
from functools import cache

import orjson

from narwhal.config import FleetFileError, parse_fleet
from narwhal.control.core.codec import decode
from narwhal.control.core.events import Input, Reported
from narwhal.control.core.fleet import Fleet
from narwhal.control.core.handoff import Resume, aged, from_document, to_document
from narwhal.control.core.history import HistoryError
from narwhal.control.core.history import from_document as from_history
from narwhal.control.core.history import to_document as to_history
from narwhal.control.core.journal import Head, head_line, step_line
from narwhal.control.core.settings import CoreSettings
from narwhal.control.journal import encoded
from narwhal.control.replay import AsItWas, Reading, ReplayError, give, lines_of
from narwhal.control.resume import judge
from narwhal.control.store.base import read_owner
from narwhal.reports import Batch, ProxyKey, Run
from narwhal.vocabulary import Outcome, Phase, Stage
from tests.core.rig import Rig
from tests.core.test_core_handoff import ENGINES, busy
from tests.fuzz.engines import worded

WALL = 5000.0
SETTINGS = CoreSettings(name="fleet", model="tiny", engines=ENGINES)


# --- the state handoff ------------------------------------------------------------------------------------------------


@cache
def good() -> bytes:
    """A document of which nothing is wrong."""
    return orjson.dumps(to_document(busy().fleet.save(now=busy().now), wall=WALL, epoch=3, holder="a"))


def document(data: bytes) -> None:
    """Refused with a reason; or applied, worked with, and stored again."""
    judged = judge(data, SETTINGS)
    if judged.resume is not Resume.APPLY:
        assert judged.problem
        return
    assert judged.handoff is not None
    rig = Rig(*ENGINES, saved=aged(judged.handoff, wall=WALL + 1.0))
    for _ in range(3):
        rig.run_pass()
    rig.publish()
    for engine in rig.fleet.view(now=rig.now).engines:
        rig.fleet.explain(engine.id, now=rig.now)
    stored = orjson.dumps(to_document(rig.fleet.save(now=rig.now), wall=WALL, epoch=4, holder="b"))
    from_document(orjson.loads(stored))


def lease(data: bytes) -> None:
    """The document of a lease: refused, or it names whom the next leader follows."""
    try:
        owner, _ = read_owner(data)
    except ValueError as refused:
        worded(str(refused))
        return
    assert 0 < owner.epoch < 2**63
    f"{owner.holder} {owner.address}".encode()  # for people, and for peers


def history(data: bytes) -> None:
    """The past of a lease: refused in words, or the same when it is written again."""
    try:
        known = from_history(orjson.loads(data))
    except (orjson.JSONDecodeError, HistoryError) as refused:
        worded(str(refused))
        return
    assert from_history(orjson.loads(orjson.dumps(to_history(known)))) == known


# --- the event journal ------------------------------------------------------------------------------------------------


@cache
def good_journal() -> bytes:
    """A journal of a few steps."""
    saved = from_document(orjson.loads(good())).state
    head = Head(
        kind="start",
        release="1",
        fleet="fleet",
        holder="a",
        epoch=1,
        step=0,
        wall=WALL,
        now=1.0,
        settings=SETTINGS,
        saved=saved,
        core="",
    )
    run = Run(engine="d1", phase=Phase.DECODE, incarnation=1, outcome=Outcome.STREAM_COMPLETE)
    report = Reported(batch=Batch(proxy=ProxyKey(id="edge", slot=0, boot=9), sequence=1, runs=(run,)))
    steps: list[Input | Stage] = [Stage.HEALTH, report, Stage.LIVENESS]
    core, lines = Fleet(SETTINGS, now=1.0, epoch=1, saved=saved), [head_line(head)]
    for number, what in enumerate(steps, 1):
        effects, raised = give(core, what, now=1.0 + number)
        lines.append(step_line(number, what, effects, raised, now=1.0 + number))
    return b"".join(encoded(line) + b"\n" for line in lines)


class _InMemory:
    """A file that is none."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)

    def __str__(self) -> str:
        return "memory"


def journal(data: bytes) -> None:
    """Refused with the line that is wrong; or replayed, and each step is what it would be written as."""
    was: AsItWas | None = None
    try:
        for line in lines_of([_InMemory(data)], Reading()):  # type: ignore[list-item]
            if isinstance(line, Head):
                was = AsItWas(line)
                assert decode(Head, orjson.loads(encoded(line))) == line
                continue
            assert was is not None
            assert (
                isinstance(line.what, Stage) or decode(type(line.what), orjson.loads(encoded(line.what))) == line.what
            )
            was.take(line)
    except ReplayError as refused:
        worded(str(refused))


# --- the fleet file ---------------------------------------------------------------------------------------------------


def fleet_file(data: bytes) -> None:
    """Refused with everything that is wrong; or a fleet, which is the same when it is shown and read again."""
    try:
        fleet = parse_fleet(data.decode("utf-8", "replace"), {"SECRET": "s3cret"})
    except FleetFileError as refused:
        worded(*refused.problems)
        return
    again = fleet.model_dump(mode="json", by_alias=True, exclude_none=True, context={"reveal": True})
    if fleet.engine_contract is not None:
        again["engine_contract"] = dict(fleet.engine_contract)  # which may demand null
    assert parse_fleet(json.dumps(again), {}) == fleet
