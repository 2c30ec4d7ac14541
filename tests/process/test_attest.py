"""`narwhal-attest` beside simulated engines: what it serves, what it refuses, and what the gate makes of it."""

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports
from tests.process.faults import engine_of, serving
from tests.process.harness import Program, Stage, ctl, until
from tests.process.test_drains import kill

CONTRACT = {"image": "sha256:0f1e", "flags": {"block_size": 16}}
FLEET = ("p1", "d1")
# The engines are swept at once, and what is ejected is tried again at once.
PROMPT = {"liveness_every": 1, "liveness_misses": 1, "readmit_every": 1}


def contract_file(stage: Stage, engine: str, fields: Any) -> Path:
    path = stage.directory / f"{engine}.contract.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


async def attest(stage: Stage, engine: str, *flags: str, fields: Any = CONTRACT) -> Program:
    path = contract_file(stage, engine, fields)
    http = [] if "--http" in flags else ["--http", "127.0.0.1:0"]
    url = f"http://127.0.0.1:{stage.ports[engine]}"
    return await stage.start("narwhal-attest", "--engine", url, "--contract", str(path), *http, *flags)


async def document(stage: Stage, sidecar: Program) -> tuple[int, dict[str, Any]]:
    status, body = await stage.get(sidecar.at["http"], "/attestation")
    return status, json.loads(body)


async def code(stage: Stage, sidecar: Program) -> Any:
    """Why there is no document; empty when there is one."""
    _, body = await document(stage, sidecar)
    return body.get("error", {}).get("code", "")


def attested_fleet(stage: Stage, wanted: dict[str, Any]) -> dict[str, str]:
    """A fleet whose engines name their sidecars; the addresses of those."""
    at = dict(zip(FLEET, (f"127.0.0.1:{port}" for port in free_ports(len(FLEET))), strict=True))
    stage.write_fleet(*FLEET, recovery=PROMPT, engine_contract=wanted)
    fleet = json.loads(stage.fleet_file.read_text())
    for engine in fleet["engines"]:
        engine["attestation_url"] = f"http://{at[engine['id']]}/attestation"
    stage.fleet_file.write_text(json.dumps(fleet))
    return at


# --- the sidecar ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("R7")
async def test_the_document_names_the_process_that_runs(stage: Stage) -> None:
    await stage.engines("p1")
    sidecar = await attest(stage, "p1", fields="# YAML\nimage: sha256:0f1e\nflags: {block_size: 16}\n")
    status, body = await document(stage, sidecar)
    assert status == 200, body
    engine = f"127.0.0.1:{stage.ports['p1']}"
    version = json.loads((await stage.get(engine, "/version"))[1])["version"]
    metrics = (await stage.get(engine, "/metrics"))[1].splitlines()
    started = next(float(line.split()[1]) for line in metrics if line.startswith("process_start_time_seconds"))
    assert body.pop("digest").startswith("sha256:")
    assert body == {**CONTRACT, "process": {"version": version, "started_at": started}}
    assert (await stage.get(sidecar.at["http"], "/ready"))[0] == 200
    assert "narwhal_attest_valid 1.0" in (await stage.get(sidecar.at["http"], "/metrics"))[1]
    sidecar.signal(signal.SIGTERM)
    assert await sidecar.ended() == 0


@pytest.mark.rule("R7")
async def test_a_sidecar_may_start_before_its_engine(stage: Stage) -> None:
    sidecar = await attest(stage, "p1")
    status, body = await document(stage, sidecar)
    assert (status, body["error"]["code"]) == (503, "not_verified")
    assert body["error"]["message"] == "no engine process has been seen yet: GET /version: connection refused"
    assert (await stage.get(sidecar.at["http"], "/health"))[0] == 200
    assert (await stage.get(sidecar.at["http"], "/ready"))[0] == 503
    await stage.engines("p1")
    assert (await document(stage, sidecar))[0] == 200


@pytest.mark.rule("R7")
async def test_a_process_that_cannot_be_asked_is_told_from_one_that_has_changed(stage: Stage) -> None:
    engine = await stage.engines("p1")
    sidecar = await attest(stage, "p1", "--timeout", "2", "--interval", "0.1")
    assert (await document(stage, sidecar))[0] == 200
    engine.signal(signal.SIGSTOP)
    try:
        status, body = await document(stage, sidecar)
        assert (status, body["error"]["code"]) == (503, "not_verified")
        assert body["error"]["message"].endswith("it did not say which process it is within 2 s")
    finally:
        engine.signal(signal.SIGCONT)

    async def holds() -> bool:
        return (await document(stage, sidecar))[0] == 200

    await until(holds, "the same process is attested again")
    await kill(engine)
    assert await code(stage, sidecar) == "not_verified"
    await stage.engines("p1")
    assert await code(stage, sidecar) == "process_changed"
    # It looks by itself too, says each change once, and never takes a refusal back.
    lost = await until(lambda: sidecar.events("the document does not hold"), "the log tells")
    assert [entry["state"] for entry in lost] == ["not_verified", "not_verified", "process_changed"]
    assert "narwhal_attest_valid 0.0" in (await stage.get(sidecar.at["http"], "/metrics"))[1]


