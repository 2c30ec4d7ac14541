"""The three files of mutual TLS, read and looked at before anything is built on them.

gRPC takes any bytes and fails later, at every connection, in the words of its own library. Blocks while it reads.
"""

import ssl
from dataclasses import dataclass, fields
from pathlib import Path


class TlsError(Exception):
    """The files cannot be used. The message is one line that names the setting and the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """Where they are."""

    ca: str
    cert: str
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsMaterial:
    """What is in them, PEM."""

    ca: bytes
    cert: bytes
    key: bytes


def read_tls(files: TlsFiles, *, prefix: str = "tls.") -> TlsMaterial:
    """Their contents, which go together. `prefix`: what stands before `ca`, `cert` and `key` where the user names them.

    Raises TlsError for a file that cannot be read, or is not what it is to be.
    """
    read = {each.name: _read(f"{prefix}{each.name}", getattr(files, each.name)) for each in fields(TlsFiles)}
    for name in ("ca", "cert"):
        _certificates(f"{prefix}{name}", getattr(files, name))
    _pair(f"{prefix}key", f"{prefix}cert", files)
    return TlsMaterial(**read)


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise TlsError(f"{setting}: {path} cannot be read: {reason}") from None


def _certificates(setting: str, path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError):
        raise TlsError(f"{setting}: {path} holds no certificate (PEM)") from None


def _pair(key: str, cert: str, files: TlsFiles) -> None:
    def ask() -> str:
        raise TlsError(f"{key}: {files.key} is encrypted: it must be a private key without a password")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(files.cert, files.key, password=ask)
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{key}: {files.key} is not the key of the certificate in {cert}, {files.cert}") from None
        raise TlsError(f"{key}: {files.key} holds no private key (PEM)") from None
