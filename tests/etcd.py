"""Real etcd servers of a test's own: on free loopback ports, with their own data, ended by their process ids.

Debian's `etcd-server` brings the program. Methods block for as long as etcd takes to come up, a second or so.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import etcd3
import grpc

from tests.ports import free_ports
from tests.signals import send

UP_S = 60.0  # shared machines stop a process for tens of seconds now and then


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Files of a CA, and of one certificate of 127.0.0.1 that servers and clients show."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> "Certificates":
        """New ones, in `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        ca, ca_key = directory / "ca.pem", directory / "ca-key.pem"
        request, extensions = directory / "request.pem", directory / "extensions"
        made = cls(ca=ca, cert=directory / "cert.pem", key=directory / "key.pem")
        extensions.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        for arguments in (
            ["req", "-x509", *new, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=test CA"],
            ["req", *new, "-keyout", made.key, "-out", request, "-subj", "/CN=test"],
            ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2",
             "-extfile", extensions, "-out", made.cert],
        ):  # fmt: skip
            subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
        return made


@dataclass
class Member:
    """One etcd server, which may be ended and started again with its data."""

    name: str
    directory: Path
    port: int
    peer_port: int
    scheme: str
    flags: list[str] = field(default_factory=list)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def endpoint(self) -> str:
        """As the fleet file names it."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """What it wrote."""
        return self.directory / f"{self.name}.log"

    def start(self) -> None:
        """Starts it; it is not up yet."""
        assert self.process is None
        peer = f"http://127.0.0.1:{self.peer_port}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD")}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [
                    "etcd", "--name", self.name, "--data-dir", str(self.directory / self.name),
                    "--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--unsafe-no-fsync", "--logger", "zap", "--log-level", "warn", *self.flags,
                ],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal. After SIGSTOP it has stopped: until then other threads of it go on answering."""
        assert self.process is not None
        send(self.process.pid, number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Takes connections, and answers nothing."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it at once, whatever state it is in."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=UP_S)
            self.process = None


class Etcd:
    """A cluster of one or three members. Use as a context manager; it is up inside."""

    def __init__(
        self, directory: Path, *, members: int = 1, flags: list[str] | None = None, tls: Certificates | None = None
    ) -> None:
        """`flags` go to every member. With `tls` clients must show a certificate of its CA."""
        directory.mkdir(parents=True, exist_ok=True)
        self.tls = tls
        ports = free_ports(2 * members)
        self.members = [
            Member(f"m{n}", directory, ports[2 * n], ports[2 * n + 1], "https" if tls else "http")
            for n in range(members)
        ]
        cluster = ",".join(f"{m.name}=http://127.0.0.1:{m.peer_port}" for m in self.members)
        secure = (
            [f"--cert-file={tls.cert}", f"--key-file={tls.key}", f"--trusted-ca-file={tls.ca}", "--client-cert-auth"]
            if tls
            else []
        )
        for member in self.members:
            member.flags = ["--initial-cluster", cluster, *secure, *(flags or [])]

    def __enter__(self) -> "Etcd":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Of every member."""
        return tuple(member.endpoint for member in self.members)

    def start(self) -> None:
        """Starts the members that do not run, and waits until the cluster answers."""
        for member in self.members:
            if member.process is None:
                member.start()
        for member in self.members:
            self.wait(member)

    def kill(self) -> None:
        """Ends every member, as a power cut does."""
        for member in self.members:
            member.kill()

    def wipe(self) -> None:
        """Ends every member and forgets their data."""
        self.kill()
        for member in self.members:
            shutil.rmtree(member.directory / member.name, ignore_errors=True)

    def wait(self, member: Member | None = None) -> None:
        """Waits until a member, the first unless named, answers for the whole cluster."""
        asked = member or self.members[0]
        deadline = time.monotonic() + UP_S
        while True:
            assert asked.process is not None
            assert asked.process.poll() is None, f"etcd ended\n{asked.log.read_text()[-2000:]}"
            try:
                with self.client(asked, timeout_s=10.0) as client:
                    client.get("is it up")
                return
            except (grpc.RpcError, etcd3.Etcd3Exception) as error:
                words = str(error)
            if "user name is empty" in words:
                return
            assert time.monotonic() < deadline, f"etcd is not up: {words}\n{asked.log.read_text()[-2000:]}"
            time.sleep(0.05)

    @contextlib.contextmanager
    def client(
        self,
        member: Member | None = None,
        *,
        user: str | None = None,
        password: str | None = None,
        timeout_s: float = UP_S,
    ) -> Iterator[Any]:
        """A client for what a test does behind the store's back. `timeout_s` bounds each call."""
        asked = member or self.members[0]
        credentials = None
        if self.tls is not None:
            credentials = grpc.ssl_channel_credentials(
                self.tls.ca.read_bytes(), self.tls.key.read_bytes(), self.tls.cert.read_bytes()
            )
        endpoint = etcd3.Endpoint(
            "127.0.0.1",
            asked.port,
            secure=self.tls is not None,
            creds=credentials,
            time_retry=0.0,
            opts=(("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)),
        )
        try:
            client = etcd3.MultiEndpointEtcd3Client([endpoint], timeout=timeout_s, user=user, password=password)
            client.call_credentials = None
            yield client
        finally:
            endpoint.close()

    def leader(self) -> Member:
        """The member that the others follow."""
        for member in self.members:
            if member.process is not None:
                with self.client(member) as client:
                    status = client.status()
                if status.leader is not None:
                    return next(m for m in self.members if m.name == status.leader.name)
        raise AssertionError("no member leads")
