"""Unambiguous bytes for plain values: the input of every identity hash.

Each value is a one-byte tag, an eight-byte little-endian length and its content, so two different
values never have the same encoding (`["ab", "c"]` and `["a", "bc"]`, `1` and `True`, a missing
value and an empty one all differ).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import Enum

_LENGTH = struct.Struct("<cQ")


def encode(value: object) -> bytes:
    """Return bytes that no other value encodes to.

    Takes None, bool, int, float, str, bytes, an `Enum` (as its value), sequences and string-keyed
    mappings of these. The order of a mapping does not matter, and a list equals a tuple of the
    same items. Raises TypeError for anything else.
    """
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool):
        return _tagged(b"t", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _tagged(b"i", str(value).encode())
    if isinstance(value, float):
        return _tagged(b"f", struct.pack("<d", value))
    if isinstance(value, str):
        return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _tagged(b"b", bytes(value))
    if isinstance(value, Mapping):
        return _tagged(b"m", b"".join(_encode_items(value)))
    if isinstance(value, Sequence):
        return _tagged(b"l", b"".join(encode(item) for item in value))
    raise TypeError(f"cannot put a {type(value).__name__} into an identity: {value!r}")


def _tagged(tag: bytes, content: bytes) -> bytes:
    return _LENGTH.pack(tag, len(content)) + content


def _encode_items(mapping: Mapping[object, object]) -> list[bytes]:
    for key in mapping:
        if not isinstance(key, str):
            raise TypeError(f"an identity's mapping keys are strings, got {key!r}")
    return sorted(encode(key) + encode(item) for key, item in mapping.items())
