"""examples/haproxy.cfg under a real HAProxy: it asks only whom /ready names, and clients notice nothing."""

import asyncio
import contextlib
import json
import signal
import subprocess
from pathlib import Path

import aiohttp
import pytest

from tests.ports import free_ports
from tests.process.harness import Load, Program, Stage, ctl, load, until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "haproxy.cfg"
HAPROXY = "/usr/sbin/haproxy"


def test_the_example_is_well_formed() -> None:
    done = subprocess.run([HAPROXY, "-c", "-f", str(EXAMPLE)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def balancer(stage: Stage, addresses: dict[str, str]) -> Program:
    """HAProxy with the example's own text, but for the addresses."""
    text = EXAMPLE.read_text()
    for known, used in addresses.items():
        assert known in text
        text = text.replace(known, used)
    file = stage.directory / "haproxy.cfg"
    file.write_text(text)
    return stage.run("haproxy", "-db", "-f", str(file), command=[HAPROXY])


def doors(grpc: str, http: str, known: str) -> dict[str, str]:
    """The addresses of a control process, which the example names by its host."""
    check = "proto h2 check check-proto h1 port"
    return {
        f"{known}:7400 {check} 7401": f"{grpc} {check} {http.rpartition(':')[2]}",
        f"{known}:7401": http,
    }


@pytest.mark.rule("M9", "M10")
@pytest.mark.case("F21")
async def test_clients_and_operators_behind_haproxy_reach_whoever_is_ready(stage: Stage) -> None:
    stage.write_fleet("p1", "d1", recovery={"ramp_s": 0})
    await stage.engines("p1", "d1")
    clients, operators, pages, *ports = (f"127.0.0.1:{port}" for port in free_ports(7))
    at = {"a": (ports[0], ports[1]), "b": (ports[2], ports[3])}
    control = {}
    for name, (grpc, http) in at.items():
        control[name] = await stage.control("--grpc", grpc, "--http", http, "--id", name, "--resume")
        await stage.ready(at["a"][1])  # it leads before the other one asks for the lease
    everybody = ",".join(grpc for grpc, _ in at.values())
    blind, first, second = await asyncio.gather(
        stage.proxy("--control", "127.0.0.1:1"),  # without placement, for ever
        *(stage.proxy("--control", everybody, "--http", stage.address()) for _ in range(2)),
    )
    for proxy in (first, second):
        await stage.ready(proxy.at["http"])
    addresses = {"127.0.0.1:8080": clients, "127.0.0.1:7500": operators, "127.0.0.1:7501": pages}
    addresses["10.0.0.21:8000"] = first.at["http"]
    addresses["10.0.0.22:8000 check"] = f"{second.at['http']} check\n    server proxy-2 {blind.at['http']} check"
    haproxy = balancer(stage, addresses | doors(*at["a"], "10.0.0.11") | doors(*at["b"], "10.0.0.12"))

    async def leads() -> str:
        haproxy.must_live()
        with contextlib.suppress(aiohttp.ClientError):
            status, body = await stage.get(pages, "/ready")
            return str(json.loads(body)["holder"]) if status == 200 else ""
        return ""

    async def b_leads() -> bool:
        return await leads() == "b"

    async def more(seen: Load) -> None:
        served = seen.served
        await until(lambda: seen.served >= served + 30, lambda: f"load goes on\n{haproxy.tail()}")

    said: list[str] = []

    async def operators_reach(name: str) -> bool:
        # HAProxy checks the processes for operators apart from those for pages: it may know of the one later.
        code, out, err = await ctl(operators, "status")
        said[:] = [out + err]
        return (code, f"{name} at {operators}, active" in out) == (0, True)

    async def used(proxy: Program) -> bool:
        _, page = await stage.get(proxy.at["admin"], "/metrics")
        return 'narwhal_requests_total{code="200"' in page

    assert await until(leads, haproxy.tail) == "a"
    await stage.ready(clients)
    async with load(clients, max_tokens=40) as seen:
        await more(seen)  # none of it through the one without placement
        await until(lambda: operators_reach("a"), lambda: said[0])
        control["a"].signal(signal.SIGTERM)
        await until(b_leads, haproxy.tail)
        await until(lambda: operators_reach("b"), lambda: said[0])
        first.signal(signal.SIGTERM)
        assert await first.ended() == 0
        await more(seen)
        again = await stage.proxy("--control", everybody, "--http", first.at["http"])
        await stage.ready(again.at["http"])
        await until(lambda: used(again), haproxy.tail)
        second.kill_all()  # whoever had no answer yet gets one all the same
        await more(seen)
    assert set(seen.statuses) == {200}, seen.broken
