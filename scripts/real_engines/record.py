"""Records what real engines answer, situation by situation, into `tests/contract/recorded/VERSION/`.

    python -m scripts.real_engines.record [--only NAME ...] [--list]

Starts a producer and a consumer of its own, runs every situation of situations.py and starts again what a situation
spoiled: about fifteen minutes on two cores. Everything that differs between two recordings without meaning anything
(dates, ports, ids made at random) is replaced by a fixed value, so that a fresh recording shows in a diff only what the
engines now do differently.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.real_engines import engines, ordinary, trouble  # noqa: F401  (they fill the list)
from scripts.real_engines.bench import Bench, Fault, Who
from scripts.real_engines.install import VLLM
from scripts.real_engines.situation import ALL, Situation

RECORDED = Path(__file__).resolve().parents[2] / "tests/contract/recorded"
SIGNALS = {
    Fault.KILL: signal.SIGKILL,
    Fault.FREEZE: signal.SIGSTOP,
    Fault.THAW: signal.SIGCONT,
    Fault.FREEZE_CORE: signal.SIGSTOP,
    Fault.THAW_CORE: signal.SIGCONT,
    Fault.KILL_CORE: signal.SIGKILL,
}
TERMINATIONS = {Fault.TERMINATE, Fault.TERMINATE_ABORTING, Fault.TERMINATE_SILENTLY}
CORE_FAULTS = {Fault.FREEZE_CORE, Fault.THAW_CORE, Fault.KILL_CORE}
TRIES = 8
ROLES = {Who.PRODUCER: "prefill", Who.CONSUMER: "decode"}


class RealBench(Bench):
    """Two real engines, started again as needed on the addresses they had."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run = run
        self.settings = engines.Settings()
        self.engines: dict[Who, engines.Engine] = {}

    def url(self, who: Who) -> str:
        return self.engines[who].url

    def fault(self, who: Who, fault: Fault) -> None:
        engine = self.engines[who]
        if fault in CORE_FAULTS:
            os.kill(core(engine), SIGNALS[fault])
        elif fault in TERMINATIONS:
            os.kill(engine.pid, signal.SIGTERM)
        else:
            engines.signal_group(engine.pid, SIGNALS[fault])
        if fault is Fault.KILL:
            wait_until(lambda: not engines.group_lives(engine.pid))

    def restart(self, who: Who) -> None:
        self.start({who})

    def start(self, missing: set[Who]) -> None:
        """Starts the named engines at once, on their old addresses where they had one; waits for all."""
        for who in missing:
            old = self.engines.get(who)
            if old is not None:
                engines.stop(old, self.run)
            port, kv_port = (old.port, old.kv_port) if old else (0, 0)
            role = ROLES[who]
            self.engines[who] = engines.launch(role, role, port, kv_port=kv_port, settings=self.settings, run=self.run)
        if missing:
            seconds = engines.wait_ready(self.engines[who] for who in missing)
            say(f"{', '.join(sorted(missing))} ready after {seconds:.0f} s")

    def close(self) -> None:
        for engine in self.engines.values():
            engines.stop(engine, self.run)


