"""What an HTTP parser lets pass in a request's head, and a server must not. Pure."""

import re
from collections.abc import Mapping

from narwhal.proxy.errors import Refusal

HOST = re.compile(rb"(\[[0-9A-Fa-f:.v]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?")  # RFC 3986, 3.2.2; with a port


def faulty_head(fields: Mapping[bytes, bytes], *, hosts: int, codings: int, http11: bool) -> Refusal | None:
    """Why a request is refused by its head: it is for no host, or for two (RFC 9112, 3.2), or has a body in a coding
    that nobody undoes, or whose length is not told for sure (6.1). `fields`: the newest value by lower-case name;
    `hosts` and `codings`: how many headers of these names there were."""
    if hosts > 1 or (http11 and not hosts) or not HOST.fullmatch(fields.get(b"host", b"")):
        return Refusal.NO_HTTP
    if not codings:
        return None
    if not http11:
        return Refusal.NO_HTTP
    plain = codings == 1 and fields[b"transfer-encoding"].strip().lower() == b"chunked"
    return None if plain else Refusal.NO_CODING
