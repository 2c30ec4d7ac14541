"""Engines with a fixed KV identity (`engine_id` in `--kv-transfer-config`): a restart is not noticed by their peers.

With the id that vLLM makes at every start none of this happens (`test_when_engines_fail.py`).
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from scripts.real_engines.bench import COMPLETIONS
from tests.vllm.stack import READY_TIMEOUT_S, SETTINGS, Stack, post, status, wait_until
from tests.vllm.test_when_engines_fail import body_of, serves_well


@pytest.fixture(scope="module")
def fixed(three: Stack) -> Iterator[Stack]:
    """All engines with fixed ids, each pinned to its role: one that served both would be refused both ways."""
    before = {name: three.incarnation(name) for name in three.engines}
    three.settings = replace(SETTINGS, fixed_engine_id=True)
    three.relaunch(*three.engines)
    three.write_fleet({name: {"pinned": True} for name in three.engines})
    for name in three.engines:
        three.wait_back(name, before[name], READY_TIMEOUT_S)
    yield three
    three.settings = SETTINGS


@pytest.mark.rule("R2", "R8", "F7")
@pytest.mark.case("B1")
def test_a_prefill_engine_that_comes_back_under_its_old_id_stays_out_until_its_peers_were_restarted(
    fixed: Stack,
) -> None:
    serves_well(fixed, "before")
    old = {name: fixed.incarnation(name) for name in fixed.engines}
    fixed.relaunch("prefill-0")
    words = fixed.wait_explained("prefill-0", "check kv_transfer: fail")
    for peer in ("decode-0", "decode-1"):
        assert f"prefill-0→{peer}" in words, "the pair is named"
    assert "had the same engine id, restart decode-0, decode-1" in words, "what to do is said"
    # Health is green all along, and nobody is let on it.
    assert status(fixed.prefill.url, "/health") == 200
    refused = post(fixed.url, COMPLETIONS, body_of("no prefill"))
    assert (refused.status, refused.header("retry-after")) == (503, "1")
    # Its peers are not to blame, and not held.
    assert {name: fixed.incarnation(name) for name in ("decode-0", "decode-1")} == {
        name: old[name] for name in ("decode-0", "decode-1")
    }
    # One peer is not enough: every permitted direction must work.
    fixed.relaunch("decode-0")
    wait_until(lambda: _only(fixed.ctl("explain", "prefill-0").stdout, "decode-1"), "decode-1 alone is named", 120)
    fixed.explain("prefill-0")
    assert not fixed.serves("prefill-0")
    fixed.relaunch("decode-1")
    fixed.wait_back("prefill-0", old["prefill-0"], READY_TIMEOUT_S)
    fixed.wait_serving(timeout_s=READY_TIMEOUT_S)
    serves_well(fixed, "after")


def _only(words: str, peer: str) -> bool:
    """Whether the transfer check fails for this peer and no other."""
    line = next((line for line in words.splitlines() if line.startswith("check kv_transfer: fail")), "")
    return f"restart {peer} " in line.replace(";", " ").replace("(", " ")
