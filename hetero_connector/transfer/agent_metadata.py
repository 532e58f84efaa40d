"""The description of an engine's memory for its peers, as bytes.

    offset  bytes  little-endian
    0       4      b"HCPM"
    4       1      version, 1
    5       1      number of regions, n
    6       2      bytes of the agent's name, a
    8       4      bytes of NIXL's own metadata, m
    12      16 n   regions: address, size
    ...     a      the agent's name, UTF-8
    ...     m      NIXL's own metadata
    ...     16     xxh3-128 of everything before

The checksum keeps damaged bytes away from NIXL's parser, which trusts its input.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import xxhash

from hetero_connector.errors import PeerError

_HEAD = struct.Struct("<4sBBHI")
_REGION = struct.Struct("<QQ")
_MAGIC, _VERSION = b"HCPM", 1
_SUM_BYTES = 16
MAX_BYTES = 256 << 10
"""NIXL's part is 44 bytes a region and the addresses of the host's network devices."""
MAX_REGIONS = 16
MAX_REGION_BYTES = 1 << 46


@dataclass(frozen=True)
class AgentMetadata:
    """One agent's name, exported regions (address, size in bytes) and NIXL's own metadata."""

    agent: str
    regions: tuple[tuple[int, int], ...]
    nixl: bytes

    @cached_property
    def digest(self) -> str:
        """Identifies these metadata: their checksum in hexadecimal."""
        return self.encode()[-_SUM_BYTES:].hex()

    def encode(self) -> bytes:
        """Return the bytes for the directory."""
        name = self.agent.encode()
        head = _HEAD.pack(_MAGIC, _VERSION, len(self.regions), len(name), len(self.nixl))
        body = head + b"".join(_REGION.pack(*r) for r in self.regions) + name + self.nixl
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def decode(cls, data: bytes) -> AgentMetadata:
        """Read what `encode` made. Raises PeerError for anything else."""
        if not _HEAD.size + _SUM_BYTES <= len(data) <= MAX_BYTES:
            raise PeerError(f"a peer's metadata cannot have {len(data)} bytes")
        magic, version, num_regions, name_bytes, nixl_bytes = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise PeerError("this is not a peer's metadata")
        if version != _VERSION:
            raise PeerError(
                f"the peer's metadata has version {version}, this engine reads {_VERSION}: "
                "run the same version of heterocache on all engines that share a directory"
            )
        names_at = _HEAD.size + num_regions * _REGION.size
        nixl_at = names_at + name_bytes
        if nixl_at + nixl_bytes + _SUM_BYTES != len(data) or num_regions > MAX_REGIONS:
            raise PeerError("a peer's metadata is truncated or inconsistent")
        if xxhash.xxh3_128_digest(data[:-_SUM_BYTES]) != data[-_SUM_BYTES:]:
            raise PeerError("a peer's metadata is damaged: its checksum is wrong")
        regions = tuple(_REGION.iter_unpack(data[_HEAD.size : names_at]))
        _check_regions(regions)
        try:
            name = data[names_at:nixl_at].decode()
        except UnicodeDecodeError as e:
            raise PeerError(f"the agent's name in a peer's metadata is not text: {e}") from e
        return cls(name, regions, data[nixl_at:-_SUM_BYTES])


def _check_regions(regions: tuple[tuple[int, int], ...]) -> None:
    for address, size in regions:
        if not (0 < size <= MAX_REGION_BYTES and 0 < address <= (1 << 64) - size):
            raise PeerError(f"a peer exports {size} bytes at {address:#x}: there is no such memory")
