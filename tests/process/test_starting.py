"""How the programs start, and what they say when they cannot: one clear line and the right exit status."""

import json
import signal
import socket
from collections.abc import Iterator

import aiohttp
import pytest

from tests.process.harness import MODEL, Program, Stage, until


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield f"127.0.0.1:{other.getsockname()[1]}"


async def refused(program: Program) -> tuple[int, list[str]]:
    """(exit status, what it said) of a program that cannot start, without what it logs on the way."""
    status = await program.ended()
    lines = [line for line in program.log.read_text().splitlines() if not line.startswith(("{", "20"))]
    return status, lines


@pytest.mark.parametrize(
    ("name", "flags", "what"),
    [
        ("narwhal-control", ["--grpc", "TAKEN", "--http", "127.0.0.1:0"], "gRPC"),
        ("narwhal-control", ["--http", "TAKEN", "--grpc", "127.0.0.1:0"], "HTTP"),
        ("narwhal-proxy", ["--http", "TAKEN", "--admin", "127.0.0.1:0"], "HTTP"),
        ("narwhal-proxy", ["--admin", "TAKEN", "--http", "127.0.0.1:0"], "admin"),
        *[
            ("narwhal-serve", [flag, "TAKEN", *rest], flag.removeprefix("--").replace("-", "_"))
            for flag, rest in [
                ("--http", ["--admin", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-http", "127.0.0.1:0"]),
                ("--admin", ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-http", "127.0.0.1:0"]),
                ("--grpc", ["--http", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--control-http", "127.0.0.1:0"]),
                ("--control-http", ["--http", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]),
            ]
        ],
    ],
)
async def test_a_port_in_use_is_one_line_and_status_1(
    stage: Stage, taken: str, name: str, flags: list[str], what: str
) -> None:
    fleet = stage.write_fleet()
    program = stage.run(name, "--fleet", str(fleet), *[flag.replace("TAKEN", taken) for flag in flags])
    assert await refused(program) == (1, [f"{name}: cannot listen on {taken} ({what}): address already in use"])
    assert program.session() == []


@pytest.mark.parametrize("name", ["narwhal-control", "narwhal-proxy", "narwhal-serve"])
async def test_a_bad_fleet_file_is_status_2_with_every_problem_on_a_line(stage: Stage, name: str) -> None:
    fleet = stage.write_fleet(recovery={"eject_after": 0}, serving={"max_attempts": 9, "tea": 1})
    status, lines = await refused(stage.run(name, "--fleet", str(fleet)))
    assert status == 2
    assert sorted(line.partition(": ")[2].partition(":")[0] for line in lines) == [
        "recovery.eject_after",
        "serving.max_attempts",
        "serving.tea",
    ]
    assert f"{fleet}: recovery.eject_after: must be at least 1, got 0" in lines


@pytest.mark.parametrize("name", ["narwhal-control", "narwhal-proxy", "narwhal-serve"])
async def test_a_fleet_file_that_is_not_there_is_status_2(stage: Stage, name: str) -> None:
    status, lines = await refused(stage.run(name, "--fleet", "nowhere.yaml"))
    assert (status, lines) == (2, ["nowhere.yaml: file: cannot be read: No such file or directory"])


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("narwhal-proxy", [], "one of --fleet and --control is needed"),
        ("narwhal-proxy", ["--control", "here"], "must be HOST:PORT, got 'here'"),
        ("narwhal-proxy", ["--control", "h:1,h:99999"], "must be HOST:PORT, got 'h:99999'"),
        ("narwhal-proxy", ["--control", "h:1", "--workers", "0"], "0 is not in the range"),
        ("narwhal-serve", [], "Missing option '--fleet'"),
        ("narwhal-serve", ["--fleet", "f", "--http", "8000"], "must be HOST:PORT, got '8000'"),
        ("narwhal-control", ["--fleet", "f", "--teapot"], "No such option"),
    ],
)
async def test_a_usage_error_is_status_2(stage: Stage, name: str, flags: list[str], words: str) -> None:
    status, lines = await refused(stage.run(name, *flags))
    assert status == 2
    assert words in lines[-1]


async def test_a_store_that_cannot_be_opened_ends_narwhal_serve_and_all_it_started(stage: Stage) -> None:
    (stage.directory / "run").write_text("in the way")
    fleet = stage.write_fleet()
    flags = [f for name in ("--http", "--admin", "--grpc", "--control-http") for f in (name, "127.0.0.1:0")]
    program = stage.run("narwhal-serve", "--fleet", str(fleet), *flags)
    status, lines = await refused(program)
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith("narwhal-control: ")
    assert program.session() == []


@pytest.mark.rule("S2")
@pytest.mark.parametrize("flags", [[], ["--workers", "2"]])
async def test_a_saved_handoff_that_cannot_be_applied_ends_narwhal_serve_with_status_2(
    stage: Stage, flags: list[str]
) -> None:
    """Control answers /health before it has read the handoff: whether that was seen in time must not matter."""
    (stage.directory / "run").mkdir()
    (stage.directory / "run" / "handoff.json").write_text('{"schema": "tea"}')
    fleet = stage.write_fleet()
    ports = [f for name in ("--http", "--admin", "--grpc", "--control-http") for f in (name, "127.0.0.1:0")]
    program = stage.run("narwhal-serve", "--fleet", str(fleet), "--resume", *ports, *flags)
    words = "the saved handoff cannot be applied: unknown schema 'tea', this release reads 'narwhal.handoff'"
    status, lines = await refused(program)
    assert (status, lines) == (2, [f"narwhal-control: {words}"])
    assert program.session() == []


@pytest.mark.rule("M10")
@pytest.mark.case("I17")
@pytest.mark.parametrize("with_file", [True, False], ids=["fleet file", "control only"])
async def test_a_proxy_without_control_lives_and_says_why_it_is_not_ready(stage: Stage, with_file: bool) -> None:
    stage.write_fleet()
    source = ["--fleet", str(stage.fleet_file)] if with_file else []
    proxy = await stage.proxy(*source, "--control", "127.0.0.1:1")
    for address in (proxy.at["http"], proxy.at["admin"]):
        assert (await stage.get(address, "/health"))[0] == 200
        status, body = await stage.get(address, "/ready")
        assert (status, json.loads(body)["reason"]) == (503, "no placement")
    url = f"http://{proxy.at['http']}/v1/completions"
    body_of = {"model": MODEL, "prompt": "x"}
    async with aiohttp.ClientSession() as session, session.post(url, json=body_of) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        error = (await answer.json())["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", "no placement")
    proxy.signal(signal.SIGTERM)
    assert await proxy.ended() == 0


async def test_a_proxy_that_knows_only_control_serves_as_soon_as_control_is_there(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    address = stage.address()
    control = await stage.control("--grpc", address)
    control.signal(signal.SIGTERM)
    assert await control.ended() == 0
    proxy = await stage.proxy("--control", address)
    assert (await stage.get(proxy.at["http"], "/ready"))[0] == 503
    await stage.control("--grpc", address)
    await stage.ready(proxy.at["http"])
    assert json.loads((await stage.get(proxy.at["http"], "/v1/models"))[1])["data"][0]["id"] == MODEL


@pytest.mark.rule("P7", "M10")
async def test_placement_is_served_until_it_is_stale_and_again_when_control_is_back(stage: Stage) -> None:
    stage.write_fleet(proxy={"placement_max_age_s": 3})
    await stage.engines()
    control = await stage.control("--grpc", stage.address())
    proxy = await stage.proxy("--control", control.at["grpc"])
    await stage.ready(proxy.at["admin"])
    control.signal(signal.SIGKILL)
    await control.ended()
    url = f"http://{proxy.at['http']}/v1/completions"
    reasons: list[str] = []
    served = 0

    async def stale() -> bool:
        nonlocal served
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            if answer.status == 200:
                served += 1
                return False
            reasons.append((await answer.json())["error"]["code"])
            return True

    await until(stale, "the placement grows stale")
    assert served
    assert reasons == ["placement stale"]
    assert json.loads((await stage.get(proxy.at["admin"], "/ready"))[1])["reason"] == "placement stale"
    await stage.control("--grpc", control.at["grpc"], "--resume")
    await stage.ready(proxy.at["admin"])


@pytest.mark.case("K2")
async def test_a_key_that_a_reload_removes_returns_to_its_default_in_the_workers(stage: Stage) -> None:
    stage.write_fleet(serving={"max_request_bytes": 200})
    await stage.engines()
    serve = await stage.serve()
    url = f"http://{serve.at['http']}/v1/completions"

    async def status() -> int:
        body = {"model": MODEL, "prompt": "long " * 100, "max_tokens": 2}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            return answer.status

    assert await status() == 413
    stage.write_fleet()
    serve.signal(signal.SIGHUP)

    async def default_rules() -> bool:
        return await status() == 200

    await until(default_rules, "the default rules again")


@pytest.mark.case("K2")
async def test_a_proxy_rereads_its_own_file_and_refuses_a_broken_one(stage: Stage) -> None:
    stage.write_fleet()
    proxy = await stage.proxy("--fleet", str(stage.fleet_file), "--control", "127.0.0.1:1")
    assert json.loads((await stage.get(proxy.at["http"], "/v1/models"))[1])["data"][0]["id"] == MODEL
    stage.fleet_file.write_text(stage.fleet_file.read_text()[:60])
    proxy.signal(signal.SIGHUP)
    await until(lambda: proxy.events("the fleet file is not applied"), "the broken file is refused")
    stage.write_fleet(model="another")
    proxy.signal(signal.SIGHUP)

    async def renamed() -> bool:
        return bool('"another"' in (await stage.get(proxy.at["http"], "/v1/models"))[1])

    await until(renamed, "the worker works by the new file")


async def test_a_second_control_on_the_same_store_stands_by_and_proxies_follow_the_first(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    first = await stage.control("--id", "first")
    await stage.ready(first.at["http"])  # it leads before the other one asks for the lease
    second = await stage.control("--id", "second")
    proxy = await stage.proxy("--control", f"{second.at['grpc']},{first.at['grpc']}")
    await stage.ready(proxy.at["admin"])
    assert [e["control"] for e in proxy.events("following control")] == [first.at["grpc"]]

    async def stands_by() -> bool:
        status, body = await stage.get(second.at["http"], "/ready")
        assert status == 503
        return bool(json.loads(body)["reason"] == "standby")

    await until(stands_by, "the second stands by")
    first.signal(signal.SIGTERM)
    assert await first.ended() == 0

    def follows() -> bool:
        return bool(proxy.events("following control")[-1]["control"] == second.at["grpc"])

    await until(follows, "the proxy follows the second")
    await stage.ready(proxy.at["admin"])
