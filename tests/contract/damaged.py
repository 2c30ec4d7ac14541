"""Documents of a lease from which nobody can tell who led last, and under which epoch."""

NO_LEASES = [
    *(b"", b"[]", b"{", b'{"epoch": 3}', b"\xff", b"[" * 100_000),
    b'{"epoch": "x", "holder": "a", "address": "", "token": "t"}',
    b'{"epoch": 3, "holder": null, "address": "", "token": "t"}',
    b'{"epoch": 3, "holder": "\\ud800", "address": "", "token": "t"}',
    *(
        b'{"epoch": %b, "holder": "a", "address": "", "token": "t"}' % epoch
        for epoch in (b"0", b"-1", b"true", b"3.0", b"Infinity", b"1e400", b"9" * 5000, b"9223372036854775807")
    ),
]