async def test_many_who_ask_at_once_share_one_verification(stage: Stage) -> None:
    await stage.engines("p1")
    sidecar = await attest(stage, "p1", "--interval", "3600")
    # The sidecar's own look at its start is one of them.
    await until(lambda: sidecar.events("the document holds"), "it has looked")
    answers = await asyncio.gather(*(document(stage, sidecar) for _ in range(40)))
    assert {status for status, _ in answers} == {200}
    body = (await stage.get(sidecar.at["http"], "/metrics"))[1]
    same = next(
        line for line in body.splitlines() if line.startswith('narwhal_attest_verifications_total{result="same"')
    )
    assert 2 <= float(same.split()[1]) < 40


@pytest.mark.case("K2")
async def test_sighup_reads_the_contract_again_and_a_broken_file_changes_nothing(stage: Stage) -> None:
    await stage.engines("p1")
    sidecar = await attest(stage, "p1")
    contract_file(stage, "p1", '{"image": ')
    sidecar.signal(signal.SIGHUP)
    await until(lambda: sidecar.events("the contract file is not applied"), "the broken file is refused")
    assert (await document(stage, sidecar))[1]["image"] == "sha256:0f1e"
    contract_file(stage, "p1", {"image": "sha256:2d3c"})
    sidecar.signal(signal.SIGHUP)
    await until(lambda: sidecar.events("the contract file was read again"), "the new file is read")
    _, body = await document(stage, sidecar)
    assert (body["image"], "flags" in body) == ("sha256:2d3c", False)


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--contract", "good.json"], 2, "Missing option '--engine'"),
        (["--engine", "http://127.0.0.1:1"], 2, "Missing option '--contract'"),
        (["--engine", "127.0.0.1:1", "--contract", "good.json"], 2, "must be an address like http://10.0.0.5:8000"),
        (["--engine", "http://h:1/v1", "--contract", "good.json"], 2, "scheme, host and port without a path"),
        (["--engine", "http://h:1", "--contract", "good.json", "--timeout", "0"], 2, "is not in the range"),
        (["--engine", "http://h:1", "--contract", "nowhere.json"], 2, "file: cannot be read: No such file"),
        (["--engine", "http://h:1", "--contract", "bad.json"], 2, "process: is what narwhal-attest says itself"),
        (["--engine", "http://h:1", "--contract", "good.json", "--http", "TAKEN"], 1, "(HTTP): address already in use"),
    ],
)
async def test_a_start_that_fails_is_one_line_and_the_right_status(
    stage: Stage, flags: list[str], status: int, words: str
) -> None:
    (stage.directory / "good.json").write_text('{"image": "a"}')
    (stage.directory / "bad.json").write_text('{"image": "a", "process": {}}')
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        program = stage.run("narwhal-attest", *[flag.replace("TAKEN", taken) for flag in flags])
        assert await program.ended() == status
    assert words in program.log.read_text()


# --- the gate ---------------------------------------------------------------------------------------------------------


async def explanation(control: str, engine: str) -> str:
    return (await ctl(control, "explain", engine))[1]


@pytest.mark.rule("R7", "R8", "R1")
async def test_an_engine_that_restarts_stays_out_until_its_sidecar_does(stage: Stage) -> None:
    at = attested_fleet(stage, CONTRACT)
    await stage.engines("p1")
    engine = await stage.engines("d1")
    await attest(stage, "p1", "--http", at["p1"])
    old = await attest(stage, "d1", "--http", at["d1"])
    serve = await stage.serve()  # ready: both engines came in by the gate
    control = serve.at["grpc"]
    assert "matches the contract, names version" in await explanation(control, "d1")
    await kill(engine)
    await stage.engines("d1")

    async def refused() -> str:
        words = await explanation(control, "d1")
        return words if "the engine's process has changed" in words else ""

    words = await until(refused, "the gate says what the sidecar says")
    assert "check attestation: fail: GET attestation document answered 503: the engine's process has changed" in words
    assert "restart narwhal-attest" in words
    assert not (await engine_of(stage, control, "d1")).phases  # the prefill engine stands in meanwhile
    old.signal(signal.SIGTERM)
    assert await old.ended() == 0
    await attest(stage, "d1", "--http", at["d1"])
    await serving(stage, control, "d1")
    assert "matches the contract, names version" in await explanation(control, "d1")


@pytest.mark.rule("R7")
@pytest.mark.parametrize("by", ["fields", "digest"])
async def test_a_contract_that_differs_is_named_field_by_field(stage: Stage, by: str) -> None:
    await stage.engines(*FLEET)
    right = await attest(stage, "p1")
    digest = (await document(stage, right))[1]["digest"]
    right.signal(signal.SIGTERM)
    await right.ended()
    at = attested_fleet(stage, CONTRACT if by == "fields" else {"digest": digest})
    # attested_fleet wrote the file anew; the engines' ports are the stage's and stay.
    await attest(stage, "p1", "--http", at["p1"])
    await attest(stage, "d1", "--http", at["d1"], fields={"image": "sha256:2d3c", "flags": {"block_size": 16}})
    control = await stage.control()
    grpc = control.at["grpc"]

    async def refused() -> str:
        words = await explanation(grpc, "d1")
        return words if "does not match the contract" in words else ""

    words = await until(refused, "the gate names what differs")
    if by == "fields":
        assert 'the contract: image is "sha256:2d3c", asked for is "sha256:0f1e"' in words
        assert "flags" not in words
    else:
        assert f'asked for is "{digest}"' in words

    async def passed() -> bool:
        return "check attestation: pass" in await explanation(grpc, "p1")

    await until(passed, "the other engine's document matches")
