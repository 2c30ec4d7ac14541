"""docs/attestation.md and the unit of examples/ say what narwhal-attest does."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from narwhal.attest.app import main
from narwhal.attest.contract import Contract, load_contract
from narwhal.attest.endpoints import DOCUMENT, SidecarCollector
from narwhal.attest.sidecar import Sidecar
from narwhal.attest.standing import CODES
from narwhal.config import parse_fleet
from narwhal.control.core.events import ProcessIdentity

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "attestation.md").read_text(encoding="utf-8")
UNIT = (ROOT / "examples" / "narwhal-attest.service").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)[::-1])  # the first of each language


def test_the_document_is_that_of_the_contract(tmp_path: Path) -> None:
    path = tmp_path / "contract.yaml"
    path.write_text(BLOCKS["yaml"])
    contract = load_contract(path)
    shown = json.loads(BLOCKS["json"])
    assert shown.pop("process").keys() == {"version", "started_at"}
    assert shown == {**contract.fields, "digest": contract.digest}


def test_the_fleet_file_is_one_and_asks_for_what_the_contract_has() -> None:
    _, fleet_text = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    decode = (
        '  - {id: d, role: decode, url: "http://10.0.0.2:8200", attestation_url: "http://10.0.0.2:7402/attestation"}'
    )
    fleet = parse_fleet(f"name: f\nmodel: m\n{fleet_text}{decode}\n", {})
    assert str(fleet.engines[0].attestation_url).endswith(DOCUMENT)
    wanted = fleet.engine_contract
    assert wanted is not None
    contract = yaml.safe_load(BLOCKS["yaml"])
    assert wanted["image"] == contract["image"]
    assert set(wanted["flags"].items()) <= set(contract["flags"].items())


def test_every_flag_and_every_code_is_there_and_no_other() -> None:
    flags = {option for parameter in main.params for option in parameter.opts} - {"--version"}
    assert set(re.findall(r"^\| `(--[a-z-]+)", PAGE, flags=re.MULTILINE)) == flags
    assert set(re.findall(r"^\| `(\w+)` \| (?:the|another)", PAGE, flags=re.MULTILINE)) == set(CODES.values())


def test_every_metric_is_there_and_no_other() -> None:
    sidecar = Sidecar("http://h:1", Contract(fields={}, digest=""), timeout_s=1, interval_s=1)
    sidecar.standing.saw(ProcessIdentity(version="1", started_at=2.0))
    registry = CollectorRegistry()
    registry.register(SidecarCollector(sidecar))
    given = set(re.findall(r"^(narwhal_\w+)", generate_latest(registry).decode(), flags=re.MULTILINE))
    assert set(re.findall(r"`(narwhal_attest_\w+)", PAGE)) == given


@pytest.mark.parametrize("text", [UNIT, PAGE], ids=["unit", "page"])
def test_its_command_parses(text: str) -> None:
    found = re.search(r"^(?:ExecStart=\S*/)?narwhal-attest (--.*)$", text, flags=re.MULTILINE)
    assert found is not None
    context = main.make_context("narwhal-attest", shlex.split(found[1]))
    assert context.params["http"] == ("0.0.0.0", 7402)
