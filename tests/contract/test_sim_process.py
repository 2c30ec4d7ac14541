"""`narwhal-sim` as a program: its flags, its readiness, and what real signals and real deaths do."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import pytest

from narwhal.sim import faults
from narwhal.sim.testing import sim_process
from narwhal.sim.text import expected_text
from tests.ports import free_ports
from tests.sim.legs import COMPLETIONS, LONG, decode, prefill, prompt
from tests.sim.raw import Answer, ask, refused

FAST = (
    "--tpot-ms",
    "2",
    "--prefill-base-ms",
    "1",
    "--first-pull-s",
    "0.001",
    "--core-death-s",
    "0.2",
    "--shutdown-s",
    "0.5",
)


async def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a `narwhal-sim` that ends by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "narwhal.sim.app",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def started_stream(url: str) -> tuple[asyncio.Event, asyncio.Task[Answer]]:
    """A long stream that has begun to give tokens."""
    begun = asyncio.Event()

    def watch(answer: Answer) -> bool:
        if answer.body.count(b"data: ") >= 2:
            begun.set()
        return False

    body = prompt(max_tokens=9000, stream=True)
    task = asyncio.create_task(ask(url, "POST", COMPLETIONS, body, enough=watch, timeout_s=60))
    await asyncio.wait_for(begun.wait(), 60)
    return begun, task


async def test_sigterm_ends_streams_with_error_and_marker_and_exits_0() -> None:
    async with sim_process("--port", "0", "--id", "prefill-0", *FAST) as sim:
        assert list(sim.urls) == ["prefill-0"]
        state = (await ask(sim.url, "GET", "/sim/state")).json
        assert (state["id"], state["pid"]) == ("prefill-0", sim.pid)
        _, stream = await started_stream(sim.url)
        sim.signal(signal.SIGTERM)
        answer = await stream
        assert (answer.end, answer.events[-1], answer.error is not None) == ("complete", "[DONE]", True)
        assert await sim.wait() == 0
        await refused(sim.url)


async def test_sigkill_cuts_the_chunked_body() -> None:
    async with sim_process("--port", "0", *FAST) as sim:
        _, stream = await started_stream(sim.url)
        sim.signal(signal.SIGKILL)
        answer = await stream
        assert answer.end in ("cut", "reset")
        assert "[DONE]" not in answer.events
        await refused(sim.url)


async def test_sigstop_takes_connections_and_answers_nothing_until_continued() -> None:
    async with sim_process("--port", "0", *FAST) as sim:
        sim.signal(signal.SIGSTOP)
        assert (await ask(sim.url, "GET", "/health", timeout_s=0.4)).end == "silent"
        sim.signal(signal.SIGCONT)
        assert (await ask(sim.url, "GET", "/health", timeout_s=60)).status == 200


async def test_a_producer_process_stopped_and_killed_while_another_pulls() -> None:
    async with (
        sim_process("--port", "0", "--id", "p", *FAST) as producer,
        sim_process("--port", "0", "--id", "d", *FAST) as consumer,
    ):
        first = await prefill(producer.url, prompt("first"))
        assert (await decode(consumer.url, prompt("first"), first)).text == expected_text("first", 12)
        handoff = await prefill(producer.url, prompt())
        doomed = await prefill(producer.url, prompt("doomed"))
        producer.signal(signal.SIGSTOP)
        leg = asyncio.create_task(decode(consumer.url, prompt(stream=True), handoff, timeout_s=60))
        local = await ask(consumer.url, "POST", COMPLETIONS, prompt("local"), timeout_s=60)
        assert local.text == expected_text("local", 12)
        assert not leg.done()
        producer.signal(signal.SIGCONT)
        assert (await leg).text == expected_text(LONG, 12)
        ledger = (await ask(producer.url, "GET", "/sim/ledger")).json
        assert [entry["pulled"] for entry in ledger["handoffs"]] == [1, 1, 0]
        assert ledger["totals"]["late_pulls"] == ledger["totals"]["double_pulls"] == 0
        producer.signal(signal.SIGKILL)
        await producer.wait()
        answer = await decode(consumer.url, prompt("doomed", stream=True), doomed)
        assert (answer.status, answer.events[-1], answer.error is not None) == (200, "[DONE]", True)
        assert (await ask(consumer.url, "GET", "/health")).status == 200


async def test_a_bad_handoff_ends_the_process() -> None:
    async with sim_process("--port", "0", *FAST) as sim:
        answer = await decode(sim.url, prompt(), {"do_remote_prefill": True})
        assert answer.status == 500
        assert await sim.wait() == 1
        await refused(sim.url)


@pytest.mark.parametrize(("mode", "code"), [("killed", -signal.SIGKILL), ("core-killed", 1), ("terminated", 0)])
async def test_faults_that_end_the_process(mode: str, code: int) -> None:
    async with sim_process("--port", "0", *FAST) as sim:
        assert (await ask(sim.url, "POST", "/sim/fault", {"mode": mode})).status == 200
        assert await sim.wait() == code


async def test_engines_of_one_process_die_alone() -> None:
    async with sim_process("--engine", "a=0", "--engine", "b=0", "--fault", "b:status=503", *FAST) as sim:
        assert list(sim.urls) == ["a", "b"]
        handoff = await prefill(sim.urls["a"], prompt())
        assert (await decode(sim.urls["b"], prompt(), handoff)).status == 503
        await ask(sim.urls["b"], "DELETE", "/sim/fault")
        assert (await decode(sim.urls["b"], prompt(), handoff)).text == expected_text(LONG, 12)
        killed = await ask(sim.urls["a"], "POST", "/sim/fault", {"mode": "killed", "engine": "b"})
        assert killed.json["state"]["life"] == "down"
        await refused(sim.urls["b"])
        engines = (await ask(sim.urls["a"], "GET", "/sim/engines")).json
        assert [(engine["id"], engine["life"]) for engine in engines] == [("a", "running"), ("b", "down")]
        await ask(sim.urls["a"], "POST", "/sim/fault", {"mode": "restart", "engine": "b"})
        async with asyncio.timeout(30):
            while (await ask(sim.urls["b"], "GET", "/health")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        sim.signal(signal.SIGTERM)
        assert await sim.wait() == 0


async def test_a_fleet_file_gives_every_engine_its_address_and_model(tmp_path: Path) -> None:
    free = free_ports(2)
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        f"""
name: demo
model: tiny
engine: {{api_key: secret}}
engines:
  - {{id: prefill-0, url: "http://127.0.0.1:{free[0]}", role: prefill}}
  - {{id: decode-0, url: "http://127.0.0.1:{free[1]}", role: decode}}
