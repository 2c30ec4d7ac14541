"""Mutual TLS of the gRPC services, with real certificates: who is served, and what each program says when it is not."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from narwhal.tls import TlsError, TlsFiles, read_tls
from tests.contract.test_control_process import BOUND_S, Process, started
from tests.etcd import Certificates

OURS, OTHERS = "ours", "others"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificates]:
    """Certificates of two CAs that do not know each other."""
    return {name: Certificates.make(tmp_path_factory.mktemp(name)) for name in (OURS, OTHERS)}


@pytest.fixture
def files(made: dict[str, Certificates]) -> TlsFiles:
    return files_of(made[OURS])


def files_of(certificates: Certificates) -> TlsFiles:
    return TlsFiles(ca=str(certificates.ca), cert=str(certificates.cert), key=str(certificates.key))


def fleet_file(directory: Path, files: TlsFiles | None) -> Path:
    engines = "".join(f"  - {{id: {i}, url: 'http://127.0.0.1:{n}', role: {r}}}\n" for i, n, r in ENGINES)
    tls = f"tls: {{ca: {files.ca}, cert: {files.cert}, key: {files.key}}}\n" if files is not None else ""
    path = directory / f"fleet{'-tls' * bool(tls)}.yaml"
    path.write_text(f"name: fleet\nmodel: m\nengines:\n{engines}store: {{path: {directory / 'run'}}}\n{tls}")
    return path


ENGINES = [("p0", 1, "prefill"), ("d0", 2, "decode")]


async def ran(program: str, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
    """(exit status, stdout, lines of stderr) of a program that ends by itself."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / program),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), BOUND_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode().splitlines()


async def address_of(control: Process) -> str:
    await control.told("control_active")
    return str((await control.told("listening"))["grpc"])


def flags(files: TlsFiles) -> list[str]:
    return ["--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key]


async def test_operators_reach_a_control_that_speaks_tls(tmp_path: Path, files: TlsFiles) -> None:
    fleet = fleet_file(tmp_path, files)
    variables = {
        "NARWHAL_TLS_CA": files.ca,
        "NARWHAL_TLS_CERT": files.cert,
        "NARWHAL_TLS_KEY": files.key,
    }
    async with started(fleet) as control:
        address = await address_of(control)
        local = address.replace("127.0.0.1", "localhost")
        for given, environment in [
            (["--control", address, *flags(files)], {}),
            (["--control", address, "--fleet", str(fleet)], {}),
            (["--control", address], variables),
            (["--control", address], {"NARWHAL_FLEET": str(fleet)}),
            # Flags stand above the environment and the file.
            (["--control", address, *flags(files)], {"NARWHAL_TLS_CERT": "nowhere"}),
            (["--control", address, "--fleet", str(fleet), "--tls-ca", files.ca], {}),
            (["--control", local, *flags(files), "--tls-server-name", "127.0.0.1"], {}),
        ]:
            code, out, err = await ran("narwhalctl", *given, "events", **environment)
            assert (code, err) == (0, []), given
            assert "control_active" in out
        # What changes something, what lasts, and the options behind the command.
        code, _, err = await ran("narwhalctl", "drain", "d0", "--control", address, "--fleet", str(fleet))
        assert (code, err) == (0, [])
        code, out, _ = await ran("narwhalctl", "explain", "d0", "--control", address, *flags(files))
        assert (code, "drain" in out) == (0, True)


async def test_each_side_that_does_not_speak_tls_is_told_so(
    tmp_path: Path, made: dict[str, Certificates], files: TlsFiles
) -> None:
    other = files_of(made[OTHERS])
    async with started(fleet_file(tmp_path, files)) as control:
        address = await address_of(control)
        local = address.replace("127.0.0.1", "localhost")
        for where, given, words in [
            (address, [], "speaks TLS: give --tls-ca, --tls-cert and --tls-key, or --fleet"),
            (address, flags(replace(files, ca=other.ca)), "its certificate is not of a CA in the file of --tls-ca"),
            (
                address,
                flags(replace(files, cert=other.cert, key=other.key)),
                "closed the connection: it may not know the CA of the certificate it was shown",
            ),
            (local, flags(files), "its certificate is not for that address: give --tls-server-name"),
            (
                address,
                [*flags(files), "--tls-server-name", "other"],
                "its certificate is not for that address: give --tls-server-name",
            ),
        ]:
            code, out, err = await ran("narwhalctl", "--control", where, *given, "status")
            assert (code, out, err) == (3, "", [f"narwhalctl: no active control process: {where}: {words}"])
    async with started(fleet_file(tmp_path, None)) as control:
        address = await address_of(control)
        code, out, err = await ran("narwhalctl", "--control", address, *flags(files), "status")
        words = f"{address}: does not speak TLS: leave out the TLS options"
        assert (code, out, err) == (3, "", [f"narwhalctl: no active control process: {words}"])


NEEDS = "TLS needs --tls-ca, --tls-cert and --tls-key, or --fleet"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--tls-ca CA", f"{NEEDS}: --tls-cert and --tls-key are missing"),
        ("--tls-ca CA --tls-cert CERT", f"{NEEDS}: --tls-key is missing"),
        ("--tls-server-name x", NEEDS.replace("TLS needs", "--tls-server-name is of no use without")),
        ("--tls-ca nope --tls-cert CERT --tls-key KEY", "--tls-ca: nope cannot be read: no such file or directory"),
        ("--fleet nope", "nope: file: cannot be read: No such file or directory"),
    ],
)
async def test_options_that_cannot_be_are_a_usage_error(files: TlsFiles, given: str, words: str) -> None:
    named = {"CA": files.ca, "CERT": files.cert, "KEY": files.key}
    options = [named.get(word, word) for word in given.split()]
    assert await ran("narwhalctl", "--control", "127.0.0.1:1", *options, "status") == (2, "", [f"narwhalctl: {words}"])


