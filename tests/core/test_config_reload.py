"""What becomes of a fleet file that is read again: each section takes effect, needs a restart, or is refused."""

import pytest

from narwhal.config import FleetConfig, FleetFileError, parse_fleet
from narwhal.config.reload import (
    CONTROL_FIXED,
    CONTROL_REFUSED,
    PROXY_FIXED,
    PROXY_REFUSED,
    refuse_reload,
    restart_words,
)
from narwhal.control.plan import make_plan

ENGINES = """\
engines:
- {id: p, url: "http://h:1", role: prefill}
- {id: d, url: "http://h:2", role: decode}
"""


def fleet(extra: str = "", *, name: str = "f", model: str = "m") -> FleetConfig:
    return parse_fleet(f"name: {name}\nmodel: {model}\n{ENGINES}{extra}", {})


# A key of every section, another than its default.
CHANGES = {
    "engine_contract": 'engine_contract: {image: "x"}',
    "slo": "slo: {ttft_s: 9}",
    "store": "store: {path: elsewhere}",
    "journal": "journal: {max_bytes: 0}",
    "lease": "lease: {ttl_s: 9}",
    "standby": "standby: {takeover_after: 9}",
    "controller": "controller: {min_prefill: 1, mode: auto}",
    "serving": "serving: {max_attempts: 2}",
    "engine": "engine: {health_timeout_s: 9}",
    "recovery": "recovery: {eject_after: 9}",
    "proxy": "proxy: {placement_max_age_s: 9}",
    "tls": "tls: {ca: a, cert: b, key: c}",
}
FIXED = {"store", "journal", "lease", "tls"}


@pytest.mark.case("K2")
@pytest.mark.parametrize("section", sorted(set(CHANGES) - {"engine_contract"}))
def test_each_section_takes_effect_or_is_named(section: str) -> None:
    running, read = fleet(), fleet(CHANGES[section])
    refuse_reload(running, read, CONTROL_REFUSED)
    assert (make_plan(running) == make_plan(read)) == (section in FIXED)
    words = f"; what differs in {section} from the start needs a restart" if section in FIXED else ""
    assert restart_words(running, read, CONTROL_FIXED) == words
    assert restart_words(running, read, PROXY_FIXED) == (words if section == "tls" else "")


def test_no_section_is_forgotten() -> None:
    """`auth` has nothing in this release; whatever else is added must be told apart above."""
    plain = {"schema_", "schema_version", "name", "model", "engines", "auth"}
    assert set(FleetConfig.model_fields) == set(CHANGES) | plain


def test_all_that_needs_a_restart_is_named() -> None:
    read = fleet(f"{CHANGES['tls']}\n{CHANGES['lease']}\n")
    assert restart_words(fleet(), read, CONTROL_FIXED) == "; what differs in lease, tls from the start needs a restart"


def test_another_fleet_or_another_model_is_refused() -> None:
    with pytest.raises(FleetFileError) as refused:
        refuse_reload(fleet(), fleet(name="g", model="n"), CONTROL_REFUSED)
    name, model = refused.value.problems
    assert name == 'name: cannot change from "f" to "g" while the process runs: that needs a restart'
    assert model.startswith('model: cannot change from "m" to "n" while the process runs: that needs a restart, ')
    assert model.endswith("at which every engine is asked what it serves before it gets requests")
    refuse_reload(fleet(), fleet(model="n"), PROXY_REFUSED)
    with pytest.raises(FleetFileError):
        refuse_reload(fleet(), fleet(name="g"), PROXY_REFUSED)
