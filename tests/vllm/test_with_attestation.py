"""`narwhal-attest` beside real engines, and its place in their gate."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from scripts.real_engines import engines
from scripts.real_engines.bench import COMPLETIONS, MODEL
from scripts.real_engines.rawhttp import Request, send
from tests.vllm.stack import BIN, Stack, post, prompt, status, wait_until

CONTRACT = {"weights": "tiny@0", "flags": {"block_size": 32, "kv_connector": "NixlConnector"}}


@contextmanager
def sidecar(stack: Stack, name: str, port: int, fields: Any = CONTRACT) -> Iterator[str]:
    """A sidecar beside an engine, at this port; ends cleanly. Its address."""
    beside = stack.run / "attest"  # the run directory itself holds the engines' records
    beside.mkdir(exist_ok=True)
    path = beside / f"{name}.contract.json"
    path.write_text(json.dumps(fields))
    url = f"http://127.0.0.1:{port}"
    words = ["--engine", stack.engines[name].url, "--contract", str(path), "--http", f"127.0.0.1:{port}"]
    with (beside / f"{name}.log").open("ab") as output:
        process = subprocess.Popen([str(BIN / "narwhal-attest"), *words], stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: status(url, "/health") == 200, f"the sidecar of {name} answers", 30)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def document(url: str) -> tuple[int | None, Any]:
    answer = send(url, Request(method="GET", path="/attestation"), timeout_s=10)
    return answer.status, json.loads(answer.body)


@pytest.mark.rule("R7", "R8", "R1")
def test_an_engine_that_was_restarted_needs_somebody_to_vouch_for_it(healed: Stack) -> None:
    ports = {name: engines.free_port() for name in healed.engines}
    before = healed.incarnation("decode-1")
    with ExitStack() as sidecars:
        urls = {
            name: sidecars.enter_context(sidecar(healed, name, ports[name]))
            for name in healed.engines
            if name != "decode-1"
        }
        answered, found = document(urls["prefill-0"])
        assert answered == 200
        assert found.pop("digest").startswith("sha256:")
        assert found.pop("process")["version"] == "0.32.0"
        assert found == CONTRACT
        with sidecar(healed, "decode-1", ports["decode-1"]) as url:
            of_each = {name: {"attestation_url": f"http://127.0.0.1:{ports[name]}/attestation"} for name in ports}
            healed.write_fleet(of_each, engine_contract=CONTRACT)
            assert document(url)[0] == 200
            healed.relaunch("decode-1")
            words = healed.wait_explained("decode-1", "check attestation: fail")
            assert "answered 503: the engine's process has changed, restart narwhal-attest beside the new one" in words
            assert document(url)[1]["error"]["code"] == "process_changed"
            # Healthy, and out: others serve.
            assert engines.healthy(healed.engines["decode-1"])
            body = {"model": MODEL, "prompt": prompt("unattested"), "max_tokens": 4}
            assert post(healed.url, COMPLETIONS, body).status == 200
        wrong = {**CONTRACT, "flags": {"block_size": 16, "kv_connector": "NixlConnector"}}
        with sidecar(healed, "decode-1", ports["decode-1"], wrong):
            words = healed.wait_explained("decode-1", "does not match the contract")
            assert "flags.block_size is 16, asked for is 32" in words
        with sidecar(healed, "decode-1", ports["decode-1"]):
            healed.wait_back("decode-1", before)
            assert "check attestation: pass: matches the contract" in healed.explain("decode-1")
    healed.write_fleet()
