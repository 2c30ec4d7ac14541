"""Processes die, stop, drain and come back, under load: nothing hangs, and what was acknowledged is not forgotten."""

import asyncio
import os
import signal

import aiohttp
import pytest

from narwhal._pb import fleet_pb2
from tests.process.harness import MODEL, Load, Program, Stage, load, until
from tests.signals import send


async def totals_are(stage: Stage, control: str, seen: Load) -> fleet_pb2.RequestTotals:
    """Wait until control has counted what the clients saw, and no more."""

    async def counted() -> fleet_pb2.RequestTotals | None:
        totals = (await stage.status(control)).totals
        known = totals.served + totals.failed + totals.rejected + totals.cancelled
        return totals if known >= len(seen.statuses) else None

    totals: fleet_pb2.RequestTotals = await until(counted, f"{len(seen.statuses)} requests are counted")
    return totals


async def more(seen: Load, count: int, what: str) -> None:
    """Wait until so many more requests have been served."""
    target = seen.served + count
    await until(lambda: seen.served >= target, what)


def worker_pids(program: Program) -> dict[str, int]:
    """Newest worker process by slot."""
    return {e["proxy"].rpartition("/")[2]: e["pid"] for e in program.events("worker started")}


@pytest.mark.rule("S2", "S6", "P7")
async def test_control_is_killed_under_load_and_resumed_and_totals_equal_what_clients_saw(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    serve = await stage.serve("--workers", "2")
    async with load(serve.at["http"]) as seen:
        await until(lambda: seen.served >= 30, "load runs")
        for _ in range(2):
            epoch = (await stage.status(serve.at["grpc"])).epoch
            started = [e for e in serve.events("started") if e["program"] == "narwhal-control"]
            os.kill(started[-1]["pid"], signal.SIGKILL)
            await more(seen, 30, "requests go on without control")

            async def back(epoch: int = epoch) -> bool:
                return (await stage.status(serve.at["grpc"])).epoch > epoch

            await until(back, "a new control leads")
            await more(seen, 30, "requests go on with it")
    assert set(seen.statuses) == {200}
    totals = await totals_are(stage, serve.at["grpc"], seen)
    assert (totals.served, totals.failed, totals.rejected, totals.cancelled) == (len(seen.statuses), 0, 0, 0)
    status = await stage.status(serve.at["grpc"])
    assert sum(e.outcomes["handoff"] for e in status.engines) == len(seen.statuses)
    assert [list(e.phases) for e in status.engines if not e.phases] == []
    serve.signal(signal.SIGTERM)
    assert await serve.ended() == 0
    assert serve.session() == []


@pytest.mark.rule("P6", "S6")
async def test_a_worker_is_killed_under_load_and_only_what_it_had_not_told_is_lost(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"], "--workers", "2", "--id", "edge")
    await stage.ready(proxy.at["admin"])
    async with load(proxy.at["http"]) as seen:
        await until(lambda: seen.served >= 30, "load runs")
        victim = worker_pids(proxy)["0"]
        os.kill(victim, signal.SIGKILL)
        await until(lambda: worker_pids(proxy)["0"] != victim, "another worker takes the slot")
        await more(seen, 60, "requests go on")
    assert set(seen.statuses) <= {200, 0}
    assert seen.statuses.count(0) <= 6  # at most one running request a client broke

    async def retired() -> bool:
        known = await stage.proxies(control.at["grpc"])
        return len(known) == 2 and all(p.connected for p in known) and victim not in {p.pid for p in known}

    await until(retired, "control knows the two that live and no other")

    async def settled() -> int:
        _, text = await stage.get(proxy.at["admin"], "/metrics")
        waiting = next(line for line in text.splitlines() if line.startswith("narwhal_outcomes_unacknowledged{"))
        return float(waiting.rsplit(" ", 1)[1]) == 0.0

    await until(settled, "the living have told everything")
    totals = (await stage.status(control.at["grpc"])).totals
    # A second's worth of successes waits in a worker, with what runs.
    assert seen.served - seen.served // 2 <= totals.served <= seen.served


@pytest.mark.rule("S6", "V8")
async def test_an_engine_is_killed_under_load_and_every_request_ends(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines("p1", "p2", "d1")
    victim = await stage.engines("d2", tpot_ms=5)
    serve = await stage.serve()
    async with load(serve.at["http"]) as seen:
        await until(lambda: seen.served >= 30, "load runs")
        victim.signal(signal.SIGKILL)
        before = len(seen.statuses)
        await until(lambda: len(seen.statuses) >= before + 60, "requests go on")
    assert set(seen.statuses) <= {200, 502}
    totals = await totals_are(stage, serve.at["grpc"], seen)
    assert (totals.served, totals.failed) == (seen.served, seen.statuses.count(502))


async def test_a_stopped_worker_holds_up_no_connection_that_another_could_take(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"], "--workers", "2")
    await until(lambda: len(worker_pids(proxy)) == 2, "two workers")
    await stage.ready(proxy.at["admin"])

    async def both() -> bool:
        return sum(p.acked_version > 0 for p in await stage.proxies(control.at["grpc"])) == 2

    await until(both, "both have a placement")
    stopped = worker_pids(proxy)["0"]
    send(stopped, signal.SIGSTOP)
    try:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
        for _ in range(3):  # waves of connections that are all new
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                answers = [group.create_task(fresh(proxy.at["http"], body)) for _ in range(40)]
            assert [answer.result() for answer in answers] == [200] * 40
        async with asyncio.timeout(60):
            status, _ = await stage.get(proxy.at["admin"], "/ready")
            assert status == 200
            _, text = await stage.get(proxy.at["admin"], "/metrics")
        line = next(line for line in text.splitlines() if line.startswith('narwhal_requests_total{code="200"'))
        assert float(line.rsplit(" ", 1)[1]) == 120
    finally:
        os.kill(stopped, signal.SIGCONT)
    proxy.signal(signal.SIGTERM)
    assert await proxy.ended() == 0


async def fresh(address: str, body: dict[str, object]) -> int:
    """The status of one request on a connection of its own."""
    url = f"http://{address}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        await answer.read()
        return answer.status


async def streams(address: str, count: int, max_tokens: int) -> list[asyncio.Task[bytes]]:
    """So many streams, each past its first token; the tasks give each stream's bytes."""
    begun = asyncio.Semaphore(0)

    async def one(number: int) -> bytes:
        body = {"model": MODEL, "prompt": f"stream {number}", "max_tokens": max_tokens, "stream": True}
        timeout = aiohttp.ClientTimeout(total=120)
        url = f"http://{address}/v1/completions"
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=body) as answer:
            assert answer.status == 200
            data = await answer.content.readany()
            begun.release()
            return data + await answer.content.read()

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    async with asyncio.timeout(90):
        for _ in tasks:
            await begun.acquire()
    return tasks


@pytest.mark.case("F21")
async def test_sigterm_lets_twenty_streams_finish_within_the_grace(stage: Stage) -> None:
    stage.write_fleet(serving={"graceful_timeout_s": 100})
    await stage.engines(tpot_ms=25)
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"], "--workers", "2")
    await stage.ready(proxy.at["admin"])
    running = await streams(proxy.at["http"], 20, 200)
    proxy.signal(signal.SIGTERM)

    async def draining() -> bool:
        status, body = await stage.get(proxy.at["http"], "/ready")
        return status == 503 and '"reason":"draining"' in body

    await until(draining, "the proxy says that it drains")
    assert (await stage.get(proxy.at["http"], "/health"))[0] == 200
    status, body = await stage.get(proxy.at["admin"], "/ready")
    assert (status, "draining" in body) == (503, True)
    assert proxy.process.poll() is None
    ended = await asyncio.gather(*running)
    assert all(data.rstrip().endswith(b"data: [DONE]") for data in ended)
    assert await proxy.ended() == 0
    totals = (await stage.status(control.at["grpc"])).totals
    assert (totals.served, totals.failed) == (20, 0)


@pytest.mark.case("F21")
@pytest.mark.rule("V8")
async def test_streams_beyond_the_grace_get_an_error_event(stage: Stage) -> None:
    stage.write_fleet(serving={"graceful_timeout_s": 1})
    await stage.engines(tpot_ms=50)
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"])
    await stage.ready(proxy.at["admin"])
    running = await streams(proxy.at["http"], 20, 2000)
    proxy.signal(signal.SIGTERM)
    ended = await asyncio.gather(*running)
    for data in ended:
        assert b"[DONE]" not in data
        assert data.rstrip().rpartition(b"\n")[2].startswith(b'data: {"error"')
    assert await proxy.ended() == 0


@pytest.mark.rule("V8")
async def test_a_second_sigterm_cuts_what_still_runs(stage: Stage) -> None:
    stage.write_fleet(serving={"graceful_timeout_s": 3600})
    await stage.engines(tpot_ms=50)
    serve = await stage.serve()
    running = await streams(serve.at["http"], 5, 5000)
    serve.signal(signal.SIGTERM)

    async def draining() -> bool:
        return "draining" in (await stage.get(serve.at["admin"], "/ready"))[1]

    await until(draining, "the first one is heeded: two that come at once are one")
    assert not any(task.done() for task in running)
    serve.signal(signal.SIGTERM)
    ended = await asyncio.gather(*running)
    assert all(b'data: {"error"' in data and b"[DONE]" not in data for data in ended)
    assert await serve.ended() == 0
    assert serve.session() == []


async def test_workers_end_when_their_supervisor_is_killed(stage: Stage) -> None:
    stage.write_fleet()
    proxy = await stage.proxy("--fleet", str(stage.fleet_file), "--control", "127.0.0.1:1", "--workers", "2")
    await until(lambda: len(proxy.session()) == 3, "a supervisor and two workers")
    proxy.signal(signal.SIGKILL)
    await until(lambda: proxy.session() == [], "nothing of it is left")


async def test_everything_ends_when_narwhal_serve_is_killed(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    serve = await stage.serve()
    assert len(serve.session()) == 4
    serve.signal(signal.SIGKILL)
    await until(lambda: serve.session() == [], "nothing of it is left")


@pytest.mark.case("B4", "K2")
@pytest.mark.rule("S2", "R8")
async def test_a_reload_under_load_adds_and_removes_engines_without_a_client_error(stage: Stage) -> None:
    stage.write_fleet("p1", "p2", "d1", "d2")
    await stage.engines("p1", "p2", "d1", "d2", "d3")
    serve = await stage.serve("--workers", "2")
    good = stage.fleet_file.read_text()

    async def decode_engines() -> set[str]:
        return {e.id for e in (await stage.status(serve.at["grpc"])).engines if e.phases and e.id.startswith("d")}

    async with load(serve.at["http"], clients=4) as seen:
        await until(lambda: seen.served >= 40, "load runs")
        stage.write_fleet("p1", "p2", "d2", "d3")
        serve.signal(signal.SIGHUP)

        async def moved() -> bool:
            return await decode_engines() == {"d2", "d3"}

        await until(moved, "d3 serves and d1 is gone")
        await stage.caught_up(serve.at["grpc"])
        await more(seen, 60, "requests go on")
        # A truncated file changes nothing and says so.
        stage.fleet_file.write_text(good[: len(good) // 2])
        serve.signal(signal.SIGHUP)

        def refused() -> bool:
            words = [e["event"] for e in serve.events()]
            return any(w.startswith("the fleet file is not applied") for w in words)

        await until(refused, "the broken file is refused")
        assert await decode_engines() == {"d2", "d3"}
        await more(seen, 30, "requests go on")
    assert set(seen.statuses) == {200}
    _, proxy_metrics = await stage.get(serve.at["admin"], "/metrics")
    _, control_metrics = await stage.get(serve.at["control_http"], "/metrics")
    for text in (proxy_metrics, control_metrics):
        assert 'engine="d3"' in text
        assert 'engine="d1"' not in text
    assert "d1" not in {e.id for e in (await stage.status(serve.at["grpc"])).engines}
