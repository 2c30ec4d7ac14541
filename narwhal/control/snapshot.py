"""The whole core as text and back: for a journal file that is to be replayed without those before it.

A core is many records that refer to each other; pickle keeps that, in 8 ms for a hundred engines. Reading one makes
nothing but records of the pure modules and collections: those have no IO, whatever somebody has written into a file.
"""

import base64
import binascii
import io
import pickle
import zlib

_PURE = ("narwhal.control.core.", "narwhal.placement.", "narwhal.reports.", "narwhal.vocabulary.")
_COLLECTIONS = frozenset({"collections.deque", "collections.Counter", "builtins.set", "builtins.frozenset"})
LARGEST = 256 * 1024 * 1024  # bytes of an unpacked core


class SnapshotError(ValueError):
    """The text is no core of this release."""


def pack(core: object) -> bytes:
    """The core as it is now; `text` makes text of it, elsewhere."""
    return pickle.dumps(core, protocol=5)


def text(packed: bytes) -> str:
    """What a journal file holds."""
    return base64.b64encode(zlib.compress(packed, 1)).decode()


def unpack(held: str) -> object:
    """The core in a journal file. Raises SnapshotError."""
    try:
        inflate = zlib.decompressobj()
        packed = inflate.decompress(base64.b64decode(held, validate=True), LARGEST)
        return _Unpickler(io.BytesIO(packed)).load()
    except (binascii.Error, zlib.error) as error:
        raise SnapshotError(f"damaged: {error}") from None
    except Exception as error:  # pickle raises what the records raise
        raise SnapshotError(f"not of this release: {type(error).__name__}: {error}") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        full = f"{module}.{name}"
        if "." in name or not (full in _COLLECTIONS or full.startswith(_PURE)):
            raise pickle.UnpicklingError(f"names {full}")
        found: object = super().find_class(module, name)
        if not isinstance(found, type):
            raise pickle.UnpicklingError(f"{full} is no class")
        return found
