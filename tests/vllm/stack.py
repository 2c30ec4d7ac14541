"""The running whole that these tests speak to, and what they do to it."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.real_engines import engines
from scripts.real_engines.rawhttp import Exchange, Request, send
from scripts.real_engines.record import core

READY_TIMEOUT_S = 240.0
BACK_S = 120.0  # an engine's way back: a liveness sweep, its gate, a first transfer, all on two busy cores
# Below the recorder's: here the engines are what is tested, not what others should be spared.
SETTINGS = engines.Settings(niceness=5, tools=True)
SENTENCE = "The narwhal dives under the ice and comes back with a fish. "
BIN = Path(sys.executable).parent


def prompt(name: str) -> str:
    """Several KV blocks long, and different for each test from the first block on: no cache can answer it."""
    return f"{name}: {SENTENCE * 4}"


def messages(name: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": prompt(name)}, {"role": "user", "content": "Where does it breathe?"}]


def post(url: str, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Exchange:
    return send(url, Request(method="POST", path=path, body=body), timeout_s=timeout_s)


def wait_until(true: Callable[[], Any], what: str | Callable[[], str], timeout_s: float) -> float:
    """Waits for an outcome; returns the seconds it took."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > timeout_s:
            pytest.fail(f"not within {timeout_s:.0f} s: {what if isinstance(what, str) else what()}")
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


