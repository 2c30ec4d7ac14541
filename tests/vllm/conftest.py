"""Two real engines and the real `narwhal-serve` in front of them, once for the whole run (`make test-vllm`).

Plain `make test` does not come here: `norecursedirs` in pyproject.toml names this directory, because the environment
takes 2.7 GB and the engines a minute or two to start. See docs/real-engines.md.
"""

import http.client
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.real_engines import engines
from scripts.real_engines.rawhttp import Request, send

READY_TIMEOUT_S = 240.0
# Below the recorder's: here the engines are what is tested, not what others should be spared.
SETTINGS = engines.Settings(niceness=5)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The running whole; `url` is the proxy's, `control` the control service's."""

    url: str
    control: str
    prefill: engines.Engine
    decode: engines.Engine
    log: Path


def wait_until(true: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Waits for an outcome; returns the seconds it took."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > timeout_s:
            pytest.fail(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.1)
    return time.monotonic() - began


def status(url: str, path: str) -> int | None:
    return send(url, Request(method="GET", path=path), timeout_s=5.0).status


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples whose labels include these."""
    text = send(url, Request(method="GET", path="/metrics"), timeout_s=10.0).body.decode()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    total = 0.0
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.split("{")[0] == name and all(label in head for label in wanted):
            total += float(value)
    return total


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[engines.Engine, engines.Engine, Path]]:
    """A prefill and a decode engine, fresh: they have never shaken hands."""
    run = tmp_path_factory.mktemp("engines")
    started, seconds = engines.start([("prefill", 0), ("decode", 0)], settings=SETTINGS, run=run)
    print(f"real engines ready after {seconds:.0f} s", file=sys.stderr)
    try:
        yield started[0], started[1], run
    finally:
        for engine in engines.running(run):
            engines.stop(engine, run)


@pytest.fixture(scope="session")
def stack(pair: tuple[engines.Engine, engines.Engine, Path]) -> Iterator[Stack]:
    """`narwhal-serve` on the pair, ready; ended by SIGTERM, which must be clean."""
    prefill, decode, run = pair
    http_port, grpc_port, control_port, admin_port = (engines.free_port() for _ in range(4))
    log = run / "narwhal.log"
    words = [str(Path(sys.executable).with_name("narwhal-serve")), "--fleet", str(run / "fleet.yaml")]
    words += ["--http", f"127.0.0.1:{http_port}", "--grpc", f"127.0.0.1:{grpc_port}"]
    words += ["--control-http", f"127.0.0.1:{control_port}", "--admin", f"127.0.0.1:{admin_port}"]
    words += ["--log-format", "json"]
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{http_port}"

    def ready() -> bool:
        if process.poll() is not None:
            pytest.fail(f"narwhal-serve ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        return status(url, "/ready") == http.client.OK

    try:
        # The gate makes the engines' first transfer, with its handshake, before either is placed.
        wait_until(ready, f"/ready of the proxy, see {log}", READY_TIMEOUT_S)
        yield Stack(url=url, control=f"http://127.0.0.1:{control_port}", prefill=prefill, decode=decode, log=log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            engines.signal_group(process.pid, signal.SIGKILL)
            process.wait(10)
