"""Checks of a directory's arguments, made before anything is changed or sent."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hetero_connector.artifacts.chain import KEY_BYTES
from ownership.directory.contract import CHECKSUM_BYTES, Claim, Worker

MAX_NAME_BYTES = 256
"""Longest name of a user or worker, in UTF-8."""
MAX_PEER_BYTES = 1 << 20
MAX_STORAGE_BYTES = 1_024
MAX_LEASE_S = 86_400.0


def check_name(kind: str, name: str) -> None:
    """Raise ValueError unless the name has 1 to `MAX_NAME_BYTES` bytes of UTF-8."""
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(f"{kind} must have 1 to {MAX_NAME_BYTES} bytes of UTF-8, got {name!r}")


def check_worker(worker: Worker) -> None:
    """Raise ValueError for a worker that does not fit into a record."""
    check_name("worker name", worker.name)
    if len(worker.peer) > MAX_PEER_BYTES:
        raise ValueError(f"peer metadata has {len(worker.peer)} bytes, more than {MAX_PEER_BYTES}")
    if len(worker.storage.encode()) > MAX_STORAGE_BYTES:
        raise ValueError(f"storage {worker.storage!r} has more than {MAX_STORAGE_BYTES} bytes")


def check_lease(lease_s: float) -> None:
    """Raise ValueError for a lease that is too long or not above 0."""
    if not (math.isfinite(lease_s) and 0 < lease_s <= MAX_LEASE_S):
        raise ValueError(f"lease_s must be over 0 and at most {MAX_LEASE_S:g}, got {lease_s}")


def check_ttl(ttl_s: float) -> None:
    """Raise ValueError for a replica's life that is too long or not above 0."""
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_LEASE_S):
        raise ValueError(f"ttl_s must be over 0 and at most {MAX_LEASE_S:g}, got {ttl_s}")


def check_claims(claims: Iterable[Claim]) -> None:
    """Raise ValueError for a copy that no reader could verify."""
    for (chunk, state_type), copy, parent in claims:
        if len(chunk) != KEY_BYTES or len(parent) != KEY_BYTES:
            raise ValueError(f"a chunk key has {KEY_BYTES} bytes, got {chunk!r} after {parent!r}")
        if copy.size_bytes <= 0 or len(copy.checksum) != CHECKSUM_BYTES:
            raise ValueError(
                f"{state_type} of {chunk.hex()}: a copy needs a size over 0 and a checksum of "
                f"{CHECKSUM_BYTES} bytes, got {copy}"
            )
