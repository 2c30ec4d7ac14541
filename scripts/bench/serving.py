"""What a proxy worker costs beside CPU time: memory of an open stream, time added to the first byte, a second worker.

`python -m scripts.bench.serving`, with this clone and its environment and nothing else; about a minute and a half. The
time to the first byte is over going to the decode engine directly, which is one leg instead of two; both as one client
sees it, in turns. Two workers get twice the connections of one.
"""

import argparse
import asyncio
import os
import socket
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from scripts.bench.cost import CONNECTIONS, WARM_UP_S, cores, cpu_s, free_port, load, running

STREAMS = 500
RATE = 100.0
AIMS = {"memory": 40.0, "first byte": 2.0, "second worker": 1.1}
BODY = b'{"model":"bench","prompt":"%b","max_tokens":%d,"stream":true}'
PROMPT = b"the narwhal dives under the ice " * 16


def request(tokens: int) -> bytes:
    """A streamed completion."""
    body = BODY % (PROMPT, tokens)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


def memory_kib(pid: int) -> int:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


async def open_streams(port: int, count: int) -> list[asyncio.StreamWriter]:
    """So many streams, each past its first token."""
    writers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(1_000))
        await reader.readuntil(b"\n\n")
        writers.append(writer)
    return writers


async def per_stream_kib(pid: int, port: int) -> float:
    """KiB of each open stream. A few come before, for what a first request brings along."""
    for writer in await open_streams(port, STREAMS // 50):
        writer.close()
    await asyncio.sleep(WARM_UP_S)
    before = memory_kib(pid)
    writers = await open_streams(port, STREAMS)
    grown = memory_kib(pid) - before
    for writer in writers:
        writer.close()
    return grown / STREAMS


async def first_bytes(port: int, seconds: float) -> list[float]:
    """Seconds from a request to the first byte of its answer's body, `RATE` requests a second, on kept connections."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    took: list[float] = []

    async def one() -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        began = time.perf_counter()
        writer.write(request(2))
        await reader.readuntil(b"data: ")
        took.append(time.perf_counter() - began)
        await reader.readuntil(b"0\r\n\r\n")
        idle.append((reader, writer))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(int(RATE * seconds)):
            await asyncio.sleep(started + number / RATE - time.perf_counter())
            group.create_task(one())
    for _, writer in idle:
        writer.close()
    return took


async def added_ms(proxy: int, engine: int, rounds: int) -> tuple[float, float]:
    """(median, 99th percentile) of milliseconds that the proxy adds."""
    for port in (proxy, engine):
        await first_bytes(port, 1.0)
    through, direct = [], []
    for _ in range(rounds):
        through += await first_bytes(proxy, 2.0)
        direct += await first_bytes(engine, 2.0)
    median = statistics.median(through) - statistics.median(direct)
    tail = statistics.quantiles(through, n=100)[-1] - statistics.quantiles(direct, n=100)[-1]
    return median * 1e3, tail * 1e3


def second_worker(ports: list[str], measured: int, rest: int, rounds: int, seconds: float) -> float:
    """CPU of a request with two workers on one socket, as a multiple of that with one."""
    ratios = []
    with ExitStack() as stack:
        fleets = {}
        for count in (1, 2):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
            listener.setblocking(False)
            os.set_inheritable(listener.fileno(), True)
            target = f"fd:{listener.fileno()}"
            workers = [stack.enter_context(running("worker.py", measured, target, *ports)) for _ in range(count)]
            fleets[count] = (listener.getsockname()[1], [process.pid for process, _ in workers])
            load(fleets[count][0], rest, WARM_UP_S, 0)
        for _ in range(rounds):
            spent = {}
            for count, (port, pids) in fleets.items():
                before = sum(map(cpu_s, pids))
                requests, _ = load(port, rest, seconds, 0, count * CONNECTIONS)
                spent[count] = (sum(map(cpu_s, pids)) - before) / requests
            ratios.append(spent[2] / spent[1])
    return statistics.median(ratios)


def main() -> int:
    """Measure and print; exit 1 when an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a measurement of CPU (default 3)")
    options = parser.parse_args()
    measured, rest = cores()
    os.sched_setaffinity(0, {rest})
    found: dict[str, float] = {}
    with ExitStack() as stack:
        _, slow = stack.enter_context(running("engines.py", rest, 30.0))
        port = free_port()
        process, _ = stack.enter_context(running("worker.py", measured, port, *slow.split()))
        found["memory"] = asyncio.run(per_stream_kib(process.pid, port))
        print(f"memory of an open stream: {found['memory']:.1f} KiB (aim {AIMS['memory']:g}), {STREAMS} open")
    with ExitStack() as stack:
        _, line = stack.enter_context(running("engines.py", rest, 0.005))
        ports = line.split()
        port = free_port()
        stack.enter_context(running("worker.py", measured, port, *ports))
        found["first byte"], tail = asyncio.run(added_ms(port, int(ports[1]), options.rounds))
        print(
            f"added to the first byte at {RATE:g} requests/s: {found['first byte']:.2f} ms at the median "
            f"(aim {AIMS['first byte']:g}), {tail:.2f} ms between the 99th percentiles"
        )
        found["second worker"] = second_worker(ports, measured, rest, options.rounds, options.seconds)
        print(
            f"CPU of a request with two workers over one: {found['second worker']:.2f} "
            f"(aim {AIMS['second worker']:g}), {CONNECTIONS} connections each"
        )
    return 1 if any(found[name] > aim for name, aim in AIMS.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
