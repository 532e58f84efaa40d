"""The messages between an engine and its peer process, over a stream of bytes.

    offset  bytes  little-endian
    0       1      kind
    4       4      bytes of the payload, p
    8       8      number of the read it is about; 0 if none
    16      p      payload

The peer process is not trusted, because anyone who reaches its port can write its memory. So
nothing is unpickled, and it can only send a read's end, its metadata, or an error's text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from hetero_connector.errors import TransferError
from hetero_connector.transfer.peer_base import PeerExtent

_HEAD = struct.Struct("<BxxxIQ")
_NAME = struct.Struct("<H")
_ERRNO = struct.Struct("<i")
_MAX_PAYLOAD = 16 << 20
"""Enough for a read of 400,000 extents."""
_FIELDS = 5


class Kind(IntEnum):
    """The kinds of frames: those of the engine, then those of the peer process."""

    CONNECT = 1
    """Payload: a peer's `AgentMetadata`."""
    READ = 2
    """Payload: a connection's name, and extents; see `read_payload`."""
    DISCONNECT = 3
    """Payload: a connection's name, which is the digest of its metadata."""
    PING = 7
    """The process answers with ALIVE."""
    READY = 4
    """Payload: the process's own `AgentMetadata`."""
    FAILED = 5
    """The process cannot start. Payload: the reason."""
    ENDED = 6
    """A read has ended. Payload: empty, or `error_payload`."""
    ALIVE = 8
    """The answer to PING."""


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: Kind
    read: int
    payload: bytes

    def encode(self) -> bytes:
        """Return its bytes in the stream."""
        return _HEAD.pack(self.kind, len(self.payload), self.read) + self.payload


class FrameReader:
    """Assembles frames from pieces of the stream."""

    def __init__(self) -> None:
        self._left = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add bytes, and yield the frames that are complete. Raises ValueError for a bad frame."""
        self._left += data
        at = 0
        while len(self._left) - at >= _HEAD.size:
            kind, size, read = _HEAD.unpack_from(self._left, at)
            if size > _MAX_PAYLOAD:
                raise ValueError(f"a message of {size} bytes")
            first = at + _HEAD.size
            if len(self._left) - first < size:
                break
            yield Frame(Kind(kind), read, bytes(self._left[first : first + size]))
            at = first + size
        del self._left[:at]


def read_payload(connection: str, extents: Sequence[PeerExtent]) -> bytes:
    """Encode a read: the connection and the extents."""
    name = connection.encode()
    rows = [(e.remote_region, e.remote_offset, e.region, e.offset, e.size) for e in extents]
    return _NAME.pack(len(name)) + name + np.array(rows, "<i8").tobytes()


def parse_read(payload: bytes) -> tuple[str, list[PeerExtent]]:
    """Decode what `read_payload` made."""
    (size,) = _NAME.unpack_from(payload)
    first = _NAME.size + size
    rows = np.frombuffer(payload, "<i8", offset=first).reshape(-1, _FIELDS)
    return payload[_NAME.size : first].decode(), [PeerExtent(*row) for row in rows.tolist()]


def error_payload(error: TransferError) -> bytes:
    """Encode the reason of a failed read."""
    return _ERRNO.pack(error.errno or 0) + str(error.strerror or error).encode()


def parse_error(payload: bytes) -> TransferError:
    """Decode what `error_payload` made. Raises ValueError for anything else."""
    if len(payload) < _ERRNO.size:
        raise ValueError("an error without its number")
    (number,) = _ERRNO.unpack_from(payload)
    text = payload[_ERRNO.size :].decode(errors="replace")
    return TransferError(number, text) if number else TransferError(text)
