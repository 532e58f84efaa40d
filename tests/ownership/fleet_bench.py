"""A directory under test with a clock that the test controls, and values to put into it.

To test another directory: a class like `MemoryBench`, listed in `BENCHES`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.spec.state_types import StateType
from ownership.directory import (
    ChainView,
    Claim,
    Copy,
    Directory,
    DirectoryLimits,
    Grant,
    Lease,
    ReadableCopy,
    Worker,
)
from ownership.directory.memory import MemoryDirectory
from ownership.member.directory_thread import DirectoryThread
from tests.ownership.redis_bench import RedisBench

LEASE_S = 10.0
LIMITS = DirectoryLimits(
    max_artifacts=50,
    max_replicas=2,
    max_users=3,
    max_workers=8,
    orphan_ttl_s=60.0,
)
"""Small enough to be reached by a test."""

KV, WINDOW = StateType.DENSE_KV, StateType.WINDOW_SWA


class DirectoryBench(Protocol):
    """One fleet's directory."""

    def open(self) -> Directory:
        """Return a client. Each worker of a fleet may have one."""
        ...

    def advance(self, seconds: float) -> None:
        """Move the directory's clock; a negative value sets it back."""
        ...

    def close(self) -> None: ...


class MemoryBench:
    """The directory in memory: every client is the same object."""

    def __init__(self, limits: DirectoryLimits) -> None:
        self.now_s = 1_000.0
        self.directory = MemoryDirectory(lambda: self.now_s, limits)

    def open(self) -> Directory:
        return self.directory

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def close(self) -> None:
        self.directory.check_integrity()


BENCHES: dict[str, Callable[[DirectoryLimits], DirectoryBench]] = {
    "memory": MemoryBench,
    "redis": RedisBench,
}


def chain(name: str, depth: int) -> list[ChunkKey]:
    keys = (hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16) for i in range(depth))
    return [ChunkKey(key.digest()) for key in keys]


def artifact(name: str = "a", index: int = 0, state_type: StateType = KV) -> ArtifactId:
    return ArtifactId(chain(name, index + 1)[index], state_type)


def copy_of(what: ArtifactId, offset: int = 4096, on_ssd: bool = False) -> Copy:
    checksum = hashlib.blake2b(repr(what).encode(), digest_size=16).digest()
    return Copy(1_000, checksum, offset, 7, on_ssd)


def claim_of(what: ArtifactId, offset: int = 4096, on_ssd: bool = False) -> Claim:
    return Claim(what, copy_of(what, offset, on_ssd))


def join(directory: Directory, name: str, storage: str = "", lease_s: float = LEASE_S) -> Lease:
    return directory.register(Worker(name, f"peer of {name}".encode(), storage), lease_s)


def lookup(
    thread: DirectoryThread, deadline_s: float, keys: Sequence[ChunkKey]
) -> Future[ChainView]:
    return thread.ask(lambda directory, _: directory.lookup(keys), deadline_s)


def copies_at(view: ChainView, index: int = 0, state_type: StateType = KV) -> list[ReadableCopy]:
    """Return the copies of one artifact that may be read, the owner's first."""
    record = view.chunks[index].get(state_type)
    return [] if record is None else view.copies_in(record)


def claim(directory: Directory, lease: Lease, *what: ArtifactId) -> list[Grant]:
    return directory.claim_owner(lease.epoch, [claim_of(a) for a in what])