def text_of(answer: Exchange) -> str:
    """The text of an answer that was 200 and whole."""
    assert answer.status == 200, answer.body
    choice = json.loads(answer.body)["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def streamed_text(exchange: Exchange) -> str:
    """The text of a stream that ended well; fails on an error event or a missing end."""
    *events, last = exchange.events()
    assert last == "[DONE]"
    assert exchange.end == "complete"
    parts = []
    for event in map(json.loads, events):
        assert "error" not in event, event
        for choice in event["choices"]:
            parts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(parts)


class Stack:
    """`narwhal-serve` before real engines. `url` is the proxy's; `control` and `grpc` are the control service's."""

    def __init__(self, run: Path, started: dict[str, engines.Engine]) -> None:
        self.run = run
        self.engines = started
        self.settings = SETTINGS
        self.log = run / "narwhal.log"
        self.fleet_file = run / "fleet.yaml"
        http_port, grpc_port, control_port, admin_port = (engines.free_port() for _ in range(4))
        self.url = f"http://127.0.0.1:{http_port}"
        self.control = f"http://127.0.0.1:{control_port}"
        self.admin = f"http://127.0.0.1:{admin_port}"
        self.grpc = f"127.0.0.1:{grpc_port}"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def prefill(self) -> engines.Engine:
        return self.engines["prefill-0"]

    @property
    def decode(self) -> engines.Engine:
        return self.engines["decode-0"]

    # --- narwhal ------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Starts it and waits until clients are served: the engines' first transfer is the gate's."""
        words = [str(BIN / "narwhal-serve"), "--fleet", str(self.fleet_file)]
        for flag, url in (("--http", self.url), ("--control-http", self.control), ("--admin", self.admin)):
            words += [flag, url.removeprefix("http://")]
        words += ["--grpc", self.grpc, "--log-format", "json"]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                pytest.fail(f"narwhal-serve ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            return status(self.url, "/ready") == http.client.OK

        wait_until(ready, f"/ready of the proxy, see {self.log}", READY_TIMEOUT_S)

    def end(self) -> int:
        """Ends it as a service manager does; its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        """Ends whatever is left of it."""
        if self.process is not None and self.process.poll() is None:
            engines.signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    def events(self, words: str = "", kind: str = "") -> list[dict[str, Any]]:
        """What narwhal logged so far."""
        found = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and words in ("", entry.get("event")) and kind in ("", entry.get("kind")):
                    found.append(entry)
        return found

    def worker(self) -> int:
        """The process id of the proxy's worker."""
        return int(self.events("worker started")[-1]["pid"])

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """narwhalctl, run to its end."""
        return subprocess.run(
            [str(BIN / "narwhalctl"), *words, "--control", self.grpc],
            capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def explain(self, engine: str) -> str:
        """What the operator reads; printed too, because docs/vllm.md shows it (`pytest -s`)."""
        words = self.ctl("explain", engine).stdout
        print(f"\n$ narwhalctl explain {engine}\n{words}", file=sys.stderr)
        return words

    def seen(self, engine: str) -> dict[str, Any]:
        """What `narwhalctl engines` says of an engine."""
        listed = json.loads(self.ctl("engines", "-o", "json").stdout)["engines"]
        return next(each for each in listed if each["id"] == engine)

    def incarnation(self, engine: str) -> int:
        return int(self.seen(engine)["incarnation"])

    def holds(self, engine: str) -> set[str]:
        return {hold["kind"] for hold in self.seen(engine)["holds"]}

    def serves(self, engine: str) -> bool:
        """Whether new work may go to it in its own role."""
        return metric(self.control, "narwhal_engine_eligible", engine=engine, phase=self.engines[engine].role) == 1

    def wait_serving(self, *names: str, timeout_s: float = BACK_S) -> float:
        """Until these serve (all, when none is named); the seconds it took."""
        chosen = names or tuple(self.engines)

        def said() -> str:
            return f"{', '.join(chosen)} serve\n" + "\n".join(self.ctl("explain", name).stdout for name in chosen)

        return wait_until(lambda: all(map(self.serves, chosen)), said, timeout_s)

    def wait_back(self, name: str, incarnation: int, timeout_s: float = BACK_S) -> float:
        """Until a new process of it serves, which makes it another incarnation than that; the seconds it took."""

        def back() -> bool:
            return self.seen(name)["incarnation"] > incarnation and self.serves(name)

        return wait_until(back, lambda: f"{name} is back\n{self.ctl('explain', name).stdout}", timeout_s)

    def wait_explained(self, engine: str, words: str, timeout_s: float = BACK_S) -> str:
        """Until `explain` says so; all that it says then."""
        last = ""

        def said() -> bool:
            nonlocal last
            last = self.ctl("explain", engine).stdout
            return words in last

        wait_until(said, lambda: f"explain {engine} says {words!r}\n{last}", timeout_s)
        print(f"\n$ narwhalctl explain {engine}\n{last}", file=sys.stderr)
        return last

    # --- the fleet file -----------------------------------------------------------------------------------------------

    def write_fleet(self, of_each: Mapping[str, Mapping[str, Any]] | None = None, **sections: Any) -> None:
        """The engines, some with more keys, with these sections beside them; read by a narwhal that runs."""
        more = of_each or {}
        listed = [
            {"id": each.name, "url": each.url, "role": each.role, **more.get(each.name, {})}
            for each in self.engines.values()
        ]
        document = json.loads(self.fleet_file.read_text())
        document = {key: document[key] for key in ("name", "model", "store")} | {"engines": listed} | sections
        before = len(self.events(kind="reloaded"))
        replacement = self.fleet_file.with_suffix(".new")
        replacement.write_text(json.dumps(document, indent=1))
        replacement.replace(self.fleet_file)
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGHUP)
            wait_until(lambda: len(self.events(kind="reloaded")) > before, "the fleet file is read again", 30)

    def add(self, name: str, role: str) -> None:
        """One more engine, by a reload; returns when it serves."""
        self.engines[name] = engines.launch(name, role, 0, settings=self.settings, run=self.run)
        engines.wait_ready([self.engines[name]])
        self.write_fleet()
        self.wait_serving(name)

    # --- engines ------------------------------------------------------------------------------------------------------

    def sigkill(self, name: str) -> None:
        """The whole engine, as by the kernel's out-of-memory killer."""
        engine = self.engines[name]
        engines.signal_group(engine.pid, signal.SIGKILL)
        wait_until(lambda: not engines.group_lives(engine.pid), f"{name} is gone", 15)

    def relaunch(self, *names: str) -> float:
        """New processes at the same addresses, of engines that have ended or are ended now; seconds until healthy."""
        began = time.monotonic()
        for name in names:
            old = self.engines[name]
            engines.stop(old, self.run)
            self.engines[name] = engines.launch(
                name, old.role, old.port, kv_port=old.kv_port, settings=self.settings, run=self.run
            )
        engines.wait_ready([self.engines[name] for name in names])
        return time.monotonic() - began

    def heal(self) -> None:
        """Whatever was stopped goes on, whatever has ended is started, and all serve."""
        for engine in self.engines.values():
            engines.signal_group(engine.pid, signal.SIGCONT)
        gone = [name for name, each in self.engines.items() if not (engines.alive(each) and engines.healthy(each))]
        if gone:
            self.relaunch(*gone)
        for name in self.engines:
            if "drain" in self.holds(name):
                self.ctl("undrain", name, "--wait")
        self.wait_serving(timeout_s=READY_TIMEOUT_S)

    def stop_core(self, name: str) -> None:
        """SIGSTOP of the computing process alone: health stays green."""
        os.kill(core(self.engines[name]), signal.SIGSTOP)

    def cont_core(self, name: str) -> None:
        os.kill(core(self.engines[name]), signal.SIGCONT)

    # --- texts --------------------------------------------------------------------------------------------------------

    def alone(self, path: str, body: dict[str, Any]) -> str:
        """The text that the prefill engine gives when it answers by itself."""
        return text_of(post(self.prefill.url, path, body))

    def transfers(self) -> float:
        """KV transfers that decode engines have made."""
        decoding = [each for each in self.engines.values() if each.role == "decode" and engines.alive(each)]
        return sum(metric(each.url, "vllm:nixl_bytes_transferred_count") for each in decoding)