def core(engine: engines.Engine) -> int:
    """The pid of the engine's computing process, which is a child of the HTTP process and names itself."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(path.parent.name)
            if b"EngineCore" in path.read_bytes() and os.getpgid(pid) == engine.pid:
                return pid
    raise LookupError(f"{engine.name} has no core process")


def wait_until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    due = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > due:
            raise TimeoutError("not so in time")
        time.sleep(0.05)


class Normaliser:
    """Replaces what changes from one recording to the next; the same value always becomes the same word."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def word(self, kind: str, value: str) -> str:
        number = sum(1 for word in self.known.values() if word.startswith(kind))
        return self.known.setdefault(value, f"{kind}-{number}")

    def text(self, text: str) -> str:
        text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", lambda m: self.word("engine-id", m[0]), text)
        text = re.sub(r"(?<=-\d-)[0-9a-f]{8}\b", "00000000", text)
        return re.sub(r"\b(modelperm|chatcmpl|cmpl)-[0-9a-f]{16}\b", r"\1-0000000000000000", text)

    def value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: self.value(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if isinstance(value, str):
            return {"date": "Thu, 01 Jan 1970 00:00:00 GMT", "root": "model"}.get(key) or self.text(value)
        if key == "created":
            return 0
        return 5600 if key == "remote_port" and value is not None else value


def metric_families(text: str) -> dict[str, Any]:
    """The metrics by family: type and label names. The values are not what is held to."""
    families: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            families[name] = {"type": kind, "labels": []}
        elif line and not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            family = next((n for n in (name, re.sub(r"_(bucket|count|sum)$", "", name)) if n in families), name)
            labels = set(families.setdefault(family, {"type": "untyped", "labels": []})["labels"])
            families[family]["labels"] = sorted(labels | set(re.findall(r'[{,](\w+)="', line)))
    return families


def document(one: Situation, steps: list[dict[str, Any]], normal: Normaliser) -> dict[str, Any]:
    for step in steps:
        if step["request"]["path"] == "/metrics" and "text" in step["response"]:
            step["response"]["metrics"] = metric_families(step["response"].pop("text"))
            step["response"]["headers"].pop("content-length", None)
        request_id = step["request"]["headers"].get("X-Request-Id")
        if request_id:
            # Kept as sent: the engine's own ids are made from it.
            normal.known.setdefault(request_id, request_id)
    started = {"connector": "NixlConnector", "engine_id": "fixed" if one.settings.fixed_engine_id else "random"}
    started["kv_load_failure_policy"] = one.settings.kv_load_failure_policy
    return {
        "name": one.name,
        "what": one.what,
        "engine": f"vllm {VLLM}",
        "started": started,
        "steps": normal.value(steps),
    }


def write(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as temporary:
        json.dump(value, temporary, indent=1)
        temporary.write("\n")
    os.chmod(temporary.name, 0o644)
    Path(temporary.name).replace(path)


def say(text: str) -> None:
    print(f"record: {text}", file=sys.stderr, flush=True)


def attempt(bench: RealBench, one: Situation, spoiled: set[Who]) -> None:
    """Runs a situation, again where chance decided for another ending than the wanted one."""
    for _ in range(TRIES):
        bench.start(spoiled)
        began = time.monotonic()
        bench.begin(one.name)
        one.run(bench)
        say(f"{one.name}: {len(bench.steps)} steps in {time.monotonic() - began:.1f} s")
        if one.seen(bench.steps):
            return
        spoiled = set(one.spoils)
    raise TimeoutError(f"did not show in {TRIES} tries")


def record(wanted: list[Situation], run: Path, into: Path) -> list[str]:
    """Runs the situations group by group; returns the names of those that could not be recorded."""
    run.mkdir(parents=True, exist_ok=True)
    lock = (run / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise engines.EngineError(f"another recorder is at work in {run}") from None
    bench = RealBench(run)
    failed = []
    spoiled: set[Who] = set(Who)
    try:
        for one in sorted(wanted, key=lambda s: str(s.settings)):
            if one.settings != bench.settings:
                bench.settings, spoiled = one.settings, set(Who)
            try:
                attempt(bench, one, spoiled)
            except (AssertionError, LookupError, TimeoutError, ValueError) as error:
                failed.append(f"{one.name}: {error}")
                say(f"FAILED {failed[-1]}")
            else:
                write(into / f"{one.name}.json", document(one, bench.steps, Normaliser()))
            dead = {who for who, engine in bench.engines.items() if not engines.healthy(engine)}
            if dead - one.spoils:
                say(f"{one.name} also ended: {', '.join(sorted(dead - one.spoils))}")
            spoiled = dead | set(one.spoils)
    finally:
        bench.close()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the answers of real engines.")
    parser.add_argument(
        "--only", nargs="+", choices=sorted(one.name for one in ALL), metavar="NAME", help="these situations only"
    )
    parser.add_argument("--list", action="store_true", help="name the situations and end")
    parser.add_argument("--into", type=Path, default=RECORDED / f"vllm-{VLLM}", help="directory to write")
    parser.add_argument("--run", type=Path, default=engines.HOME / "record", help="directory of pids and logs")
    given = parser.parse_args()
    if given.list:
        for one in ALL:
            print(f"{one.name}  {one.what}")
        return
    wanted = [one for one in ALL if not given.only or one.name in given.only]
    # Asked to end, the engines are ended first: without this the signal would leave them behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("record: asked to end"))
    try:
        failed = record(wanted, given.run, given.into)
    except engines.EngineError as error:
        sys.exit(f"record: {error}")
    if failed:
        sys.exit("record: not recorded: " + "; ".join(failed))


if __name__ == "__main__":
    main()
