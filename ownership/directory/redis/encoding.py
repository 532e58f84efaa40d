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

from hetero_connector.artifacts.chain import KEY_BYTES
from hetero_connector.artifacts.record import ChunkKey
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
from ownership.directory.sessions import Session

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
        name, storage, _, deadline_s, retired = _array(packed, 5)
        ended = deadline_s <= now_s
        status = EpochStatus.RETIRED if retired else EpochStatus.LIVE
        return WorkerState(name.decode(), storage.decode(), EpochStatus.ENDED if ended else status)
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
            state_type = _STATE_TYPES[_whole(position)]
            listed = tuple(map(_replica, replicas)) if replicas else ()
            records[state_type] = ArtifactRecord(
                Epoch(_whole(owner)), Token(_whole(token)), _copy(copy), listed
            )
        except (IndexError, TypeError, ValueError) as error:
            raise RecordError(f"not a record: {packed!r:.80}: {error}") from error
    return records


def session(session_id: str, packed: bytes) -> Session:
    """Decode a session. Raises RecordError."""
    token, owner, boundary, tokens, group, think_s, turn_ended_s, _ = _array(packed, 8)
    try:
        return Session(
            session_id,
            Token(_whole(token)),
            Epoch(_whole(owner)),
            _chunk_key(boundary),
            _whole(tokens),
            group.decode(),
            tuple(float(x) for x in think_s),
            None if turn_ended_s is False else float(turn_ended_s),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise RecordError(f"not a session: {packed[:80]!r}: {error}") from error


def chain_ends(packed: bytes) -> tuple[ChunkKey, ...]:
    """Decode chunk keys that are stored one after another. Raises RecordError."""
    if len(packed) % KEY_BYTES:
        raise RecordError(f"{len(packed)} bytes are no chunk keys")
    return tuple(ChunkKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))


def _copy(packed: object) -> Copy:
    if type(packed) is not bytes or len(packed) != _COPY.size:
        raise ValueError(f"a copy has {_COPY.size} bytes")
    copy = Copy._make(_COPY.unpack(packed))
    if copy.size_bytes == 0 or copy.dram_offset < -1:
        raise ValueError(f"an impossible copy: {copy}")
    return copy


def _replica(packed: Sequence[Any]) -> Replica:
    holder, copy, expires_s = packed
    return Replica(Epoch(_whole(holder)), _copy(copy), float(expires_s))


def generation(text: bytes) -> int:
    """Decode a generation. Raises RecordError."""
    try:
        return _whole(int(text))
    except (TypeError, ValueError) as error:
        raise RecordError(f"not a generation: {text!r:.80}") from error


def _chunk_key(value: object) -> ChunkKey:
    if not isinstance(value, bytes) or len(value) != KEY_BYTES:
        raise ValueError(f"not a chunk key: {value!r:.80}")
    return ChunkKey(value)


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
        raise ValueError(f"not a whole number from 0 to 2**53: {value!r:.80}")
    return value


def _array(packed: bytes, size: int | None = None) -> list[Any]:
    """Decode an array, of `size` items unless it is None. Raises RecordError."""
    try:
        value = msgpack.unpackb(packed, raw=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RecordError(f"not msgpack: {packed[:40]!r}: {error}") from error
    if not isinstance(value, list) or (size is not None and len(value) != size):
        raise RecordError(f"not an array of {size or 'any number of'}: {packed[:40]!r}")
    return value
