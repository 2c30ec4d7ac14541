"""Simulated engines answer as the recorded real ones did, situation by situation.

A recording is what `scripts/real_engines/record.py` wrote: the requests of a situation and what real engines answered.
The same situation runs here against simulated engines; status, headers, framing, the structure of bodies and of event
streams, and how each connection ended must be the same. Texts and times are not compared.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.real_engines import ordinary, trouble  # noqa: F401  (they fill the list)
from scripts.real_engines.record import Normaliser, document
from scripts.real_engines.situation import ALL
from tests.contract.recorded.known import KNOWN
from tests.contract.recorded.shapes import differences, shape
from tests.contract.recorded.simbench import sim_bench

HERE = Path(__file__).parent / "recorded"
RECORDINGS = sorted(HERE.glob("vllm-*/*.json"))
SITUATIONS = {one.name: one for one in ALL}
DOCS = Path(__file__).parents[2] / "docs/real-engines.md"


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def expected(situation: str, step: str) -> list[str]:
    return sorted(line for places in KNOWN.values() for line in places.get((situation, step), []))


@pytest.mark.parametrize("path", RECORDINGS, ids=[path.stem for path in RECORDINGS])
def test_a_simulated_engine_answers_as_the_recorded_one(path: Path) -> None:
    recorded = load(path)
    one = SITUATIONS[recorded["name"]]
    with sim_bench(one.settings) as bench:
        bench.begin(one.name)
        one.run(bench)
        simulated = document(one, bench.steps, Normaliser())
    assert [step["step"] for step in simulated["steps"]] == [step["step"] for step in recorded["steps"]]
    for theirs, ours in zip(recorded["steps"], simulated["steps"], strict=True):
        asked, repeated = theirs["request"], ours["request"]
        assert (repeated["method"], repeated["path"]) == (asked["method"], asked["path"])
        found = differences(theirs["response"], ours["response"])
        assert "\n".join(sorted(found)) == "\n".join(expected(recorded["name"], theirs["step"])), (
            f"step {theirs['step']!r}"
        )


@pytest.mark.parametrize("path", RECORDINGS, ids=[path.stem for path in RECORDINGS])
def test_the_recording_is_of_the_situation_as_it_is_written_now(path: Path) -> None:
    recorded = load(path)
    assert recorded["name"] == path.stem
    assert recorded["what"] == SITUATIONS[path.stem].what


def test_every_situation_is_recorded() -> None:
    assert {path.stem for path in RECORDINGS} == set(SITUATIONS)


def test_every_known_difference_has_its_reason_in_the_documentation() -> None:
    text = DOCS.read_text()
    for reason, places in KNOWN.items():
        assert f"`{reason}`" in text, reason
        assert places, reason


def test_a_difference_is_found_wherever_it_is() -> None:
    """The comparison itself must be able to fail: each planted change is seen."""
    recorded = load(HERE / "vllm-0.32.0/chat-stream-usage.json")["steps"][1]["response"]
    assert differences(recorded, recorded) == []
    plants: list[dict[str, Any]] = [
        {"status": 500},
        {"end": "cut"},
        {"connection": "closed"},
        {"framing": "length"},
        {"headers": {**recorded["headers"], "content-type": "text/plain"}},
        {"headers": {name: value for name, value in recorded["headers"].items() if name != "server"}},
        {"events": recorded["events"][:-1]},
        {"events": recorded["events"][1:]},
        {"events": [*recorded["events"][:-2], recorded["events"][-1]]},
        {"events": [{**recorded["events"][0], "more": 1}, *recorded["events"][1:]]},
        {"json": {}},
    ]
    for plant in plants:
        assert differences(recorded, {**recorded, **plant}), plant
    assert shape({"code": 500}) != shape({"code": 400})
    assert shape({"finish_reason": None}) != shape({"finish_reason": "stop"})
