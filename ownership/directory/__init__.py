"""The directory: the record of who owns each artifact of a fleet, in one process or in Redis.

Read `contract` first: it is the protocol. `generations` is its part for resets, `identifiers` the
numbers that order a fleet, `validation` what every directory refuses. `MemoryDirectory` (`memory`,
with `lease_table` and `memory_chain_users`) is the reference and serves one process; `redis` serves
a fleet and is the only package that imports Redis. `opening` makes one of them from a URL,
`fleet_reset` resets a fleet and waits for its engines.

May import `hetero_connector`'s values (`artifacts`, `spec`) and errors; knows no member, policy or
engine. To add a directory, implement `Directory` and list it in `BENCHES` of
`tests/ownership/fleet_bench.py`: the contract's tests then run on it.
"""

from ownership.directory.contract import (
    CHECKSUM_BYTES,
    ArtifactRecord,
    ChainView,
    ChunkRecords,
    Claim,
    Copy,
    Directory,
    DirectoryLimits,
    EpochStatus,
    Grant,
    GrantOutcome,
    Lease,
    OwnershipDirectory,
    ReadableCopy,
    Replica,
    RetiredEpochError,
    Worker,
    WorkerState,
)
from ownership.directory.identifiers import NO_EPOCH, NO_TOKEN, Epoch, Token
from ownership.directory.memory import MemoryDirectory

__all__ = [
    "CHECKSUM_BYTES",
    "NO_EPOCH",
    "NO_TOKEN",
    "ArtifactRecord",
    "ChainView",
    "ChunkRecords",
    "Claim",
    "Copy",
    "Directory",
    "DirectoryLimits",
    "Epoch",
    "EpochStatus",
    "Grant",
    "GrantOutcome",
    "Lease",
    "MemoryDirectory",
    "OwnershipDirectory",
    "ReadableCopy",
    "Replica",
    "RetiredEpochError",
    "Token",
    "Worker",
    "WorkerState",
]