"""
    )
    async with sim_process("--fleet", str(fleet), *FAST) as sim:
        assert sim.urls == {"prefill-0": f"http://127.0.0.1:{free[0]}", "decode-0": f"http://127.0.0.1:{free[1]}"}
        assert (await ask(sim.url, "GET", "/v1/models")).status == 401
        models = await ask(sim.url, "GET", "/v1/models", headers={"Authorization": "Bearer secret"})
        assert models.json["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of --port, --engine and --fleet"),
        (("--port", "0", "--engine", "a=0"), "give one of --port, --engine and --fleet"),
        (("--engine", "a"), "--engine: expected ID=PORT, got 'a'"),
        (("--engine", "a=0", "--engine", "a=0"), "two engines have the same id"),
        (("--port", "0", "--jitter", "2"), "jitter: must be at least 0 and below 1"),
        (("--port", "0", "--fault", "nonsense"), "no fault is named 'nonsense'"),
        (("--port", "0", "--fault", "other:hang"), "no engine 'other'"),
        (("--fleet", "/nowhere/fleet.yaml"), "cannot be read"),
    ],
)
async def test_usage_errors_are_one_clear_line_and_exit_2(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = await run(*arguments)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


async def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        code, out, err = await run("--port", str(sock.getsockname()[1]))
    assert (code, out) == (1, "")
    assert "Address already in use" in err
    assert "Traceback" not in err


async def test_the_faults_are_listed_one_a_line() -> None:
    code, out, _ = await run("faults")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(faults.ROWS)
    code, out, _ = await run("faults", "--format", "markdown")
    assert out.count("\n| `") == len(faults.ROWS)
