"""The card that an engine publishes so that its peers can read its DRAM tier.

offset  bytes  little-endian
0       4      b"HCPC"
4       1      version, 2
5       1      number of state types, n
6       8      slots of each type outside zones
14      8      bytes of a zone
22      8      bytes of all zones
30      10 n   state type's position, stride in bytes
...     ...    the transfer agent's metadata
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.errors import PeerError
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.slot_geometry import SlotGeometry

_HEAD = struct.Struct("<4sBBQQQ")
_TYPE = struct.Struct("<HQ")
_MAGIC, _VERSION = b"HCPC", 2
_MAX_BYTES = 1 << 46
_TYPES = {t.position: t for t in StateType}


@dataclass(frozen=True)
class PeerCard:
    """An engine's slots, and how to reach them: `agent` is the transfer's metadata.

    The agent exports two regions, the DRAM arena and the slot table.
    """

    geometry: SlotGeometry
    agent: bytes

    def encode(self) -> bytes:
        """The bytes for the directory."""
        cut = self.geometry
        strides, zones = cut.stride_bytes, (cut.zone_bytes, cut.zones_bytes)
        head = _HEAD.pack(_MAGIC, _VERSION, len(strides), cut.count, *zones)
        return head + b"".join(_TYPE.pack(t.position, n) for t, n in strides.items()) + self.agent

    @classmethod
    def decode(cls, data: bytes) -> PeerCard:
        """Inverse of `encode`; PeerError for anything else."""
        if len(data) < _HEAD.size:
            raise PeerError("a peer's card is cut short")
        magic, version, num_types, count, zone_bytes, zones_bytes = _HEAD.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            raise PeerError(f"not a peer's card of version {_VERSION}: {data[:5]!r}")
        agent_at = _HEAD.size + num_types * _TYPE.size
        if len(data) <= agent_at:
            raise PeerError("a peer's card is cut short")
        strides: dict[StateType, int] = {}
        for position, stride in _TYPE.iter_unpack(data[_HEAD.size : agent_at]):
            kind = _TYPES.get(position)
            if kind is None or kind in strides:
                raise PeerError(f"a peer's card has impossible slots: {position}, {stride} bytes")
            strides[kind] = stride
        geometry = SlotGeometry(count, strides, zone_bytes, zones_bytes)
        if not (geometry.is_possible and geometry.size_bytes <= _MAX_BYTES):
            raise PeerError(f"a peer's card has impossible slots: {geometry}")
        return cls(geometry, data[agent_at:])

    def slot_of(self, state_type: StateType, copy: PeerCopy) -> int:
        """Number of the slot that a copy lies in; PeerError if that is not one of ours."""
        stride = self.geometry.stride_bytes.get(state_type)
        if stride is None:
            raise PeerError(f"the peer has no slots for {state_type.value}")
        slot = self.geometry.slot_at(state_type, copy.dram_offset)
        if slot is None or not 0 < copy.size_bytes <= stride:
            raise PeerError(f"the peer has no such slot: {state_type.value}, {copy}")
        return slot
