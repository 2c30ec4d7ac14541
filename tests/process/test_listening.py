"""Where a proxy listens: a Unix socket, IPv6."""

import asyncio
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from tests.process.harness import MODEL, Stage

BODY = {"model": MODEL, "prompt": "the narwhal dives", "max_tokens": 3}


async def asked(connector: aiohttp.BaseConnector, url: str) -> int:
    """The status of one completion."""
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"{url}/v1/completions", json=BODY) as answer,
    ):
        await answer.read()
        return answer.status


def kind(path: Path) -> str:
    """What is there."""
    return "socket" if path.is_socket() else "file" if path.is_file() else "nothing"


async def test_a_proxy_on_a_unix_socket(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    control = await stage.control()
    path = Path(stage.directory, "clients.sock")
    flags = ("--control", control.at["grpc"], "--http", f"unix:{path}", "--workers", "2")
    proxy = await stage.proxy(*flags)
    assert proxy.at["http"] == f"unix:{path}"
    await stage.ready(proxy.at["admin"])
    assert await asked(aiohttp.UnixConnector(str(path)), "http://narwhal") == 200

    # Somebody listens there: a second proxy does not take the path away.
    second = stage.run("narwhal-proxy", *flags, "--admin", "127.0.0.1:0")
    assert await second.ended() == 1
    assert "cannot listen on unix:" in second.tail()
    assert await asked(aiohttp.UnixConnector(str(path)), "http://narwhal") == 200

    # What a killed one left there is no obstacle.
    proxy.kill_all()
    assert kind(path) == "socket"
    proxy = await stage.proxy(*flags)
    await stage.ready(proxy.at["admin"])
    assert await asked(aiohttp.UnixConnector(str(path)), "http://narwhal") == 200
    proxy.signal(signal.SIGTERM)
    assert await proxy.ended() == 0
    assert kind(path) == "nothing"

    # A file that is no socket is not ours to remove.
    await asyncio.to_thread(path.write_text, "precious")
    refused = stage.run("narwhal-proxy", *flags, "--admin", "127.0.0.1:0")
    assert await refused.ended() == 1
    assert kind(path) == "file"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_a_proxy_on_ipv6(stage: Stage) -> None:
    stage.write_fleet()
    await stage.engines()
    control = await stage.control()
    proxy = await stage.proxy("--control", control.at["grpc"], "--http", "[::1]:0")
    await stage.ready(proxy.at["admin"])
    assert proxy.at["http"].startswith("[::1]:")
    assert await asked(aiohttp.TCPConnector(), f"http://{proxy.at['http']}") == 200
