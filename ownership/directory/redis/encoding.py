"""Encode and decode what the scripts take, store and return.

msgpack without a separate type for bytes, which is what Redis' Lua speaks. Other programs can write
into the database, so a record is not trusted: one that does not have the form that `lua/lib`
describes raises RecordError, whatever its sizes claim to be.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from hetero_connector.errors import RecordError
from hetero_connector.spec.state_types import StateType
from ownership.directory.contract import (
    ArtifactRecord,
    Claim,
    Copy,
    EpochStatus,
    Grant,
    GrantOutcome,
    Replica,
    WorkerState,
)
from ownership.directory.identifiers import Epoch, Token

FORMAT_VERSION = 1
"""Version of everything in a fleet's keys. Registration refuses a fleet of another version."""

_RUN = bytes([FORMAT_VERSION])
"""First byte of a run, see lua/lib/runs.lua."""
_OUTCOMES = (
    GrantOutcome.OWNED,
    GrantOutcome.FOREIGN,
    GrantOutcome.REPLICA,
    GrantOutcome.ABSENT,
    GrantOutcome.FULL,
)
_STATE_TYPES = tuple(StateType)
_COPY = struct.Struct("<Q16sqQ?")
"""size_bytes, checksum, dram_offset, generation, on_ssd. A fixed shape is decoded fastest."""
_MAX_INTEGER = 2**53
"""Numbers in Lua are doubles."""


def pack(value: object) -> bytes:
    """Encode a value as msgpack for Redis' Lua."""
    return msgpack.packb(value, use_bin_type=False)  # type: ignore[no-any-return]


def pack_claims(claims: Sequence[Claim]) -> bytes:
    """Encode the argument of `claim_owner.lua`."""
    flat: list[object] = []
    for claim in claims:
        chunk, state_type = claim.artifact
        flat += (chunk, claim.parent, state_type.position, pack_copy(claim.copy))
    return pack(flat)


def pack_copies(copies: Sequence[Claim]) -> bytes:
    """Encode the argument of `replicate_readonly.lua`."""
    flat: list[object] = []
    for claim in copies:
        chunk, state_type = claim.artifact
        flat += (chunk, state_type.position, pack_copy(claim.copy))
    return pack(flat)


def pack_copy(copy: Copy) -> bytes:
    """Encode a copy. The scripts do not decode it."""
    return _COPY.pack(*copy)


def grants(reply: Sequence[int]) -> list[Grant]:
    """Decode the replies of `claim_owner` and `replicate_readonly`."""
    return [
        Grant(_OUTCOMES[outcome], Epoch(owner), Token(token))
        for outcome, owner, token in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
    ]


def worker_state(packed: bytes, now_s: float) -> WorkerState:
    """Decode an epoch of `lookup.lua`'s reply. Raises RecordError."""
    try:
        name, storage, lease_s, deadline_s, retired = _array(packed, 5)
        status = EpochStatus.RETIRED if retired else EpochStatus.LIVE
        if not now_s < deadline_s <= now_s + lease_s + 1:  # as `status_of` in lua/lib/epochs.lua
            status = EpochStatus.ENDED
        return WorkerState(name.decode(errors="replace"), storage.decode(errors="replace"), status)
    except (AttributeError, TypeError, ValueError) as error:
        raise RecordError(f"not an epoch: {packed!r:.80}: {error}") from error


def run_entries(run: bytes) -> list[bytes]:
    """Return the encoded entry of each chunk of a run. Raises RecordError."""
    if run[:1] != _RUN:
        raise RecordError(f"not a run of format {FORMAT_VERSION}: {run[:8]!r}")
    entries = _array(run[1:])
    if not all(isinstance(entry, bytes) for entry in entries):
        raise RecordError("a run's entries are not bytes")
    return entries


def chunk_records(entry: bytes) -> dict[StateType, ArtifactRecord]:
    """Decode a chunk's entry. Raises RecordError."""
    if not entry:
        return {}
    records = {}
    for packed in _array(entry):
        try:
            position, owner, token, copy, *replicas = packed
            _check_whole(position, owner, token)
            listed = tuple(map(_replica, replicas)) if replicas else ()
            records[_STATE_TYPES[position]] = ArtifactRecord(owner, token, _copy(copy), listed)
        except (IndexError, TypeError, ValueError) as error:
            raise RecordError(f"not a record: {packed!r:.80}: {error}") from error
    return records


def _copy(packed: object) -> Copy:
    if type(packed) is not bytes or len(packed) != _COPY.size:
        raise ValueError(f"a copy has {_COPY.size} bytes")
    copy = Copy._make(_COPY.unpack(packed))
    if copy.size_bytes == 0 or copy.dram_offset < -1:
        raise ValueError(f"an impossible copy: {copy}")
    return copy


def _replica(packed: Sequence[Any]) -> Replica:
    holder, copy, expires_s = packed
    _check_whole(holder)
    if type(expires_s) not in (int, float):
        raise ValueError(f"not a time: {expires_s!r:.80}")
    return Replica(holder, _copy(copy), float(expires_s))


def generation(text: bytes) -> int:
    """Decode a generation. Raises RecordError."""
    try:
        number = int(text)
        _check_whole(number)
    except (TypeError, ValueError) as error:
        raise RecordError(f"not a generation: {text!r:.80}") from error
    return number


def _check_whole(*values: object) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
            raise ValueError(f"not a whole number from 0 to 2**53: {value!r:.80}")


def _array(packed: bytes, size: int | None = None) -> list[Any]:
    """Decode an array, of `size` items unless it is None. Raises RecordError."""
    try:
        value = msgpack.unpackb(packed, raw=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RecordError(f"not msgpack: {packed[:40]!r}: {error}") from error
    if not isinstance(value, list) or (size is not None and len(value) != size):
        raise RecordError(f"not an array of {size or 'any number of'}: {packed[:40]!r}")
    return value