BAD = ["missing", "directory", "no certificate", "no CA", "other key", "no key", "locked key"]


@pytest.fixture(params=BAD)
def bad(request: pytest.FixtureRequest, tmp_path: Path, made: dict[str, Certificates]) -> tuple[TlsFiles, str]:
    """Files that cannot be used, and what is said of them."""
    files, text = files_of(made[OURS]), tmp_path / "text.pem"
    text.write_text("tea\n")
    locked = tmp_path / "locked.pem"
    encrypt = ["openssl", "pkey", "-in", files.key, "-aes256", "-passout", "pass:tea", "-out", str(locked)]
    subprocess.run(encrypt, check=True, capture_output=True, timeout=60)
    other = str(made[OTHERS].key)
    return {
        "missing": (replace(files, cert="nowhere"), "tls.cert: nowhere cannot be read: no such file or directory"),
        "directory": (replace(files, ca=str(tmp_path)), f"tls.ca: {tmp_path} cannot be read: is a directory"),
        "no certificate": (replace(files, cert=str(text)), f"tls.cert: {text} holds no certificate (PEM)"),
        "no CA": (replace(files, ca=str(text)), f"tls.ca: {text} holds no certificate (PEM)"),
        "other key": (
            replace(files, key=other),
            f"tls.key: {other} is not the key of the certificate in tls.cert, {files.cert}",
        ),
        "no key": (replace(files, key=str(text)), f"tls.key: {text} holds no private key (PEM)"),
        "locked key": (
            replace(files, key=str(locked)),
            f"tls.key: {locked} is encrypted: it must be a private key without a password",
        ),
    }[request.param]


def test_what_is_wrong_with_the_files_is_said_in_one_line(bad: tuple[TlsFiles, str], files: TlsFiles) -> None:
    assert read_tls(files).ca == Path(files.ca).read_bytes()
    with pytest.raises(TlsError) as wrong:
        read_tls(bad[0])
    assert str(wrong.value) == bad[1]


@pytest.mark.parametrize("program", ["narwhal-control", "narwhal-proxy"])
async def test_a_program_that_cannot_use_its_files_says_so_and_ends_with_2(
    tmp_path: Path, made: dict[str, Certificates], program: str
) -> None:
    text = tmp_path / "text.pem"
    text.write_text("tea\n")
    ports = {"narwhal-control": "--grpc", "narwhal-proxy": "--admin"}
    rest = [ports[program], "127.0.0.1:0", "--http", "127.0.0.1:0"]
    good = files_of(made[OURS])
    for files, words in [
        (replace(good, cert="nowhere"), "tls.cert: nowhere cannot be read: no such file or directory"),
        (replace(good, cert=str(text)), f"tls.cert: {text} holds no certificate (PEM)"),
    ]:
        fleet = fleet_file(tmp_path, files)
        assert await ran(program, "--fleet", str(fleet), *rest) == (2, "", [f"{program}: {words}"])
