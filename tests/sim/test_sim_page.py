"""docs/simulated-engines.md: its table is the code's, its commands do what they say, its words are the answers'."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from narwhal.sim import faults
from narwhal.sim.engine import Life
from narwhal.sim.options import EngineOptions
from narwhal.sim.records import Outcome, RequestPhase
from narwhal.sim.testing import sim_engines
from tests.sim.legs import COMPLETIONS, prompt
from tests.sim.raw import ask

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "simulated-engines.md").read_text(encoding="utf-8")
PAIR = (EngineOptions(id="prefill-0"), EngineOptions(id="decode-0"))
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
CURLS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("curl ")]
CURL = re.compile(r"curl -X (POST|DELETE) http://127\.0\.0\.1:8100(/\S+)(?: -d '(.*)')?")


def said(begins: str) -> set[str]:
    """The words in code type of the paragraph that begins so."""
    (paragraph,) = [p for p in PAGE.split("\n\n") if p.startswith(begins)]
    return set(re.findall(r"`([^`]+)`", paragraph))


def test_the_table_of_faults_is_the_codes() -> None:
    _, _, rest = PAGE.partition("<!-- faults: narwhal-sim faults --format markdown -->\n")
    table, mark, _ = rest.partition("<!-- end of faults -->")
    assert mark
    assert table.strip().splitlines() == faults.lines("markdown")


def test_what_a_fault_may_be_given_beside_its_own() -> None:
    asked = dict(re.findall(r"^\| `(count|for_s|phase|engine)` \| (.*) \|$", PAGE, flags=re.MULTILINE))
    assert asked.keys() == {"count", "for_s", "phase", "engine"}
    phases = set(re.findall(r"`([a-z]+)`", asked["phase"]))
    assert phases == {*RequestPhase, "generation", "any"}
    for name in ("count", "for_s", "phase"):
        faults.make("hang", {name: "any" if name == "phase" else 1})
    for row in faults.TABLE:
        assert row.main is None or row.main == next(iter(row.params)), "VALUE is the first parameter"
    (example,) = re.findall(r"--fault decode-0:(\S+)`", PAGE)
    assert faults.parse(example).for_s == 30


async def test_the_commands_do_what_they_say() -> None:
    assert len(CURLS) == 6
    async with sim_engines(*PAIR) as (engine, _):
        url = engine.url
        for line in CURLS:
            found = CURL.fullmatch(line)
            assert found is not None, line
            method, path, body = found.groups()
            answer = await ask(url, method, path, json.loads(body) if body else None)
            assert answer.status == 200, answer.body
            active = [fault["mode"] for fault in (await ask(url, "GET", "/sim/state")).json["faults"]]
            if method == "POST" and "engine" not in json.loads(body):
                assert active[-1] == json.loads(body)["mode"]
            elif method == "DELETE":
                assert "status" not in active
        assert active == []


async def test_the_words_are_those_of_the_answers() -> None:
    async with sim_engines(*PAIR) as (engine, _):
        url = engine.url
        await ask(url, "POST", COMPLETIONS, prompt(max_tokens=1, kv_transfer_params={"do_remote_decode": True}))
        await ask(url, "POST", "/sim/fault", {"mode": "hang"})
        state: dict[str, Any] = (await ask(url, "GET", "/sim/state")).json
        assert said("State: ") == {*state, *Life, *state["transfers"], "left", "applied"}
        assert {"left", "applied"} <= state["faults"][0].keys()
        assert len((await ask(url, "GET", "/sim/engines")).json) == 2
        (request, *_) = (await ask(url, "GET", "/sim/requests?phase=prefill")).json
        assert said("A request: ") == {*request, *Outcome}
        assert (await ask(url, "GET", f"/sim/requests?phase=prefill&after={request['number']}")).json == []
        ledger = (await ask(url, "GET", "/sim/ledger")).json
        assert said("The ledger: ") == {*ledger, *ledger["totals"]}


def test_every_route_is_told_of() -> None:
    source = (ROOT / "narwhal" / "sim" / "admin.py").read_text()
    known = set(re.findall(r'"(/sim/[a-z]+)"', source))
    told = set(re.findall(r"(?:GET|POST|DELETE) (/sim/[a-z]+)", PAGE))
    assert told == known
    assert {urlsplit(path).path for path in re.findall(r"8100(/sim/\S*)", PAGE)} <= known


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", PAGE))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / "docs" / target).exists()


def test_others_lead_here() -> None:
    assert "(docs/simulated-engines.md)" in (ROOT / "README.md").read_text()
    assert "(simulated-engines.md)" in (ROOT / "docs" / "real-engines.md").read_text()
