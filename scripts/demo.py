"""`make demo`: a fleet on this machine, a completion, a failure and a recovery, told as they happen.

Starts four simulated engines (two read prompts, two write answers), `narwhal-serve` in front of them, and the official
OpenAI client as the user. Everything listens on loopback, on free ports, and ends with the demo.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import openai

BIN = Path(sys.executable).parent
MODEL = "demo-model"
ENGINES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
VICTIM = "decode-1"
PROMPT = "Why do people split prompt reading from answer writing?"


def say(text: str = "") -> None:
    """A line of the story."""
    bold = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold[0]}{text}{bold[1]}" if text else "", flush=True)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def until(what: str, answer: Callable[[], bool], limit_s: float = 30.0) -> float:
    """Waits for `answer`; the seconds it took. Ends the demo when it never comes."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if answer():
            return time.monotonic() - began
        time.sleep(0.05)
    raise SystemExit(f"demo: gave up waiting for {what} after {limit_s:.0f} s; logs are kept, see above")


class Demo:
    """The processes, and how to reach them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        *engine_ports, self.http, self.admin, self.grpc, self.control_http = free_ports(len(ENGINES) + 4)
        self.ports = dict(zip(ENGINES, engine_ports, strict=True))
        self.fleet = folder / "fleet.yaml"
        self.fleet.write_text(self.fleet_file())
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.http}/v1", api_key="none", max_retries=0)

    def fleet_file(self) -> str:
        """The whole configuration: who serves what, and where state is kept."""
        engines = "\n".join(
            f"  - {{id: {name}, role: {role}, url: 'http://127.0.0.1:{self.ports[name]}'}}"
            for name, role in ENGINES.items()
        )
        return (
            f"name: demo\nmodel: {MODEL}\nengines:\n{engines}\n"
            f"store: {{path: '{self.folder / 'run'}'}}\n"
            "recovery: {readmit_every: 3}   # look again after 3 s instead of 10: demos are short\n"
        )

    def start(self, name: str, *command: str) -> None:
        """Starts a program of ours, its output in a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen([BIN / command[0], *command[1:]], stdout=log, stderr=log)

    def start_engine(self, name: str) -> None:
        """Starts one simulated engine: 5 ms a token of prompt, 30 ms a token of answer."""
        port = str(self.ports[name])
        timing = ["--prefill-ms-per-token", "5", "--tpot-ms", "30"]
        self.start(name, "narwhal-sim", "--port", port, "--id", name, "--model", MODEL, *timing)

    def start_narwhal(self) -> None:
        """Starts the control service and one proxy on this machine."""
        listen = {"--http": self.http, "--admin": self.admin, "--grpc": self.grpc, "--control-http": self.control_http}
        flags = [word for flag, port in listen.items() for word in (flag, f"127.0.0.1:{port}")]
        self.start("narwhal-serve", "narwhal-serve", "--fleet", str(self.fleet), *flags)

    def ready(self) -> bool:
        """What a load balancer asks."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def ctl(self, *words: str) -> str:
        """Output of narwhalctl."""
        done = subprocess.run(
            [BIN / "narwhalctl", "--control", f"127.0.0.1:{self.grpc}", *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return done.stdout + done.stderr

    def show(self, *words: str) -> None:
        """Runs narwhalctl before the reader's eyes."""
        print(f"$ narwhalctl {' '.join(words)}")
        print(self.ctl(*words).rstrip(), flush=True)

    def serving(self, engine: str) -> bool:
        """Whether the control plane places work on an engine."""
        try:
            status = json.loads(self.ctl("-o", "json", "engines"))
        except ValueError:
            return False
        found = status["engines"] if isinstance(status, dict) else status
        return any(e["id"] == engine and e["phases"] for e in found)

    def stop(self) -> None:
        """Ends everything, by process id."""
        for name in ["narwhal-serve", *ENGINES]:
            process = self.running.get(name)
            if process is not None and process.poll() is None:
                process.terminate()
        for process in self.running.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


class Load:
    """A few users who ask again and again; what became of their requests."""

    def __init__(self, demo: Demo, users: int = 4) -> None:
        self.demo = demo
        self.results: Counter[str] = Counter()
        self.done = threading.Event()
        self.threads = [threading.Thread(target=self.user, daemon=True) for _ in range(users)]
        for thread in self.threads:
            thread.start()

    def user(self) -> None:
        """One request after the other."""
        while not self.done.is_set():
            try:
                stream = self.demo.client.completions.create(
                    model=MODEL, prompt=PROMPT, max_tokens=12, stream=True, timeout=20
                )
                for _ in stream:
                    pass
                self.results["answered in full"] += 1
            except openai.APIStatusError as error:
                self.results[f"refused with HTTP {error.status_code}"] += 1
            except openai.APIError:
                self.results["told mid-answer that it broke"] += 1

    def take(self) -> str:
        """What happened since the last look."""
        results, self.results = self.results, Counter()
        return ", ".join(f"{n} {what}" for what, n in results.most_common()) or "no request ended"

    def stop(self) -> None:
        """No further requests."""
        self.done.set()
        for thread in self.threads:
            thread.join(timeout=20)


def story(demo: Demo) -> None:
    """The demo itself."""
    say("1. Four simulated engines start: prefill-0 and -1 read prompts, decode-0 and -1 write answers.")
    for name in ENGINES:
        demo.start_engine(name)
    demo.start_narwhal()
    took = until("the fleet to become ready", demo.ready)
    print(f"narwhal-serve checked every engine and is ready after {took:.1f} s.")

    say("2. A chat completion through the official OpenAI client, token by token:")
    answer = demo.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": PROMPT}], max_tokens=40, stream=True
    )
    for chunk in answer:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    say("3. What an operator sees:")
    demo.show("status")

    say(f"4. Under a little load, {VICTIM} is killed (kill -9).")
    load = Load(demo)
    try:
        until("some answers", lambda: load.results["answered in full"] >= 4)
        load.take()
        os.kill(demo.running[VICTIM].pid, signal.SIGKILL)
        demo.running[VICTIM].wait()
        took = until(f"{VICTIM} to be taken out", lambda: not demo.serving(VICTIM))
        print(f"Out of placement after {took:.1f} s. Requests since the kill: {load.take()}.")
        until("answers without it", lambda: load.results["answered in full"] >= 8)
        print(f"Afterwards: {load.take()}.")
        demo.show("status")

        say(f"5. {VICTIM} starts again; it returns by itself once it has proven that it works.")
        demo.start_engine(VICTIM)
        took = until(f"{VICTIM} to return", lambda: demo.serving(VICTIM), limit_s=40)
        print(f"Back in placement after {took:.1f} s. Requests meanwhile: {load.take()}.")
    finally:
        load.stop()
    demo.show("events")
    say("That was the demo. README.md says how to run Narwhal in front of your own engines.")


def main() -> None:
    """Entry point."""
    folder = Path(tempfile.mkdtemp(prefix="narwhal-demo-"))
    demo = Demo(folder)
    try:
        story(demo)
    except BaseException:
        print(f"logs: {folder}", file=sys.stderr)
        raise
    else:
        demo.stop()
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        folder.rmdir()
    finally:
        demo.stop()


if __name__ == "__main__":
    main()
