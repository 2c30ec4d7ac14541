"""How `narwhalctl` comes to speak TLS: flags, the environment, or the fleet file; and what a failure to do so means."""

import asyncio
import os
import ssl
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import grpc

from narwhal.cli.options import TlsOptions, UsageProblem
from narwhal.tls import TlsError, TlsFiles, read_tls

LOOK_S = 1.0  # for a handshake that only tells what is spoken
FLAGS = "--tls-ca, --tls-cert and --tls-key, or --fleet"


@dataclass(frozen=True, kw_only=True)
class Secure:
    """What a connection over TLS is made with."""

    credentials: grpc.ChannelCredentials
    options: tuple[tuple[str, str], ...]  # of the channel


def secure(options: TlsOptions) -> Secure | None:
    """What the options amount to; None without TLS. Reads the files anew. Raises UsageProblem."""
    given = {"ca": options.ca, "cert": options.cert, "key": options.key}
    found = {**(_of_fleet(options.fleet) if options.fleet else {}), **{k: v for k, v in given.items() if v}}
    if not found:
        if options.server_name:
            raise UsageProblem(f"--tls-server-name is of no use without {FLAGS}")
        return None
    missing = [f"--tls-{name}" for name in given if not found.get(name)]
    if missing:
        raise UsageProblem(f"TLS needs {FLAGS}: {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing")
    try:
        read = read_tls(TlsFiles(**found), prefix="--tls-" if any(given.values()) else "tls.")
    except TlsError as error:
        raise UsageProblem(str(error)) from None
    named = (("grpc.ssl_target_name_override", options.server_name),) if options.server_name else ()
    return Secure(credentials=grpc.ssl_channel_credentials(read.ca, read.key, read.cert), options=named)


def _of_fleet(path: str) -> dict[str, str]:
    """`tls` of a fleet file. Its reader is loaded only here: it takes longer than most commands."""
    config: Any = import_module("narwhal.config")
    try:
        tls = config.load_fleet(path, os.environ).tls
    except config.FleetFileError as error:
        raise UsageProblem(str(error)) from None
    return {name: value for name in ("ca", "cert", "key") if (value := getattr(tls, name)) is not None}


async def speaks_tls(address: str) -> bool:
    """Whether who listens there shakes hands by TLS, whoever that is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LOOK_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except (OSError, TimeoutError):  # ssl.SSLError is an OSError
        return False
    writer.transport.abort()
    return True
