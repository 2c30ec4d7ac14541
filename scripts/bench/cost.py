#!/usr/bin/env python3
"""What a request and a streamed token cost: CPU of a proxy worker beside a bare two-leg relay, interleaved in one run.

The process that is measured is pinned to one core, engines and client to another; its CPU time is read from /proc.
Needs this clone and its environment, nothing else. About two minutes; `--rounds` and `--seconds` make it shorter.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
WARM_UP_S = 1.0
STOP_S = 5.0
CONNECTIONS = 32
STREAMS = 64
TOKENS = 256
TARGETS = {"relay": "relay.py", "proxy": "worker.py"}
# What is aimed at, as a multiple of the relay.
AIMS = {"request": 1.5, "token": 1.25}


def cores() -> tuple[int, int]:
    """(for what is measured, for the rest); the same one where there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(script: str, core: int, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A script of this folder on one core, and its first line of output; ended afterwards."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1], close_fds=False)
    os.sched_setaffinity(process.pid, {core})
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{script} ended with {process.wait()} before it was ready")
        yield process, line
    finally:
        process.terminate()
        process.wait(STOP_S)
        if process.stdout is not None:
            process.stdout.close()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def load(port: int, core: int, seconds: float, tokens: int, connections: int = CONNECTIONS) -> tuple[int, int]:
    """Run the client: (requests, tokens) that ended well. Ends the program when one did not."""
    arguments = (port, STREAMS if tokens else connections, seconds, tokens)
    with running("client.py", core, *arguments) as (_, line):
        good, bad, came = (int(word) for word in line.split())
    if bad or not good:
        raise SystemExit(f"{bad} of {good + bad} requests failed")
    return good, came


def measure(pid: int, port: int, core: int, seconds: float, tokens: int) -> float:
    """CPU microseconds per request, or per token of streams."""
    before = cpu_s(pid)
    requests, came = load(port, core, seconds, tokens)
    spent = cpu_s(pid) - before
    return spent * 1e6 / (came if tokens else requests)


def table(results: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """The results for people."""
    names = list(next(iter(results.values())))
    yield f"{'CPU µs':<10}" + "".join(f"{name:>28}" for name in names) + f"{'proxy / relay':>24}"
    for kind, by_target in results.items():
        cells = "".join(f"{spread(by_target[name]):>28}" for name in names)
        ratios = [a / b for a, b in zip(by_target["proxy"], by_target["relay"], strict=True)]
        yield f"{'per ' + kind:<10}{cells}{spread(ratios, 2):>24}   aim {AIMS[kind]}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> int:
    """Measure and print; exit 1 when an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one measurement (default 4)")
    options = parser.parse_args()
    measured, rest = cores()
    os.sched_setaffinity(0, {rest})
    results: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in TARGETS} for kind in AIMS}
    with ExitStack() as stack:
        _, ports = stack.enter_context(running("engines.py", rest, 0.005))
        targets = {}
        for name, script in TARGETS.items():
            port = free_port()
            process, _ = stack.enter_context(running(script, measured, port, *ports.split()))
            targets[name] = (process.pid, port)
            for tokens in (0, TOKENS):
                load(port, rest, WARM_UP_S * (2 if tokens else 1), tokens)
        for _ in range(options.rounds):
            for kind, tokens in (("request", 0), ("token", TOKENS)):
                for name, (pid, port) in targets.items():
                    results[kind][name].append(measure(pid, port, rest, options.seconds, tokens))
    print(*table(results), sep="\n")
    missed = [
        kind
        for kind, by_target in results.items()
        if statistics.median(by_target["proxy"]) > AIMS[kind] * statistics.median(by_target["relay"])
    ]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
