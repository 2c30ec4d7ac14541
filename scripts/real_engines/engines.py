"""Starts and stops real vLLM engines on loopback, each in a session of its own, known by pid.

    python -m scripts.real_engines.engines start prefill:8100 decode:8200 [--fixed-engine-id]
        [--kv-load-failure-policy fail|recompute] [--max-model-len N] [--run DIR]
    python -m scripts.real_engines.engines status | stop [NAME ...]

An engine is named after its role and its number (`prefill-0`, `decode-1`); port 0 takes a free one. The run directory
holds NAME.json (ports, pid, start time), NAME.log, and `fleet.yaml` for Narwhal. The role is what Narwhal is told: all
engines run with `kv_role: kv_both`, so that each can produce and consume. Only the standard library is needed here.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".real-engines"
RUN = HOME / "run"
HOST = "127.0.0.1"
MODEL = "tiny"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0
PORTS_FROM = 20_000
# Engines that this process started, by pid, for `stop` to collect; other processes know them by their records alone.
_children: dict[int, subprocess.Popen[bytes]] = {}
_given: set[int] = set()  # ports, whether or not somebody listens there yet


class EngineError(Exception):
    """An engine did not come up, or its environment is missing."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all engines of one start share. Lengths are in tokens. `tools`: chats may name some, to be called."""

    fixed_engine_id: bool = False
    kv_load_failure_policy: str = "fail"
    max_model_len: int = 2048
    block_size: int = 32
    kv_cache_gib: int = 1
    kv_blocks: int | None = None
    max_num_seqs: int = 64
    niceness: int = 10
    tools: bool = False


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A started engine; `started_ticks` tells its process from a later one with the same pid."""

    name: str
    role: str
    port: int
    kv_port: int
    pid: int
    started_ticks: int
    log: str

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def free_port() -> int:
    """A port that nobody has, for whoever listens at it again after a restart.

    None of those that the kernel gives to outgoing connections: one of them may have it by then, and an engine that
    cannot bind its side channel hangs and is never healthy.
    """
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(PORTS_FROM, first_of_kernel), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            if port not in _given:
                _given.add(port)
                return port
    raise EngineError(f"no free port from {PORTS_FROM} to {first_of_kernel}")


def start_ticks(pid: int) -> int | None:
    """The kernel's start time of a process, or None when it is gone or only its exit status is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def alive(engine: Engine) -> bool:
    return start_ticks(engine.pid) == engine.started_ticks


def environment(settings: Settings, kv_port: int) -> dict[str, str]:
    """The engine's environment: offline, one computing thread, KV transfer over loopback TCP and shared memory."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "UCX_"))},
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_HOST_IP": HOST,
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,shm,self",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv_port),
    }


def command(name: str, port: int, settings: Settings) -> list[str]:
    transfer: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": settings.kv_load_failure_policy,
    }
    if settings.fixed_engine_id:
        transfer["engine_id"] = name
    words = [str(HOME / "venv/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", "model", "--served-model-name", MODEL, "--host", HOST, "--port", str(port)]
    words += ["--dtype", "float32", "--max-model-len", str(settings.max_model_len), "--enforce-eager"]
    words += ["--block-size", str(settings.block_size), "--max-num-seqs", str(settings.max_num_seqs)]
    if settings.kv_blocks is not None:
        words += ["--num-gpu-blocks-override", str(settings.kv_blocks)]
    if settings.tools:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", "pythonic"]
        words += ["--chat-template", str(Path(__file__).with_name("with_tools.jinja"))]
    return [*words, "--kv-transfer-config", json.dumps(transfer)]


def prepare() -> None:
    """Makes the model where it is missing; says what to run where the environment is."""
    if not (HOME / "installed").exists():
        raise EngineError("no environment: run python -m scripts.real_engines.install first (2.7 GB)")
    if not (HOME / "model/model.safetensors").exists():
        script = Path(__file__).with_name("make_model.py")
        subprocess.run([str(HOME / "venv/bin/python"), str(script)], check=True, stdout=subprocess.DEVNULL)


def launch(name: str, role: str, port: int, *, settings: Settings, run: Path = RUN, kv_port: int = 0) -> Engine:
    """Starts one engine and returns at once; it serves only when `wait_ready` says so."""
    prepare()
    run.mkdir(parents=True, exist_ok=True)
    port, kv_port = port or free_port(), kv_port or free_port()
    log = run / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["nice", "-n", str(settings.niceness), *command(name, port, settings)],
            env=environment(settings, kv_port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=HOME,
        )
    # Where the kernel groups tasks by session, niceness counts only inside one: the group has its own.
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(str(settings.niceness))
    _children[process.pid] = process
    ticks = start_ticks(process.pid)
    if ticks is None:
        raise EngineError(f"{name} ended at once; see {log}")
    engine = Engine(
        name=name, role=role, port=port, kv_port=kv_port, pid=process.pid, started_ticks=ticks, log=str(log)
    )
    (run / f"{name}.json").write_text(json.dumps(asdict(engine), indent=1) + "\n")
    return engine


def healthy(engine: Engine) -> bool:
    connection = http.client.HTTPConnection(HOST, engine.port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_ready(engines: Iterable[Engine], timeout_s: float = START_TIMEOUT_S) -> float:
    """Returns the seconds until every engine answered health 200; raises EngineError when one ends or is too slow."""
    began = time.monotonic()
    waiting = list(engines)
    while waiting:
        waiting = [engine for engine in waiting if not healthy(engine)]
        for engine in waiting:
            if not alive(engine):
                raise EngineError(f"{engine.name} ended while starting; see {engine.log}")
            if time.monotonic() - began > timeout_s:
                raise EngineError(f"{engine.name} was not ready after {timeout_s:.0f} s; see {engine.log}")
        if waiting:
            time.sleep(0.25)
    return time.monotonic() - began


def running(run: Path = RUN) -> list[Engine]:
    """The engines whose records lie in the run directory, alive or not."""
    return [Engine(**json.loads(path.read_text())) for path in sorted(run.glob("*.json"))]


def group_lives(leader: int) -> bool:
    """Whether any process of the engine's group is left, other than ones that have ended and await collection."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader and fields[0] != "Z":
                return True
    return False


def signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def stop(engine: Engine, run: Path = RUN, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Ends the engine and every process of its group: asked first, then killed. Returns when none is left."""
    leader_is_ours = alive(engine) or start_ticks(engine.pid) is None
    if leader_is_ours and group_lives(engine.pid):
        signal_group(engine.pid, signal.SIGCONT)
        if alive(engine):
            os.kill(engine.pid, signal.SIGTERM)
        due = time.monotonic() + timeout_s
        while group_lives(engine.pid) and time.monotonic() < due:
            time.sleep(0.1)
        while group_lives(engine.pid):
            signal_group(engine.pid, signal.SIGKILL)
            time.sleep(0.1)
    child = _children.pop(engine.pid, None)
    if child is not None:
        child.wait()
    (run / f"{engine.name}.json").unlink(missing_ok=True)


def fleet_file(engines: Sequence[Engine], path: Path) -> None:
    """Writes the least fleet file that serves these engines (JSON is YAML)."""
    listed = [{"id": engine.name, "url": engine.url, "role": engine.role} for engine in engines]
    document = {
        "name": "real-engines",
        "model": MODEL,
        "engines": listed,
        "store": {"path": str(path.parent / "state")},
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def start(wanted: Sequence[tuple[str, int]], *, settings: Settings, run: Path = RUN) -> tuple[list[Engine], float]:
    """Starts one engine for each (role, port) and waits for all; returns them and the seconds it took."""
    engines: list[Engine] = []
    numbers: dict[str, int] = {}
    try:
        for role, port in wanted:
            number = numbers[role] = numbers.get(role, -1) + 1
            engines.append(launch(f"{role}-{number}", role, port, settings=settings, run=run))
        seconds = wait_ready(engines)
    except BaseException:
        for engine in engines:
            stop(engine, run)
        raise
    fleet_file(engines, run / "fleet.yaml")
    return engines, seconds


def parse_wanted(text: str) -> tuple[str, int]:
    role, _, port = text.partition(":")
    if role not in {"prefill", "decode"} or not (port or "0").isdigit():
        raise argparse.ArgumentTypeError(f"wanted prefill[:PORT] or decode[:PORT], got {text!r}")
    return role, int(port or 0)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description="Real vLLM engines on the CPU.")
    commands = top.add_subparsers(dest="command", required=True)
    begin = commands.add_parser("start", help="start engines and wait until all are ready")
    begin.add_argument("engines", nargs="+", type=parse_wanted, metavar="ROLE:PORT")
    begin.add_argument("--fixed-engine-id", action="store_true", help="the engine's name as its KV identity")
    begin.add_argument("--kv-load-failure-policy", choices=["fail", "recompute"], default="fail")
    begin.add_argument("--max-model-len", type=int, default=2048, metavar="TOKENS")
    end = commands.add_parser("stop", help="end engines by their recorded pids")
    end.add_argument("names", nargs="*")
    show = commands.add_parser("status", help="which engines run, and whether they answer")
    for one in (begin, end, show):
        one.add_argument("--run", type=Path, default=RUN, help="directory of pids and logs")
    return top


def main() -> None:
    given = parser().parse_args()
    run: Path = given.run
    if given.command == "start":
        settings = Settings(
            fixed_engine_id=given.fixed_engine_id,
            kv_load_failure_policy=given.kv_load_failure_policy,
            max_model_len=given.max_model_len,
        )
        # Asked to end while starting, it ends what it has started.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("engines: asked to end"))
        try:
            engines, seconds = start(given.engines, settings=settings, run=run)
        except EngineError as error:
            sys.exit(f"engines: {error}")
        for engine in engines:
            print(f"{engine.name}  {engine.url}  pid {engine.pid}")
        print(f"ready after {seconds:.0f} s; fleet file {run / 'fleet.yaml'}")
        return
    for engine in running(run):
        if given.command == "status":
            state = "ready" if healthy(engine) else "not ready" if alive(engine) else "gone"
            print(f"{engine.name}  {engine.url}  pid {engine.pid}  {state}")
        elif not given.names or engine.name in given.names:
            stop(engine, run)
            print(f"stopped {engine.name}")


if __name__ == "__main__":
    main()
